"""The layout of quantized weights, and reading their codes, scales and zero points span by span.

`Blocks` describes how the elements of a weight follow from codes and scales. The weight is an array
of `batches` matrices of `rows` x `columns` elements, row-major; codes, scales and zero points are
each one of the inputs of an operation (:mod:`dequantize`).

    value = (number of the code - offset - zero) * scale [* factor] [+ bias]

where ``scale`` is the product (or quotient) of one or more arrays of numbers, each of which has one
number for a block of `height` x `width` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.numbers import (
    INTERLEAVED,
    decode,
    encode,
    numbers,
    unpack,
    unpack_words,
    untiled,
)
from ckptkit.compute.operation import Reader, Room
from ckptkit.compute.strided_read import transposed_copy
from ckptkit.core import dtypes

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TARGET = "target"  # in place of a dtype: the one that was asked for


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """An array of `rows` x `columns` numbers for each batch.

    Each number serves `height` x `width` elements.
    ``order`` is how they lie: ``rows`` (row-major), ``columns`` (its transpose), or ``tiles`` (as
    the scaled matrix products of cuBLAS take them: 128 rows by 4 columns, padded).
    """

    height: int
    width: int
    rows: int
    columns: int
    order: str = "rows"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of dtype `dtype` in input `input`.

    Besides dtypes of tensors: ``exponent``, 2 ** (byte - 127) in float32; ``ldexp``, the same
    without a limit; ``map``: the byte is an index into the float32 numbers of input `map`. With
    ``shared`` there is one batch of them, for all. `combine` says what becomes of the product of
    those before: ``multiply`` or ``divide``; `add` is then added to it, in float32 (the offset of
    nested scales).
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
    """Layout of codes of `bits` bits in an input.

    ============  ==============================================================================
    flat          in the order of the elements; of 4 bits, the low half of a byte first or not
    rows          each row in `stride` bytes, densely from the low bits up
    words         each row in `stride` bytes, 32 // bits codes in each word of 32 bits
    columns       words of 32 bits [batch, `stride`, rows]: row n is packed densely down column n
    interleaved   words of 32 bits [columns, rows / 8]: code i of a word is row 8 * word + order[i]
    turned        bytes [batch, columns, rows / 2]: two rows in a byte, the low half first
    parts         in the order of the elements, cut into 8 / bits equal parts, one for each field of
                  a byte (of 3 bits: ten parts, for the fields of a word of 32 bits)
    ============  ==============================================================================
    """

    kind: str
    bits: int
    high_first: bool = False
    stride: int = 0


@dataclass(frozen=True, slots=True)
class ZeroPoint:
    """Zero points that are packed: ``(code + add) % 2**bits - offset``, one for each block.

    `across` if words hold neighboring rows of the grid's blocks ([columns, words] of GPTQ), else
    they hold codes down a column ([words, columns] of compressed-tensors).
    """

    input: int
    bits: int
    grid: ScaleGrid
    kind: str = "across"  # or "down", "interleaved"
    add: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """See the module. `table` names the numbers of the codes; None: they are integers.

    Of ``map`` they are those of input `map`; of ``map-signed`` too, and code 8 is the negative
    zero.
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
    index: int = 0  # input with the block of each column, where these are not in order; 0: none
    bias: Numbers | None = None
    subtract_bias: bool = False
    factor: float = 0.0  # in float32, after the product; 0: none
    scale_dtype: str = "float32"  # that each scale and their product are rounded to
    product_dtype: str = "float32"  # that differences, products and sums are rounded to
    target: str = "bfloat16"

    @property
    def elements(self) -> int:
        return self.batches * self.rows * self.columns


# Codes

BAND = 8 << 20  # bytes of packed columns that are held
SHORT = 8 << 10  # bytes of a row below which a band is read whole, and then taken apart
PADDING = 64  # bytes between their rows: at a power of two, all would share the same cache lines
LINES = 512  # bytes of a row of which a multiple is too near to a power of two


class Span(NamedTuple):
    """Rows and columns of one batch."""

    batch: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


Codes = Callable[[Span], "Array"]


def codes_of(blocks: Blocks, read: Reader, size: int, last: int) -> Codes | TransposedCodes:
    """The reader of codes: `size` bytes, of which those up to element `last` are asked for."""
    kind = blocks.packing.kind
    if kind == "flat":
        return FlatCodes(blocks, read)
    if kind in ("rows", "words"):
        return RowCodes(blocks, read)
    if kind == "parts":
        return FieldCodes(blocks, read, size)
    if kind == "turned":
        return TransposedCodes(blocks, read, last)
    return (WordColumns if kind == "columns" else InterleavedCodes)(blocks, read, last)


class ReusedBuffer:
    """Bytes that are read into the same place each time: fresh memory costs more than reading."""

    def __init__(self) -> None:
        self._array: Array | None = None

    def __call__(self, read: Reader, start: int, length: int) -> Array:
        import numpy as np

        if self._array is None or len(self._array) < length:
            self._array = np.empty(length, "u1")
        found: Array = self._array[:length]
        read.into(start, found.data)
        return found


class FlatCodes:
    """Codes in the order of the elements."""

    def __init__(self, blocks: Blocks, read: Reader) -> None:
        self.blocks, self.read, self.memory = blocks, read, ReusedBuffer()
        self.bits, self.high_first = blocks.packing.bits, blocks.packing.high_first

    def bytes(self, span: Span) -> tuple[Array, int]:
        """The bytes that hold the codes of a span, and the codes in them before it."""
        blocks = self.blocks
        first = (span.batch * blocks.rows + span.top) * blocks.columns + span.left
        last = (span.batch * blocks.rows + span.bottom - 1) * blocks.columns + span.right
        start, stop = first * self.bits // 8, -(-last * self.bits // 8)
        data = self.memory(self.read, start, stop - start)
        return data, first * self.bits % 8 // self.bits

    def __call__(self, span: Span) -> Array:
        data, skip = self.bytes(span)
        rows, columns = span.shape
        found = unpack(data[None], self.bits, skip + rows * columns, high_first=self.high_first)
        return found[0, skip:].reshape(span.shape)


class RowCodes:
    """Codes of which each row begins with a byte of its own."""

    def __init__(self, blocks: Blocks, read: Reader) -> None:
        self.blocks, self.read, self.packing = blocks, read, blocks.packing
        self.memory = ReusedBuffer()

    def __call__(self, span: Span) -> Array:
        stride = self.packing.stride
        first = (span.batch * self.blocks.rows + span.top) * stride
        count = (span.bottom - span.top) * stride
        data = self.memory(self.read, first, count).reshape(-1, stride)
        take = unpack_words if self.packing.kind == "words" else unpack
        return take(data, self.packing.bits, span.right)[:, span.left :]


class FieldCodes:
    """Codes of which the first half lies in one half of each byte, the second in the other."""

    def __init__(self, blocks: Blocks, read: Reader, size: int) -> None:
        self.blocks, self.read, self.packing = blocks, read, blocks.packing
        self.itemsize = 4 if self.packing.bits == 3 else 1  # ten codes of three bits in a word
        self.size = size // self.itemsize

    def __call__(self, span: Span) -> Array:
        import numpy as np

        blocks, bits = self.blocks, self.packing.bits
        at = span.top * blocks.columns + span.left
        last = (span.bottom - 1) * blocks.columns + span.right
        found = []
        while at < last:
            part, start = divmod(at, self.size)
            stop = min(self.size, start + last - at)
            top = 30 if bits == 3 else 8
            shift = top - bits * (part + 1) if self.packing.high_first else bits * part
            data = self.read(start * self.itemsize, (stop - start) * self.itemsize)
            units = np.frombuffer(data, f"<u{self.itemsize}")
            found.append(((units >> shift) & ((1 << bits) - 1)).astype("u1"))
            at += stop - start
        return np.concatenate(found).reshape(span.shape)


class _Banded:
    """Codes that lie transposed: what many rows need is read at once and held."""

    unit = 1  # rows in one element of the input
    itemsize = 4

    def __init__(self, blocks: Blocks, read: Reader, last: int) -> None:
        self.blocks, self.read, self.last = blocks, read, last
        self.height = self._height()
        self._held: tuple[int, int, int] = (-1, 0, 0)  # batch, first row, end
        self._band: Array
        self._memory: Array | None = None
        self._room = Room()
        self.memory = ReusedBuffer()

    def _height(self) -> int:
        """Elements of the input for each row of the result (or for several)."""
        return self.blocks.packing.stride

    def _place(self, wide: int) -> Array:
        """Memory for a band of so many elements of the input, the rows apart from each other."""
        import numpy as np

        pitch = wide + PADDING // self.itemsize
        if self._memory is None or len(self._memory) < self.height * pitch:
            self._memory = np.empty(self.height * pitch, f"<u{self.itemsize}")
        made: Array = self._memory[: self.height * pitch].reshape(self.height, pitch)[:, :wide]
        return made

    def band(self, span: Span) -> tuple[Array, int]:
        """Elements [height, some], and the number of the first of them that the span needs."""
        batch, start, stop = self._held
        first, end = span.top // self.unit, -(-span.bottom // self.unit)
        if batch != span.batch or first < start or end > stop:
            self._hold(span.batch, first, end)
        return self._band, first - self._held[1]

    def _hold(self, batch: int, first: int, end: int) -> None:

        rows = self.blocks.rows
        left = -(-(self.last // self.blocks.columns + 1 - batch * rows) // self.unit)
        wide = max(end - first, BAND // (self.height * self.itemsize))
        end = min(first + wide, max(left, end), -(-rows // self.unit))
        whole = -(-rows // self.unit) * self.itemsize  # bytes of a row of the input
        start = batch * self.height * whole
        if end - first == whole // self.itemsize and whole < SHORT:
            data = self.memory(self.read, start, self.height * whole)
            padded = data.view(f"<u{self.itemsize}").reshape(self.height, -1)
            if not whole % LINES:
                held = padded
                padded = self._place(end - first)
                padded[:] = held
        else:
            padded = self._place(end - first)
            pitch, length = padded.strides[0], (end - first) * self.itemsize
            assert self._memory is not None
            rows_of_band = self._memory.data.cast("B")  # its slices cost less than numpy's rows
            places = range(0, self.height * pitch, pitch)
            parts = [rows_of_band[place : place + length] for place in places]
            self.read.rows(start + first * self.itemsize, whole, parts)
        self._band = padded
        self._held = (batch, first, end)


class WordColumns(_Banded):
    """GPTQ: words down a column are those of one row."""

    def __call__(self, span: Span) -> Array:
        import numpy as np

        band, first = self.band(span)
        bits = self.blocks.packing.bits
        per_word = 32 // bits if 32 % bits == 0 else 0
        top, bottom = (
            (span.left // per_word, -(-span.right // per_word)) if per_word else (0, len(band))
        )
        skip = top * per_word
        turned = np.ascontiguousarray(band[top:bottom, first : first + span.bottom - span.top].T)
        return unpack(turned.view("u1"), bits, span.right - skip)[:, span.left - skip :]


class InterleavedCodes(_Banded):
    """AWQ: eight rows in the fields of a word, in an order of their own."""

    unit = 8

    def _height(self) -> int:
        return self.blocks.columns

    def __call__(self, span: Span) -> Array:
        import numpy as np

        band, first = self.band(span)
        count = -(-span.bottom // 8) - span.top // 8
        words = np.ascontiguousarray(band[span.left : span.right, first : first + count].T)
        made = np.empty((count, 8, span.right - span.left), "u1")
        for number, row in enumerate(INTERLEAVED):
            made[:, row] = (words >> (4 * number)) & 15
        skip = span.top % 8
        return made.reshape(-1, span.right - span.left)[skip : skip + span.bottom - span.top]


class TransposedCodes(_Banded):
    """gpt-oss as transformers has it: rows of the file are columns of the weight.

    Four bytes down a column are eight rows of it: bits of FP4, the lowest first.
    """

    unit = 8
    lack = 66  # powers of two by which its numbers are too small

    def _height(self) -> int:
        return self.blocks.columns

    def numbers(self, span: Span, values: Array) -> None:
        """Fill float32 `values` with those of the codes, 2**66 times too small.

        Sign, exponent and mantissa of a code become a byte, whose bits are moved into a float32.
        """
        import numpy as np

        band, first = self.band(span)
        count, columns = -(-span.bottom // 8) - span.top // 8, values.shape[1]
        words = self._room.of(12 * count * columns)
        turned = np.frombuffer(words[: 4 * count * columns], "<u4").reshape(count, columns)
        transposed_copy(turned, band[span.left : span.right, first : first + count].T)
        halves = turned.view("<u2").reshape(count, columns, 2).transpose(0, 2, 1)  # four rows each
        fours = np.frombuffer(words[4 * count * columns :], "<u4").reshape(halves.shape)
        np.take(_bytes_of_codes(), halves, out=fours, mode="clip")
        skip = span.top % 8
        is_whole = len(values) == 8 * count
        bits = values.view("<u4") if is_whole else np.empty((8 * count, columns), "<u4")
        shifts = np.arange(24, -8, -8, dtype="<u4")  # to the upper end of a word
        made = bits.reshape(count, 2, 4, columns)
        np.left_shift(fours[:, :, None], shifts[:, None], out=made)
        if not is_whole:
            values.view("<u4")[:] = bits[skip : skip + len(values)]
        signed = values.view("<i4")
        signed >>= np.int32(2)  # which repeats the sign
        bits = values.view("<u4")
        bits &= np.uint32(0x9FC00000)


@lru_cache
def _bytes_of_codes() -> Array:
    """Return four bytes for each four codes of FP4: sign, the lower end of an exponent, mantissa.

    The exponents, 60 to 63, leave all but zeros normal numbers of float32: others take many
    processors a hundred times as long.
    """
    import numpy as np

    byte = np.array([0, 120, *range(122, 128)], "u1")
    byte = np.concatenate([byte, byte | 0x80])
    words = np.arange(1 << 16)
    made = np.stack([byte[words >> shift & 15] for shift in (0, 4, 8, 12)], axis=-1)
    found: Array = made.reshape(-1).view("<u4")
    return found


# Scales and zero points

EXPONENTS = ("exponent", "ldexp")


def is_byte(dtype: str) -> bool:
    """Return whether a scale of this dtype is a number of one byte."""
    return dtype in EXPONENTS or (dtype != "map" and dtypes.BY_NAME[dtype].bits == 8)


class Scale:
    """The numbers of one input; with `whole`, for all columns whatever columns a span has."""

    def __init__(
        self, numbers: Numbers, reads: Sequence[Reader], sizes: Sequence[int], whole: bool
    ) -> None:
        self.numbers, self.grid, self.whole = numbers, numbers.grid, whole
        self._read, self._size = reads[numbers.input], sizes[numbers.input]
        self._map = (
            reads[numbers.map].copy(0, sizes[numbers.map]) if numbers.dtype == "map" else b""
        )
        is_byte = numbers.dtype in (*EXPONENTS, "map")
        self.itemsize = 1 if is_byte else dtypes.BY_NAME[numbers.dtype].itemsize
        self._key: tuple[int, ...] | None = None  # of what is held
        self._raw: Array
        self._made: Array | None = None
        self._batch: tuple[int, Array] | None = None
        self._decoded: tuple[int, Array] | None = None  # of a whole batch

    def part(self, span: Span) -> Array:
        """The numbers of the blocks that a span touches, as float32.

        They are [rows of blocks, columns of blocks].
        """
        if self.grid.order == "columns":
            batch, top, bottom, left, right = self._place(span)
            if self._decoded is None or self._decoded[0] != batch:
                self._decoded = batch, self.decoded(self._all(batch))
            return self._decoded[1][top:bottom, left:right]
        raw = self.raw(span)
        if self._made is None:
            self._made = self.decoded(raw)
        return self._made

    def decoded(self, raw: Array) -> Array:
        """Stored elements as float32."""
        import numpy as np

        data = np.ascontiguousarray(raw).reshape(-1).view("u1")
        if self.numbers.dtype == "map":
            made = np.take(np.frombuffer(self._map, "<f4"), data, mode="clip")
        elif self.numbers.dtype in EXPONENTS:
            made = numbers("exponent")[data]
        else:
            made = decode(data.data, dtypes.BY_NAME[self.numbers.dtype]).astype("<f4")
        wrong = np.isnan(made)
        if wrong.any():  # without the bits that rounding could carry upwards
            made = np.where(wrong, np.float32("nan"), made)
        found: Array = made.reshape(raw.shape)
        return found

    def _place(self, span: Span) -> tuple[int, int, int, int, int]:
        """Batch, rows and columns of the blocks that a span touches."""
        left, right = span.left // self.grid.width, -(-span.right // self.grid.width)
        if self.whole:
            left, right = 0, self.grid.columns
        batch = 0 if self.numbers.shared else span.batch
        height = self.grid.height
        return batch, span.top // height, -(-span.bottom // height), left, right

    def raw(self, span: Span) -> Array:
        """The same as they are stored."""
        key = self._place(span)
        if self._key != key:
            self._key, self._raw, self._made = key, self._fetch(*key), None
        return self._raw

    def _fetch(self, batch: int, top: int, bottom: int, left: int, right: int) -> Array:
        import numpy as np

        grid, size = self.grid, self.itemsize
        if grid.order != "rows":
            return self._all(batch)[top:bottom, left:right]
        first = batch * grid.rows + top
        if right - left == grid.columns or bottom - top == 1:
            start = first * grid.columns + left
            data = self._read.copy(
                start * size, ((bottom - top - 1) * grid.columns + right - left) * size
            )
        else:
            starts = ((first + row) * grid.columns + left for row in range(bottom - top))
            data = b"".join(
                [self._read.copy(each * size, (right - left) * size) for each in starts]
            )
        return np.frombuffer(data, f"<u{size}").reshape(bottom - top, right - left)

    def _all(self, batch: int) -> Array:
        """The numbers of a batch that do not lie row by row."""
        import numpy as np

        if self._batch is None or self._batch[0] != batch:
            grid = self.grid
            tiled = grid.order == "tiles"
            count = self._size // self.itemsize if tiled else grid.rows * grid.columns
            start = 0 if tiled else batch * count * self.itemsize
            found = np.frombuffer(
                self._read.copy(start, count * self.itemsize), f"<u{self.itemsize}"
            )
            made = (
                untiled(found, grid.rows, grid.columns)
                if tiled
                else found.reshape(grid.columns, grid.rows).T
            )
            self._batch = batch, made
        return self._batch[1]


class PackedZero:
    """Zero points of a few bits, all of which are held as bytes."""

    def __init__(self, zero: ZeroPoint, read: Reader, size: int, whole: bool) -> None:
        import numpy as np

        self.grid, self.whole = zero.grid, whole
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
        self.same = int(first[0]) if (shifted == first).all() else None  # if all are the same

    def part(self, span: Span) -> Array:
        grid = self.grid
        top, bottom = span.top // grid.height, -(-span.bottom // grid.height)
        left, right = span.left // grid.width, -(-span.right // grid.width)
        if self.whole:
            left, right = 0, grid.columns
        return self._numbers[top:bottom, left:right]


def zero_points(
    zero: ZeroPoint | Numbers | None, reads: Sequence[Reader], sizes: Sequence[int], whole: bool
) -> Scale | PackedZero | None:
    """Return the source of the zero points of spans, None if there are none."""
    if isinstance(zero, ZeroPoint):
        return PackedZero(zero, reads[zero.input], sizes[zero.input], whole)
    return None if zero is None else Scale(zero, reads, sizes, whole)


def rounded(values: Array, dtype: str) -> Array:
    """float32 numbers rounded to a narrower type, still as float32."""
    if dtype == "float32":
        return values
    kind = dtypes.BY_NAME[dtype]
    made: Array = decode(encode(values.reshape(-1), kind), kind).reshape(values.shape)
    return made


def combined(scales: Sequence[Scale], span: Span, dtype: str) -> Array:
    """The scale of each block that a span touches, each step rounded to `dtype`."""

    first, *others = scales
    made = rounded(first.part(span), dtype)
    for each in others:
        made = joined(
            made,
            _finer(rounded(each.part(span), dtype), each.grid, first.grid, span),
            each.numbers,
            dtype,
        )
    return made


def joined(scale: Array, part: Array, how: Numbers, dtype: str) -> Array:
    """The product (or quotient) of scales of two levels."""
    import numpy as np

    made = scale / part if how.combine == "divide" else scale * part
    if how.add:
        made = made + np.float32(how.add)
    return rounded(made, dtype)


def _finer(part: Array, coarse: ScaleGrid, fine: ScaleGrid, span: Span) -> Array:
    """The numbers of the blocks of a coarse grid for each block of a finer one."""
    if part.size == 1:
        return part
    rows = places(span.top, span.bottom, fine.height, coarse.height)
    columns = places(span.left, span.right, fine.width, coarse.width)
    made: Array = part[rows[:, None], columns]
    return made


def places(start: int, stop: int, fine: int, coarse: int) -> Array:
    """The coarse block of each fine block of a range of elements, counted from the first."""
    import numpy as np

    first = np.arange(start // fine, -(-stop // fine)) * fine  # elements
    made: Array = first // coarse - start // coarse
    return made


class Spread:
    """Applies the numbers of blocks to the elements of spans.

    Neighboring spans mostly need the same row of numbers, so the last one is kept. An `index` has
    the block of each column, where they are not in order.
    """

    def __init__(self, grid: ScaleGrid, index: Array | None) -> None:
        self._grid, self._index = grid, index
        self._of: tuple[Array, int, int] | None = None  # numbers and columns that are kept
        self._kept: Array

    def apply(self, how: Any, values: Array, part: Array, span: Span) -> None:
        """Apply `how` in place to the elements of a span and the number of the block of each.

        `part` holds the numbers of the blocks that the span touches; with an index, those of all
        columns of blocks.
        """
        grid, (rows, columns) = self._grid, span.shape
        whole = not span.left % grid.width and not columns % grid.width
        if part.size == 1:
            how(values, part[0, 0], out=values)
        elif len(part) == rows and whole and self._index is None:
            cube = values.reshape(rows, -1, grid.width)
            how(cube, part[..., None], out=cube)
        else:
            self._apply_rows(how, values, self._rows(part, span), span)

    def _apply_rows(self, how: Any, values: Array, wide: Array, span: Span) -> None:
        """Apply `how` to the elements and one number for each column and row of blocks."""
        height = self._grid.height
        if len(wide) in (1, len(values)):
            how(values, wide, out=values)
        elif span.top % height or len(values) % height:
            how(values, wide[places(span.top, span.bottom, 1, height)], out=values)
        else:
            cube = values.reshape(len(wide), height, -1)
            how(cube, wide[:, None], out=cube)

    def _rows(self, part: Array, span: Span) -> Array:
        """Return the number of each column, for each row of blocks."""
        import numpy as np

        if self._index is not None:
            chosen: Array = part[:, self._index[span.left : span.right]]
            return chosen
        if part.shape[1] == 1 or self._grid.width == 1:
            return part
        left, right = span.left, span.right
        if self._of is None or self._of[0] is not part or self._of[1:] != (left, right):
            skip = left % self._grid.width
            wide = np.repeat(part, self._grid.width, axis=1)
            self._kept = wide[:, skip : skip + right - left]
            self._of = part, left, right
        return self._kept
