"""Removal of values of a tree, of those above all that `torch.load(weights_only=True)` refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import NoneType

from ckptkit.core.errors import UsageError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import plural, some
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Path,
    SetNode,
    StoredBytes,
    children,
    held,
    join,
    nodes,
    rebuild,
    walk,
)
from ckptkit.core.weights import as_tensor
from ckptkit.pickles.streams import holds_calls
from ckptkit.pickles.trust import describe, is_harmful, refused_by_weights_only

SHOWN = 8  # names in a note
TEXTS = (str, bytes, bytearray, ByteString, StoredBytes)
_JUDGED = (
    *(Object, Global, SetNode, Tensor, TypedStorage),
    *(str, bytes, bytearray, ByteString, StoredBytes),
)


def without(root: Node, gone: Callable[[Node], bool]) -> tuple[Node, list[tuple[Path, Node]]]:
    """Return the tree without the values that `gone` selects, and these with their paths.

    Objects, names, sets, tensors, storages, texts and byte strings are judged, each as a whole. An
    entry of a mapping goes with its key; elsewhere None takes the place, so that the others keep
    theirs.
    """
    dropped, holders = _find(root, gone)
    if not dropped:
        return root, []
    ids = {id(node) for _, node in dropped}
    if id(root) in ids:
        return None, dropped
    swap: dict[int, Node] = dict.fromkeys(ids)
    for holder in holders:
        if any(id(each) in ids for each in held(holder)):
            swap[id(holder)] = _without(holder, ids)
    return rebuild(root, lambda leaf: None if id(leaf) in ids else leaf, swap), dropped


def _find(root: Node, gone: Callable[[Node], bool]) -> tuple[list[tuple[Path, Node]], list[Node]]:
    """Return the keys and values to leave out, with their paths, and the containers that remain."""
    dropped: list[tuple[Path, Node]] = []
    holders: list[Node] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        check("depth", len(path), "levels of values")
        if isinstance(node, (dict, list, tuple)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            holders.append(node)
            if isinstance(node, dict):
                dropped += [((*path, key), key) for key in node if gone(key)]
            waiting.extend([((*path, key), child) for key, child in _inside(node)][::-1])
        elif isinstance(node, _JUDGED) and gone(node):
            dropped.append((path, node))
    return dropped, holders


def _without(holder: Node, gone: set[int]) -> Node:
    """Return a container without what it holds directly of these."""
    if not isinstance(holder, dict):
        return type(holder)(None if id(each) in gone else each for each in holder)
    kept = {
        key: value for key, value in holder.items() if id(key) not in gone and id(value) not in gone
    }
    return OrderedMapping(kept, holder.state) if isinstance(holder, OrderedMapping) else kept


def _inside(node: Node) -> Iterable[tuple[Node, Node]]:
    yield from children(node)
    if isinstance(node, OrderedMapping) and node.state is not None:
        yield "(attributes)", node.state


def without_objects(root: Node, *, may_be_empty: bool = False) -> tuple[Node, tuple[str, ...]]:
    """Return the tree without its opaque values and without files with calls; notes name them.

    An object that weights_only accepts goes all the same if it holds one that it refuses. Raises
    UsageError where no tensor is left of those that there were, or nothing at all, unless it
    `may_be_empty`.
    """
    pruned, dropped = without(root, _is_refused)
    if not dropped:
        return root, ()
    if not may_be_empty and not _has_more(pruned, tensors=any(map(_is_tensor, nodes(root)))):
        held = join(dropped[0][0]) or "the root"
        raise UsageError(
            f"without its Python objects nothing is left of it: {held} is a {_name(dropped[0][1])}",
            hint="`ckptkit inspect {where}` shows what it contains; the format safetensors takes "
            "its weights alone, if it has any",
        )
    files = [each for each in dropped if isinstance(each[1], TEXTS)]
    objects = [each for each in dropped if not isinstance(each[1], TEXTS)]
    return pruned, (
        *_left_out(objects, "value", "that weights_only refuses"),
        *_left_out(files, "byte string", "that would be a file with calls in it"),
    )


def _left_out(dropped: list[tuple[Path, Node]], what: str, why: str) -> Iterator[str]:
    """Yield the note that names values that are left out, if there are any."""
    if dropped:
        named = [f"{join(path) or '(root)'} ({_name(node)})" for path, node in dropped]
        yield f"left out {plural(len(named), what)} {why}: {some(named, SHOWN)}"


def _has_more(root: Node, tensors: bool) -> bool:
    """Return whether any tensor is in the tree, or any value where it need not be a tensor."""
    if tensors:
        return any(map(_is_tensor, nodes(root)))
    containers = (dict, list, tuple, NoneType)
    return any(not isinstance(node, containers) for _, node in walk(root))


def _is_tensor(node: Node) -> bool:
    return as_tensor(node) is not None or isinstance(node, TypedStorage)


def _is_refused(node: Node) -> bool:
    """Return whether weights_only refuses a name or call anywhere in what makes the value, or a
    byte string in it is a file with calls."""
    return holds_calls(node) or any(map(_is_refused_part, nodes(node)))


def _is_refused_part(node: Node) -> bool:
    if isinstance(node, Object) and is_harmful(node):
        return True
    if isinstance(node, Global):
        return refused_by_weights_only(node)
    if isinstance(node, SetNode) and node.frozen:
        return True
    return not isinstance(node, Tensor) and any(map(holds_calls, held(node)))


def _name(node: Node) -> str:
    if isinstance(node, SetNode):
        return "frozenset"
    if isinstance(node, TEXTS):
        return "byte string"
    return describe(node.callable) if isinstance(node, Object) else str(node)
