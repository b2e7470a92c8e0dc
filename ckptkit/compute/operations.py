"""The operations of a Derived, computed in pieces of a few MiB whatever its size.

========  ==============================  ========================================================
name      parameters                      bytes
========  ==============================  ========================================================
slice     start                           `length` bytes of the input from byte `start`
concat                                    the inputs, any number of them, one after another
inflate   name, crc                       the input is raw deflate (RFC 1951) and inflates to
                                          exactly `length` bytes, of this CRC-32; both may be
                                          missing
latin1                                    the input is UTF-8 text of `length` code points below
                                          256: one byte each
byteswap  component                       every run of `component` bytes (2, 4, 8) reversed
gather    itemsize, shape, stride, start  row-major elements of a strided view: itemsize 1, 2,
                                          4, 8 or 16 bytes, strides in elements, the first
                                          element at byte `start`
chunks    itemsize, shape, boxes          row-major elements of an array: each input holds one
                                          box of it, described by (offsets, sizes, strides in
                                          elements, byte of the first element); each element is
                                          in exactly one box; itemsize as for gather
conj      dtype                           complex elements with the imaginary part negated
neg       dtype                           elements negated
cast      source, target                  elements of dtype `source` converted to dtype `target`,
                                          as torch does it: by `floats` from one floating-point
                                          type to another, else by torch
dequant   dtype, scale, zero_point        quantized elements of `dtype` as float32, as torch does it
          dtype, scales, zeros, inner     with three inputs: the second and third hold a scale and
                                          a zero point for each channel, in dtypes `scales` and
                                          `zeros`; a channel is `inner` elements
mean      target, (dtype, weight)...      weighted mean of the elements of all inputs, each of its
                                          own dtype
sum       target, (dtype, weight)...      weighted sum of them
blocks    a `Blocks`                      elements of a quantized weight, whose codes, scales and
                                          zero points are the inputs
                                          (:mod:`ckptkit.compute.dequantizing`)
quantize  kind, part, dtype, rows,        codes or scales (`part`) of a matrix of floating-point
          columns                         elements (:mod:`ckptkit.compute.quantizing`)
apply     an `Application`                elements of what a function makes of a tensor
========  ==============================  ========================================================

dtypes are names of :mod:`ckptkit.core.dtypes`; elements are little-endian. Each operation but
``concat``, ``chunks``, ``dequant``, ``mean``, ``sum`` and ``blocks`` has one input, and is a pure
function of its inputs, its parameters and the range of the output that is asked for.
"""

from __future__ import annotations

import codecs
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptkit.compute.byte_pieces import Piece, Pieces, aligned, in_step
from ckptkit.compute.columns import columns, joined
from ckptkit.compute.floats import FLOATS, decode, encode
from ckptkit.compute.gather import FileReader, Read, Room, assemble, gather
from ckptkit.compute.mean import ELEMENTS, Mean
from ckptkit.core import dtypes
from ckptkit.core.bytesource import READING, Derived, Extent, LocalFile, Range, crc32
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CorruptError, TensorError
from ckptkit.core.text import mismatch, shown

if TYPE_CHECKING:
    import numpy as np

HELD = 64 << 20  # bytes that are held in memory where they can only be computed from the beginning
_FROM_THE_BEGINNING = ("inflate", "latin1")
_WITHOUT_NUMPY = ("slice", "concat", "apply", *_FROM_THE_BEGINNING)
PIECE = 4 << 20  # bytes; a multiple of every element size
# Bytes of a local file read at a time: few enough to stay in the caches with what is made of them,
# and enough for each call of numpy to take longer than threads wait for the interpreter lock.
BUFFER = 1 << 20
KEPT = 16 << 20  # bytes that stay for the next blocks
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def stream(extent: Extent, start: int = 0, stop: int | None = None) -> Pieces:
    """The bytes `start` to `stop` of an extent, in order, in pieces of at most some MiB.

    A piece is the caller's until the next one is asked for. Raises TruncatedError where a source is
    too short, CorruptError where the bytes are not what the operation expects.
    """
    stop = extent.length if stop is None else stop
    if isinstance(extent, Derived):
        keep_memory()
        if extent.operation not in _WITHOUT_NUMPY:
            import_numpy()
        yield from OPERATIONS[extent.operation](extent, start, stop)
        return
    for at in range(start, stop, PIECE):
        yield extent.source.read(extent.offset + at, min(PIECE, stop - at))


def flow(
    extent: Extent, start: int = 0, stop: int | None = None, size: int | None = None
) -> Pieces:
    """Yield like `stream`, at the speed of memory.

    Pieces of a local file, of `size` bytes or `BUFFER`, share one buffer, and each overwrites the
    last.
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


@cache
def keep_memory() -> None:
    """Let the C library keep some `KEPT` bytes of freed memory from now on, for the next blocks.

    New pages cost as much as what is computed in them. glibc gives blocks of 128 KiB and more back
    to the system, unless larger ones have been freed before (mallopt(3), "dynamic mmap threshold");
    other libraries keep them anyway. The pages of the one that is freed here are never touched.
    """
    bytes(KEPT)


@cache
def import_numpy() -> None:
    """Import numpy; for a command without the threads of its linear algebra.

    These wait for work in a loop at first, which takes processor time from the threads that have
    some. A program that imports the package may need them for its own work, and keeps them.
    """
    is_command = "ckptkit.cli" in sys.modules and "numpy" not in sys.modules
    if is_command and _BLAS_THREADS not in os.environ:
        os.environ[_BLAS_THREADS] = "1"  # read when the library is loaded
        try:
            import numpy  # noqa: F401  # loads the library
        finally:
            del os.environ[_BLAS_THREADS]


def _slice(derived: Derived, start: int, stop: int) -> Pieces:
    (first,) = _integers(derived)
    return stream(derived.inputs[0], first + start, first + stop)


def _concat(derived: Derived, start: int, stop: int) -> Pieces:
    at = 0
    for each in derived.inputs:
        lower, upper = max(start - at, 0), min(stop - at, each.length)
        if lower < upper:
            yield from stream(each, lower, upper)
        at += each.length


def _inflate(derived: Derived, start: int, stop: int) -> Pieces:
    pieces = _inflated(derived.inputs[0])
    return _window(_compared(pieces, derived), derived, start, stop)


def _compared(pieces: Iterable[bytes], derived: Derived) -> Iterator[bytes]:
    """Yield the pieces; while the input is summed up, compare the CRC-32 of all of them."""
    name, expected = derived.parameters or ("", None)
    total, is_summed = 0, READING.sums is not None and isinstance(expected, int)
    for piece in pieces:
        total = crc32(piece, total) if is_summed else 0
        yield piece
    if is_summed and total != expected:
        assert isinstance(expected, int)
        raise CorruptError(mismatch(f"record {shown(name)}", total, expected), where=_name(derived))


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
        raise CorruptError(f"compressed data is damaged: {error}", where=_name(extent)) from error
    if not machine.eof or machine.unused_data:
        what = "is followed by other bytes" if machine.eof else "ends too early"
        raise CorruptError(f"compressed data {what}", where=_name(extent))


def _latin1(derived: Derived, start: int, stop: int) -> Pieces:
    return _window(_encoded(derived.inputs[0]), derived, start, stop)


def _encoded(extent: Extent) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in stream(extent):
            yield decoder.decode(piece).encode("latin-1")
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise CorruptError(
            "text that stands for bytes has characters above 255", where=_name(extent)
        ) from error


def _window(pieces: Iterable[bytes], derived: Derived, start: int, stop: int) -> Pieces:
    """Yield bytes `start` to `stop` of what can only be computed from its beginning.

    A read to the end raises CorruptError if there are more bytes or fewer than `derived.length`.
    """
    at = 0
    for piece in pieces:
        if at + len(piece) > derived.length:
            at += len(piece)
            break
        lower, upper = max(start - at, 0), min(stop - at, len(piece))
        if lower < upper:
            yield memoryview(piece)[lower:upper]
        at += len(piece)
        if at >= stop and stop < derived.length:
            return
    if at != derived.length:
        extent = "more than" if at > derived.length else f"{at:,} of"
        raise CorruptError(
            f"{derived.operation} gives {extent} {derived.length:,} bytes", where=_name(derived)
        )


def _byteswap(derived: Derived, start: int, stop: int) -> Pieces:
    import numpy as np

    (component,) = _integers(derived)
    swap = np.dtype(f"u{component}")
    return _elementwise(
        derived.inputs[0],
        start,
        stop,
        component,
        component,
        lambda data: _bytes(np.frombuffer(data, swap).byteswap()),
    )


def _conj(derived: Derived, start: int, stop: int) -> Pieces:
    """The sign bit of every second component flipped: IEEE negation, NaN and zero included."""
    (dtype,) = _dtypes(derived)
    if dtype.kind != "complex":
        raise TensorError(f"{dtype} has no conjugate", where=_name(derived))
    half = 1 << (8 * dtype.component - 1)
    return _flip(derived.inputs[0], start, stop, dtype, (0, half))


def _neg(derived: Derived, start: int, stop: int) -> Pieces:
    (dtype,) = _dtypes(derived)
    if dtype.kind == "int" and dtype.itemsize * 8 == dtype.bits:
        return _negate(derived.inputs[0], start, stop, dtype)
    if dtype.kind not in ("float", "complex") or dtype.component == 1:
        raise TensorError(f"{dtype} cannot be negated", where=_name(derived))
    half = 1 << (8 * dtype.component - 1)
    return _flip(derived.inputs[0], start, stop, dtype, (half, half))


def _flip(extent: Extent, start: int, stop: int, dtype: DType, masks: tuple[int, int]) -> Pieces:
    """Components, in pairs, with the bits of `masks` flipped."""
    import numpy as np

    unit = np.dtype(f"<u{dtype.component}")
    mask = np.array(masks, unit)

    def flip(data: Piece) -> memoryview:
        values = np.frombuffer(data, unit)
        return _bytes(values ^ np.resize(mask, values.shape))

    return _elementwise(extent, start, stop, dtype.itemsize, dtype.itemsize, flip)


def _negate(extent: Extent, start: int, stop: int, dtype: DType) -> Pieces:
    import numpy as np

    unit = np.dtype(f"<u{dtype.itemsize}")
    size = dtype.itemsize
    return _elementwise(
        extent, start, stop, size, size, lambda data: _bytes(np.negative(np.frombuffer(data, unit)))
    )


def _bytes(values: np.ndarray[Any, Any]) -> memoryview:
    import numpy as np

    return values.view(np.uint8).data


def _cast(derived: Derived, start: int, stop: int) -> Pieces:
    source, target = _dtypes(derived)
    cast = _cast_floats if {source.name, target.name} <= FLOATS else _cast_others
    old, new = source.itemsize, target.itemsize
    return _elementwise(
        derived.inputs[0], start, stop, old, new, lambda data: cast(data, source, target)
    )


def _cast_floats(data: Piece, source: DType, target: DType) -> memoryview:
    return encode(decode(data, source), target)


def _cast_others(data: Piece, source: DType, target: DType) -> memoryview:
    import torch

    from ckptkit.compute.torch_dtypes import as_torch, torch_dtype

    return _bytes(as_torch(data, source, torch_dtype(target)).view(torch.uint8).numpy())


def _dequant(derived: Derived, start: int, stop: int) -> Pieces:
    from ckptkit.compute.quantized import Dequantizer

    data, *tables = derived.inputs
    dtype = dtypes.BY_NAME[str(derived.parameters[0])]
    several = max(1, 8 // dtype.bits)  # elements in a unit of the input
    held = [b"".join(stream(table)) for table in tables]
    machine = Dequantizer(derived.parameters, held, start // (4 * several) * several)
    return _elementwise(
        data, start, stop, dtype.itemsize, 4 * several, lambda piece: _bytes(machine(piece))
    )


def _blocks(derived: Derived, start: int, stop: int) -> Pieces:
    from ckptkit.compute.dequantizing import dequantize

    return dequantize([_reader(extent, Room()) for extent in derived.inputs], derived, start, stop)


def _quantize(derived: Derived, start: int, stop: int) -> Pieces:
    from ckptkit.compute.quantizing import quantize

    read = _reader(derived.inputs[0], Room())
    return quantize(lambda at, length: bytes(read(at, length)), derived, start, stop)


def _apply(derived: Derived, start: int, stop: int) -> Pieces:
    from ckptkit.compute.user_function import Application, result

    (job,) = derived.parameters
    assert isinstance(job, Application)
    data = bytearray(derived.inputs[0].length)
    read_into(derived.inputs[0], 0, memoryview(data))
    made = result(job, data)
    del data
    for at in range(start, stop, PIECE):
        yield made[at : min(at + PIECE, stop)]


def _mean(derived: Derived, start: int, stop: int) -> Pieces:
    mean = Mean(derived)
    size = mean.target.itemsize
    first, last = start // size, -(-stop // size)
    units = [dtype.itemsize for dtype in mean.types]
    rows = (
        flow(extent, first * unit, last * unit)
        for extent, unit in zip(derived.inputs, units, strict=True)
    )
    at = first * size
    for pieces in in_step(rows, units, ELEMENTS):
        made = mean.of(pieces)
        yield made[max(start - at, 0) : min(stop - at, len(made))]
        at += len(made)


def _elementwise(
    extent: Extent,
    start: int,
    stop: int,
    old: int,
    new: int,
    function: Callable[[Piece], memoryview],
) -> Pieces:
    """`function` over elements of `old` bytes, which become `new` bytes each, cut to bytes `start`
    to `stop`."""
    if start >= stop:
        return
    first, last = start // new, -(-stop // new)
    at = first * new
    for piece in aligned(flow(extent, first * old, last * old), old, BUFFER):
        made = function(piece)
        lower, upper = max(start - at, 0), min(stop - at, len(made))
        yield made[lower:upper]
        at += len(made)


def _gather(derived: Derived, start: int, stop: int) -> Pieces:
    return gather(_reader(derived.inputs[0], Room()), derived, start, stop)


def _chunks(derived: Derived, start: int, stop: int) -> Pieces:
    found = columns(derived)
    if found:
        return joined(found, start, stop)
    room = Room()
    return assemble([_reader(extent, room) for extent in derived.inputs], derived, start, stop)


def _reader(extent: Extent, room: Room) -> Read:
    """Reads so many bytes of an extent at an offset; those of a local file into `room`, which
    readers may share."""
    if isinstance(extent, Derived):
        if extent.operation in _FROM_THE_BEGINNING and extent.length <= HELD:
            held = b"".join(stream(extent))
            return lambda at, length: held[at : at + length]
        return Cursor(extent).read
    source, origin, _ = extent
    if not isinstance(source, LocalFile):
        return lambda at, length: source.read(origin + at, length)

    return FileReader(source, origin, room)


def read_into(extent: Extent, at: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of an extent from byte `at` of it."""
    if isinstance(extent, Range):
        extent.source.read_into(extent.offset + at, buffer)
        return
    done = 0
    for piece in stream(extent, at, at + len(buffer)):
        buffer[done : done + len(piece)] = piece
        done += len(piece)


def read_rows(extent: Extent, at: int, pitch: int, rows: Sequence[memoryview]) -> None:
    """Fill the rows with the bytes of an extent from byte `at` of it, `pitch` bytes apart."""
    if isinstance(extent, Derived):
        for n, row in enumerate(rows):
            read_into(extent, at + n * pitch, row)
    elif rows and pitch == len(rows[0]):
        extent.source.read_into_all(extent.offset + at, rows)
    else:
        extent.source.read_into_apart(extent.offset + at, pitch, rows)


class Cursor:
    """Reads a computed extent at growing offsets without computing a byte twice; going back starts
    again."""

    def __init__(self, extent: Derived) -> None:
        self._extent = extent
        self._at = 0  # of the first byte of the window
        self._window = bytearray()
        self._pieces = stream(extent)

    def read(self, start: int, length: int) -> bytes:
        """Bytes `start` to `start + length`, which the caller knows to be there."""
        if start < self._at:
            self._at, self._window = start, bytearray()
            self._pieces = stream(self._extent, start)
        while self._at + len(self._window) < start + length:
            drop = min(start - self._at, len(self._window))
            del self._window[:drop]
            self._at += drop
            self._window += next(self._pieces)
        return bytes(self._window[start - self._at : start - self._at + length])


def _integers(derived: Derived) -> tuple[int, ...]:
    return tuple(each for each in derived.parameters if isinstance(each, int))


def _dtypes(derived: Derived) -> tuple[DType, ...]:
    return tuple(dtypes.BY_NAME[str(each)] for each in derived.parameters)


def _name(extent: Extent) -> str:
    return extent.source.name if isinstance(extent, Range) else next(extent.sources()).name


OPERATIONS: dict[str, Callable[[Derived, int, int], Pieces]] = {
    "slice": _slice,
    "concat": _concat,
    "inflate": _inflate,
    "latin1": _latin1,
    "byteswap": _byteswap,
    "gather": _gather,
    "chunks": _chunks,
    "conj": _conj,
    "neg": _neg,
    "cast": _cast,
    "dequant": _dequant,
    "mean": _mean,
    "sum": _mean,
    "blocks": _blocks,
    "quantize": _quantize,
    "apply": _apply,
}
