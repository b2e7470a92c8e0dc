"""Dequantize weights that consist of codes and scales, and quantized torch tensors.

The output is computed in tiles that fit the cache of a core. :mod:`packing` contains the formula
for an element. Each step of the formula processes a complete tile, in place. If scales are bytes, a
table contains the result for each pair of a scale and a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, encode, own_dtype, rounded
from ckptkit.compute.operation import (
    Pieces,
    Reader,
    ScratchBuffer,
    as_bytes,
    by_rows,
    ends_after,
    stream,
    within,
)
from ckptkit.compute.packing import TARGET, Blocks, Numbers, ScaleGrid, ZeroPoint
from ckptkit.compute.strided_read import transposed_copy
from ckptkit.core.bytesource import Derived, Operation, Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError, TensorError
from ckptkit.core.tensor import Tensor

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

    def blocks_of(self, grid: ScaleGrid, whole: bool) -> tuple[int, int, int, int]:
        """Return the ranges of rows and columns of the blocks that overlap this rectangle.

        The result is (first row, end row, first column, end column). The numbers count blocks of
        `grid`. If `whole` is set, the range of columns contains all columns.
        """
        left, right = self.left // grid.width, -(-self.right // grid.width)
        if whole:
            left, right = 0, grid.columns
        return self.top // grid.height, -(-self.bottom // grid.height), left, right


def unpack(data: Array, bits: int, count: int, *, high_first: bool = False) -> Array:
    """Return the first `count` codes of each row, one code per byte.

    A row starts at the low bits of its first byte, and has no gaps between codes.
    """
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
        stop, rows = -(-last // max(1, blocks.columns)), blocks.rows
        if self.packing.kind == "columns":
            self.band = Band(read, self.packing.stride, rows, 4, stop)
        elif self.packing.kind == "interleaved":
            self.band = Band(read, blocks.columns, -(-rows // 8), 4, -(-stop // 8))
        elif self.packing.kind == "turned":
            self.band = Band(read, blocks.columns, rows // 2, 1, -(-stop // 2))

    def __call__(self, span: Span) -> Array:
        """Return the codes of a rectangle, one code per byte."""
        rows, columns = span.shape
        kind, bits = self.packing.kind, self.packing.bits
        if kind == "flat":
            data, skip = self.flat(span)
            count, high = skip + rows * columns, self.packing.high_first
            return unpack(data[None], bits, count, high_first=high)[0, skip:].reshape(span.shape)
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
        memory = self._room.of(length)
        self._read.into(start, memory)
        return np.frombuffer(memory, "u1")

    def _parts(self, span: Span) -> Array:
        """Read codes in the layout ``parts``."""
        bits = self.packing.bits
        itemsize, top = (4, 30) if bits == 3 else (1, 8)  # a 32-bit word contains ten codes
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
        batch = 0 if self.numbers.shared else span.batch
        return batch, *span.blocks_of(self.grid, self._whole)

    def raw(self, span: Span) -> Array:
        """Return the same scales as `part`, but not converted to float32."""
        grid, size = self.grid, self._itemsize
        batch, top, bottom, left, right = self._blocks(span)
        if grid.order != "rows":
            if self._batch[0] != batch:
                self._batch = batch, self._all(batch)
            return self._batch[1][top:bottom, left:right]
        # Of several rows, read the scales of all columns. A single row may be very long.
        start, stop = (left, right) if bottom - top == 1 else (0, grid.columns)
        first = (batch * grid.rows + top) * grid.columns + start
        data = self._read.copy(first * size, (bottom - top) * (stop - start) * size)
        rows = np.frombuffer(data, f"<u{size}").reshape(bottom - top, -1)
        return rows[:, left - start : right - start]

    def _all(self, batch: int) -> Array:
        """Return all scales of a batch, or of all batches if the order is ``tiles``.

        The scales are not converted to float32.
        """
        rows, columns, size = self.grid.rows, self.grid.columns, self._itemsize
        if self.grid.order == "columns":
            length = rows * columns * size
            data = self._read.copy(batch * length, length)
            return np.frombuffer(data, f"<u{size}").reshape(columns, rows).T
        tiles = np.frombuffer(self._read.copy(0, self._size), f"<u{size}")
        tiles = tiles.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
        return tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


class PackedZero:
    """Reads packed zero points of a few bits. All zero points are in memory, as float32."""

    def __init__(self, zero: ZeroPoint, read: Reader, size: int, whole: bool) -> None:
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
        top, bottom, left, right = span.blocks_of(self.grid, self._whole)
        return self._numbers[top:bottom, left:right]


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
    made = scale / part if how.combine == "divide" else scale * part
    if how.add:
        made = made + np.float32(how.add)
    return rounded(made, dtype)


def places(start: int, stop: int, fine: int, coarse: int) -> Array:
    """Return an array: for each small block in a range, the index of the large block around it.

    The range is from element `start` to `stop`. The first large block of the range has the index 0.
    A small block has `fine` elements, and a large block has `coarse` elements.
    """
    first = np.arange(start // fine, -(-stop // fine)) * fine  # elements
    made: Array = first // coarse - start // coarse
    return made


def apply(how: Any, values: Array, part: Array, grid: ScaleGrid, span: Span, index: Any) -> None:
    """Combine each element of a rectangle with the scale of its block, in place.

    `how` is a numpy function such as `np.multiply`. `part` contains the scales of the blocks that
    overlap the rectangle, or their zero points or biases. If `index` maps columns to blocks, `part`
    contains the scales of all columns of blocks.
    """
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


# Dequantization of weights

# Number of elements per tile. The numpy calls must be long enough that threads rarely wait for the
# interpreter lock. Two float32 copies of a tile must fit the cache of a core.
TILE = 1 << 18
WIDE = 1 << 19  # maximum number of elements of a row; a longer row is split into several tiles
# Number of rows per tile for layouts in which adjacent codes of the input belong to different rows
# of the weight. The rows fill a cache line of the input. For these layouts, ckptkit processes a
# tile in ranges of columns, so that each range fits the cache.
TALL = {"columns": 16, "interleaved": 128, "turned": 128}
# Maps each 8-bit dtype with at most four significant bits to its lowest code of an infinity or NaN,
# without the sign bit.
_ODD = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
# The largest and the smallest scale whose product with any code is a normal float32 number.
_LARGEST, _LEAST = 2.0**100, 2.0**-100


@dataclass(frozen=True, slots=True)
class Dequantize(Operation):
    """Dequantizes a weight. The inputs are the codes, scales and zero points of the weight."""

    blocks: Blocks
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        size = BY_NAME[self.blocks.target].itemsize
        first, last = start // size, -(-stop // size)
        kind = TabledDequantizer if is_tabled(self.blocks) else Dequantizer
        readers = [Reader(each) for each in extent.inputs]
        make = kind(self.blocks, readers, [each.length for each in extent.inputs], last)
        for begin, span in spans(self.blocks, first, last):
            with np.errstate(all="ignore"):  # the original libraries return infinities and NaN too
                made = make(span)
            yield from within((made,), begin * size, start, stop)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Return the end of each part of the output. A part has about `size` bytes.

        Parts do not split the small matrices of a batch.
        """
        matrix = extent.length // self.blocks.batches
        step = -(-size // matrix) * matrix if matrix <= 2 * size else size
        return ends_after(extent, step)


def spans(blocks: Blocks, first: int, last: int) -> Iterator[tuple[int, Span]]:
    """Yield rectangles in order. All rectangles together contain the elements `first` to `last`.

    Each item is a pair: the position of the rectangle's first element, and the rectangle. A
    rectangle consists of complete rows, or is a part of one row.
    """
    rows, columns = blocks.rows, blocks.columns
    tall = 1 << (max(1, TILE // max(1, columns)).bit_length() - 1)  # a power of two
    tall = max(tall, TALL.get(blocks.packing.kind, 1))
    while first < last:
        row, left = divmod(first, columns)
        batch, top = divmod(row, rows)
        if columns > WIDE:
            left -= left % TILE
            right = min(left + TILE, columns)
            yield row * columns + left, Span(batch, top, top + 1, left, right)
            first = row * columns + right
            continue
        end = min(top - top % tall + tall, rows, -(-last // columns) - batch * rows)
        if blocks.packing.kind == "turned":  # in the layout "turned", several rows share a scale
            top -= top % tall
            end = min(top + tall, rows)
        yield (batch * rows + top) * columns, Span(batch, top, end, 0, columns)
        first = (batch * rows + end) * columns


class Dequantizer:
    """Dequantizes rectangles in ascending order, up to element `last`."""

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reader], sizes: Sequence[int], last: int
    ) -> None:
        self.index: Array | None = None
        if blocks.index:
            blocks, self.index = _indexed(blocks, reads[blocks.index].copy(0, sizes[blocks.index]))
        whole = self.index is not None
        self.blocks, self.target = blocks, BY_NAME[blocks.target]
        self.codes = Codes(blocks, reads[0], sizes[0], last)
        self.scales = [Scale(each, reads, sizes, whole) for each in blocks.scales]
        self.bias = None if blocks.bias is None else Scale(blocks.bias, reads, sizes, whole)
        self.zero: Scale | PackedZero | None = None
        if isinstance(blocks.zero, ZeroPoint):
            self.zero = PackedZero(
                blocks.zero, reads[blocks.zero.input], sizes[blocks.zero.input], whole
            )
        elif blocks.zero is not None:
            self.zero = Scale(blocks.zero, reads, sizes, whole)
        self.table: Array | None = None
        if blocks.table in ("map", "map-signed"):
            self.table = np.frombuffer(reads[blocks.map](0, sizes[blocks.map]), "<f4").copy()
            self.table[np.isnan(self.table)] = np.nan
            if blocks.table == "map-signed" and self.table[8] == 0:
                self.table[8] = -0.0  # bitsandbytes writes 0 to the file but computes with -0
        elif blocks.table is not None:
            self.table = table_of(blocks.table)
        # The zero point that is subtracted from integer codes before the cast to float32.
        self.shift: int | None = None
        if blocks.packing.bits < 8 and not blocks.signed and isinstance(self.zero, PackedZero):
            self.shift = self.zero.same
        # The dtypes to which scales and products are rounded.
        self.scale_dtype, self.product_dtype = (
            blocks.target if name == TARGET else name
            for name in (blocks.scale_dtype, blocks.product_dtype)
        )
        self.unit = np.dtype(f"<u{self.target.itemsize}")
        self._memory, self._spare = ScratchBuffer(), ScratchBuffer()
        self._pairs: Array | None = None  # the two numbers of each pair of adjacent codes
        # A pair: the scales that `_has_ties` tested last, and the result of `_has_ties`.
        self._ties: tuple[Array, bool] | None = None

    def __call__(self, span: Span) -> memoryview:
        """Return the bytes of the elements of a rectangle."""
        rows, columns = span.shape
        made = np.empty(span.shape, self.unit)
        step = max(1, TILE // rows // 512) * 512 if self.blocks.packing.kind in TALL else columns
        for left in range(span.left, span.right, step):
            part = span._replace(left=left, right=min(left + step, span.right))
            self._fill(made[:, left - span.left : part.right - span.left], part)
        return made.reshape(-1).view("u1").data

    def _fill(self, made: Array, span: Span) -> None:
        """Fill `made` with the elements of a rectangle.

        An item of `made` has the size of an element of the target dtype.
        """
        blocks = self.blocks
        is_direct = self.target.name == "float32" and made.flags.c_contiguous
        if is_direct:
            values = made.view("<f4")
        else:
            values = np.frombuffer(self._memory.of(4 * made.size), "<f4").reshape(made.shape)
        scale = combined(self.scales, span, self.scale_dtype)
        is_nearest = self._numbers(span, values, scale)
        if self.zero is not None and self.shift is None:
            self._apply(np.subtract, values, self.zero, span)
            if isinstance(self.zero, Scale):
                self._round(values)
        apply(np.multiply, values, scale, self.scales[0].grid, span, self.index)
        if blocks.factor or self.bias is not None or self.product_dtype != self.target.name:
            self._round(values)
        if blocks.factor:
            values *= np.float32(blocks.factor)
        if self.bias is not None:
            self._apply(np.subtract if blocks.subtract_bias else np.add, values, self.bias, span)
            self._round(values)
        if is_nearest:
            bits = values.view("<u4")
            bits += np.uint32(0x8000)
            bits >>= np.uint32(16)
            np.copyto(made, bits, casting="unsafe")
        elif self.target.name == "bfloat16":
            np.copyto(made.view(own_dtype("bfloat16")), values, casting="unsafe")
        elif not is_direct:
            data = encode(values.reshape(-1), self.target)
            np.copyto(made, np.frombuffer(data, self.unit).reshape(made.shape))

    def _apply(self, how: Any, values: Array, owner: Scale | PackedZero, span: Span) -> None:
        apply(how, values, owner.part(span), owner.grid, span, self.index)

    def _round(self, values: Array) -> None:
        """Round float32 numbers to `product_dtype`, in place."""
        if self.product_dtype != "float32":
            np.copyto(values, rounded(values, self.product_dtype))

    def _numbers(self, span: Span, values: Array, scale: Array) -> bool:
        """Fill `values` with the numbers that the codes represent.

        Return False if a product of a number and its scale may be NaN or halfway between two
        bfloat16 numbers. If the result is True, the caller can round a product to bfloat16 by an
        addition to the bits of the product.
        """
        blocks, bits = self.blocks, self.blocks.packing.bits
        if self.table is None:
            codes, is_signed = self.codes(span), blocks.signed or self.shift is not None
            if self.shift is not None:
                # The subtraction of bytes may wrap around, but the signed result is correct.
                codes = codes - np.uint8(self.shift & 0xFF)
            np.copyto(values, codes.view("i1") if is_signed else codes)
            if blocks.offset:
                values -= np.float32(blocks.offset)
            return False
        if blocks.packing.kind == "flat" and bits == 4 and values.size % 2 == 0:
            pairs, skip = self.codes.flat(span)
            if not skip:
                np.take(self._two(4), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
                return False
        codes = self.codes(span)
        is_paired = codes.size % 2 == 0 and codes.flags.c_contiguous
        if bits == 8 and len(self.table) == 256 and is_paired:
            pairs = codes.reshape(-1).view("<u2")
            np.take(self._two(8), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
        else:
            np.take(self.table, codes, out=values, mode="clip")
        odd = _ODD.get(blocks.table or "", 0)
        more = self.zero or blocks.factor or self.bias or self.product_dtype != "float32"
        if not odd or more or self.target.name != "bfloat16":
            return False
        sizes = np.frombuffer(self._spare.of(codes.size), "u1").reshape(codes.shape)
        np.bitwise_and(codes, np.uint8(0x7F), out=sizes)
        if self._ties is None or self._ties[0] is not scale:
            self._ties = scale, _has_ties(scale)
        return not self._ties[1] and bool(sizes.max() < odd)

    def _two(self, bits: int) -> Array:
        """Return a table that contains two float32 numbers for each pair of codes.

        With this table, the number of lookups is half the number of codes. A computation from the
        bits of the codes would be slower. Its intermediate results are subnormal for the smallest
        codes, and many processors take 100x as long for subnormal numbers.
        """
        if self._pairs is None:
            assert self.table is not None
            pairs = np.arange(1 << 2 * bits)
            low, high = self.table[pairs & (1 << bits) - 1], self.table[pairs >> bits]
            order = (high, low) if bits == 4 and self.blocks.packing.high_first else (low, high)
            self._pairs = np.stack(order, axis=-1).astype("<f4").reshape(-1).view("<u8")
        return self._pairs


def _has_ties(scale: Array) -> bool:
    """Return True if a product of a scale and a code may be halfway between two bfloat16 numbers.

    A code has 8 bits and at most four significant bits. Therefore it is sufficient to test the
    products of the scales with the integers from 8 to 15.
    """
    sizes = np.abs(scale)
    if not ((sizes >= _LEAST) & (sizes <= _LARGEST)).all():
        return True
    products = scale[..., None] * np.arange(8, 16, dtype="<f4")
    return bool(((products.view("<u4") & 0xFFFF) == 0x8000).any())


def _indexed(blocks: Blocks, data: bytes) -> tuple[Blocks, Array | None]:
    """Return the layout of the weight, and the group number of each column.

    If the groups are in order and have equal widths, set the width in the layout, and return None
    instead of the group numbers. Raise CorruptError if a group has no scale.
    """
    index = np.frombuffer(data, "<i4")
    groups = blocks.scales[0].grid.columns
    if len(index) != blocks.columns or ((index < 0) | (index >= groups)).any():
        raise CorruptError(
            f"g_idx must contain a group number below {groups} for each of the {blocks.columns} "
            f"columns"
        )
    changes = np.flatnonzero(index[1:] != index[:-1])
    width = int(changes[0]) + 1 if len(changes) else blocks.columns
    if (index != np.arange(len(index)) // width).any():
        return blocks, index
    scales = tuple(replace(each, grid=replace(each.grid, width=width)) for each in blocks.scales)
    zero = blocks.zero
    if isinstance(zero, (ZeroPoint, Numbers)):
        zero = replace(zero, grid=replace(zero.grid, width=width))
    return replace(blocks, scales=scales, zero=zero, index=0), None


# Tables of results


def is_tabled(blocks: Blocks) -> bool:
    """Return True if each element depends only on its code and one scale byte."""
    first, *others = blocks.scales
    grid, bits = first.grid, blocks.packing.bits
    if not is_byte(first.dtype) or any(each.grid.rows * each.grid.columns > 1 for each in others):
        return False
    if blocks.table in (None, "map", "map-signed") or blocks.zero or blocks.bias:
        return False
    whole = blocks.columns % grid.width == 0 and (blocks.columns <= WIDE or TILE % grid.width == 0)
    is_flat = blocks.packing.kind == "flat" and whole and grid.width * bits % 8 == 0
    return is_flat or blocks.packing.kind == "turned"


class TabledDequantizer(Dequantizer):
    """Looks up elements in a table that contains the element for each pair of a scale and a code.

    For 4-bit codes, one lookup returns two elements.
    """

    _of: int | None = None  # index of the batch for which `_results` was computed

    def __call__(self, span: Span) -> memoryview:
        if self._of != span.batch:
            self._results, self._of = self._computed(span), span.batch
        if self.blocks.packing.kind == "turned":
            return super().__call__(span)
        data, _ = self.codes.flat(span)
        rows = places(span.top, span.bottom, 1, self.scales[0].grid.height)
        return self._taken(self.scales[0].raw(span)[rows], data).reshape(-1).view("u1").data

    def _taken(self, scale: Array, data: Array) -> Array:
        """Return the elements for `data`, which contains the bytes of the codes.

        Each scale applies to the same number of bytes.
        """
        index = np.frombuffer(self._memory.of(2 * data.size), "<u2").reshape(*scale.shape, -1)
        np.bitwise_or(scale.astype("<u2")[..., None] << 8, data.reshape(index.shape), out=index)
        found = np.empty(index.shape, self._results.dtype)
        np.take(self._results, index, mode="clip", out=found)
        return found

    def _fill(self, made: Array, span: Span) -> None:
        """Fill `made` with the elements of a rectangle.

        The input contains the transposed rectangle.
        """
        data = self.codes.band(span.batch, span.top // 2, span.bottom // 2)[span.left : span.right]
        found = self._taken(self.scales[0].raw(span).T, np.ascontiguousarray(data))
        transposed_copy(made, found.view(self.unit).reshape(len(data), -1).T)

    def _computed(self, span: Span) -> Array:
        """Return a table of elements for all pairs of a scale byte and a code byte.

        Item ``scale * 256 + byte`` is the element for a scale and the code in a byte. If a byte
        contains two codes, an item contains two elements.
        """
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
        made = np.frombuffer(encode(values.reshape(-1), self.target), self.unit)
        if self.blocks.packing.bits == 8:
            return made
        made = made.reshape(256, 16)
        pairs = np.empty((256, 16, 16, 2), self.unit)  # [scale, high code, low code, result]
        low, high = (1, 0) if self.blocks.packing.high_first else (0, 1)
        pairs[..., low], pairs[..., high] = made[:, None], made[..., None]
        found: Array = pairs.reshape(-1).view(f"<u{2 * self.unit.itemsize}")
        return found


# Quantized tensors of torch

_CHANNELS = frozenset({"float32", "float64", "int32", "int64"})  # dtypes of scales and zero points
_STORED = {"qint8": "i1", "quint8": "u1", "qint32": "<i4", "quint4x2": "u1", "quint2x4": "u1"}
_BLOCK = 1 << 16  # number of bytes per step; temporary arrays are many times larger


@dataclass(frozen=True, slots=True)
class TorchDequantize(Operation):
    """Dequantizes elements of a quantized torch dtype to float32, bit-exactly as torch on a CPU.

    The sources are AffineQuantizerBase.cpp and cpu/kernels/QuantizedOpKernels.cpp in
    ATen/native/quantized.

    If the tensor has one scale, `parameters` contains the scale and the zero point. In this case,
    ckptkit rounds the scale to float32, and subtracts the zero point as a 32-bit integer, which may
    overflow.

    If each channel has a scale, the second input contains the scales, and the third input contains
    the zero points. In this case, `parameters` contains the dtype of the scales, the dtype of the
    zero points, and the number of elements of a channel. ckptkit subtracts the zero point of a
    channel as float32, multiplies the difference by the scale of the channel in the dtype of the
    scale, and rounds the product to float32.
    """

    dtype: str
    parameters: tuple[Any, ...]

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        data, *tables = extent.inputs
        dtype = BY_NAME[self.dtype]
        several = max(1, 8 // dtype.bits)  # number of elements per byte of the input
        at = start // (4 * several) * several
        if tables:
            scales, zeros = (
                np.frombuffer(b"".join(stream(table)), np.dtype(name).newbyteorder("<"))
                for table, name in zip(tables, self.parameters, strict=False)
            )
            zeros = zeros.astype("<f4")
        else:
            with np.errstate(over="ignore"):
                scale, zero = np.float32(self.parameters[0]), np.int32(self.parameters[1])

        def made(piece: Piece) -> memoryview:
            nonlocal at
            values = np.frombuffer(piece, _STORED[dtype.name])
            if several > 1:  # the low bits are first
                shifts = np.arange(0, 8, dtype.bits, dtype="u1")
                values = (values[:, None] >> shifts & (1 << dtype.bits) - 1).ravel()
            with np.errstate(all="ignore"):  # torch returns infinities and NaN too
                if tables:
                    channel = np.arange(at, at + len(values)) // self.parameters[2] % len(scales)
                    found = (values.astype("<f4") - zeros[channel]) * scales[channel]
                else:
                    found = (values.astype("<i4") - zero).astype("<f4") * scale
                at += len(values)
                return as_bytes(found.astype("<f4", copy=False))

        unit = dtype.itemsize
        if start < stop:
            yield from by_rows((data,), (unit,), 4 * several, start, stop, made, _BLOCK // unit)


def dequantized_record(
    tensor: Tensor, scale: float | Tensor, zero_point: int | Tensor, axis: int = 0
) -> Record:
    """Return the elements of a quantized tensor as float32, row-major and little-endian.

    `scale` and `zero_point` are numbers, or tensors with one number for each index of the dimension
    `axis`. Raise TensorError if the shapes or dtypes of `scale` and `zero_point` are wrong. Raise
    TensorError also if the elements are not contiguous.
    """
    data, length = contiguous(tensor), 4 * tensor.numel
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        are_numbers = {scale.dtype.numpy, zero_point.dtype.numpy} <= _CHANNELS
        fits = scale.shape == zero_point.shape == tensor.shape[axis : axis + 1] and axis >= 0
        if not fits or not are_numbers or scale.dtype.kind != "float" or not scale.shape:
            raise TensorError(
                f"scales ({scale.dtype} {scale.shape}) and zero points ({zero_point.dtype} "
                f"{zero_point.shape}) do not fit axis {axis} of a tensor of shape {tensor.shape}"
            )
        inner = prod(tensor.shape[axis + 1 :])
        parameters = (scale.dtype.name, zero_point.dtype.name, inner)
        records = (data, contiguous(scale), contiguous(zero_point))
        return Pending(TorchDequantize(tensor.dtype.name, parameters), records, length)
    if (
        type(scale) is not float
        or type(zero_point) is not int
        or not -(2**31) <= zero_point < 2**31
    ):
        raise TensorError("a quantized tensor must have a float scale and an int32 zero point")
    operation = TorchDequantize(tensor.dtype.name, (scale, zero_point))
    return Pending(operation, (data,), length)
