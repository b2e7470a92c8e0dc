"""Read rank files: access to dict entries, flat tensors, and groups of file names."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import concat, part
from ckptkit.core.bytesource import Extent, Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError, within
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import some
from ckptkit.core.tree import Global, Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.meshes import argument
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_LEGACY, TORCH_ZIP

FORMATS = (TORCH_ZIP, TORCH_LEGACY)


def reader_of(probe: Probe) -> RankReader:
    """Return the cached reader of a folder. `matches` and `read` of a layout share the reader."""
    found = probe.kept.setdefault(RankReader, RankReader(probe.folder))
    assert isinstance(found, RankReader)
    return found


class RankReader:
    """Reads each file of a folder once. Collects the warnings and globals of all files."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.globals: dict[Global, None] = {}
        # Maps each warning to the names of the files that caused it.
        self._warnings: dict[str, list[str]] = {}
        self._read: dict[tuple[str, str], Checkpoint] = {}

    def read(self, name: str, folder: Folder | None = None) -> Checkpoint:
        """Read one file. If reading fails, the error contains the name of the file."""
        place = folder or self.folder
        if (place.name, name) in self._read:
            return self._read[place.name, name]
        probe = Probe(place.open(name))
        try:
            format = next((each for each in FORMATS if each.matches(probe)), None)
            if format is None:
                raise FormatError("is not a torch.save file")
            found = format.read(probe)
        except CkptkitError as error:
            error.at(probe.name)
            raise
        self.globals.update(dict.fromkeys(found.globals))
        for warning in found.warnings:
            self._warnings.setdefault(warning, []).append(name)
        self._read[place.name, name] = found
        return found

    def fields(self, name: str) -> Fields:
        """Return the root dict of a file."""
        return Fields(self.read(name).root, name)

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of all files, without duplicates."""
        return [within(some(names, 1), text) for text, names in self._warnings.items()]


class Fields:
    """A dict in a file, with methods that check the types of entries.

    If an entry has a wrong type, the method raises a FormatError with the name of the entry.
    """

    def __init__(self, node: Node, place: str) -> None:
        if not isinstance(node, dict):
            raise FormatError(f"{place} is not a dict")
        self.node: dict[Node, Node] = node
        self.place = place

    def __contains__(self, key: str) -> bool:
        """Return whether the dict has an entry `key` that is not None."""
        return self.node.get(key) is not None

    def get(self, key: str) -> Node:
        """Return an entry. Raises FormatError if the entry is missing."""
        if key not in self.node:
            raise FormatError(f"{self.place} has no {key}")
        return self.node[key]

    def fields(self, key: str) -> Fields:
        """Return an entry. The entry must be a dict."""
        return Fields(self.get(key), f"{self.place}: {key}")

    def items(self, key: str) -> list[Node]:
        """Return an entry. The entry must be a list or tuple."""
        node = self.get(key)
        if not isinstance(node, (list, tuple)):
            raise FormatError(f"{self.place}: {key} is not a list")
        return list(node)

    def listed(self, key: str) -> list[Node]:
        """Return an entry like :meth:`items`. If the entry is None or missing, return no items."""
        return self.items(key) if key in self else []

    def names(self, key: str) -> dict[str, Node]:
        """Return an entry. The entry must be a dict with string keys.

        If the entry is None or missing, return an empty dict.
        """
        node = self.fields(key).node if key in self else {}
        if not all(isinstance(name, str) for name in node):
            raise FormatError(f"{self.place}: a key of {key} is not a string")
        return node

    def shapes(self, key: str) -> dict[str, Shape]:
        """Return an entry. The entry must be a dict of shapes.

        If the entry is None or missing, return an empty dict.
        """
        return {name: self.shape(name, node) for name, node in self.names(key).items()}

    def shape(self, name: str, node: Node) -> Shape:
        """Convert a torch.Size, or a list or tuple of integers, to a tuple."""
        node = argument(node)
        if not isinstance(node, (tuple, list)) or not all(map(_is_count, node)):
            raise FormatError(f"{self.place}: the shape of {name[:80]!r} is not a list of sizes")
        check("rank", len(node), f"dimensions of {name[:80]!r}")
        return tuple(node)

    def tensors(self, key: str) -> list[Tensor]:
        """Return an entry. The entry must be a list of contiguous 1-D tensors."""
        found = []
        for node in self.items(key):
            tensor = as_tensor(node)
            if tensor is None or not is_flat(tensor):
                raise FormatError(f"{self.place}: {key} contains values that are not flat tensors")
            found.append(tensor)
        return found

    def integers(self, key: str) -> list[int]:
        """Return an entry as a list of integers.

        The entry must be a non-negative integer, or a list of non-negative integers.
        """
        node = self.get(key)
        nodes = node if isinstance(node, (list, tuple)) else (node,)
        found = [argument(each) for each in nodes]  # enums (ZeroStageEnum) are pickled as calls
        if not all(map(_is_count, found)):
            raise FormatError(f"{self.place}: {key} contains values that are not counts")
        return found


def _is_count(node: Node) -> bool:
    return type(node) is int and 0 <= node < 1 << 63


def is_flat(tensor: Tensor) -> bool:
    """Return whether a tensor is one-dimensional and contiguous."""
    plain = tensor.layout == "strided" and tensor.storage is not None and tensor.dtype.bits % 8 == 0
    row = len(tensor.shape) == 1 and tensor.is_contiguous
    return plain and row and not (tensor.conj or tensor.neg)


def own(tensor: Tensor) -> Tensor:
    """Return the tensor with a separate storage, so that parameters do not share their `step`."""
    if tensor.storage is None:
        return tensor
    return replace(tensor, storage=replace(tensor.storage), requires_grad=False, kind="tensor")


# Parameters assembled from the ranks' flat tensors


class FlatRow:
    """A sequence of flat tensors of one dtype, read as if concatenated."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype.name for tensor in tensors}
        if len(dtypes) != 1:
            raise CorruptError(
                f"the shards of a flat tensor have different dtypes: {', '.join(sorted(dtypes))}"
            )
        held = [tensor for tensor in tensors if tensor.numel]
        self.dtype = tensors[0].dtype
        self.numel = sum(tensor.numel for tensor in held)
        self.records = [contiguous(tensor) for tensor in held]
        self.starts = list(accumulate((tensor.numel for tensor in held), initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class Shares:
    """The bytes of a parameter that is split over the ranks' flat tensors.

    In each FlatRow, elements `start` to `start + share` belong to the parameter. The parameter is
    the concatenation of these elements, without padding after the first `numel` elements. The byte
    ranges are computed only when :meth:`locate` is called, because there may be thousands of ranks.
    """

    rows: tuple[FlatRow, ...]
    start: int
    share: int
    numel: int

    @property
    def length(self) -> int:
        return self.rows[0].dtype.nbytes(self.numel)

    def locate(self) -> Extent:
        pieces: list[Extent] = []
        left, size = self.numel, self.rows[0].dtype.itemsize
        for row in self.rows:
            at, here = self.start, min(left, self.share)
            left -= here
            while here:
                index = bisect_right(row.starts, at) - 1
                record, first = row.records[index], at - row.starts[index]
                count = min(here, record.length // size - first)
                pieces.append(part(record.locate(), first * size, count * size))
                at, here = at + count, here - count
        return concat(pieces)


def shared_out(
    rows: tuple[FlatRow, ...], shape: Shape, start: int, share: int | None = None
) -> Tensor:
    """Return the parameter that consists of the elements `start` to `start + share` of each row.

    By default, `share` is the number of elements of `shape`. The parameter is on the CPU.
    """
    numel = prod(shape)
    storage = Storage(Shares(rows, start, numel if share is None else share, numel))
    return Tensor(storage, rows[0].dtype, shape, contiguous_stride(shape))


def split_row(row: FlatRow, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Split a flat tensor that contains parameters of these shapes, in order."""
    made, start = {}, 0
    for name, shape in shapes.items():
        made[name] = shared_out((row,), shape, start)
        start += prod(shape)
    return made


def check_ranks(
    files: Mapping[Any, str], ranks: Collection[Any], name: Callable[[Any], str]
) -> None:
    """Raise CorruptError unless there is one file for each rank. `name` names a missing rank."""
    missing = [rank for rank in ranks if rank not in files]
    if missing:
        names = some(map(name, missing))
        raise CorruptError(
            f"{len(missing):,} of {len(ranks):,} rank files are missing: {names}",
            hint="every rank wrote its own file: copy the missing files from the same source",
        )
    check_stale(files, ranks)


def check_stale(files: Mapping[Any, str], ranks: Collection[Any]) -> None:
    """Raise CorruptError if there are files of other ranks."""
    known = set(ranks)
    stale = some(file for rank, file in files.items() if rank not in known)
    if stale:
        raise CorruptError(
            f"was written by {len(ranks):,} ranks, but contains files of other ranks: {stale}",
            hint="these files are from another run: move them to another folder",
        )


# Groups of files whose names differ only in the rank number


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th")
_RANK = re.compile(r"rank[_-]?([0-9]{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORLD = re.compile(r"world_size_([0-9]{1,9})")
_SHARD = re.compile(r".*-[0-9]{1,9}-of-[0-9]{1,9}\..*", re.DOTALL)
_HOLE = "\0"


class RankGroup(NamedTuple):
    """Files whose names differ only in one number, the rank.

    ``pattern`` is the file name with a placeholder for the rank. ``files`` maps each rank to a file
    name. ``certain`` is True if the number follows the word "rank". ``world`` is the number of
    ranks if the file names contain it, otherwise None.
    """

    pattern: str
    files: Mapping[int, str]
    certain: bool
    world: int | None

    @property
    def first(self) -> str:
        return next(iter(self.files.values()))

    def name(self, number: int) -> str:
        """Return the file name of rank `number`, padded with zeros like the other names."""
        around = len(self.pattern) - len(_HOLE)
        width = min(len(name) - around for name in self.files.values())
        return self.pattern.replace(_HOLE, str(number).zfill(width))


def groups(names: Iterable[str]) -> list[RankGroup]:
    """Return the groups of rank files among `names`.

    Groups of names with the word "rank" come first. A name is in at most one group. If a name
    without "rank" contains several numbers, the rank is the number that differs in the most names.
    """
    certain: dict[str, dict[int, str]] = {}
    others: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if not name.endswith(SUFFIXES) or _SHARD.fullmatch(name):
            continue
        spans = [found.span(1) for found in _RANK.finditer(name)][-1:]
        kept = certain if spans else others
        for start, stop in spans or [found.span() for found in _NUMBER.finditer(name)]:
            pattern = name[:start] + _HOLE + name[stop:]
            kept.setdefault(pattern, {})[int(name[start:stop])] = name
    made = dict(certain)
    taken: set[str] = set()
    for pattern in sorted(others, key=lambda pattern: -len(others[pattern])):
        files = others[pattern]
        if len(files) > 1 and taken.isdisjoint(files.values()):
            taken.update(files.values())
            made[pattern] = files
    found = []
    for pattern, files in made.items():
        world = _WORLD.search(pattern)
        promised = int(world[1]) if world else None
        found.append(RankGroup(pattern, dict(sorted(files.items())), pattern in certain, promised))
    return found
