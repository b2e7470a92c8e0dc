"""Python values of this process, as the nodes that a file of them would give.

The values are pickled as ``torch.save`` does, and the machine reads that pickle. The bytes of
tensors and arrays stay where they are in memory: in their place the pickle has a number. Tensors
and other nodes of a Checkpoint stand for themselves.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import ArgumentError, CkptkitError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    nodes,
)
from ckptkit.pickles import ndarray
from ckptkit.pickles.globals import REDUCERS
from ckptkit.pickles.values import unpickle

_NODES = (
    Tensor, TypedStorage, Object, Global, SetNode, Pairs, ByteString, StoredBytes,
)  # fmt: skip
_PROTOCOL = 2  # that of torch.save
_NAME = "<memory>"
_HINT = (
    "plain values, containers, torch tensors and numpy arrays can; of an object, its state_dict() "
    "or vars()"
)
_WITH_BYTES = ("torch.storage", "_load_from_bytes")  # the storage of a tensor inside another object


def checkpoint(value: object) -> Checkpoint:
    """Return a Checkpoint that holds a value of this process."""
    root = node(value)
    return Checkpoint(root, globals=tuple(dict.fromkeys(_globals(root))))


def _globals(root: Node) -> Iterator[Global]:
    return (each for each in nodes(root) if isinstance(each, Global))


def node(value: object) -> Node:
    """Return the node of a value. Raises ArgumentError for what cannot be pickled."""
    import pickle

    if isinstance(value, _NODES):
        return value
    if isinstance(value, Checkpoint):
        return value.root
    numbered = _Numbered()
    try:
        data = pickle.dumps(numbered(value), _PROTOCOL)
    except CkptkitError:
        raise
    except Exception as error:  # whatever the code of a class raises
        raise ArgumentError(f"cannot be saved: {error}", hint=_HINT) from error
    reducers = {
        **REDUCERS,
        (_held.__module__, _held.__name__): lambda made, args: numbered.held[args[0]],
        _WITH_BYTES: _refused,
    }
    return unpickle(Memory(data, _NAME), reducers=reducers).root


def _refused(made: Global, args: tuple[Node, ...]) -> Node:
    raise ArgumentError("cannot be saved: an object of its own class holds tensors", hint=_HINT)


def _held(number: int) -> object:
    """Stand for the node of a number; it is never called."""
    raise NotImplementedError


class _Call:
    """A value that is pickled as a call, with a state and items."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class _Numbered:
    """Copies values for pickling: nodes, storages and arrays become numbers, kept in `held`.

    What is shared stays shared. Objects of other classes are left as they are.
    """

    def __init__(self) -> None:
        self.held: list[Node] = []
        self.torch, self.numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._copies: dict[int, Any] = {}
        self._keep: list[object] = []  # ids in _copies stay taken
        self._storages: dict[int, Storage] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._copies:
            self._keep.append(value)
            self._copies[id(value)] = self._copy(value)
        return self._copies[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, (dict, list)):
            return self._container(value)
        if type(value) is tuple:
            return tuple(map(self, value))
        found = self._node(value)
        if found is not None:
            self.held.append(found)
            return _Call(_held, (len(self.held) - 1,))
        if self.torch is not None and isinstance(value, self.torch.Tensor):
            function, args, *rest = value.__reduce_ex__(_PROTOCOL)
            return _Call(function, self(args), *map(self, rest))
        return value

    def _container(self, value: Any) -> Any:
        """Return the copy of a mapping or list, known before it is filled: it may hold itself."""
        kind = type(value)
        if kind is list:
            listed: list[Any] = []
            self._copies[id(value)] = listed
            listed.extend(map(self, value))
            return listed
        pairs = ((self(key), self(item)) for key, item in value.items()) if kind in _DICTS else ()
        if kind is dict:
            mapped: dict[Any, Any] = {}
            self._copies[id(value)] = mapped
            mapped.update(pairs)
            return mapped
        if kind is OrderedMapping:
            return _Call(OrderedDict, (), self(value.state), None, pairs)
        if kind is OrderedDict:
            return _Call(OrderedDict, (), self(vars(value) or None), None, pairs)
        if kind is defaultdict:
            return _Call(defaultdict, (value.default_factory,), None, None, pairs)
        return value

    def _node(self, value: Any) -> Node | None:
        """Return the node of what is not pickled, None for other values."""
        if isinstance(value, _NODES):
            return value
        if isinstance(value, Checkpoint):
            return value.root
        if self.torch is not None and self.torch.is_storage(value):
            return _typed_storage(self.torch, value, self._storages)
        numpy = self.numpy
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
            return _array(numpy, value)
        return None


_DICTS = (dict, OrderedDict, OrderedMapping, defaultdict)


def _typed_storage(torch: Any, value: Any, known: dict[int, Storage]) -> TypedStorage:
    """Return the storage of a tensor; the same Storage for the same memory."""
    is_typed = isinstance(value, torch.storage.TypedStorage)
    untyped = value._untyped_storage if is_typed else value
    dtype = BY_NAME[str(value.dtype).removeprefix("torch.")] if is_typed else None
    place = untyped._cdata
    if place not in known:
        data = torch.empty(0, dtype=torch.uint8).set_(untyped.cpu()).numpy().data
        location = str(untyped.device)
        known[place] = Storage(Range(Memory(data, _NAME), 0, untyped.nbytes()), location)
    return TypedStorage(known[place], dtype)


def _array(numpy: Any, value: Any) -> Node | None:
    """Return the node of an array, None for one that is pickled with its elements."""
    name = value.dtype.name
    if name not in BY_NAME or value.dtype.hasobject:
        return None
    fortran = value.flags.fnc and BY_NAME[name].numpy is not None
    plain = numpy.ascontiguousarray(value.T if fortran else value)
    if not value.dtype.isnative:
        plain = plain.astype(value.dtype.newbyteorder("="))
    data = plain.reshape(-1).view(numpy.uint8).data
    extent = Range(Memory(data, _NAME), 0, len(data))
    shape = tuple(map(int, value.shape))
    if BY_NAME[name].numpy is None:  # bfloat16 and its like: to torch they are tensors
        return Tensor(Storage(extent), BY_NAME[name], shape, contiguous_stride(shape))
    return _reconstructed(numpy.empty(0, plain.dtype), shape, extent, fortran)


def _reconstructed(empty: Any, shape: tuple[int, ...], extent: Range, fortran: bool) -> Object:
    """Return the calls by which numpy pickles an array, with other elements than `empty` has."""
    import pickle

    made = unpickle(Memory(pickle.dumps(empty, _PROTOCOL), _NAME)).root
    assert isinstance(made, Object)
    version, _, dtype, _, _ = made.state
    state = (version, shape, dtype, fortran, StoredBytes(extent))
    made.steps[-1] = ("build", state)
    ndarray.built(made, state)
    return made
