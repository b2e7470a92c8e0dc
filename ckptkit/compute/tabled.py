"""Results for each pair of a scale and a code, where scales are bytes: taken from a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.compute.blocks import Blocks
from ckptkit.compute.floats import encode
from ckptkit.compute.gather import Reading, Room
from ckptkit.compute.machine import TILE, WIDE, Machine
from ckptkit.compute.packed import Flat, Span
from ckptkit.compute.scales import is_byte, joined, places, rounded

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def is_tabled(blocks: Blocks) -> bool:
    """Return whether a code and one byte of scale determine each result."""
    first, *others = blocks.scales
    grid, bits = first.grid, blocks.packing.bits
    if not is_byte(first.dtype) or any(each.grid.rows * each.grid.columns > 1 for each in others):
        return False
    if blocks.table in (None, "map", "map-signed") or blocks.zero or blocks.bias:
        return False
    whole = blocks.columns % grid.width == 0 and (blocks.columns <= WIDE or TILE % grid.width == 0)
    return blocks.packing.kind == "flat" and whole and grid.width * bits % 8 == 0


class Tabled(Machine):
    """Takes what each pair of a scale and a code gives from a table; of 4 bits, two at once."""

    _of: int | None = None  # batch that the results are for

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reading], sizes: Sequence[int], last: int
    ) -> None:
        super().__init__(blocks, reads, sizes, last)
        self._index = Room()

    def __call__(self, span: Span) -> memoryview:
        """The bytes of the elements of a span."""
        import numpy as np

        if self._of != span.batch:
            self._results, self._of = self._computed(span), span.batch
        index = self._flat(span)
        found = np.empty(len(index), self._results.dtype)
        np.take(self._results, index, mode="clip", out=found)
        return found.view("u1").data

    def _flat(self, span: Span) -> Array:
        import numpy as np

        codes = self.codes
        assert isinstance(codes, Flat)
        data, _ = codes.bytes(span)
        first = self.scales[0]
        wide = first.grid.width * self.blocks.packing.bits // 8
        rows = places(span.top, span.bottom, 1, first.grid.height)
        scale = first.raw(span).astype("<u2")[rows] << 8
        made = self._index.like(data, "<u2")
        shape = (*scale.shape, wide)
        np.bitwise_or(scale[..., None], data.reshape(shape), out=made.reshape(shape))
        return made

    def _computed(self, span: Span) -> Array:
        """Results for all scales and codes, [scale * 256 + byte].

        Two in one number where a byte holds two codes.
        """
        import numpy as np

        first, *others = self.scales
        assert self.table is not None
        if first.numbers.dtype == "ldexp":
            exact = np.ldexp(self.table.astype("f8"), np.arange(256)[:, None] - 127)
            values = exact.astype("<f4")
        else:
            dtype = self.scale_dtype
            scale = rounded(first.decoded(np.arange(256, dtype="u1")), dtype)
            for each in others:
                scale = joined(scale, rounded(each.part(span)[0], dtype), each.numbers, dtype)
            values = rounded(self.table * scale[:, None], self.product_dtype)
        size = self.target.itemsize
        flat = np.frombuffer(encode(values.reshape(-1), self.target), f"<u{size}")
        made: Array = flat.reshape(values.shape)
        if self.blocks.packing.bits == 8:
            return flat
        pairs = np.empty((256, 16, 16, 2), made.dtype)  # of a scale, the high code, the low code
        low, high = (1, 0) if self.blocks.packing.high_first else (0, 1)
        pairs[..., low], pairs[..., high] = made[:, None], made[..., None]
        found: Array = pairs.reshape(-1).view(f"<u{2 * size}")
        return found
