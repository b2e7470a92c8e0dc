"""Shared fixtures: the corpus of real files, the command line, tags of an absent GPU."""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, chdir, suppress
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

import ckptkit
from ckptkit.core.bytesource import LocalFile
from tests.hint_replay import keep, keep_all
from tests.slow import is_slow, may_be_slow, unmatched

# Bytecode is kept, whatever the environment says: else each of some thousand commands compiles the
# package anew, which doubles its time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Each process computes with one thread: there is a process for each core, and sums have one order.
os.environ["OMP_NUM_THREADS"] = "1"
# A property holds on a busy machine too.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# Nothing waits for the disk. What is flushed when is tested by the calls, or in other processes.
os.fsync = os.fstat  # type: ignore[assignment]
# Children inherit the signals that are ignored, as SIGINT is in the background of a shell.
for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "ckptkit"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect 14,000 cases without garbage collection, of which nothing comes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def own_heap() -> Generator[None, None, None]:
    """Keep the garbage collector from looking at what other tests left: it counts as their time."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the files that have slow cases for `-m slow`."""
    is_test = fnmatch(collection_path.name, "test_*.py")
    only_slow = config.getoption("markexpr") == "slow" and not config.getoption("file_or_dir")
    return True if only_slow and is_test and not may_be_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow cases of large matrices, before `-m` selects."""
    are_whole = not any("::" in argument for argument in config.args)
    missing = unmatched(item.nodeid for item in items) if are_whole else []
    if missing:
        raise pytest.UsageError(f"tests/slow.py names cases that are gone: {missing}")
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def whole_package() -> None:
    """Import every module before a test replaces a value for a while.

    A module that is imported meanwhile would take that value and keep it for the tests to come.
    """
    for each in pkgutil.walk_packages(ckptkit.__path__, "ckptkit."):
        if not each.name.endswith("__main__"):
            with suppress(ImportError):  # an extra that is not installed
                import_module(each.name)


@pytest.fixture(scope="session", autouse=True)
def kept_hints() -> None:
    """Keep the commands that messages print, for tests/hint_replay.py."""
    keep_all()


@pytest.fixture(scope="session", autouse=True)
def every_warning() -> None:
    """Let torch warn each time, not once in a process: no test depends on those before it."""
    torch.set_warn_always(True)


class Done(NamedTuple):
    """The result of a command."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]
Ok = Callable[..., str]


class LossScaler:
    """Stands for DeepSpeed's own, which the tests do without."""


# What torch may make under weights_only: in files of the corpus, and in what is made of
# DeepSpeed's.
SAFE: list[Any] = [Namespace, (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler")]


class Corpus:
    """Real checkpoint files: ``corpus / "name"`` is the path of one, or skips the test if it is not
    there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            pytest.skip(f"{name} is not in the folder CKPTKIT_CORPUS")
        return path


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """The folder that CKPTKIT_CORPUS names; skips the test where it is not set."""
    folder = os.environ.get("CKPTKIT_CORPUS")
    if not folder:
        pytest.skip("CKPTKIT_CORPUS is not set: no corpus of real files")
    if not os.path.isdir(folder):
        pytest.skip(f"CKPTKIT_CORPUS={folder} is not a folder")
    return Corpus(Path(folder))


@pytest.fixture(scope="session")
def run() -> Run:
    """``run("inspect", path)``: ckptkit in this process, where torch is imported once."""
    from click.testing import CliRunner

    from ckptkit.cli import main

    def command(*args: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
        with chdir(cwd or "."):
            result = CliRunner().invoke(main, [*map(str, args)], env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return command


@pytest.fixture(scope="session")
def ok(run: Run) -> Ok:
    """``ok("inspect", path)``: what the command prints. Its exit code is 0."""

    def command(*args: object, **given: Any) -> str:
        done = run(*args, **given)
        assert done.code == 0, done.stderr or done.stdout
        return done.stdout

    return command


@pytest.fixture(scope="session")
def alone() -> Run:
    """The same in a process of its own, as a person would call it: start, environment, exit."""

    def command(*args: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [*COMMAND, *map(str, args)],
            capture_output=True,
            encoding="utf-8",
            cwd=cwd,
            env={**ENVIRONMENT, **(env or {})},
            timeout=120,
        )
        keep(f"{done.stdout}\n{done.stderr}", args, cwd)
        return Done(done.returncode, done.stdout, done.stderr)

    return command


@pytest.fixture
def in_process(run: Run) -> Run:
    """The fixture `run`."""
    return run


@pytest.fixture(scope="session")
def simulated_cuda() -> Callable[..., AbstractContextManager[None]]:
    """``with simulated_cuda(1): torch.save(...)`` tags every storage ``cuda:1``, without a GPU."""
    from fixtures.making.devices import simulated_cuda

    return simulated_cuda


def tags(path: Path, weights_only: bool = True) -> set[str]:
    """The devices that torch finds in a file of its own."""
    import torch

    found: set[str] = set()

    def see(storage: Any, tag: str) -> Any:
        found.add(tag)
        return storage

    with torch.serialization.safe_globals(SAFE):
        torch.load(path, weights_only=weights_only, map_location=see)
    return found


@pytest.fixture
def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a local file from now on."""
    lengths: list[int] = []
    original = LocalFile.read

    def counted(source: LocalFile, offset: int, length: int) -> bytes:
        lengths.append(length)
        return original(source, offset, length)

    original_into = LocalFile.read_into

    def counted_into(source: LocalFile, offset: int, buffer: memoryview) -> None:
        lengths.append(len(buffer))
        original_into(source, offset, buffer)

    monkeypatch.setattr(LocalFile, "read", counted)
    if hasattr(os, "preadv"):  # else it reads as above
        monkeypatch.setattr(LocalFile, "read_into", counted_into)
    return lengths
