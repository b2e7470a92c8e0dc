"""Read flat parameters: FSDP1 optimizers saved by ``optimizer.state_dict()``, and fairscale files.

The optimizer of FSDP1 contains shards of parameters, without names or shapes:

* With use_orig_params=True, each rank has a 1-D shard of each parameter. The shard is empty if the
  rank has no elements of the parameter.
* With use_orig_params=False, each rank has one entry for each FSDP unit. The parameters of the unit
  are concatenated, then split into shards of ceil(elements / ranks). The last shards are padded.

The model's rank files contain the names and shapes of the parameters, in the order of the
optimizer. No file records the unit of each parameter. The first unit contains the parameters of the
root module. The next units are the wrapped modules. To find the units, ckptkit tries likely
divisions of the parameters. If exactly one division matches the sizes, ckptkit reads the optimizer.
Otherwise, ckptkit drops the optimizer.

A checkpoint of fairscale or metaseq (OPT) consists of model parts. Each model part consists of
shards. File names are ``<stem>-model_part-<M>-shard<S>.pt`` or ``<stem>-shard<S>.pt``.

Each file contains ``model`` and ``shard_metadata``, a dict with ``param_metadata`` and
``buffer_names``. The entry ``param_metadata`` contains one dict for each wrapped module:

* ``fsdp_path`` is the path of the module.
* ``params`` maps the name of a flat parameter to {"names", "shapes", "numels", "padding"}.
* ``shared_param_info`` lists pairs of names that share a parameter. The names in each pair are
  relative to the module.
* ``no_broadcast_optim_state`` is True if the first shard contains the complete parameter.

Until fairscale 0.4.0, the dict contains ``is_flat``, ``param_names``, ``param_shapes``,
``param_numels`` and ``num_padded`` in place of ``params``.

To restore the parameters, ckptkit removes the padding of each shard and concatenates the shards.
The concatenated tensor contains the parameters in the recorded order. After joining the shards,
ckptkit merges the model parts as metaseq does.

Source: ``local_metadata_dict`` and ``consolidate_shard_weights`` of fairscale's
fully_sharded_data_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import flatten, merge_all, some
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor, locate
from ckptkit.formats.distributed import table
from ckptkit.formats.distributed.joining import Joiner, Merger, Ranked
from ckptkit.formats.distributed.meshes import REPLICATE, ShardPiece, view
from ckptkit.formats.distributed.reading import Fields, FlatRow, is_flat, own, reader_of, split_row
from ckptkit.formats.distributed.table import TP, RankFile
from ckptkit.formats.format import Probe

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_LISTED = re.compile(r"(.*?\.[0-9]+)\.")  # path of an item in a ModuleList


class UnknownError(Exception):
    """The optimizer state was split in an unknown way. The exception's argument is the reason."""


State = dict[Node, Node]
Unit = tuple[str, ...]  # names of the parameters in one FSDP unit, in order


def merged(ranks: Sequence[Ranked], model: Sequence[Ranked], joiner: Joiner) -> Node:
    """Return the optimizer's state_dict, with parameter names in place of numbers.

    Raises UnknownError if ckptkit cannot determine how the state was split.
    """
    shapes, replicas = _parameters(model, joiner)
    files = {each.rank: each.file for each in ranks}
    complete = [group for group in replicas if files.keys() >= set(group)]
    if not complete:
        raise UnknownError("no replica of the model has the files of all its ranks")
    first, *others = complete
    states = {each.rank: _states(each) for each in ranks}
    units = _units(shapes, [states[rank] for rank in first])
    state: dict[str, State] = {name: {} for name in shapes}
    for number, unit in enumerate(units):
        entries = {rank: states[rank].get(number, {}) for rank in first}
        for key in merge_all(entries.values()):
            path = f"optimizer.{_STATE}.{number}.{key}"
            # A rank without elements of a parameter has no entry for this parameter.
            values = [
                Ranked(rank, files[rank], entry.get(key))
                for rank, entry in entries.items()
                if entry
            ]
            for name, value in _cut(unit, shapes, values, path, joiner):
                state[name][key] = value
            for one, other in flatten(zip(first, group, strict=True) for group in others):
                a = as_tensor(entries[one].get(key))
                b = as_tensor(states[other].get(number, {}).get(key))
                if a is not None and b is not None and a.shape == b.shape:
                    joiner.replica(path, a, b, (files[one], files[other]))
    made: dict[Node, Node] = {_STATE: {name: each for name, each in state.items() if each}}
    if _GROUPS in ranks[0].root:
        listed = [each._replace(root=each.root.get(_GROUPS)) for each in ranks]
        groups = Merger(listed, joiner).merged((f"optimizer.{_GROUPS}",))
        made[_GROUPS] = _groups(groups, units, shapes) if isinstance(groups, list) else groups
    return made


def _parameters(
    model: Sequence[Ranked], joiner: Joiner
) -> tuple[dict[str, Shape], list[list[int]]]:
    """Return the shape of each parameter, and a list of ranks for each replica of the model.

    The shapes include only the first of several tied parameters. The ranks of a replica are in the
    order of their shards.
    """
    held = []  # the shards of each rank by name
    for ranked in model:
        weights = locate(ranked.root)
        nodes = weights.nodes if weights is not None else {}
        pieces = ((name, joiner.piece((name,), node)) for name, node in nodes.items())
        held.append({name: piece for name, piece in pieces if piece is not None})
    if not held[0]:
        raise UnknownError("the files of the model contain no DTensors or ShardedTensors")
    shapes: dict[str, Shape] = {}
    seen: set[object] = set()
    for name, piece in held[0].items():
        place = tuple((id(each.storage), each.offset) for each in piece.local()) or name
        if place not in seen:
            seen.add(place)
            shapes[name] = piece.shape
    groups: dict[tuple[int, ...], list[int]] = {}
    first = next(iter(held[0].values()))
    if isinstance(first, ShardPiece):
        for ranked, pieces_of_rank in zip(model, held, strict=True):
            listed = set(flatten(piece.ranks for piece in pieces_of_rank.values()))
            groups.setdefault(tuple(sorted(listed)), []).append(ranked.rank)
        return shapes, list(groups.values())
    replicated = [each.kind == REPLICATE for each in first.placements]
    if replicated.count(False) != 1:
        raise UnknownError("its flat parameters are sharded along several mesh dimensions")
    for rank in first.mesh.ranks:
        at = zip(first.mesh.coordinates(rank), replicated, strict=True)
        apart = tuple(i for i, is_replica in at if is_replica)
        groups.setdefault(apart, []).append(rank)
    return shapes, list(groups.values())


def _states(ranked: Ranked) -> dict[int, State]:
    state = ranked.root.get(_STATE)
    if not isinstance(state, dict) or not all(type(key) is int for key in state):
        raise UnknownError(f"the keys of the state in {ranked.file} are not numbers")
    return {number: each if isinstance(each, dict) else {} for number, each in state.items()}


def _units(shapes: Mapping[str, Shape], held: Sequence[dict[int, State]]) -> list[Unit]:
    """Return the FSDP unit of each entry in the optimizer state."""
    count = 1 + max(flatten(held), default=-1)
    if count > len(shapes):
        raise UnknownError(
            f"its state has {count:,} entries, but the model has {len(shapes):,} parameters"
        )
    elements = {name: prod(shape) for name, shape in shapes.items()}
    sizes = []  # number of elements of each flat shard, by entry and rank; 0 for scalars
    for number in range(count):
        tensors = [[as_tensor(v) for v in each.get(number, {}).values()] for each in held]
        sizes.append([max((t.numel for t in row if t and t.shape), default=0) for row in tensors])
    if count == len(shapes) and all(
        sum(row) in (0, n) for row, n in zip(sizes, elements.values(), strict=True)
    ):
        return [(name,) for name in shapes]
    found = []
    for units in _ways(list(shapes)):
        shares = [-(-sum(elements[name] for name in unit) // len(held)) for unit in units]
        if sizes == [[share] * len(held) for share in shares]:
            found.append(units)
    if len(found) != 1:
        why = "no division" if not found else "more than one division"
        raise UnknownError(
            f"{why} of the model's {len(shapes):,} parameters into FSDP units matches the sizes of "
            f"the {count:,} flat parameters in its state"
        )
    return found[0]


def _ways(names: list[str]) -> Iterator[list[Unit]]:
    """Yield possible divisions of the parameters into FSDP units.

    In the first division, all parameters form a single unit. In all further divisions, each item of
    a ModuleList is a unit, and the other parameters form the unit of the root module.
    """
    yield [tuple(names)]
    lists: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if found := _LISTED.match(name):
            stem = found[1].rpartition(".")[0]
            lists.setdefault(stem, {}).setdefault(found[1], []).append(name)
    chosen = [list(lists)] + [[stem] for stem in lists if len(lists) > 1]
    for stems in chosen if lists else ():
        inner = [tuple(each) for each in flatten(lists[stem].values() for stem in stems)]
        wrapped = set(flatten(inner))
        root = tuple(name for name in names if name not in wrapped)
        yield [root, *inner] if root else inner


def _cut(
    unit: Unit, shapes: Mapping[str, Shape], values: Sequence[Ranked], path: str, joiner: Joiner
) -> Iterator[tuple[str, Node]]:
    """Split the optimizer state of an FSDP unit. Yield each parameter's name and value."""
    tensors = [as_tensor(value.root) for value in values]
    flat = [tensor for tensor in tensors if tensor is not None and tensor.shape]
    if not flat:
        value = Merger(values, joiner).merged((path,))
        scalar = as_tensor(value)
        for name in unit:
            yield name, value if scalar is None else own(scalar)
        return
    if len(flat) != len(values) or not all(map(is_flat, flat)):
        raise UnknownError(f"some ranks have no flat shard of {unit[0]!r}")
    yield from split_row(FlatRow(flat), {name: shapes[name] for name in unit}).items()


def _groups(groups: list[Node], units: list[Unit], shapes: Mapping[str, Shape]) -> Node:
    """Replace the parameter numbers in param_groups by names, in the order of the model."""
    made = []
    for group in groups:
        numbers = group.get(_PARAMS) if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(
            type(n) is int and 0 <= n < len(units) for n in numbers
        ):
            raise UnknownError("its param_groups contain numbers of missing parameters")
        named = set(flatten(units[number] for number in numbers))
        made.append({**group, _PARAMS: [name for name in shapes if name in named]})
    return made


# fairscale


NAME = re.compile(
    r"(?P<stem>.+?)(?:-model_part-(?P<part>[0-9]{1,4}))?-shard(?P<shard>[0-9]{1,6})\.pt"
)
METADATA, PARAMETERS = "shard_metadata", "param_metadata"
SHARD = "shard"
_OLD_NAMES = ("flat_param_0", "flat_param")  # names of flat parameters until fairscale 0.4.0
_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_[0-9]+)?")


def matches(probe: Probe) -> bool:
    """Return whether the folder contains fairscale shards with ``shard_metadata``."""
    found = sorted(filter(NAME.fullmatch, probe.names))
    if not found:
        return False
    try:
        root = reader_of(probe).read(found[0]).root
    except CkptkitError:
        return False
    return isinstance(root, dict) and METADATA in root


def read(probe: Probe) -> Checkpoint:
    """Return the state_dict, merged from all model parts and shards.

    Raises CorruptError if files are missing, or if the files are from several saves.
    """
    reader, joiner = reader_of(probe), Joiner(probe)
    named = {name: found for name in sorted(probe.names) if (found := NAME.fullmatch(name))}
    stems = {found["stem"] for found in named.values()}
    if len(stems) > 1:
        raise CorruptError(
            f"contains the shards of {len(stems)} saves, not of one: {some(sorted(stems))}",
            hint="move the files of each save to a folder of its own",
        )
    files = [
        RankFile(name, {TP: int(found["part"] or 0), SHARD: int(found["shard"])}, {})
        for name, found in named.items()
    ]
    axes = {axis: 1 + max(each.at[axis] for each in files) for axis in (TP, SHARD)}
    table.check_grid(files, axes, {TP: "model part"})
    parts = []
    for number in range(axes[TP]):
        shards = [each for each in files if each.at[TP] == number]
        shards.sort(key=lambda each: each.at[SHARD])
        whole = _whole([reader.fields(each.file) for each in shards])
        parts.append(RankFile(shards[0].file, {TP: number}, whole))
    made = table.merge(parts, axes[TP], table.ParallelLayout(table.known_rows("fairscale")), joiner)
    joiner.notes.append("dropped the optimizer, and other state of each rank")
    detail = f"{axes[TP]} model parts in {axes[SHARD]} shards each"
    return joiner.checkpoint({"model": made}, reader, f"fairscale: {detail}", key="model")


class Backing(NamedTuple):
    """The contents of a flat parameter: names, shapes and sizes of its parameters, in order.

    The first item of ``padding`` is the number of padding elements at the end of the shard.
    """

    names: list[str]
    shapes: list[Shape]
    numels: list[int]
    padding: list[int]


def _whole(shards: Sequence[Fields]) -> dict[str, Node]:
    """Return the state_dict of one model part. Replace flat parameters by the original parameters.

    Buffers are taken from the first shard.
    """
    held = [fields.names("model") for fields in shards]
    modules = []
    for fields in shards:
        listed = fields.fields(METADATA).items(PARAMETERS)
        modules.append([Fields(node, f"{fields.place}: {PARAMETERS}") for node in listed])
    made: dict[str, Node] = {}
    flat: set[str] = set()
    for index, module in enumerate(modules[0]):
        prefix = _prefix(module)
        count = 1 if module.node.get("no_broadcast_optim_state") is True else len(shards)
        layouts = [
            _backings(described[index], prefix, nodes) if index < len(described) else {}
            for described, nodes in zip(modules[:count], held, strict=False)
        ]
        for name, backing in layouts[0].items():
            key = prefix + name
            flat.add(key)
            pieces: list[Tensor] = []
            for fields, layout, nodes in zip(shards, layouts, held, strict=False):
                tensor = as_tensor(nodes.get(key))
                padding = sum(layout[name].padding[:1]) if name in layout else -1
                if tensor is None or not is_flat(tensor) or not 0 <= padding <= tensor.numel:
                    raise FormatError(f"has no flat parameter {key!r}", where=fields.place)
                pieces.append(view(tensor, (0,), (tensor.numel - padding,)))
            made |= _parameters_of(prefix, key, backing, FlatRow(pieces))
    for module in modules[0]:
        _share(made, module)
    for key, node in held[0].items():
        if key in flat or key in made or as_tensor(node) is None:
            continue
        if _FLAT.fullmatch(key):
            raise FormatError(f"does not list the parameters inside {key!r}", where=shards[0].place)
        made[key] = node
    return made


def _prefix(module: Fields) -> str:
    path = str(module.node.get("fsdp_path") or "")
    return f"{path}." if path else ""


def _share(made: dict[str, Node], module: Fields) -> None:
    """Add each shared parameter of a module to `made` under the parameter's second name.

    Raises CorruptError if `made` lacks the first name.
    """
    for pair in module.node.get("shared_param_info") or ():
        names = list(map(str, pair)) if isinstance(pair, (tuple, list)) else []
        starts = [each for each in ("", _prefix(module)) if names and each + names[0] in made]
        if len(names) != 2 or not starts:
            raise CorruptError(f"{module.place}: {pair!r} are not the names of a shared parameter")
        made[starts[0] + names[1]] = made[starts[0] + names[0]]


def _backings(module: Fields, prefix: str, held: Mapping[str, Node]) -> dict[str, Backing]:
    """Return the contents of each flat parameter of a module, from the metadata of one shard."""
    if "params" in module:
        params = module.fields("params")
        return {
            name: _backing(params.fields(name), "names", "shapes", "numels", "padding")
            for name in module.names("params")
        }
    whole = _backing(module, "param_names", "param_shapes", "param_numels", "num_padded")
    if module.node.get("is_flat") is True:
        flat = next((name for name in _OLD_NAMES if prefix + name in held), _OLD_NAMES[0])
        return {flat: whole}
    return {
        name: Backing([name], [shape], [numel], [padding])
        for name, shape, numel, padding in zip(*whole, strict=False)
    }


def _backing(fields: Fields, names: str, shapes: str, numels: str, padding: str) -> Backing:
    """Return the contents of a flat parameter, from the entries with these keys."""
    listed = list(map(str, fields.items(names)))
    sizes = [fields.shape(n, s) for n, s in zip(listed, fields.items(shapes), strict=False)]
    return Backing(listed, sizes, fields.integers(numels), fields.integers(padding))


def _parameters_of(prefix: str, key: str, backing: Backing, row: FlatRow) -> dict[str, Tensor]:
    """Split a flat parameter. Return the original parameters by name."""
    names, shapes, sizes, _ = backing
    if (
        len(set(names)) != len(shapes)
        or sizes != list(map(prod, shapes))
        or sum(sizes) != row.numel
    ):
        raise CorruptError(
            f"{key!r} has {row.numel:,} elements, but its metadata lists {sum(sizes):,} elements "
            f"in tensors of the shapes {some(map(str, shapes))}"
        )
    return split_row(row, {prefix + n: shape for n, shape in zip(names, shapes, strict=True)})
