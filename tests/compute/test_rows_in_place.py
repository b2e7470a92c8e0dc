"""Boxes whose rows are read where they belong, against numpy's own joining."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptkit.compute.operation import stream
from ckptkit.compute.strided_read import BAND, ROW, WIDEST, Arrange, Column
from ckptkit.compute.strided_read import columns as columns_of
from ckptkit.core.bytesource import Derived, LocalFile, Range
from ckptkit.core.errors import TruncatedError
from tests.compute.arranging import boxes as array_of
from tests.conftest import ENVIRONMENT


def joined(parts: list[np.ndarray], folder: Path, axis: int) -> Derived:
    """The parts, each in a file, along an axis: as a Derived of boxes."""
    boxes, inputs, at = [], [], 0
    for number, part in enumerate(parts):
        path = folder / f"{number}.bin"
        path.write_bytes(b"head" + part.tobytes())
        inputs.append(Range(LocalFile(path), 4, part.nbytes))
        offsets = tuple(at if each == axis else 0 for each in range(part.ndim))
        strides = tuple(each // part.itemsize for each in part.strides)
        boxes.append((offsets, part.shape, strides, 0))
        at += part.shape[axis]
    whole = np.concatenate(parts, axis)
    array = array_of(whole.itemsize, whole.shape, boxes)
    return Derived(array, tuple(inputs), whole.nbytes)


def columns(derived: Derived) -> list[Column]:
    array = derived.operation
    assert isinstance(array, Arrange)
    return columns_of(array, derived.inputs, derived.length // array.itemsize)


@pytest.mark.parametrize("unit", ["u1", "u2", "u4", "c16"])
@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(1500, ROW), (1500, ROW + 8)], 1),
        ([(3, 5, ROW), (3, 5, 2 * ROW)], 2),
        ([(3, 700, 3), (3, 900, 3)], 1),
        ([(4, ROW), (9, ROW)], 0),
        ([(40, ROW // 64), (40, ROW)], 1),
        ([(0, ROW), (2, ROW)], 0),
    ],
)
def test_as_numpy_joins(
    unit: str, shapes: list[tuple[int, ...]], axis: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    parts = []
    for shape in shapes:
        count = int(np.prod(shape)) * np.dtype(unit).itemsize
        parts.append(random.integers(0, 256, count, np.uint8).view(unit).reshape(shape))
    derived, expected = joined(parts, tmp_path, axis), np.concatenate(parts, axis).tobytes()
    assert b"".join(map(bytes, stream(derived))) == expected
    cut = (derived.length // 3, derived.length - 5)
    assert b"".join(map(bytes, stream(derived, *cut))) == expected[slice(*cut)]


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    derived = joined([np.ones((1500, ROW), "u1"), np.ones((1500, ROW), "u1")], tmp_path, 1)
    short = tmp_path / "short.bin"
    short.write_bytes(b"head" + b"1" * 1000)
    inputs = (derived.inputs[0], Range(LocalFile(short), 4, 1500 * ROW))
    with pytest.raises(TruncatedError, match="ends at byte 1,004"):
        list(stream(Derived(derived.operation, inputs, derived.length)))


def test_a_call_of_the_system_that_reads_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    parts = [np.arange(9 * ROW, dtype="u4").reshape(9, ROW) + each for each in (0, 9)]
    derived = joined(parts, tmp_path, 1)
    preadv = os.preadv

    def little(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", little)
    expected = np.concatenate(parts, 1).tobytes()
    assert b"".join(map(bytes, stream(derived))) == expected


def test_columns_are_joined_without_numpy(tmp_path: Path) -> None:
    """In bands of at most a MiB; numpy would be half of the time of a small model."""
    parts = [np.arange(700 * 2 * ROW, dtype="u4").reshape(700, 2 * ROW) + n for n in (0, 7)]
    derived = joined(parts, tmp_path, 1)
    assert [column.width for column in columns(derived)] == [8 * ROW, 8 * ROW]
    assert max(map(len, stream(derived))) <= BAND
    assert b"".join(stream(derived, 40, 40)) == b""
    program = (
        "import sys\n"
        "from ckptkit.compute.strided import StridedCopy\n"
        "from ckptkit.compute.strided_read import Arrange\n"
        "from ckptkit.compute.operation import stream\n"
        "from ckptkit.core.bytesource import Derived, LocalFile, Range\n"
        "files = [LocalFile(path) for path in sys.argv[1:]]\n"
        f"dims = ((700, {2 * ROW}, {4 * ROW}), ({2 * ROW}, 1, 1))\n"
        f"copies = tuple(StridedCopy(n, 0, n * {2 * ROW}, dims) for n in (0, 1))\n"
        f"inputs = tuple(Range(file, 4, {700 * 8 * ROW}) for file in files)\n"
        f"made = Derived(Arrange(4, copies), inputs, {derived.length})\n"
        "assert sum(map(len, stream(made))) == made.length\n"
        "assert 'numpy' not in sys.modules\n"
    )
    files = [tmp_path / "0.bin", tmp_path / "1.bin"]
    subprocess.run([sys.executable, "-c", program, *files], check=True, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(40, ROW // 64), (40, ROW)], 1),  # too narrow to be worth it
        ([(4, ROW), (9, ROW)], 0),  # one after another
        ([(2, WIDEST), (2, WIDEST)], 1),  # rows too long for memory
    ],
)
def test_what_is_not_joined_row_by_row(
    shapes: list[tuple[int, ...]], axis: int, tmp_path: Path
) -> None:
    derived = joined([np.ones(shape, "u1") for shape in shapes], tmp_path, axis)
    assert columns(derived) == []
    turned = [np.ones((ROW, 40), "u1").T, np.ones((ROW, 40), "u1").T]
    assert columns(joined(turned, tmp_path, 1)) == []


def test_rows_longer_than_a_band(tmp_path: Path) -> None:
    """As many layers in one tensor have: a few rows at once, not an array of all files."""
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, (7, BAND), np.uint8) for _ in range(3)]
    derived = joined(parts, tmp_path, 1)
    assert [column.width for column in columns(derived)] == [BAND] * 3
    made = [bytes(each) for each in stream(derived)]
    assert max(map(len, made)) <= WIDEST
    assert b"".join(made) == np.concatenate(parts, 1).tobytes()
