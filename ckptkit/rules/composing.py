"""Look through what a source is made of: a copy of copies is copies, cut at edges of boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptkit.compute.gather import Chunks, Gather
from ckptkit.compute.operation import Concat, Slice
from ckptkit.core.bytesource import Derived, Extent, Range
from ckptkit.core.text import flatten
from ckptkit.rules.grid import Box, Dims, Grid, normal

CUTS = 10_000  # pieces that one is cut into where its elements are no box


class Piece(NamedTuple):
    """Elements that go from a source to the target; positions and strides count elements."""

    source: Extent
    start: int
    place: int
    dims: Dims


def looked_through(piece: Piece, itemsize: int) -> list[Piece]:
    """The piece as pieces of what its source is put together from."""
    inner = _parts(piece.source, itemsize)
    if inner is None:
        return [piece]
    made = _composed(piece, inner, piece.source.length // itemsize)
    if made is None:
        return [piece]
    return list(flatten(looked_through(part, itemsize) for part in made))


def _parts(extent: Extent, itemsize: int) -> list[Piece] | None:
    """The pieces that an extent is put together from; None if it is one, or computed."""
    if isinstance(extent, Range):
        return None
    operation = extent.operation
    if isinstance(operation, Slice):
        return _sliced(extent, operation.start, itemsize)
    if isinstance(operation, Concat):
        return _concatenated(extent, itemsize)
    if isinstance(operation, Gather) and operation.itemsize == itemsize:
        shape, origin = operation.shape, operation.start
        if origin % itemsize:
            return None
        dims = tuple(zip(shape, operation.stride, _row_major(shape), strict=True))
        return [Piece(extent.inputs[0], origin // itemsize, 0, dims)]
    if isinstance(operation, Chunks) and operation.itemsize == itemsize:
        return _chunks(operation, extent, itemsize)
    return None


def _sliced(extent: Derived, start: int, itemsize: int) -> list[Piece] | None:
    inner = extent.inputs[0]
    looks = isinstance(inner, Range) or _parts(inner, itemsize) is not None
    if start % itemsize or extent.length % itemsize or not looks:
        return None
    return [Piece(inner, start // itemsize, 0, ((extent.length // itemsize, 1, 1),))]


def _concatenated(extent: Derived, itemsize: int) -> list[Piece] | None:
    found, at = [], 0
    for each in extent.inputs:
        if each.length % itemsize:
            return None
        count = each.length // itemsize
        if count:
            found.append(Piece(each, 0, at, ((count, 1, 1),)))
        at += count
    return found


def _chunks(array: Chunks, extent: Derived, itemsize: int) -> list[Piece] | None:
    strides = _row_major(array.shape)
    found = []
    for source, (offsets, sizes, stride, origin) in zip(extent.inputs, array.boxes, strict=True):
        if origin % itemsize:
            return None
        place = sum(o * s for o, s in zip(offsets, strides, strict=True))
        dims = tuple(zip(sizes, stride, strides, strict=True))
        if 0 not in sizes:
            found.append(Piece(source, origin // itemsize, place, dims))
    return found


def _row_major(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def _composed(outer: Piece, inner: Sequence[Piece], total: int) -> list[Piece] | None:
    """`outer`, whose source the inner pieces make, as pieces of their sources; None if too fine."""
    dims = normal(outer.dims)
    plain = [piece._replace(dims=normal(piece.dims)) for piece in inner]
    written = {stride for _, _, stride in flatten(piece.dims for piece in plain)}
    strides = {read for _, read, _ in dims} | written
    grid = Grid(strides, total)
    if not grid.sizes:
        return _run_by_run(outer._replace(dims=dims), plain, total)
    ours = _boxed(outer._replace(dims=dims), grid, _READ)
    theirs = [_boxed(piece, grid, _WRITTEN) for piece in plain]
    if ours is None or None in theirs:
        return None
    made = list(flatten(pieces or () for pieces in theirs))
    found: list[Piece] = []
    for part in ours:
        for piece in _touching(part, made):
            found += _common(part, piece, grid)
    return found


def _touching(outer: Piece, inner: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the inner pieces that reach into what the outer one spans."""
    last = outer.start + sum((n - 1) * read for n, read, _ in outer.dims)
    for piece in inner:
        end = piece.place + sum((n - 1) * written for n, _, written in piece.dims)
        if piece.place <= last and end >= outer.start:
            yield piece


_READ, _WRITTEN = 1, 2  # which stride of a dimension, and which position of a piece, a grid is of


def _first(piece: Piece, side: int) -> int:
    return piece.start if side == _READ else piece.place


def _box(piece: Piece, grid: Grid, side: int) -> Box | None:
    other = _WRITTEN if side == _READ else _READ
    return grid.box(_first(piece, side), [(dim[0], dim[side], dim[other]) for dim in piece.dims])


def _boxed(piece: Piece, grid: Grid, side: int) -> list[Piece] | None:
    """The piece in parts that are boxes of the grid; None where there would be too many."""
    waiting, found = [piece], []
    while waiting:
        part = waiting.pop()
        if _box(part, grid, side) is not None:
            found.append(part)
            continue
        number, head = _cut(part, grid, side)
        waiting += _halves(part, number, head)
        if len(waiting) + len(found) > CUTS:
            return None
    return found


def _cut(piece: Piece, grid: Grid, side: int) -> tuple[int, int]:
    """The dimension that a piece is cut along, and after how many elements: where an axis ends."""
    for number, dim in enumerate(piece.dims):
        axis = grid.strides.index(dim[side])
        offset, size = _first(piece, side) // dim[side], grid.sizes[axis]
        inside = offset % size
        head = size - inside if inside else dim[0] // size * size
        if 0 < head < dim[0]:
            return number, head
    return max(range(len(piece.dims)), key=lambda n: piece.dims[n][side]), 1


def _halves(piece: Piece, number: int, head: int) -> list[Piece]:
    n, read, written = piece.dims[number]
    before, after = piece.dims[:number], piece.dims[number + 1 :]
    found = []
    for first, count in ((0, head), (head, n - head)):
        dims = (*before, *(((count, read, written),) if count > 1 else ()), *after)
        start, place = piece.start + first * read, piece.place + first * written
        found.append(Piece(piece.source, start, place, dims))
    return found


def _common(outer: Piece, inner: Piece, grid: Grid) -> list[Piece]:
    """The elements that both have, as a piece of the inner's source."""
    ours, theirs = _box(outer, grid, _READ), _box(inner, grid, _WRITTEN)
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
    return [Piece(inner.source, start, place, tuple(dims))]


def _run_by_run(outer: Piece, inner: Sequence[Piece], total: int) -> list[Piece] | None:
    """Compose each run of the outer piece by itself, where strides do not divide each other."""
    runs = [dim for dim in outer.dims if dim[1] != 1]
    if not outer.dims or not runs:
        return None
    n, read, written = max(runs, key=lambda dim: dim[1])
    if n > CUTS:
        return None
    rest = tuple(dim for dim in outer.dims if dim != (n, read, written))
    found: list[Piece] = []
    for index in range(n):
        start, place = outer.start + index * read, outer.place + index * written
        made = _composed(Piece(outer.source, start, place, rest), inner, total)
        if made is None or len(found) > CUTS:
            return None
        found += made
    return found
