"""Convert Python values of this process to the nodes that ckptkit would read from a saved file.

This module pickles the values like ``torch.save``, and then reads the pickle with
`ckptkit.pickles.values`. The pickle does not contain the bytes of tensors and arrays. Instead, the
pickle contains a number as the persistent id of each tensor or array. Tensors and other nodes of a
Checkpoint are used unchanged.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from typing import Any

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import ArgumentError, CkptkitError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.tree import (
    PLAIN_TYPES,
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    held,
    nodes,
)
from ckptkit.pickles import ndarray
from ckptkit.pickles.values import unpickle

_NODES = (
    Tensor, TypedStorage, Object, Global, SetNode, Pairs, ByteString, StoredBytes,
)  # fmt: skip
_PROTOCOL = 2  # the protocol of torch.save
_NAME = "<memory>"
_HINT = (
    "ckptkit saves plain values, containers, torch tensors and numpy arrays; for another object, "
    "save object.state_dict() or vars(object)"
)


def checkpoint(value: object) -> Checkpoint:
    """Return a Checkpoint with the content of a Python value."""
    root = node(value)
    names = (each for each in nodes(root) if isinstance(each, Global))
    return Checkpoint(root, globals=tuple(dict.fromkeys(names)))


def node(value: object) -> Node:
    """Convert a Python value to a node. Raises ArgumentError if the value cannot be pickled."""
    import pickle

    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    numbered: list[Node] = []
    # Maps the id of each array to the array and its node. The dict keeps the array alive, because
    # Python could reuse the id of a deleted array.
    arrays: dict[int, tuple[Any, Node]] = {}
    storages: dict[int, Storage] = {}

    def unpickled_node(item: Any) -> Node | None:
        """Convert a node, Checkpoint, storage or array. Return None for other values."""
        if isinstance(item, _NODES):
            return item
        if isinstance(item, Checkpoint):
            return item.root
        if torch is not None and torch.is_storage(item):
            return _typed_storage(torch, item, storages)
        if numpy is None or type(item) not in (numpy.ndarray, numpy.memmap):
            return None
        if id(item) not in arrays:
            arrays[id(item)] = item, _array(numpy, item)
        return arrays[id(item)][1]

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            found = None if item.__class__ in PLAIN_TYPES else unpickled_node(item)
            if found is None:
                return None
            numbered.append(found)
            return len(numbered) - 1

        def reducer_override(self, item: Any) -> Any:
            if type(item) is OrderedMapping:
                return OrderedDict, (), item.state, None, iter(item.items())
            return NotImplemented

    known = unpickled_node(value)
    if known is not None:
        return known
    data = io.BytesIO()
    try:
        Pickler(data, _PROTOCOL).dump(value)
    except CkptkitError:
        raise
    except Exception as error:  # the __reduce__ of a class may raise anything
        raise ArgumentError(f"cannot be saved: {error}", hint=_HINT) from error
    pickled = Memory(data.getvalue(), _NAME)
    root = unpickle(pickled, persistent_load=numbered.__getitem__).root
    _check_objects(root, set(map(id, numbered)))
    return root


def _check_objects(root: Node, given: set[int]) -> None:
    """Raise ArgumentError if an object of an unknown class contains tensors.

    Do not check the nodes whose ids are in `given`: storages, arrays, and nodes that the caller
    passed.
    """
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if each.__class__ in PLAIN_TYPES or id(each) in given:
            continue
        given.add(id(each))
        waiting += held(each)
        own = isinstance(each, Object) and each.tensor is None
        if not own or str(each.callable) == "collections.defaultdict":
            continue
        if any(isinstance(inner, (Tensor, TypedStorage)) for inner in nodes(each)):
            message = f"cannot save an object of class {each.callable}, because it contains tensors"
            raise ArgumentError(message, hint=_HINT)


def _typed_storage(torch: Any, value: Any, known: dict[int, Storage]) -> TypedStorage:
    """Convert a torch storage. Return the same Storage object for storages that share memory."""
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
    """Convert a NumPy array. Return None for an element type that ckptkit does not support."""
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
    if BY_NAME[name].numpy is None:  # types of ml_dtypes such as bfloat16 become tensors
        return Tensor(Storage(extent), BY_NAME[name], shape, contiguous_stride(shape))
    return _reconstructed(numpy.empty(0, plain.dtype), shape, extent, fortran)


def _reconstructed(empty: Any, shape: tuple[int, ...], extent: Range, fortran: bool) -> Object:
    """Return the Object of a NumPy array with the given shape and bytes.

    NumPy pickles `empty`, an empty array of the same dtype. This function then replaces the shape
    and the bytes.
    """
    import pickle

    made = unpickle(Memory(pickle.dumps(empty, _PROTOCOL), _NAME)).root
    assert isinstance(made, Object)
    version, _, dtype, _, _ = made.state
    state = (version, shape, dtype, fortran, StoredBytes(extent))
    made.steps[-1] = ("build", state)
    ndarray.built(made, state)
    return made
