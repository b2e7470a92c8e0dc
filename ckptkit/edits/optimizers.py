"""Rename the parameters of optimizers, drop parameters, and key parameters by names or numbers.

The state_dict of a torch optimizer numbers the parameters in the order of the groups (see
torch/optim/optimizer.py). FSDP and ``torch.distributed.checkpoint.state_dict`` save and load names
instead of numbers.

``load_state_dict`` of torch matches parameters by their order. If a checkpoint kept the optimizer
state of a dropped weight, torch would load that state into another parameter. Therefore, ckptkit
drops the optimizer state of dropped weights and renumbers the other parameters. If `names_of`
cannot map the parameters to weights, ckptkit drops the complete optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.errors import AmbiguousError, CollisionError, UsageError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import nearest, plural, shell_word, some, typed, without
from ckptkit.core.tree import Node, Path, children, join, like, rebuild, walk
from ckptkit.core.weights import as_tensor, is_optimizer, locate, state_dicts

Names = Mapping[str, str]


def rename_parameters(
    root: Node, names: Names, edited: Iterable[Node]
) -> tuple[dict[int, Node], list[str]]:
    """Rename the parameters of optimizers in the tree `root`.

    Return a dict from ids of old nodes to new nodes, and a list of notes. `names` maps old to new
    names of weights. `edited` contains the dicts of the renamed weights.

    If several optimizers contain old names, one of these optimizers may belong to weights outside
    `edited`. In this case, no optimizer changes if a dict outside `edited` also contains an old
    name. Raises CollisionError if two parameters get the same name.
    """
    found = []  # (path, state, lists of names, number of renamed parameters)
    for path, node in walk(root):
        if isinstance(node, dict) and is_optimizer(node):
            state, lists = node["state"], list(_lists(node))
            keys: Iterable[Node] = state if isinstance(state, dict) else ()
            texts = (each for each in chain(keys, *lists) if isinstance(each, str))
            if held := {text for text in texts if text in names}:
                found.append((path, state, lists, len(held)))
    if len(found) > 1:
        known = {*map(id, edited), *(id(state) for _, state, _, _ in found)}
        for _, node in walk(root):
            is_other = isinstance(node, dict) and id(node) not in known
            if is_other and any(isinstance(key, str) and key in names for key in node):
                return {}, []

    def renamed(key: Node) -> Node:
        return names.get(key, key) if isinstance(key, str) else key

    swap: dict[int, Node] = {}
    for path, state, lists, _ in found:
        swap.update((id(each), [*map(renamed, each)]) for each in lists)
        if isinstance(state, dict):
            new = {renamed(key): value for key, value in state.items()}
            if len(new) < len(state):
                place = f"{join(path)}.state"
                raise CollisionError(f"the new names of two parameters of {place} are equal")
            if list(new) != list(state):
                swap[id(state)] = like(state, new)
    notes = [f"renamed {plural(count, 'parameter')} in {join(path)}" for path, *_, count in found]
    return swap, notes


def _lists(node: dict[Node, Node]) -> Iterator[list[Node]]:
    """Yield the lists of names in the parameter groups."""
    groups = node["param_groups"]
    for group in groups if isinstance(groups, list) else ():
        for word in ("params", "param_names") if isinstance(group, dict) else ():
            if any(isinstance(text, str) for text in listed(group, word)):
                yield group[word]


NAMES, NUMBERS = "names", "numbers"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of batch norm
_NO_SHAPE = "step"  # key of the step counter, a scalar in the state of each parameter
_HINT = "create the optimizer from named_parameters() before saving, or convert only the weights"


class Optimizer(NamedTuple):
    """The state_dict of an optimizer, and its dotted path in the checkpoint."""

    path: str
    node: dict[Node, Node]
    groups: list[dict[Node, Node]]
    state: dict[Node, Node]

    @property
    def params(self) -> list[Node]:
        return self._all("params")

    @property
    def own_names(self) -> list[Node]:
        """The names of the parameters in the groups. If any parameter has no name, the list is
        empty."""
        names = self._all("params")
        if not all(isinstance(each, str) for each in names):
            names = self._all("param_names")
        known = len(names) == len(self.params) and all(isinstance(each, str) for each in names)
        return names if known else []

    def _all(self, word: str) -> list[Node]:
        return [each for group in self.groups for each in listed(group, word)]


@edit
def key_optimizer(ck: Checkpoint, by: str) -> Checkpoint:
    """Change the keys of the optimizer state to ``names`` or to ``numbers`` of parameters.

    If the optimizer contains names (``param_names``, torch 2.6 and later), ckptkit uses these
    names. Otherwise, ckptkit finds the names by comparing the shapes of the optimizer states with
    the shapes of the weights, in order. Raises UsageError unless exactly one assignment of names
    fits.
    """
    if by not in (NAMES, NUMBERS):
        near = nearest(by, (NAMES, NUMBERS)) or (NAMES, NUMBERS)
        raise UsageError(f"cannot key an optimizer by {by!r}", hint=f"use {' or '.join(near)}")
    optimizers = [(join(path), node) for path, node in walk(ck.root) if _is_plain(node)]
    if not optimizers:
        raise UsageError("has no state_dict of an optimizer", where=ck.name)
    if len(optimizers) > 1:
        paths = [path for path, _ in optimizers]
        raise UsageError(
            f"has several optimizers: {some(paths)}", where=ck.name,
            hint="drop all but one: " + " ".join(
                typed(f"--drop-entry {shell_word(path)}", f"ck.without({path!r})")
                for path in paths[1:]
            ),
        )  # fmt: skip
    try:
        found = read(*optimizers[0])
    except UsageError as error:
        raise error.at(ck.name or "") from None
    if by == NAMES:
        keys: dict[Node, Node] = names_of(found, ck.required.nodes, unordered=ck.unordered)
    else:
        keys = {each: number for number, each in enumerate(found.params)}
    if all(old == new and type(old) is type(new) for old, new in keys.items()):
        return ck.unchanged(f"{found.path} is already keyed by {by}")
    swap, _ = _rekeyed(found, keys)
    note = f"keyed {plural(len(keys), 'parameter')} of {found.path} by {by}"
    return ck.with_root(rebuild(ck.root, swap=swap), notes=[note])


def read(path: str, node: Node) -> Optimizer:
    """Read the state_dict of an optimizer. Raises UsageError if the state_dict is malformed."""
    if not _is_plain(node):
        raise UsageError(f"{path} is a pickled object, not a state_dict")
    groups, state = node["param_groups"], node["state"]
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise UsageError(f"{path}.param_groups is not a list of dicts")
    if not isinstance(state, dict):
        raise UsageError(f"{path}.state is not a dict")
    optimizer = Optimizer(path, node, groups, state)
    if not all(isinstance(each, (int, str)) for each in optimizer.params):
        raise UsageError(f"{path} has parameters that are neither numbers nor names")
    if unknown := without(state, set(optimizer.params)):
        raise UsageError(
            f"{path}.state has {some(map(str, unknown))}, which no parameter group contains"
        )
    return optimizer


def _is_plain(node: Node) -> bool:
    return isinstance(node, dict) and is_optimizer(node)


def listed(group: Mapping[Node, Node], word: str) -> list[Node]:
    """Return the list with the key `word` in a group, or an empty list if there is no such key."""
    found = group.get(word)
    return found if isinstance(found, list) else []


def names_of(
    optimizer: Optimizer, weights: Mapping[str, Node], *, unordered: bool
) -> dict[Node, str]:
    """Map each parameter of an optimizer to the name of a weight.

    Raises UsageError if the mapping is ambiguous. If `unordered` is true, the order of the weights
    is unknown, so an optimizer without names always raises UsageError.
    """
    params, own = optimizer.params, optimizer.own_names
    if own or not params:
        return dict(zip(params, own, strict=True))
    if unordered:
        raise UsageError(
            f"{optimizer.path} numbers the parameters in the order of the model, but this file "
            "format does not keep the order of the weights",
            hint=_HINT,
        )
    if len(optimizer.groups) > 1:
        raise UsageError(
            f"{optimizer.path} has several groups, so the order of the weights does not tell "
            "which number belongs to which weight",
            hint=_HINT,
        )
    known: list[tuple[str, Shape]] = []  # possible parameters; tied weights count once
    seen: set[object] = set()
    for name, node in weights.items():
        tensor = as_tensor(node)
        if tensor and may_be_parameter(name, tensor) and tensor.elements_key not in seen:
            seen.add(tensor.elements_key)
            known.append((name, tensor.shape))
    states = []  # shapes of the state tensors of each parameter
    for param in params:
        held = optimizer.state.get(param)
        entries = held.items() if isinstance(held, dict) else ()
        shapes = (v.shape for word, v in entries if isinstance(v, Tensor) and word != _NO_SHAPE)
        states.append(set(shapes))
    places = _places(states, [shape for _, shape in known])
    if isinstance(places, str):
        raise UsageError(
            f"cannot match the {plural(len(params), 'parameter')} of {optimizer.path} to the "
            f"{plural(len(known), 'weight')} that may be parameters: {places}",
            hint=_HINT,
        )
    return {each: known[place][0] for each, place in zip(params, places, strict=True)}


def may_be_parameter(name: str, tensor: Tensor) -> bool:
    """Return True for float and complex tensors, except for the buffers of batch norm."""
    return tensor.dtype.kind in ("float", "complex") and name.rpartition(".")[2] not in BUFFERS


def _places(states: Sequence[set[Shape]], shapes: Sequence[Shape]) -> list[int] | str:
    """Match each state to a shape.

    Return the index of the shape of each state. If no match or several matches exist, return a
    message.

    `states` contains the possible shapes of each parameter. The states and `shapes` are in the same
    order, but some shapes may have no state. A state without tensors matches any shape. The match
    is unique if the first match and the last match are equal.
    """
    if len(shapes) < len(states):
        return "there are fewer weights than parameters"
    first, last = _first_match(states, shapes), _first_match(states[::-1], shapes[::-1])
    if first is None or last is None:
        return "the shapes do not fit"
    if first != [len(shapes) - 1 - place for place in reversed(last)]:
        return "several matches fit the shapes"
    return first


def _first_match(states: Sequence[set[Shape]], shapes: Sequence[Shape]) -> list[int] | None:
    """Match each state to the first shape that fits and follows the match of the state before."""
    places: list[int] = []
    for held in states:
        start = places[-1] + 1 if places else 0
        fitting = (n for n in range(start, len(shapes)) if not held or shapes[n] in held)
        if (place := next(fitting, None)) is None:
            return None
        places.append(place)
    return places


Parameters = Mapping[Node, str]  # key in the optimizer -> name of the weight


@dataclass
class Cut:
    """Changes to optimizers. ``swap`` maps ids of old nodes to new nodes. ``dropped`` contains the
    paths of dropped entries."""

    swap: dict[int, Node] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def cut(ck: Checkpoint, kept: Collection[str]) -> Cut:
    """Return the changes to optimizers after all weights except `kept` are dropped.

    Optimizers that belong to other weights do not change. Raises UsageError if an optimizer must be
    dropped but is not the value of a dict entry.
    """
    made, nodes = Cut(), ck.required.nodes
    found = {
        id(node): (path, node)
        for path, node in walk(ck.root, _is_nested_optimizer)
        if _is_nested_optimizer(path, node)
    }
    if not found:
        return made
    tensors = {name: tensor for name, node in nodes.items() if (tensor := as_tensor(node))}
    if all(name in kept for name, each in tensors.items() if may_be_parameter(name, each)):
        return made
    owned: list[tuple[Path, Optimizer, Parameters]] = []
    for path, node in found.values():
        try:
            optimizer = read(join(path), node)
            names = _of_the_weights(ck, optimizer)
        except UsageError as error:
            _drop(made, ck, path, error.message)
        else:
            owned += [] if names is None else [(path, optimizer, names)]
    several = sum(not each.own_names for _, each, _ in owned) > 1
    stay = {each.elements_key for name, each in tensors.items() if name in kept}
    for path, optimizer, names in owned:
        left = {key: name for key, name in names.items() if name in kept}
        # If only one of two tied weights is dropped, the order of the parameters may change.
        gone = (name for name in names.values() if name not in kept)
        tied = [name for name in gone if tensors[name].elements_key in stay]
        if several and not optimizer.own_names:
            _drop(made, ck, path, "several optimizers fit these weights")
        elif tied:
            why = f"{tied[0]!r} is dropped, but it is tied to a weight that is kept"
            _drop(made, ck, path, why)
        elif not left:
            _drop(made, ck, path, "no parameter of the optimizer is kept")
        else:
            _cut(made, optimizer, left)
    return made


def _is_nested_optimizer(path: Path, node: Node) -> bool:
    return bool(path) and is_optimizer(node)


def _of_the_weights(ck: Checkpoint, optimizer: Optimizer) -> Parameters | None:
    """Return the parameters of an optimizer, or None if the optimizer belongs to other weights.

    Raises UsageError if the optimizer may belong to several state_dicts.
    """
    weights = ck.required
    fitting: dict[int, Parameters] = {}
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
    default = None  # the state_dict that ckptkit selects if the user gives no key
    with suppress(AmbiguousError):
        located = locate(ck.root)
        default = None if located is None else id(located.node)
    if id(weights.node) not in fitting or (default in fitting and default != id(weights.node)):
        return None
    if len(fitting) > 1 and default not in fitting:
        raise UsageError("the optimizer fits several state_dicts")
    return fitting[id(weights.node)]


def _cut(made: Cut, optimizer: Optimizer, left: Parameters) -> None:
    """Drop the parameters that are not in `left`."""
    keys: dict[Node, Node] = {}  # old -> new
    for each in optimizer.params:
        if each in left:
            keys[each] = each if isinstance(each, str) else len(keys)
    swap, gone = _rekeyed(optimizer, keys, left)
    made.swap.update(swap)
    note = f"kept {len(keys):,} of {plural(len(optimizer.params), 'parameter')} of {optimizer.path}"
    if gone:
        note += f", and dropped {plural(gone, 'empty parameter group')}"
    made.notes.append(note)


def _rekeyed(
    optimizer: Optimizer, keys: Mapping[Node, Node], names: Parameters | None = None
) -> tuple[dict[int, Node], int]:
    """Give the parameters new keys, and drop parameters without a new key. `names` contains the
    names for ``param_names``.

    Return a dict from ids of old nodes to new nodes, and the number of groups that are dropped
    because no parameter of the group is left.
    """
    groups: list[dict[Node, Node]] = []
    for group in optimizer.groups:
        params = [each for each in listed(group, "params") if each in keys]
        lists = {"params": [keys[each] for each in params]}
        if names is not None:
            lists["param_names"] = [*map(names.get, params)]
        if params or not listed(group, "params"):
            groups.append({word: lists.get(str(word), value) for word, value in group.items()})
    state = {keys[each]: value for each, value in optimizer.state.items() if each in keys}
    swap = {
        id(optimizer.node["param_groups"]): groups,
        id(optimizer.state): like(optimizer.state, state),
    }
    return swap, len(optimizer.groups) - len(groups)


def _drop(made: Cut, ck: Checkpoint, path: Path, why: str) -> None:
    """Drop an optimizer. If the optimizer is an item of a list, drop the complete list, because
    dropping one item would change the positions of the other items."""
    node, entry = ck.root, path[:0]
    for depth, key in enumerate(path):
        if isinstance(node, dict):
            entry = path[: depth + 1]
        node = dict(children(node))[key]
    weights = ck.required.path
    if not entry or weights[: len(entry)] == entry:
        raise UsageError(
            f"cannot drop only the optimizer state of the dropped weights ({why}), and cannot drop "
            f"{join(path)}, because it is not a dict entry",
            where=ck.name,
            hint="extract the weights first: "
            f"`ckptkit extract --key {shell_word(join(weights))} {{where}} {{new}}`",
        )
    if join(entry) not in made.dropped:
        made.dropped.append(join(entry))
        made.warnings.append(
            f"dropped {join(entry)}, because it does not match the selected weights: {why}"
        )
