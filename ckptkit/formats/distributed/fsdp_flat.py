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
from ckptkit.formats.distributed.joining import Copies, Joiner, Merger, Ranked, Replica
from ckptkit.formats.distributed.meshes import REPLICATE, Piece, ShardPiece, piece_of, view
from ckptkit.formats.distributed.reading import Fields, FlatRow, is_flat, own, reader_of, shared_out
from ckptkit.formats.distributed.table import (
    COLUMNS,
    MEAN,
    ROWS,
    SAME,
    TP,
    ParallelLayout,
    RankFile,
    check_grid,
    cut,
    merge,
    rows,
)
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
    shapes, replicas = _parameters(model)
    by_rank = {each.rank: each for each in ranks}
    first, *others = [[by_rank[rank] for rank in group] for group in replicas]
    held = [_states(each) for each in first]
    copies = [[_states(each) for each in group] for group in others]
    units = _units(shapes, held)
    state: dict[str, State] = {name: {} for name in shapes}
    for number, unit in enumerate(units):
        entries = [each.get(number, {}) for each in held]
        for key in merge_all(entries):
            path = f"optimizer.{_STATE}.{number}.{key}"
            # A rank without elements of a parameter has no entry for this parameter.
            values = [
                each._replace(root=entry.get(key))
                for each, entry in zip(first, entries, strict=True)
                if entry
            ]
            for name, value in _cut(unit, shapes, values, path, joiner):
                state[name][key] = value
            for group in copies:
                for entry, other in zip(entries, group, strict=True):
                    a, b = as_tensor(entry.get(key)), as_tensor(other.get(number, {}).get(key))
                    if a is not None and b is not None and a.shape == b.shape:
                        joiner.copies.add(Replica(path, a, b, ("one replica", "another")))
    made: dict[Node, Node] = {_STATE: {name: each for name, each in state.items() if each}}
    if _GROUPS in first[0].root:
        groups = [each._replace(root=each.root.get(_GROUPS)) for each in ranks]
        made[_GROUPS] = _groups(_same(groups, f"optimizer.{_GROUPS}", joiner), units, shapes)
    return made


def _same(values: Sequence[Ranked], path: str, joiner: Joiner) -> Node:
    """Return a value that must be equal on all ranks. Raises CorruptError if the values differ."""
    rooted = [each._replace(root={path: each.root}) for each in values]
    merged = Merger(rooted, joiner, {}).merged()
    return merged[path] if isinstance(merged, dict) else None


def _parameters(model: Sequence[Ranked]) -> tuple[dict[str, Shape], list[list[int]]]:
    """Return the shape of each parameter, and a list of ranks for each replica of the model.

    The shapes include only the first of several tied parameters. The ranks of a replica are in the
    order of their shards.
    """
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
        raise UnknownError("the files of the model contain no DTensors or ShardedTensors")
    groups: dict[tuple[int, ...], list[int]] = {}
    if isinstance(first, ShardPiece):
        for each in model:
            found = locate(each.root)
            nodes = found.nodes.values() if found is not None else ()
            listed = set(flatten(p.ranks for p in map(piece_of, nodes) if p is not None))
            groups.setdefault(tuple(sorted(listed)), []).append(each.rank)
        return shapes, list(groups.values())
    replicated = [each.kind == REPLICATE for each in first.placements]
    if replicated.count(False) != 1:
        raise UnknownError("its flat parameters are sharded along several mesh dimensions")
    for rank in first.mesh.ranks:
        at = first.mesh.coordinates(rank)
        apart = tuple(i for i, is_replica in zip(at, replicated, strict=True) if is_replica)
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
        sum(some) in (0, n) for some, n in zip(sizes, elements.values(), strict=True)
    ):
        return [(name,) for name in shapes]
    found = []
    for units in _ways(list(shapes)):
        totals = [sum(elements[name] for name in unit) for unit in units]
        if len(units) == count and all(
            set(some) == {-(-total // len(some))} for total, some in zip(totals, sizes, strict=True)
        ):
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
        value = _same(values, path, joiner)
        scalar = as_tensor(value)
        for name in unit:
            yield name, value if scalar is None else own(scalar)
        return
    if len(flat) != len(values) or not all(map(is_flat, flat)):
        raise UnknownError(f"some ranks have no flat shard of {unit[0]!r}")
    row, start = FlatRow(flat), 0
    for name in unit:
        yield name, shared_out((row,), shapes[name], start)
        start += prod(shapes[name])


def _groups(node: Node, units: list[Unit], shapes: Mapping[str, Shape]) -> Node:
    """Replace the parameter numbers in param_groups by names, in the order of the model."""
    if not isinstance(node, list):
        return node
    made = []
    for group in node:
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
TABLE = ParallelLayout(rows(
    (r".*\.version|.*_float_tensor|.*embed_positions\..*", SAME),
    (r".*(embed_tokens|ffn_layernorm|fc1|[kqv]_proj)\.(weight|bias)", ROWS),
    (r".*(fc2|out_proj)\.weight", COLUMNS),
    (r".*\.(qkv_proj|qkv)\.(weight|bias)", cut(0, 3)),
    (r".*(fc2|out_proj)\.bias|.*layer_?norm.*\.(weight|bias)", MEAN),
))  # fmt: skip


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


def read(probe: Probe, format: str) -> Checkpoint:
    """Return the state_dict, merged from all model parts and shards.

    Raises CorruptError if files are missing, or if the files are from several saves.
    """
    reader, joiner = reader_of(probe), Joiner(Copies(probe.options.copies))
    grid: dict[tuple[int, int], tuple[str, Fields]] = {}
    stems = set()
    for name in sorted(probe.names):
        if found := NAME.fullmatch(name):
            stems.add(found["stem"])
            grid[int(found["part"] or 0), int(found["shard"])] = name, reader.fields(name)
    if len(stems) > 1:
        raise CorruptError(
            f"contains the shards of {len(stems)} saves, not of one: {some(sorted(stems))}",
            hint="move the files of each save to a folder of its own",
        )
    axes = {TP: 1 + max(at for at, _ in grid), SHARD: 1 + max(at for _, at in grid)}
    files = [RankFile(name, {TP: m, SHARD: s}, {}) for (m, s), (name, _) in grid.items()]
    check_grid(files, axes, {TP: "model part"})
    parts = []
    for m in range(axes[TP]):
        shards = [grid[m, s] for s in range(axes[SHARD])]
        parts.append(RankFile(shards[0][0], {TP: m}, _whole(shards)))
    merged = merge(parts, {TP: axes[TP]}, TABLE, joiner)
    detail = f"{axes[TP]} model parts in {axes[SHARD]} shards each"
    return Checkpoint(
        {"model": merged.tensors}, format, probe.folder, globals=tuple(reader.globals),
        warnings=(*merged.warnings, "dropped the optimizer, and other state of each rank",
                  *joiner.copies.warnings(), *reader.warnings),
        about=f"fairscale: {detail}", key="model",
    )  # fmt: skip


class Backing(NamedTuple):
    """The contents of a flat parameter: names, shapes and sizes of its parameters, in order.

    ``padding`` is the number of padding elements at the end of the shard.
    """

    names: list[str]
    shapes: list[Shape]
    numels: list[int]
    padding: int


def _whole(shards: Sequence[tuple[str, Fields]]) -> dict[str, Node]:
    """Return the state_dict of one model part. Replace flat parameters by the original parameters.

    Buffers are taken from the first shard.
    """
    held = [fields.names("model") for _, fields in shards]
    modules: list[list[Fields]] = []
    for name, fields in shards:
        listed = fields.fields(METADATA).items(PARAMETERS)
        modules.append([Fields(each, f"{name}: {PARAMETERS}") for each in listed])
        if len(listed) < len(modules[0]):
            raise FormatError(
                f"lists {len(listed):,} modules, but the first shard lists {len(modules[0]):,}",
                where=name,
            )
    made: dict[str, Node] = {}
    flat: set[str] = set()
    for index, module in enumerate(modules[0]):
        prefix = _prefix(module)
        count = 1 if module.node.get("no_broadcast_optim_state") is True else len(shards)
        layouts = [
            _backings(modules[number][index], prefix, held[number]) for number in range(count)
        ]
        for name, backing in layouts[0].items():
            flat.add(prefix + name)
            pieces: list[Tensor] = []
            for number, layout in enumerate(layouts):
                tensor = as_tensor(held[number].get(prefix + name))
                padding = layout[name].padding if name in layout else 0
                if name not in layout or tensor is None or not is_flat(tensor):
                    tensor = None
                if tensor is None or padding > tensor.numel:
                    raise FormatError(
                        f"has no flat parameter {prefix + name!r}", where=shards[number][0]
                    )
                pieces.append(view(tensor, (0,), (tensor.numel - padding,)))
            made |= _unflattened(prefix, name, backing, FlatRow(pieces))
    for module in modules[0]:
        _share(made, module)
    for key, node in held[0].items():
        if key in flat or key in made or as_tensor(node) is None:
            continue
        if _FLAT.fullmatch(key):
            raise FormatError(f"does not list the parameters inside {key!r}", where=shards[0][0])
        made[key] = node
    return made


def _prefix(module: Fields) -> str:
    path = str(module.node.get("fsdp_path") or "")
    return f"{path}." if path else ""


def _share(made: dict[str, Node], module: Fields) -> None:
    """Add each shared parameter of a module to `made` under the parameter's second name.

    Raises CorruptError if `made` lacks the first name.
    """
    prefix = _prefix(module)
    for pair in module.node.get("shared_param_info") or ():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise FormatError(f"{module.place}: shared_param_info is not a list of pairs")
        original, shared = map(str, pair)
        if original not in made:
            original, shared = prefix + original, prefix + shared
        if original not in made:
            raise CorruptError(f"{module.place}: {shared!r} shares {original!r}, which is missing")
        made[shared] = made[original]


def _backings(module: Fields, prefix: str, held: Mapping[str, Node]) -> dict[str, Backing]:
    """Return the contents of each flat parameter of a module, from the metadata of one shard."""
    found: dict[str, Backing] = {}
    if "params" in module:
        params = module.fields("params")
        for name in module.names("params"):
            of = params.fields(name)
            names = list(map(str, of.items("names")))
            shapes = [of.shape(n, s) for n, s in zip(names, of.items("shapes"), strict=False)]
            padding = sum(of.integers("padding")[:1])
            found[name] = Backing(names, shapes, of.integers("numels"), padding)
        return found
    names = list(map(str, module.items("param_names")))
    shapes = [module.shape(n, s) for n, s in zip(names, module.items("param_shapes"), strict=False)]
    numels, padded = module.integers("param_numels"), module.integers("num_padded")
    if module.node.get("is_flat") is True:
        flat = next((name for name in _OLD_NAMES if prefix + name in held), _OLD_NAMES[0])
        return {flat: Backing(names, shapes, numels, sum(padded[:1]))}
    for name, shape, n, pad in zip(names, shapes, numels, padded, strict=False):
        found[name] = Backing([name], [shape], [n], pad)
    return found


def _unflattened(prefix: str, name: str, backing: Backing, row: FlatRow) -> dict[str, Node]:
    """Split a flat parameter. Return the original parameters by name."""
    names, shapes, sizes, _ = backing
    if not len(names) == len(shapes) == len(sizes) or sum(sizes) != row.numel:
        raise CorruptError(
            f"{prefix + name!r} has {row.numel:,} elements, but its metadata lists {sum(sizes):,}"
        )
    made: dict[str, Node] = {}
    start = 0
    for each, shape, size in zip(names, shapes, sizes, strict=True):
        if prod(shape) != size:
            raise CorruptError(
                f"{each!r}: its recorded shape {shape} does not have the recorded {size:,} elements"
            )
        made[prefix + each] = shared_out((row,), shape, start)
        start += size
    return made
