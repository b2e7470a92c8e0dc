"""Read rank files of FSDP and tensor parallelism. File names contain the rank ``<R>``:

* verl writes ``model_world_size_<W>_rank_<R>.pt``, ``optim_...`` and ``extra_state_...``.
* accelerate writes ``pytorch_model_fsdp_<i>_rank<R>.bin`` and ``optimizer_<i>_rank<R>.bin``.
* Other programs write names such as ``<anything>_<R>.pt``.

The pickles of DTensor and ShardedTensor contain the rank that wrote the file, and the offset and
size of each shard. The ranks in the file names must match the ranks in the pickles.

If the folder contains only files of the model, :func:`read` returns their merged tree. Otherwise,
the root is {"model": ..., "optimizer": ..., "extra_state": ...}. Only the first rank's extra_state
is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError
from ckptkit.core.limits import check
from ckptkit.core.text import flatten, some
from ckptkit.core.tree import Node
from ckptkit.core.weights import is_optimizer
from ckptkit.formats.distributed import fsdp_flat
from ckptkit.formats.distributed.joining import Joiner, Merger, Ranked
from ckptkit.formats.distributed.meshes import CLASSES, MeshPiece, Piece, parallelism, pieces_in
from ckptkit.formats.distributed.reading import (
    RankGroup,
    RankReader,
    check_ranks,
    check_stale,
    groups,
    reader_of,
)
from ckptkit.formats.folder import unread
from ckptkit.formats.format import Probe

MODEL, OPTIMIZER, REST = "model", "optimizer", "extra_state"
_TRIED = 16  # maximum number of file groups that `matches` examines


def matches(probe: Probe) -> bool:
    """Return whether the folder contains rank files with DTensors or ShardedTensors."""
    found = groups(probe.names)
    return any(_matches(reader_of(probe), group) for group in islice(found, _TRIED))


def _matches(reader: RankReader, group: RankGroup) -> bool:
    try:
        checkpoint = reader.read(group.first)
    except CkptkitError:
        return group.world is not None  # `read` raises the error again, with a better message
    return any(each.name in CLASSES for each in checkpoint.globals)


def read(probe: Probe) -> Checkpoint:
    """Return the merged tree of all ranks. Read only the headers of each file.

    Raises AmbiguousError for files of two runs. Raises CorruptError if a rank's file is missing or
    renamed, or if the files are from two saves. Raises UnsupportedError if the files do not
    describe their shards.
    """
    reader, joiner = reader_of(probe), Joiner(probe)
    by_role: dict[str, list[RankGroup]] = {MODEL: [], OPTIMIZER: [], REST: [], "": []}
    for group in groups(probe.names):
        by_role[_role(reader.read(group.first).root, group)].append(group)
    model, optimizer = _only(by_role[MODEL]), _only(by_role[OPTIMIZER])
    chosen = model or optimizer
    assert chosen is not None  # otherwise `matches` returns False
    ranked = _ranked(chosen, reader, joiner)
    world = _check_ranks(chosen, ranked, joiner)
    root = _merged(chosen, ranked, world, joiner)
    extra = [group for group in by_role[REST] if group.certain]
    if model is not None and (optimizer is not None or extra):
        root = {MODEL: root}
        if optimizer is not None:
            root |= _optimizer(_ranked(optimizer, reader, joiner), optimizer, ranked, joiner)
    for group in extra if model is not None else ():
        stem = group.pattern.partition("\0")[0].strip("_-.")
        key = REST if REST in group.pattern else stem
        root[key] = reader.read(group.first).root
        if len(group.files) > 1:
            joiner.notes.append(
                f"ckptkit read only the first rank's {key}, but every rank saved one"
            )
    ours = set(flatten(group.files.values() for group in flatten(by_role.values())))
    joiner.notes += unread(probe.names, ours)
    return joiner.checkpoint(root, reader, _title(ranked, world, joiner))


def _role(root: Node, group: RankGroup) -> str:
    """Return the role of a group of files: "model", "optimizer", "extra_state", or "" for none.

    `root` is the content of the first file.
    """
    has_pieces = next(pieces_in(root), None) is not None
    if is_optimizer(root):
        return OPTIMIZER if has_pieces or group.certain else ""
    return MODEL if has_pieces else REST


def _only(found: Sequence[RankGroup]) -> RankGroup | None:
    """Return the only group, or None. Raises AmbiguousError for several groups."""
    if len(found) > 1:
        worlds = {each.world for each in found}
        what = "saves of different numbers of ranks" if len(worlds) > 1 else "models"
        raise AmbiguousError(
            f"contains the rank files of {len(found)} {what}: {some(each.first for each in found)}",
            hint="move the files of each save or model into a separate folder",
        )
    return found[0] if found else None


def _ranked(group: RankGroup, reader: RankReader, joiner: Joiner) -> list[Ranked]:
    """Read the files of a group, sorted by rank. Check the ranks in the file names."""
    found = []
    for number, name in group.files.items():
        root = reader.read(name).root
        ranks = {piece.rank for piece in _pieces(root, joiner) if piece.rank is not None}
        if len(ranks) > 1:
            raise CorruptError(
                f"contains shards of several ranks, not of one: {sorted(ranks)}", where=name
            )
        rank = ranks.pop() if ranks else number
        by_name = group.certain or list(group.files) == list(range(len(group.files)))
        if rank != number and by_name:
            raise CorruptError(
                f"{name} was written by rank {rank:,}, but its name contains another number: "
                "files were renamed, or are of several saves",
                hint="give each file the number of its rank, or download the files again",
            )
        found.append(Ranked(rank, name, root))
    return sorted(found, key=lambda each: each.rank)


def _check_ranks(group: RankGroup, ranked: Sequence[Ranked], joiner: Joiner) -> list[int]:
    """Return all ranks, as the shards record.

    Raises CorruptError if a file name contradicts the recorded ranks.
    """
    every: set[int] = set()
    count = 0
    for piece in flatten(_pieces(each.root, joiner) for each in ranked):
        every.update(piece.ranks)
        count = max(count, piece.world, len(every))
    if group.world is not None and group.world != count:
        raise CorruptError(
            f"the name of {group.first} gives {group.world:,} ranks, but its tensors are sharded "
            f"over {count:,}",
            hint="files were renamed, or are from several saves",
        )
    check("ranks", count, "ranks")
    every.update(range(count) if len(every) < count else ())
    check_stale({each.rank: each.file for each in ranked}, every)
    return sorted(every)


def _pieces(root: Node, joiner: Joiner) -> Iterator[Piece]:
    for path, node in pieces_in(root):
        piece = joiner.piece(path, node)
        assert piece is not None
        yield piece


def _merged(
    group: RankGroup, ranked: Sequence[Ranked], world: Sequence[int], joiner: Joiner
) -> Node:
    files = {each.rank: each.file for each in ranked}
    try:
        root = Merger(ranked, joiner).merged()
    except CorruptError:
        check_ranks(files, world, group.name)
        raise
    missing = [group.name(rank) for rank in world if rank not in files]
    if missing:
        joiner.notes.append(
            "ckptkit did not need these missing files, because other files contain replicas of "
            f"their shards: {some(missing)}"
        )
    return root


def _optimizer(
    ranked: Sequence[Ranked], group: RankGroup, model: Sequence[Ranked], joiner: Joiner
) -> dict[Node, Node]:
    """Return the merged optimizer. If ckptkit does not know how the state was split, warn, and
    return an empty dict.
    """
    if any(True for _ in _pieces(ranked[0].root, joiner)):
        world = _check_ranks(group, ranked, joiner)
        return {OPTIMIZER: _merged(group, ranked, world, joiner)}
    if {each.rank for each in ranked} != {each.rank for each in model}:
        raise CorruptError(
            f"the ranks of the optimizer files {some(group.files.values())} differ from the ranks "
            "of the model files"
        )
    try:
        return {OPTIMIZER: fsdp_flat.merged(ranked, model, joiner)}
    except fsdp_flat.UnknownError as error:
        joiner.notes.append(f"dropped the optimizer: {error}")
        return {}


def _title(ranked: Sequence[Ranked], world: Sequence[int], joiner: Joiner) -> str:
    pieces = list(_pieces(ranked[0].root, joiner))
    forms: dict[str, None] = {}
    for piece in pieces:
        form = "ShardedTensor"
        if isinstance(piece, MeshPiece):
            names = f" ({', '.join(piece.mesh.names)})" if piece.mesh.names else ""
            form = f"DTensor on a mesh of {' x '.join(map(str, piece.mesh.shape))}{names}"
        forms[form] = None
    ranks = f"{len(ranked):,} of {len(world):,} ranks"
    return f"rank files of {parallelism(pieces)}: {ranks}; {'; '.join([*forms][:3])}"
