"""Define the operations that apply a delta: decompress, xor, overwrite, verify a checksum."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ckptkit.compute.operation import (
    BUFFER,
    Pieces,
    Rows,
    aligned,
    as_bytes,
    in_step,
    name_of,
    stream,
    stream_reusing_buffer,
    window,
)
from ckptkit.core.bytesource import Derived, Extent, Operation, Piece
from ckptkit.core.errors import CorruptError, MissingPackageError, UnsupportedError
from ckptkit.core.text import shown

if TYPE_CHECKING:
    import numpy as np

_WINDOW = 64 << 20  # maximum size of a zstd window in bytes; levels 1 to 19 use at most 8 MiB
_AT_ONCE = 64 << 10  # number of positions to decode at once


class Hash(Protocol):
    """A running checksum, with the interface of hashlib."""

    def update(self, data: Any, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    """Adler-32 with the interface of hashlib. The digest has 8 hex digits."""

    _value = 1

    def update(self, data: Piece) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def zstandard() -> Any:
    """Import the package zstandard. Raises MissingPackageError if the package is missing."""
    try:
        import zstandard
    except ImportError as error:
        raise _missing(error) from error
    return zstandard


def hashing(algorithm: object) -> Hash:
    """Start a checksum with this algorithm. Raises UnsupportedError for an unknown algorithm."""
    try:
        if algorithm == "xxh3-128":
            from xxhash import xxh3_128

            return xxh3_128()
        if algorithm == "blake3":
            from blake3 import blake3

            return blake3()
    except ImportError as error:
        raise _missing(error) from error
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "adler32":
        return _Adler32()
    raise UnsupportedError(f"unknown checksum algorithm {shown(algorithm)}")


def _missing(error: ImportError) -> MissingPackageError:
    what = f"this delta needs {error.name}"
    return MissingPackageError(what, hint="pip install -e '.[delta]'")


@dataclass(frozen=True, slots=True)
class Unzstd(Operation):
    """Decompress zstd frames (RFC 8878).

    Raises CorruptError unless the decompressed data has the length of the extent.
    """

    tensor: str
    seekable: ClassVar[bool] = False
    needs_numpy: ClassVar[bool] = False
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        pieces = unzstd(extent.inputs[0], self.tensor)
        return window(f"the frame of {shown(self.tensor)}", pieces, extent, start, stop)


def unzstd(extent: Extent, tensor: str) -> Iterator[bytes]:
    """Decompress zstd frames, and yield pieces of bounded size."""
    module = zstandard()
    machine = module.ZstdDecompressor(max_window_size=_WINDOW)
    # Also read frames after the first frame. Otherwise, the decompressor would ignore extra bytes
    # after the first frame. Such bytes must raise an error.
    reader = machine.stream_reader(_Source(extent), read_across_frames=True)
    try:
        while piece := reader.read(BUFFER):
            yield piece
    except module.ZstdError as error:
        message = f"the frame of {shown(tensor)} is damaged: {error}"
        raise CorruptError(message, where=name_of(extent)) from error


class _Source:
    """A file-like object that reads an extent."""

    def __init__(self, extent: Extent) -> None:
        self._pieces = stream(extent)
        self._rest = b""

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = bytes(next(self._pieces, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


@dataclass(frozen=True, slots=True)
class Xor(Rows):
    """Compute the xor of two inputs of equal length."""

    rows: ClassVar[tuple[int, ...]] = (1, 1, 1)

    def of(self, *pieces: Piece) -> memoryview:
        import numpy as np

        return as_bytes(np.bitwise_xor(*(np.frombuffer(each, np.uint8) for each in pieces)))


@dataclass(frozen=True, slots=True)
class Overwrite(Operation):
    """Replace elements of the first input. Each element has `unit` bytes.

    The second input contains the positions of these elements in increasing order, as unsigned
    integers of `width` bytes. With `gaps`, the second input contains the gap before each position
    instead: the number of unchanged elements since the previous position. The third input contains
    the new elements.
    """

    unit: int
    width: int
    gaps: bool
    tensor: str
    seekable: ClassVar[bool] = False

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        name = f"the delta of {shown(self.tensor)}"
        return window(name, self._changed(extent), extent, start, stop)

    def _changed(self, extent: Derived) -> Iterator[memoryview]:
        import numpy as np

        changes = self._changes(extent)
        places, values = next(changes, (None, None))
        at = 0
        for piece in aligned(
            stream_reusing_buffer(extent.inputs[0]), self.unit, BUFFER // self.unit * self.unit
        ):
            made = np.frombuffer(piece, np.uint8).reshape(-1, self.unit).copy()
            end = at + len(made)
            while places is not None and values is not None:
                count = int(np.searchsorted(places, end))
                made[places[:count] - at] = values[:count]
                if count < len(places):
                    places, values = places[count:], values[count:]
                    break
                places, values = next(changes, (None, None))
            yield as_bytes(made.reshape(-1))
            at = end
        if places is not None:
            raise self._wrong(
                extent,
                f"changes element {places[0]:,}, but the tensor has only {at:,} elements",
            )

    def _changes(
        self, extent: Derived
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield (increasing positions, new elements at these positions) in batches."""
        import numpy as np

        last = -1
        streams = [stream_reusing_buffer(each) for each in extent.inputs[1:]]
        for raw, values in in_step(streams, (self.width, self.unit), _AT_ONCE):
            places = np.frombuffer(raw, f"<u{self.width}").astype(np.int64)
            if self.gaps:
                places = np.cumsum(places + 1) + last
            elif places[0] <= last or (np.diff(places) <= 0).any():
                raise self._wrong(extent, "has positions that do not increase")
            last = int(places[-1])
            yield places, np.frombuffer(values, np.uint8).reshape(-1, self.unit)

    def _wrong(self, extent: Derived, what: str) -> CorruptError:
        where = name_of(extent.inputs[1])
        return CorruptError(f"the delta of {shown(self.tensor)} {what}", where=where)


@dataclass(frozen=True, slots=True)
class VerifyChecksum(Operation):
    """Yield the bytes of the input. After the last byte, verify the checksum of these bytes."""

    tensor: str
    algorithm: str
    digest: str
    delta: str  # name of the delta in error messages
    seekable: ClassVar[bool] = False
    needs_numpy: ClassVar[bool] = False

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        return window(f"{shown(self.tensor)}", self._compared(extent), extent, start, stop)

    def _compared(self, extent: Derived) -> Iterator[Piece]:
        total = hashing(self.algorithm)
        for piece in stream_reusing_buffer(extent.inputs[0]):
            total.update(piece)
            yield piece
        if total.hexdigest() != self.digest:
            raise CorruptError(
                f"with the delta, {shown(self.tensor)} has the {self.algorithm} checksum "
                f"{total.hexdigest()}, but the delta records {self.digest}: the base is wrong, or "
                "the delta is damaged",
                where=self.delta,
                hint="`delta verify` shows the version of the base",
            )
