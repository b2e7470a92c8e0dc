"""Key the state of an optimizer by the names of parameters, or by their numbers.

torch's own optimizers number their parameters, in the order of the groups; see
torch/optim/optimizer.py. FSDP and ``torch.distributed.checkpoint.state_dict`` save names instead,
and resume from names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, NoEffect, Source, opened
from ckptkit.core.errors import UsageError
from ckptkit.core.grouping import without
from ckptkit.core.rebuilding import rebuild
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import nearest, plural, some
from ckptkit.core.tree import Node, OrderedMapping, join, walk
from ckptkit.core.weights import as_tensor, is_optimizer

NAMES, NUMBERS = "names", "numbers"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # that no optimizer has
_NO_SHAPE = "step"  # of a state: says nothing of the shape of its parameter
_MOST_PAIRS = 5_000_000  # of a state and a weight, that are looked at
_HINT = "save it from an optimizer made of named_parameters(), or take the weights alone"


class _Optimizer(NamedTuple):
    path: str
    node: dict[Node, Node]
    groups: list[dict[Node, Node]]
    state: dict[Node, Node]

    @property
    def params(self) -> list[Node]:
        return [each for group in self.groups for each in _list(group, "params")]


def key_optimizer(ck: Source, by: str) -> Checkpoint:
    """Key the state of the one optimizer of a checkpoint by ``names`` or by ``numbers``.

    Numbers get the names that the optimizer has itself (``param_names``, torch 2.6 and later), else
    those of the weights, in their order: there must be exactly one way in which the shapes of the
    states fit. Raises UsageError where there is none, or more than one.
    """
    ck, by = opened(ck), arguments.text("by", by)
    if by not in _WAYS:
        raise UsageError(
            f"{by!r} is no key of an optimizer", hint=" or ".join(nearest(by, _WAYS) or _WAYS)
        )
    found = _only(ck)
    keys = _WAYS[by](ck, found)
    if all(old == new and type(old) is type(new) for old, new in keys.items()):
        return ck.with_root(ck.root, warnings=[NoEffect(f"{found.path} is keyed by {by} already")])
    groups = [
        {**each, "params": [keys[key] for key in _list(each, "params")]} for each in found.groups
    ]
    state = {keys.get(old, old): value for old, value in found.state.items()}
    attributes = found.state.state if isinstance(found.state, OrderedMapping) else None
    swap: dict[int, Node] = {
        id(found.node["param_groups"]): groups,
        id(found.state): OrderedMapping(state, attributes) if attributes is not None else state,
    }
    note = f"{plural(len(keys), 'parameter')} of {found.path} are keyed by {by}"
    return ck.with_root(rebuild(ck.root, swap=swap), notes=[note])


def _only(ck: Checkpoint) -> _Optimizer:
    found = [(join(path), node) for path, node in walk(ck.root) if _is_plain(node)]
    if not found:
        raise UsageError("has no state_dict of an optimizer", where=ck.name)
    if len(found) > 1:
        raise UsageError(
            f"has several optimizers: {some([path for path, _ in found])}", where=ck.name,
            hint="leave out the others: --drop-entry NAME",
        )  # fmt: skip
    ((path, node),) = found
    groups, state = node["param_groups"], node["state"]
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise UsageError(f"{path}.param_groups is no list of groups", where=ck.name)
    if not isinstance(state, dict):
        raise UsageError(f"{path}.state is no mapping", where=ck.name)
    optimizer = _Optimizer(path, node, groups, state)
    if unknown := without(state, set(optimizer.params)):
        raise UsageError(f"{path}.state has {some(map(str, unknown))}, which no group has")
    return optimizer


def _is_plain(node: Node) -> bool:
    return isinstance(node, dict) and is_optimizer(node)


def _list(group: Mapping[Node, Node], word: str) -> list[Node]:
    found = group.get(word)
    return found if isinstance(found, list) else []


def _numbers(ck: Checkpoint, optimizer: _Optimizer) -> dict[Node, Node]:
    return {each: number for number, each in enumerate(optimizer.params)}


def _names(ck: Checkpoint, optimizer: _Optimizer) -> dict[Node, Node]:
    params = optimizer.params
    if all(isinstance(each, str) for each in params):
        return {each: each for each in params}
    own = [each for group in optimizer.groups for each in _list(group, "param_names")]
    if len(own) == len(params) and all(isinstance(each, str) for each in own):
        return dict(zip(params, own, strict=True))
    if len(optimizer.groups) > 1:
        raise UsageError(
            f"{optimizer.path} has several groups, so that the order of the weights does not say "
            "which number is which parameter",
            hint=_HINT,
        )
    known = list(_parameters(ck))
    states = [_shapes(optimizer.state.get(each)) for each in params]
    places = _places(states, [shape for _, shape in known])
    if isinstance(places, str):
        raise UsageError(
            f"the {plural(len(params), 'parameter')} of {optimizer.path} are not the "
            f"{plural(len(known), 'weight')} that may be parameters: {places}",
            hint=_HINT,
        )
    return {each: known[place][0] for each, place in zip(params, places, strict=True)}


def _parameters(ck: Checkpoint) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the weights that may be parameters, tied ones once."""
    seen: set[tuple[int, int, Shape]] = set()
    for name, node in ck.required.nodes.items():
        tensor = as_tensor(node)
        if tensor is None or tensor.dtype.kind not in ("float", "complex"):
            continue
        memory = (id(tensor.storage), tensor.offset, tensor.shape)
        if name.rpartition(".")[2] in BUFFERS or (tensor.storage is not None and memory in seen):
            continue
        seen.add(memory)
        yield name, tensor.shape


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


_WAYS: dict[str, Callable[[Checkpoint, _Optimizer], dict[Node, Node]]] = {
    NAMES: _names,
    NUMBERS: _numbers,
}
