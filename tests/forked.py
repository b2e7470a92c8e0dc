"""Programs in forks of a process that has imported torch and did nothing else.

A new process imports torch for two seconds. Use one where the start is tested, or peak memory.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.device_mesh", "safetensors.torch"])


class Ended(NamedTuple):
    """The exit code of a program and all that it printed."""

    returncode: int
    output: str


def program(source: str, *words: object, cwd: Path, seconds: int = 120) -> Ended:
    """Run a program as ``python -c SOURCE WORD...`` does."""
    return forked(_program, source, *map(str, words), cwd=cwd, seconds=seconds)


def _program(source: str, *words: str) -> None:
    sys.argv = ["-c", *words]
    sys.path.insert(0, "")
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(main))


def forked(work: Callable[..., object], *words: object, cwd: Path, seconds: int = 120) -> Ended:
    """Call ``work(*words)``; `work` is a function of a module."""
    from tests.conftest import ENVIRONMENT  # which the fork does without

    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        child = SERVER.Process(
            target=_run, args=(output.name, cwd, ENVIRONMENT, seconds, work, words)
        )
        child.start()
        child.join()
        assert child.exitcode is not None
        return Ended(child.exitcode, output.read())


def _run(
    output: str,
    cwd: Path,
    environment: dict[str, str],
    seconds: int,
    work: Callable[..., object],
    words: tuple[object, ...],
) -> None:
    signal.alarm(seconds)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    with open(output, "w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        code = 0
        try:
            work(*words)
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else int(done.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        file.flush()
        os._exit(code)
