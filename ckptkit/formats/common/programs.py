"""What becomes of a program whose weights are written elsewhere: it stays behind, its state_dict
takes its place."""

from __future__ import annotations

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tree import Node, Object, Path, children, join, rebuild, walk
from ckptkit.core.weights import as_tensor, plain_state_dict


def without_program(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the weights where the outermost object was that holds them.

    Raises UsageError if it has none.
    """
    weights = checkpoint.required
    path, holder = _holder(checkpoint.root, weights.path)
    if holder is None:
        return checkpoint
    root = rebuild(checkpoint.root, swap={id(holder): plain_state_dict(weights.nodes)})
    return checkpoint.with_root(root).with_key(None if checkpoint.key is None else join(path))


def notes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """What there is to say about the difference between the two."""
    if after is before:
        return ["left out: the program"]
    lost = _quantized(before.root) - _quantized(after.root)
    packed = (
        [f"left out: {len(lost):,} packed quantized tensors; --dequantize makes weights of them"]
        if lost
        else []
    )
    return ["left out: the program, and what it has besides its state_dict", *packed]


def _quantized(root: Node) -> set[int]:
    """The ids of the storages of quantised tensors."""
    tensors = (as_tensor(node) for _, node in walk(root))
    return {
        id(each.storage) for each in tensors if each is not None and each.dtype.kind == "quantized"
    }


def _holder(root: Node, path: Path) -> tuple[Path, Object | None]:
    """The first object on the way from the root to `path`, and where it is."""
    node = root
    for depth, key in enumerate(path):
        if isinstance(node, Object):
            return path[:depth], node
        node = next(child for other, child in children(node) if other == key)
    return path, node if isinstance(node, Object) else None
