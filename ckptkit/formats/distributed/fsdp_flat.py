"""The optimizer of FSDP1 as ``optimizer.state_dict()`` gives it: pieces of flat parameters, without
names or shapes.

    use_orig_params=True    a 1-D piece of each parameter on each rank, empty where it holds none
    False                   one entry for each FSDP unit: the parameters of the unit one after
                            another, in pieces of ceil(elements / ranks), the last ones filled up

Names and shapes are those of the model's rank files, in their order. Where the units begin and end
is not said: the root comes first, then the modules that were wrapped, whose sizes must fit in one
way alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import flatten, merge_all
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor, locate
from ckptkit.formats.distributed.joining import Joiner, Merger, Ranked, Replica
from ckptkit.formats.distributed.meshes import REPLICATE, MeshPiece, Piece, ShardPiece, piece_of
from ckptkit.formats.distributed.partitions import PartitionRow, Slot
from ckptkit.formats.distributed.reading import is_flat, own

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_LISTED = re.compile(r"(.*?\.[0-9]+)\.")  # a module of a list of modules


class UnknownError(Exception):
    """Nothing says how the state was cut: the sentence why."""


class Unit(NamedTuple):
    """The parameters of one entry of the state, in order."""

    names: tuple[str, ...]


State = dict[Node, Node]


def merged(ranks: Sequence[Ranked], model: Sequence[Ranked], joiner: Joiner) -> Node:
    """The state by names, as ``load_state_dict`` takes it. Raises UnknownError where nothing says
    how it was cut."""
    shapes, replicas = _parameters(model)
    by_rank = {each.rank: each for each in ranks}
    first = [by_rank[rank] for rank in replicas[0]]
    held = [_states(each) for each in first]
    copies = [[_states(by_rank[rank]) for rank in group] for group in replicas[1:]]
    units = _units(shapes, held)
    state: dict[str, State] = {name: {} for name in shapes}
    for number, unit in enumerate(units):
        entries = [each.get(number, {}) for each in held]
        for key in merge_all(entries):
            path = f"optimizer.{_STATE}.{number}.{key}"
            values = [
                each._replace(root=entry.get(key))
                for each, entry in zip(first, entries, strict=True)
                if entry  # the optimizer has none where a rank holds nothing of a parameter
            ]
            for name, value in _cut(unit, shapes, values, path, joiner):
                state[name][key] = value
            for group in copies:
                others = [each.get(number, {}).get(key) for each in group]
                _compare(joiner, path, [entry.get(key) for entry in entries], others)
    made: dict[Node, Node] = {_STATE: {name: each for name, each in state.items() if each}}
    if _GROUPS in first[0].root:
        groups = [each._replace(root=each.root.get(_GROUPS)) for each in ranks]
        made[_GROUPS] = _groups(_same(groups, f"optimizer.{_GROUPS}", joiner), units, shapes)
    return made


def _same(values: Sequence[Ranked], path: str, joiner: Joiner) -> Node:
    """Return the value that all ranks have. Raises CorruptError where they differ."""
    rooted = [each._replace(root={path: each.root}) for each in values]
    merged = Merger(rooted, joiner, {}).merged()
    return merged[path] if isinstance(merged, dict) else None


def _parameters(model: Sequence[Ranked]) -> tuple[dict[str, Shape], list[list[int]]]:
    """The shapes of the parameters by name, tied ones once, and the groups of ranks that hold all
    of them."""
    weights = locate(model[0].root)
    shapes: dict[str, Shape] = {}
    seen: set[object] = set()
    first: Piece | None = None
    for name, node in (weights.nodes if weights is not None else {}).items():
        piece = piece_of(node)
        if piece is None:
            continue
        place = tuple((id(each.storage), each.offset) for each in piece.local()) or (id(node),)
        if place not in seen:
            seen.add(place)
            shapes[name] = piece.shape
            first = first or piece
    if first is None:
        raise UnknownError("there are no pieces of a model to take names and shapes from")
    return shapes, _replicas(first, [each.rank for each in model], model)


def _replicas(piece: Piece, ranks: list[int], model: Sequence[Ranked]) -> list[list[int]]:
    """The ranks of each replica of the model, in the order of their pieces."""
    if isinstance(piece, ShardPiece):
        groups: dict[tuple[int, ...], list[int]] = {}
        weights = [(each.rank, locate(each.root)) for each in model]
        for rank, found in weights:
            nodes = found.nodes.values() if found is not None else ()
            ranked = set(flatten(p.ranks for p in map(piece_of, nodes) if p is not None))
            groups.setdefault(tuple(sorted(ranked)), []).append(rank)
        return list(groups.values())
    assert isinstance(piece, MeshPiece)
    if sum(each.kind != REPLICATE for each in piece.placements) != 1:
        raise UnknownError("its flat pieces are of a mesh that cuts in several dimensions")
    apart: dict[tuple[int, ...], list[int]] = {}
    for rank in piece.mesh.ranks:
        place = piece.mesh.coordinates(rank)
        kept = zip(place, piece.placements, strict=True)
        apart.setdefault(tuple(i for i, each in kept if each.kind == REPLICATE), []).append(rank)
    return list(apart.values())


def _states(ranked: Ranked) -> dict[int, State]:
    state = ranked.root.get(_STATE)
    if not isinstance(state, dict) or not all(type(key) is int for key in state):
        raise UnknownError(f"the state in {ranked.file} is not numbered")
    return {number: each if isinstance(each, dict) else {} for number, each in state.items()}


def _units(shapes: dict[str, Shape], held: Sequence[dict[int, State]]) -> list[Unit]:
    """Return the unit of each entry of the optimizer's state."""
    count = 1 + max(flatten(held), default=-1)
    if count > len(shapes):
        raise UnknownError(f"its state has {count:,} entries, the model {len(shapes):,} parameters")
    sizes = [[_elements(each.get(number, {})) for each in held] for number in range(count)]
    each_own = [Unit((name,)) for name in shapes]
    if count == len(shapes) and all(
        sum(some) in (0, prod(shape)) for some, shape in zip(sizes, shapes.values(), strict=True)
    ):
        return each_own
    found = [units for units in _ways(shapes) if _fits(units, shapes, sizes)]
    if len(found) != 1:
        why = "no way" if not found else "several ways"
        raise UnknownError(
            f"{why} to lay {len(shapes):,} parameters into the {count:,} flat pieces of its "
            "state that fits their sizes"
        )
    return found[0]


def _elements(state: State) -> int:
    """Elements of a flat piece; of scalars none."""
    return max(
        (t.numel for each in state.values() if (t := as_tensor(each)) and t.shape), default=0
    )


def _ways(shapes: dict[str, Shape]) -> Iterator[list[Unit]]:
    """One unit; or the root and the members of one or more lists of modules."""
    names = list(shapes)
    yield [Unit(tuple(names))]
    lists: dict[str, dict[str, list[str]]] = {}
    for name in names:
        found = _LISTED.match(name)
        if found:
            stem = found[1].rpartition(".")[0]
            lists.setdefault(stem, {}).setdefault(found[1], []).append(name)
    chosen = [list(lists)] + [[stem] for stem in lists if len(lists) > 1]
    for stems in chosen if lists else ():
        inner = [Unit(tuple(each)) for each in flatten(lists[stem].values() for stem in stems)]
        wrapped = set(flatten(unit.names for unit in inner))
        root = tuple(name for name in names if name not in wrapped)
        yield [Unit(root), *inner] if root else inner


def _fits(units: list[Unit], shapes: dict[str, Shape], sizes: list[list[int]]) -> bool:
    if len(units) != len(sizes):
        return False
    for unit, some in zip(units, sizes, strict=True):
        total = sum(prod(shapes[name]) for name in unit.names)
        if set(some) != {-(-total // len(some))}:
            return False
    return True


def _cut(
    unit: Unit, shapes: dict[str, Shape], values: Sequence[Ranked], path: str, joiner: Joiner
) -> Iterator[tuple[str, Node]]:
    """The values of one entry by the names of its parameters."""
    tensors = [as_tensor(value.root) for value in values]
    flat = [tensor for tensor in tensors if tensor is not None and tensor.shape]
    if not flat:
        value = _same(values, path, joiner)
        scalar = as_tensor(value)
        for name in unit.names:
            yield name, value if scalar is None else own(scalar)
        return
    if len(flat) != len(values) or not all(map(is_flat, flat)):
        raise UnknownError(f"not every rank holds a flat piece of {unit.names[0]!r}")
    row, start = PartitionRow(flat), 0
    for name in unit.names:
        size = prod(shapes[name])
        yield name, Slot(shapes[name], 0, start, size).tensor((row,))
        start += size


def _compare(joiner: Joiner, name: str, ours: Sequence[Node], theirs: Sequence[Node]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        first, other = as_tensor(a), as_tensor(b)
        if isinstance(first, Tensor) and isinstance(other, Tensor) and first.shape == other.shape:
            joiner.copies.add(Replica(name, first, other, ("one replica", "another")))


def _groups(node: Node, units: list[Unit], shapes: dict[str, Shape]) -> Node:
    """The groups with the names of their parameters, in the order of the model."""
    if not isinstance(node, list):
        return node
    made = []
    for group in node:
        numbers = group.get(_PARAMS) if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(
            type(n) is int and 0 <= n < len(units) for n in numbers
        ):
            raise UnknownError("its groups name parameters that are not there")
        named = set(flatten(units[number].names for number in numbers))
        made.append({**group, _PARAMS: [name for name in shapes if name in named]})
    return made
