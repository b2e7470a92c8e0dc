"""What a format of weights alone leaves out of a checkpoint, and what of it is plain enough to be kept as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import UnsafeGlobalError
from ckptkit.formats.plain_json import encode, is_plain
from ckptkit.tensor import Tensor, TypedStorage
from ckptkit.tree import Blob, ByteString, Global, Node, Object, Pairs, Path, SetNode, children, join, walk
from ckptkit.trust import refused_by_weights_only
from ckptkit.weights import Weights, as_tensor

_EXTRA_STATE = "_extra_state"
_KINDS = {SetNode: "set", Pairs: "dict", Blob: "bytes", ByteString: "str", TypedStorage: "storage"}


def leftovers(checkpoint: Checkpoint, *, inside: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Plain values beside the weights, as JSON by dotted path, and a line for each other entry that stays behind.

    `inside`: the same for entries of the weights that are no tensors.
    """
    weights = checkpoint.required
    values: dict[str, Any] = {}
    left: list[str] = []
    states = 0
    for path, node in _beside(checkpoint.root, weights, inside):
        if str(path[-1]).endswith(_EXTRA_STATE):
            states += 1
        elif is_plain(node):
            values[join(path)] = encode(node)
        else:
            left.append(f"left out: {join(path) or '(no name)'} ({_size(node)})")
    if states:
        left.append(f"left out: {states:,} entries of the weights called {_EXTRA_STATE}")
    if isinstance(weights.node, Object):
        left.append(f"left out: the module itself ({_kind(weights.node)}); written as its state_dict")
        left += weights.module.unread if weights.module is not None else ()
    return values, left


def refuse_objects(checkpoint: Checkpoint) -> None:
    """Raise UnsafeGlobalError for the first value that only its own code could make."""
    for path, node in walk(checkpoint.root):
        if not isinstance(node, Object) or node.tensor is not None or node.value is not None:
            continue
        if node.global_ is None or refused_by_weights_only(node.global_):
            raise UnsafeGlobalError(
                f"{join(path) or 'the root'} is an object ({_kind(node)}) and would be left out",
                hint="--objects drop leaves such values out",
            )


def shared_bytes(tensors: Mapping[str, Tensor]) -> list[str]:
    """A note on tensors that share bytes, which a format without views writes for each."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault(id(tensor.storage), []).append(tensor)
    count = 0
    for sharing in by_storage.values():
        reached = 0
        for start, length in sorted(tensor.extent for tensor in sharing) if len(sharing) > 1 else ():
            count += start < reached
            reached = max(reached, start + length)
    return [f"tensors that share memory with others: {count:,}; their bytes are written for each"] if count else []


def _beside(root: Node, weights: Weights, inside: bool) -> Iterator[tuple[Path, Node]]:
    """The outermost nodes that do not belong to the weights."""
    node = root
    for depth, key in enumerate(weights.path):
        inner = None
        for other, child in children(node):
            if inner is None and other == key:
                inner = child
            else:
                yield (*weights.path[:depth], other), child
        node = inner
    if inside and not weights.is_module:
        yield from (((*weights.path, key), child) for key, child in children(node) if key not in weights.nodes)


def _size(node: Node) -> str:
    tensors = {id(tensor): tensor for _, each in walk(node) if (tensor := as_tensor(each)) is not None}
    if not tensors:
        return _kind(node)
    plural = "" if len(tensors) == 1 else "s"
    return f"{len(tensors):,} tensor{plural}, {sum(tensor.nbytes for tensor in tensors.values()):,} bytes"


def _kind(node: Node) -> str:
    if isinstance(node, Object):
        return str(node.global_ or "object")
    return str(node) if isinstance(node, Global) else _KINDS.get(type(node), type(node).__name__)
