"""Leaves out of a tree what `torch.load(weights_only=True)` would refuse."""

from __future__ import annotations

from ckptkit.core.text import plural, some
from ckptkit.core.tree import Global, Node, Object, SetNode, join
from ckptkit.pickles.pruning import parts, without
from ckptkit.pickles.trust import describe, is_harmful, refused_by_weights_only

SHOWN = 8  # names in a note


def without_objects(root: Node) -> tuple[Node, tuple[str, ...]]:
    """The tree without its opaque values, and a note that names them.

    An object that weights_only accepts goes all the same if it holds one that it refuses.
    """
    pruned, dropped = without(root, _is_refused)
    if not dropped:
        return root, ()
    named = [f"{join(path) or '(root)'} ({_name(node)})" for path, node in dropped]
    return pruned, (f"left out {plural(len(named), 'value')} that weights_only refuses: {some(named, SHOWN)}",)


def _is_refused(node: Node) -> bool:
    """Whether the value names or calls, anywhere in what makes it, something that weights_only refuses."""
    return any(map(_is_refused_part, parts(node)))


def _is_refused_part(node: Node) -> bool:
    if isinstance(node, Object):
        return is_harmful(node)
    return refused_by_weights_only(node) if isinstance(node, Global) else isinstance(node, SetNode) and node.frozen


def _name(node: Node) -> str:
    if isinstance(node, SetNode):
        return "frozenset"
    return describe(node.callable) if isinstance(node, Object) else str(node)
