"""Make numbers of the codes and scales of a span of elements, all at once and in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptkit.compute.blocks import TARGET, Blocks, Numbers, Zero
from ckptkit.compute.codes import numbers
from ckptkit.compute.floats import encode
from ckptkit.compute.gather import Reading
from ckptkit.compute.packed import Flat, Span, codes_of
from ckptkit.compute.scales import Scale, apply, combined, rounded, zero_points
from ckptkit.core import dtypes
from ckptkit.core.errors import CorruptError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TILE = 1 << 17  # elements worked on at once
WIDE = 1 << 18  # elements of a row that is made in several pieces
# Rows of a tile where a byte of the input holds several rows, or words lie down a column: as many
# as make a cache line of the input. Such tiles are cut into columns.
TALL = {"columns": 16, "interleaved": 128}
# Codes of 8 bits become float32 by a shift; what is lacking in the exponent goes into the scale.
# Shift, mask (sign, exponent, mantissa), missing exponent, first code that is not a number.
_SHIFTED = {
    "float8_e4m3fn": (20, 0x87F00000, 120, 0x7F),
    "float8_e5m2": (21, 0x8FE00000, 112, 0x7C),
}
_LARGEST = 128.0  # scale that may be multiplied by 2**120
_LEAST = 2.0**-100  # scale that gives no product below the normal numbers of float32


class Machine:
    """Makes the elements of spans, which come in rising order up to element `last`."""

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reading], sizes: Sequence[int], last: int
    ) -> None:
        import numpy as np

        self.index: Array | None = None
        if blocks.index:
            blocks, self.index = _indexed(blocks, reads[blocks.index](0, sizes[blocks.index]))
        self.blocks = blocks
        self.target = dtypes.BY_NAME[blocks.target]
        whole = self.index is not None
        self.scales = [Scale(each, reads, sizes, whole) for each in blocks.scales]
        self.bias = None if blocks.bias is None else Scale(blocks.bias, reads, sizes, whole)
        self.zero = zero_points(blocks.zero, reads, sizes, whole)
        self.codes = codes_of(blocks, reads[0], sizes[0], last)
        self.table = _table(blocks, reads, sizes)
        self.scale_dtype = self._named(blocks.scale_dtype)
        self.product_dtype = self._named(blocks.product_dtype)
        self._values = np.empty(0, "<f4")
        self._spare = np.empty(0, "<u4")
        self._has_ties = True  # some product may lie between two numbers of bfloat16
        self._pairs: Array | None = None  # the numbers of two codes in a byte

    def _named(self, name: str) -> str:
        return self.blocks.target if name == TARGET else name

    def __call__(self, span: Span) -> memoryview:
        """The bytes of the elements of a span."""
        import numpy as np

        rows, columns = span.shape
        step = max(1, TILE // rows // 512) * 512
        if self.blocks.packing.kind not in TALL or columns <= step:
            return self._encoded(self.values(span))
        unit = "<f4" if self.target.itemsize == 4 else "<u2"
        made = np.empty(span.shape, unit)
        for left in range(span.left, span.right, step):
            right = min(left + step, span.right)
            part = self._encoded(self.values(span._replace(left=left, right=right)))
            place = made[:, left - span.left : right - span.left]
            np.copyto(place, np.frombuffer(part, unit).reshape(place.shape))
        return made.reshape(-1).view("u1").data

    def _encoded(self, values: Array) -> memoryview:
        """The bytes of float32 numbers as elements of the target."""
        import numpy as np

        flat = values.reshape(-1)
        if self.target.name != "bfloat16":
            return encode(flat, self.target)
        if self._has_ties:
            bits = self._rounded_bits(flat)
        else:
            bits = flat.view("<u4")
            bits += 0x8000
        bits >>= 16
        made = np.empty(len(bits), "<u2")
        np.copyto(made, bits, casting="unsafe")
        return made.view("u1").data

    def _rounded_bits(self, flat: Array) -> Array:
        """The bits of float32 numbers with half of a last place of bfloat16 added, ties to even.

        No NaN has bits that are carried into its sign: all of them are made here.
        """
        import numpy as np

        spare, bits = self._memory(len(flat)), flat.view("<u4")
        np.right_shift(bits, 16, out=spare)
        spare &= 1
        spare += bits
        spare += 0x7FFF
        return spare

    def values(self, span: Span) -> Array:
        """The elements as float32, not yet rounded to the target; the next overwrite them."""
        import numpy as np

        blocks = self.blocks
        scale = combined(self.scales, span, self.scale_dtype)
        self._has_ties = True
        values, scale = self._numbers(span, scale)
        if self.zero is not None:
            self._apply(np.subtract, values, self.zero, self.zero.part(span), span)
            if isinstance(blocks.zero, Numbers):  # packed ones give small integers
                self._round(values)
        self._apply(np.multiply, values, self.scales[0], scale, span)
        more = bool(blocks.factor) or self.bias is not None
        if more or self.product_dtype != self.target.name:
            self._round(values)
        if blocks.factor:
            values *= np.float32(blocks.factor)
        if self.bias is not None:
            how = np.subtract if blocks.subtract_bias else np.add
            self._apply(how, values, self.bias, self.bias.part(span), span)
            self._round(values)
        return values

    def _apply(self, how: Any, values: Array, owner: Any, part: Array, span: Span) -> None:
        spare = self._memory(values.size).view("<f4")
        apply(how, values, part, owner.grid, span, self.index, spare)

    def _memory(self, count: int) -> Array:
        """Memory for so many numbers, which anything may use for a while."""
        import numpy as np

        if len(self._spare) < count:
            self._spare = np.empty(count, "<u4")
        return self._spare[:count]

    def _round(self, values: Array) -> None:
        """Round float32 numbers to what products are rounded to, in place."""
        import numpy as np

        if self.product_dtype == "bfloat16":
            bits = self._rounded_bits(values.reshape(-1))
            np.bitwise_and(bits, 0xFFFF0000, out=values.reshape(-1).view("<u4"))
        elif self.product_dtype != "float32":
            np.copyto(values, rounded(values, self.product_dtype))

    def _buffer(self, span: Span) -> Array:
        import numpy as np

        rows, columns = span.shape
        if len(self._values) < rows * columns:
            self._values = np.empty(rows * columns, "<f4")
        if self.target.itemsize == 4:  # handed out as they are
            return np.empty((rows, columns), "<f4")
        return self._values[: rows * columns].reshape(rows, columns)

    def _numbers(self, span: Span, scale: Array) -> tuple[Array, Array]:
        """Return the numbers that the codes represent, and their scale."""
        import numpy as np

        values = self._buffer(span)
        if self.table is None:
            codes = self.codes(span)
            np.copyto(values, codes.view("i1") if self.blocks.signed else codes)
            if self.blocks.offset:
                values -= np.float32(self.blocks.offset)
            return values, scale
        codes_of_bytes = self._bytes(span)
        if codes_of_bytes is not None:
            np.take(self._two(), codes_of_bytes, out=values.reshape(-1).view("<u8"), mode="clip")
            return values, scale
        codes = self.codes(span)
        shifted = self._shifted(codes, scale, values)
        if shifted is not None:
            return values, shifted
        np.take(self.table, codes, out=values, mode="clip")
        return values, scale

    def _bytes(self, span: Span) -> Array | None:
        """The bytes of codes of 4 bits that lie in order, None where that is not how they lie."""
        rows, columns = span.shape
        if not isinstance(self.codes, Flat) or self.codes.bits != 4 or rows * columns % 2:
            return None
        data, skip = self.codes.bytes(span)
        return None if skip else data

    def _two(self) -> Array:
        """Two float32 numbers for each byte."""
        import numpy as np

        if self._pairs is None:
            assert self.table is not None
            low, high = self.table[np.arange(256) & 15], self.table[np.arange(256) >> 4]
            order = (high, low) if self.blocks.packing.high_first else (low, high)
            self._pairs = np.stack(order, axis=-1).astype("<f4").reshape(-1).view("<u8")
        return self._pairs

    def _shifted(self, codes: Array, scale: Array, values: Array) -> Array | None:
        """Make numbers of codes of 8 bits without a table: 2**120 times too small.

        The result is the scale that makes up for it, None where that is not possible: codes that
        are not numbers, scales that are too large. Products are the same, as are their roundings.
        """
        import numpy as np

        how = _SHIFTED.get(self.blocks.table or "")
        if how is None or self.zero is not None or not (np.abs(scale) < _LARGEST).all():
            return None
        shift, mask, missing, odd = how
        if (codes & np.uint8(0x7F)).max() >= odd:
            return None
        integers = values.view("<i4")
        np.copyto(integers, codes.view("i1"))
        integers <<= shift
        bits = values.view("<u4")
        bits &= np.uint32(mask)
        self._has_ties = self.product_dtype != "float32" or _has_ties(scale)
        larger: Array = scale * np.float32(2.0**missing)
        return larger


def _has_ties(scale: Array) -> bool:
    """Return whether a product with a code of 8 bits may lie in the middle of two bfloat16 numbers.

    Codes have at most four significant bits, so that eight products have all there are.
    """
    import numpy as np

    if not (np.abs(scale) >= _LEAST).all():
        return True
    products = scale[..., None] * np.arange(8, 16, dtype="<f4")
    return bool(((products.view("<u4") & 0xFFFF) == 0x8000).any())


def _table(blocks: Blocks, reads: Sequence[Reading], sizes: Sequence[int]) -> Array | None:
    import numpy as np

    if blocks.table not in ("map", "map-signed"):
        return None if blocks.table is None else numbers(blocks.table)
    found = np.frombuffer(reads[blocks.map](0, sizes[blocks.map]), "<f4").copy()
    found[np.isnan(found)] = np.nan
    if (
        blocks.table == "map-signed" and found[8] == 0
    ):  # as bitsandbytes computes, whatever it writes
        found[8] = -0.0
    made: Array = found
    return made


def _indexed(blocks: Blocks, data: bytes) -> tuple[Blocks, Array | None]:
    """The index, None where the blocks of columns are in order after all and of one width.

    Raises CorruptError for an index that leads out of the scales.
    """
    import numpy as np

    index = np.frombuffer(data, "<i4")
    groups = blocks.scales[0].grid.columns
    if len(index) != blocks.columns or ((index < 0) | (index >= groups)).any():
        raise CorruptError("the groups of columns (g_idx) lead out of the scales")
    changes = np.flatnonzero(index[1:] != index[:-1])
    width = int(changes[0]) + 1 if len(changes) else blocks.columns
    if (index != np.arange(len(index)) // width).any():
        return blocks, index
    scales = tuple(replace(each, grid=replace(each.grid, width=width)) for each in blocks.scales)
    zero = blocks.zero
    if isinstance(zero, (Zero, Numbers)):
        zero = replace(zero, grid=replace(zero.grid, width=width))
    return replace(blocks, scales=scales, zero=zero, index=0), None
