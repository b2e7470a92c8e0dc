"""The engine: every kind of segment, every way to copy, short counts, checksums, threads and
processes."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.compute.operation import Concat, Inflate, Swap
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range, crc32_combine
from ckptkit.core.errors import CorruptError, InputChangedError, OutputError
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment, length
from ckptkit.publish import copying
from ckptkit.publish.copying import BLOCK, SHORT, ReadAhead, WriteTask, cut, execute, run

NOISE = np.random.default_rng(7).integers(0, 256, 3 << 20, np.uint8).tobytes()


@pytest.fixture
def source(tmp_path: Path) -> LocalFile:
    path = tmp_path / "source"
    path.write_bytes(NOISE)
    return LocalFile(path)


def every_kind(source: LocalFile) -> tuple[tuple[Segment, ...], bytes]:
    """All kinds of segments, short and long, and the bytes that they stand for."""
    memory = Memory(NOISE[::-1])
    swapped = np.frombuffer(NOISE, "u2").byteswap().tobytes()
    segments: tuple[Segment, ...] = (
        b"head",
        ChecksumPlaceholder(b"sums:....,....", ((5, 1), (10, 0))),
        Range(source, 10, 200),
        Range(source, 5, 1 << 20),
        b"",
        Range(memory, 7, 100),
        Range(memory, 9, 100_000),
        Range(source, 0, 0),
        Derived(Swap(2), (Range(source, 0, 600),), 600),
        Derived(Swap(2), (Range(source, 0, 1 << 20),), 1 << 20),
        Checksummed(Range(source, 100, 2 << 20), 0),
        Checksummed(Range(source, 3, 30), 0),
        Checksummed(Range(memory, 0, 50_000), 1),
        Checksummed(Derived(Swap(2), (Range(source, 0, 80_000),), 80_000), 1),
        Checksummed(Derived(Swap(2), (Range(source, 0, 80),), 80), 1),
        ChecksumPlaceholder(b"plain", ()),
        ChecksumPlaceholder(b"....", ((0, 1),)),
        Derived(
            Concat(),
            (Range(source, 0, 90_000), Range(memory, 0, 10), Range(source, 7, 90_000)),
            180_010,
        ),
        Checksummed(Derived(Concat(), (Range(source, 1, 90_000), Range(memory, 0, 9)), 90_009), 2),
        ChecksumPlaceholder(b"....", ((0, 2),)),
    )
    first = NOISE[100 : 100 + (2 << 20)] + NOISE[3:33]
    second = NOISE[::-1][:50_000] + swapped[:80_000] + swapped[:80]
    third = NOISE[1:90_001] + NOISE[::-1][:9]
    zero, one = zlib.crc32(first).to_bytes(4, "little"), zlib.crc32(second).to_bytes(4, "little")
    want = (
        b"head" + b"sums:" + one + b"," + zero
        + NOISE[10:210] + NOISE[5 : 5 + (1 << 20)] + NOISE[::-1][7:107] + NOISE[::-1][9:100_009]
        + swapped[:600] + swapped[: 1 << 20] + first + second + b"plain" + one
        + NOISE[:90_000] + NOISE[::-1][:10] + NOISE[7:90_007] + third + zlib.crc32(third).to_bytes(4, "little")
    )  # fmt: skip
    return segments, want


def written(
    segments: Sequence[Segment],
    tmp_path: Path,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> bytes:
    path = tmp_path / "output"
    path.write_bytes(b"")
    execute([WriteTask(str(path), 0, tuple(segments))], executor, progress)
    return path.read_bytes()


def test_every_kind_of_segment(source: LocalFile, tmp_path: Path) -> None:
    """Progress counts every byte once."""
    segments, want = every_kind(source)
    with ThreadPoolExecutor(2) as threads:
        for executor in (None, threads):
            told: list[int] = []
            assert written(segments, tmp_path, executor, told.append) == want
            assert sum(told) == len(want)


@pytest.mark.parametrize(
    ("place", "offset", "length", "is_copied"),
    [
        (0, 0, 1 << 20, True),
        (96, BLOCK + 96, 1 << 20, True),
        (96, 97, 1 << 20, False),
        (96, BLOCK, 1 << 20, False),
        (0, 0, SHORT - 1, False),
    ],
)
def test_the_kernel_copies_what_keeps_its_place_in_a_block(
    place: int,
    offset: int,
    length: int,
    is_copied: bool,
    source: LocalFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    copy = os.copy_file_range

    def noted(src: int, dst: int, count: int, offset: int) -> int:
        calls.append(count)
        return copy(src, dst, count, offset)

    monkeypatch.setattr(os, "copy_file_range", noted)
    progress: list[int] = []
    segments = [b"x" * place, Range(source, offset, length)]
    wanted = b"x" * place + NOISE[offset : offset + length]
    assert written(segments, tmp_path, progress=progress.append) == wanted
    assert sum(progress) == place + length
    assert calls == [length] * is_copied


def test_several_files_have_checksums_of_their_own(source: LocalFile, tmp_path: Path) -> None:
    files = []
    for number in range(3):
        path = tmp_path / str(number)
        path.touch()
        segments = (
            ChecksumPlaceholder(bytes(4), ((0, 0),)),
            Checksummed(Range(source, number, 1000), 0),
        )
        files.append(WriteTask(str(path), 0, segments))
    sums, _ = execute(files, None, lambda count: None)
    for number, file in enumerate(files):
        data = NOISE[number : number + 1000]
        assert Path(file.path).read_bytes() == zlib.crc32(data).to_bytes(4, "little") + data
        assert sums[number] == {0: zlib.crc32(data)}


def refuse(code: int) -> Callable[..., int]:
    def call(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_where_the_kernel_does_not_copy(
    code: int | None, source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the system has no such calls."""
    if code is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse(code), raising=False)
    for name in ("copy_file_range", "preadv") if code is None else ():
        monkeypatch.delattr(os, name, raising=False)
    segments, want = every_kind(source)
    assert written(segments, tmp_path) == want


def test_another_failure_is_not_worked_around(
    source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EIO), raising=False)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        written([Range(source, 0, 1 << 20)], tmp_path)


@pytest.mark.parametrize("name", ["copy_file_range", "preadv", "write"])
def test_DS_08_short_counts(
    name: str, source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, name):
        pytest.skip(f"no os.{name} here")
    real: Callable[..., int] = getattr(os, name)

    def short(*args: Any) -> int:
        if name == "copy_file_range":
            return real(args[0], args[1], min(args[2], 70_001), args[3])
        if name == "preadv":
            return real(args[0], [args[1][0][:70_001]], args[2])
        return real(args[0], memoryview(args[1])[:70_001])

    monkeypatch.setattr(os, name, short)
    segments, want = every_kind(source)
    assert written(segments, tmp_path) == want


@pytest.mark.parametrize("is_copied", [True, False])
def test_DS_17_a_source_that_became_shorter(
    is_copied: bool, source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_copied:
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV), raising=False)
    os.truncate(source.path, 1 << 20)
    with pytest.raises(InputChangedError):
        written([Range(source, 0, 2 << 20)], tmp_path)


# tasks


@pytest.mark.parametrize("size", [1, 1000, 70_000, 1 << 30])
def test_tasks_are_independent(size: int, source: LocalFile, tmp_path: Path) -> None:
    segments, want = every_kind(source)
    if size == 1:  # a task for each byte would be millions: a shorter plan
        segments, want = (b"ab", Range(source, 0, 100), b"c"), b"ab" + NOISE[:100] + b"c"
    path = tmp_path / "output"
    path.touch()
    whole = WriteTask(str(path), 0, segments)
    tasks = list(cut(whole, size))
    assert sum(task.size for task in tasks) == len(want)
    sums = {}
    for task in reversed(tasks):
        sums[task.start] = run(pickle.loads(pickle.dumps(task))).sums
    known = copying.combined(each for start in sorted(sums) for each in sums[start])
    copying._fill(whole, known)
    assert path.read_bytes() == want


@pytest.mark.parametrize(("offset", "files", "tasks"), [(BLOCK, 2, 2), (5, 1, 60), (5, 2, 120)])
def test_threads_share_what_the_kernel_does_not_copy(
    offset: int,
    files: int,
    tasks: int,
    source: LocalFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[WriteTask] = []
    monkeypatch.setattr(copying, "THREAD_TASK", 50_000)

    def noted(
        task: WriteTask, progress: copying.Progress = lambda count: None
    ) -> copying.TaskResult:
        taken.append(task)
        return run(task, progress)

    monkeypatch.setattr(copying, "run", noted)
    paths = [tmp_path / str(number) for number in range(files)]
    for path in paths:
        path.touch()
    segments = (Range(source, offset, 3_000_000),)
    execute([WriteTask(str(path), 0, segments) for path in paths], None, lambda count: None)
    assert all(path.read_bytes() == NOISE[offset : offset + 3_000_000] for path in paths)
    assert len(taken) == tasks


def test_a_failing_task_ends_the_others(
    source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "THREAD_TASK", 50_000)
    damaged = Derived(Inflate(), (Range(source, 0, 1000),), 1000)
    with pytest.raises(CorruptError):
        written([Checksummed(Range(source, 0, 1 << 20), 0), damaged], tmp_path)


def test_processes_carry_out_a_plan(
    source: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "TASK", 500_000)
    segments, want = every_kind(source)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        assert written(segments, tmp_path, processes) == want
        Path(source.path).write_bytes(b"another file")
        with pytest.raises(OutputError, match="a worker process ended"):
            written(segments, tmp_path, processes)


def test_a_task_is_no_larger_than_it_needs_to_be(source: LocalFile) -> None:
    segments = (Range(source, 0, 3 << 20), Checksummed(Range(source, 0, 3 << 20), 0))
    sizes = [task.size for task in cut(WriteTask("x", 0, segments), 1 << 20)]
    assert sizes == [1 << 20] * 6
    assert [WriteTask("x", 0, (b"abc",)).size, length(b"abc")] == [3, 3]


# reading ahead


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, len(NOISE) - 40_000), st.integers(0, 40_000)), max_size=30)
)
def test_reading_ahead_gives_what_is_there(ranges: list[tuple[int, int]]) -> None:
    sources = itertools.cycle([Memory(NOISE), Memory(NOISE)])
    ahead = ReadAhead()
    for offset, count in ranges:
        assert ahead.read(next(sources), offset, count) == NOISE[offset : offset + count]


@pytest.mark.parametrize(("step", "reads"), [(264, 12), (100_000, 40)])
def test_reading_ahead_pays_for_ranges_that_follow_each_other(
    step: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that are far apart are read with little more."""
    source, ahead = Memory(NOISE), ReadAhead()
    lengths: list[int] = []
    read = source.read
    monkeypatch.setattr(
        source, "read", lambda at, length: lengths.append(length) or read(at, length)
    )
    for offset in range(0, len(NOISE) - 200, step):
        ahead.read(source, offset, 200)
    assert len(lengths) < reads
    assert max(lengths) <= (copying.WINDOW if step < copying.NEARBY else copying.NEARBY)


# checksums


@pytest.mark.parametrize("size", [0, 1, 255, 65_536, 3 << 20])
def test_combined_checksums_of_long_runs(size: int) -> None:
    first, second = NOISE[:1000], NOISE[:size]
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(first + second)
