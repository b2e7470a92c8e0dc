"""Take one entry out of a checkpoint, or put a checkpoint under a name: the way there and the way back."""

from __future__ import annotations

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import UsageError
from ckptkit.tensor import Tensor
from ckptkit.tree import LEAVES, Path, find, join


def extract(ck: Checkpoint, key: str) -> Checkpoint:
    """The entry at the dotted path `key` as a checkpoint of its own. Raises UsageError if it is not there."""
    path, node = find(ck.root, key)
    if isinstance(node, LEAVES) and not isinstance(node, Tensor):
        raise UsageError(
            f"the entry {key!r} is a single {type(node).__name__}, not a checkpoint",
            where=ck.name,
            hint="name a mapping, a list or a tensor; `ckptkit inspect` shows single values",
        )
    inner = _key_below(ck, path)
    return ck.with_key(inner).with_root(node, notes=[f"extracted {key!r}"])


def _key_below(ck: Checkpoint, path: Path) -> str | None:
    """What names the weights once the entry at `path` is the root, None if nothing did or they lie elsewhere."""
    if ck.key is None:
        return None
    weights, _ = find(ck.root, ck.key)
    inside = len(weights) >= len(path) and join(weights[: len(path)]) == join(path)
    return join(weights[len(path) :]) if inside else None


def wrap(ck: Checkpoint, key: str) -> Checkpoint:
    """``{key: root}``: `key` is one plain key, dots and all. Raises UsageError if it is empty."""
    if not key:
        raise UsageError("an entry needs a name", hint="e.g. --key state_dict")
    inner = ck.key if ck.key is None else f"{key}.{ck.key}" if ck.key else key
    return ck.with_key(inner).with_root({key: ck.root}, notes=[f"wrapped as {key!r}"])
