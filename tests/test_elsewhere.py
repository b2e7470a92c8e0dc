"""Commands where something is missing: torch, or calls of Linux that Windows and macOS lack.

A ``sitecustomize`` takes it away before ckptkit starts, in worker processes too. No one has run
ckptkit on Windows or macOS: this shows only that nothing depends on what these do not have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, ROOT, Done, Run

NO_TORCH = "import sys; sys.modules['torch'] = None\n"
# What is not there on Windows, as far as an interpreter on Linux can do without it.
WINDOWS = """
import errno, os, shutil, signal, sys
from types import SimpleNamespace
shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40)  # has a call of its own there
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
GONE = [
    "pread", "preadv", "pwrite", "pwritev", "copy_file_range", "sched_getaffinity",
    "statvfs", "fstatvfs", "geteuid", "getuid", "getgid", "getegid", "major", "minor", "fchmod",
    "fchown", "chown", "posix_fadvise", "posix_fallocate",
    "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY",
]
for name in GONE:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "setitimer", "pthread_sigmask"):
    delattr(signal, name)
def link(*args, **more):
    raise OSError(errno.ENOTSUP, "no hard links here")
os.link = link
os.O_BINARY, real = 1 << 30, os.open  # without it, what is written there gets other line ends
def binary(path, flags, *args, **more):
    if flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_BINARY and path != os.devnull:
        raise SystemError(f"{path} is opened as text")
    return real(path, flags & ~os.O_BINARY, *args, **more)
os.open = binary
"""

ONE_BY_ONE = """
import sys
from click.testing import CliRunner
from ckptkit.cli import main
for words in sys.argv[1:]:
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, (words, done.output, done.exception)
"""

Elsewhere = Callable[..., Done]


@pytest.fixture
def elsewhere(tmp_path: Path, alone: Run) -> Elsewhere:
    """``elsewhere(NO_TORCH, "inspect", "run.pth")`` in a folder with run.pth and
    net.safetensors."""
    (tmp_path / "site").mkdir()
    fixtures = ROOT / "fixtures"
    shutil.copy(fixtures / "torch-zip" / "dp_wrapped_cuda1.pth", tmp_path / "run.pth")
    shutil.copy(fixtures / "safetensors" / "net.safetensors", tmp_path / "net.safetensors")

    def invoke(lacking: str, *words: str, program: str = "") -> Done:
        (tmp_path / "site" / "sitecustomize.py").write_text(lacking)
        places = os.pathsep.join((str(tmp_path / "site"), ENVIRONMENT["PYTHONPATH"]))
        if not program:
            return alone(*words, cwd=tmp_path, env={"PYTHONPATH": places})
        environment = {**ENVIRONMENT, "PYTHONPATH": places}
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return invoke


WORK = (
    "inspect run.pth",
    "inspect --json --digest run.pth",
    "strip-module run.pth plain.pth --verify",
    "add-module plain.pth wrapped.pth",
    "remap run.pth cpu.pth --to cpu",
    "rename plain.pth renamed.pth --sub conv=cv",
    "convert run.pth out.safetensors --cast bf16",
    "convert net.safetensors out.pth --cast float64",
    "convert run.pth shards --shard-size 2kB",
    "extract run.pth model.pth --key model",
    "average net.safetensors net.safetensors mean.safetensors",
    "recover run.pth recovered.pth",
    "scan run.pth",
    "verify run.pth --values",
    "digest run.pth",
    "stats run.pth",
    "show net.safetensors conv1.weight",
    "diff net.safetensors net.safetensors --values",
    "report run.pth -o run.html",
    "batch strip-module run.pth --into out",
    "remap run.pth --to cpu --in-place",
    "strip-module run.pth again.pth",
    "env",
    "formats",
)


@pytest.mark.parametrize("lacking", [NO_TORCH, WINDOWS], ids=["torch", "Windows"])
def test_what_works_without(elsewhere: Elsewhere, lacking: str) -> None:
    done = elsewhere(lacking, *WORK, program=ONE_BY_ONE)
    assert done.code == 0, done


@pytest.mark.parametrize(
    "words",
    ["diff run.pth --model net.py:Net", "doctor run.pth --model net.py:Net", "train out.pth"],
)
def test_what_needs_torch_says_so(elsewhere: Elsewhere, words: str) -> None:
    done = elsewhere(NO_TORCH, *words.split())
    assert done.code == 2 and "needs torch" in done.stderr and "pip install torch" in done.stderr


def test_the_doctor_without_torch(elsewhere: Elsewhere, tmp_path: Path) -> None:
    found = json.loads(elsewhere(NO_TORCH, "doctor", "run.pth", "--json").stdout)
    causes = {cause["code"]: cause for cause in found["causes"]}
    assert "cuda:1" in causes["device"]["title"] and "torch" in causes["device"]["title"]
    fixed = elsewhere(NO_TORCH, "doctor", "run.pth", "--fix", "fixed.pth")
    assert fixed.code == 0 and (tmp_path / "fixed.pth").exists()


def test_env_without_torch(elsewhere: Elsewhere) -> None:
    found = json.loads(elsewhere(NO_TORCH, "env", "--json").stdout)
    assert found["torch"] is None and found["devices"].keys() == {"cpu"}
    assert "not installed" in elsewhere(NO_TORCH, "env").stdout


def test_windows_writes_what_linux_writes(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """No bytes depend on which calls of the system there are."""
    for suffix in (".pth", ".safetensors"):
        for name, lacking in (("here", ""), ("there", WINDOWS)):
            done = elsewhere(lacking, "convert", "run.pth", name + suffix)
            assert done.code == 0, done
        here, there = ((tmp_path / name).with_suffix(suffix) for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_windows_does_not_replace(elsewhere: Elsewhere, tmp_path: Path) -> None:
    (tmp_path / "there.pth").write_bytes(b"theirs")
    done = elsewhere(WINDOWS, "convert", "run.pth", "there.pth")
    assert done.code == 2 and (tmp_path / "there.pth").read_bytes() == b"theirs"
