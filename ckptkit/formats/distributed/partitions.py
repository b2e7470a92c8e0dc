"""Parameters that are cut into pieces of the ranks' flat tensors: their places, and their bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import Concat, RecordSlice
from ckptkit.core.bytesource import Derived, Pending, Range, Record
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import AmbiguousError, CorruptError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride

Shapes = Mapping[str, Shape]


class PartitionRow:
    """Flat tensors of one type, one after another, to be cut by element."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype.name for tensor in tensors}
        if len(dtypes) != 1:
            raise CorruptError(
                f"the parts of one flat tensor are of different types: {', '.join(sorted(dtypes))}"
            )
        held = [tensor for tensor in tensors if tensor.numel]
        self.dtype: DType = tensors[0].dtype
        self.numel = sum(tensor.numel for tensor in held)
        self._records = [contiguous(tensor) for tensor in held]
        self._starts = list(accumulate((tensor.numel for tensor in held), initial=0))[:-1]

    def cut(self, start: int, count: int) -> Iterator[Record]:
        """Yield the records of `count` elements from `start`; the caller checks the range."""
        size = self.dtype.itemsize
        index = bisect_right(self._starts, start) - 1
        while count:
            record, first = self._records[index], start - self._starts[index]
            here = min(count, record.length // size - first)
            yield RecordSlice(record, first * size, here * size)
            start, count, index = start + here, count - here, index + 1


@dataclass(frozen=True, slots=True)
class Shares:
    """A record: `share` elements from `start` of each of the rows, joined and cut to `numel`.

    The pieces are made on demand: there may be thousands of ranks.
    """

    rows: tuple[PartitionRow, ...]
    start: int
    share: int
    numel: int

    @property
    def length(self) -> int:
        return self.rows[0].dtype.nbytes(self.numel)

    def locate(self) -> Range | Derived:
        pieces = tuple(self._pieces())
        return (
            pieces[0].locate()
            if len(pieces) == 1
            else Pending(Concat(), pieces, self.length).locate()
        )

    def _pieces(self) -> Iterator[Record]:
        left = self.numel
        for row in self.rows:
            here = min(left, self.share)
            if not here:
                return
            yield from row.cut(self.start, here)
            left -= here


class Slot(NamedTuple):
    """The place of a parameter: `share` elements from `start` of each row of its group."""

    shape: Shape
    group: int
    start: int
    share: int

    def tensor(self, rows: tuple[PartitionRow, ...]) -> Tensor:
        """Return the parameter, or its optimizer state for each element, on the CPU."""
        storage = Storage(Shares(rows, self.start, self.share, prod(self.shape)))
        return Tensor(storage, rows[0].dtype, self.shape, contiguous_stride(self.shape))


class Layout(NamedTuple):
    """The place of every parameter, the number of groups, and the elements taken of each row."""

    slots: dict[str, Slot]
    groups: int
    taken: list[int]

    def check(self, rows: Sequence[PartitionRow], unit: int) -> None:
        """Raise CorruptError unless the rows hold what is taken, rounded up to `unit` at most."""
        if len(rows) != len(self.taken):
            raise CorruptError(
                f"the parameters take {len(self.taken):,} flat tensors, there are {len(rows):,}"
            )
        for number, (row, taken) in enumerate(zip(rows, self.taken, strict=True)):
            if not taken <= row.numel <= -(-taken // unit) * unit:
                raise CorruptError(
                    f"the parameters take {taken:,} elements, "
                    f"but flat tensor {number} has {row.numel:,}"
                )


def by_group(groups: Sequence[Shapes], gaps: Sequence[Sequence[int]]) -> Layout:
    """Lay out stages 1 and 2: a row is a group, its parameters in order, with a gap after each."""
    layout = Layout({}, len(groups), [])
    for group, (shapes, behind) in enumerate(zip(groups, gaps, strict=True)):
        if len(behind) != len(shapes):
            raise CorruptError(
                f"group {group} has {len(shapes):,} parameters, but {len(behind):,} gaps after them"
            )
        start = end = 0
        for (name, shape), gap in zip(shapes.items(), behind, strict=True):
            _add(layout, name, Slot(shape, group, start, prod(shape)))
            end = start + prod(shape)
            start = end + gap
        layout.taken.append(end)
    return layout


def by_rank(groups: Sequence[Shapes], ranks: int) -> Layout:
    """Lay out stage 3: a row is a rank, with equally many elements of each parameter."""
    layout = Layout({}, len(groups), [])
    start = 0
    for group, shapes in enumerate(groups):
        for name, shape in shapes.items():
            share = -(-prod(shape) // ranks)
            _add(layout, name, Slot(shape, group, start, share))
            start += share
    layout.taken.extend([start] * ranks)
    return layout


def _add(layout: Layout, name: str, slot: Slot) -> None:
    if name in layout.slots:
        raise AmbiguousError(
            f"{name[:80]!r} is in groups {layout.slots[name].group} and {slot.group}"
        )
    layout.slots[name] = slot
