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

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.compute.operation import part
from ckptkit.core import arguments
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Folder, Pending, Range, Record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    FormatError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import shown
from ckptkit.deltas.changes import Overwrite, Unzstd, VerifyChecksum, Xor, hashing, unzstd
from ckptkit.formats import safetensors, strict_json
from ckptkit.formats.format import open_place

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
XOR, OVERWRITE, WHOLE = "xor", "overwrite", "whole"
_NUMBERED = re.compile(r"weight_v([0-9]{6,9})|delta-([0-9]{8,9})")
_COUNT, _PLACE = 4, 4  # size in bytes of the count, and of each position, in an `overwrite` frame


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
        import numpy as np

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
        head = b""
        for piece in unzstd(self.frame, self.name):
            head += piece[: _COUNT - len(head)]
            if len(head) == _COUNT:
                break
        count = int.from_bytes(head, "little")
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
    found = [read(each) for path in paths for each in _versions(path)]
    if to is not None:
        found = [each for each in found if each.version is not None and each.version <= to]
        if not found or found[-1].version != to:
            raise UsageError(f"has no version {to}", where=paths[-1])
    return found


def _versions(path: str) -> list[str]:
    """Return the deltas in a folder of deltas, sorted by version. Otherwise, return `[path]`."""
    if not os.path.isdir(path):
        return [path]
    numbered = [
        (int(match[1] or match[2]), name)
        for name in os.listdir(path)
        if (match := _NUMBERED.fullmatch(name))
    ]
    return [os.path.join(path, name) for _, name in sorted(numbered)] or [path]


def read(path: str) -> Delta:
    """Read the headers of a delta. If `path` is a checkpoint, return it with encoding `WHOLE`."""
    place = open_place(path)
    try:
        if isinstance(place, ByteSource):
            return _of_file(place)
        names = set(place.list())
        if MANIFEST in names and INDEX not in names:
            return _of_manifest(place)
        if INDEX in names:
            return _of_index(place)
    except CkptkitError as error:
        raise error.at(path) from error.__cause__
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
            frame = _frame(name, tensor)
            changes[name] = Change(name, encoding, frame, _checksum(algorithm, sums.get(name)))
    if missing := [name for name in places if name not in changes]:
        raise FormatError(f"{INDEX} lists {shown(missing[0])}, but no file contains it")
    unnamed = {each for each in folder.list() if each.endswith(".safetensors")}
    if unnamed := unnamed - set(places.values()):
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
        checksum = _checksum(algorithm, row.get("checksum", row.get("sha256")))
        changes[name] = Change(name, XOR, _frame(name, files[file][key]), checksum)
    version, base = (_number(manifest.get(word), word) for word in ("version", "base_version"))
    return Delta(folder.name, "SkyRL", XOR, version, base, changes)


def _of_file(source: ByteSource) -> Delta:
    """Read a delta file of TRL. Any other file is returned as a checkpoint (encoding `WHOLE`)."""
    if source.read(8, 1) != b"{":
        return _whole(source.name)
    tensors, metadata = _file(source)
    changes: dict[str, Change] = {}
    for places, values in ((".idx", ".val"), (".indices", ".values")):
        for name in [each.removesuffix(values) for each in tensors if each.endswith(values)]:
            if (found := tensors.get(name + places)) is not None:
                new, encoding = tensors[name + values], metadata.get("encoding")
                changes[name] = _sparse(name, found, new, encoding)
    if 2 * len(changes) != len(tensors) or not changes:
        return _whole(source.name)
    version = metadata.get("model_version")
    number = int(version) if version and version.isdecimal() and len(version) < 10 else None
    return Delta(source.name, "TRL", OVERWRITE, number, None, changes)


def _sparse(name: str, places: Tensor, values: Tensor, encoding: str | None) -> Change:
    gaps = encoding is not None and encoding.rpartition(".")[2].lower() == "gap_delta"
    kinds = ("uint16", "uint32") if gaps else ("int32",)
    if places.dtype.name not in kinds:
        raise UnsupportedError(
            f"the positions of {shown(name)} have the unsupported encoding {shown(encoding)}"
        )
    frame, elements = (each.storage.record.locate() for each in (places, values) if each.storage)
    assert isinstance(frame, Range) and isinstance(elements, Range)
    width, unit = places.dtype.itemsize, values.dtype.itemsize
    return Change(name, OVERWRITE, frame, None, elements, width, unit, gaps)


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


def _frame(name: str, tensor: Tensor) -> Range:
    if tensor.dtype is not BY_NAME["uint8"] or tensor.ndim != 1 or tensor.storage is None:
        raise FormatError(f"{shown(name)} is not a one-dimensional U8 tensor")
    found = tensor.storage.record.locate()
    assert isinstance(found, Range)
    return found


def _checksum(algorithm: Any, digest: Any) -> tuple[str, str] | None:
    if digest is None:
        return None
    hashing(algorithm)
    return str(algorithm), str(digest).lower()


def _number(value: Any, word: str) -> int:
    """Parse a version. slime stores a string of digits, and SkyRL an integer."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if type(value) is int and 0 <= value < 10**9:
        return value
    raise FormatError(f"its {word} is {shown(value)}, not a version number")
