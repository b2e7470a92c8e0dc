"""The tree: the values of a checkpoint, as Python containers, scalars and lazy tensors.

A node of the tree is None, a bool, int, float, complex, str, bytes, bytearray, list, tuple or dict,
or has one of these types: :class:`OrderedMapping`, :class:`SetNode`, :class:`Pairs`,
:class:`ByteString`, :class:`StoredBytes`, :class:`StoredList`, :class:`Global`, :class:`Object`,
Tensor or TypedStorage.

The functions of this module do not recurse, because a file may nest values to any depth. `walk`
raises LimitError if a file exceeds the maximum depth.

ckptkit does not hash, compare or print values of a file with Python operators, because Python's
operators recurse. Only dict keys are hashed and compared, after readers have checked the depth of
the keys.

`rebuild` copies a tree and replaces leaves or nodes. The copy has the same shared values and cycles
as the tree.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from ckptkit.core.bytesource import Extent
from ckptkit.core.errors import UnknownNameError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import entries, plural, shown

Node = Any
Path = tuple[Node, ...]


class Global:
    """The name of a class or function. ckptkit never imports the class or function.

    For a nested class, `name` contains dots.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Global({self.module!r}, {self.name!r})"


class Object:
    """A Python object that is not a plain value: the calls in a pickle that construct the object.

    ckptkit never runs these calls. A program that loads the pickle calls ``callable`` with
    ``args``. If ``new`` is set, the program calls ``callable.__new__`` with ``args`` and
    ``kwargs``. Then the program runs each of ``steps`` in order:

    * ``("build", state)`` sets the attributes of the object.
    * ``("append", [values])`` appends values to a list.
    * ``("set", [(key, value)...])`` sets items of a dict.
    * ``("add", [values])`` adds values to a set.

    ``tensor`` is the constructed tensor, if ckptkit knows that the object is a tensor. ``value`` is
    the constructed number, if the object is a numpy scalar. Objects are compared by identity.
    """

    __slots__ = ("args", "callable", "kwargs", "new", "steps", "tensor", "value")

    def __init__(
        self,
        callable: Node,
        args: Node = (),
        *,
        new: bool = False,
        kwargs: Node = None,
        tensor: Tensor | None = None,
    ) -> None:
        self.callable = callable
        self.args = args
        self.kwargs = kwargs
        self.new = new
        self.steps: list[tuple[str, Node]] = []
        self.tensor = tensor
        self.value: bool | int | float | complex | None = None

    @property
    def state(self) -> Node:
        """The argument of the last ``build`` step. None if no such step exists."""
        return next((value for step, value in reversed(self.steps) if step == "build"), None)

    @property
    def global_(self) -> Global | None:
        """The Global that constructs the object. None if another object constructs it."""
        return self.callable if isinstance(self.callable, Global) else None

    def __repr__(self) -> str:
        return f"<Object of {self.callable if isinstance(self.callable, Global) else '...'}>"


class OrderedMapping(dict[Node, Node]):
    """A ``collections.OrderedDict`` with its attributes, such as ``_metadata`` of a state_dict."""

    __slots__ = ("state",)

    def __init__(
        self, items: Mapping[Node, Node] | Iterable[tuple[Node, Node]] = (), state: Node = None
    ) -> None:
        if items:
            self.update(items)
        self.state = state

    __hash__ = None


def like(mapping: dict[Node, Node], entries: dict[Node, Node]) -> dict[Node, Node]:
    """Return `entries` as a mapping with the class and the attributes of `mapping`."""
    return (
        OrderedMapping(entries, mapping.state) if isinstance(mapping, OrderedMapping) else entries
    )


MODULE_VERSIONS = "_metadata"  # attribute of a state_dict: maps module paths to versions


def attributes_of(node: Node) -> dict[Node, Node]:
    """Return the attributes of an OrderedDict. Return {} for other nodes."""
    state = node.state if isinstance(node, OrderedMapping) else None
    return state if isinstance(state, dict) else {}


def module_versions(node: Node) -> dict[Node, Node] | None:
    """Return the ``_metadata`` of a state_dict. Return None if it has no ``_metadata``."""
    found = attributes_of(node).get(MODULE_VERSIONS)
    return found if isinstance(found, dict) else None


def versions_state(versions: Mapping[Node, Node]) -> Node:
    """Return the `state` of an OrderedDict whose ``_metadata`` is `versions`."""
    return {MODULE_VERSIONS: OrderedMapping(versions)}


class SetNode:
    """The items of a set in the order of the file. A Python set does not keep this order."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: list[Node], *, frozen: bool = False) -> None:
        self.items = items
        self.frozen = frozen

    def __repr__(self) -> str:
        return f"<{'frozenset' if self.frozen else 'set'} of {plural(len(self.items), 'value')}>"


class Pairs:
    """A mapping that a Python dict cannot represent.

    A key is unhashable, or two keys are equal, or a hostile file chose keys with equal hashes.
    ckptkit shows such a mapping, but refuses to write it.
    """

    __slots__ = ("pairs", "state")

    def __init__(self, pairs: list[tuple[Node, Node]], state: Node = None) -> None:
        self.pairs = pairs
        self.state = state

    def __repr__(self) -> str:
        return f"<mapping of {plural(len(self.pairs), 'pair')} whose keys a dict cannot hold>"


class ByteString:
    """A non-ASCII ``str`` of Python 2: bytes of unknown encoding, written back unchanged."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteString) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __str__(self) -> str:
        return self.data.decode("latin-1")

    def __repr__(self) -> str:
        return shown(self.data)


class StoredBytes:
    """A long byte string that ckptkit reads from its source on demand.

    ``kind`` is the Python type: ``bytes``, ``bytearray``, or ``python2`` for a ``str`` of Python 2.
    """

    __slots__ = ("extent", "kind")

    def __init__(self, extent: Extent, kind: str = "bytes") -> None:
        self.extent = extent
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.extent.length:,} bytes in the file>"


class StoredList:
    """A list of `count` numbers or strings that ckptkit reads from its source on demand.

    ``of`` is the type of the values. ``first`` are the first few values. ``read`` returns all
    values.
    """

    __slots__ = ("count", "first", "of", "read")

    def __init__(
        self, of: str, count: int, first: tuple[Node, ...], read: Callable[[], list[Node]]
    ) -> None:
        self.of = of
        self.count = count
        self.first = first
        self.read = read

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Node]:
        return iter(self.first if len(self.first) == self.count else self.read())

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.first) else ""
        values = f": {', '.join(map(str, self.first))}{more}" if self.first else ""
        return plural(self.count, self.of) + values

    def __repr__(self) -> str:
        return f"<list of {plural(self.count, self.of)} in the file>"


LEAVES = (
    *(Tensor, TypedStorage, Global, ByteString, StoredBytes, StoredList),
    *(str, bytes, bytearray, int, float, complex, type(None)),
)
PLAIN_TYPES = frozenset({str, int, float, bool, complex, bytes, type(None)})
_CONTAINERS = frozenset({dict, list, tuple, OrderedMapping, SetNode, Pairs, Object})

# In place of an object of these classes, ckptkit shows the argument of the constructor.
TRANSPARENT = frozenset({("collections", "Counter")})


def children(node: Node) -> Iterable[tuple[Node, Node]]:
    """Return the children of `node`, with the keys that a user types to select them.

    A leaf has no children. The children of an Object are its attributes and items. If an Object has
    neither, its children are its arguments, with their positions as keys. The attributes of an
    OrderedDict (``_metadata``) are not children.
    """
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, (list, tuple)):
        return enumerate(node)
    if isinstance(node, Pairs):
        return node.pairs
    if isinstance(node, SetNode):
        return enumerate(node.items)
    if isinstance(node, Object):
        return _object_children(node)
    return ()


def _object_children(node: Object) -> Iterator[tuple[Node, Node]]:
    args = node.args if isinstance(node.args, tuple) else (node.args,)
    made = node.callable
    if isinstance(made, Global) and (made.module, made.name) in TRANSPARENT and len(args) == 1:
        yield from children(args[0])
    elif not node.steps:
        yield from enumerate(args)
    position = 0
    for step, value in node.steps:
        if step == "set":
            yield from value
        elif step == "build":
            yield from _attributes(value)
        else:
            yield from enumerate(value, position)
            position += len(value)


def _attributes(state: Node) -> Iterable[tuple[Node, Node]]:
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        attributes, slots = state  # __dict__ and __slots__
        return [*_attributes(attributes), *slots.items()]
    if isinstance(state, (dict, Pairs)):
        return children(state)
    return () if state is None else (("state", state),)


def walk(
    root: Node, skip: Callable[[Path, Node], bool] = lambda path, node: False
) -> Iterator[tuple[Path, Node]]:
    """Yield every node with its path, depth first. A container comes before its children.

    If `skip` returns True for a container, `walk` does not visit its children. `walk` calls `skip`
    after it yields the container.

    If a node occurs at several paths, `walk` yields the node at each path. A hostile file could
    repeat nodes exponentially often. After `LIMITS.revisits` repeated values, `walk` therefore
    visits the children of each node only once. `walk` does not follow a cycle twice. If nodes are
    nested deeper than `LIMITS.depth`, `walk` raises LimitError.
    """
    yield (), root
    if skip((), root):
        return
    seen = {id(root)}
    again = 0
    open_ids = {id(root)}
    stack: list[tuple[Path, Node, Iterator[tuple[Node, Node]]]] = [((), root, iter(children(root)))]
    while stack:
        path, parent, rest = stack[-1]
        for key, node in rest:
            here = (*path, key)
            yield here, node
            if node.__class__ not in _CONTAINERS:
                continue
            if id(node) in seen:
                if again <= LIMITS.revisits:
                    again += 1 + sum(1 for _ in children(node))
                if id(node) in open_ids or again > LIMITS.revisits:
                    continue
            if len(stack) >= LIMITS.depth:
                check("depth", len(stack) + 1, "levels of values")
            seen.add(id(node))
            if skip(here, node):
                continue
            open_ids.add(id(node))
            stack.append((here, node, iter(children(node))))
            break
        else:
            stack.pop()
            open_ids.discard(id(parent))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection inside the block.

    Otherwise, the collector would traverse a growing tree repeatedly, and would free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # gc.freeze() and gc.unfreeze() move all objects to the oldest generation without a scan.
        if enabled and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
    finally:
        if enabled:
            gc.enable()


def nodes(root: Node) -> Iterator[Node]:
    """Yield every node except scalars, once each, at any depth and in no particular order.

    Dict keys, arguments of calls, and attributes are included.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.__class__ in PLAIN_TYPES or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if node.__class__ is not Tensor:
            waiting.extend(held(node))


def held(node: Node) -> Iterable[Node]:
    """Return every node to which `node` directly refers: keys, values, attributes, arguments."""
    if isinstance(node, OrderedMapping):
        return (*node, *node.values(), node.state)
    if isinstance(node, dict):
        return (*node, *node.values())
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, SetNode):
        return node.items
    if isinstance(node, Pairs):
        return (*chain.from_iterable(node.pairs), node.state)
    if isinstance(node, Object):
        return (node.callable, node.args, node.kwargs, node.tensor, *_step_values(node))
    return ()


def _step_values(node: Object) -> Iterator[Node]:
    for step, value in node.steps:
        if step == "build":
            yield value
        else:
            yield from chain.from_iterable(value) if step == "set" else value


_PYTHON_NAMES = {
    "OrderedMapping": "OrderedDict", "SetNode": "set", "Pairs": "dict", "StoredBytes": "bytes",
    "StoredList": "list", "ByteString": "str", "TypedStorage": "storage",
}  # fmt: skip


def type_name(node: Node) -> str:
    """Return the name of the Python type of a node. For an Object, return the name of its class."""
    if isinstance(node, Object):
        return str(node.global_ or "object")
    if isinstance(node, Global):
        return str(node)
    name = type(node).__name__
    return _PYTHON_NAMES.get(name, name)


def join(path: Path) -> str:
    """Join the keys of a path with dots."""
    try:
        return ".".join(path)
    except TypeError:  # some keys are not strings
        return ".".join(map(key_text, path))


def key_text(key: Node) -> str:
    """Return a dict key or list index as a string. For other keys, return ``<type>``."""
    if isinstance(key, str):
        return key
    if isinstance(key, int):
        bits = key.bit_length()
        return str(key) if bits <= 8 * LIMITS.int_bytes else f"<integer of {bits} bits>"
    if isinstance(key, bytes):
        return repr(key)
    if isinstance(key, (float, complex, type(None), ByteString, Global)):
        return str(key)
    if isinstance(key, tuple) and all(isinstance(k, (str, int)) for k in key):
        inner = [repr(k) if isinstance(k, str) else key_text(k) for k in key]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    return f"<{type(key).__name__}>"


def find(root: Node, dotted: str) -> tuple[Path, Node]:
    """Return the path and node at the dotted path. Keys may contain dots.

    Raise UnknownNameError if the path does not exist.
    """
    if dotted == "":
        return (), root
    waiting: list[tuple[Path, Node, str]] = [((), root, dotted)]
    seen: set[tuple[int, int]] = set()  # ensures that the search ends if the tree contains a cycle
    while waiting:
        path, node, rest = waiting.pop()
        if (place := (id(node), len(rest))) in seen:
            continue
        seen.add(place)
        for key, child in children(node):
            text = key_text(key)
            if text == rest:
                return (*path, key), child
            if rest.startswith(text + "."):
                waiting.append(((*path, key), child, rest[len(text) + 1 :]))
    hint = entries(dotted, [key_text(key) for key, _ in children(root)])
    raise UnknownNameError(f"there is no entry {dotted!r}", hint=hint)


# Copies


def rebuild(
    root: Node,
    leaf: Callable[[Node], Node] = lambda node: node,
    swap: Mapping[int, Node] | None = None,
) -> Node:
    """Copy the tree. Apply `leaf` to each leaf once. `swap` maps ids of nodes to replacements.

    `rebuild` does not replace a replacement again. The copy has the same shared values and cycles
    as the tree. Numbers, strings, bytes and None are copied unchanged, without a call of `leaf`.
    """
    return Copier(leaf, swap)(root)


class Copier:
    """Copies a tree. See `rebuild`.

    The copy of a mutable node is empty at first. `__call__` takes the copy from the queue and fills
    it. The copy of a tuple is created after the copies of its items. Such an order always exists,
    because a tuple can contain itself only through a mutable node.

    A subclass converts a tree to other values: `start` returns the new value of a node, and `fill`
    fills a new container.
    """

    def __init__(
        self,
        leaf: Callable[[Node], Node] = lambda node: node,
        swap: Mapping[int, Node] | None = None,
    ) -> None:
        # The list contains a node, its copy, the next node, and so on. A list of pairs would need
        # more memory.
        self._queue: list[Node] = []
        self._leaf = leaf
        self._swap = swap or {}
        self._made: dict[int, Node] = {}
        self._keep: list[Node] = []  # refers to nodes, so that Python cannot reuse the ids in _made

    def __call__(self, root: Node) -> Node:
        """Return the copy of a tree."""
        new_root = self.copy(root)
        while self._queue:
            new, old = self._queue.pop(), self._queue.pop()
            self.fill(old, new)
        return new_root

    def copy(self, node: Node, is_replaced: bool = False) -> Node:
        """Return the copy of a node. The copy of a mutable node may still be empty."""
        if node.__class__ not in PLAIN_TYPES and not is_replaced:
            node = self._swap.get(id(node), node)
        if node.__class__ in PLAIN_TYPES:
            return node
        if id(node) in self._made:
            return self._made[id(node)]
        if isinstance(node, (tuple, SetNode)) and self.frozen(node) is not None:
            return self._copy_frozen(node)
        new = self.start(node)
        self._keep.append(node)
        self._made[id(node)] = new
        if isinstance(new, _MUTABLE) and not isinstance(node, LEAVES):
            self._queue += (node, new)
        return new

    def start(self, node: Node) -> Node:
        """Return the copy of a leaf, or an empty copy of a mutable node."""
        if isinstance(node, LEAVES):
            return self._leaf(node)
        if isinstance(node, SetNode):
            return SetNode([], frozen=node.frozen)
        if isinstance(node, Object):
            tensor = None if node.tensor is None else self.copy(node.tensor)
            new = Object(None, new=node.new, tensor=tensor)
            new.value = node.value
            return new
        if isinstance(node, dict):
            return OrderedMapping() if isinstance(node, OrderedMapping) else {}
        return Pairs([]) if isinstance(node, Pairs) else []

    def fill(self, old: Node, new: Node) -> None:
        """Fill the empty copy `new` with copies of the contents of `old`."""
        copy, plain, made, swap = self.copy, PLAIN_TYPES, self._made, self._swap
        if isinstance(old, dict):
            leaf, keep = self._leaf, self._keep.append
            for key, value in old.items():  # `copy` is inlined for tensors, for speed
                place = id(value)
                if value.__class__ in plain:
                    other = value
                elif value.__class__ is not Tensor or place in made or place in swap:
                    other = copy(value)
                else:
                    keep(value)
                    other = made[place] = leaf(value)
                new[key if key.__class__ in plain else copy(key)] = other
            if isinstance(old, OrderedMapping):
                new.state = copy(old.state)
        elif isinstance(old, list):
            new.extend(map(copy, old))
        elif isinstance(old, SetNode):
            new.items.extend(map(copy, old.items))
        elif isinstance(old, Pairs):
            new.pairs.extend((copy(key), copy(value)) for key, value in old.pairs)
            new.state = copy(old.state)
        else:
            new.callable, new.args = copy(old.callable), copy(old.args)
            new.kwargs = copy(old.kwargs)
            for step, value in old.steps:
                if step == "build":
                    items = copy(value)
                elif step == "set":
                    items = [(copy(key), copy(item)) for key, item in value]
                else:
                    items = [copy(item) for item in value]
                new.steps.append((step, items))

    def frozen(self, node: Node) -> Sequence[Node] | None:
        """Return the items of a tuple, whose copy needs the copies of its items. Else None."""
        return node if isinstance(node, tuple) else None

    def freeze(self, node: Node, items: Iterable[Node]) -> Node:
        """Return the copy of a tuple. `items` are the copies of its items."""
        return tuple(items)

    def _copy_frozen(self, root: Node) -> Node:
        """Copy nested tuples. An inner tuple is copied before the tuple that contains it."""
        made, waiting = self._made, [root]
        while waiting:
            node = waiting[-1]
            if id(node) not in made:
                inner = [
                    each if each.__class__ in PLAIN_TYPES else self._swap.get(id(each), each)
                    for each in self.frozen(node) or ()
                ]
                missing = [
                    each for each in inner if id(each) not in made and self.frozen(each) is not None
                ]
                if missing:
                    waiting.extend(missing)
                    continue
                self._keep.append(node)
                copies = [self.copy(each, is_replaced=True) for each in inner]
                made[id(node)] = self.freeze(node, copies)
            waiting.pop()
        return made[id(root)]


_MUTABLE = (dict, list, set, SetNode, Pairs, Object)
