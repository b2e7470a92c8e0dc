"""Reading the codes of spans of elements, however they are packed, as one byte each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute import transposing
from ckptkit.compute.blocks import Blocks
from ckptkit.compute.codes import INTERLEAVED, unpack, unpack_words
from ckptkit.compute.gather import Reading, Room

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

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


def codes_of(blocks: Blocks, read: Reading, size: int, last: int) -> Codes | Turned:
    """The reader of codes: `size` bytes, of which those up to element `last` are asked for."""
    kind = blocks.packing.kind
    if kind == "flat":
        return Flat(blocks, read)
    if kind in ("rows", "words"):
        return Rows(blocks, read)
    if kind == "parts":
        return Parts(blocks, read, size)
    if kind == "turned":
        return Turned(blocks, read, last)
    return (Columns if kind == "columns" else Interleaved)(blocks, read, last)


class Memory:
    """Bytes that are read into the same place each time: fresh memory costs more than reading."""

    def __init__(self) -> None:
        self._array: Array | None = None

    def __call__(self, read: Reading, start: int, length: int) -> Array:
        import numpy as np

        if self._array is None or len(self._array) < length:
            self._array = np.empty(length, "u1")
        found: Array = self._array[:length]
        read.into(start, found.data)
        return found


class Flat:
    """Codes in the order of the elements."""

    def __init__(self, blocks: Blocks, read: Reading) -> None:
        self.blocks, self.read, self.memory = blocks, read, Memory()
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


class Rows:
    """Codes of which each row begins with a byte of its own."""

    def __init__(self, blocks: Blocks, read: Reading) -> None:
        self.blocks, self.read, self.packing = blocks, read, blocks.packing
        self.memory = Memory()

    def __call__(self, span: Span) -> Array:
        stride = self.packing.stride
        first = (span.batch * self.blocks.rows + span.top) * stride
        count = (span.bottom - span.top) * stride
        data = self.memory(self.read, first, count).reshape(-1, stride)
        take = unpack_words if self.packing.kind == "words" else unpack
        return take(data, self.packing.bits, span.right)[:, span.left :]


class Parts:
    """Codes of which the first half lies in one half of each byte, the second in the other."""

    def __init__(self, blocks: Blocks, read: Reading, size: int) -> None:
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

    def __init__(self, blocks: Blocks, read: Reading, last: int) -> None:
        self.blocks, self.read, self.last = blocks, read, last
        self.height = self._height()
        self._held: tuple[int, int, int] = (-1, 0, 0)  # batch, first row, end
        self._band: Array
        self._memory: Array | None = None
        self._room = Room()
        self.memory = Memory()

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


class Columns(_Banded):
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


class Interleaved(_Banded):
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


class Turned(_Banded):
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
        transposing.copy(turned, band[span.left : span.right, first : first + count].T)
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
