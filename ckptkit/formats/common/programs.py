"""Write the weights of a program elsewhere: its state_dict replaces it, the program is left out."""

from __future__ import annotations

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.text import typed
from ckptkit.core.tree import Node, Object, Path, children, join, rebuild, walk
from ckptkit.core.weights import as_tensor, plain_state_dict


def without_program(checkpoint: Checkpoint) -> Checkpoint:
    """Replace the outermost object that holds the weights by its state_dict.

    Raises UsageError if the checkpoint has no weights, or has them in packed layers alone.
    """
    selection = checkpoint.selection
    if selection is not None and not selection.hold_tensors and _quantized(checkpoint.root):
        raise UsageError(
            "its weights are packed in quantized layers", where=checkpoint.name, hint=_unpacked()
        )
    weights = checkpoint.required
    path, holder = _holder(checkpoint.root, weights.path)
    if holder is None:
        return checkpoint
    root = rebuild(checkpoint.root, swap={id(holder): plain_state_dict(weights.nodes)})
    return checkpoint.with_root(root).with_key(None if checkpoint.key is None else join(path))


def notes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """Return the notes on what `after` lacks of `before`."""
    if after is before:
        return ["left out: the program"]
    lost = _quantized(before.root) - _quantized(after.root)
    packed = [f"left out: {len(lost):,} packed quantized tensors; {_unpacked()}"] if lost else []
    return ["left out: the program, and everything in it but its state_dict", *packed]


def _unpacked() -> str:
    return f"{typed('--dequantize', 'dequantize')} converts them to weights"


def _quantized(root: Node) -> set[int]:
    """Return the ids of the storages of quantized tensors."""
    tensors = (as_tensor(node) for _, node in walk(root))
    return {
        id(each.storage) for each in tensors if each is not None and each.dtype.kind == "quantized"
    }


def _holder(root: Node, path: Path) -> tuple[Path, Object | None]:
    """Return the first object on the way from the root to `path`, and its path."""
    node = root
    for depth, key in enumerate(path):
        if isinstance(node, Object):
            return path[:depth], node
        node = next(child for other, child in children(node) if other == key)
    return path, node if isinstance(node, Object) else None
