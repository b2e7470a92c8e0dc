"""fairscale and metaseq (OPT): model parts, each in shards of fully sharded data parallelism.

    <stem>-model_part-<M>-shard<S>.pt, <stem>-shard<S>.pt

A file has ``model`` and ``shard_metadata``: {"param_metadata": [{"fsdp_path", "params": {flat name:
{"names", "shapes", "numels", "padding"}}, "buffer_names", "shared_param_info",
"no_broadcast_optim_state"}]}. A flat parameter is its shards one after another, each less its
padding; names and shapes say what is in it. Parts are joined by the rules of metaseq then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError
from ckptkit.core.pieces import part
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.partitions import PartitionRow, Slot
from ckptkit.formats.common.rank_files import Fields, is_flat, reader_of
from ckptkit.formats.format import Probe
from ckptkit.formats.parallel.copies import Copies
from ckptkit.formats.parallel.joining import Joiner
from ckptkit.formats.parallel.tables import TP, RankFile, Table, check_grid, merge, rule
from ckptkit.formats.parallel.verbs import Cut, Mean, Same

NAME = re.compile(
    r"(?P<stem>.+?)(?:-model_part-(?P<part>[0-9]{1,4}))?-shard(?P<shard>[0-9]{1,6})\.pt"
)
METADATA, PARAMETERS = "shard_metadata", "param_metadata"
SHARD = "shard"
TABLE = Table(
    rules=(
        rule(r".*\.version|.*_float_tensor|.*embed_positions\..*", Same()),
        rule(r".*(embed_tokens|ffn_layernorm|fc1|[kqv]_proj)\.(weight|bias)", Cut(0)),
        rule(r".*(fc2|out_proj)\.weight", Cut(1)),
        rule(r".*\.qkv_proj\.(weight|bias)|.*\.qkv\.(weight|bias)", Cut(0, 3)),
        rule(r".*(fc2|out_proj)\.bias|.*layer_?norm.*\.(weight|bias)", Mean()),
    )
)  # fmt: skip


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
    reader, joiner = reader_of(probe), Joiner(Copies(probe.asked.copies))
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


def _whole(shards: Shards, joiner: Joiner) -> Iterator[tuple[str, Node]]:
    """The entries of one model part: what was flattened, what is shared, and the buffers of the
    first shard."""
    name, first = shards[0]
    described = first.fields(METADATA).items(PARAMETERS)
    made: dict[str, Node] = {}
    flat: set[str] = set()
    for index, node in enumerate(described):
        described_part = Fields(node, f"{name}: {PARAMETERS}")
        path = str(described_part.node.get("fsdp_path") or "")
        prefix = f"{path}." if path else ""
        for backing in described_part.names("params"):
            flat.add(prefix + backing)
            made |= _unflattened(
                shards,
                index,
                prefix,
                backing,
                described_part.node.get("no_broadcast_optim_state") is True,
            )
    for node in described:
        for pair in Fields(node, name).node.get("shared_param_info") or ():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                continue
            original, shared = pair
            if original in made:
                made[str(shared)] = made[original]
    others = [each.names("model") for _, each in shards]
    for key, node in others[0].items():
        if key in flat or key in made or as_tensor(node) is None:
            continue
        made[key] = node
    yield from made.items()


def _unflattened(
    shards: Shards, index: int, prefix: str, backing: str, alone: bool
) -> dict[str, Node]:
    """The parameters in one flat parameter, which lies in the shards one after another."""
    pieces: list[Tensor] = []
    layout: Fields | None = None
    for name, fields in shards[:1] if alone else shards:
        part_fields = (
            Fields(fields.fields(METADATA).items(PARAMETERS)[index], name)
            .fields("params")
            .fields(backing)
        )
        layout = layout or part_fields
        tensor = as_tensor(fields.names("model").get(prefix + backing))
        padding = part_fields.integers("padding")[0]
        if tensor is None or not is_flat(tensor) or padding > tensor.numel:
            raise FormatError(f"has no flat parameter {prefix + backing!r}", where=name)
        pieces.append(part(tensor, (0,), (tensor.numel - padding,)))
    assert layout is not None
    row = PartitionRow(pieces)
    names, shapes, sizes = layout.items("names"), layout.items("shapes"), layout.integers("numels")
    if not len(names) == len(shapes) == len(sizes) or sum(sizes) != row.numel:
        raise CorruptError(
            f"{prefix + backing!r} has {row.numel:,} elements, its metadata say {sum(sizes):,}"
        )
    made: dict[str, Node] = {}
    start = 0
    for each, node, size in zip(names, shapes, sizes, strict=True):
        shape = layout.shape(str(each), node)
        if prod(shape) != size:
            raise CorruptError(f"{each!r} is said to be {shape} and of {size:,} elements")
        made[prefix + str(each)] = Slot(shape, 0, start, size).tensor((row,))
        start += size
    return made
