"""The proof that chunks cover a tensor, against counting every element."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.compute.strided import check_cover
from ckptkit.core.errors import CorruptError, LimitError

Box = tuple[tuple[int, ...], tuple[int, ...]]

PINWHEEL: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether every element is in exactly one box."""
    held = np.zeros(shape, int)
    for offsets, sizes in boxes:
        held[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((held == 1).all())


def proven(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    try:
        check_cover(shape, boxes)
    except CorruptError:
        return False
    return True


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A mesh over an array: every dimension cut somewhere."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=3))}) for n in shape]
    rows = [[(a, b - a) for a, b in pairwise(cut)] for cut in cuts]
    boxes = [(tuple(a for a, _ in each), tuple(n for _, n in each)) for each in product(*rows)]
    return shape, draw(st.permutations(boxes))


@given(grids())
def test_meshes_cover(grid: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = grid
    check_cover(shape, boxes)
    with pytest.raises(CorruptError):
        check_cover(shape, boxes[1:])
    with pytest.raises(CorruptError):
        check_cover(shape, [*boxes, boxes[0]])


@given(st.data())
def test_any_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    box = st.tuples(
        *(
            st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda o: o[0] <= o[1])
            for n in shape
        )
    )
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
