"""Read deltas: folders of slime, miles and SGLang, folders of SkyRL, and files of TRL.

A folder of slime, such as ``weight_v000007``, contains these files:

* ``model-00000-of-00002.safetensors`` contains a U8 tensor for each changed tensor. The elements of
  the U8 tensor are a zstd frame. ``__metadata__`` contains the checksum of each tensor's new bytes.
* ``model.safetensors.index.json`` contains version, base_version, delta_encoding, checksum_format
  and so on.

With the encoding `xor`, a zstd frame contains ``new ^ old``. With the encoding `overwrite`, a zstd
frame contains the number of changed bytes, their positions, and the new bytes. The number and each
position are uint32. If the index or its entry ``delta_encoding`` is missing, the folder is a
complete checkpoint.

A folder of SkyRL contains ``manifest.json`` in place of the index. Frames have the encoding `xor`.

A file of TRL contains two tensors for each changed tensor, and no checksums:

* ``{name}.idx`` or ``{name}.indices`` contains the positions of the changed elements.
* ``{name}.val`` or ``{name}.values`` contains the new elements.

Sources:

* https://github.com/THUDM/slime: slime/utils/disk_delta.py and the patch for SGLang, 624b824.
* https://github.com/NovaSky-AI/SkyRL: skyrl_train/weight_sync/delta_checkpoint.py, a956457.
* https://github.com/huggingface/trl: trl/experimental/async_grpo/delta_codec.py, aa9adc3, in the
  branches delta-weight-sync and delta-weight-sync-v3.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol

from ckptkit.compute.lazy import np
from ckptkit.compute.operation import (
    BUFFER,
    Pieces,
    Rows,
    aligned,
    as_bytes,
    in_step,
    name_of,
    part,
    stream,
    stream_reusing_buffer,
    window,
)
from ckptkit.core import arguments
from ckptkit.core.bytesource import (
    ByteSource,
    Derived,
    Extent,
    Folder,
    Operation,
    Pending,
    Piece,
    Range,
    Record,
)
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    CorruptError,
    FormatError,
    MissingPackageError,
    UnsupportedError,
    UsageError,
    placed,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten, shown
from ckptkit.formats import safetensors, strict_json
from ckptkit.formats.format import open_place

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
XOR, OVERWRITE, WHOLE = "xor", "overwrite", "whole"
_NUMBERED = re.compile(r"weight_v([0-9]{6,9})|delta-([0-9]{8,9})")
_PLACES = {"val": "idx", "values": "indices"}  # names of tensors of TRL: values, positions
_COUNT, _PLACE = 4, 4  # size in bytes of the count, and of each position, in an `overwrite` frame
_WINDOW = 64 << 20  # maximum size of a zstd window in bytes; levels 1 to 19 use at most 8 MiB
_AT_ONCE = 64 << 10  # number of positions to decode at once


# Operations that apply a delta


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
                places, values = places[count:], values[count:]
                if len(places):
                    break
                places, values = next(changes, (None, None))
            yield as_bytes(made.reshape(-1))
            at = end
        if places is not None:
            what = f"changes element {places[0]:,}, but the tensor has only {at:,} elements"
            raise self._wrong(extent, what)

    def _changes(
        self, extent: Derived
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield (increasing positions, new elements at these positions) in batches."""
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


# Reading


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one tensor: a zstd frame, or uncompressed positions and elements.

    ``checksum`` is the checksum of the new bytes as (algorithm, lowercase hex digits), or None.
    """

    name: str
    encoding: str
    frame: Range
    checksum: tuple[str, str] | None = None
    values: Range | None = None  # new elements (only for TRL, where `frame` contains the positions)
    width: int = _PLACE  # size of a position in bytes
    unit: int = 1  # size of an element in bytes
    gaps: bool = False  # True if positions are stored as gaps: see `Overwrite`

    @property
    def nbytes(self) -> int:
        """Number of bytes that the delta needs for this change."""
        return self.frame.length + (0 if self.values is None else self.values.length)

    def changed(self) -> int:
        """Decompress the frame and count the changed bytes."""
        if self.encoding != XOR:
            return self.places_and_values()[1].length
        pieces = unzstd(self.frame, self.name)
        return sum(int(np.count_nonzero(np.frombuffer(each, np.uint8))) for each in pieces)

    def decompressed(self, length: int) -> Derived:
        """Decompress the frame, whose contents must have `length` bytes."""
        return Derived(Unzstd(self.name), (self.frame,), length)

    def places_and_values(self) -> tuple[Extent, Extent]:
        """Return the positions and the new elements of an `overwrite` change.

        Raises CorruptError unless there is one position for each element.
        """
        if self.values is not None:
            count, rest = divmod(self.frame.length, self.width)
            if rest or self.values.length != count * self.unit:
                what = f"the delta of {shown(self.name)} has unequal counts of positions and values"
                raise CorruptError(what, where=self.frame.source.name)
            return self.frame, self.values
        pieces = unzstd(self.frame, self.name)
        count = int.from_bytes(bytes(islice(flatten(pieces), _COUNT)), "little")
        whole = self.decompressed(_COUNT + count * (_PLACE + 1))
        places = part(whole, _COUNT, count * _PLACE)
        return places, part(whole, _COUNT + count * _PLACE, count)

    def applied(self, base: Record, delta: str) -> Record:
        """Apply the change to `base`, the old bytes of the tensor. Return the new bytes.

        The checksum is verified when the last new byte is read.
        """
        if self.encoding == XOR:
            made = Pending(Xor(), (base, self.decompressed(base.length)), base.length)
        else:
            places, values = self.places_and_values()
            operation = Overwrite(self.unit, self.width, self.gaps, self.name)
            made = Pending(operation, (base, places, values), base.length)
        if self.checksum is None:
            return made
        return Pending(VerifyChecksum(self.name, *self.checksum, delta), (made,), base.length)


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta, or a complete checkpoint in a chain of deltas (``encoding`` is `WHOLE`).

    ``version`` and ``base_version`` are None if the format does not record versions.
    """

    name: str
    form: str
    encoding: str
    version: int | None = None
    base_version: int | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Delta {self.name}: {self.title}, {len(self.changes):,} tensors>"

    @property
    def title(self) -> str:
        """Versions and encoding of the delta, as text."""
        if self.encoding == WHOLE:
            return "a complete checkpoint"
        if self.version is None:
            return f"a delta ({self.form}, {self.encoding})"
        base = "" if self.base_version is None else f" of {self.base_version:06d}"
        return f"version {self.version:06d}, a delta{base} ({self.form}, {self.encoding})"

    @property
    def is_proven(self) -> bool:
        """True if each change has a checksum."""
        return all(each.checksum is not None for each in self.changes.values())

    @property
    def nbytes(self) -> int:
        """Total size of the changes in bytes."""
        return sum(each.nbytes for each in self.changes.values())


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def read_all(given: Paths, to: int | None = None) -> list[Delta]:
    """Read deltas in the given order. Read a folder of deltas in the order of versions.

    `to` is the last version to read. Raises UsageError if version `to` is missing.
    """
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    paths = [arguments.path("deltas", each) for each in several]
    found = []
    for path in paths:
        names = os.listdir(path) if os.path.isdir(path) else []
        matches = filter(None, map(_NUMBERED.fullmatch, names))
        numbered = sorted((int(match[1] or match[2]), match[0]) for match in matches)
        found += [read(os.path.join(path, name)) for _, name in numbered] or [read(path)]
    if to is not None:
        found = [each for each in found if each.version is not None and each.version <= to]
        if not found or found[-1].version != to:
            raise UsageError(f"has no version {to}", where=paths[-1])
    return found


def read(path: str) -> Delta:
    """Read the headers of a delta. If `path` is a checkpoint, return it with encoding `WHOLE`."""
    place = open_place(path)
    with placed(path):
        if isinstance(place, ByteSource):
            return _of_file(place)
        names = place.list()
        if INDEX in names:
            return _of_index(place)
        if MANIFEST in names:
            return _of_manifest(place)
    return _whole(path)


def _whole(name: str) -> Delta:
    found = re.search(r"([0-9]{6,9})$", os.path.basename(name.rstrip(os.sep)))
    return Delta(name, "checkpoint", WHOLE, int(found[1]) if found else None)


def _of_index(folder: Folder) -> Delta:
    index = _object(folder, INDEX)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return _whole(folder.name)
    encoding = metadata["delta_encoding"]
    if encoding not in (XOR, OVERWRITE):
        raise UnsupportedError(f"its encoding is {shown(encoding)}, not {XOR} or {OVERWRITE}")
    if (how := metadata.get("compression_format")) != "zstd":
        raise UnsupportedError(f"its frames are compressed with {shown(how)}, not with zstd")
    algorithm = metadata.get("checksum_format")
    hashing(algorithm)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise FormatError("its index has no weight_map from names to files")
    changes: dict[str, Change] = {}
    for file in sorted(set(places.values())):
        tensors, sums = _file(folder.open(file))
        for name, tensor in tensors.items():
            if places.get(name) != file:
                raise FormatError(f"{shown(name)} is in {file}, but {INDEX} does not list it there")
            changes[name] = _frame(name, encoding, tensor, algorithm, sums.get(name))
    if missing := [name for name in places if name not in changes]:
        raise FormatError(f"{INDEX} lists {shown(missing[0])}, but no file contains it")
    files = {each for each in folder.list() if each.endswith(".safetensors")}
    if unnamed := files - set(places.values()):
        raise FormatError(f"{INDEX} lists no tensor of the file {min(unnamed)}")
    version, base = (_number(metadata.get(word), word) for word in ("version", "base_version"))
    return Delta(folder.name, "slime", encoding, version, base, changes)


def _of_manifest(folder: Folder) -> Delta:
    manifest = _object(folder, MANIFEST)
    rows = manifest.get("tensors")
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise FormatError(f"{MANIFEST} is not the manifest of a delta: it has no list of tensors")
    files: dict[str, dict[str, Tensor]] = {}
    changes: dict[str, Change] = {}
    for row in rows:
        name, file, key = (row.get(word) for word in ("name", "payload_file", "payload_key"))
        if not (isinstance(name, str) and isinstance(file, str) and isinstance(key, str)):
            raise FormatError(f"{MANIFEST} has a tensor without name, payload_file or payload_key")
        if file not in files:
            files[file], _ = _file(folder.open(file))
        if name in changes or key not in files[file]:
            why = "occurs twice" if name in changes else f"is missing in {file}"
            raise FormatError(f"{shown(name)} of {MANIFEST} {why}")
        algorithm = row.get("checksum_algorithm", "sha256" if "sha256" in row else "xxh3-128")
        digest = row.get("checksum", row.get("sha256"))
        changes[name] = _frame(name, XOR, files[file][key], algorithm, digest)
    version, base = (_number(manifest.get(word), word) for word in ("version", "base_version"))
    return Delta(folder.name, "SkyRL", XOR, version, base, changes)


def _of_file(source: ByteSource) -> Delta:
    """Read a delta file of TRL. Any other file is returned as a checkpoint (encoding `WHOLE`)."""
    if source.read(8, 1) != b"{":
        return _whole(source.name)
    tensors, metadata = _file(source)
    encoding = metadata.get("encoding")
    gaps = encoding is not None and encoding.rpartition(".")[2].lower() == "gap_delta"
    changes: dict[str, Change] = {}
    for name, new in tensors.items():
        stem, _, ending = name.rpartition(".")
        places = tensors.get(f"{stem}.{_PLACES[ending]}") if ending in _PLACES else None
        if places is None:
            continue
        if places.dtype.name not in (("uint16", "uint32") if gaps else ("int32",)):
            raise UnsupportedError(
                f"the positions of {shown(stem)} have the unsupported encoding {shown(encoding)}"
            )
        frame, values = _range(places), _range(new)
        width, unit = places.dtype.itemsize, new.dtype.itemsize
        changes[stem] = Change(stem, OVERWRITE, frame, None, values, width, unit, gaps)
    if 2 * len(changes) != len(tensors) or not changes:
        return _whole(source.name)
    version = metadata.get("model_version")
    number = int(version) if version and version.isdecimal() and len(version) < 10 else None
    return Delta(source.name, "TRL", OVERWRITE, number, None, changes)


def _file(source: ByteSource) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    return safetensors.read_tensors(safetensors.read_text(source), source)


def _object(folder: Folder, name: str) -> dict[str, Any]:
    source = folder.open(name)
    check("index_bytes", source.size, f"bytes of {name}")
    found = strict_json.parse(source.read(0, source.size), name)
    if not isinstance(found, dict):
        raise FormatError(f"{name} is not a JSON object")
    return found


def _range(tensor: Tensor) -> Range:
    found = None if tensor.storage is None else tensor.storage.record.locate()
    assert isinstance(found, Range)
    return found


def _frame(name: str, encoding: str, tensor: Tensor, algorithm: Any, digest: Any) -> Change:
    """Return the change in a zstd frame. `digest` is the checksum of the new bytes, or None."""
    if tensor.dtype is not BY_NAME["uint8"] or tensor.ndim != 1:
        raise FormatError(f"{shown(name)} is not a one-dimensional U8 tensor")
    checksum = None
    if digest is not None:
        hashing(algorithm)  # raises for an unknown algorithm
        checksum = str(algorithm), str(digest).lower()
    return Change(name, encoding, _range(tensor), checksum)


def _number(value: Any, word: str) -> int:
    """Parse a version. slime stores a string of digits, and SkyRL an integer."""
    text = str(value) if type(value) is int else value
    if not (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10):
        raise FormatError(f"its {word} is {shown(value)}, not a version number")
    return int(text)
