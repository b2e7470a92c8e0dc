"""torch.save before 1.6 (and `_use_new_zipfile_serialization=False` since): one flat stream.

    pickle: 0x1950A86A20F9469CFC6C         the magic number, a literal
    pickle: 1001                           the protocol version
    pickle: {'protocol_version', 'little_endian', 'type_sizes'}
    pickle: the object; persistent ids ('storage', ...) and ('module', class, source file, source text)
    pickle: [storage key, ...]
    per key, in that order: int64 numel, numel * itemsize bytes

Nothing is aligned, nothing has a checksum, integers and payloads are little-endian on every host. Where the storages
are is known only at the end, so they are bound late. (torch/serialization.py, `_legacy_load`.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import unpack

from ckptkit.bridge import stream
from ckptkit.bytesource import ByteSource, Range
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import AmbiguousError, CorruptError, FormatError, TruncatedError, UnsupportedError
from ckptkit.formats.format import Format, Probe
from ckptkit.formats.torch.storages import StorageTable
from ckptkit.formats.torch.unpickle import Unpickled, unpickle
from ckptkit.limits import check
from ckptkit.tensor import Storage
from ckptkit.tree import Blob, ByteString, Global, Node

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

# The magic number as protocols 0 to 5 spell it: LONG1, or the decimal LONG of protocols 0 and 1; perhaps framed.
_BINARY = MAGIC_NUMBER.to_bytes(10, "little")
_DECIMAL = str(MAGIC_NUMBER).encode()
_MAGIC = (
    rb"(?s)(\x80[\x02-\x05])?(\x95.{8})?(\x8a\x0a" + re.escape(_BINARY) + rb"|L" + _DECIMAL + rb"L?\n)\."
)  # fmt: skip


def matches(probe: Probe) -> bool:
    head = probe.head[:64]
    return (_BINARY in head or _DECIMAL in head) and re.match(_MAGIC, head) is not None


def read(probe: Probe) -> Checkpoint:
    """Five pickles, then the storages."""
    source = probe.source
    magic = unpickle(source)
    version = unpickle(source, magic.stop)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        raise UnsupportedError(f"legacy stream of a protocol version other than {PROTOCOL_VERSION}")
    system = unpickle(source, version.stop)
    if not isinstance(system.root, dict):
        raise FormatError("the third pickle of a legacy stream does not describe a system")
    stream = _Stream(source)
    table = StorageTable(stream.open)
    modules: dict[str, str] = {}

    def persistent_load(pid: Node) -> Node:
        if pid.__class__ is tuple and len(pid) == 4 and pid[0] == "module":
            return _module(pid, modules)
        return table.load(pid)

    tree = unpickle(source, system.stop, persistent_load=persistent_load)
    keys = unpickle(source, tree.stop)
    end = stream.bind(keys, table.itemsizes())
    return Checkpoint(
        tree.root, FORMAT.name, source, {f"module_source:{name}": text for name, text in modules.items()},
        globals=(*system.globals, *tree.globals, *keys.globals),
        warnings=(*tree.warnings, *_warnings(source, system.root, modules, end)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LegacyRecord:
    """The bytes of a storage, whose place is known once the whole stream has been read."""

    places: dict[str, Range]
    key: str
    length: int

    def locate(self) -> Range:
        return self.places[self.key]


class _Stream:
    """The storages behind the pickles."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.places: dict[str, Range] = {}
        self.lengths: dict[str, int] = {}

    def open(self, key: str, nbytes: int, location: str) -> Storage:
        if nbytes > self.source.size:
            raise TruncatedError(
                f"storage {key!r} has {nbytes:,} bytes, the whole file {self.source.size:,}",
                hint="the file is cut: download or copy it again",
            )
        self.lengths[key] = nbytes
        return Storage(_LegacyRecord(self.places, key, nbytes), location)

    def bind(self, keys: Unpickled, itemsizes: dict[str, int]) -> int:
        """Find every storage; the offset of the end."""
        if not isinstance(keys.root, list) or not all(type(key) is str for key in keys.root):
            raise FormatError("the list of storage keys is no list of strings")
        if len(set(keys.root)) != len(keys.root):
            raise AmbiguousError("a storage is listed twice")
        if set(keys.root) != set(self.lengths):
            odd = min(set(keys.root) ^ set(self.lengths))
            raise CorruptError(f"storage {odd!r} is {'not ' if odd in self.lengths else ''}among the storages listed")
        at = keys.stop
        for key in keys.root:
            at = self._place(key, at, itemsizes[key])
        return at

    def _place(self, key: str, at: int, itemsize: int) -> int:
        length = self.lengths[key]
        if at + 8 + length > self.source.size:
            raise TruncatedError(
                f"ends inside storage {key!r}: {at + 8 + length - self.source.size:,} bytes are missing",
                hint="the file is cut: download or copy it again",
            )
        (numel,) = unpack("<q", self.source.read(at, 8))
        if numel * itemsize != length:
            raise CorruptError(f"storage {key!r} has {numel} elements, its tensors expect {length // itemsize}")
        self.places[key] = Range(self.source, at + 8, length)
        return at + 8 + length


def _module(pid: tuple[Node, ...], modules: dict[str, str]) -> Node:
    """('module', class, source file, source text): the class; its source is kept aside, to be shown."""
    _, made, _, text = pid
    if not isinstance(made, Global):
        raise FormatError("a module's source is recorded for something that is not a class")
    if isinstance(text, Blob):  # a str of Python 2
        text = ByteString(b"".join(stream(text.extent)))
    if not isinstance(text, (str, ByteString, type(None))):
        raise FormatError(f"the source of {made} is no text")
    modules[str(made)] = "" if text is None else str(text)
    check("memo_sparse", len(modules), "classes with their source")
    return made


def _warnings(source: ByteSource, system: Node, modules: dict[str, str], end: int) -> list[str]:
    said = []
    if isinstance(system, dict) and system.get("little_endian") is False:
        said.append("written on a big-endian machine; its data is read as little-endian, as torch does")
    if modules:
        said.append(f"the source code of {len(modules)} classes is in the file; it is kept as metadata")
    if end < source.size:
        said.append(f"{source.size - end:,} bytes after the last storage belong to nothing")
    return said


FORMAT = Format(
    name="torch-legacy",
    title="torch.save before 1.6: a stream of pickles and storages",
    matches=matches,
    read=read,
    rewrite_as="torch-zip",
)
