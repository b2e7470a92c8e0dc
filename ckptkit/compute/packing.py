"""The layout of quantized weights, and readers for their codes, scales and zero points.

`Blocks` describes how to compute the elements of a weight from codes and scales. The weight is an
array of `batches` row-major matrices of `rows` x `columns` elements. Codes, scales and zero points
are separate inputs of an operation (:mod:`dequantize`).

    value = (number of the code - offset - zero) * scale [* factor] [+ bias]

``scale`` is the product or quotient of one or more arrays of numbers. Each array has one number for
each block of `height` x `width` elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.numbers import decode, encode, own_dtype
from ckptkit.compute.operation import Reader, ScratchBuffer
from ckptkit.core.dtypes import BY_NAME

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TARGET = "target"  # placeholder for the dtype of the result


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The shape of an array of scales, with `rows` x `columns` numbers for each batch.

    Each number applies to a block of `height` x `width` elements. ``order`` is the layout of the
    array:

    * ``rows``: row-major.
    * ``columns``: column-major.
    * ``tiles``: padded tiles of 128 rows by 4 columns, for the scaled matrix products of cuBLAS.
    """

    height: int
    width: int
    rows: int
    columns: int
    order: str = "rows"


@dataclass(frozen=True, slots=True)
class Numbers:
    """An array of scales. `input` is the index of the input that contains the array.

    `dtype` is a dtype of tensors, or one of these names for bytes:

    * ``exponent``: the scale is 2 ** (byte - 127) in float32.
    * ``ldexp``: as ``exponent``, but the scale may be outside the range of float32.
    * ``map``: the byte is an index into the float32 numbers of the input with the index `map`.

    If ``shared`` is set, one batch of scales applies to all batches of the weight. `combine` is
    ``multiply`` or ``divide``. If a layout has several arrays, ckptkit multiplies or divides the
    product of the previous arrays by this array. Then ckptkit adds the float32 number `add`, which
    is the offset of nested scales.
    """

    input: int
    dtype: str
    grid: ScaleGrid
    combine: str = "multiply"
    shared: bool = False
    map: int = 0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of codes of `bits` bits in an input. `kind` is one of these names:

    * ``flat``: the codes are in the order of the elements. The first of two 4-bit codes is in the
      low half of a byte, or in the high half if `high_first` is set.
    * ``rows``: each row of codes has `stride` bytes, without gaps between the codes. A row starts
      at the low bits of its first byte.
    * ``words``: each row of codes has `stride` bytes. Each 32-bit word contains 32 // bits codes.
    * ``columns``: the input is an array of 32-bit words, [batch, `stride`, rows]. The words of
      column n contain the codes of row n without gaps.
    * ``interleaved``: the input is an array of 32-bit words, [columns, rows / 8]. Code number i of
      word number w is an element of row 8 * w + order[i].
    * ``turned``: the input is an array of bytes, [batch, columns, rows / 2]. A byte contains the
      codes of two adjacent rows. The code of the first row is in the low half of the byte.
    * ``parts``: the codes are split into 8 / bits parts of equal length. Field number n of each
      byte contains a code of part number n. Codes of 3 bits are split into ten parts, for the ten
      fields of 32-bit words.
    """

    kind: str
    bits: int
    high_first: bool = False
    stride: int = 0


@dataclass(frozen=True, slots=True)
class ZeroPoint:
    """Packed zero points, one for each block. A zero point is ``(code + add) % 2**bits - offset``.

    `kind` is the layout of the words:

    * ``across``: the words are an array [columns, words], as in GPTQ. A word contains the zero
      points of adjacent rows.
    * ``down``: the words are an array [words, columns], as in compressed-tensors. The words of a
      column contain the zero points of this column.
    * ``interleaved``: as ``across``, but the eight zero points of a word are in the order of AWQ.
    """

    input: int
    bits: int
    grid: ScaleGrid
    kind: str = "across"
    add: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """The layout of a quantized weight. The docstring of the module contains the formula.

    `table` is the name of the table that maps codes to numbers. If `table` is None, codes are
    integers. If `table` is ``map``, the input with the index `map` contains the table.
    ``map-signed`` is the same as ``map``, but code 8 is negative zero.
    """

    batches: int
    rows: int
    columns: int
    packing: Packing
    scales: tuple[Numbers, ...]
    table: str | None = None
    map: int = 0
    signed: bool = False
    offset: int = 0
    zero: ZeroPoint | Numbers | None = None
    # Index of the input that maps each column to its block. 0 means that blocks are in order.
    index: int = 0
    bias: Numbers | None = None
    subtract_bias: bool = False
    factor: float = 0.0  # float32 factor of the product; 0 means no factor
    scale_dtype: str = "float32"  # scales, and products of scales, are rounded to this dtype
    product_dtype: str = "float32"  # differences, products and sums are rounded to this dtype
    target: str = "bfloat16"

    @property
    def elements(self) -> int:
        return self.batches * self.rows * self.columns


# Codes

BAND = 8 << 20  # maximum number of bytes of packed columns in memory
# Number of unused bytes between the end of a row and the start of the next row in memory. Without
# this gap, the distance between rows could be a power of two, and all rows would use the same cache
# lines.
PADDING = 64
# Rows of the 4-bit codes in a word of AutoAWQ, from the low bits up.
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


class Span(NamedTuple):
    """A rectangle of rows and columns in one matrix of the batch."""

    batch: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    def blocks_of(self, grid: ScaleGrid) -> tuple[int, int, int, int]:
        """Return the ranges of rows and columns of the blocks that overlap this rectangle.

        The result is (first row, end row, first column, end column). The numbers count blocks of
        `grid`.
        """
        return (
            self.top // grid.height, -(-self.bottom // grid.height),
            self.left // grid.width, -(-self.right // grid.width),
        )  # fmt: skip


def unpack(data: Array, bits: int, count: int, *, high_first: bool = False) -> Array:
    """Return the first `count` codes of each row, one code per byte.

    A row starts at the low bits of its first byte, and has no gaps between codes.
    """
    import numpy as np

    if bits == 8:
        return data[:, :count]
    if bits == 4:  # unpack both codes of a byte at once, as one 16-bit number
        pairs = data.astype("<u2")
        if high_first:
            pairs = pairs << 8 | pairs >> 4
        else:
            pairs |= pairs << 4
        pairs &= np.uint16(0x0F0F)
        return pairs.view("u1").reshape(len(data), -1)[:, :count]
    groups = -(-count // 8)  # each group of eight codes starts at a byte
    if data.shape[1] < groups * bits:
        data = np.pad(data, ((0, 0), (0, groups * bits - data.shape[1])))
    source = data[:, : groups * bits].reshape(len(data), groups, bits)
    made = np.empty((len(data), groups, 8), "u1")
    for number in range(8):
        first, shift = divmod(number * bits, 8)
        np.right_shift(source[..., first], shift, out=made[..., number])
        if shift + bits > 8:
            made[..., number] |= source[..., first + 1] << (8 - shift)
    made &= (1 << bits) - 1
    return made.reshape(len(data), -1)[:, :count]


class Codes:
    """Reads the codes of rectangles in ascending order, up to element `last`."""

    def __init__(self, blocks: Blocks, read: Reader, size: int, last: int) -> None:
        self.blocks, self.packing, self.size = blocks, blocks.packing, size
        self._read, self._room = read, ScratchBuffer()
        # Number of rows up to element `last`, in all batches.
        stop = -(-last // max(1, blocks.columns))
        kind, stride, rows, columns = (
            self.packing.kind,
            self.packing.stride,
            blocks.rows,
            blocks.columns,
        )
        if kind == "columns":
            self.band = Band(read, stride, rows, 4, stop)
        elif kind == "interleaved":
            self.band = Band(read, columns, -(-rows // 8), 4, -(-stop // 8))
        elif kind == "turned":
            self.band = Band(read, columns, rows // 2, 1, -(-stop // 2))

    def __call__(self, span: Span) -> Array:
        """Return the codes of a rectangle, one code per byte."""
        rows, columns = span.shape
        kind, bits = self.packing.kind, self.packing.bits
        if kind == "flat":
            data, skip = self.flat(span)
            high = self.packing.high_first
            found = unpack(data[None], bits, skip + rows * columns, high_first=high)
            return found[0, skip:].reshape(span.shape)
        if kind == "parts":
            return self._parts(span)
        if kind == "columns":
            return self._columns(span)
        if kind == "interleaved":
            return self._interleaved(span)
        stride = self.packing.stride
        first = (span.batch * self.blocks.rows + span.top) * stride
        data = self._bytes(first, rows * stride).reshape(rows, stride)
        if kind == "rows":
            return unpack(data, bits, span.right)[:, span.left :]
        return _fields(data.view("<u4"), bits).reshape(rows, -1)[:, span.left : span.right]

    def flat(self, span: Span) -> tuple[Array, int]:
        """Return the bytes that contain the codes of a rectangle.

        Return also the number of codes in these bytes before the first code of the rectangle.
        """
        blocks, bits = self.blocks, self.packing.bits
        first = (span.batch * blocks.rows + span.top) * blocks.columns + span.left
        last = (span.batch * blocks.rows + span.bottom - 1) * blocks.columns + span.right
        start = first * bits // 8
        return self._bytes(start, -(-last * bits // 8) - start), first * bits % 8 // bits

    def _bytes(self, start: int, length: int) -> Array:
        import numpy as np

        memory = self._room.of(length)
        self._read.into(start, memory)
        return np.frombuffer(memory, "u1")

    def _parts(self, span: Span) -> Array:
        """Read codes in the layout ``parts``."""
        import numpy as np

        bits, itemsize, top = self.packing.bits, 1, 8
        if bits == 3:  # a 32-bit word contains ten codes
            itemsize, top = 4, 30
        count = self.size // itemsize  # number of codes in a part
        at = span.top * self.blocks.columns + span.left
        last = (span.bottom - 1) * self.blocks.columns + span.right
        found = []
        while at < last:
            part, start = divmod(at, count)
            stop = min(count, start + last - at)
            shift = top - bits * (part + 1) if self.packing.high_first else bits * part
            data = self._bytes(start * itemsize, (stop - start) * itemsize)
            found.append((data.view(f"<u{itemsize}") >> shift & (1 << bits) - 1).astype("u1"))
            at += stop - start
        return np.concatenate(found).reshape(span.shape)

    def _columns(self, span: Span) -> Array:
        """Read codes in the layout ``columns`` of GPTQ."""
        import numpy as np

        bits = self.packing.bits
        words = self.band(span.batch, span.top, span.bottom)
        skip = 0
        if 32 % bits == 0:  # each code is in a single word, so skip words outside the rectangle
            each = 32 // bits
            skip = span.left // each * each
            words = words[span.left // each : -(-span.right // each)]
        turned = np.ascontiguousarray(words.T).view("u1")
        return unpack(turned, bits, span.right - skip)[:, span.left - skip :]

    def _interleaved(self, span: Span) -> Array:
        """Read codes in the layout ``interleaved`` of AWQ."""
        import numpy as np

        words = self.band(span.batch, span.top // 8, -(-span.bottom // 8))
        turned = np.ascontiguousarray(words[span.left : span.right].T)
        made = np.empty((len(turned), 8, turned.shape[1]), "u1")
        for number, row in enumerate(INTERLEAVED):
            made[:, row] = turned >> 4 * number & 15
        skip = span.top % 8
        return made.reshape(-1, turned.shape[1])[skip : skip + span.bottom - span.top]


class Band:
    """Reads columns of matrices, and keeps some columns in memory.

    A matrix has `height` rows and `wide` columns. The class reads more columns than requested, up
    to column `stop`. `stop` counts the columns of all matrices.
    """

    def __init__(self, read: Reader, height: int, wide: int, itemsize: int, stop: int) -> None:
        self._read, self._height, self._wide, self._stop = read, height, wide, stop
        self._itemsize, self._room = itemsize, ScratchBuffer()
        self._held = (-1, 0, 0)  # the columns in memory: matrix, first column, end column
        self._band: Array

    def __call__(self, matrix: int, first: int, end: int) -> Array:
        """Return the columns of a matrix from `first` to `end`."""
        import numpy as np

        held, start, stop = self._held
        if held != matrix or first < start or end > stop:
            size, height = self._itemsize, self._height
            most = first + BAND // (height * size)
            stop = min(max(end, min(most, self._stop - matrix * self._wide)), self._wide)
            length = (stop - first) * size
            pitch = length + PADDING
            memory = self._room.of(height * pitch)
            rows = [memory[at : at + length] for at in range(0, height * pitch, pitch)]
            self._read.rows((matrix * height * self._wide + first) * size, self._wide * size, rows)
            band = np.frombuffer(memory, f"<u{size}").reshape(height, -1)
            self._band, self._held, start = band, (matrix, first, stop), first
        return self._band[:, first - start : end - start]


def _fields(words: Array, bits: int) -> Array:
    """Return the 32 // bits codes of each word. The result has an additional last dimension."""
    import numpy as np

    shifts = np.arange(0, 32 - bits + 1, bits, dtype="<u4")
    return (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype("u1")


# Scales and zero points

EXPONENTS = ("exponent", "ldexp")


def is_byte(dtype: str) -> bool:
    """Return True if a scale of this dtype has one byte."""
    return dtype in EXPONENTS or (dtype != "map" and BY_NAME[dtype].bits == 8)


@lru_cache
def table_of(name: str) -> Array:
    """Return a read-only array with the float32 number of each code of the table `name`."""
    import numpy as np

    if name in ("e2m1", "e2m1+0"):
        positive = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "<f4")
        values = np.concatenate([positive, -positive])
        values[8] = 0.0 if name == "e2m1+0" else -0.0
    elif name == "e2m3":
        values = np.arange(64, dtype="u1").view(own_dtype("float6_e2m3fn")).astype("<f4")
    elif name in EXPONENTS:  # 2**128 becomes infinity
        with np.errstate(over="ignore"):
            values = np.ldexp(np.ones(256, "<f4"), np.arange(256) - 127).astype("<f4")
    else:
        values = decode(bytes(range(256)), BY_NAME[name])
    values.setflags(write=False)
    found: Array = values
    return found


class Scale:
    """Reads an array of scales. If `whole` is set, each read returns the scales of all columns."""

    def __init__(
        self, numbers: Numbers, reads: Sequence[Reader], sizes: Sequence[int], whole: bool
    ) -> None:
        import numpy as np

        self.numbers, self.grid, self._whole = numbers, numbers.grid, whole
        self._read, self._size = reads[numbers.input], sizes[numbers.input]
        self._table: Array | None = None
        if numbers.dtype == "map":
            self._table = np.frombuffer(reads[numbers.map].copy(0, sizes[numbers.map]), "<f4")
        elif numbers.dtype in EXPONENTS:
            self._table = table_of(numbers.dtype)
        self._itemsize = 1 if self._table is not None else BY_NAME[numbers.dtype].itemsize
        self._of: tuple[int, ...] | None = None  # the blocks whose scales are in `_part`
        self._part: Array
        self._batch = -1, np.empty(0)  # a batch and its scales, for orders other than "rows"

    def part(self, span: Span) -> Array:
        """Return the scales of the blocks that overlap a rectangle, as float32.

        The result has the shape [rows of blocks, columns of blocks].
        """
        key = self._blocks(span)
        if self._of != key:
            self._of, self._part = key, self.decoded(self.raw(span))
        return self._part

    def decoded(self, raw: Array) -> Array:
        """Convert scales from their dtype in the file to float32."""
        import numpy as np

        data = np.ascontiguousarray(raw).reshape(-1).view("u1")
        if self._table is not None:
            made = np.take(self._table, data, mode="clip")
        else:
            made = decode(data.data, BY_NAME[self.numbers.dtype]).astype("<f4")
        # Replace each NaN by numpy's NaN. Rounding could convert a NaN with other bits to infinity.
        made[np.isnan(made)] = np.nan
        found: Array = made.reshape(raw.shape)
        return found

    def _blocks(self, span: Span) -> tuple[int, int, int, int, int]:
        top, bottom, left, right = span.blocks_of(self.grid)
        if self._whole:
            left, right = 0, self.grid.columns
        return 0 if self.numbers.shared else span.batch, top, bottom, left, right

    def raw(self, span: Span) -> Array:
        """Return the same scales as `part`, but not converted to float32."""
        import numpy as np

        grid, size = self.grid, self._itemsize
        batch, top, bottom, left, right = self._blocks(span)
        if grid.order != "rows":
            if self._batch[0] != batch:
                self._batch = batch, self._all(batch)
            return self._batch[1][top:bottom, left:right]
        first, wide = batch * grid.rows + top, right - left
        if wide == grid.columns or bottom - top == 1:
            data = self._read.copy(
                (first * grid.columns + left) * size, (bottom - top) * wide * size
            )
        else:
            starts = ((first + row) * grid.columns + left for row in range(bottom - top))
            data = b"".join([self._read.copy(each * size, wide * size) for each in starts])
        return np.frombuffer(data, f"<u{size}").reshape(bottom - top, wide)

    def _all(self, batch: int) -> Array:
        """Return all scales of a batch, or of all batches if the order is ``tiles``.

        The scales are not converted to float32.
        """
        import numpy as np

        rows, columns, size = self.grid.rows, self.grid.columns, self._itemsize
        if self.grid.order == "columns":
            length = rows * columns * size
            data = self._read.copy(batch * length, length)
            return np.frombuffer(data, f"<u{size}").reshape(columns, rows).T
        tiles = np.frombuffer(self._read.copy(0, self._size), f"<u{size}")
        tiles = tiles.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
        made: Array = tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :columns]
        return made


class PackedZero:
    """Reads packed zero points of a few bits. All zero points are in memory, as float32."""

    def __init__(self, zero: ZeroPoint, read: Reader, size: int, whole: bool) -> None:
        import numpy as np

        self.grid, self._whole = zero.grid, whole
        data = np.frombuffer(read.copy(0, size), "u1")
        rows, columns = zero.grid.rows, zero.grid.columns
        if zero.kind == "down":
            turned = np.ascontiguousarray(data.view("<u4").reshape(-1, columns).T)
            codes = unpack(turned.view("u1"), zero.bits, rows).T
        else:
            codes = unpack(data.reshape(columns, -1), zero.bits, rows).T
        if zero.kind == "interleaved":
            codes = codes.reshape(-1, 8, columns)[:, np.argsort(INTERLEAVED)].reshape(-1, columns)
        shifted = (codes.astype("<i2") + zero.add) % (1 << zero.bits) - zero.offset
        self._numbers: Array = np.ascontiguousarray(shifted, "<f4")
        first = shifted.reshape(-1)[:1]
        # The value of all zero points, or None if they differ.
        self.same = int(first[0]) if (shifted == first).all() else None

    def part(self, span: Span) -> Array:
        top, bottom, left, right = span.blocks_of(self.grid)
        if self._whole:
            left, right = 0, self.grid.columns
        return self._numbers[top:bottom, left:right]


def rounded(values: Array, dtype: str) -> Array:
    """Round float32 numbers to the dtype `dtype`. Return float32 numbers."""
    if dtype == "float32":
        return values
    kind = BY_NAME[dtype]
    made: Array = decode(encode(values.reshape(-1), kind), kind).reshape(values.shape)
    return made


def combined(scales: Sequence[Scale], span: Span, dtype: str) -> Array:
    """Return the product of all scales for each block that overlaps a rectangle.

    Each step of the computation is rounded to `dtype`.
    """
    first, *others = scales
    made = rounded(first.part(span), dtype)
    for each in others:
        part = each.part(span)
        if part.size > 1:  # repeat the scale of a large block for each small block inside
            rows = places(span.top, span.bottom, first.grid.height, each.grid.height)
            columns = places(span.left, span.right, first.grid.width, each.grid.width)
            part = part[rows[:, None], columns]
        made = joined(made, rounded(part, dtype), each.numbers, dtype)
    return made


def joined(scale: Array, part: Array, how: Numbers, dtype: str) -> Array:
    """Return the product or the quotient of two arrays of scales."""
    import numpy as np

    made = scale / part if how.combine == "divide" else scale * part
    if how.add:
        made = made + np.float32(how.add)
    return rounded(made, dtype)


def places(start: int, stop: int, fine: int, coarse: int) -> Array:
    """Return an array: for each small block in a range, the index of the large block around it.

    The range is from element `start` to `stop`. The first large block of the range has the index 0.
    A small block has `fine` elements, and a large block has `coarse` elements.
    """
    import numpy as np

    first = np.arange(start // fine, -(-stop // fine)) * fine  # elements
    made: Array = first // coarse - start // coarse
    return made


def apply(how: Any, values: Array, part: Array, grid: ScaleGrid, span: Span, index: Any) -> None:
    """Combine each element of a rectangle with the scale of its block, in place.

    `how` is a numpy function such as `np.multiply`. `part` contains the scales of the blocks that
    overlap the rectangle, or their zero points or biases. If `index` maps columns to blocks, `part`
    contains the scales of all columns of blocks.
    """
    import numpy as np

    (rows, columns), left, width, height = span.shape, span.left, grid.width, grid.height
    if part.size == 1:
        how(values, part[0, 0], out=values)
        return
    if index is not None:
        part = part[:, index[left : span.right]]
    elif part.shape[1] > 1 and width > 1:
        part = np.repeat(part, width, axis=1)[:, left % width : left % width + columns]
    if len(part) in (1, rows):
        how(values, part, out=values)
        return
    first = span.top // height  # the index of the first row of blocks
    for number, numbers in enumerate(part, first):
        own = values[max(number * height - span.top, 0) : (number + 1) * height - span.top]
        how(own, numbers, out=own)
