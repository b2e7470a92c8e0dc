"""Take one entry out of a checkpoint, or put a checkpoint under a name: each undoes the other."""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import (
    LEAVES,
    Node,
    OrderedMapping,
    Path,
    children,
    find,
    join,
    rebuild,
    type_name,
)
from ckptkit.core.weights import plain_state_dict


def extract(ck: Checkpoint, key: str) -> Checkpoint:
    """Return the entry at the dotted path `key` as a checkpoint of its own.

    Raises UsageError if it is not there.
    """
    path, node = find(ck.whole().root, key)
    if isinstance(node, LEAVES) and not isinstance(node, Tensor):
        raise UsageError(
            f"the entry {key!r} is a single {type_name(node)}, not a checkpoint",
            where=ck.name,
            hint="name a mapping, a list or a tensor; `ckptkit inspect` shows single values",
        )
    inner = _key_below(ck, path)
    return ck.with_key(inner).with_root(node, notes=[f"extracted {key!r}"])


def _key_below(ck: Checkpoint, path: Path) -> str | None:
    """Return the key of the weights once the entry at `path` is the root, None if there is none."""
    if ck.key is None:
        return None
    weights, _ = find(ck.root, ck.key)
    inside = len(weights) >= len(path) and join(weights[: len(path)]) == join(path)
    return join(weights[len(path) :]) if inside else None


def drop(ck: Checkpoint, key: str) -> Checkpoint:
    """The checkpoint without the entry at the dotted path `key`; as it is if there is none.

    Raises UsageError for an entry of what is no mapping.
    """
    try:
        path, _ = find(ck.root, key)
    except UsageError:
        return ck.with_root(ck.root, warnings=[f"there is no entry {key!r} to leave out"])
    holder = ck.root
    for part in path[:-1]:
        holder = dict(children(holder))[part]
    if not path or not isinstance(holder, dict):
        raise UsageError(f"the entry {key!r} is not in a mapping, and cannot be left out")
    entries = {name: value for name, value in holder.items() if name != path[-1]}
    new = OrderedMapping(entries, holder.state) if isinstance(holder, OrderedMapping) else entries
    return ck.with_root(rebuild(ck.root, swap={id(holder): new}), notes=[f"left out {key!r}"])


def bare(ck: Checkpoint) -> Checkpoint:
    """Return the weights as a checkpoint of their own; of a pickled module, its state_dict.

    Raises UsageError without any.
    """
    weights = ck.whole().required
    others = len(ck.root) - 1 if weights.path and isinstance(ck.root, dict) else 0
    note = (
        f"took the weights out of {join(weights.path)!r}"
        if weights.path
        else "took the weights alone"
    )
    if others:
        note += f", leaving {others:,} other {'entry' if others == 1 else 'entries'}"
    notes = [note]
    if weights.module is not None:
        notes += [
            f"the pickled module ({weights.node.global_}) is now its plain state_dict",
            *weights.module.unread,
        ]
    node = plain_state_dict(weights.nodes) if weights.is_module else weights.node
    return ck.with_key(None).with_root(node, notes=notes)


def wrap(ck: Checkpoint, key: str, beside: Mapping[str, Node] | None = None) -> Checkpoint:
    """Return ``{key: root, **beside}``: `key` is one plain key, dots and all.

    Raises UsageError if it is empty, or is one of `beside`.
    """
    if not key:
        raise UsageError("an entry needs a name", hint="e.g. --key state_dict")
    others = dict(beside or {})
    if key in others:
        raise UsageError(f"{key!r} cannot be the checkpoint and a value beside it")
    inner = ck.key
    if inner is not None:
        inner = f"{key}.{inner}" if inner else key
    note = f"wrapped as {key!r}" + (f" beside {', '.join(map(repr, others))}" if others else "")
    return ck.with_key(inner).with_root({key: ck.root, **others}, notes=[note])
