"""Key the state of an optimizer by the names of parameters, or by their numbers.

torch's own optimizers number their parameters, in the order of the groups; see
torch/optim/optimizer.py. FSDP and ``torch.distributed.checkpoint.state_dict`` save names instead,
and resume from names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptkit.core.checkpoint import Checkpoint, NoEffect, edit
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import nearest, plural, shell_word, some, typed, without
from ckptkit.core.tree import Node, OrderedMapping, join, rebuild, walk
from ckptkit.core.weights import as_tensor, is_optimizer

NAMES, NUMBERS = "names", "numbers"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # that no optimizer has
_NO_SHAPE = "step"  # of a state: says nothing of the shape of its parameter
_MOST_PAIRS = 5_000_000  # of a state and a weight, that are looked at
_HINT = "save it from an optimizer made of named_parameters(), or take the weights alone"


class Optimizer(NamedTuple):
    """The state_dict of an optimizer, with its dotted path."""

    path: str
    node: dict[Node, Node]
    groups: list[dict[Node, Node]]
    state: dict[Node, Node]

    @property
    def params(self) -> list[Node]:
        return self._all("params")

    @property
    def own_names(self) -> list[Node]:
        """The names that the groups give to the parameters, if they name all of them."""
        names = self._all("params")
        if not all(isinstance(each, str) for each in names):
            names = self._all("param_names")
        known = len(names) == len(self.params) and all(isinstance(each, str) for each in names)
        return names if known else []

    def _all(self, word: str) -> list[Node]:
        return [each for group in self.groups for each in listed(group, word)]


@edit
def key_optimizer(ck: Checkpoint, by: str) -> Checkpoint:
    """Key the state of the one optimizer of a checkpoint by ``names`` or by ``numbers``.

    Numbers get the names that the optimizer has itself (``param_names``, torch 2.6 and later), else
    those of the weights, in their order: there must be exactly one way in which the shapes of the
    states fit. Raises UsageError where there is none, or more than one.
    """
    if by not in (NAMES, NUMBERS):
        near = nearest(by, (NAMES, NUMBERS)) or (NAMES, NUMBERS)
        raise UsageError(f"{by!r} is no key of an optimizer", hint=" or ".join(near))
    found = _only(ck)
    keys = (
        names_of(found, ck.required.nodes, unordered=ck.unordered)
        if by == NAMES
        else _numbers(found)
    )
    if all(old == new and type(old) is type(new) for old, new in keys.items()):
        return ck.with_root(ck.root, warnings=[NoEffect(f"{found.path} is keyed by {by} already")])
    groups = [
        {**each, "params": [keys[key] for key in listed(each, "params")]} for each in found.groups
    ]
    state = {keys.get(old, old): value for old, value in found.state.items()}
    attributes = found.state.state if isinstance(found.state, OrderedMapping) else None
    swap: dict[int, Node] = {
        id(found.node["param_groups"]): groups,
        id(found.state): OrderedMapping(state, attributes) if attributes is not None else state,
    }
    note = f"{plural(len(keys), 'parameter')} of {found.path} are keyed by {by}"
    return ck.with_root(rebuild(ck.root, swap=swap), notes=[note])


def _only(ck: Checkpoint) -> Optimizer:
    found = [(join(path), node) for path, node in walk(ck.root) if _is_plain(node)]
    if not found:
        raise UsageError("has no state_dict of an optimizer", where=ck.name)
    if len(found) > 1:
        raise UsageError(
            f"has several optimizers: {some([path for path, _ in found])}", where=ck.name,
            hint="choose one: drop the others with " + " ".join(
                typed(f"--drop-entry {shell_word(path)}", f"ck.without({path!r})")
                for path, _ in found[1:]
            ),
        )  # fmt: skip
    ((path, node),) = found
    try:
        return read(path, node)
    except UsageError as error:
        raise error.at(ck.name or "") from None


def read(path: str, node: Node) -> Optimizer:
    """Return the optimizer that a node is. Raises UsageError for a malformed one."""
    if not _is_plain(node):
        raise UsageError(f"{path} is a pickled object, not a state_dict")
    groups, state = node["param_groups"], node["state"]
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise UsageError(f"{path}.param_groups is no list of groups")
    if not isinstance(state, dict):
        raise UsageError(f"{path}.state is no mapping")
    optimizer = Optimizer(path, node, groups, state)
    if not all(isinstance(each, (int, str)) for each in optimizer.params):
        raise UsageError(f"{path} has parameters that are neither numbers nor names")
    if unknown := without(state, set(optimizer.params)):
        raise UsageError(f"{path}.state has {some(map(str, unknown))}, which no group has")
    return optimizer


def _is_plain(node: Node) -> bool:
    return isinstance(node, dict) and is_optimizer(node)


def listed(group: Mapping[Node, Node], word: str) -> list[Node]:
    """Return a list that a group has, an empty one where it has none."""
    found = group.get(word)
    return found if isinstance(found, list) else []


def _numbers(optimizer: Optimizer) -> dict[Node, Node]:
    return {each: number for number, each in enumerate(optimizer.params)}


def names_of(
    optimizer: Optimizer, weights: Mapping[str, Node], *, unordered: bool
) -> dict[Node, str]:
    """Return the name of each parameter. Raises UsageError where the weights leave a doubt.

    That of `unordered` weights does, unless the optimizer itself has the names.
    """
    params, own = optimizer.params, optimizer.own_names
    if own or not params:
        return dict(zip(params, own, strict=True))
    if unordered:
        raise UsageError(
            f"{optimizer.path} numbers the parameters in the order of the model, which the file of "
            "the weights does not keep",
            hint=_HINT,
        )
    if len(optimizer.groups) > 1:
        raise UsageError(
            f"{optimizer.path} has several groups, so that the order of the weights does not say "
            "which number is which parameter",
            hint=_HINT,
        )
    known = list(_parameters(weights))
    states = [_shapes(optimizer.state.get(each)) for each in params]
    places = _places(states, [shape for _, shape in known])
    if isinstance(places, str):
        raise UsageError(
            f"the {plural(len(params), 'parameter')} of {optimizer.path} are not the "
            f"{plural(len(known), 'weight')} that may be parameters: {places}",
            hint=_HINT,
        )
    return {each: known[place][0] for each, place in zip(params, places, strict=True)}


def _parameters(weights: Mapping[str, Node]) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the weights that may be parameters, tied ones once."""
    seen: set[object] = set()
    for name, node in weights.items():
        tensor = as_tensor(node)
        if tensor is None or not may_be_parameter(name, tensor) or memory_of(tensor) in seen:
            continue
        seen.add(memory_of(tensor))
        yield name, tensor.shape


def may_be_parameter(name: str, tensor: Tensor) -> bool:
    """Return whether an optimizer may train this weight."""
    return tensor.dtype.kind in ("float", "complex") and name.rpartition(".")[2] not in BUFFERS


def memory_of(tensor: Tensor) -> object:
    """Return what tied tensors have in common."""
    if tensor.storage is None:
        return id(tensor)
    return id(tensor.storage), tensor.offset, tensor.shape


def _shapes(state: Node) -> set[Shape]:
    """Return the shapes of the tensors that an optimizer keeps for a parameter."""
    entries = state.items() if isinstance(state, dict) else ()
    return {
        value.shape for word, value in entries if isinstance(value, Tensor) and word != _NO_SHAPE
    }


def _places(states: Sequence[set[Shape]], shapes: Sequence[Shape]) -> list[int] | str:
    """Return which shape, in order, belongs to each state; or why that is not certain.

    A state without tensors may belong to any.
    """
    spare = len(shapes) - len(states)
    if spare < 0:
        return "there are fewer"
    if (spare + 1) * len(states) > _MOST_PAIRS:
        return f"{spare:,} of them are too many to tell apart"

    def fits(i: int, skipped: int) -> bool:
        return not states[i] or shapes[i + skipped] in states[i]

    # ways[i][skipped]: to place the states from i on, when so many shapes were passed over; 2: more
    ways = [[1] * (spare + 1)]
    for i in reversed(range(len(states))):
        row, later = [0] * (spare + 1), ways[-1]
        for skipped in reversed(range(spare + 1)):
            further = row[skipped + 1] if skipped < spare else 0
            row[skipped] = min(2, further + (later[skipped] if fits(i, skipped) else 0))
        ways.append(row)
    ways.reverse()
    if ways[0][0] != 1:
        return "their shapes are others" if not ways[0][0] else "their shapes fit in several ways"
    places, skipped = [], 0
    for i in range(len(states)):
        skipped = next(k for k in range(skipped, spare + 1) if fits(i, k) and ways[i + 1][k])
        places.append(i + skipped)
    return places
