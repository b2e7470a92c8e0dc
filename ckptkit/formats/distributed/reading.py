"""Read the files of ranks: their fields, flat tensors, and names that group them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, FormatError, within
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Storage, Tensor
from ckptkit.core.text import some
from ckptkit.core.tree import Global, Node, Object
from ckptkit.core.weights import as_tensor
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_LEGACY, TORCH_ZIP

# Read the torch files of many processes, and the values that say how they belong together.


FORMATS = (TORCH_ZIP, TORCH_LEGACY)
_SIZE = Global("torch", "Size")


def reader_of(probe: Probe) -> Reader:
    """Return the reader of the folder, always the same one: what identification read is not read
    again.
    """
    found = probe.kept.setdefault(Reader, Reader(probe.folder, keep=True))
    assert isinstance(found, Reader)
    return found


class Reader:
    """Reads the files of a folder, and keeps what they warn of and which globals they name; with
    `keep` the files too, which may be thousands."""

    def __init__(self, folder: Folder, *, keep: bool = False) -> None:
        self.folder = folder
        self.keep = keep
        self.globals: dict[Global, None] = {}
        self._warnings: dict[str, list[str]] = {}  # names of files by what is said of them
        self._read: dict[tuple[str, str], Checkpoint] = {}

    def read(self, name: str, folder: Folder | None = None) -> Checkpoint:
        """Read one file. Every error names it."""
        key = (folder or self.folder).name, name
        found = self._read.get(key)
        if found is None:
            found = self._opened(name, folder)
        if self.keep:
            self._read[key] = found
        return found

    def _opened(self, name: str, folder: Folder | None) -> Checkpoint:
        probe = Probe((folder or self.folder).open(name))
        try:
            checkpoint = next((each for each in FORMATS if each.matches(probe)), None)
            if checkpoint is None:
                raise FormatError("is not a file of torch.save")
            found = checkpoint.read(probe)
        except CkptkitError as error:
            error.at(probe.name)
            raise
        self.globals.update(dict.fromkeys(found.globals))
        for warning in found.warnings:
            self._warnings.setdefault(warning, []).append(name)
        return found

    def fields(self, name: str) -> Fields:
        """Return the values of one file."""
        return Fields(self.read(name).root, name)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the files, each once."""
        return [within(some(names, 1), text) for text, names in self._warnings.items()]


class Fields:
    """A dict in a file with typed look-ups; a wrong type is a FormatError that says where."""

    def __init__(self, node: Node, place: str) -> None:
        if not isinstance(node, dict):
            raise FormatError(f"{place} is not a dict")
        self.node: dict[Node, Node] = node
        self.place = place

    def __contains__(self, key: str) -> bool:
        """Return whether there is such an entry that is not None."""
        return self.node.get(key) is not None

    def get(self, key: str) -> Node:
        """Return an entry. Raises FormatError if it is missing."""
        if key not in self.node:
            raise FormatError(f"{self.place} has no {key}")
        return self.node[key]

    def fields(self, key: str) -> Fields:
        """Return an entry that is a dict."""
        return Fields(self.get(key), f"{self.place}: {key}")

    def items(self, key: str) -> list[Node]:
        """Return an entry that is a list."""
        node = self.get(key)
        if not isinstance(node, (list, tuple)):
            raise FormatError(f"{self.place}: {key} is not a list")
        return list(node)

    def names(self, key: str) -> dict[str, Node]:
        """Return an entry that is a dict from names; empty if it is None or missing."""
        if key not in self:
            return {}
        node = self.fields(key).node
        if not all(isinstance(name, str) for name in node):
            raise FormatError(f"{self.place}: a key of {key} is not a name")
        return node

    def shapes(self, key: str) -> dict[str, Shape]:
        """Return an entry that is a dict of shapes; empty if it is None or missing."""
        return {name: self.shape(name, node) for name, node in self.names(key).items()}

    def shape(self, name: str, node: Node) -> Shape:
        """Return a torch.Size, or a list or tuple of integers, as a shape."""
        if (
            isinstance(node, Object)
            and node.global_ == _SIZE
            and isinstance(node.args, tuple)
            and len(node.args) == 1
        ):
            node = node.args[0]
        if not isinstance(node, (tuple, list)) or not all(
            type(n) is int and 0 <= n < 1 << 63 for n in node
        ):
            raise FormatError(f"{self.place}: the shape of {name[:80]!r} is not a list of sizes")
        check("rank", len(node), f"dimensions of {name[:80]!r}")
        return tuple(node)

    def tensors(self, key: str) -> list[Tensor]:
        """Return an entry that is a list of contiguous one-dimensional tensors."""
        return [self._flat(key, node) for node in self.items(key)]

    def _flat(self, key: str, node: Node) -> Tensor:
        tensor = as_tensor(node)
        if tensor is None or not is_flat(tensor):
            raise FormatError(f"{self.place}: {key} holds something other than flat tensors")
        return tensor

    def integers(self, key: str) -> list[int]:
        """Return an entry that is a list of counts, or one count."""
        node = self.get(key)
        return [
            self._count(key, each)
            for each in (node if isinstance(node, (list, tuple)) else (node,))
        ]

    def _count(self, key: str, node: Node) -> int:
        if (
            isinstance(node, Object) and isinstance(node.args, tuple) and len(node.args) == 1
        ):  # an enum, ZeroStageEnum
            node = node.args[0]
        if type(node) is not int or not 0 <= node < 1 << 63:
            raise FormatError(f"{self.place}: {key} holds something other than counts")
        return node


def is_flat(tensor: Tensor) -> bool:
    """Return whether a tensor is one-dimensional and contiguous."""
    plain = tensor.layout == "strided" and tensor.storage is not None and tensor.dtype.bits % 8 == 0
    return (
        plain
        and len(tensor.shape) == 1
        and tensor.is_contiguous
        and not (tensor.conj or tensor.neg)
    )


def own(tensor: Tensor) -> Tensor:
    """Return the same tensor on a storage of its own: parameters do not share their step."""
    storage = tensor.storage
    if storage is None:
        return tensor
    copy = Storage(storage.record, storage.device, storage.crc32, storage.big_endian)
    return Tensor(copy, tensor.dtype, tensor.shape, tensor.stride, tensor.offset)


# The files of a folder that differ in the number of a rank alone.


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th")
_RANK = re.compile(r"rank[_-]?([0-9]{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORLD = re.compile(r"world_size_([0-9]{1,9})")
_SHARD = re.compile(r".*-[0-9]{1,9}-of-[0-9]{1,9}\..*", re.DOTALL)
_HOLE = "\0"


class RankGroup(NamedTuple):
    """Files whose names differ in one number: the name with a hole, and the names by number, in
    order.

    ``certain``: the name calls the number a rank. ``world`` is the number of ranks that the name
    promises.
    """

    pattern: str
    files: Mapping[int, str]
    certain: bool
    world: int | None

    @property
    def first(self) -> str:
        return next(iter(self.files.values()))

    def name(self, number: int) -> str:
        """Return the name of the file with another number, spelled like the others."""
        width = min(len(self.spelled(name)) for name in self.files.values())
        digits = str(number)
        return self.pattern.replace(_HOLE, digits.zfill(width) if width > 1 else digits)

    def spelled(self, name: str) -> str:
        """The number in a name, as it is spelled."""
        head, _, tail = self.pattern.partition(_HOLE)
        return name[len(head) : len(name) - len(tail)]


def groups(names: Iterable[str]) -> list[RankGroup]:
    """The groups of a folder, each name in one at most; those whose names speak of ranks first."""
    found: dict[str, dict[int, str]] = {}
    plain = []
    for name in sorted(names):
        if not name.endswith(SUFFIXES) or _SHARD.fullmatch(name):
            continue
        ranks = list(_RANK.finditer(name))
        if ranks:
            _put(found, name, *ranks[-1].span(1))
        else:
            plain.append(name)
    made = [_group(pattern, files, certain=True) for pattern, files in found.items()]
    return made + _unnamed(plain)


def _unnamed(names: list[str]) -> list[RankGroup]:
    """Groups of names that do not say which of their numbers counts ranks: the number that varies
    most."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            _put(found, name, *number.span())
    taken: set[str] = set()
    made = []
    for pattern in sorted(found, key=lambda pattern: -len(found[pattern])):
        files = found[pattern]
        if len(files) > 1 and taken.isdisjoint(files.values()):
            taken.update(files.values())
            made.append(_group(pattern, files, certain=False))
    return made


def _put(found: dict[str, dict[int, str]], name: str, start: int, stop: int) -> None:
    found.setdefault(name[:start] + _HOLE + name[stop:], {})[int(name[start:stop])] = name


def _group(pattern: str, files: dict[int, str], *, certain: bool) -> RankGroup:
    world = _WORLD.search(pattern)
    return RankGroup(
        pattern, dict(sorted(files.items())), certain, int(world[1]) if world else None
    )


def rank_in(path: str) -> tuple[int, int | None] | None:
    """The rank that a file's name speaks of, and the number of ranks if it does; None if it speaks
    of none."""
    name = os.path.basename(path)
    ranks = list(_RANK.finditer(name))
    if not ranks:
        return None
    world = _WORLD.search(name)
    return int(ranks[-1][1]), int(world[1]) if world else None
