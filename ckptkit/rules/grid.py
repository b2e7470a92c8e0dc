"""Blocks of elements as boxes of one grid, whose strides divide each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptkit.compute.slabs import Dims as Dims
from ckptkit.compute.slabs import merged as normal

__all__ = ["Box", "Dims", "Grid", "Interval", "normal"]


class Interval(NamedTuple):
    """The indices of a box along one axis: where they begin, how many, and a stride elsewhere."""

    offset: int
    size: int
    stride: int


Box = tuple[Interval, ...]


class Grid:
    """Axes for positions below `total`, outermost first; no `sizes` if the strides do not fit."""

    def __init__(self, strides: Iterable[int], total: int) -> None:
        self.strides = sorted({*strides, 1}, reverse=True)
        outer = [total, *self.strides[:-1]]
        fits = all(big % small == 0 for big, small in zip(outer, self.strides, strict=True))
        self.sizes = (
            [big // small for big, small in zip(outer, self.strides, strict=True)] if fits else []
        )

    def box(self, first: int, dims: Sequence[tuple[int, int, int]]) -> Box | None:
        """The box of the elements from position `first`; dims are (elements, stride, other stride).

        None if the elements are no box.
        """
        offsets, rest = [], first
        for stride in self.strides:
            digit, rest = divmod(rest, stride)
            offsets.append(digit)
        counts, others = [1] * len(offsets), [0] * len(offsets)
        for n, stride, other in dims:
            if not self._spread(self.strides.index(stride), n, other, offsets, counts, others):
                return None
        for offset, count, size in zip(offsets, counts, self.sizes, strict=True):
            if offset + count > size:
                return None
        return tuple(map(Interval, offsets, counts, others))

    def _spread(
        self,
        axis: int,
        n: int,
        other: int,
        offsets: list[int],
        counts: list[int],
        others: list[int],
    ) -> bool:
        """Put a dimension on its axis and, where it is larger than that, on those around it."""
        while n > 1:
            if axis < 0 or counts[axis] != 1:
                return False
            size = self.sizes[axis]
            if offsets[axis] + n <= size:
                counts[axis], others[axis] = n, other
                return True
            if offsets[axis] or n % size:
                return False
            if size > 1:
                counts[axis], others[axis] = size, other
            n, other, axis = n // size, other * size, axis - 1
        return True
