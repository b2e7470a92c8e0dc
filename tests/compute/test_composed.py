"""Copies of copies, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.compute.strided import StridedCopy, composed, of_box


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
@given(st.data())
def test_a_part_of_what_boxes_make(is_turned: bool, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    cuts = [sorted({0, n, *data.draw(st.sets(st.integers(1, n), max_size=2))}) for n in shape]
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    inner, sources = [], []
    for (top, bottom), (left, right) in product(*map(pairwise, cuts)):
        part = whole[top:bottom, left:right]
        sizes = part.shape
        inner.append(of_box(shape, (top, left), sizes, (sizes[1], 1), 0, len(sources)))
        sources.append(part.flatten())
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
