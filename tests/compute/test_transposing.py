"""Strided views copied through strips, against numpy's own assignment."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.compute.strided_read import transposed_copy


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
