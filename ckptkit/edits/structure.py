"""Extract an entry of a checkpoint, drop or set entries, or wrap a checkpoint in a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, edit
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

OWN_RECORD = "ckptkit"  # reserved key in safetensors metadata, see formats/record.py


@edit
def extract(ck: Checkpoint, key: str | Sequence[str]) -> Checkpoint:
    """Return the entry at the dotted path `key` as a separate checkpoint.

    If `key` lists several paths, `extract` returns the entry of the first path that exists. Raises
    UsageError if no path exists.
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
            hint="use the path of a dict, list or tensor; `ckptkit inspect {where}` shows values",
        )
    # The key of the weights, relative to the new root. If the weights are outside the new root, the
    # key is None.
    inner = None
    if ck.key is not None:
        weights, _ = find(ck.root, ck.key)
        if len(weights) >= len(path) and join(weights[: len(path)]) == join(path):
            inner = join(weights[len(path) :])
    others = [each for each, _ in children(ck.root) if path and each is not path[0]]
    dropped = f"; dropped {some(map(key_text, others))}" if others else ""
    return ck.with_key(inner).with_root(node, notes=[f"extracted {key!r}{dropped}"])


def with_value(ck: Checkpoint, path: str, value: object) -> Checkpoint:
    """Set the entry at the dotted `path` to `value`, or add a new entry.

    A new entry is added to the deepest existing dict on the path. Raises UsageError if the parent
    of the entry is not a dict or list. Raises ArgumentError for a value that no file can store.
    """
    new = from_python.node(value)
    holder, key, is_new = _place(ck, arguments.text("path", path))
    if isinstance(holder, list):
        changed: Node = [new if number == key else each for number, each in enumerate(holder)]
    elif isinstance(holder, dict):
        changed = like(holder, {**holder, key: new})
    else:
        raise UsageError(f"cannot set the entry {path!r}: its parent is not a dict or list")
    note = f"{'added' if is_new else 'set'} {path!r}"
    return ck.with_root(rebuild(ck.root, swap={id(holder): changed}), notes=[note])


def _place(ck: Checkpoint, path: str) -> tuple[Node, Node, bool]:
    """Return (parent of the entry at `path`, key of the entry, True if the entry is new)."""
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
    raise UsageError(f"cannot add the entry {path!r}: its parent is not a dict")


def _holder(root: Node, path: Path) -> Node:
    """Return the parent of the node at `path`."""
    for part in path[:-1]:
        root = dict(children(root))[part]
    return root


@edit
def drop_entry(ck: Checkpoint, paths: str | Sequence[str], missing_ok: bool = False) -> Checkpoint:
    """Drop the entries at the dotted `paths`.

    Raises UnknownNameError if an entry does not exist, unless `missing_ok`. Raises UsageError if
    the parent of an entry is not a dict.
    """
    for key in paths:
        try:
            path, _ = find(ck.root, key)
        except UsageError:
            if not missing_ok:
                raise
            ck = ck.unchanged(f"there is no entry {key!r} to drop")
            continue
        holder = _holder(ck.root, path)
        if not path or not isinstance(holder, dict):
            raise UsageError(f"cannot drop the entry {key!r}: its parent is not a dict")
        entries = {name: value for name, value in holder.items() if name != path[-1]}
        swap = {id(holder): like(holder, entries)}
        ck = ck.with_root(rebuild(ck.root, swap=swap), notes=[f"dropped {key!r}"])
    return ck


@edit
def with_extras(ck: Checkpoint, metadata: Mapping[str, str]) -> Checkpoint:
    """Set metadata strings of the checkpoint. safetensors files store these strings as metadata.

    Raises UsageError for the reserved name ``ckptkit``.
    """
    if OWN_RECORD in metadata:
        raise UsageError(
            f"the metadata entry {OWN_RECORD!r} is reserved for ckptkit; use another name"
        )
    note = f"set the metadata of {quoted(metadata)}"
    return replace(ck, extras={**ck.extras, **metadata}, notes=(*ck.notes, note))


@edit
def bare(ck: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose root is the state_dict with the weights.

    A pickled module becomes its state_dict. Raises UsageError if the checkpoint contains no
    weights.
    """
    weights = ck.require_complete().required
    others = len(ck.root) - 1 if weights.path and isinstance(ck.root, dict) else 0
    note = "kept only the weights"
    if weights.path:
        note = f"extracted the weights from {join(weights.path)!r}"
    if others:
        note += f"; dropped {others:,} other {'entry' if others == 1 else 'entries'}"
    notes = [note]
    if weights.module is not None:
        notes += [
            f"the pickled module ({weights.node.global_}) is now its plain state_dict",
            *weights.module.unread,
        ]
    node = plain_state_dict(weights.nodes) if weights.is_module else weights.node
    return ck.with_key(None).with_root(node, notes=notes)


@edit
def wrap(ck: Checkpoint, key: str, set: Mapping[str, object] | None = None) -> Checkpoint:
    """Return the checkpoint ``{key: root, **set}``.

    `key` is one key of a dict. A dot in `key` does not make a nested dict. Raises UsageError if
    `key` is empty or also a key of `set`.
    """
    if not key:
        raise UsageError("key is empty", hint=f"e.g. {typed_value('key', 'state_dict')}")
    others = {name: from_python.node(value) for name, value in (set or {}).items()}
    if key in others:
        raise UsageError(f"{key!r} is both the key of the checkpoint and of another value")
    inner = ck.key
    if inner is not None:
        inner = f"{key}.{inner}" if inner else key
    added = f" with {', '.join(map(repr, others))}" if others else ""
    note = f"wrapped as {key!r}{added}"
    return ck.with_key(inner).with_root({key: ck.root, **others}, notes=[note])
