"""Arranged extents as tests describe them: a view, or boxes of an array."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.compute.strided import normal, of_box
from ckptkit.compute.strided_read import Arrange

Shape = tuple[int, ...]


def view(itemsize: int, shape: Shape, stride: Shape) -> Arrange:
    """The elements of a view that begins at the first byte of its input."""
    return boxes(itemsize, shape, [((0,) * len(shape), shape, stride, 0)])


def boxes(
    itemsize: int, shape: Shape, places: Sequence[tuple[Shape, Shape, Shape, int]]
) -> Arrange:
    """An array of which each input holds a box: offsets, sizes, strides, first element."""
    copies = []
    for number, (offsets, sizes, stride, start) in enumerate(places):
        copy = of_box(shape, offsets, sizes, stride, start, number)
        if copy.elements:
            copies.append(copy._replace(dims=normal(copy.dims)))
    return Arrange(itemsize, tuple(copies))
