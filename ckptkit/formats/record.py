"""Store ties, attributes and values that are not tensors in ``__metadata__``, and restore them.

A tie records that two names share one tensor. Ties follow the convention of the Hugging Face hub:
``metadata[dropped name] = kept name`` (safetensors.torch.save_model). A file of another program may
contain metadata of this form by accident. In such a file, ckptkit reads an entry as a tie only if
both names are parameters with equal attribute names (``head.weight``, ``embed.weight``).

All other values are fields of one JSON string, the record, under the metadata key ``ckptkit``. A
missing field means an empty value. The fields are:

    version               1
    ordered               true if the state_dict was an OrderedDict
    state_dict_metadata   `_metadata` of the state_dict: {module name: {"version": 1}}
    ties                  {dropped name: position of the name among all names}
    parameters            list of the tensors that were nn.Parameter, or true if all were
    requires_grad         list of the tensors that require a gradient, or true if all do
    values                {dotted path: a value outside the weights (`epoch`)}; stored only for
                          information, not restored
    root, tree            the complete checkpoint, instead of the fields above: see safetensors_tree

:mod:`strict_json` encodes the values. ckptkit reads a record of a later version as an ordinary
metadata string. `leftovers` returns the values that a weights-only format stores as strings, and
notes that name the dropped values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import and_more, plural, shown, some, typed_value, without
from ckptkit.core.tree import (
    MODULE_VERSIONS,
    Global,
    Node,
    Object,
    OrderedMapping,
    Path,
    children,
    join,
    key_text,
    module_versions,
    type_name,
    versions_state,
    walk,
)
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.formats import strict_json
from ckptkit.formats.strict_json import decode, dump, encode, is_plain, is_utf8
from ckptkit.pickles.judge import refused_by_weights_only

RESERVED = "ckptkit"
FRAMEWORK = "format"  # metadata key for the framework on the Hugging Face hub; the value is "pt"
VERSION = 1
# Marks a checkpoint whose file contained the complete tree, not only the weights.
WHOLE = object()


# Reading


class Restored(NamedTuple):
    """The tree restored from tensors and metadata."""

    root: Node
    metadata: dict[str, str]  # metadata entries that were not used to restore the tree
    warnings: tuple[str, ...] = ()
    globals: tuple[Global, ...] = ()
    is_whole: bool = False  # whether the file contained the complete tree


def restore(
    tensors: dict[str, Tensor], metadata: Mapping[str, str], *, index: bool = False
) -> Restored:
    """Restore the state_dict, or the complete tree, from `tensors` and `metadata`.

    `index` is true if the metadata comes from an index of shards, not from a single file. The
    returned metadata contains the field ``values`` of the record. If the record is unreadable, the
    returned metadata keeps the record, and `warnings` contains the reason.
    """
    try:
        fields = _parse(metadata)
        if fields is None:
            return restore_ties(tensors, metadata, index=index)
        values = _typed(fields, "values", dict)
        globals_: tuple[Global, ...] = ()
        ties: Iterable[str]
        is_whole = "tree" in fields
        if is_whole:
            from ckptkit.formats import safetensors_tree  # imported only for complete checkpoints

            ties = _names(fields, "ties", ())
            root, globals_ = safetensors_tree.restore(fields, tensors)
        else:
            root, ties = _state_dict(fields, tensors, metadata)
        rest = {**without(metadata, {RESERVED, *ties}), **of_values(values)}
        return Restored(root, rest, (), globals_, is_whole)
    except CkptkitError as error:
        plain = restore_ties(tensors, metadata, index=index)
        why = f"the metadata entry {RESERVED!r} cannot be read: {error.message}"
        return plain._replace(warnings=(why, *plain.warnings))


def restore_ties(
    nodes: Mapping[str, Node], metadata: Mapping[str, str], *, index: bool = False
) -> Restored:
    """Restore ties that follow the convention of the hub. Tied names come after all other names.

    In the metadata of an index (`index` is true), every entry that maps an unused name to the name
    of a tensor is a tie. The metadata of a single file may contain other notes of its author. In a
    single file, an entry is a tie only if both names look like parameters.
    """
    possible = [name for name, kept in metadata.items() if _is_tie(name, kept, nodes)]
    ties = [
        name
        for name in possible
        if index or (name.rpartition(".")[0] and _last(name) == _last(metadata[name]))
    ]
    root = {**nodes, **{name: replace(nodes[metadata[name]]) for name in ties}}
    rest = {key: text for key, text in metadata.items() if key not in root or text not in root}
    warnings = []
    if ties:
        count, example = plural(len(ties), "name"), repr(ties[0][:80])
        warnings.append(
            f"the metadata contains second names of tensors (ties): {count}, e.g. {example}"
        )
    warnings += [
        f"the value of the metadata entry {name[:80]!r} is the name of a tensor; ckptkit reads the "
        "value as a string, not as a tie"
        for name in possible
        if name not in ties
    ]
    return Restored(root, rest, tuple(warnings))


def values(metadata: Mapping[str, str]) -> dict[str, Any]:
    """From the record in `metadata`, return the values outside the weights, as JSON."""
    try:
        fields = _parse(metadata)
        return _typed(fields, "values", dict) if fields is not None else {}
    except CkptkitError:
        return {}


def _is_tie(name: str, kept: str, tensors: Mapping[str, Node]) -> bool:
    return (
        isinstance(tensors.get(kept), Tensor)
        and name not in tensors
        and name not in (RESERVED, FRAMEWORK)
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _parse(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    if RESERVED not in metadata:
        return None
    fields = strict_json.parse(metadata[RESERVED].encode(), "the record")
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise FormatError(f"not a ckptkit record of version {VERSION}")
    return fields


def _state_dict(
    fields: dict[str, Any], tensors: dict[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[Node, Node], dict[str, int]]:
    """Return the state_dict that a record describes, and the ties.

    Raises FormatError for invalid fields of the record.
    """
    versions = decode(fields.get("state_dict_metadata"))
    if not isinstance(versions, (dict, type(None))):
        raise FormatError("its state_dict_metadata is not a dict")
    ties = _typed(fields, "ties", dict)
    count = len(tensors) + len(ties)
    for name, place in ties.items():
        if type(place) is not int or place not in range(count):
            raise FormatError("its ties have invalid positions among the tensors")
        if name not in metadata or not _is_tie(name, metadata[name], tensors):
            raise FormatError(f"its tie {name[:80]!r} refers to no tensor")
    at = {place: name for name, place in ties.items()}
    if len(at) < len(ties):
        raise FormatError("two of its ties have the same position")
    names = tensors.keys() | ties.keys()
    parameters, requiring = (_names(fields, key, names) for key in ("parameters", "requires_grad"))
    rest = iter(tensors)
    root: dict[Node, Node] = OrderedMapping() if fields.get("ordered") else {}
    for place in range(count):
        name = at[place] if place in at else next(rest)
        tensor = tensors[name] if name in tensors else tensors[metadata[name]]
        kind = "parameter" if name in parameters else "tensor"
        requires_grad = name in requiring
        if name in ties or kind != tensor.kind or requires_grad:
            tensor = replace(tensor, kind=kind, requires_grad=requires_grad)
        root[name] = tensor
    if isinstance(root, OrderedMapping) and versions is not None:
        root.state = versions_state(versions)
    return root, ties


def _typed(fields: dict[str, Any], key: str, kind: type) -> Any:
    value = fields.get(key, kind())
    if not isinstance(value, kind):
        raise FormatError(f"its {key!r} is not a {kind.__name__}")
    return value


def _names(fields: dict[str, Any], key: str, known: Iterable[str]) -> frozenset[str]:
    if fields.get(key) is True:
        return frozenset(known)
    named = _typed(fields, key, list)
    if not all(isinstance(name, str) for name in named):
        raise FormatError(f"its {key!r} contains values that are not names")
    return frozenset(named)


# Writing


def of_weights(weights: Weights, ties: Iterable[str], values: Mapping[str, Any]) -> str | None:
    """Return the JSON record of weights, ties and values, or None if all its fields are empty.

    `ties` are the tied names that the file omits. `values` are the entries outside the weights, as
    JSON.
    """
    place = {name: n for n, name in enumerate(weights.nodes)}
    paths = _metadata(weights.node)
    fields = {
        "ordered": isinstance(weights.node, OrderedMapping),
        "state_dict_metadata": None if paths is None else encode(paths),
        "ties": {name: place[name] for name in ties},
    }
    if not weights.is_module:
        tensors = weights.tensors
        for key, names in (
            ("parameters", [name for name, each in tensors.items() if each.kind == "parameter"]),
            ("requires_grad", [name for name, each in tensors.items() if each.requires_grad]),
        ):
            fields[key] = names if len(names) < len(tensors) else bool(names)
    fields["values"] = dict(values)
    if not any(fields.values()):
        return None
    return dump({"version": VERSION, **{key: value for key, value in fields.items() if value}})


def of_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata entry for a record that contains only `values`."""
    return {RESERVED: dump({"version": VERSION, "values": values})} if values else {}


def lost_attributes(node: Node) -> list[str]:
    """Return the names of a state_dict's attributes that a record cannot store."""
    if not isinstance(node, OrderedMapping) or node.state is None:
        return []
    held = (MODULE_VERSIONS,) if _metadata(node) is not None else ()
    return [key_text(key) for key, _ in children(node.state) if key not in held]


def _metadata(node: Node) -> dict[Node, Node] | None:
    paths = module_versions(node)
    if paths is None:
        return None
    plain = dict(paths)
    return plain if is_plain(plain, LIMITS.safetensors_header_bytes) else None


# Values that the output drops


_EXTRA_STATE = "_extra_state"
_PLAIN = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))
# Attributes of a tensor that are dropped without a note. FSDP1 sets `_has_been_cloned` on gathered
# tensors.
_NO_STATE: tuple[Node, ...] = (None, {}, {"_has_been_cloned": True})


def leftovers(checkpoint: Checkpoint, *, inside: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Return plain values outside the weights, as JSON by path, and a note for each dropped entry.

    If `inside` is true, include the entries of the state_dict that are not tensors.
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
            left.append(f"dropped: {join(path) or '(no name)'} ({_size(node)})")
    if states:
        left.append(f"dropped: {states:,} entries called {_EXTRA_STATE} in the weights")
    objects = [
        name for name, node in weights.nodes.items() if isinstance(node, Object) and _has_more(node)
    ]
    if objects:
        named = some(map(shown, objects))
        left.append(f"dropped: the Python class or attributes of tensors: {named}")
    if isinstance(weights.node, Object):
        left.append(
            f"dropped: the module itself ({type_name(weights.node)}); written as its state_dict"
        )
        left += weights.module.unread if weights.module is not None else ()
    return values, left


def _has_more(node: Object) -> bool:
    """Return whether a tensor has a Python class or attributes.

    The call ``_rebuild_from_type_v2(function, class, arguments, state)`` adds a class if `class` is
    not torch's, and attributes if `state` is not empty. The call ``_rebuild_parameter_with_state(
    tensor, requires_grad, hooks, state)`` adds attributes if `state` is not empty.
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
                f"{place} is an object ({type_name(node)}), which the output cannot store",
                hint=f"{typed_value('objects', 'drop')} drops such values",
            )


def refuse_tensors(
    tensors: Mapping[str, Tensor],
    format: str,
    obstacle: Callable[[str, Tensor], str | None],
    hint: Callable[[dict[str, str]], str],
) -> None:
    """Raise TensorError if a format cannot store all tensors.

    `obstacle` returns the reason why the format cannot store a tensor, or None. `hint` returns the
    hint of the error. The argument of `hint` maps tensor names to reasons.
    """
    reasons = {name: why for name, each in tensors.items() if (why := obstacle(name, each))}
    if reasons:
        named = some((f"{shown(name)} ({why})" for name, why in reasons.items()), 3)
        raise TensorError(f"{format} cannot store {named}", hint=hint(reasons))


def refuse_pieces(nodes: Mapping[str, Node]) -> None:
    """Raise UnsupportedError if a tensor is only one rank's shard of a DTensor or ShardedTensor."""
    made = [(name, node) for name, node in nodes.items() if isinstance(node, Object)]
    if not made:
        return
    from ckptkit.formats.distributed.meshes import is_piece  # imported only if there are objects

    if names := [name for name, node in made if is_piece(node)]:
        more = and_more(len(names) - 1)
        raise UnsupportedError(
            f"{names[0][:80]!r}{more} is one rank's shard of a DTensor or ShardedTensor",
            hint="name the folder with the files of all ranks instead",
        )


def shared_bytes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a note on tensors that share bytes. A format without views duplicates these bytes."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault(id(tensor.storage), []).append(tensor)
    count = 0
    for sharing in by_storage.values():
        reached = 0
        for start, length in sorted(each.extent for each in sharing) if len(sharing) > 1 else ():
            count += start < reached
            reached = max(reached, start + length)
    note = f"tensors that share memory with other tensors: {count:,}; each is written in full"
    return [note] if count else []


def _outside_weights(root: Node, weights: Weights, inside: bool) -> Iterator[tuple[Path, Node]]:
    """Yield the outermost nodes outside the weights, with their paths."""
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
