"""Boxes whose rows are read where they belong, against numpy's own joining."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckptkit.compute import strided_read
from ckptkit.compute.operation import stream
from ckptkit.compute.strided_read import ROW
from ckptkit.core.bytesource import Derived, LocalFile, Range
from ckptkit.core.errors import TruncatedError
from tests.compute.arranging import boxes as array_of
from tests.compute.arranging import read


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
    unit: str, shapes: list[tuple[int, ...]], axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(strided_read, "JOINED", 100_000)  # several tiles, the last a part of one
    random = np.random.default_rng(0)
    parts = []
    for shape in shapes:
        count = int(np.prod(shape)) * np.dtype(unit).itemsize
        parts.append(random.integers(0, 256, count, np.uint8).view(unit).reshape(shape))
    derived, expected = joined(parts, tmp_path, axis), np.concatenate(parts, axis).tobytes()
    assert read(derived) == expected
    cut = (derived.length // 3, derived.length - 5)
    assert read(derived, *cut) == expected[slice(*cut)]


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    derived = joined([np.ones((1500, ROW), "u1"), np.ones((1500, ROW), "u1")], tmp_path, 1)
    short = tmp_path / "short.bin"
    short.write_bytes(b"head" + b"1" * 1000)
    inputs = (derived.inputs[0], Range(LocalFile(short), 4, 1500 * ROW))
    with pytest.raises(TruncatedError, match="after byte 1,004"):
        list(stream(Derived(derived.operation, inputs, derived.length)))


def test_a_call_of_the_system_that_reads_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [np.arange(9 * ROW, dtype="u4").reshape(9, ROW) + each for each in (0, 9)]
    derived = joined(parts, tmp_path, 1)
    preadv = os.preadv

    def little(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", little)
    expected = np.concatenate(parts, 1).tobytes()
    assert read(derived) == expected
