"""Parse the `.metadata` of a torch.distributed.checkpoint folder, without executing its pickle.

    Metadata.state_dict_metadata  {name: TensorStorageMetadata(properties, size, chunks)
                                         | BytesStorageMetadata()}
    Metadata.storage_data         {MetadataIndex(name, offset, index):
                                         _StorageInfo(relative_path, offset, length)}
    Metadata.planner_data         {name: path in the nested state_dict} or None; planners other
                                  than torch's store other data
    Metadata.storage_meta         ignored (torch 2.5 and later)
    Metadata.version              ignored (torch 2.5 and later)

    TensorProperties              the state is a tuple: (dtype, layout, requires_grad, memory
                                  format, pin_memory). Since torch 2.15, a sixth item contains the
                                  strides (a tuple or None).
    ChunkStorageMetadata          offsets and sizes in elements, each a torch.Size

The pickle creates objects with ``__new__`` and sets the state of each object. The state is a dict
that may omit attributes whose value is None. The offset of a MetadataIndex is the position of a
chunk in its tensor. For a value that is not a tensor, the offset is None.
(torch/distributed/checkpoint/metadata.py, filesystem.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptkit.compute.strided import check_cover
from ckptkit.core.bytesource import ByteSource
from ckptkit.core.dtypes import UNKNOWN, DType
from ckptkit.core.errors import (
    AmbiguousError,
    CollisionError,
    CorruptError,
    FormatError,
    UnsafeGlobalError,
    UnsupportedError,
    placed,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Shape
from ckptkit.core.text import flatten, merge_all, shown, some
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, Pairs, Path, join, key_text
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.meshes import argument
from ckptkit.pickles.globals import dtype_or_unknown
from ckptkit.pickles.judge import is_foreign
from ckptkit.pickles.values import unpickle

NAME = ".metadata"
_NAMES = re.compile(r"(__[0-9]{1,9})?\.metadata")
METADATA = "torch.distributed.checkpoint.metadata"
STORAGE = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_CLASSES = frozenset({
    *((METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING",
    )),
    (STORAGE, "_StorageInfo"),
    (_SHARDED, "TensorProperties"),
    (_SHARDED, "MEM_FORMAT_ENCODING"),
})  # fmt: skip
# Numbers of items in the state of TensorProperties: before torch 2.15, and since 2.15.
_PROPERTIES = (5, 6)


class Place(NamedTuple):
    """Location of an item: a byte range of a file in the folder."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A block of a tensor, and the location of its bytes.

    ``offsets`` and ``sizes`` contain one number for each dimension.
    """

    offsets: Shape
    sizes: Shape
    place: Place


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete tensor and its non-empty chunks.

    ``stride`` is the stride of the saved tensor, or None if the metadata omits it. ``odd`` is the
    reason why ckptkit cannot assemble the tensor, or "".
    """

    dtype: DType
    shape: Shape
    chunks: tuple[Chunk, ...]
    stride: Shape | None = None
    odd: str = ""


Entry = Whole | Place  # a tensor, or the location of a value that is not a tensor


class DcpIndex(NamedTuple):
    """A parsed `.metadata`: entries by flat name, and the path of each entry in the nested tree."""

    entries: dict[str, Entry]
    paths: dict[str, Path]
    warnings: tuple[str, ...]


def is_metadata(name: str) -> bool:
    """Return whether `name` is the name of a metadata file, for all ranks or for one rank."""
    return _NAMES.fullmatch(name) is not None


def read_metadata(source: ByteSource) -> DcpIndex:
    """Read a `.metadata` file.

    Raises UnsafeGlobalError if the pickle contains a name that no harmless checkpoint contains (see
    `is_foreign`). Raises another InputError if the file is damaged, ambiguous or unsupported.
    """
    pickled = unpickle(source)
    if pickled.stop != source.size:
        raise AmbiguousError(
            f"has {source.size - pickled.stop:,} bytes after the end of its pickle"
        )
    warnings = [*pickled.warnings, *_check_names(pickled.globals)]
    fields = _fields(pickled.root, None)
    described, stored = _mapping(fields, "state_dict_metadata"), _mapping(fields, "storage_data")
    places = _places(stored)
    entries: dict[str, Entry] = {}
    for name, node in described.items():
        with placed(None, f"{shown(key_text(name))}: "):
            check("name_bytes", len(_text(name, "a name")), "characters of a tensor's name")
            entries[name] = _entry(name, node, places)
    # planner_data maps each name to its path in the nested tree.
    paths = fields.get("planner_data") or {}
    if not isinstance(paths, dict):
        warnings.append(
            "another planner than torch's wrote its planner_data. The nesting of the state_dict is "
            "unknown, so names stay flat"
        )
        paths = {}
    for name, path in paths.items():
        is_path = isinstance(path, tuple) and path
        if not is_path or any(type(key) not in (str, int) for key in path):
            what = "has keys other than strings and integers"
            raise FormatError(f"the path of {shown(key_text(name))} {what}")
        check("depth", len(path), "levels of values")
    return DcpIndex(entries, paths, tuple(warnings))


def _check_names(names: tuple[Global, ...]) -> list[str]:
    """Raise UnsafeGlobalError for the first name for which `is_foreign` is true.

    Return a warning that lists the ignored classes, which belong to packages other than torch.
    """
    unknown = []
    for name in names:
        if (name.module, name.name) in _CLASSES:
            continue
        if is_foreign(name):
            raise UnsafeGlobalError(
                f"its pickle refers to {name}, which is not allowlisted",
                hint="loading this folder with torch calls it: do not load the folder with torch",
            )
        if name.module not in ("torch", "torch.serialization", "pathlib", "pathlib._local"):
            unknown.append(str(name))
    if not unknown:
        return []
    return [f"ckptkit ignores classes of other packages in the .metadata: {some(unknown)}"]


# Objects and their fields


def _fields(node: Node, name: str | None) -> Mapping[Node, Node]:
    """Return the attributes of an object. Raise FormatError if the object's class is not `name`.

    If `name` is None, accept any class.
    """
    made = node.global_ if isinstance(node, Object) and node.new else None
    if (
        made is None
        or not isinstance(node, Object)
        or (name is not None and ((made.module, made.name) not in _CLASSES or made.name != name))
    ):
        raise FormatError(f"contains something other than {name or 'a Metadata object'}")
    if not isinstance(node.state, dict):
        raise FormatError(f"contains {made.name} without its fields")
    return node.state


def _mapping(fields: Mapping[Node, Node], name: str) -> dict[Node, Node]:
    found = fields.get(name)
    if isinstance(found, Pairs):
        raise AmbiguousError(f"its {name} has repeated keys")
    if not isinstance(found, dict):
        raise FormatError(f"its {name} is not a dict")
    return found


def _text(node: Node, what: str) -> str:
    if not isinstance(node, str):
        raise FormatError(f"{what} is not a string")
    return node


def _integer(node: Node, what: str) -> int:
    if type(node) is not int or node < 0 or node >> 63:
        raise CorruptError(f"{what} is not an integer from 0 to 2**63 - 1")
    return node


def _size(node: Node, what: str) -> Shape:
    """Convert a torch.Size, a tuple or a list of integers to a tuple."""
    node = argument(node)
    if not isinstance(node, (tuple, list)):
        raise FormatError(f"{what} is not a torch.Size")
    check("rank", len(node), "dimensions of a tensor")
    return tuple(_integer(n, what) for n in node)


Places = dict[tuple[str, Shape | None], Place]


def _places(stored: Mapping[Node, Node]) -> Places:
    found: Places = {}
    for key, info in stored.items():
        index, fields = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, start = _text(index.get("fqn"), "the name of an item"), index.get("offset")
        offset = None if start is None else _size(start, "the offset of a chunk")
        if (name, offset) in found:
            raise AmbiguousError(f"{shown(name)} is stored twice")
        if fields.get("transform_descriptors"):
            raise UnsupportedError(
                f"{shown(name)} was saved with a torch extension (usually compression)",
                hint="load it with torch.distributed.checkpoint and save it without extensions",
            )
        found[name, offset] = Place(
            _text(fields.get("relative_path"), "the name of a file"),
            _integer(fields.get("offset"), f"the offset of {shown(name)}"),
            _integer(fields.get("length"), f"the length of {shown(name)}"),
        )
    return found


def _entry(name: str, node: Node, places: Places) -> Entry:
    def place(offsets: Shape | None) -> Place:
        if (name, offsets) not in places:
            which = f"the chunk at {offsets}" if offsets else "it"
            raise CorruptError(f"{which} has no entry in storage_data")
        return places[name, offsets]

    if isinstance(node, Object) and node.global_ == Global(METADATA, "BytesStorageMetadata"):
        return place(None)
    fields = _fields(node, "TensorStorageMetadata")
    properties = fields.get("properties")
    made = properties.global_ if isinstance(properties, Object) and properties.new else None
    is_known = made is not None and made.name == "TensorProperties"
    state = properties.state if is_known and isinstance(properties, Object) else None
    if not isinstance(state, tuple) or len(state) not in _PROPERTIES:
        raise FormatError("its properties are not TensorProperties")
    dtype, layout, *rest = dtype_or_unknown(state[0]), *state[1:]
    shape = _size(fields.get("size"), "the size of a tensor")
    stride = None
    if len(rest) > 3 and rest[3] is not None:
        stride = _size(rest[3], "the strides of a tensor")
        if len(stride) != len(shape):
            raise CorruptError(f"it has {len(shape)} sizes but {len(stride)} strides")
    odd = ""  # the reason why ckptkit cannot assemble the elements
    if not isinstance(layout, Object) or layout.args != ("torch.strided",):
        odd = "not strided"
    elif dtype.kind == "unknown":
        odd = UNKNOWN
    elif dtype.kind == "quantized" or dtype.bits % 8:
        odd = "in chunks"
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise FormatError("its chunks are not a list")
    chunks = []
    for each in listed:
        chunk = _fields(each, "ChunkStorageMetadata")
        offsets = _size(chunk.get("offsets"), "the offset of a chunk")
        sizes = _size(chunk.get("sizes"), "the size of a chunk")
        if 0 not in sizes:
            chunks.append(Chunk(offsets, sizes, place(offsets)))
    return Whole(dtype, shape, tuple(chunks), stride, odd)


def merged(ranks: Sequence[DcpIndex]) -> DcpIndex:
    """Merge the metadata files of all ranks. Each tensor gets the chunks of all ranks.

    If several ranks saved a value with the same name, keep the value of the first rank. Values that
    are not replicated may differ from rank to rank. Raises AmbiguousError if ranks describe a
    tensor differently.
    """
    if len(ranks) == 1:
        return ranks[0]
    entries: dict[str, Entry] = {}
    own: set[str] = set()
    for name, entry in flatten(rank.entries.items() for rank in ranks):
        known = entries.setdefault(name, entry)
        if known is entry:
            continue
        if isinstance(known, Place) and isinstance(entry, Place):
            own.add(name)
        elif (
            isinstance(known, Whole)
            and isinstance(entry, Whole)
            and (entry.dtype, entry.shape) == (known.dtype, known.shape)
        ):
            chunks = {(each.offsets, each.sizes): each for each in entry.chunks + known.chunks}
            entries[name] = replace(known, chunks=tuple(chunks.values()))
        else:
            raise AmbiguousError(f"several ranks describe {shown(name)} differently")
    warnings = list(flatten(rank.warnings for rank in ranks))
    if own:
        warnings.append(
            f"several ranks saved values with the same {len(own):,} names: ckptkit reads only the "
            "values of the first rank"
        )
    return DcpIndex(entries, merge_all(rank.paths for rank in ranks), tuple(warnings))


def covered(name: str, entry: Whole) -> Whole:
    """Check that chunks cover a tensor. Return the entry with sorted chunks.

    Raises CorruptError if chunks overlap or leave a gap.
    """
    with placed(None, f"{shown(name)}: "):
        check_cover(entry.shape, [each[:2] for each in entry.chunks])
    return replace(entry, chunks=tuple(sorted(entry.chunks)))


# Flattening of nested state_dicts, and its inverse, as in torch
#
# torch flattens every dict. torch flattens a list if the list, or a list nested in the list,
# contains a tensor or a dict. Any other value becomes one entry. torch drops empty dicts. The path
# of an entry consists of strings (dict keys) and integers (list indices). The flat name of an entry
# is its path joined by dots.
# (torch/distributed/checkpoint/_nested_dict.py, _traverse.py)
#
# In the state of an optimizer, torch saves parameter numbers as strings. If ``param_groups``
# contains parameter numbers, ckptkit converts the keys of the state back to integers. With string
# keys, torch's ``load_state_dict`` ignores the state, and training loses its momentum.


class _Branch(dict[Node, Node]):
    """The items of a dict by key, or the items of a list by index."""

    def __init__(self, is_list: bool = False) -> None:
        self.is_list = is_list


class Nest:
    """A builder of a tree of dicts and lists. `put` adds one entry."""

    def __init__(self) -> None:
        self.root = _Branch()
        self._branches = [self.root]  # every dict and list that this Nest creates

    def put(self, path: Path, node: Node) -> None:
        """Set the entry at `path`.

        Raises AmbiguousError if the entry exists, or if `path` leads through the value of another
        entry. Raises FormatError if `path` uses a list as a dict, or a dict as a list.
        """
        held: Node = self.root
        for depth, key in enumerate(path):
            if not isinstance(held, _Branch):
                raise AmbiguousError(
                    f"the entry {join(path)} is inside the entry {join(path[:depth])}, which was "
                    "saved as one value"
                )
            if held.is_list != (type(key) is int and 0 <= key < 1 << 63):
                what = "uses a list as a dict, or a dict as a list"
                raise FormatError(f"the path {join(path)} {what}")
            is_last = depth == len(path) - 1
            if is_last and key in held:
                raise AmbiguousError(f"two entries have the path {join(path)}")
            if is_last:
                held[key] = node
            elif key not in held:
                held[key] = branch = _Branch(type(path[depth + 1]) is int)
                self._branches.append(branch)
            held = held[key]

    def finished(self) -> dict[Node, Node]:
        """Return the tree. A missing list item becomes None, as in torch."""
        gaps = sum(max(each) + 1 - len(each) for each in self._branches if each.is_list)
        check("list_gaps", gaps, "missing items of lists")
        made: dict[int, Node] = {}  # the dict or list of each branch, by the branch's id
        for branch in reversed(self._branches):  # inner branches first
            items = {key: made.get(id(node), node) for key, node in branch.items()}
            made[id(branch)] = items
            if branch.is_list:
                made[id(branch)] = [items.get(place) for place in range(max(items) + 1)]
            elif "param_groups" in items:
                _number_state(items)
        root: dict[Node, Node] = made[id(self.root)]
        return root


def _number_state(optimizer: dict[Node, Node]) -> None:
    """Replace the string keys in the state of an optimizer by parameter numbers.

    Change nothing unless every key is a parameter number in ``param_groups``. If the optimizer has
    no state, add an empty dict, because flattening drops empty dicts.
    """
    groups, state = optimizer["param_groups"], optimizer.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, dict):
        return
    params = [each.get("params") for each in groups if isinstance(each, dict)]
    listed = flatten(each for each in params if isinstance(each, list))
    numbers = {key_text(each): each for each in listed if type(each) is int}
    if numbers and state.keys() <= numbers.keys():
        optimizer["state"] = {numbers[key]: value for key, value in state.items()}


class Flat:
    """A flattened tree: entries and their paths by flat name, and the paths at which flattening
    changes the tree.

    * ``empty`` contains the paths of empty dicts. torch drops empty dicts.
    * ``stringified`` contains the paths of keys that became strings.
    * ``attributes`` contains the paths of state_dicts with attributes such as ``_metadata``.

    Raises CollisionError if two entries have the same flat name. Raises LimitError if the tree
    contains itself.
    """

    def __init__(self, root: dict[Node, Node]) -> None:
        self.entries: dict[str, tuple[Path, Node]] = {}
        self.empty: list[Path] = []
        self.stringified: list[Path] = []
        self.attributes: list[Path] = []
        seen: set[int] = set()
        again = 0
        waiting: list[tuple[Path, Node]] = [((), root)]
        while waiting:
            path, node = waiting.pop()
            items: Iterable[tuple[Node, Node]]
            if isinstance(node, dict):
                items = [(key_text(key), value) for key, value in node.items()]
                self.stringified += [(*path, key) for key in node if not isinstance(key, str)]
                if isinstance(node, OrderedMapping) and node.state is not None:
                    self.attributes.append(path)
                if not node and path:
                    self.empty.append(path)
            elif isinstance(node, list) and _is_opened(node):
                items = enumerate(node)
            else:
                name = join(path)
                if name in self.entries:
                    what = f"two entries are called {name!r}: torch joins their keys by dots"
                    raise CollisionError(what)
                self.entries[name] = path, node
                continue
            again += 1 + len(node) if id(node) in seen else 0
            check("depth", len(path), "levels of values")
            check("revisits", again, "repeated visits of values")
            seen.add(id(node))
            waiting.extend(reversed([((*path, key), value) for key, value in items]))


def _is_opened(node: list[Node]) -> bool:
    """Return whether torch flattens a list.

    torch flattens a list that contains a tensor or a dict, directly or in a nested list.
    """
    waiting, seen = [node], {id(node)}
    while waiting and len(seen) <= LIMITS.revisits:
        for each in waiting.pop():
            if isinstance(each, dict) or as_tensor(each) is not None:
                return True
            if isinstance(each, list) and id(each) not in seen:
                seen.add(id(each))
                waiting.append(each)
    return False
