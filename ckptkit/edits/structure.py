"""Take one entry out of a checkpoint, or put a checkpoint under a name: each undoes the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, NoOpWarning, edit
from ckptkit.core.errors import UnknownNameError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import quoted, some, typed_value
from ckptkit.core.tree import (
    LEAVES,
    Node,
    Path,
    children,
    find,
    join,
    key_text,
    like,
    rebuild,
    type_name,
)
from ckptkit.core.weights import plain_state_dict
from ckptkit.pickles import from_python

OWN_RECORD = "ckptkit"  # in the metadata of safetensors: formats/record.py


@edit
def extract(ck: Checkpoint, key: str | Sequence[str]) -> Checkpoint:
    """Return the entry at the dotted path `key` as its own checkpoint.

    For several paths, return the first that exists. Raises UsageError if none exists.
    """
    root, found = ck.require_complete().root, None
    for each in key:
        try:
            found, key = find(root, each), each
            break
        except UsageError:
            if len(key) == 1:
                raise
    if found is None:
        raise UsageError(
            f"has no entry {' or '.join(key)}",
            where=ck.name,
            hint="`ckptkit inspect --tree {where}` shows its entries",
        )
    path, node = found
    if isinstance(node, LEAVES) and not isinstance(node, Tensor):
        raise UsageError(
            f"the entry {key!r} is a single {type_name(node)}, not a checkpoint",
            where=ck.name,
            hint="name a mapping, a list or a tensor; `ckptkit inspect {where}` shows values",
        )
    # The key of the weights once the entry is the root; there is none if they are outside of it.
    inner = None
    if ck.key is not None:
        weights, _ = find(ck.root, ck.key)
        if len(weights) >= len(path) and join(weights[: len(path)]) == join(path):
            inner = join(weights[len(path) :])
    others = [each for each, _ in children(ck.root) if path and each is not path[0]]
    leaving = f", leaving {some(map(key_text, others))}" if others else ""
    return ck.with_key(inner).with_root(node, notes=[f"extracted {key!r}{leaving}"])


def with_value(ck: Checkpoint, path: str, value: object) -> Checkpoint:
    """Return the checkpoint with `value` at the dotted `path`: another one there, or a new entry.

    A new entry goes into the deepest mapping that the path leads through. Raises UsageError where
    it leads through something else, ArgumentError for a value that no file can hold.
    """
    new = from_python.node(value)
    holder, key, is_new = _place(ck, arguments.text("path", path))
    if isinstance(holder, list):
        changed: Node = [new if number == key else each for number, each in enumerate(holder)]
    elif isinstance(holder, dict):
        changed = like(holder, {**holder, key: new})
    else:
        raise UsageError(f"the entry {path!r} is not in a mapping or list, and cannot be set")
    note = f"{'added' if is_new else 'set'} {path!r}"
    return ck.with_root(rebuild(ck.root, swap={id(holder): changed}), notes=[note])


def _place(ck: Checkpoint, path: str) -> tuple[Node, Node, bool]:
    """Return what holds the entry at `path`, the entry's key there, and whether it is new."""
    if not path:
        raise UsageError("an entry needs a name")
    try:
        found, _ = find(ck.root, path)
    except UnknownNameError:
        pass
    else:
        return _holder(ck.root, found), found[-1], False
    parts = path.split(".")
    for cut in range(len(parts) - 1, -1, -1):
        try:
            _, holder = find(ck.root, ".".join(parts[:cut]))
        except UnknownNameError:
            continue
        if isinstance(holder, dict):
            return holder, ".".join(parts[cut:]), True
    raise UsageError(f"the entry {path!r} is not in a mapping, and cannot be added")


def _holder(root: Node, path: Path) -> Node:
    """Return the node that holds the node at `path`."""
    for part in path[:-1]:
        root = dict(children(root))[part]
    return root


@edit
def drop_entry(ck: Checkpoint, paths: str | Sequence[str], missing_ok: bool = False) -> Checkpoint:
    """Return the checkpoint without the entries at the dotted `paths`.

    Raises UnknownNameError if there is no such entry, unless `missing_ok` allows that; UsageError
    for an entry of what is not a mapping.
    """
    for key in paths:
        try:
            path, _ = find(ck.root, key)
        except UsageError:
            if not missing_ok:
                raise
            missing = NoOpWarning(f"there is no entry {key!r} to leave out")
            ck = ck.with_root(ck.root, warnings=[missing])
            continue
        holder = _holder(ck.root, path)
        if not path or not isinstance(holder, dict):
            raise UsageError(f"the entry {key!r} is not in a mapping, and cannot be left out")
        entries = {name: value for name, value in holder.items() if name != path[-1]}
        swap = {id(holder): like(holder, entries)}
        ck = ck.with_root(rebuild(ck.root, swap=swap), notes=[f"left out {key!r}"])
    return ck


@edit
def with_extras(ck: Checkpoint, metadata: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with the strings `metadata` in its `extras`, which safetensors keep.

    Raises UsageError for a name that ckptkit itself uses there.
    """
    if OWN_RECORD in metadata:
        raise UsageError(f"the metadata entry {OWN_RECORD!r} is ckptkit's own record")
    note = f"set the metadata of {quoted(metadata)}"
    return replace(ck, extras={**ck.extras, **metadata}, notes=(*ck.notes, note))


@edit
def bare(ck: Checkpoint) -> Checkpoint:
    """Return the weights as a checkpoint of their own; of a pickled module, its state_dict.

    Raises UsageError without any.
    """
    weights = ck.require_complete().required
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


@edit
def wrap(ck: Checkpoint, key: str, beside: Mapping[str, object] | None = None) -> Checkpoint:
    """Return ``{key: root, **beside}``. `key` is one plain key; dots are part of it.

    Raises UsageError if it is empty, or is one of `beside`.
    """
    if not key:
        raise UsageError("an entry needs a name", hint=f"e.g. {typed_value('key', 'state_dict')}")
    others = {name: from_python.node(value) for name, value in (beside or {}).items()}
    if key in others:
        raise UsageError(f"{key!r} cannot be the checkpoint and a value beside it")
    inner = ck.key
    if inner is not None:
        inner = f"{key}.{inner}" if inner else key
    note = f"wrapped as {key!r}" + (f" beside {', '.join(map(repr, others))}" if others else "")
    return ck.with_key(inner).with_root({key: ck.root, **others}, notes=[note])
