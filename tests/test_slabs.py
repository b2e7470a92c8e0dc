"""Large transposes in blocks: the same bytes as numpy, each read once, in fixed memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.compute import strided_read
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range
from ckptkit.core.errors import InputChangedError
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, OutputFile
from ckptkit.publish import copying
from ckptkit.publish.copying import WriteTask, cut
from ckptkit.publish.publish import _compare
from tests.compute.arranging import boxes, view

Shape = tuple[int, ...]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "LEAST": 1, "BLOCK": 6_000, "COLUMNS": 40, "PAGE": 32, "_AT_ONCE": 7, "LINE": 16, "EXACT": 1,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(strided_read, name, value)
    monkeypatch.setattr(copying, "TASK", 10_000)


class Counting(LocalFile):
    count = 0

    def read(self, offset: int, length: int) -> bytes:
        Counting.count += length
        return super().read(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        Counting.count += len(buffer)
        super().read_into(offset, buffer)

    def read_rows(self, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        Counting.count += sum(map(len, rows))
        super().read_rows(offset, step, rows)


def source(folder: Path, *shape: int, itemsize: int = 2) -> tuple[Range, np.ndarray]:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    (folder / "in").write_bytes(b"head" + data.tobytes())
    Counting.count = 0
    return Range(Counting(folder / "in"), 4, data.nbytes), data


def turned(extent: Range, rows: int, columns: int, itemsize: int = 2) -> Derived:
    return Derived(view(itemsize, (columns, rows), (1, columns)), (extent,), extent.length)


def written(folder: Path, segments: list[Any]) -> bytes:
    path = folder / "out"
    path.write_bytes(b"")
    with ThreadPoolExecutor(2) as threads:
        task = WriteTask(str(path), 0, tuple(segments))
        (sums,), _ = copying.execute([task], threads, lambda count: None)
    _compare(str(path), OutputFile("", tuple(segments)), sums)
    return path.read_bytes()


def written_in_order(folder: Path, made: Derived, size: int) -> bytes:
    """By tasks of a size, one after another."""
    path = folder / "out"
    path.write_bytes(b"")
    for task in cut(WriteTask(str(path), 0, (made,)), size):
        copying.run(task)
    return path.read_bytes()


MATRICES = [(70, 33), (33, 70), (64, 64), (301, 5), (3, 500), (50, 2), (50, 3), (50, 4)]
# The shape of the source, and the order in which its axes are read.
VIEWS: list[tuple[Shape, Shape]] = [
    *((shape, (1, 0)) for shape in MATRICES),
    ((4, 30, 20), (0, 2, 1)),  # matrices one after another
    ((40, 2, 300), (1, 0, 2)),  # no transpose: its parts are tasks
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("shape", "order"), VIEWS)
def test_a_view_is_written_as_numpy_copies_it(
    itemsize: int, shape: Shape, order: Shape, tmp_path: Path
) -> None:
    extent, data = source(tmp_path, *shape, itemsize=itemsize)
    expected = data.transpose(*order, len(order)).tobytes()
    steps = tuple(each // itemsize for each in data.strides)
    sizes, strides = (tuple(each[axis] for axis in order) for each in (shape, steps))
    made = Derived(view(itemsize, sizes, strides), (extent,), extent.length)
    assert (len(strided_read.blocks(made)) >= 1) == (order[-1] != len(order) - 1)
    sums = ChecksumPlaceholder(bytes(4), ((0, 1),))
    assert written(tmp_path, [b"x" * 7, Checksummed(made, 1), sums]) == (
        b"x" * 7 + expected + zlib.crc32(expected).to_bytes(4, "little")
    )
    assert b"".join(stream(made)) == expected


@pytest.mark.usefixtures("small_blocks")
def test_three_transposes_side_by_side(tmp_path: Path) -> None:
    extent, data = source(tmp_path, 3, 50, 60)
    places = tuple(((0, 50 * n), (60, 50), (1, 60), n * 3_000) for n in range(3))
    made = Derived(boxes(2, (60, 150), places), (extent,) * 3, extent.length)
    assert len(strided_read.blocks(made)) >= 3
    expected = np.concatenate(data.transpose(0, 2, 1, 3), axis=1).tobytes()
    assert written(tmp_path, [made]) == expected


@pytest.mark.usefixtures("small_blocks")
def test_each_byte_is_read_once(tmp_path: Path) -> None:
    extent, data = source(tmp_path, 70, 33)
    expected = data.transpose(1, 0, 2).tobytes()
    assert written_in_order(tmp_path, turned(extent, 70, 33), 1_000) == expected
    assert Counting.count == extent.length


def test_many_small_matrices_side_by_side(tmp_path: Path) -> None:
    """Each is small, and the rows of the target are long: in order, all would be read for each
    tile."""
    extent, data = source(tmp_path, 64, 96, 2_048)
    places = tuple(((0, 96 * n), (2_048, 96), (1, 2_048), n * 96 * 2_048) for n in range(64))
    made = Derived(boxes(2, (2_048, 96 * 64), places), (extent,) * 64, extent.length)
    (block,) = strided_read.blocks(made)
    assert (block.rows, block.size) == (96 * 64, extent.length)  # rows of 12 kB in one call
    expected = np.concatenate(data.transpose(0, 2, 1, 3), axis=1).tobytes()
    assert written_in_order(tmp_path, made, 1 << 22) == expected
    assert Counting.count == extent.length


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("rows", "columns"), [(70, 33), (33, 70)])
def test_a_file_that_becomes_shorter_is_an_error(rows: int, columns: int, tmp_path: Path) -> None:
    """Whether rows are read by one call or one by one."""
    extent, _ = source(tmp_path, rows, columns)
    os.truncate(tmp_path / "in", extent.length - 100)
    with pytest.raises(InputChangedError, match="became shorter while it was read"):
        written(tmp_path, [turned(extent, rows, columns)])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("system", [1, 7, 100, "preadv", "pwritev"])
def test_a_system_that_writes_less_or_has_no_vectors(
    system: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwritev(fd: int, rows: Sequence[memoryview], place: int) -> int:
        return os.pwrite(fd, b"".join(rows)[:system], place)

    extent, data = source(tmp_path, 70, 33)
    if isinstance(system, str):
        monkeypatch.delattr(os, system)
    else:
        monkeypatch.setattr(os, "pwritev", pwritev)
    expected = b"xyz" + data.transpose(1, 0, 2).tobytes()
    assert written(tmp_path, [b"xyz", turned(extent, 70, 33)]) == expected


def test_the_shape_of_blocks() -> None:
    """Whole columns or whole rows where they fit, for these follow each other in the file."""
    source = Range(Memory(b""), 0, 0)

    def shape(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
        steps = columns * itemsize, rows * itemsize
        matrix = strided_read.Matrix(source, 0, 0, rows, columns, *steps, itemsize)
        block = next(strided_read._cut(matrix, 0))
        return block.rows, block.columns

    assert shape(8_192, 65_536, 2) == (8_192, 3_072)
    assert shape(128_256, 1_024, 2) == (21_376, 1_024)
    for rows, columns, itemsize in [(128_256, 4_096, 2), (32_768, 32_768, 1), (9, 10**9, 4)]:
        height, width = shape(rows, columns, itemsize)
        size = height * width * itemsize
        assert strided_read.BLOCK // 2 < size <= strided_read.BLOCK or height == rows


@pytest.mark.parametrize(("itemsize", "at"), [*product((1, 2, 4), (0, 120, 4095))])
def test_blocks_end_where_pages_of_the_file_end(itemsize: int, at: int) -> None:
    rows, columns = 65_536, 8_192
    extent = Range(Memory(b""), 0, rows * columns * itemsize)
    blocks = strided_read.blocks(turned(extent, rows, columns, itemsize), at)
    matrices = [matrix for block in blocks for matrix in block.parts]
    later = [matrix for matrix in matrices if matrix.place % (rows * itemsize)]
    assert later and len(later) < len(matrices)
    assert {(at - at % itemsize + matrix.place) % strided_read.PAGE for matrix in later} == {0}
    assert sum(matrix.size for matrix in matrices) == extent.length
    assert max(matrix.size for matrix in matrices) <= strided_read.BLOCK


def test_columns_that_begin_anywhere_in_a_page_are_cut_evenly() -> None:
    rows, columns = 65_537, 8_192
    extent = Range(Memory(b""), 0, rows * columns)
    made = strided_read.blocks(turned(extent, rows, columns, 1), 120)
    heights = {block.parts[0].place % rows: block.rows for block in made}
    assert sum(heights.values()) == rows
    assert max(heights.values()) - min(heights.values()) < len(heights)


def test_what_is_no_large_transpose(tmp_path: Path) -> None:
    extent, _ = source(tmp_path, 8, 8)
    assert strided_read.blocks(extent) == []
    assert strided_read.blocks(turned(extent, 8, 8)) == []
    large = Derived(view(2, (4096, 2, 4096), (8192, 4096, 1)), (extent,), 1 << 26)
    assert strided_read.blocks(large) == []


@pytest.mark.parametrize("rows", [40, 3_000])
def test_tiles_of_a_transpose_read_little_twice(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, as a checksum or a pipe needs it."""
    monkeypatch.setattr(strided_read, "TILE", 100_000)
    monkeypatch.setattr(strided_read, "LARGE", 4_000_000)
    extent, data = source(tmp_path, rows, 2_000)
    made = turned(extent, rows, 2_000)
    assert b"".join(stream(made)) == data.transpose(1, 0, 2).tobytes()
    assert Counting.count <= 2 * extent.length


@pytest.mark.usefixtures("small_blocks")
def test_parts_of_a_gather_are_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided_read, "TILE", 4_096)
    extent = Range(Memory(b""), 0, 48_000)
    made = Derived(view(2, (2, 40, 300), (300, 600, 1)), (extent,), extent.length)
    tasks = list(cut(WriteTask("x", 0, (made,)), 8_192))
    assert len(tasks) > 4
    assert [task.start for task in tasks] == [0, *np.cumsum([task.size for task in tasks])[:-1]]
