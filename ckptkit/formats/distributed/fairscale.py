"""fairscale and metaseq (OPT): model parts, each in shards of fully sharded data parallelism.

    <stem>-model_part-<M>-shard<S>.pt, <stem>-shard<S>.pt

A file has ``model`` and ``shard_metadata``: {"param_metadata": [one for each wrapped module],
"buffer_names"}. A module has its ``fsdp_path`` and

    params                        flat name: {"names", "shapes", "numels", "padding"}
    shared_param_info             pairs of names below the module: the first is the second, too
    no_broadcast_optim_state      true: the first shard has all of it

or, until fairscale 0.4.0, ``is_flat``, ``param_names``, ``param_shapes``, ``param_numels`` and
``num_padded``. A flat parameter is its shards one after another, each less its padding; names and
shapes say what is in it. Parts are joined by the rules of metaseq then.

Source: ``local_metadata_dict`` and ``consolidate_shard_weights`` of fairscale's
fully_sharded_data_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.joining import Copies, Joiner
from ckptkit.formats.distributed.meshes import view
from ckptkit.formats.distributed.partitions import PartitionRow, Slot
from ckptkit.formats.distributed.reading import Fields, is_flat, reader_of
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

NAME = re.compile(
    r"(?P<stem>.+?)(?:-model_part-(?P<part>[0-9]{1,4}))?-shard(?P<shard>[0-9]{1,6})\.pt"
)
METADATA, PARAMETERS = "shard_metadata", "param_metadata"
SHARD = "shard"
_OLD_NAMES = ("flat_param_0", "flat_param")  # of the flat parameter of a module, until 0.4.0
_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_[0-9]+)?")
TABLE = ParallelLayout(rows(
    (r".*\.version|.*_float_tensor|.*embed_positions\..*", SAME),
    (r".*(embed_tokens|ffn_layernorm|fc1|[kqv]_proj)\.(weight|bias)", ROWS),
    (r".*(fc2|out_proj)\.weight", COLUMNS),
    (r".*\.(qkv_proj|qkv)\.(weight|bias)", cut(0, 3)),
    (r".*(fc2|out_proj)\.bias|.*layer_?norm.*\.(weight|bias)", MEAN),
))  # fmt: skip


def matches(probe: Probe) -> bool:
    """Files of shards, whose first has the metadata of fairscale."""
    found = sorted(filter(NAME.fullmatch, probe.names))
    if not found:
        return False
    try:
        root = reader_of(probe).read(found[0]).root
    except CkptkitError:
        return False
    return isinstance(root, dict) and METADATA in root


def read(probe: Probe, format: str) -> Checkpoint:
    """The state_dict of all parts and shards. Raises CorruptError for files that do not go
    together."""
    reader, joiner = reader_of(probe), Joiner(Copies(probe.options.copies))
    grid: dict[tuple[int, int], tuple[str, Fields]] = {}
    stems = set()
    for name in filter(NAME.fullmatch, sorted(probe.names)):
        found = NAME.fullmatch(name)
        assert found is not None
        stems.add(found["stem"])
        grid[int(found["part"] or 0), int(found["shard"])] = name, reader.fields(name)
    if len(stems) > 1:
        raise CorruptError(
            f"holds the shards of {len(stems)} saves: {', '.join(sorted(stems)[:4])}"
        )
    axes = {TP: 1 + max(at for at, _ in grid), SHARD: 1 + max(at for _, at in grid)}
    files = [RankFile(name, {TP: m, SHARD: s}, {}) for (m, s), (name, _) in grid.items()]
    check_grid(files, axes, {TP: "model part"})
    parts = []
    for m in range(axes[TP]):
        shards = [grid[m, s] for s in range(axes[SHARD])]
        parts.append(RankFile(shards[0][0], {TP: m}, dict(_whole(shards, joiner))))
    merged = merge(parts, {TP: axes[TP]}, TABLE, joiner)
    detail = f"{axes[TP]} model parts in {axes[SHARD]} shards each"
    return Checkpoint(
        {"model": merged.tensors}, format, probe.folder, globals=tuple(reader.globals),
        warnings=(*merged.warnings, "left out the optimizer and what else each process saved",
                  *joiner.copies.warnings(), *reader.warnings),
        about=f"fairscale: {detail}", key="model",
    )  # fmt: skip


Shards = Sequence[tuple[str, Fields]]


class Backing(NamedTuple):
    """The parameters in a flat one, one after another; `padding`: elements at the end of a
    shard."""

    names: list[str]
    shapes: list[Shape]
    numels: list[int]
    padding: int


def _whole(shards: Shards, joiner: Joiner) -> Iterator[tuple[str, Node]]:
    """The entries of one model part: what was flattened, what is shared, and the buffers of the
    first shard."""
    name, first = shards[0]
    made: dict[str, Node] = {}
    flat: set[str] = set()
    count = len(_modules(first))
    for index in range(count):
        module = _module_of(shards[0], index)
        prefix = _prefix(module)
        alone = module.node.get("no_broadcast_optim_state") is True
        for backing in _backings(module, prefix, first):
            flat.add(prefix + backing)
            own = shards[:1] if alone else shards
            made |= _unflattened(own, index, prefix, backing)
    for index in range(count):
        _share(made, _module_of(shards[0], index))
    for key, node in first.names("model").items():
        if key in flat or key in made or as_tensor(node) is None:
            continue
        if _FLAT.fullmatch(key):
            raise FormatError(f"does not say what is in {key!r}", where=name)
        made[key] = node
    yield from made.items()


def _modules(fields: Fields) -> list[Node]:
    return fields.fields(METADATA).items(PARAMETERS)


def _module_of(shard: tuple[str, Fields], index: int) -> Fields:
    """The description of a wrapped module in a shard."""
    name, fields = shard
    modules = _modules(fields)
    if index >= len(modules):
        raise FormatError(f"describes {len(modules):,} modules, another shard more", where=name)
    return Fields(modules[index], f"{name}: {PARAMETERS}")


def _prefix(module: Fields) -> str:
    path = str(module.node.get("fsdp_path") or "")
    return f"{path}." if path else ""


def _share(made: dict[str, Node], module: Fields) -> None:
    """Give what is shared in a module its other names, if it is there; else CorruptError."""
    prefix = _prefix(module)
    for pair in module.node.get("shared_param_info") or ():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise FormatError(f"{module.place}: shared_param_info is no list of pairs")
        original, shared = map(str, pair)
        if original not in made:
            original, shared = prefix + original, prefix + shared
        if original not in made:
            raise CorruptError(
                f"{module.place}: {shared!r} shares {original!r}, which is not there"
            )
        made[shared] = made[original]


def _backings(module: Fields, prefix: str, fields: Fields) -> dict[str, Backing]:
    """The flat parameters of a module, as one of its shards describes them."""
    if "params" in module:
        params = module.fields("params")
        return {name: _backing(params.fields(name)) for name in module.names("params")}
    names = [str(name) for name in module.items("param_names")]
    shapes = [module.shape(n, s) for n, s in zip(names, module.items("param_shapes"), strict=False)]
    numels, padded = module.integers("param_numels"), module.integers("num_padded")
    if module.node.get("is_flat") is not True:
        rows = zip(names, shapes, numels, padded, strict=False)
        return {name: Backing([name], [shape], [n], pad) for name, shape, n, pad in rows}
    held = fields.names("model")
    flat = next((name for name in _OLD_NAMES if prefix + name in held), _OLD_NAMES[0])
    return {flat: Backing(names, shapes, numels, sum(padded[:1]))}


def _backing(fields: Fields) -> Backing:
    names = [str(name) for name in fields.items("names")]
    shapes = [fields.shape(n, s) for n, s in zip(names, fields.items("shapes"), strict=False)]
    return Backing(names, shapes, fields.integers("numels"), fields.integers("padding")[0])


def _unflattened(shards: Shards, index: int, prefix: str, backing: str) -> dict[str, Node]:
    """The parameters in one flat parameter, which lies in the shards one after another."""
    pieces: list[Tensor] = []
    for name, fields in shards:
        layout = _backings(_module_of((name, fields), index), prefix, fields).get(backing)
        tensor = as_tensor(fields.names("model").get(prefix + backing))
        if layout is None or tensor is None or not is_flat(tensor) or layout.padding > tensor.numel:
            raise FormatError(f"has no flat parameter {prefix + backing!r}", where=name)
        pieces.append(view(tensor, (0,), (tensor.numel - layout.padding,)))
    row = PartitionRow(pieces)
    names, shapes, sizes, _ = _backings(_module_of(shards[0], index), prefix, shards[0][1])[backing]
    if not len(names) == len(shapes) == len(sizes) or sum(sizes) != row.numel:
        raise CorruptError(
            f"{prefix + backing!r} has {row.numel:,} elements, its metadata say {sum(sizes):,}"
        )
    made: dict[str, Node] = {}
    start = 0
    for each, shape, size in zip(names, shapes, sizes, strict=True):
        if prod(shape) != size:
            raise CorruptError(f"{each!r} is said to be {shape} and of {size:,} elements")
        made[prefix + each] = Slot(shape, 0, start, size).tensor((row,))
        start += size
    return made
