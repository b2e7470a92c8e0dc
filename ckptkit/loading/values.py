"""``load``: the weights, or the whole tree, as Python values and torch tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckptkit.api import open_checkpoint
from ckptkit.compute.operation import stream
from ckptkit.compute.torch_bridge import MappedFiles
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Source
from ckptkit.core.errors import CkptkitError, FormatError
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import flatten
from ckptkit.core.tree import (
    MODULE_VERSIONS,
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    attributes_of,
    join,
)
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.formats.format import steady
from ckptkit.loading.tensors import MapLocation, Tensors, attributes, dtype_of, typed_storage
from ckptkit.transforms import module_versions


def load(
    path: Source,
    map_location: MapLocation = None,
    *,
    key: str | None = None,
    whole: bool = False,
    mmap: bool = True,
) -> Any:
    """Return the weights of a file, folder or Checkpoint, name -> torch tensor, as torch.load.

    Tensors on the CPU are mapped, as with ``torch.load(mmap=True)`` and safetensors: their bytes
    are read from the file when they are used, and what is written to a tensor stays in memory.
    Until then the file must stay as it is. To replace it is safe, as ``ckptkit.save`` does; to
    overwrite or cut it, as ``torch.save`` to the same path does, ends the process with a bus error
    and loses the file. ``mmap=False`` reads everything into memory first, which is also done where
    bytes have to be computed, come from elsewhere, or do not begin at a multiple of the size of
    their numbers. Checksums are not verified: ``ckptkit verify`` does that.

    `map_location` is what ``torch.load`` takes, `key` the entry to take as the weights. Tensors
    that shared memory share it again; an OrderedDict keeps its ``_metadata``. With `whole` the tree
    is given: plain values as what they are, and what only its own class could make left as a
    :class:`ckptkit.core.tree.Object`. Raises UsageError where there are no weights, DeviceError for
    a device that is not there.
    """
    arguments.flags(whole=whole, mmap=mmap)
    ck = open_checkpoint(path, key=key)
    files = MappedFiles() if mmap else None
    values = Values(Tensors(map_location, files), Tensors("cpu", files))
    try:
        with steady(ck.source, remote=True):
            return values(ck.root) if whole else values.state_dict(ck.required)
    except CkptkitError as error:
        raise error.at(ck.name or "checkpoint") from error.__cause__


def entries(weights: Weights) -> Iterator[tuple[str, Node]]:
    """Yield names and nodes of a state_dict: its tensors, and others (``_extra_state``).

    A mapping with ``_metadata`` is a state_dict and belongs to it as a whole; any other may be a
    wrapper.
    """
    if weights.is_module:
        yield from weights.nodes.items()
        return
    complete = module_versions.of(weights.node) is not None
    for name, node in weights.node.items():
        if isinstance(name, str) and (
            complete or name in weights.nodes or name.endswith("_extra_state")
        ):
            yield name, node


class Values:
    """Makes Python's values of nodes, each once: sharing and cycles stay, at any depth.

    `arrays` makes the tensors of numpy's arrays, which have no other device than the CPU.
    """

    def __init__(self, tensors: Tensors, arrays: Tensors | None = None) -> None:
        self.tensors, self.arrays = tensors, arrays or Tensors("cpu")
        self._made: dict[int, Any] = {}
        self._keep: list[Node] = []  # ids in _made stay taken
        self._queue: list[tuple[Node, Any]] = []

    def __call__(self, root: Node) -> Any:
        made = self._value(root)
        self._finish()
        return made

    def _finish(self) -> None:
        while self._queue:
            old, new = self._queue.pop()
            self._fill(old, new)

    def state_dict(self, weights: Weights) -> dict[str, Any]:
        """Return name -> tensor.

        Those of a pickled module are detached, as its ``state_dict()`` would give them.
        """
        ordered = isinstance(weights.node, OrderedMapping) or weights.is_module
        found: dict[str, Any] = collections.OrderedDict() if ordered else {}
        for name, node in entries(weights):
            try:
                found[name] = self(node) if as_tensor(node) is None else self._with_attributes(node)
            except CkptkitError as error:
                error.message = f"{join((*weights.path, name))}: {error.message}"
                raise
            if weights.is_module:
                found[name] = found[name].detach()
        if isinstance(weights.node, OrderedMapping):
            self._attributes(weights.node, found)
        self._finish()
        return found

    def _value(self, node: Node) -> Any:
        """The value of a node, which may still have to be filled."""
        if node.__class__ in _PLAIN:
            return node
        if id(node) in self._made:
            return self._made[id(node)]
        if isinstance(node, tuple) or (isinstance(node, SetNode) and node.frozen):
            return self._frozen(node)
        self._keep.append(node)
        self._made[id(node)] = made = (
            self._leaf(node) if isinstance(node, _LEAVES) else self._shell(node)
        )
        return made

    def _leaf(self, node: Node) -> Any:
        if isinstance(node, Tensor):
            return self._tensor(node, node)
        if isinstance(node, TypedStorage):
            return typed_storage(self.tensors, node)
        if isinstance(node, Global):
            return dtype_of(node)
        if isinstance(node, StoredBytes):
            data = b"".join(stream(node.extent))
            return bytearray(data) if node.kind == "bytearray" else data
        return node.data if isinstance(node, ByteString) else node

    def _shell(self, node: Node) -> Any:
        made = self._object(node) if isinstance(node, Object) else _SHELLS[type(node)]()
        if isinstance(made, (dict, list, set, Pairs, Object)):
            self._queue.append((node, made))
        return made

    def _object(self, node: Object) -> Any:
        """Return the tensor or plain value of an Object, else an Object of what it holds."""
        if node.tensor is not None and node.tensor.layout != "subclass":
            return self._tensor(node, node.tensor)
        if node.value is not None:
            return node.value
        name = (node.global_.module, node.global_.name) if node.global_ else ("", "")
        made = _OBJECTS[name](node) if name in _OBJECTS else None
        return Object(None, new=node.new) if made is None else made

    def _tensor(self, node: Tensor | Object, like: Tensor) -> Any:
        if like.kind == "ndarray":  # numpy has one device: map_location is for tensors
            return self.arrays.tensor(node).numpy()
        return self._with_attributes(node)

    def _with_attributes(self, node: Tensor | Object) -> Any:
        """Return the tensor that a node is, with the attributes that Python code had set on it."""
        made = self.tensors.tensor(node)
        for key, value in attributes(node):
            made.__dict__[key] = self._value(value)
        return made

    def _frozen(self, root: Node) -> Any:
        """Make tuples and frozen sets, the inner ones first; all else in them is made."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            parts = node if isinstance(node, tuple) else node.items
            missing = (
                []
                if id(node) in self._made
                else [part for part in parts if self._is_waited_for(part)]
            )
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if id(node) not in self._made:
                values = [self._value(part) for part in parts]
                self._keep.append(node)
                self._made[id(node)] = (
                    tuple(values) if isinstance(node, tuple) else frozenset(_hashable(values))
                )
        return self._made[id(root)]

    def _is_waited_for(self, part: Node) -> bool:
        frozen = isinstance(part, tuple) or (isinstance(part, SetNode) and part.frozen)
        return frozen and id(part) not in self._made

    def _fill(self, old: Node, new: Any) -> None:
        if isinstance(new, Object):
            self._fill_object(old, new)
        elif isinstance(new, dict):
            for key, value in _items(old):
                self._put(new, key, self._value(value))
            if isinstance(old, OrderedMapping):
                self._attributes(old, new)
        elif isinstance(new, list):
            new.extend(map(self._value, old))
        elif isinstance(new, set):
            new.update(_hashable(map(self._value, old.items)))
        else:
            new.pairs.extend((self._value(key), self._value(value)) for key, value in old.pairs)

    def _put(self, new: dict[Any, Any], key: Node, value: Any) -> None:
        """Set an item; a key that equals another or cannot be hashed stays the node that it is."""
        made = self._value(key)
        try:
            new[key if made in new else made] = value
        except TypeError:
            new[key] = value

    def _attributes(self, old: OrderedMapping, new: Any) -> None:
        """Set ``_metadata``, the one attribute that torch sets; others are not restored."""
        held = attributes_of(old)
        if MODULE_VERSIONS in held:
            new._metadata = self._value(held[MODULE_VERSIONS])

    def _fill_object(self, old: Object, new: Object) -> None:
        value = self._value
        new.callable, new.args, new.kwargs = value(old.callable), value(old.args), value(old.kwargs)
        for step, each in old.steps:
            if step == "build":
                new.steps.append((step, value(each)))
            elif step == "set":
                new.steps.append((step, [(value(key), value(item)) for key, item in each]))
            else:
                new.steps.append((step, list(map(value, each))))


_PLAIN = frozenset({str, int, float, bool, complex, bytes, type(None)})
_LEAVES = (Tensor, TypedStorage, Global, StoredBytes, ByteString, bytearray)
_SHELLS: dict[type, Callable[[], Any]] = {
    dict: dict, list: list, OrderedMapping: collections.OrderedDict, SetNode: set,
    Pairs: lambda: Pairs([]),
}  # fmt: skip


def _items(node: Node) -> Iterable[tuple[Node, Node]]:
    """The items of a mapping, of a Counter's argument, or of the steps that fill a defaultdict."""
    if isinstance(node, dict):
        return node.items()
    if node.steps:
        return list(flatten(pairs for _, pairs in node.steps))
    return node.args[0].items() if node.args and isinstance(node.args[0], dict) else ()


def _hashable(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        try:
            hash(value)
        except TypeError as error:
            raise FormatError(
                f"a set holds a {type(value).__name__}, which cannot be in one"
            ) from error
        yield value


# Objects that are plain values; None where the arguments are not what they should be


def _size(node: Object) -> Any:
    import torch

    plain = len(node.args) == 1 and _are(node.args[0], int)
    return torch.Size(node.args[0]) if plain else None


def _device(node: Object) -> Any:
    import torch

    if not _are(node.args, (str, int)):
        return None
    try:
        return torch.device(*node.args)
    except (RuntimeError, TypeError):  # a device that this torch has no name for
        return None


def _counter(node: Object) -> Any:
    plain = not node.steps and (
        not node.args or (len(node.args) == 1 and isinstance(node.args[0], dict))
    )
    return collections.Counter() if plain else None


_FACTORIES = {each.__name__: each for each in (list, dict, set, int, float, str)}


def _defaultdict(node: Object) -> Any:
    factory = node.args[0] if len(node.args) == 1 else None
    if any(step != "set" for step, _ in node.steps) or not (
        factory is None or isinstance(factory, Global)
    ):
        return None
    if factory is None:
        return collections.defaultdict(None)
    made = _FACTORIES.get(factory.name) if factory.module == "builtins" else None
    return collections.defaultdict(made) if made else None


def _are(values: Node, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(each, kind) for each in values)


_OBJECTS: dict[tuple[str, str], Callable[[Object], Any]] = {
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("collections", "Counter"): _counter,
    ("collections", "defaultdict"): _defaultdict,
}
