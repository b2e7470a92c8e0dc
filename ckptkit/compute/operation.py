"""Read the bytes of an extent: a range of a byte source, or the result of an operation.

ckptkit reads and computes bytes in blocks of a few MiB. Elements are little-endian. The names of
dtypes are those of :mod:`ckptkit.core.dtypes`. More operations are in :mod:`numbers`,
:mod:`strided_read`, :mod:`dequantize`, :mod:`quantize` and :mod:`torch_bridge`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from ckptkit.compute.lazy import np
from ckptkit.core.bytesource import (
    READING,
    Derived,
    Extent,
    LocalFile,
    Operation,
    Piece,
    Range,
    Record,
    crc32,
    starts_anywhere,
)
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError, TensorError
from ckptkit.core.text import mismatch, shown

Pieces = Iterator[Piece]

# Maximum number of bytes of an output that stays in memory, if its operation is not seekable.
HELD = 64 << 20
PIECE = 4 << 20  # number of bytes per block; divisible by every element size
# Number of bytes per read of a local file. Input and results must fit the caches. The numpy calls
# must be long enough that threads rarely wait for the interpreter lock.
BUFFER = 1 << 20
KEPT = 16 << 20  # number of bytes of freed memory that the C library keeps


# Bytes of extents


def stream(extent: Extent, start: int = 0, stop: int | None = None) -> Pieces:
    """Yield the bytes of an extent from `start` to `stop`, in blocks of at most a few MiB.

    A block is valid until the caller requests the next block. Raise TruncatedError if a source is
    too short. Raise CorruptError if the input of an operation is damaged.
    """
    stop = extent.length if stop is None else stop
    if isinstance(extent, Derived):
        keep_memory()
        yield from extent.operation.read(extent, start, stop)
        return
    for at in range(start, stop, PIECE):
        yield extent.source.read(extent.offset + at, min(PIECE, stop - at))


def stream_reusing_buffer(
    extent: Extent, start: int = 0, stop: int | None = None, size: int | None = None
) -> Pieces:
    """Yield the bytes of an extent from `start` to `stop`, as `stream` does, but faster.

    All blocks of a local file are in the same buffer, so each block overwrites the previous block.
    A block has `size` bytes, or `BUFFER` bytes if `size` is None.
    """
    stop = extent.length if stop is None else stop
    if isinstance(extent, Derived) or not isinstance(extent.source, LocalFile):
        yield from stream(extent, start, stop)
        return
    source, origin, _ = extent
    size = size or BUFFER
    buffer = memoryview(bytearray(min(size, stop - start)))
    for at in range(start, stop, size):
        piece = buffer[: stop - at]
        source.read_into(origin + at, piece)
        yield piece


def read_into(extent: Extent, at: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of an extent, starting at byte `at`."""
    if isinstance(extent, Range):
        extent.source.read_into(extent.offset + at, buffer)
        return
    done = 0
    for piece in stream(extent, at, at + len(buffer)):
        buffer[done : done + len(piece)] = piece
        done += len(piece)


@cache
def keep_memory() -> None:
    """Make the C library keep `KEPT` bytes of freed memory for later allocations.

    The allocation of new memory pages takes as much time as the computations with the pages. The C
    library glibc returns freed blocks of 128 KiB and more to the operating system. After a program
    frees a larger block, glibc keeps freed blocks up to the size of that block (mallopt(3),
    "dynamic mmap threshold"). `keep_memory` allocates and frees a block of `KEPT` bytes. The block
    uses no memory, because nothing is written to the block. Other C libraries keep freed blocks by
    default.
    """
    bytes(KEPT)


def aligned(pieces: Iterable[Piece], unit: int, size: int) -> Iterator[memoryview]:
    """Split bytes into blocks of at most `size` bytes, with lengths that are divisible by `unit`.

    If the lengths of all `pieces` are divisible by `unit`, nothing is copied.
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
    """Yield lists with one block of each stream. All blocks of a list have the same element count.

    A block has at most `most` elements. `units` are the element sizes of the streams. All streams
    have the same number of elements.
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


class ScratchBuffer:
    """A buffer for many reads. To allocate new memory pages takes longer than to copy bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of(self, length: int) -> memoryview:
        """Return a buffer of `length` bytes. The next call returns the same memory."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        return memoryview(self._buffer)[:length]

    def like(self, array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
        """Return an uninitialized array with the shape of `array` and the dtype `dtype`."""
        view = self.of(array.size * np.dtype(dtype).itemsize)
        return np.frombuffer(view, dtype).reshape(array.shape)


class Reader:
    """Reads an extent at any offset. All reads of a local file use the same buffer.

    If an operation computes the extent, read at ascending offsets, because a lower offset starts
    the computation again. The result of a non-seekable operation stays in memory if it is small.
    """

    def __init__(self, extent: Extent, room: ScratchBuffer | None = None) -> None:
        self.extent = extent
        self.room = room or ScratchBuffer()  # several readers may share a buffer
        self.place: object = None  # address and shape of the array whose rows are `buffers`
        self.buffers: Sequence[memoryview] = ()
        self._held: bytes | None = None
        self._at = 0  # offset of the first byte of the window
        self._window = bytearray()
        self._pieces: Pieces | None = None

    @property
    def is_local(self) -> bool:
        """True if the extent is in a local file."""
        return isinstance(self.extent, Range) and isinstance(self.extent.source, LocalFile)

    def __call__(self, at: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from offset `at`. The next call may overwrite these bytes."""
        if isinstance(self.extent, Derived):
            return self._computed(self.extent, at, length)
        source, origin, _ = self.extent
        if not isinstance(source, LocalFile):
            return source.read(origin + at, length)
        view = self.room.of(length)
        source.read_into(origin + at, view)
        return view

    def _computed(self, extent: Derived, start: int, length: int) -> bytes:
        if extent.length <= HELD and not starts_anywhere(extent):
            if self._held is None:
                self._held = b"".join(stream(extent))
            return self._held[start : start + length]
        if self._pieces is None or start < self._at:
            self._at, self._window = start, bytearray()
            self._pieces = stream(extent, start)
        while self._at + len(self._window) < start + length:
            drop = min(start - self._at, len(self._window))
            del self._window[:drop]
            self._at += drop
            self._window += next(self._pieces)
        return bytes(self._window[start - self._at : start - self._at + length])

    def copy(self, at: int, length: int) -> bytes:
        """Return a copy of `length` bytes from offset `at`."""
        return bytes(self(at, length))

    def into(self, at: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from offset `at`."""
        if isinstance(self.extent, Range):
            self.extent.source.read_into(self.extent.offset + at, buffer)
        else:
            buffer[:] = self(at, len(buffer))

    def rows(self, at: int, pitch: int, rows: Sequence[memoryview]) -> None:
        """Fill all rows. The bytes of row number n start at offset ``at + n * pitch``.

        All rows have the same length.
        """
        if isinstance(self.extent, Derived):
            is_seekable = starts_anywhere(self.extent)
            for place, row in enumerate(rows):
                if is_seekable:  # do not compute the bytes between the rows
                    read_into(self.extent, at + place * pitch, row)
                else:
                    self.into(at + place * pitch, row)
        else:
            self.extent.source.read_rows(self.extent.offset + at, pitch, rows)


def name_of(extent: Extent) -> str:
    """Return the name of the first source of an extent, for messages."""
    return extent.source.name if isinstance(extent, Range) else next(extent.sources()).name


# Operations


@dataclass(frozen=True, slots=True)
class Slice(Operation):
    """The bytes of the input, from byte `start` on."""

    start: int

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        return stream(extent.inputs[0], self.start + start, self.start + stop)

    def needed(self, extent: Derived, number: int) -> int:
        return extent.length


@dataclass(frozen=True, slots=True)
class RecordSlice:
    """`length` bytes of a record, from byte `start` on.

    The caller ensures that the record contains these bytes.
    """

    record: Record
    start: int
    length: int

    def locate(self) -> Extent:
        return part(self.record.locate(), self.start, self.length)


def part(extent: Extent, start: int, length: int) -> Extent:
    """Return `length` bytes of an extent, from byte `start` on.

    The caller ensures that the extent contains these bytes.
    """
    if isinstance(extent, Range):
        return extent.part(start, length)
    if (start, length) == (0, extent.length):
        return extent
    return Derived(Slice(start), (extent,), length)


@dataclass(frozen=True, slots=True)
class Concat(Operation):
    """The concatenation of the inputs."""

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        at = 0
        for each in extent.inputs:
            lower, upper = max(start - at, 0), min(stop - at, each.length)
            if lower < upper:
                yield from stream(each, lower, upper)
            at += each.length

    def runs(self, extent: Derived) -> Sequence[Extent]:
        return extent.inputs


def concat(extents: Sequence[Extent]) -> Extent:
    """Return the concatenation of extents. Return a single extent unchanged."""
    if len(extents) == 1:
        return extents[0]
    return Derived(Concat(), tuple(extents), sum(each.length for each in extents))


@dataclass(frozen=True, slots=True)
class Inflate(Operation):
    """Decompresses raw deflate data (RFC 1951). The result must have the length of the extent.

    `crc` is the expected CRC-32 of the result, or None. ckptkit verifies the CRC-32 only inside the
    context manager `reading`. `name` is the name of the zip member for messages.
    """

    name: str = ""
    crc: int | None = None
    seekable: ClassVar[bool] = False
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        """Raise CorruptError at the end of the data if the length or the CRC-32 is wrong."""
        return window("inflate", self._compared(extent), extent, start, stop)

    def _compared(self, extent: Derived) -> Iterator[bytes]:
        """Yield the decompressed blocks. Inside `reading`, verify the CRC-32 at the end."""
        total, is_summed = 0, READING.sums is not None and self.crc is not None
        for piece in _inflated(extent.inputs[0]):
            total = crc32(piece, total) if is_summed else 0
            yield piece
        if is_summed and total != self.crc:
            assert self.crc is not None
            message = mismatch(f"record {shown(self.name)}", total, self.crc)
            raise CorruptError(message, where=name_of(extent))

    def needed(self, extent: Derived, number: int) -> int:
        return 0  # `_compared` verifies the checksum of all input bytes


def _inflated(extent: Extent) -> Iterator[bytes]:
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for piece in stream(extent):
            if machine.eof:
                break
            yield machine.decompress(piece, PIECE)
            while machine.unconsumed_tail:
                yield machine.decompress(machine.unconsumed_tail, PIECE)
    except zlib.error as error:
        raise CorruptError(f"compressed data is damaged: {error}", where=name_of(extent)) from error
    if not machine.eof or machine.unused_data:
        what = "is followed by other bytes" if machine.eof else "is truncated"
        raise CorruptError(f"compressed data {what}", where=name_of(extent))


def within(pieces: Iterable[Piece], at: int, start: int, stop: int) -> Pieces:
    """Yield the bytes from `start` to `stop` of consecutive pieces. The first is at byte `at`."""
    for piece in pieces:
        lower, upper = max(start - at, 0), min(stop - at, len(piece))
        if lower < upper:
            yield memoryview(piece)[lower:upper]
        at += len(piece)
        if at >= stop:
            return


def ends_after(extent: Extent, step: int) -> Iterable[int]:
    """Return the ends of parts of `step` bytes. Only the last part may be smaller."""
    return (*range(step, extent.length, step), extent.length)


def window(name: str, pieces: Iterable[Piece], derived: Derived, start: int, stop: int) -> Pieces:
    """Yield the bytes from `start` to `stop` of the concatenation of `pieces`.

    At the end of the data, raise CorruptError if the length differs from `derived.length`. `name`
    is the name of the operation for messages.
    """
    at = 0
    for piece in pieces:
        if at + len(piece) > derived.length:
            at += len(piece)
            break
        yield from within((piece,), at, start, stop)
        at += len(piece)
        if at >= stop and stop < derived.length:
            return
    if at != derived.length:
        extent = "more than" if at > derived.length else f"{at:,} of"
        message = f"{name} returns {extent} {derived.length:,} bytes"
        raise CorruptError(message, where=name_of(derived))


class Rows(Operation):
    """An operation that computes row n of its output from row n of each input.

    A row may be one element. A subclass overrides `rows` and `of`.
    """

    __slots__ = ()
    at_once: ClassVar[int] = 0  # number of rows per step; 0 means `BUFFER` bytes of the first input

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of bytes per row of the output, then of each input."""
        raise NotImplementedError

    def of(self, *pieces: Piece) -> memoryview:
        """Compute rows of the output from the same number of rows of each input."""
        raise NotImplementedError

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        if start < stop:
            unit, *units = self.rows
            at_once = self.at_once or max(1, BUFFER // units[0])
            yield from by_rows(extent.inputs, units, unit, start, stop, self.of, at_once)


def by_rows(
    inputs: Sequence[Extent],
    units: Sequence[int],
    unit: int,
    start: int,
    stop: int,
    function: Callable[..., memoryview],
    at_once: int,
) -> Pieces:
    """Call `function` with rows of the inputs, and yield bytes `start` to `stop` of its results.

    `units` contains the number of bytes of a row of each input. `unit` is the number of bytes of a
    row of the output. Each call of `function` gets at most `at_once` rows.
    """
    first, last = start // unit, -(-stop // unit)
    streams = [
        stream_reusing_buffer(each, first * n, last * n, at_once * n)
        for each, n in zip(inputs, units, strict=True)
    ]
    made = (function(*pieces) for pieces in in_step(streams, units, at_once))
    return within(made, first * unit, start, stop)


@dataclass(frozen=True, slots=True)
class Swap(Rows):
    """Reverses the bytes of every group of `component` bytes (2, 4 or 8)."""

    component: int

    @property
    def rows(self) -> tuple[int, ...]:
        return self.component, self.component

    def of(self, *pieces: Piece) -> memoryview:
        return as_bytes(np.frombuffer(pieces[0], f"u{self.component}").byteswap())


@dataclass(frozen=True, slots=True)
class Flip(Rows):
    """Negates elements of `dtype`. If `conj` is set, conjugates complex elements instead.

    Negation flips the sign bit of a floating-point number, also of NaN and zero, as in IEEE 754.
    """

    dtype: str
    conj: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        return (BY_NAME[self.dtype].itemsize,) * 2

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        dtype = BY_NAME[self.dtype]
        is_integer = dtype.kind == "int" and dtype.itemsize * 8 == dtype.bits
        is_float = dtype.kind in ("float", "complex") and dtype.component > 1
        if self.conj and dtype.kind != "complex":
            raise TensorError(f"{dtype} has no conjugate", where=name_of(extent))
        if not (is_integer or is_float):
            raise TensorError(f"{dtype} cannot be negated", where=name_of(extent))
        return Rows.read(self, extent, start, stop)

    def of(self, *pieces: Piece) -> memoryview:
        dtype = BY_NAME[self.dtype]
        values = np.frombuffer(pieces[0], f"<u{dtype.component}")
        if dtype.kind == "int":
            return as_bytes(np.negative(values))
        sign = 1 << (8 * dtype.component - 1)
        # For complex numbers, the mask alternates between real and imaginary part.
        mask = np.array((0 if self.conj else sign, sign), values.dtype)
        return as_bytes(values ^ np.resize(mask, values.shape))


def as_bytes(values: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous 1-D array."""
    return values.view(np.uint8).data
