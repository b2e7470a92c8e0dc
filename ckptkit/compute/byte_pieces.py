"""Bytes in pieces: cut to whole elements, and several streams of them in step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Piece = bytes | memoryview
Pieces = Iterator[Piece]


def aligned(pieces: Iterable[Piece], unit: int, size: int) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of at most `size`, each a multiple of `unit`.

    Nothing is copied where pieces are whole numbers of units.
    """
    rest = b""
    for piece in pieces:
        view = memoryview(rest + piece if rest else piece)
        whole = len(view) // unit * unit
        for at in range(0, whole, size):
            yield view[at : min(at + size, whole)]
        rest = bytes(view[whole:])


def in_step(
    streams: Iterable[Iterable[Piece]], units: Sequence[int], most: int
) -> Iterator[list[memoryview]]:
    """Yield pieces of all streams at once, each of as many elements, at most `most`.

    Elements of a stream have as many bytes as `units` says; all have the same number of them.
    """
    pairs = list(zip(streams, units, strict=True))
    waiting = [aligned(stream, unit, most * unit) for stream, unit in pairs]
    held = [memoryview(b"")] * len(pairs)
    while True:
        held = [each or next(more, each) for each, more in zip(held, waiting, strict=True)]
        count = min(len(each) // unit for each, unit in zip(held, units, strict=True))
        if not count:
            return
        yield [each[: count * unit] for each, unit in zip(held, units, strict=True)]
        held = [each[count * unit :] for each, unit in zip(held, units, strict=True)]
