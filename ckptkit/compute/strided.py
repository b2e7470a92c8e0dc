"""Where elements go: copies of blocks between arrays, as positions and strides alone.

What files hold in parts (chunks of DCP, shards of ranks), what a view of a tensor shows, and what a
rule rearranges are all such copies. Copies of copies are copies: :func:`composed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import NamedTuple

from ckptkit.core.errors import CorruptError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape
from ckptkit.core.text import flatten

ZEROS = -1  # in place of a source: elements that are zero
CUTS = 10_000  # parts that a copy is cut into where its elements are no box

# Elements, stride in the source, stride in the target: each in elements, the outermost first.
Dims = tuple[tuple[int, int, int], ...]


class StridedCopy(NamedTuple):
    """A block of elements that goes from a source to a target; positions count elements."""

    source: int  # which of the sources, or ZEROS
    start: int  # the first element in the source
    place: int  # the first element in the target
    dims: Dims

    @property
    def elements(self) -> int:
        return prod(n for n, _, _ in self.dims)


def of_box(
    shape: Shape, offsets: Shape, sizes: Shape, stride: Shape, start: int = 0, source: int = 0
) -> StridedCopy:
    """Return the copy that fills a box of a row-major array of `shape`.

    The elements of the source are `stride` apart, from element `start` on.
    """
    steps = row_major(shape)
    place = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    return StridedCopy(source, start, place, tuple(zip(sizes, stride, steps, strict=True)))


def row_major(shape: Sequence[int]) -> list[int]:
    """Return the strides of a row-major array, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def normal(dims: Iterable[tuple[int, int, int]]) -> Dims:
    """Return the same elements with as few dimensions as possible, by falling target stride."""
    found: list[tuple[int, int, int]] = []
    for n, read, written in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]):
        if found and found[-1][1] == n * read and found[-1][2] == n * written:
            found[-1] = (found[-1][0] * n, read, written)
        else:
            found.append((n, read, written))
    return tuple(found)


def is_dense(copy: StridedCopy) -> bool:
    """Return whether the elements of a copy, in normal form, are contiguous in the target."""
    step = 1
    for n, _, written in reversed(copy.dims):
        if written != step:
            return False
        step *= n
    return True


def corners(copy: StridedCopy, dims: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first element in source and target for all indices of the given dimensions."""
    if not dims:
        yield copy.start, copy.place
        return
    (n, read, written), rest = dims[0], dims[1:]
    for index in range(n):
        moved = copy._replace(start=copy.start + index * read, place=copy.place + index * written)
        yield from corners(moved, rest)


def in_bytes(copies: Sequence[StridedCopy], bits: int) -> tuple[StridedCopy, ...] | None:
    """Copies of elements of `bits` bits as copies of bytes; None if one begins inside a byte."""
    found = []
    for source, start, place, dims in copies:
        kept = normal(dims) or ((1, 1, 1),)
        n, read, written = kept[-1]
        counts = [start, place, n, *flatten(strides for _, *strides in kept[:-1])]
        if (read, written) != (1, 1) or any(count * bits % 8 for count in counts):
            return None
        outer = tuple((m, r * bits // 8, w * bits // 8) for m, r, w in kept[:-1])
        found.append(
            StridedCopy(
                source, start * bits // 8, place * bits // 8, (*outer, (n * bits // 8, 1, 1))
            )
        )
    return tuple(found)


# Boxes of an array


class Interval(NamedTuple):
    """The indices of a box along one axis: where they begin, how many, and a stride elsewhere."""

    offset: int
    size: int
    stride: int


Box = tuple[Interval, ...]


class Axes:
    """The axes of an array of `total` elements, outermost first, in which given strides are steps.

    No `sizes` if the strides do not divide each other.
    """

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


@lru_cache(64)  # layers of a model have the same shapes, cut in the same way
def on_axes(copies: tuple[StridedCopy, ...], elements: int) -> tuple[Shape, list[Box]] | None:
    """Return an array of which each copy, in normal form, fills a box; None if there is none.

    Strides of the boxes are those in the sources.
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
    """Return a copy of `total` elements, which inner copies make, as copies of their sources.

    None where that takes too many.
    """
    dims = normal(outer.dims)
    plain = [piece._replace(dims=normal(piece.dims)) for piece in inner]
    written = {stride for _, _, stride in flatten(piece.dims for piece in plain)}
    strides = {read for _, read, _ in dims} | written
    axes = Axes(strides, total)
    if not axes.sizes:
        return _run_by_run(outer._replace(dims=dims), plain, total)
    ours = _boxed(outer._replace(dims=dims), axes, _READ)
    theirs = [_boxed(piece, axes, _WRITTEN) for piece in plain]
    if ours is None or None in theirs:
        return None
    made = list(flatten(some or () for some in theirs))
    found: list[StridedCopy] = []
    for part in ours:
        for piece in _touching(part, made):
            found += _common(part, piece, axes)
    return found


def _touching(outer: StridedCopy, inner: Sequence[StridedCopy]) -> Iterator[StridedCopy]:
    """Yield the inner copies that reach into what the outer one spans."""
    last = outer.start + sum((n - 1) * read for n, read, _ in outer.dims)
    for piece in inner:
        end = piece.place + sum((n - 1) * written for n, _, written in piece.dims)
        if piece.place <= last and end >= outer.start:
            yield piece


_READ, _WRITTEN = 1, 2  # which stride of a dimension, and which position of a piece, a grid is of


def _first(piece: StridedCopy, side: int) -> int:
    return piece.start if side == _READ else piece.place


def _box(piece: StridedCopy, axes: Axes, side: int) -> Box | None:
    other = _WRITTEN if side == _READ else _READ
    return axes.box(_first(piece, side), [(dim[0], dim[side], dim[other]) for dim in piece.dims])


def _boxed(piece: StridedCopy, axes: Axes, side: int) -> list[StridedCopy] | None:
    """Return a copy in parts that are boxes of the grid; None where there would be too many."""
    waiting, found = [piece], []
    while waiting:
        part = waiting.pop()
        if _box(part, axes, side) is not None:
            found.append(part)
            continue
        number, head = _cut(part, axes, side)
        waiting += _halves(part, number, head)
        if len(waiting) + len(found) > CUTS:
            return None
    return found


def _cut(piece: StridedCopy, axes: Axes, side: int) -> tuple[int, int]:
    """Return the dimension that a copy is cut along, and after how many elements an axis ends."""
    for number, dim in enumerate(piece.dims):
        axis = axes.strides.index(dim[side])
        offset, size = _first(piece, side) // dim[side], axes.sizes[axis]
        inside = offset % size
        head = size - inside if inside else dim[0] // size * size
        if 0 < head < dim[0]:
            return number, head
    return max(range(len(piece.dims)), key=lambda n: piece.dims[n][side]), 1


def _halves(piece: StridedCopy, number: int, head: int) -> list[StridedCopy]:
    n, read, written = piece.dims[number]
    before, after = piece.dims[:number], piece.dims[number + 1 :]
    found = []
    for first, count in ((0, head), (head, n - head)):
        dims = (*before, *(((count, read, written),) if count > 1 else ()), *after)
        start, place = piece.start + first * read, piece.place + first * written
        found.append(StridedCopy(piece.source, start, place, dims))
    return found


def _common(outer: StridedCopy, inner: StridedCopy, axes: Axes) -> list[StridedCopy]:
    """Return the elements that both have, as a copy of the inner's source."""
    ours, theirs = _box(outer, axes, _READ), _box(inner, axes, _WRITTEN)
    assert ours is not None and theirs is not None
    start, place, dims = inner.start, outer.place, []
    for a, b in zip(ours, theirs, strict=True):
        low, high = max(a.offset, b.offset), min(a.offset + a.size, b.offset + b.size)
        if low >= high:
            return []
        start += (low - b.offset) * b.stride
        place += (low - a.offset) * a.stride
        if high - low > 1:
            dims.append((high - low, b.stride, a.stride))
    return [StridedCopy(inner.source, start, place, tuple(dims))]


def _run_by_run(
    outer: StridedCopy, inner: Sequence[StridedCopy], total: int
) -> list[StridedCopy] | None:
    """Compose each run of the outer piece by itself, where strides do not divide each other."""
    runs = [dim for dim in outer.dims if dim[1] != 1]
    if not outer.dims or not runs:
        return None
    n, read, written = max(runs, key=lambda dim: dim[1])
    if n > CUTS:
        return None
    rest = tuple(dim for dim in outer.dims if dim != (n, read, written))
    found: list[StridedCopy] = []
    for index in range(n):
        start, place = outer.start + index * read, outer.place + index * written
        made = composed(StridedCopy(outer.source, start, place, rest), inner, total)
        if made is None or len(found) > CUTS:
            return None
        found += made
    return found


# Cover


Region = tuple[tuple[int, int], ...]  # begin and end in each dimension


def check_cover(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CorruptError unless boxes (offsets, sizes) tile an array; empty ones are ignored.

    The array is cut along planes that no box crosses, dimension by dimension, until each part has
    one box: the chunks of a device mesh take a few steps. Raises LimitError where it takes too
    many.
    """
    whole = tuple((0, n) for n in shape)
    inside = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"a chunk has {len(sizes)} dimensions, the tensor {len(shape)}")
        region = tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True))
        if any(end > n for (_, end), n in zip(region, shape, strict=True)):
            raise CorruptError(f"the chunk {_region_text(region)} reaches out of shape {shape}")
        if 0 not in sizes:
            inside.append(region)
    waiting = [(whole, inside)] if 0 not in shape else []
    visits = 0
    while waiting:
        region, held = waiting.pop()
        visits += len(shape) * len(held)
        check("chunk_visits", visits, "looks at the chunks of one tensor")
        waiting.extend(_parts_of(region, held))


def _parts_of(region: Region, held: list[Region]) -> list[tuple[Region, list[Region]]]:
    """Return the parts of the region, with the boxes in each; empty if one box fills it."""
    if held == [region]:
        return []
    for axis in range(len(region)):
        parts = _cut_along(axis, region, held)
        if len(parts) > 1:
            return parts
    _check_uncut(region, held)
    return []


def _cut_along(axis: int, region: Region, held: list[Region]) -> list[tuple[Region, list[Region]]]:
    begin, stop = region[axis]
    parts: list[tuple[Region, list[Region]]] = []
    group: list[Region] = []
    reached = begin
    for box in sorted(held, key=lambda box: box[axis]):
        low, high = box[axis]
        if low > reached:
            raise _hole(axis, region, reached, low)
        if low == reached and group:
            parts.append((_narrowed(axis, region, begin, low), group))
            begin, group = low, []
        group.append(box)
        reached = max(reached, high)
    if reached < stop:
        raise _hole(axis, region, reached, stop)
    return [*parts, (_narrowed(axis, region, begin, stop), group)]


def _check_uncut(region: Region, held: list[Region]) -> None:
    """Raise CorruptError for boxes that overlap or leave a hole, LimitError for a pinwheel layout.

    No plane separates them.
    """
    check("chunk_visits", len(held) ** 2, "looks at the chunks of one tensor")
    for one, other in combinations(held, 2):
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
        if all(low < high for low, high in common):
            raise CorruptError(f"two of its chunks overlap in {_region_text(common)}")
    if sum(map(_region_volume, held)) != _region_volume(region):
        raise CorruptError(f"its chunks leave a hole in {_region_text(region)}")


def _region_volume(region: Region) -> int:
    return prod(high - low for low, high in region)


def _narrowed(axis: int, region: Region, low: int, high: int) -> Region:
    return (*region[:axis], (low, high), *region[axis + 1 :])


def _hole(axis: int, region: Region, low: int, high: int) -> CorruptError:
    return CorruptError(
        f"its chunks do not cover {_region_text(_narrowed(axis, region, low, high))}"
    )


def _region_text(region: Region) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in region)}]"
