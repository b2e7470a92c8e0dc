"""Read deltas: the folders of slime, miles and SGLang, those of SkyRL, and the files of TRL.

    weight_v000007/
      model-00000-of-00002.safetensors   a tensor U8 for each that changed: a zstd frame
      model.safetensors.index.json       version, base_version, delta_encoding, checksum_format...

A frame holds ``new ^ old`` (`xor`), or (`overwrite`) a u4 count, as many u4 positions of bytes, and
the new bytes. ``__metadata__`` of a file has the checksum of the new bytes of each of its tensors.
An index without ``delta_encoding``, or none, is a whole checkpoint. Source:
https://github.com/THUDM/slime (slime/utils/disk_delta.py and the patch for SGLang, 624b824).

SkyRL has ``manifest.json`` in place of the index, and frames of `xor`. Source:
https://github.com/NovaSky-AI/SkyRL (skyrl_train/weight_sync/delta_checkpoint.py, a956457).

TRL has one file of ``{name}.idx`` or ``{name}.indices`` (positions of elements) and ``{name}.val``
or ``{name}.values``, without a checksum. Source: https://github.com/huggingface/trl (branches
delta-weight-sync and delta-weight-sync-v3, trl/experimental/async_grpo/delta_codec.py, aa9adc3).
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
from ckptkit.deltas.changes import Overwrite, Proven, Unzstd, Xor, hashing, unzstd
from ckptkit.formats import safetensors, strict_json
from ckptkit.formats.format import open_place

INDEX = "model.safetensors.index.json"
MANIFEST = "manifest.json"
XOR, OVERWRITE, WHOLE = "xor", "overwrite", "whole"
_NUMBERED = re.compile(r"weight_v([0-9]{6,9})|delta-([0-9]{8,9})")
_COUNT, _PLACE = 4, 4  # bytes of the count and of a position of `overwrite`


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of one tensor: a zstd frame, or positions and elements as they are.

    ``checksum`` is (algorithm, lowercase hex digits) of the new bytes, None where none is recorded.
    """

    name: str
    encoding: str
    frame: Range
    checksum: tuple[str, str] | None = None
    values: Range | None = None  # of TRL, whose `frame` has the positions
    width: int = _PLACE  # bytes of a position
    unit: int = 1  # bytes of what a position counts
    gaps: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that it has in the delta."""
        return self.frame.length + (0 if self.values is None else self.values.length)

    def changed(self) -> int:
        """Count the bytes that it changes; a frame is decompressed for that."""
        if self.encoding != XOR:
            return self.places_and_values()[1].length
        import numpy as np

        pieces = unzstd(self.frame, self.name)
        return sum(int(np.count_nonzero(np.frombuffer(each, np.uint8))) for each in pieces)

    def decompressed(self, length: int) -> Derived:
        """Return the content of the frame, which has `length` bytes."""
        return Derived(Unzstd(self.name), (self.frame,), length)

    def places_and_values(self) -> tuple[Extent, Extent]:
        """Return the positions and the new elements of an `overwrite`.

        Raises CorruptError where their numbers differ.
        """
        if self.values is not None:
            count, rest = divmod(self.frame.length, self.width)
            if rest or self.values.length != count * self.unit:
                what = f"the delta of {shown(self.name)} has other numbers of positions and values"
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
        """Return the new bytes of the tensor whose old bytes are `base`.

        They are compared with the checksum where they are read to the end.
        """
        if self.encoding == XOR:
            made = Pending(Xor(), (base, self.decompressed(base.length)), base.length)
        else:
            places, values = self.places_and_values()
            operation = Overwrite(self.unit, self.width, self.gaps, self.name)
            made = Pending(operation, (base, places, values), base.length)
        if self.checksum is None:
            return made
        return Pending(Proven(self.name, *self.checksum, delta), (made,), base.length)


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta, or a whole version of a chain, whose ``encoding`` is `WHOLE`.

    ``version`` and ``base_version`` are None where the form records none.
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
        """A phrase for people: the versions and the encoding."""
        if self.encoding == WHOLE:
            return "a whole version"
        if self.version is None:
            return f"a delta ({self.form}, {self.encoding})"
        base = "" if self.base_version is None else f" of {self.base_version:06d}"
        return f"version {self.version:06d}, a delta{base} ({self.form}, {self.encoding})"

    @property
    def is_proven(self) -> bool:
        """Return whether each change has a checksum."""
        return all(each.checksum is not None for each in self.changes.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all changes in the delta."""
        return sum(each.nbytes for each in self.changes.values())


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def read_all(given: Paths, to: int | None = None) -> list[Delta]:
    """Read deltas in the order given; a folder of version folders stands for those, by number.

    `to` is the last version that is taken. Raises UsageError where there is none.
    """
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    paths = [arguments.path("deltas", each) for each in several]
    found = [read(each) for path in paths for each in _versions(path)]
    if to is not None:
        found = [each for each in found if each.version is not None and each.version <= to]
        if not found or found[-1].version != to:
            raise UsageError(f"there is no version {to} among the deltas", where=paths[-1])
    return found


def _versions(path: str) -> list[str]:
    """Return the folders of versions in a folder, by number; else the path itself."""
    if not os.path.isdir(path):
        return [path]
    numbered = [
        (int(match[1] or match[2]), name)
        for name in os.listdir(path)
        if (match := _NUMBERED.fullmatch(name))
    ]
    return [os.path.join(path, name) for _, name in sorted(numbered)] or [path]


def read(path: str) -> Delta:
    """Read one delta: its headers alone. A checkpoint is a whole version."""
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
    said = index.get("metadata")
    if not isinstance(said, dict) or "delta_encoding" not in said:
        return _whole(folder.name)
    encoding = said["delta_encoding"]
    if encoding not in (XOR, OVERWRITE):
        known = f"{XOR} or {OVERWRITE}"
        raise UnsupportedError(f"its encoding is {shown(encoding)}, which is not {known}")
    if (how := said.get("compression_format")) != "zstd":
        raise UnsupportedError(f"its frames are compressed by {shown(how)}, and not by zstd")
    algorithm = said.get("checksum_format")
    hashing(algorithm)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise FormatError("its index has no weight_map from names to files")
    changes: dict[str, Change] = {}
    for file in sorted(set(places.values())):
        tensors, sums = _file(folder.open(file))
        for name, tensor in tensors.items():
            if places.get(name) != file:
                raise FormatError(f"{shown(name)} is in {file}, but not by the index")
            frame = _frame(name, tensor)
            changes[name] = Change(name, encoding, frame, _checksum(algorithm, sums.get(name)))
    if missing := [name for name in places if name not in changes]:
        raise FormatError(f"{shown(missing[0])} is in none of its files")
    unnamed = {each for each in folder.list() if each.endswith(".safetensors")}
    if unnamed := unnamed - set(places.values()):
        raise FormatError(f"{min(unnamed)} is not in its index")
    version, base = (_number(said.get(word), word) for word in ("version", "base_version"))
    return Delta(folder.name, "slime", encoding, version, base, changes)


def _of_manifest(folder: Folder) -> Delta:
    said = _object(folder, MANIFEST)
    rows = said.get("tensors")
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise FormatError(f"{MANIFEST} is not the manifest of a delta")
    files: dict[str, dict[str, Tensor]] = {}
    changes: dict[str, Change] = {}
    for row in rows:
        name, file, key = (row.get(word) for word in ("name", "payload_file", "payload_key"))
        if not (isinstance(name, str) and isinstance(file, str) and isinstance(key, str)):
            raise FormatError(f"{MANIFEST} has a row without a name, a payload_file or its key")
        if file not in files:
            files[file], _ = _file(folder.open(file))
        if name in changes or key not in files[file]:
            why = "twice in" if name in changes else f"not in {file}, as says"
            raise FormatError(f"{shown(name)} is {why} {MANIFEST}")
        algorithm = row.get("checksum_algorithm", "sha256" if "sha256" in row else "xxh3-128")
        checksum = _checksum(algorithm, row.get("checksum", row.get("sha256")))
        changes[name] = Change(name, XOR, _frame(name, files[file][key]), checksum)
    version, base = (_number(said.get(word), word) for word in ("version", "base_version"))
    return Delta(folder.name, "SkyRL", XOR, version, base, changes)


def _of_file(source: ByteSource) -> Delta:
    """Read a file of TRL; any other file is a whole version."""
    if source.read(8, 1) != b"{":
        return _whole(source.name)
    tensors, said = _file(source)
    changes: dict[str, Change] = {}
    for places, values in ((".idx", ".val"), (".indices", ".values")):
        for name in [each.removesuffix(values) for each in tensors if each.endswith(values)]:
            if (found := tensors.get(name + places)) is not None:
                changes[name] = _sparse(name, found, tensors[name + values], said.get("encoding"))
    if 2 * len(changes) != len(tensors) or not changes:
        return _whole(source.name)
    version = said.get("model_version")
    number = int(version) if version and version.isdecimal() and len(version) < 10 else None
    return Delta(source.name, "TRL", OVERWRITE, number, None, changes)


def _sparse(name: str, places: Tensor, values: Tensor, encoding: str | None) -> Change:
    gaps = encoding is not None and encoding.rpartition(".")[2].lower() == "gap_delta"
    kinds = ("uint16", "uint32") if gaps else ("int32",)
    if places.dtype.name not in kinds:
        raise UnsupportedError(f"the positions of {shown(name)} are coded as {shown(encoding)}")
    frame, elements = (each.storage.record.locate() for each in (places, values) if each.storage)
    assert isinstance(frame, Range) and isinstance(elements, Range)
    width, unit = places.dtype.itemsize, values.dtype.itemsize
    return Change(name, OVERWRITE, frame, None, elements, width, unit, gaps)


def _file(source: ByteSource) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file of safetensors, and its metadata."""
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
        raise FormatError(f"{shown(name)} is not a row of bytes (U8)")
    found = tensor.storage.record.locate()
    assert isinstance(found, Range)
    return found


def _checksum(algorithm: Any, digest: Any) -> tuple[str, str] | None:
    if digest is None:
        return None
    hashing(algorithm)
    return str(algorithm), str(digest).lower()


def _number(value: Any, word: str) -> int:
    """Return a version: six digits of slime, or a number of SkyRL."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if type(value) is int and 0 <= value < 10**9:
        return value
    raise FormatError(f"its {word} is {shown(value)}, which is no version")
