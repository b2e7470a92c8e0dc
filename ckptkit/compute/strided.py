"""Strided copies: copies of elements between arrays, described by positions and strides.

ckptkit uses strided copies for the chunks of DCP, the shards of ranks, views of tensors, and
tensor rules. :func:`composed` combines two copies into a list of copies. A box is a rectangular
region of an array: one range of indices along each axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import add, mul
from typing import NamedTuple

from ckptkit.core.errors import CorruptError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, contiguous_stride
from ckptkit.core.text import flatten

ZEROS = -1  # index of a virtual source whose elements are all zero
CUTS = 10_000  # maximum number of boxes into which a copy is split

# A triple for each dimension, outermost first: size, stride in the source, stride in the target.
# Strides count elements.
Dims = tuple[tuple[int, int, int], ...]


class StridedCopy(NamedTuple):
    """A copy of elements from a source to a target."""

    source: int  # index of the source, or ZEROS
    start: int  # Position of the first element in the source, counted in elements.
    place: int  # Position of the first element in the target, counted in elements.
    dims: Dims

    @property
    def elements(self) -> int:
        return prod(n for n, _, _ in self.dims)


def of_box(
    shape: Shape, offsets: Shape, sizes: Shape, stride: Shape, start: int = 0, source: int = 0
) -> StridedCopy:
    """Return the copy that fills a box of a row-major array of `shape`.

    `start` is the position of the copy's first element in the source. `stride` contains the strides
    in the source.
    """
    steps = contiguous_stride(shape)
    place = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    return StridedCopy(source, start, place, tuple(zip(sizes, stride, steps, strict=True)))


def normal(dims: Iterable[tuple[int, int, int]]) -> Dims:
    """Merge dimensions where possible. Return dimensions in descending order of target strides."""
    found: list[tuple[int, int, int]] = []
    for n, read, written in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]):
        if found and found[-1][1] == n * read and found[-1][2] == n * written:
            found[-1] = (found[-1][0] * n, read, written)
        else:
            found.append((n, read, written))
    return tuple(found)


def is_dense(copy: StridedCopy) -> bool:
    """Return True if the elements are contiguous in the target. `copy` is in normal form."""
    step = 1
    for n, _, written in reversed(copy.dims):
        if written != step:
            return False
        step *= n
    return True


def corners(copy: StridedCopy, dims: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """For each combination of indices of `dims`, yield the positions in source and target."""
    if not dims:
        yield copy.start, copy.place
        return
    (n, read, written), rest = dims[0], dims[1:]
    for index in range(n):
        moved = copy._replace(start=copy.start + index * read, place=copy.place + index * written)
        yield from corners(moved, rest)


def in_bytes(
    copies: Sequence[StridedCopy], bits: int, block: int = 1
) -> tuple[StridedCopy, ...] | None:
    """Convert copies of elements to copies of bytes.

    `block` elements together have `bits` bits. Return None if a copy starts inside a byte or a
    block.
    """
    found = []
    for source, start, place, dims in copies:
        kept = normal(dims) or ((1, 1, 1),)
        n, read, written = kept[-1]
        counts = [start, place, n, *flatten(strides for _, *strides in kept[:-1])]
        if (read, written) != (1, 1) or any(
            count % block or count // block * bits % 8 for count in counts
        ):
            return None
        start, place, n, *others = (count // block * bits // 8 for count in counts)
        strides = zip(others[::2], others[1::2], strict=True)
        outer = tuple((dim[0], *each) for dim, each in zip(kept, strides, strict=False))
        found.append(StridedCopy(source, start, place, (*outer, (n, 1, 1))))
    return tuple(found)


# Boxes of an array


class Interval(NamedTuple):
    """The range of a box along one axis of an array.

    `stride` is the copy's stride along this axis in the other array: the source or the target.
    """

    offset: int
    size: int
    stride: int


Box = tuple[Interval, ...]


class Axes:
    """The axes of an array of `total` elements. Each of `strides` is the stride of an axis.

    The outermost axis comes first. If a stride is not divisible by the next smaller stride,
    `sizes` is empty.
    """

    def __init__(self, strides: Iterable[int], total: int) -> None:
        self.strides = sorted({*strides, 1}, reverse=True)
        pairs = list(zip([total, *self.strides[:-1]], self.strides, strict=True))
        fits = all(big % small == 0 for big, small in pairs)
        self.sizes = [big // small for big, small in pairs] if fits else []

    def box(self, first: int, dims: Sequence[tuple[int, int, int]]) -> Box | None:
        """Return the box of this array that a copy reads or writes.

        `first` is the position of the first element. `dims` contains a triple for each dimension of
        the copy: size, stride in this array, and stride in the other array. Return None if the
        elements do not form a box.
        """
        offsets, rest = [], first
        for stride in self.strides:
            digit, rest = divmod(rest, stride)
            offsets.append(digit)
        counts, others = [1] * len(offsets), [0] * len(offsets)
        for n, stride, other in dims:
            axis = self.strides.index(stride)
            while n > 1:
                if axis < 0 or counts[axis] != 1:
                    return None
                size = self.sizes[axis]
                if offsets[axis] + n <= size:
                    counts[axis], others[axis] = n, other
                    break
                if offsets[axis] or n % size:
                    return None
                # The dimension exceeds its axis, and continues along the next outer axis.
                if size > 1:
                    counts[axis], others[axis] = size, other
                n, other, axis = n // size, other * size, axis - 1
        ends = map(add, offsets, counts)
        if any(end > size for end, size in zip(ends, self.sizes, strict=True)):
            return None
        return tuple(map(Interval, offsets, counts, others))


@lru_cache(64)  # cached, because the layers of a model have equal shapes and copies
def on_axes(copies: tuple[StridedCopy, ...], elements: int) -> tuple[Shape, list[Box]] | None:
    """Return the shape of an array in which each copy fills a box, and a list of the boxes.

    Return None if no such array exists. The copies must be in normal form (:func:`normal`). The
    strides of the boxes are the strides in the sources.
    """
    axes = Axes((written for copy in copies for _, _, written in copy.dims), elements)
    boxes = []
    for copy in copies if axes.sizes else ():
        box = axes.box(copy.place, [(n, written, read) for n, read, written in copy.dims])
        if box is None:
            return None
        boxes.append(box)
    return (tuple(axes.sizes), boxes) if boxes else None


# Copies of copies


def composed(
    outer: StridedCopy, inner: Sequence[StridedCopy], total: int
) -> list[StridedCopy] | None:
    """Combine the copies `inner`, which fill an array, with `outer`, which reads this array.

    The array has `total` elements. Return the copies that read the sources of `inner` directly.
    Return None if too many copies would be needed.
    """
    outer = outer._replace(dims=normal(outer.dims))
    exchanged = [_exchanged(piece._replace(dims=normal(piece.dims))) for piece in inner]
    axes = Axes((read for piece in (outer, *exchanged) for _, read, _ in piece.dims), total)
    if not axes.sizes:
        return _run_by_run(outer, inner, total)
    parts, others = _boxed(outer, axes), list[tuple[StridedCopy, Box]]()
    if parts is None:
        return None
    for piece in exchanged:
        boxed = _boxed(piece, axes)
        if boxed is None:
            return None
        others += boxed
    found = []
    for copy, ours in parts:
        last = copy.start + sum((n - 1) * read for n, read, _ in copy.dims)
        for piece, theirs in others:
            end = piece.start + sum((n - 1) * read for n, read, _ in piece.dims)
            if piece.start > last or end < copy.start:
                continue
            # Compute the intersection of both boxes.
            start, place, dims = piece.place, copy.place, []
            for a, b in zip(ours, theirs, strict=True):
                low, high = max(a.offset, b.offset), min(a.offset + a.size, b.offset + b.size)
                if low >= high:
                    break
                start += (low - b.offset) * b.stride
                place += (low - a.offset) * a.stride
                if high - low > 1:
                    dims.append((high - low, b.stride, a.stride))
            else:
                found.append(StridedCopy(piece.source, start, place, tuple(dims)))
    return found


def _exchanged(copy: StridedCopy) -> StridedCopy:
    """Return `copy` with source and target exchanged."""
    dims = tuple((n, written, read) for n, read, written in copy.dims)
    return StridedCopy(copy.source, copy.place, copy.start, dims)


def _boxed(copy: StridedCopy, axes: Axes) -> list[tuple[StridedCopy, Box]] | None:
    """Split a copy into copies that read boxes. Return None if too many boxes would be needed."""
    waiting, found = [copy], []
    while waiting:
        part = waiting.pop()
        box = axes.box(part.start, part.dims)
        if box is not None:
            found.append((part, box))
            continue
        # Split a dimension at the point where it crosses the end of an axis. If no dimension
        # crosses the end of an axis, split the dimension with the largest stride.
        cut = max(range(len(part.dims)), key=lambda each: part.dims[each][1])
        head = 1
        for number, (n, read, _) in enumerate(part.dims):
            size = axes.sizes[axes.strides.index(read)]
            inside = part.start // read % size
            most = size - inside if inside else n // size * size
            if 0 < most < n:
                cut, head = number, most
                break
        n, read, written = part.dims[cut]
        for first, count in ((0, head), (head, n - head)):
            own = ((count, read, written),) if count > 1 else ()
            dims = (*part.dims[:cut], *own, *part.dims[cut + 1 :])
            start, place = part.start + first * read, part.place + first * written
            waiting.append(StridedCopy(part.source, start, place, dims))
        if len(waiting) + len(found) > CUTS:
            return None
    return found


def _run_by_run(
    outer: StridedCopy, inner: Sequence[StridedCopy], total: int
) -> list[StridedCopy] | None:
    """Combine `outer` with `inner`, separately for each index of one dimension of `outer`.

    The dimension is the one with the largest source stride. This method does not require that
    strides are divisible by each other.
    """
    runs = [dim for dim in outer.dims if dim[1] != 1]
    if not runs:
        return None
    n, read, written = longest = max(runs, key=lambda dim: dim[1])
    rest = tuple(dim for dim in outer.dims if dim != longest)
    found: list[StridedCopy] = []
    for index in range(n if n <= CUTS else 0):
        start, place = outer.start + index * read, outer.place + index * written
        made = composed(StridedCopy(outer.source, start, place, rest), inner, total)
        if made is None or len(found) > CUTS:
            return None
        found += made
    return found if n <= CUTS else None


# Check that chunks cover a tensor


def check_cover(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CorruptError unless each element of an array is in exactly one box.

    Each box is a pair (offsets, sizes). Empty boxes are ignored. The edges of all boxes divide the
    array into cells. The function checks that each cell is in exactly one box. Raise LimitError if
    there are too many cells.
    """
    regions = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(
                f"a chunk has {len(sizes)} dimensions, but the tensor has {len(shape)}"
            )
        region = tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True))
        if any(end > n for (_, end), n in zip(region, shape, strict=True)):
            raise CorruptError(f"the chunk {_region_text(region)} exceeds shape {shape}")
        if 0 not in sizes:
            regions.append(region)
    if 0 in shape:
        return
    edges = [
        sorted({0, n, *flatten(region[axis] for region in regions)}) for axis, n in enumerate(shape)
    ]
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    counts = tuple(len(each) - 1 for each in edges)
    steps, visits = contiguous_stride(counts), prod(counts)
    check("chunk_visits", visits, "comparisons of the chunks of one tensor")
    taken = bytearray(visits)

    def text(part: Sequence[int]) -> str:
        return _region_text([(edge[n], edge[n + 1]) for edge, n in zip(edges, part, strict=True)])

    for region in regions:
        spans = [
            range(number[low], number[high])
            for number, (low, high) in zip(numbers, region, strict=True)
        ]
        visits += prod(map(len, spans))
        check("chunk_visits", visits, "comparisons of the chunks of one tensor")
        for part in product(*spans):
            at = sum(map(mul, part, steps))
            if taken[at]:
                raise CorruptError(f"two of its chunks overlap in {text(part)}")
            taken[at] = 1
    if (hole := taken.find(0)) >= 0:
        place = [hole // step % count for step, count in zip(steps, counts, strict=True)]
        raise CorruptError(f"its chunks do not cover {text(place)}")


def _region_text(region: Iterable[tuple[int, int]]) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in region)}]"
