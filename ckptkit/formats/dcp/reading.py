"""Read a torch.distributed.checkpoint folder as the nested state_dict, tensors on demand."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, within
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Global, Node
from ckptkit.formats.dcp import hub
from ckptkit.formats.dcp.items import Files, assembled, memory_order
from ckptkit.formats.dcp.metadata import (
    NAME,
    DcpIndex,
    Place,
    Whole,
    covered,
    merged,
    read_metadata,
)
from ckptkit.formats.dcp.nesting import Nest
from ckptkit.formats.format import Probe
from ckptkit.formats.table import DCP, TORCH_LEGACY, TORCH_ZIP

EXTRA = "meta.pt"
_OF_RANK = re.compile(r"__([0-9]{1,9})\.metadata")


def read(probe: Probe) -> Checkpoint:
    """Read a DCP folder: open every file and read all values; of the tensors, the metadata alone.

    The header of a chunk is compared with the metadata when its bytes are located.
    """
    folder = folder_of(probe)
    names = frozenset(folder.list())
    tree = _Tree(folder)
    found = covered(described(tree.files, names))
    tree.build(found)
    if EXTRA in names:
        tree.add(_read_extra(folder))
    warnings = (*found.warnings, *tree.warnings, *_noticed(found, names))
    return Checkpoint(
        tree.nest.finished(), DCP.name, folder, globals=tuple(tree.globals), warnings=warnings
    )


def folder_of(probe: Probe) -> Folder:
    """Return the folder, or the folder of the `.metadata` that was named."""
    if probe.is_folder:
        return probe.folder
    place = probe.source.folder_and_name()
    assert place is not None
    return place[0]


def described(files: Files, names: frozenset[str]) -> DcpIndex:
    """Return the index: from the one `.metadata`, those of all ranks, or safetensors headers."""
    ranks = sorted((int(found[1]), name) for name in names if (found := _OF_RANK.fullmatch(name)))
    if NAME in names and ranks:
        raise AmbiguousError(f"has a {NAME} and a {ranks[0][1]}: two saves in one folder")
    if NAME in names or ranks:
        sources = [NAME] if NAME in names else [name for _, name in ranks]
        return merged([_read_one(files.folder, name) for name in sources])
    if shards := sorted(filter(hub.SHARD.fullmatch, names)):
        return hub.describe(files, shards)
    raise FormatError(
        f"has no {NAME}: the save did not finish, or the file was not copied",
        hint="copy it if it exists: names that begin with a dot are easily missed",
    )


def _read_one(folder: Folder, name: str) -> DcpIndex:
    source = folder.open(name)
    try:
        return read_metadata(source)
    except CkptkitError as error:
        raise error.at(source.name) from error.__cause__


class _Tree:
    """The tree under construction, with the warnings found on the way."""

    def __init__(self, folder: Folder) -> None:
        self.files = Files(folder)
        self.nest = Nest()
        self.globals: dict[Global, None] = {}
        self.warnings: list[str] = []
        self._storages: dict[Whole, Storage] = {}

    def build(self, described: DcpIndex) -> None:
        """Put every entry in its place.

        Two tensors that are the same bytes of the files share a storage.
        """
        self.files.check(places(described))
        for name, entry in described.entries.items():
            node = (
                self._tensor(name, entry) if isinstance(entry, Whole) else self._value(name, entry)
            )
            self.nest.put(described.paths.get(name, (name,)), node)

    def _tensor(self, name: str, entry: Whole) -> Tensor:
        if entry.odd:
            return Tensor(None, entry.dtype, entry.shape, (), layout=entry.odd)
        order, stride = memory_order(entry.shape, entry.stride)
        storage = Storage(
            assembled(self.files, name, entry.dtype, entry.shape, entry.chunks, order)
        )
        known = self._storages.setdefault(entry, storage)
        if (
            known is not storage
            and entry.chunks
            and all(self.files.is_archive(chunk.place) for chunk in entry.chunks)
        ):
            storage = known
        return Tensor(storage, entry.dtype, entry.shape, stride)

    def _value(self, name: str, place: Place) -> Node:
        with self.files.reading(name, place):
            return self._root(name, self.files.value(place))

    def _root(self, name: str, item: Checkpoint) -> Node:
        """Return the root of a file in the folder; keep its globals and warnings."""
        self.globals |= dict.fromkeys(item.globals)
        self.warnings += [within(name, warning) for warning in item.warnings]
        return item.root

    def add(self, extra: Checkpoint) -> None:
        """Add the entries of Lightning's own file at the top level, as Lightning does."""
        root = self._root(EXTRA, extra)
        if not isinstance(root, dict):
            raise FormatError("does not hold a dict", where=extra.name)
        for key, node in root.items():
            if key in self.nest.root:
                raise AmbiguousError(f"the entry {key!r} is in two files, {NAME} and {EXTRA}")
            self.nest.root[key] = node


def _read_extra(folder: Folder) -> Checkpoint:
    probe = Probe(folder.open(EXTRA))
    try:
        for each in (TORCH_ZIP, TORCH_LEGACY):
            if each.matches(probe):
                return each.read(probe)
        raise FormatError("is not a file of torch.save")
    except CkptkitError as error:
        raise error.at(probe.name) from error.__cause__


def places(described: DcpIndex) -> Iterator[Place]:
    """Yield the places of all items that the metadata describe."""
    for entry in described.entries.values():
        if isinstance(entry, Place):
            yield entry
        else:
            yield from (chunk.place for chunk in entry.chunks)


def _noticed(described: DcpIndex, names: frozenset[str]) -> Iterator[str]:
    used = {place.file for place in places(described)}
    unused = sorted(name for name in names if name.endswith(".distcp") and name not in used)
    if unused:
        some = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        yield (
            f"nothing refers to {len(unused):,} of its data files, of other saves or empty: {some}"
        )
    if any(name.endswith(".metadata.tmp") for name in names):
        yield "a later save was interrupted, and may have replaced some of the data"
