"""From copies to byte ranges: the simplest form that gives the elements of a target.

In this order: one range; ranges and strided views one after another; one strided view; boxes of an
array. What the sources are made of is looked through, so that steps in a row compose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter

from ckptkit.compute.gather import Chunks, Gather
from ckptkit.compute.operation import HELD, concat, part
from ckptkit.core.bytesource import Derived, Extent, Memory, Range, Record, starts_anywhere
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.text import flatten
from ckptkit.rules.composing import Piece, looked_through
from ckptkit.rules.copies import Copy
from ckptkit.rules.grid import Grid, normal

RUN = 128 << 10  # bytes of a run that is copied as a range of its own
RUNS = 50_000  # runs that one target is cut into
_ZEROS = Range(Memory(bytes(16), "zeros"), 0, 16)


@dataclass(frozen=True, slots=True)
class Copied:
    """A record that is put together from copies of others; found out when it is needed."""

    records: tuple[Record, ...]
    copies: tuple[Copy, ...]
    itemsize: int
    length: int  # bytes

    def locate(self) -> Extent:
        located: dict[int, Extent] = {}
        pieces = []
        for source, start, place, dims in self.copies:
            if source is None:
                pieces.append(Piece(_ZEROS, 0, place, tuple((n, 0, t) for n, _, t in dims)))
                continue
            if source not in located:
                located[source] = self.records[source].locate()
            pieces.append(Piece(located[source], start, place, dims))
        return lowered(pieces, self.itemsize, self.length // self.itemsize)


def how(copies: Sequence[Copy], itemsize: int) -> str:
    """``joined`` for runs of bytes, ``transposed`` if rows become columns, else ``gathered``."""
    kinds = {_kind(normal(copy.dims), itemsize) for copy in copies}
    return next((kind for kind in ("transposed", "gathered") if kind in kinds), "joined")


def _kind(dims: Sequence[tuple[int, int, int]], itemsize: int) -> str:
    if len(dims) < 2 and all(read == written == 1 for _, read, written in dims):
        return "joined"
    n, read, written = dims[-1]
    if read == written == 1:
        return "joined" if n * itemsize >= RUN else "gathered"
    return "transposed" if any(dim[1] == 1 for dim in dims) else "gathered"


def lowered(pieces: Sequence[Piece], itemsize: int, total: int) -> Extent:
    """The bytes of `total` elements. Raises UnsupportedError for what takes too long to read."""
    found = [
        piece._replace(dims=normal(piece.dims))
        for piece in flatten(looked_through(each, itemsize) for each in pieces)
    ]
    if not total:
        return Range(_ZEROS.source, 0, 0)
    for piece in found:
        _check_readable(piece, itemsize)
    runs = sum(_runs(piece, itemsize) or 0 for piece in found)
    if runs <= RUNS and all(_runs(p, itemsize) or _is_dense(p) for p in found):
        return _joined(found, itemsize)
    return _boxes(found, itemsize, total) or _joined(_unrolled(found), itemsize)


def _runs(piece: Piece, itemsize: int) -> int | None:
    """Count the runs of bytes of a piece; None if there are several short ones."""
    if not piece.dims:
        return 1
    n, read, written = piece.dims[-1]
    if (read, written) != (1, 1):
        return None
    if len(piece.dims) > 1 and n * itemsize < RUN:
        return None
    return prod(n for n, _, _ in piece.dims[:-1])


def _is_dense(piece: Piece) -> bool:
    """Return whether the elements are contiguous in the target."""
    step = 1
    for n, _, written in reversed(piece.dims):
        if written != step:
            return False
        step *= n
    return True


def _joined(pieces: Sequence[Piece], itemsize: int) -> Extent:
    """Pieces that each lie in a row of the target, one after another."""
    parts: list[tuple[int, Extent]] = []
    for piece in pieces:
        if _runs(piece, itemsize) is None:
            parts.append((piece.place, _gathered(piece, itemsize)))
            continue
        run = piece.dims[-1][0] if piece.dims else 1
        for start, place in _corners(piece, piece.dims[:-1]):
            parts.append((place, part(piece.source, start * itemsize, run * itemsize)))
    parts.sort(key=itemgetter(0))
    merged: list[Extent] = []
    for _, extent in parts:
        last = merged[-1] if merged else None
        if isinstance(last, Range) and isinstance(extent, Range) and _follows(last, extent):
            merged[-1] = last._replace(length=last.length + extent.length)
        else:
            merged.append(extent)
    return concat(merged)


def _follows(one: Range, other: Range) -> bool:
    return one.source is other.source and one.offset + one.length == other.offset


def _corners(piece: Piece, dims: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first element in source and target for all indices of the given dimensions."""
    if not dims:
        yield piece.start, piece.place
        return
    (n, read, written), rest = dims[0], dims[1:]
    for index in range(n):
        moved = piece._replace(
            start=piece.start + index * read, place=piece.place + index * written
        )
        yield from _corners(moved, rest)


def _gathered(piece: Piece, itemsize: int) -> Derived:
    shape = tuple(n for n, _, _ in piece.dims)
    stride = tuple(read for _, read, _ in piece.dims)
    view = Gather(itemsize, shape, stride, piece.start * itemsize)
    return Derived(view, (piece.source,), prod(shape) * itemsize)


def _boxes(pieces: Sequence[Piece], itemsize: int, total: int) -> Derived | None:
    """One array, of which each piece is a box; None if the pieces do not fall into boxes."""
    grid = Grid((written for _, _, written in flatten(piece.dims for piece in pieces)), total)
    if not grid.sizes:
        return None
    boxes = []
    for piece in pieces:
        box = grid.box(piece.place, [(n, written, read) for n, read, written in piece.dims])
        if box is None:
            return None
        offsets, sizes, strides = zip(*box, strict=True)
        boxes.append((offsets, sizes, strides, piece.start * itemsize))
    sources = tuple(piece.source for piece in pieces)
    return Derived(Chunks(itemsize, tuple(grid.sizes), tuple(boxes)), sources, total * itemsize)


def _unrolled(pieces: Sequence[Piece]) -> list[Piece]:
    """Cut pieces along their outer dimensions until each is a row of the target."""
    found: list[Piece] = []
    for piece in pieces:
        outer = 0
        while not _is_dense(piece._replace(dims=piece.dims[outer:])):
            outer += 1
        if len(found) + prod(n for n, _, _ in piece.dims[:outer]) > RUNS:
            raise UnsupportedError(
                "a target is made of too many small pieces", hint="say it in two steps of rules"
            )
        inner = piece.dims[outer:]
        for start, place in _corners(piece, piece.dims[:outer]):
            found.append(Piece(piece.source, start, place, inner))
    return found


def _check_readable(piece: Piece, itemsize: int) -> None:
    """Raise UnsupportedError for a large source that can only be computed from its beginning."""
    source = piece.source
    if starts_anywhere(source) or source.length <= HELD:
        return
    whole = len(piece.dims) < 2 and _runs(piece, itemsize) is not None
    if not whole or piece.start:
        raise UnsupportedError(
            "a large compressed tensor cannot be read out of order",
            hint="write it uncompressed first: `ckptkit convert {where} {new}`",
        )


def in_bytes(copies: Sequence[Copy], bits: int) -> tuple[Copy, ...] | None:
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
            Copy(source, start * bits // 8, place * bits // 8, (*outer, (n * bits // 8, 1, 1)))
        )
    return tuple(found)
