"""torch.save since 1.6: a zip archive of stored records under one top folder.

    <top>/data.pkl               pickle; persistent ids ('storage', class, key, location, numel)
    <top>/data/<key>             the bytes of one storage
    <top>/version                a number, 1 to 10 ("3\\n")
    <top>/byteorder              "little" or "big"; little where it is missing
    <top>/.format_version, .storage_alignment, .data/serialization_id        since about 2.7; not needed to read

    <top>/.data/ckptkit.json     ours: {"version": 1, "metadata": {text: text}}, what torch has no place for

<top> is what stands before the first slash of the first entry. (torch/serialization.py, `_load`; caffe2/serialize.)

Written as every torch since 1.6 reads it and 2.1 and later map it: <top> is ``archive``; data.pkl, byteorder, the
storages in the order in which the pickle meets them, version. No .format_version: with it torch computes where the
storages are instead of looking them up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptkit.bytesource import Derived, Memory, Range
from ckptkit.checkpoint import Checkpoint
from ckptkit.dtypes import UINT8, DType
from ckptkit.errors import AmbiguousError, CorruptError, FormatError, TensorError, UnsupportedError
from ckptkit.formats import strict_json
from ckptkit.formats.format import Format, Probe, WriteOptions
from ckptkit.formats.plain_json import dump
from ckptkit.formats.torch.pickle_writer import write_pickle
from ckptkit.formats.torch.storages import StorageTable, storage_class
from ckptkit.formats.torch.unpickle import Unpickled, unpickle
from ckptkit.formats.torch.zip_container import ZipDirectory
from ckptkit.formats.torch.zip_members import shown
from ckptkit.formats.torch.zip_writer import Member, lay_out
from ckptkit.plan import OutputFile, Plan
from ckptkit.tensor import Storage, TypedStorage
from ckptkit.tree import Global, Node

TOP = "archive"
VERSIONS = range(1, 11)
ALIGNMENTS = range(1, 1 << 16 | 1)
BESIDE = ".data/ckptkit.json"
BESIDE_VERSION = 1
_CONTROL_BYTES = 64  # what version and its like may have
_KNOWN = (
    "data.pkl", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment",
    ".data/serialization_id", BESIDE,
)  # fmt: skip


def matches(probe: Probe) -> bool:
    archive = probe.zip
    if archive is None:
        return False
    return {name for name in ("data", "constants", "bytecode") if f"{archive.top}/{name}.pkl" in archive} == {"data"}


def read(probe: Probe) -> Checkpoint:
    """The pickle and the places of the storages. Raises CorruptError, AmbiguousError, FormatError, UnsupportedError,
    LimitError, and what the pickle machine raises."""
    archive = probe.zip
    assert archive is not None
    return _Archive(archive).read()


class _Archive:
    """One archive being read."""

    def __init__(self, directory: ZipDirectory) -> None:
        self.directory = directory
        self.folder = directory.top + "/"
        self.storages = self.folder + "data/"
        self.big_endian = False
        self.unverified = 0  # storages without a checksum
        self.used = {self.folder + name for name in _KNOWN}

    def read(self) -> Checkpoint:
        warnings = self._check_records()
        tree = self._unpickle()
        return Checkpoint(
            tree.root, FORMAT.name, self.directory.source, self._metadata(), tree.globals, origin=self.directory,
            warnings=(*tree.warnings, *warnings, *self._noticed()),
        )  # fmt: skip

    def _metadata(self) -> dict[str, str]:
        """What another format kept beside the tree, and ckptkit in a record of its own; nothing if that is not ours."""
        name = self.folder + BESIDE
        if name not in self.directory:
            return {}
        said = strict_json.parse(self.directory.read(name), BESIDE)
        texts = said.get("metadata") if isinstance(said, dict) and said.get("version") == BESIDE_VERSION else None
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise FormatError(f"record {BESIDE} is not one that ckptkit wrote")
        return texts

    def _check_records(self) -> list[str]:
        """Everything but the pickle and the storages; what is worth a warning."""
        for name in self.directory.entries:
            if not name.startswith(self.folder):
                raise AmbiguousError(f"record {shown(name)} is outside the folder {shown(self.folder)}")
        self._number(".format_version")
        alignment = self._number(".storage_alignment")
        if alignment is not None and alignment not in ALIGNMENTS:
            raise FormatError(f"storages are aligned to {alignment:,} bytes, not 1 to {ALIGNMENTS[-1]:,}")
        order = self._control("byteorder")
        if order not in (None, b"little", b"big"):
            raise FormatError(f"byteorder is {order!r}, neither little nor big")
        self.big_endian = order == b"big"
        return self._check_version()

    def _check_version(self) -> list[str]:
        versions = {self._number("version"), self._number(".data/version")} - {None}
        if not versions:
            return ["it has no version record: torch refuses it; a copy written by ckptkit has one"]
        if len(versions) > 1:
            raise AmbiguousError("the records version and .data/version contradict each other")
        if not versions <= set(VERSIONS):
            raise UnsupportedError(f"archive version {versions.pop()}, not {VERSIONS[0]} to {VERSIONS[-1]}")
        return []

    def _control(self, name: str) -> bytes | None:
        """The whole of a small record, None if there is none."""
        entry = self.directory.entries.get(self.folder + name)
        if entry is None:
            return None
        if entry.size > _CONTROL_BYTES:
            raise FormatError(f"record {name} has {entry.size:,} bytes, it should hold a word or a number")
        return self.directory.read(self.folder + name)

    def _number(self, name: str) -> int | None:
        text = self._control(name)
        if text is not None and not re.fullmatch(rb"[0-9]{1,9}\n?", text):
            raise FormatError(f"record {name} is {text!r}, not a number")
        return None if text is None else int(text)

    def _unpickle(self) -> Unpickled:
        name = self.folder + "data.pkl"
        place = self.directory.locate(name)
        if isinstance(place, Range):
            self.directory.verify(name)
        else:
            data = self.directory.read(name)
            place = Range(Memory(data, self.directory.source.name), 0, len(data))
        stop = place.offset + place.length
        tree = unpickle(place.source, place.offset, stop, persistent_load=StorageTable(self._open).load)
        if tree.stop != stop:
            raise AmbiguousError(f"data.pkl goes on for {stop - tree.stop:,} bytes after its pickle has ended")
        return tree

    def _open(self, key: str, nbytes: int, location: str) -> Storage:
        name = self.storages + key
        entry = self.directory.entries.get(name)
        if entry is None:
            raise CorruptError(f"storage {shown(key)} has no record {shown(name)}")
        if entry.size != nbytes:
            raise CorruptError(f"record {shown(name)} has {entry.size:,} bytes, its tensors expect {nbytes:,}")
        self.used.add(name)
        crc = self.directory.crc(name)
        self.unverified += crc is None
        return Storage(self.directory.record(name), location, crc, self.big_endian)

    def _noticed(self) -> list[str]:
        said = []
        if self.unverified:
            said.append(f"{self.unverified:,} of its storages have no checksum: damage to them cannot be seen")
        unused = [name for name in self.directory.entries if name not in self.used and not name.endswith("/")]
        if unused:
            some = ", ".join(map(shown, unused[:4])) + (", ..." if len(unused) > 4 else "")
            said.append(f"nothing refers to {len(unused):,} of its records, which are not carried over: {some}")
        return said


# Writing


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """One file with the whole tree and the storages that it refers to. Raises what the pickle writer raises, and
    TensorError for a storage that torch could not read back."""
    numbering = _Numbering()
    pickled = write_pickle(checkpoint.root, numbering, objects=options.objects)
    big_endian = numbering.all_big_endian()
    members = [
        Member(f"{TOP}/data.pkl", pickled.data),
        Member(f"{TOP}/byteorder", b"big" if big_endian else b"little"),
        *numbering.members(big_endian),
        Member(f"{TOP}/version", b"3\n"),
        *_beside(checkpoint.metadata),
    ]
    return Plan((OutputFile("", tuple(lay_out(members))),), pickled.notes)


def _beside(metadata: Mapping[str, str]) -> Iterator[Member]:
    texts = {key: text for key, text in metadata.items() if key != "format"}  # the hub's word for "of torch"
    if texts:
        said = dump({"version": BESIDE_VERSION, "metadata": texts})
        yield Member(f"{TOP}/{BESIDE}", said.encode("utf-8", "surrogatepass"))


class _Numbering:
    """Gives storages their keys, in the order in which the pickle meets them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.dtypes: list[DType | None] = []  # of each storage, as its persistent ids say; None: untyped
        self._numbers: dict[int, int] = {}  # by id of the storage
        self._pids: dict[tuple[int, str], tuple[Node, ...]] = {}

    def __call__(self, typed: TypedStorage) -> tuple[Node, ...]:
        made = storage_class(typed.dtype)
        pid = self._pids.get((id(typed.storage), made.name))
        if pid is None or typed.stop is not None:
            pid = self._pids[id(typed.storage), made.name] = self._new(typed, made)
        return pid

    def _new(self, typed: TypedStorage, made: Global) -> tuple[Node, ...]:
        storage = typed.storage
        dtype = None if made is storage_class(None) else typed.dtype
        number = self._number(storage, dtype)
        numel, rest = divmod(storage.nbytes, 1 if dtype is None else dtype.itemsize)
        if rest:
            raise TensorError(f"a storage of {storage.nbytes:,} bytes is no whole number of {dtype} elements")
        if typed.stop is not None and (typed.start, typed.stop) != (0, numel):
            raise UnsupportedError("a part of a storage is a value of its own, which torch cannot save since 0.4")
        return "storage", made, str(number), storage.device, numel

    def _number(self, storage: Storage, dtype: DType | None) -> int:
        number = self._numbers.setdefault(id(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
            self.dtypes.append(dtype)
        elif self.dtypes[number] is not dtype:
            if {self.dtypes[number], dtype} != {UINT8, None}:
                raise TensorError(f"torch cannot read one storage as {self.dtypes[number]} and as {dtype}")
            self.dtypes[number] = None
        return number

    def _units(self) -> Iterator[tuple[Storage, int]]:
        """Each storage with the bytes of the unit that byte order applies to: 1 for none, 0 for unknown."""
        for storage, dtype in zip(self.storages, self.dtypes, strict=True):
            yield storage, 1 if not storage.nbytes else 0 if dtype is None else dtype.component

    def all_big_endian(self) -> bool:
        """Whether all storages whose bytes have an order are big-endian: then they stay so."""
        return {storage.big_endian for storage, unit in self._units() if unit != 1} == {True}

    def members(self, big_endian: bool) -> Iterator[Member]:
        for number, (storage, unit) in enumerate(self._units()):
            extent = storage.record.locate()
            crc = storage.crc32 if isinstance(extent, Range) else None
            if storage.big_endian and not big_endian and unit != 1:
                if not unit:
                    raise UnsupportedError("big-endian bytes of an unknown element type, among little-endian ones")
                extent, crc = Derived("byteswap", (extent,), (unit,), storage.nbytes), None
            yield Member(f"{TOP}/data/{number}", extent, crc)


FORMAT = Format(
    name="torch-zip",
    title="torch.save since 1.6: a zip archive",
    matches=matches,
    read=read,
    suffixes=(".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"),
    layout=layout,
)
