"""ckptkit under strace, which ends it, interrupts it or lets it fail at any call of the system that
it makes."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import COMMAND, ENVIRONMENT, ROOT, Done

READS = ("pread64", "preadv", "preadv2")
CHANGES = (
    "openat", "write", "copy_file_range", "ftruncate", "fsync", "close", "chmod", "fchmod", "mkdir", "link",
    "rename", "unlink", "rmdir",
)  # fmt: skip
# The same calls each time: no byte code is written on the way, and a byte more or less of a path
# changes nothing.
ALIKE = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
COPY, HOUR = "preadv,preadv2", 3_600_000_000  # microseconds
LEFT = re.compile(r"\.{1,2}[^/]*\.ckptkit-[0-9]+-[0-9a-f]{16}\.tmp")


class Call(NamedTuple):
    """The `number`-th call of this name that a process makes, from 1, and how strace shows it."""

    name: str
    number: int
    shown: str


@cache
def has_strace() -> bool:
    program = shutil.which("strace")
    command = [program or "strace", "-qq", "-o", os.devnull, "true"]
    return program is not None and not subprocess.run(command, capture_output=True).returncode


def needs_strace() -> None:
    """Skips the test where processes cannot be traced."""
    if not has_strace():
        pytest.skip("needs strace, and the right to trace: Linux only")


@cache
def _compile_the_package() -> None:
    """Write all its byte code, so that no process of another test does between two counts of calls."""
    assert compileall.compile_dir(ROOT / "ckptkit", quiet=1)


def traced(arguments: Sequence[object], cwd: Path, *options: str) -> Done:
    """ckptkit in `cwd` under strace with `options`; the code of a process that was killed is minus
    its signal."""
    _compile_the_package()
    signals = any("signal=" in each for each in options)  # which --seccomp-bpf does not inject
    quick = [] if signals else ["--seccomp-bpf"]
    strace = ["strace", "-f", "-qq", *quick, *options]
    command = [*strace, *COMMAND, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=ALIKE, capture_output=True, encoding="utf-8", timeout=120
    )
    return Done(done.returncode, done.stdout, done.stderr)


def calls(arguments: Sequence[object], cwd: Path, names: Sequence[str] = CHANGES) -> list[Call]:
    """Return the calls of ckptkit about files in `cwd`: reads of these names, and all after a
    change."""
    log = cwd.with_name(f"{cwd.name}.log")
    done = traced(arguments, cwd, "-y", "-o", str(log), "-e", f"trace={','.join(names)}")
    assert done.code == 0, done.stderr
    count: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        shown = line.partition(" ")[2].strip()  # after the number of the process
        name = shown.partition("(")[0]
        count[name] += 1
        about = shown.replace(f"AT_FDCWD<{cwd}>", "")
        if (f"{cwd}/" in about or f"<{cwd}>" in about) and "O_RDONLY" not in shown:
            found.append(Call(name, count[name], about))
    return list(dropwhile(lambda call: call.name == "close", found))


def injected(arguments: Sequence[object], cwd: Path, call: Call, what: str) -> Done:
    """ckptkit with `what` (``signal=KILL``, ``error=EIO``) injected at a call."""
    inject = f"inject={call.name}:{what}:when={call.number}"
    return traced(arguments, cwd, "-o", os.devnull, "-e", f"trace={call.name}", "-e", inject)


@contextmanager
def held(arguments: Sequence[object], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """ckptkit held at its first long read, and going on at the end of the block.

    With -D, strace is a child of the command: when it is killed, the command goes on.
    """
    options = ["-D", "-qq", "-o", os.devnull, "-e", f"inject={COPY}:delay_enter={HOUR}:when=1"]
    child = subprocess.Popen(
        ["strace", *options, *COMMAND, *map(str, arguments)], cwd=cwd, env=ALIKE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while child.poll() is None and not any(
            path.stat().st_size for path in map(cwd.joinpath, leftovers(cwd))
        ):
            time.sleep(0.005)
        yield child
    finally:
        if child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            tracer = int(status.partition("TracerPid:")[2].split()[0])
            assert tracer  # 0 would be this process and its relatives
            os.kill(tracer, signal.SIGKILL)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes; an empty folder as none."""
    return {
        path.relative_to(folder).as_posix(): b"" if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def leftovers(folder: Path) -> list[str]:
    """Temporaries directly in a folder."""
    return [name for name in os.listdir(folder) if LEFT.fullmatch(name)]
