"""Make numbers of the codes and scales of quantized weights: the operation ``blocks``.

The output is made in tiles that stay in a core's cache; what :class:`Blocks` says of an element is
done to all of a tile at once (:mod:`machine`). Where scales are bytes, a table holds the result for
each pair of a scale and a code (:mod:`tabled`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.compute.blocks import Blocks
from ckptkit.compute.gather import Read
from ckptkit.compute.machine import TALL, TILE, WIDE, Machine
from ckptkit.compute.packed import Span
from ckptkit.compute.tabled import Tabled, is_tabled
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Derived, Extent, Range


class Reader:
    """Reads bytes of an extent at an offset, as a new object or into memory that is there."""

    def __init__(self, extent: Extent, read: Read) -> None:
        self._extent, self._read = extent, read

    def __call__(self, at: int, length: int) -> bytes:
        return bytes(self._read(at, length))  # the memory read into is used again

    def into(self, at: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from offset `at`."""
        if isinstance(self._extent, Range):
            self._extent.source.read_into(self._extent.offset + at, buffer)
        else:
            buffer[:] = self._read(at, len(buffer))

    def rows(self, at: int, pitch: int, rows: Sequence[memoryview]) -> None:
        """Fill the rows with the bytes from offset `at`, each `pitch` bytes after the last."""
        if isinstance(self._extent, Range):
            self._extent.source.read_into_apart(self._extent.offset + at, pitch, rows)
        else:
            for number, row in enumerate(rows):
                row[:] = self._read(at + number * pitch, len(row))


def dequantize(
    reads: Sequence[Read], derived: Derived, start: int, stop: int
) -> Iterator[memoryview]:
    """Bytes `start` to `stop` of the elements; each of `reads` reads one input."""
    import numpy as np

    (blocks,) = derived.parameters
    assert isinstance(blocks, Blocks)
    size = dtypes.BY_NAME[blocks.target].itemsize
    first, last = start // size, -(-stop // size)
    kind = Tabled if is_tabled(blocks) else Machine
    readers = [Reader(*pair) for pair in zip(derived.inputs, reads, strict=True)]
    machine = kind(blocks, readers, [each.length for each in derived.inputs], last)
    for begin, span in spans(blocks, first, last):
        at = begin * size
        with np.errstate(all="ignore"):  # infinities and NaN are those of the libraries too
            made = machine(span)
        yield made[max(start - at, 0) : min(stop - at, len(made))]


def spans(blocks: Blocks, first: int, last: int) -> Iterator[tuple[int, Span]]:
    """Yield what covers elements `first` to `last`: whole rows, or a part of one.

    Each comes with its first element. They are in order.
    """
    rows, columns = blocks.rows, blocks.columns
    tall = 1 << (max(1, TILE // max(1, columns)).bit_length() - 1)  # blocks of 128 rows end there
    tall = max(tall, TALL.get(blocks.packing.kind, 1))
    while first < last:
        row, left = divmod(first, columns)
        batch, top = divmod(row, rows)
        if columns > WIDE:
            left -= left % TILE
            right = min(left + TILE, columns)
            yield row * columns + left, Span(batch, top, top + 1, left, right)
            first = row * columns + right
        else:
            bottom = min(top - top % tall + tall, rows, -(-last // columns) - batch * rows)
            yield row * columns, Span(batch, top, bottom, 0, columns)
            first = (batch * rows + bottom) * columns
