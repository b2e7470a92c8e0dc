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
from typing import NamedTuple

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError
from ckptkit.core.limits import check
from ckptkit.core.text import flatten, some
from ckptkit.core.tree import Node, join
from ckptkit.core.weights import is_optimizer
from ckptkit.formats.distributed import fsdp_flat
from ckptkit.formats.distributed.joining import Copies, Joiner, Merger, Ranked
from ckptkit.formats.distributed.meshes import (
    CLASSES,
    Mesh,
    MeshPiece,
    Piece,
    ShardPiece,
    parallelism,
    piece_of,
    pieces_in,
)
from ckptkit.formats.distributed.reading import RankGroup, RankReader, groups, reader_of
from ckptkit.formats.folder import unread
from ckptkit.formats.format import Probe

MODEL, OPTIMIZER, REST = "model", "optimizer", "extra_state"
_TRIED = 16  # maximum number of file groups that `matches` examines


# Maps the id of a node to the parsed shard. The reader keeps the nodes alive.
Known = dict[int, Piece]


class RankKind(NamedTuple):
    """A group of files, and the role of the group. The first file determines the role.

    The role is "model", "optimizer", "extra_state", or "" if the file cannot be used.
    """

    group: RankGroup
    role: str
    pieces: bool  # whether the files contain DTensors or ShardedTensors


def matches(probe: Probe) -> bool:
    """Return whether the folder contains rank files with DTensors or ShardedTensors."""
    found = groups(probe.names)
    if not found:
        return False
    reader = reader_of(probe)
    return any(_matches(reader, group) for group in islice(found, _TRIED))


def _matches(reader: RankReader, group: RankGroup) -> bool:
    try:
        checkpoint = reader.read(group.first)
    except CkptkitError:
        return group.world is not None  # `read` raises the error again, with a better message
    return any(each.name in CLASSES for each in checkpoint.globals)


def read(probe: Probe, format: str) -> Checkpoint:
    """Return the merged tree of all ranks. Read only the headers of each file.

    Raises AmbiguousError for files of two runs. Raises CorruptError if a rank's file is missing or
    renamed, or if the files are from two saves. Raises UnsupportedError if the files do not
    describe their shards.
    """
    return _Reading(probe, format).read()


class _Reading:
    def __init__(self, probe: Probe, format: str) -> None:
        self.folder: Folder = probe.folder
        self.names = probe.names
        self.format = format
        self.reader = reader_of(probe)
        self.joiner = Joiner(Copies(probe.options.copies))
        self.warnings: list[str] = []
        self.known: Known = {}

    def read(self) -> Checkpoint:
        kinds = [self._kind(group) for group in groups(self.names)]
        model = self._only(kinds, MODEL)
        optimizer = self._only(kinds, OPTIMIZER)
        chosen = model or optimizer
        assert chosen is not None  # otherwise `matches` returns False
        ranked = self._ranked(chosen.group)
        world = _check_ranks(chosen.group, ranked, self.known)
        root = self._merged(chosen.group, ranked, world)
        extra = [each for each in kinds if each.role == REST and each.group.certain]
        if optimizer is not None and optimizer is not chosen:
            root = {MODEL: root, **self._optimizer(optimizer, ranked, world)}
        if extra and model is not None:
            root = root if optimizer is not None else {MODEL: root}
            root = {**root, **self._rest(extra)}
        self._note_unread(kinds)
        return Checkpoint(
            root, self.format, self.folder, globals=tuple(self.reader.globals),
            warnings=(*self.warnings, *self.joiner.copies.warnings(), *self.reader.warnings),
            about=_title(ranked, world, self.known),
        )  # fmt: skip

    def _kind(self, group: RankGroup) -> RankKind:
        root = self.reader.read(group.first).root
        pieces = next(pieces_in(root), None) is not None
        if is_optimizer(root):
            return RankKind(group, OPTIMIZER if pieces or group.certain else "", pieces)
        return RankKind(group, MODEL if pieces else REST, pieces)

    def _only(self, kinds: Sequence[RankKind], role: str) -> RankKind | None:
        """Return the group with this role, or None. Raises AmbiguousError for several groups."""
        found = [each for each in kinds if each.role == role]
        if len(found) > 1:
            names = [each.group.first for each in found]
            worlds = {each.group.world for each in found}
            what = "saves of different numbers of ranks" if len(worlds) > 1 else "models"
            raise AmbiguousError(
                f"contains the rank files of {len(found)} {what}: {some(names)}",
                hint="move the files of each save or model into a separate folder",
            )
        return found[0] if found else None

    def _ranked(self, group: RankGroup) -> list[Ranked]:
        """Read the files of a group, sorted by rank. Check the ranks in the file names."""
        found = []
        for number, name in group.files.items():
            root = self.reader.read(name).root
            ranks = {piece.rank for piece in _pieces(root, self.known)} - {None}
            if len(ranks) > 1:
                raise CorruptError(
                    f"contains shards of several ranks, not of one: {sorted(map(str, ranks))}",
                    where=name,
                )
            rank = number if not ranks else int(str(ranks.pop()))
            by_name = group.certain or list(group.files) == list(range(len(group.files)))
            if rank != number and by_name:
                raise CorruptError(
                    f"{name} was written by rank {rank:,}, but its name contains another number: "
                    "files were renamed, or are of several saves",
                    hint="give each file the number of its rank, or download the files again",
                )
            found.append(Ranked(rank, name, root))
        return sorted(found, key=lambda each: each.rank)

    def _merged(self, group: RankGroup, ranked: list[Ranked], world: World) -> Node:
        missing = [rank for rank in world.ranks if rank not in {each.rank for each in ranked}]
        if not missing:
            return Merger(ranked, self.joiner, self.known).merged()
        names = [group.name(rank) for rank in missing]
        try:
            root = Merger(ranked, self.joiner, self.known).merged()
        except CorruptError as error:
            raise _missing(missing, names, world) from error
        self.warnings.append(
            f"ckptkit did not need these missing files, because other files contain replicas of "
            f"their shards: {some(names)}"
        )
        return root

    def _optimizer(self, kind: RankKind, model: list[Ranked], world: World) -> dict[str, Node]:
        """Return the merged optimizer. If ckptkit does not know how the state was split, warn, and
        return an empty dict.
        """
        ranked = self._ranked(kind.group)
        if kind.pieces:
            _check_ranks(kind.group, ranked, self.known)
            return {OPTIMIZER: self._merged(kind.group, ranked, world)}
        if {each.rank for each in ranked} != {each.rank for each in model}:
            raise CorruptError(
                f"the ranks of the optimizer files {some(list(kind.group.files.values()))} differ "
                "from the ranks of the model files"
            )
        try:
            return {OPTIMIZER: fsdp_flat.merged(ranked, model, self.joiner)}
        except fsdp_flat.UnknownError as error:
            self.warnings.append(f"dropped the optimizer: {error}")
            return {}

    def _rest(self, kinds: Sequence[RankKind]) -> dict[str, Node]:
        made: dict[str, Node] = {}
        for kind in kinds:
            key = (
                REST
                if REST in kind.group.pattern
                else kind.group.pattern.partition("\0")[0].strip("_-.")
            )
            made[key] = self.reader.read(kind.group.first).root
            if len(kind.group.files) > 1:
                self.warnings.append(
                    f"ckptkit read only the first rank's {key}, but every rank saved one"
                )
        return made

    def _note_unread(self, kinds: Sequence[RankKind]) -> None:
        ours = set(flatten(each.group.files.values() for each in kinds))
        used = set(flatten(each.group.files.values() for each in kinds if each.role))
        self.warnings += unread(self.names, used | ours)


class World(NamedTuple):
    """The ranks that have shards, and the total number of ranks."""

    ranks: tuple[int, ...]
    size: int


def _pieces(root: Node, known: Known) -> Iterator[Piece]:
    meshes: dict[int, Mesh] = {}
    for path, node in pieces_in(root):
        if id(node) in known:
            yield known[id(node)]
            continue
        try:
            piece = piece_of(node, meshes)
        except CkptkitError as error:
            error.message = f"{join(path)[:80]!r}: {error.message}"
            raise
        if piece is not None:
            known[id(node)] = piece
            yield piece


def _check_ranks(group: RankGroup, ranked: Sequence[Ranked], known: Known) -> World:
    """Return the ranks and the world size that the shards record.

    Raises CorruptError if a file name contradicts the recorded ranks.
    """
    every: set[int] = set()
    count = 0
    for each in ranked:
        for piece in _pieces(each.root, known):
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
    others = [each.file for each in ranked if each.rank not in every]
    if others:
        raise CorruptError(
            f"was written by {count:,} ranks, but contains files of other ranks: {some(others)}"
        )
    return World(tuple(sorted(every)), count)


def _missing(missing: Sequence[int], names: Sequence[str], world: World) -> CorruptError:
    what = "rank" if len(missing) == 1 else "ranks"
    are = "is" if len(missing) == 1 else "are"
    return CorruptError(
        f"{what} {some(f'{rank:,}' for rank in missing)} of {world.size:,} {are} missing: "
        f"there is no {some(names)}",
        hint="every rank wrote its own file: copy the missing files from the same source",
    )


def _title(ranked: Sequence[Ranked], world: World, known: Known) -> str:
    forms = []
    pieces = list(_pieces(ranked[0].root, known))
    for piece in pieces:
        if isinstance(piece, ShardPiece):
            forms.append("ShardedTensor")
        elif isinstance(piece, MeshPiece):
            names = f" ({', '.join(piece.mesh.names)})" if piece.mesh.names else ""
            forms.append(f"DTensor on a mesh of {' x '.join(map(str, piece.mesh.shape))}{names}")
    kinds = list(dict.fromkeys(forms))
    ranks = f"{len(ranked):,} of {world.size:,} ranks"
    return f"rank files of {parallelism(pieces)}: {ranks}; {'; '.join(kinds[:3])}"
