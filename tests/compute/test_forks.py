"""Forked processes: every call once, errors here, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.compute import workers
from ckptkit.compute.operation import Swap
from ckptkit.core.bytesource import (
    ByteSource,
    Derived,
    FileObject,
    LocalFile,
    Memory,
    Range,
    Section,
)
from ckptkit.core.errors import CorruptError
from ckptkit.core.plan import Checksummed, Segment
from ckptkit.publish import copying
from ckptkit.publish.copying import WriteTask, execute
from tests.compute.arranging import view

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone"),
    # that threads of pytest's plugins might hold locks
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

NOISE = np.random.default_rng(3).integers(0, 256, 3 << 20, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a test forks is there when it ends, not even a dead one."""
    forked: list[int] = []
    fork = os.fork

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", noted)
    yield
    assert not [pid for pid in forked if Path(f"/proc/{pid}").exists()]


def in_child(function: Callable[[], None]) -> Callable[[int], list[int]]:
    """A call that does something in forked processes alone."""
    parent = os.getpid()

    def call(number: int) -> list[int]:
        if os.getpid() != parent:
            function()
        return [number, os.getpid()]

    return call


def test_every_call_is_made_once_by_processes_that_take_turns() -> None:
    count = 20_000  # more than fit into a pipe
    found = dict(workers.results(in_child(lambda: None), count, 3))
    assert sorted(found) == list(range(count))
    assert all(number == answer for number, (answer, _) in found.items())
    pids = {pid for _, pid in found.values()}
    assert 1 < len(pids) <= 3 and os.getpid() not in pids


def test_long_answers() -> None:
    found = dict(workers.results(lambda number: [number] * 100_000, 5, 2))
    assert found == {number: [number] * 100_000 for number in range(5)}


def test_there_are_no_more_processes_than_calls() -> None:
    assert dict(workers.results(lambda number: [number], 0, 2)) == {}
    assert len({pid for _, (_, pid) in workers.results(in_child(lambda: None), 1, 4)}) == 1


def test_an_error_is_raised_here() -> None:
    def call(number: int) -> list[int]:
        if number == 7:
            raise CorruptError("cannot be inflated", where="a.pth")
        return [number]

    with pytest.raises(CorruptError, match="cannot be inflated"):
        list(workers.results(call, 100, 2))


def exhausted() -> None:
    raise MemoryError


@pytest.mark.parametrize("end", [exhausted, lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_what_failing_or_killed_processes_had_begun_is_done_here(end: Callable[[], None]) -> None:
    found = dict(workers.results(in_child(end), 30, 2))
    assert found == {number: [number, os.getpid()] for number in range(30)}


def test_one_of_the_processes_is_killed() -> None:
    parent = os.getpid()

    def call(number: int) -> list[int]:
        if number == 3 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return [number, os.getpid()]

    found = dict(workers.results(call, 100, 2))
    assert sorted(found) == list(range(100))
    assert found[3] == [3, parent] and found[99][1] != parent


def test_whoever_wants_no_more_waits_for_nobody() -> None:
    started = time.monotonic()
    with closing(workers.results(in_child(lambda: None), 1_000, 2)) as some:
        next(some)
    with closing(workers.results(in_child(lambda: time.sleep(60)), 2, 2)) as none:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(none)
    assert time.monotonic() - started < 30


def test_without_further_processes_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    found = dict(workers.results(in_child(lambda: None), 3, 2))
    assert found == {number: [number, os.getpid()] for number in range(3)}


def test_processes_end_with_the_one_that_forked_them(tmp_path: Path) -> None:
    program = f"""
import os, time
from ckptkit.compute import workers

def call(number):
    with open({str(tmp_path / "pids")!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(0.2)
    return [number]

list(workers.results(call, 1_000_000, 2))
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 2)
    parent.kill()
    parent.wait()
    until(lambda: not any(is_running(pid) for pid in pids(tmp_path)))


def pids(folder: Path) -> set[int]:
    return set(map(int, (folder / "pids").read_text().split()))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def is_group(number: int) -> bool:
    """Whether a process group has any process."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


# which work they do


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tasks that forked processes got; tasks are small, and there are two cores."""
    found: list[int] = []
    results = workers.results

    def noted(function: Callable[[int], object], count: int, processes: int) -> object:
        found.append(count)
        return results(function, count, processes)

    monkeypatch.setattr(workers, "results", noted)
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(workers, "processors", lambda: 2)
    monkeypatch.setattr(copying, "THREAD_TASK", 100_000)
    monkeypatch.setattr(workers, "FORKED", 1 << 20)
    return found


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    (tmp_path / "in").write_bytes(NOISE)
    return LocalFile(tmp_path / "in")


def swapped(source: ByteSource, count: int) -> list[Segment]:
    """Tensors of 100 KB."""
    places = range(0, count, 100_000)
    return [Derived(Swap(2), (Range(source, at, 100_000),), 100_000) for at in places]


def written(folder: Path, segments: list[Segment]) -> tuple[bytes, dict[int, int]]:
    (folder / "out").write_bytes(b"")
    task = WriteTask(str(folder / "out"), 0, tuple(segments))
    (sums,), _ = execute([task], None, lambda count: None, fork=True)
    return (folder / "out").read_bytes(), sums


def test_they_compute(taken: list[int], file: LocalFile, tmp_path: Path) -> None:
    first, *others = swapped(file, 2_000_000)
    assert isinstance(first, Derived)
    segments: list[Segment] = [b"head", Checksummed(first, 0), *others, Range(file, 5, 50_000)]
    want = np.frombuffer(NOISE, "u2")[:1_000_000].byteswap().tobytes()
    data, sums = written(tmp_path, segments)
    assert data == b"head" + want + NOISE[5:50_005]
    assert taken == [21]
    assert sums == {0: zlib.crc32(want[:100_000])}


def test_a_checksum_of_what_they_turned(
    taken: list[int], file: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptkit.compute import strided_read

    monkeypatch.setattr(strided_read, "LEAST", 1 << 10)
    monkeypatch.setattr(strided_read, "BLOCK", 1 << 16)
    turned = Derived(view(1, (3 << 10, 1 << 10), (1, 3 << 10)), (Range(file, 0, 3 << 20),), 3 << 20)
    data, sums = written(tmp_path, [Checksummed(turned, 4)])
    assert data == np.frombuffer(NOISE, "u1").reshape(1 << 10, -1).T.tobytes()
    assert sums == {4: zlib.crc32(data)}
    assert taken[1:] == [1]


@pytest.mark.parametrize(
    ("wrapped", "count"),
    [
        (lambda file: file, 20),
        (lambda file: Memory(NOISE), 20),
        (lambda file: Section(file, 0, file.size), 20),
        (lambda file: FileObject(BytesIO(NOISE)), 0),
    ],
)
def test_they_read_what_has_no_position(
    wrapped: Callable[[LocalFile], ByteSource], count: int, taken: list[int], file: LocalFile,
    tmp_path: Path,
) -> None:  # fmt: skip
    data, _ = written(tmp_path, swapped(wrapped(file), 2_000_000))
    assert data == np.frombuffer(NOISE, "u2")[:1_000_000].byteswap().tobytes()
    assert sum(taken) == count


def test_little_work_and_copies_need_no_processes(
    taken: list[int], file: LocalFile, tmp_path: Path
) -> None:
    written(tmp_path, [*swapped(file, 1_000_000), Checksummed(Range(file, 0, 3 << 20), 0)])
    assert taken == []


def test_no_process_is_forked_beside_threads() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not workers.can_fork()
    end.set()
    thread.join()


# through commands

# Forks for little work, with two processors, and notes each fork; a forked process that begins to
# write sends a signal to all of the command's processes, if one is given.
COMMAND = """
import os, signal, sys, time
from ckptkit.compute import workers
from ckptkit.publish import copying

sent = sys.argv.pop()
parent, fork, run = os.getpid(), os.fork, copying.run

def noted():
    with open("forks", "a") as file:
        file.write(".")
    return fork()

def interrupted(*args):
    if sent and os.getpid() != parent:
        os.killpg(0, getattr(signal, sent))
        time.sleep(1)
    return run(*args)

os.fork, copying.run = noted, interrupted
workers.FORKED = copying.THREAD_TASK = 1 << 16
workers.processors = lambda: 2
from ckptkit.cli import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {f"w{number}": torch.full((50_000,), float(number)) for number in range(8)}
    save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path


def command(folder: Path, *arguments: str, sent: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, sent],
        cwd=folder,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


CAST = ("convert", "in.safetensors", "out.safetensors", "--cast", "bfloat16")


@pytest.mark.parametrize(
    ("options", "count"),
    [((), 2), (("--workers", "1"), 0), (("--workers", "0"), 0), (("--progress",), 2)],
)
def test_a_command_forks_unless_it_is_told_how_many_workers(
    options: tuple[str, ...], count: int, folder: Path
) -> None:
    with command(folder, *CAST, *options) as child:
        _, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    forked = folder / "forks"
    assert len(forked.read_text() if forked.exists() else "") == count
    found = load_file(folder / "out.safetensors")
    for n in range(8):
        assert torch.equal(found[f"w{n}"], torch.full((50_000,), n, dtype=torch.bfloat16))


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_ends_all_processes_and_leaves_nothing(sent: str, folder: Path) -> None:
    with command(folder, *CAST, sent=sent) as child:
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said.strip()) == (130, "error: interrupted")
    until(lambda: not is_group(child.pid))
    assert sorted(os.listdir(folder)) == ["forks", "in.safetensors"]
