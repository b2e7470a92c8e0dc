"""Optimizers lose the parameters whose weights are dropped, and number the others anew.

``load_state_dict`` of torch goes by the order of the parameters: an optimizer that kept the state
of dropped ones would give their moments to others. Where it is not certain which parameter is which
weight (:func:`ckptkit.transforms.optimizer_keys.names_of`), the optimizer is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, UsageError
from ckptkit.core.text import plural, shell_word
from ckptkit.core.tree import Node, Path, children, join, like, walk
from ckptkit.core.weights import as_tensor, is_optimizer, locate, state_dicts
from ckptkit.transforms.optimizer_keys import (
    Optimizer,
    listed,
    may_be_parameter,
    memory_of,
    names_of,
    read,
)

Names = Mapping[Node, str]  # of the parameters, by their keys


@dataclass
class Cut:
    """What replaces nodes of optimizers, by their ids; the entries to drop; and what to say."""

    swap: dict[int, Node] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def cut(ck: Checkpoint, kept: Collection[str]) -> Cut:
    """Return what becomes of the optimizers where only the weights `kept` stay.

    Optimizers of other weights stay as they are. Raises UsageError for one that has to be dropped
    and is in no dict.
    """
    made = Cut()
    if all(name in kept for name in _parameters(ck)):
        return made
    found = {id(node): (path, node) for path, node in walk(ck.root, _is_met) if _is_met(path, node)}
    owned: list[tuple[Path, Optimizer, Names]] = []
    for path, node in found.values():
        try:
            optimizer = read(join(path), node)
            names = _of_the_weights(ck, optimizer)
        except UsageError as error:
            _drop(made, ck, path, error.message)
        else:
            owned += [] if names is None else [(path, optimizer, names)]
    several = sum(not each.own_names for _, each, _ in owned) > 1
    for path, optimizer, names in owned:
        try:
            if several and not optimizer.own_names:
                raise UsageError("several optimizers fit the weights")
            _cut(made, optimizer, _left(ck, names, kept))
        except UsageError as error:
            _drop(made, ck, path, error.message)
    return made


def _is_met(path: Path, node: Node) -> bool:
    return bool(path) and is_optimizer(node)


def _parameters(ck: Checkpoint) -> Iterator[str]:
    for name, node in ck.required.nodes.items():
        tensor = as_tensor(node)
        if tensor is not None and may_be_parameter(name, tensor):
            yield name


def _of_the_weights(ck: Checkpoint, optimizer: Optimizer) -> Names | None:
    """Return the names of the parameters, None for an optimizer of another entry.

    Raises UsageError where it is not certain.
    """
    weights = ck.required
    fitting: dict[int, Names] = {}
    doubts: list[UsageError] = []
    for node, nodes in ((weights.node, weights.nodes), *state_dicts(ck.root)):
        try:
            names = names_of(optimizer, nodes, unordered=ck.unordered)
            if unknown := [name for name in names.values() if name not in nodes]:
                raise UsageError(f"there is no weight {unknown[0]!r}")
            fitting[id(node)] = names
        except UsageError as error:
            doubts.append(error)
    if not fitting:
        raise doubts[0]
    default = _default(ck.root)
    if id(weights.node) not in fitting or (default in fitting and default != id(weights.node)):
        return None
    if len(fitting) > 1 and default not in fitting:
        raise UsageError("it fits several entries")
    return fitting[id(weights.node)]


def _default(root: Node) -> int | None:
    """Return the id of the weights that are taken where no key is given."""
    try:
        found = locate(root)
    except AmbiguousError:
        return None
    return None if found is None else id(found.node)


def _left(ck: Checkpoint, names: Names, kept: Collection[str]) -> Names:
    """Return the parameters that stay.

    Raises UsageError for one that stays under the name of a tied weight: it may have another place.
    """
    memories = {
        name: memory_of(tensor)
        for name, node in ck.required.nodes.items()
        if (tensor := as_tensor(node)) is not None
    }
    stay = {memory for name, memory in memories.items() if name in kept}
    for name in names.values():
        if name not in kept and memories[name] in stay:
            raise UsageError(f"{name!r} is tied to a weight that stays")
    return {key: name for key, name in names.items() if name in kept}


def _cut(made: Cut, optimizer: Optimizer, left: Names) -> None:
    """Leave out the parameters that are not `left`. Raises UsageError if none is."""
    if not left:
        raise UsageError("none of its parameters is left")
    keys: dict[Node, Node] = {}  # old -> new
    groups: list[dict[Node, Node]] = []
    for group in optimizer.groups:
        params = [each for each in listed(group, "params") if each in left]
        for each in params:
            keys[each] = each if isinstance(each, str) else len(keys)
        lists = {"params": [keys[each] for each in params], "param_names": [*map(left.get, params)]}
        if params or not listed(group, "params"):
            groups.append({word: lists.get(str(word), value) for word, value in group.items()})
    state = {keys[each]: value for each, value in optimizer.state.items() if each in keys}
    made.swap[id(optimizer.node["param_groups"])] = groups
    made.swap[id(optimizer.state)] = like(optimizer.state, state)
    note = f"kept {len(keys):,} of {plural(len(optimizer.params), 'parameter')} of {optimizer.path}"
    if gone := len(optimizer.groups) - len(groups):
        note += f", and dropped {plural(gone, 'group')} without any"
    made.notes.append(note)


def _drop(made: Cut, ck: Checkpoint, path: Path, why: str) -> None:
    """Drop an optimizer; of several in a list, the list: their places tell which is which."""
    node, entry = ck.root, path[:0]
    for depth, key in enumerate(path):
        if isinstance(node, dict):
            entry = path[: depth + 1]
        node = dict(children(node))[key]
    weights = ck.required.path
    if not entry or weights[: len(entry)] == entry:
        raise UsageError(
            f"{join(path)} cannot follow the selected weights ({why}), and has no entry of its own",
            where=ck.name,
            hint="take the weights alone first: "
            f"`ckptkit extract --key {shell_word(join(weights))} {{where}} {{new}}`",
        )
    if join(entry) not in made.dropped:
        made.dropped.append(join(entry))
        made.warnings.append(
            f"dropped {join(entry)}, which cannot follow the selected weights: {why}"
        )
