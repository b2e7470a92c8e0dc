"""Read, write and edit files of torch.save since 1.6: zip archives of stored records.

    <top>/data.pkl               a pickle that contains persistent ids
                                 ('storage', class, key, location, numel)
    <top>/data/<key>             the bytes of one storage
    <top>/version                a number from 1 to 10 ("3\\n")
    <top>/byteorder              "little" or "big" (default: little)
    <top>/.format_version, .storage_alignment, .data/serialization_id
                                 written since about torch 2.7; not needed to read the file
    <top>/.data/ckptkit.json     written by ckptkit: {"version": 1, "metadata": {string: string}}

<top> is the name of the first entry up to its first slash. (torch/serialization.py, `_load`;
caffe2/serialize.)

Every torch since 1.6 reads the files that ckptkit writes. torch 2.1 and later can memory-map these
files. In these files, <top> is ``archive``. ckptkit writes data.pkl, byteorder, the storages in
pickle order, version, and ckptkit.json. ckptkit does not write .format_version: if a file contains
this record, torch computes the offsets of storages instead of reading them from the file. A copied
storage keeps its checksum.

torch ignores ckptkit.json. The record ckptkit.json contains the metadata of a checkpoint, such as
the strings in the ``__metadata__`` of a safetensors file, or the source code in a legacy stream.

An in-place edit writes a new pickle and a new directory, and moves no storage:

    old members                   the old ``data.pkl`` is renamed to ``data.old``
    new data.pkl                  at the offset of the old directory
    directory                     the old entries in their order, then the new entry
    end records

If the old data.pkl is the last member, for example after an earlier edit, the new data.pkl
overwrites it. Otherwise, the old data.pkl stays in the directory under a name of equal length,
because readers refuse members that the directory does not list. An unused storage also stays in the
directory. The edit also renames ``.format_version``: if a file contains this record, torch computes
the offsets of storages instead of reading them from the file. Every torch since 1.6 loads the
result. torch 2.1 and later can also memory-map the result. (torch/serialization.py, `_get_offset`.)

An unpacked archive is a folder that contains the records as files, without checksums. People keep
such folders under version control, or unpack an archive with unzip. The input is the folder or its
data.pkl. ckptkit does not read an unpacked TorchScript archive (constants.pkl).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import partial
from itertools import chain
from os.path import basename
from typing import Any

from ckptkit.compute.operation import Swap
from ckptkit.core.bytesource import Derived, Folder, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import UINT8, DType
from ckptkit.core.errors import (
    NEWER_TORCH,
    NO_CHECKSUM,
    NO_VERSION,
    AmbiguousError,
    CorruptError,
    FormatError,
    Notice,
    TensorError,
    UnsupportedError,
)
from ckptkit.core.limits import check
from ckptkit.core.options import Options
from ckptkit.core.plan import Edit, OutputFile, Patch, Plan
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.text import shown, some
from ckptkit.core.tree import Node
from ckptkit.formats import strict_json, table
from ckptkit.formats.format import Probe
from ckptkit.formats.strict_json import dump
from ckptkit.formats.zip_reader import (
    END,
    REPLACED,
    StoredMember,
    ZipDirectory,
    read_directory,
    read_rows,
)
from ckptkit.formats.zip_writer import ZipMember, ends, lay_out, record
from ckptkit.pickles.storages import StorageTable, storage_class
from ckptkit.pickles.values import Unpickled, unpickle
from ckptkit.pickles.writer import write_pickle

VERSIONS = range(1, 11)
METADATA = ".data/ckptkit.json"  # name of the record that only ckptkit writes
_FRAMEWORK = "format"  # safetensors' metadata key for the framework; not written to torch files
ALIGNMENTS = range(1, 1 << 16 | 1)
_CONTROL_BYTES = 64  # maximum size of version, byteorder and similar records
# Maximum size of a remote pickle that is read once and kept in memory. A larger pickle is read
# twice, the first time to verify its checksum.
_READ_ONCE = 32 << 20
_VERSION_RECORDS = ("version", ".data/version")
_WORDS = (".format_version", ".storage_alignment", *_VERSION_RECORDS, "byteorder")
KNOWN = (
    "data.pkl", *_WORDS, ".data/serialization_id", METADATA,
)  # fmt: skip


def read(probe: Probe) -> Checkpoint:
    """Read the pickle and locate the storages.

    Raises an InputError if the archive is damaged, ambiguous or unsupported.
    """
    directory = probe.zip
    assert directory is not None
    archive = Archive(directory)
    tree = archive.unpickle("data")
    metadata = {}
    if archive.has(METADATA):
        metadata = parse_metadata(directory.read(archive.folder + METADATA))
    warnings = (*tree.warnings, *archive.warnings, *archive.unverified(), *archive.unused())
    return Checkpoint(
        tree.root, table.TORCH_ZIP.name, directory.source, metadata, tree.globals, warnings
    )


class Archive:
    """An opened archive. Reads the pickles of the archive and the storages of each pickle.

    The constructor checks the version, the byte order and the alignment in the archive. The
    constructor also checks that all records are in one top folder. ``warnings`` contains warnings
    of these checks.

    Raises AmbiguousError for a record outside the top folder and for contradictory versions,
    FormatError for other invalid records, and UnsupportedError for an unknown version.
    """

    def __init__(self, directory: ZipDirectory) -> None:
        self.directory = directory
        self.folder = directory.top + "/"
        self.warnings: list[str] = []
        self._unsummed = 0  # number of storages without a checksum
        self._storages: dict[str, Storage] = {}
        self._keys: list[tuple[str, list[str]]] = []  # each folder, and the storage keys used in it
        for name in directory.entries:
            if not name.startswith(self.folder):
                raise AmbiguousError(
                    f"record {shown(name)} is outside the folder {shown(self.folder)}"
                )
        words = {name: self._word(name) for name in _WORDS if self.has(name)}
        self.big_endian = words.pop("byteorder", "") == "big"
        numbers = {name: int(text) for name, text in words.items()}
        alignment = numbers.get(".storage_alignment", 1)
        if alignment not in ALIGNMENTS:
            raise FormatError(
                f"record .storage_alignment is {alignment:,}, not a number from 1 to "
                f"{ALIGNMENTS[-1]:,}"
            )
        versions = {numbers[name] for name in _VERSION_RECORDS if name in numbers}
        if len(versions) > 1:
            raise AmbiguousError("the records version and .data/version contradict each other")
        if not versions:
            what = "it has no version record: torch refuses it; ckptkit adds this record to a copy"
            self.warnings.append(Notice(NO_VERSION, what))
        elif not versions <= set(VERSIONS):
            raise UnsupportedError(
                f"has archive version {versions.pop()}; ckptkit reads versions {VERSIONS[0]} to "
                f"{VERSIONS[-1]}",
                code=NEWER_TORCH,
            )

    def _word(self, name: str) -> str:
        """Return the byte order, or the decimal number, in a record."""
        length = self.directory.entries[self.folder + name].length
        if length > _CONTROL_BYTES:
            raise FormatError(
                f"record {name} has {length:,} bytes, but should be a word or a number"
            )
        text = self.directory.read(self.folder + name)
        is_order = name == "byteorder"
        if not re.fullmatch(rb"little|big" if is_order else rb"[0-9]{1,9}\n?", text):
            right = "little or big" if is_order else "a number"
            raise FormatError(f"record {name} is {text!r}, not {right}")
        return text.decode()

    def unpickle(self, name: str) -> Unpickled:
        """Read the pickle ``<name>.pkl``. Its storages are in the folder ``<name>``.

        Raises CorruptError if a record is missing, damaged or of the wrong size. Raises
        AmbiguousError for bytes after the end of the pickle. Also raises the errors of `unpickle`.
        """
        record = f"{self.folder}{name}.pkl"
        if record not in self.directory.entries:
            raise CorruptError(f"record {shown(record)} is missing")
        place = self.directory.locate(record)
        if isinstance(place, Range) and not (place.source.remote and place.length <= _READ_ONCE):
            self.directory.verify(record)
        else:
            data = self.directory.read(record)
            place = Range(Memory(data, self.directory.source.name), 0, len(data))
        stop = place.offset + place.length
        folder = f"{self.folder}{name}/"
        storages = StorageTable(partial(self._open, folder))
        tree = unpickle(place.source, place.offset, stop, persistent_load=storages.load)
        self._keys.append((folder, list(storages)))
        if tree.stop != stop:
            raise AmbiguousError(
                f"{name}.pkl has {stop - tree.stop:,} bytes after the end of its pickle"
            )
        return tree

    def _open(self, folder: str, key: str, nbytes: int, location: str) -> Storage:
        name = folder + key
        entry = self.directory.entries.get(name)
        if entry is None:
            raise CorruptError(f"storage {shown(key)} has no record {shown(name)}")
        if entry.length != nbytes:
            raise CorruptError(
                f"record {shown(name)} has {entry.length:,} bytes, but its tensors need {nbytes:,}"
            )
        return self._located(name, location)

    def has(self, name: str) -> bool:
        """Return whether the top folder contains the record `name`."""
        return self.folder + name in self.directory.entries

    def json(self, name: str) -> Any:
        """Return the value in a JSON record."""
        record = self.folder + name
        check("index_bytes", self.directory.entries[record].length, f"bytes of {name}")
        return strict_json.parse(self.directory.read(record), name)

    def storage(self, name: str, device: str) -> Storage:
        """Return the storage in the record `name`. Equal names return the same object."""
        record = self.folder + name
        if record not in self.directory.entries:
            raise CorruptError(f"record {shown(record)}, which contains a tensor, is missing")
        if name not in self._storages:
            self._storages[name] = self._located(record, device)
        if self._storages[name].device != device:
            raise CorruptError(f"the tensors in {shown(record)} are on two devices")
        return self._storages[name]

    def _located(self, record: str, device: str) -> Storage:
        place, crc = self.directory.record(record)
        self._unsummed += crc is None
        return Storage(place, device, crc, self.big_endian)

    def unverified(self) -> list[str]:
        """Return a warning if some of the opened storages have no checksum."""
        count = self._unsummed
        what = f"{count:,} of its storages have no checksum: ckptkit cannot detect damage in them"
        return [Notice(NO_CHECKSUM, what, storages=count)] if count else []

    def unused(self) -> list[str]:
        """Return a warning about records that are neither opened storages nor in `KNOWN`."""
        left = self.directory.entries.keys() - {self.folder + name for name in KNOWN}
        for folder, keys in self._keys:
            # `map` creates one name at a time, to save memory for hundreds of thousands of names.
            left.difference_update(map(folder.__add__, keys))
        left = {name for name in left if not name.endswith(("/", *REPLACED))}
        if not left:
            return []
        names = some(shown(name) for name in self.directory.entries if name in left)
        return [
            f"nothing refers to {len(left):,} of its records; ckptkit does not copy them: {names}"
        ]


# Writing


TOP = "archive"
_UNTYPED = storage_class(None)


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a file with the complete tree and its storages.

    Raises the errors of the pickle writer. Raises TensorError if torch could not load a storage.
    """
    numbering = Numbering()
    pickled = write_pickle(checkpoint.root, numbering, objects=options.objects)
    big_endian, storages = numbering.members()
    first = [
        ZipMember(f"{TOP}/data.pkl", pickled.data),
        ZipMember(f"{TOP}/byteorder", b"big" if big_endian else b"little"),
    ]
    last = [ZipMember(f"{TOP}/version", b"3\n")]
    if checkpoint.extras.keys() - {_FRAMEWORK}:
        last.append(ZipMember(f"{TOP}/{METADATA}", _metadata_record(checkpoint.extras)))
    segments = lay_out(chain(first, storages, last))
    return Plan(
        (OutputFile("", tuple(segments), keeps_sums=True),), pickled.notes, numbering.tensors
    )


class Numbering:
    """A numbering of storages, in the order in which the pickle refers to them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        # The dtype in the persistent ids of each storage, or None for an untyped storage.
        self.dtypes: list[DType | None] = []
        self.tensors = 0  # number of tensors in the pickle
        self._numbers: dict[Storage, int] = {}

    def __call__(self, typed: TypedStorage) -> tuple[Node, ...]:
        self.tensors += 1
        storage, dtype = typed.storage, typed.dtype
        made = storage_class(dtype)
        if made is _UNTYPED:
            dtype = None
        number = self._numbers.setdefault(storage, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
            self.dtypes.append(dtype)
        elif self.dtypes[number] is not dtype and storage.nbytes:
            if {self.dtypes[number], dtype} != {UINT8, None}:
                raise TensorError(
                    f"torch cannot read one storage as {self.dtypes[number]} and as {dtype}"
                )
            self.dtypes[number] = None
        numel, rest = divmod(storage.nbytes, 1 if dtype is None else dtype.itemsize)
        if rest:
            raise TensorError(
                f"a storage of {storage.nbytes:,} bytes is not a whole number of {dtype} elements"
            )
        if typed.stop is not None and (typed.start, typed.stop) != (0, numel):
            raise UnsupportedError(
                "cannot write a view of a storage: since torch 0.4, torch.save supports only "
                "complete storages"
            )
        return "storage", made, self.key(number), storage.device, numel

    def key(self, number: int) -> str:
        """Return the key of a storage: the name of its record in the folder ``data``."""
        return str(number)

    def members(self) -> tuple[bool, list[ZipMember]]:
        """Return whether the output is big-endian, and the records of the storages.

        If all storages are big-endian, the output is big-endian, and no bytes are swapped. Storages
        without a byte order (such as uint8) do not count.
        """
        # Number of bytes to swap as one unit, by storage. The number is 1 for elements without a
        # byte order, and 0 for an unknown element type.
        kinds = zip(self.storages, self.dtypes, strict=True)
        components = ((each.nbytes, dtype.component if dtype else 0) for each, dtype in kinds)
        units = [component if nbytes else 1 for nbytes, component in components]
        ordered = [*zip(self.storages, units, strict=True)]
        big_endian = {storage.big_endian for storage, unit in ordered if unit != 1} == {True}
        made = []
        for number, (storage, unit) in enumerate(ordered):
            extent = storage.record.locate()
            crc = storage.crc32 if isinstance(extent, Range) else None
            if storage.big_endian and not big_endian and unit != 1:
                if not unit:
                    raise UnsupportedError(
                        "a storage of unknown element type is big-endian, but other storages are "
                        "little-endian"
                    )
                extent, crc = Derived(Swap(unit), (extent,), storage.nbytes), None
            made.append(ZipMember(f"{TOP}/data/{self.key(number)}", extent, crc))
        return big_endian, made


# The record ckptkit.json


def _metadata_record(metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of ckptkit.json for `metadata`. `metadata` may be empty."""
    texts = {key: text for key, text in metadata.items() if key != _FRAMEWORK}
    return dump({"version": 1, "metadata": texts}).encode("utf-8", "replace")


def parse_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the bytes of ckptkit.json.

    Raises FormatError if ckptkit did not write the record.
    """
    parsed = strict_json.parse(data, METADATA)
    texts = (
        parsed.get("metadata") if isinstance(parsed, dict) and parsed.get("version") == 1 else None
    )
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise FormatError(f"record {METADATA} was not written by ckptkit")
    return texts


# Editing in place


# Reads three numbers at byte 28 of a directory entry: the lengths of name, extra fields and
# comment.
_LENGTHS = struct.Struct("<HHH").unpack_from
_NAME, _LOCAL_NAME = 46, 30  # offsets of the name in a directory entry and in a local header


def patch(before: Checkpoint, after: Checkpoint, options: Options) -> Patch | None:
    """Plan an in-place edit that turns the file of `before` into `after`.

    Return None if the bytes of a storage of `after` are not in the file. Raises the errors of the
    pickle writer.
    """
    if not isinstance(before.source, LocalFile):
        return None
    directory = read_directory(before.source)
    if not any(f"{directory.top}/{name}" in directory.entries for name in _VERSION_RECORDS):
        return None  # torch refuses a file without a version record
    numbering = _Keys(directory)
    try:
        pickled = write_pickle(after.root, numbering, objects=options.objects)
    except _ElsewhereError:
        return None
    new = {f"{directory.top}/data.pkl": pickled.data}
    if after.extras != before.extras:
        new[f"{directory.top}/{METADATA}"] = _metadata_record(after.extras)
    return _patched(before.source, directory, new, pickled.notes)


class _ElsewhereError(Exception):
    """Raised if the bytes of a storage are not a record of the archive."""


class _Keys(Numbering):
    """A Numbering that gives each storage the key of its record in the archive."""

    def __init__(self, directory: ZipDirectory) -> None:
        super().__init__()
        self._source = directory.source
        folder = f"{directory.top}/data/"
        self._keys = {
            entry.data: name.removeprefix(folder)
            for name, entry in directory.entries.items()
            if name.startswith(folder) and not entry.method
        }
        self._sizes = {entry.data: entry.length for entry in directory.entries.values()}

    def key(self, number: int) -> str:
        storage: Storage = self.storages[number]
        extent = storage.record.locate()
        if not isinstance(extent, Range) or extent.source is not self._source:
            raise _ElsewhereError
        if extent.offset not in self._keys or self._sizes[extent.offset] != extent.length:
            raise _ElsewhereError
        return self._keys[extent.offset]


def _patched(
    source: LocalFile, directory: ZipDirectory, new: dict[str, bytes], notes: tuple[str, ...]
) -> Patch | None:
    """Plan new records and a new directory. Return None if no name is free for an old record.

    The edit first overwrites the end record with zeros, and writes the signature of the new end
    record last. Therefore readers refuse the file until the edit is complete.
    """
    start, at = directory.start, 0
    data = source.read(start, source.size - start)
    entries: dict[str, bytes] = {}  # entries of the new directory, by name
    for name in directory.entries:
        end = at + _NAME + sum(_LENGTHS(data, at + 28))
        entries[name] = data[at:end]
        at = end
    _, rows = read_rows(data[:at], len(entries), start)
    headers = {name: row[0] for name, row in zip(entries, rows, strict=True)}
    breaks = Edit(start + at, bytes(source.size - start - at))
    # Overwrite the replaced records that are at the end of the file.
    by_offset = sorted(entries, key=headers.__getitem__)
    while len(by_offset) > 1 and by_offset[-1] in new:
        name = by_offset.pop()
        start = headers[name]
        del entries[name]
    # Rename all other replaced records to unused names of equal length, in the directory and in the
    # local headers.
    taken = {each.lower() for each in headers}
    renamed: list[Edit] = []
    for name in (*new, f"{directory.top}/.format_version"):
        if name not in entries:
            continue
        free = (each for each in map(name[:-4].__add__, REPLACED) if each.lower() not in taken)
        other = next(free, None)
        if other is None:
            return None
        raw, entry = other.encode(), entries[name]
        renamed.append(Edit(headers[name] + _LOCAL_NAME, raw))
        changed = entry[:_NAME] + raw + entry[_NAME + len(raw) :]
        # The entry keeps its position: torch takes the top folder from the first entry.
        entries = {
            (other if each == name else each): (changed if each == name else kept)
            for each, kept in entries.items()
        }
    tail = bytearray()
    for name, content in new.items():
        member, entries[name] = record(name, content, start + len(tail))
        tail += member
    listed = b"".join(entries.values())
    tail += listed + ends(start + len(tail), len(listed), len(entries))
    made, last = bytes(tail), len(tail) - END.size
    around = Edit(start, made[:last]), Edit(start + last + 4, made[last + 4 :])
    seal = Edit(start + last, made[last : last + 4])
    return Patch(source, breaks, (*sorted(renamed), *around), seal, start + len(made), notes)


# Unpacked archives


_DATA, _TOP = "data", "archive"
_PROGRAM = frozenset({"constants.pkl", "bytecode.pkl"})


def matches_unpacked(probe: Probe) -> bool:
    return _folder(probe) is not None


def _folder(probe: Probe) -> Folder | None:
    """Return the folder of an unpacked archive, or None if required records are missing."""
    folder = probe.folder if probe.is_folder else None
    if not probe.is_folder and basename(probe.name) == "data.pkl":
        place = probe.source.folder_and_name()
        folder = place[0] if place is not None else None
    if folder is None:
        return None
    names = frozenset(probe.names if probe.is_folder else folder.list())
    return folder if {"data.pkl", "version"} <= names and not names & _PROGRAM else None


def read_unpacked(probe: Probe) -> Checkpoint:
    """Read the tree of data.pkl, and the storages beside it. Raises the errors of `read`."""
    folder = _folder(probe)
    assert folder is not None
    inside = frozenset(folder.folders())
    files = {name: folder.open(name) for name in folder.list() if name not in inside}
    if _DATA in inside:
        data = folder.sub(_DATA)
        files |= {f"{_DATA}/{name}": data.open(name) for name in data.list()}
    # A CRC of 0 means that there is no checksum.
    entries = {
        f"{_TOP}/{name}": StoredMember(each, 0, each.size, 0) for name, each in files.items()
    }
    archive = Archive(ZipDirectory(files["data.pkl"], entries, 0, _TOP))
    tree = archive.unpickle(_DATA)
    warnings = (*tree.warnings, *archive.warnings, *archive.unused())
    return Checkpoint(tree.root, table.TORCH_UNPACKED.name, folder, {}, tree.globals, warnings)
