"""The parts of a checkpoint that a weights-only format leaves out, and those it keeps as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsafeGlobalError, UnsupportedError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import and_more, plural, shown, some, typed_value
from ckptkit.core.tree import (
    Global,
    Node,
    Object,
    Path,
    children,
    join,
    type_name,
    walk,
)
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.formats.common.plain_json import encode, is_plain, is_utf8
from ckptkit.pickles.trust import refused_by_weights_only

_EXTRA_STATE = "_extra_state"
_PLAIN = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))
_NO_STATE: tuple[Node, ...] = (
    None,
    {},
    {"_has_been_cloned": True},
)  # the last marks what FSDP1 gathered


def leftovers(checkpoint: Checkpoint, *, inside: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Return plain values outside the weights, as JSON by path, and a line for each other entry.

    `inside`: the same for entries of the weights that are not tensors.
    """
    weights = checkpoint.required
    values: dict[str, Any] = {}
    left: list[str] = []
    states = 0
    for path, node in _outside_weights(checkpoint.root, weights, inside):
        if str(path[-1]).endswith(_EXTRA_STATE):
            states += 1
        elif is_plain(node) and is_utf8(join(path)):
            values[join(path)] = encode(node)
        else:
            left.append(f"left out: {join(path) or '(no name)'} ({_size(node)})")
    if states:
        left.append(f"left out: {states:,} entries of the weights called {_EXTRA_STATE}")
    left += _more_than_elements(weights)
    if isinstance(weights.node, Object):
        left.append(
            f"left out: the module itself ({type_name(weights.node)}); written as its state_dict"
        )
        left += weights.module.unread if weights.module is not None else ()
    return values, left


def _more_than_elements(weights: Weights) -> Iterator[str]:
    """Describe tensors with a Python class or attributes: only their elements can be kept."""
    names = [
        name for name, node in weights.nodes.items() if isinstance(node, Object) and _has_more(node)
    ]
    if names:
        named = some(map(shown, names))
        yield f"left out: the Python class or attributes of tensors: {named}"


def _has_more(node: Object) -> bool:
    """Return whether a tensor carries more than its elements.

    It does if made by ``_rebuild_from_type_v2(function, class, arguments, state)`` with a class
    that is not torch's or with state, or by ``_rebuild_parameter_with_state(tensor, requires_grad,
    hooks, state)``.
    """
    made, args = node.global_, node.args
    if made is None or not isinstance(args, tuple) or len(args) != 4:
        return False
    if made.name == "_rebuild_parameter_with_state":
        return bool(args[3])
    return made.name == "_rebuild_from_type_v2" and (
        args[3] not in _NO_STATE or args[1] not in _PLAIN
    )


def refuse_objects(checkpoint: Checkpoint) -> None:
    """Raise UnsafeGlobalError for the first Python object that is not a tensor or plain value."""
    for path, node in walk(checkpoint.root):
        if not isinstance(node, Object) or node.tensor is not None or node.value is not None:
            continue
        if node.global_ is None or refused_by_weights_only(node.global_):
            place = join(path) or "the root"
            raise UnsafeGlobalError(
                f"{place} is an object ({type_name(node)}) and would be left out",
                hint=f"{typed_value('objects', 'drop')} leaves such values out",
            )


def refuse_pieces(nodes: Mapping[str, Node]) -> None:
    """Raise UnsupportedError for tensors of which each rank saved a piece: in one file there is but
    one of these."""
    made = [(name, node) for name, node in nodes.items() if isinstance(node, Object)]
    if not made:
        return
    from ckptkit.core.piece_forms import is_piece  # most files have none

    names = [name for name, node in made if is_piece(node)]
    if names:
        more = and_more(len(names) - 1)
        raise UnsupportedError(
            f"of {names[0][:80]!r}{more} the file holds the piece of one rank, as DTensor or "
            "ShardedTensor",
            hint="name the folder with the files of all ranks instead",
        )


def shared_bytes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a note on tensors that share bytes, which a format without views writes for each."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault(id(tensor.storage), []).append(tensor)
    count = 0
    for sharing in by_storage.values():
        reached = 0
        for start, length in (
            sorted(tensor.extent for tensor in sharing) if len(sharing) > 1 else ()
        ):
            count += start < reached
            reached = max(reached, start + length)
    return (
        [f"tensors that share memory with others: {count:,}; their bytes are written for each"]
        if count
        else []
    )


def _outside_weights(root: Node, weights: Weights, inside: bool) -> Iterator[tuple[Path, Node]]:
    """Yield the outermost nodes that do not belong to the weights."""
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
        yield from (
            ((*weights.path, key), child)
            for key, child in children(node)
            if key not in weights.nodes
        )


def _size(node: Node) -> str:
    tensors = {
        id(tensor): tensor for _, each in walk(node) if (tensor := as_tensor(each)) is not None
    }
    if not tensors:
        return type_name(node)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return f"{plural(len(tensors), 'tensor')}, {nbytes:,} bytes"
