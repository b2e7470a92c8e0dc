"""Strided copies against numpy: which boxes cover an array, copies of copies, and how the bytes of
boxes and transposes are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.compute import strided_read
from ckptkit.compute.operation import stream
from ckptkit.compute.strided import StridedCopy, check_cover, composed, of_box
from ckptkit.compute.strided_read import ROW, transposed_copy
from ckptkit.core.bytesource import Derived, LocalFile, Range
from ckptkit.core.errors import CorruptError, LimitError, TruncatedError
from tests.compute.arranging import Box, Shape, grids, read, within
from tests.compute.arranging import boxes as array_of

# Boxes that cover an array

PINWHEEL: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]


def counted(shape: Shape, boxes: list[Box]) -> bool:
    """Return whether every element is in exactly one box."""
    held = np.zeros(shape, int)
    for offsets, sizes in boxes:
        held[within(offsets, sizes)] += 1
    return bool((held == 1).all())


def proven(shape: Shape, boxes: list[Box]) -> bool:
    try:
        check_cover(shape, boxes)
    except CorruptError:
        return False
    return True


@given(grids())
def test_grids_cover(grid: tuple[Shape, list[Box]]) -> None:
    shape, boxes = grid
    check_cover(shape, boxes)
    with pytest.raises(CorruptError):
        check_cover(shape, boxes[1:])
    with pytest.raises(CorruptError):
        check_cover(shape, [*boxes, boxes[0]])


@given(st.data())
def test_any_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    ends = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    box = st.tuples(*ends)
    drawn = data.draw(st.lists(box, max_size=5))
    boxes = [(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in drawn]
    assert proven(shape, boxes) == counted(shape, boxes)


def test_a_pinwheel_covers() -> None:
    """No plane separates its blades; the middle is a box of its own."""
    assert proven((3, 3), [*PINWHEEL, ((1, 1), (1, 1))])
    assert not proven((3, 3), PINWHEEL)
    assert not proven((3, 3), [*PINWHEEL, ((1, 1), (2, 1))])


def test_nothing_and_scalars() -> None:
    assert proven((), [((), ())])
    assert not proven((), [])
    assert not proven((), [((), ())] * 2)
    assert proven((0, 3), [])
    assert proven((0, 3), [((0, 0), (0, 3))] * 2)
    assert not proven((0, 3), [((0, 0), (1, 3))])


def test_many_ranks() -> None:
    check_cover((10_000, 64), [((row, 0), (1, 64)) for row in range(10_000)])
    check_cover((64, 10_000), [((0, column), (64, 1)) for column in range(10_000)])


def test_DC_04_too_much_work() -> None:
    """Boxes that begin at different places along both dimensions."""
    size = 3_000
    spiral: list[Box] = []
    for n in range(size - 1):
        spiral += [((n, n), (1, size - n)), ((n + 1, n), (size - n - 1, 1))]
    with pytest.raises(LimitError, match="chunk_visits"):
        check_cover((size, size), [*spiral, ((size - 1, size - 1), (1, 1))])


# Copies of copies


def copied(copies: Sequence[StridedCopy], sources: Sequence[np.ndarray], total: int) -> np.ndarray:
    """Carry out copies, element by element."""
    made = np.full(total, -1)
    for copy in copies:
        for index in product(*(range(n) for n, _, _ in copy.dims)):
            read = sum(i * dim[1] for i, dim in zip(index, copy.dims, strict=True))
            written = sum(i * dim[2] for i, dim in zip(index, copy.dims, strict=True))
            made[copy.place + written] = sources[copy.source][copy.start + read]
    return made


@pytest.mark.parametrize("is_turned", [False, True])
@given(grids(2), st.data())
def test_a_part_of_what_boxes_make(
    is_turned: bool, grid: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    sources = [whole[within(*box)].flatten() for box in boxes]
    inner = [
        of_box(shape, offsets, sizes, (sizes[1], 1), 0, number)
        for number, (offsets, sizes) in enumerate(boxes)
    ]
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    (top, bottom), (left, right) = ends
    wanted, stride = whole[top:bottom, left:right], (shape[1], 1)
    if is_turned:
        wanted, stride = wanted.T, stride[::-1]
    if not wanted.size:
        return
    start = top * shape[1] + left
    outer = of_box(wanted.shape, (0, 0), wanted.shape, stride, start)
    made = composed(outer, inner, whole.size)
    assert made is not None
    assert np.array_equal(copied(made, sources, wanted.size), wanted.flatten())


# Transposes, through strips


@pytest.mark.parametrize("unit", ["u1", "u2", "u4", "u8", "c16"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((300, 1100), (1, 0)),
        ((33, 34), (1, 0)),
        ((32, 500), (1, 0)),
        ((500, 32), (1, 0)),
        ((1, 500), (1, 0)),
        ((40, 3, 70), (2, 1, 0)),
        ((40, 3, 70), (1, 2, 0)),
        ((40, 3, 70), (0, 2, 1)),
        ((40, 3, 70), (0, 1, 2)),
        ((2, 40, 3, 70), (3, 0, 2, 1)),
        ((7,), (0,)),
        ((0, 40), (1, 0)),
    ],
)
def test_as_numpy_copies(unit: str, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    nbytes = int(np.prod(shape)) * np.dtype(unit).itemsize
    data = random.integers(0, 256, nbytes, np.uint8).view(unit).reshape(shape)
    view = data.transpose(order)
    target = np.zeros(view.shape, unit)
    transposed_copy(target, view)
    assert target.tobytes() == view.tobytes()


def test_a_part_of_a_larger_array() -> None:
    whole = np.arange(400 * 600, dtype="u4").reshape(400, 600)
    view = whole[7:390:2, 5:570].T
    target = np.full((600, 400), 9, "u4")
    transposed_copy(target[1:566, 3:195], view)
    expected = np.full((600, 400), 9, "u4")
    expected[1:566, 3:195] = view
    assert np.array_equal(target, expected)


def test_an_expanded_view() -> None:
    view = np.broadcast_to(np.arange(50, dtype="u2"), (60, 50))
    target = np.zeros((60, 50), "u2")
    transposed_copy(target, view)
    assert np.array_equal(target, view)
    turned = np.zeros((50, 60), "u2")
    transposed_copy(turned, view.T)
    assert np.array_equal(turned, view.T)


# Boxes whose rows are read where they belong


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
    unit: str, shapes: list[Shape], axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
