"""Join the shards of tensors from several files, and compare replicas of the same shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import Arranged, contiguous
from ckptkit.compute.compare import compare
from ckptkit.compute.strided import StridedCopy, check_cover, normal, of_box
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import size, some, typed, typed_value
from ckptkit.core.tree import Node, Path, join, key_text, like, type_name
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.meshes import LocalShard, Mesh, Piece, piece_of
from ckptkit.formats.distributed.reading import RankReader
from ckptkit.formats.format import Probe
from ckptkit.formats.table import PARALLEL

# If replicas have no checksums, ckptkit compares at most this number of bytes in total, unless the
# policy is `check`.
READ = 16 << 20
SHOWN = 80  # maximum length of a name in a message
FLAT = "_flat_param"
MIXED = "the files are of different saves"


class Joiner:
    """Joins the shards of tensors, and compares the replicas of shards.

    Several files can contain replicas of the same shard. The replicas must be equal. If replicas
    differ, the files are from different saves. Tensors that are joined from the same bytes share a
    storage. The option `copies` is one of these strings:

    * ``compare`` compares checksums. Tensors without checksums are compared byte for byte, up to a
      total of 16 MiB.
    * ``check`` compares checksums. Tensors without checksums are compared byte for byte.
    * ``first`` is like ``compare``, but raises no error for differences.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.policy = probe.options.copies
        self.notes: list[str] = []  # warnings of the layout
        self.equal = 0  # number of replicas that are equal
        self._left: list[int] = []  # number of bytes of each replica that was not compared
        self._passed: list[str] = []  # names of replicas that differ (only policy `first`)
        self._read = 0
        self._made: dict[object, Storage] = {}
        self._cpu: dict[int, tuple[Storage, Storage]] = {}
        self._known: dict[int, Piece] = {}
        self._meshes: dict[int, Mesh] = {}

    def checkpoint(
        self,
        root: Node,
        reader: RankReader,
        about: str,
        *,
        key: str | None = None,
        extras: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Return the merged checkpoint. `about` describes the layout in one line."""
        return Checkpoint(
            root, PARALLEL.name, self.probe.folder, globals=tuple(reader.globals),
            warnings=(*self.notes, *self._warnings(), *reader.warnings), about=about, key=key,
            extras=extras or {},
        )  # fmt: skip

    def piece(self, path: Path, node: Node) -> Piece | None:
        """Parse a DTensor or ShardedTensor once. Return None for any other node.

        The caller must keep the node alive.
        """
        if id(node) not in self._known:
            try:
                found = piece_of(node, self._meshes)
            except CkptkitError as error:
                error.message = f"{_name(path)}: {error.message}"
                raise
            if found is None:
                return None
            self._known[id(node)] = found
        return self._known[id(node)]

    def compare(self, first: Tensor, other: Tensor, *, always: bool = True) -> bool | None:
        """Return whether two replicas are equal. Return None if the replicas were not compared.

        If checksums are missing, compare the bytes. If `always` is true, ignore the byte limit of
        the policy.
        """
        found = _by_checksum(first, other)
        if found is None and not always:
            self._read += first.nbytes
            always = self.policy == "check" or self._read <= READ
        return compare(first, other) is None if found is None and always else found

    def replica(self, name: str, first: Tensor, other: Tensor, files: tuple[str, str]) -> None:
        """Compare the tensors of two files.

        Raises CorruptError if the tensors differ, except with the policy ``first``.
        """
        same = self.compare(first, other, always=False)
        if same is None:
            self._left.append(first.nbytes)
        elif same:
            self.equal += 1
        elif self.policy == "first":
            self._passed.append(name)
        else:
            how = "the checksums differ"
            if first.nbytes <= READ:
                found = compare(first, other)
                how += ", although the bytes are equal: one of the files is damaged"
                if found is not None:
                    how = f"{found.count:,} of {first.numel:,} elements differ"
            raise CorruptError(
                f"{name[:SHOWN]!r} should be equal in {files[0]} and {files[1]}, but {how}",
                hint=f"{MIXED}, or the ranks diverged; "
                f"{typed_value('copies', 'first')} uses the first replica of each tensor",
            )

    def same(self, name: str, held: Sequence[tuple[Tensor, str]]) -> Tensor:
        """Return the first of several replicas. Raises CorruptError if the replicas differ."""
        first, file = held[0]
        for other, place in held[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise CorruptError(
                    f"{name[:SHOWN]!r} is {first.dtype} {first.shape} in {file}, but "
                    f"{other.dtype} {other.shape} in {place}",
                    hint=MIXED,
                )
            self.replica(name, first, other, (file, place))
        return self.plain(first)

    def _warnings(self) -> Iterator[str]:
        if self.policy == "check" and not (self.equal or self._passed):
            yield (
                "no two ranks have the same tensor: ckptkit cannot verify that the files are of "
                "one save"
            )
        if self._left:
            check = typed("--check-copies", "copies='check'")
            yield (
                f"{len(self._left):,} replicas ({size(sum(self._left))}) were not compared, and "
                f"ckptkit used the first replica of each tensor: {check} compares the replicas"
            )
        if self._passed:
            names = list(dict.fromkeys(self._passed))
            yield f"replicas differ, and ckptkit used the first replica: {some(names)}"

    def tensor(
        self, name: str, dtype: DType, shape: Shape, held: Iterable[tuple[LocalShard, str]]
    ) -> Tensor:
        """Return the tensor that consists of shards. Each shard has the name of its file.

        Raises CorruptError if shards overlap, leave a gap, or differ from their replicas.
        """
        boxes: dict[tuple[Shape, Shape], tuple[LocalShard, str]] = {}
        for box, file in held:
            known, place = boxes.setdefault((box.offsets, box.sizes), (box, file))
            if known is not box:
                self.replica(name, known.tensor, box.tensor, (place, file))
        try:
            check_cover(shape, list(boxes))
        except CkptkitError as error:
            error.message = f"{name[:SHOWN]!r}: {error.message}"
            raise
        shards = [boxes[place][0] for place in sorted(boxes)]
        copies = tuple(
            of_box(shape, box.offsets, box.sizes, contiguous_stride(box.sizes), source=number)
            for number, box in enumerate(shards)
        )
        return self.arranged(name, dtype, shape, [box.tensor for box in shards], copies)

    def arranged(
        self,
        name: str,
        dtype: DType,
        shape: Shape,
        tensors: Sequence[Tensor],
        copies: tuple[StridedCopy, ...],
    ) -> Tensor:
        """Return the tensor that `copies` assemble from the bytes of `tensors`.

        If the result would equal one of `tensors`, return this tensor.
        """
        if len(copies) == 1:
            tensor = tensors[copies[0].source]
            dims = normal(copies[0].dims)
            if tensor.shape == shape and len(dims) < 2 and all(dim[1:] == (1, 1) for dim in dims):
                return self.plain(tensor)
        if dtype.kind == "quantized" or dtype.bits % 8:
            raise UnsupportedError(f"{name[:SHOWN]!r}: ckptkit cannot join shards of {dtype}")
        sources = tuple(
            (id(each.storage), each.offset, each.shape, each.stride) for each in tensors
        )
        key = dtype.name, shape, copies, sources
        if key not in self._made:
            records = tuple(map(contiguous, tensors))
            nbytes = dtype.nbytes(prod(shape))
            self._made[key] = Storage(Arranged(records, copies, dtype.itemsize, nbytes))
        return Tensor(self._made[key], dtype, shape, contiguous_stride(shape))

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the tensor with a storage on the CPU, because joined tensors are on the CPU."""
        storage = tensor.storage
        if storage is None or tensor.layout != "strided":
            return tensor
        if id(storage) not in self._cpu:
            on_cpu = storage if storage.device == "cpu" else replace(storage, device="cpu")
            self._cpu[id(storage)] = storage, on_cpu
        on_cpu = self._cpu[id(storage)][1]
        return replace(tensor, storage=on_cpu, requires_grad=False, kind="tensor")


def _by_checksum(a: Tensor, b: Tensor) -> bool | None:
    """Return whether two tensors of the same shape are equal, according to their checksums.

    Return None if a checksum is missing, or if the checksums also cover bytes of other tensors.
    """
    one, other = a.storage, b.storage
    if one is None or other is None or one is other:
        return one is other
    if not a.nbytes:
        return True
    if one.crc32 is None or other.crc32 is None or one.nbytes != other.nbytes:
        return None
    if one.big_endian != other.big_endian or (a.offset, a.stride) != (b.offset, b.stride):
        return None
    if one.crc32 == other.crc32:
        return True
    return False if a.is_contiguous and one.nbytes == a.nbytes else None


# Each rank saved a tree of dicts, lists and values. Merging the trees joins the shards of each
# tensor. All other values must be equal on all ranks.


class Ranked(NamedTuple):
    """The tree that a rank saved, and the file that contains the tree."""

    rank: int
    file: str
    root: Node


class Merger:
    """Merges the trees of all ranks, entry by entry. Errors name the entry and the files."""

    def __init__(self, ranks: Sequence[Ranked], joiner: Joiner) -> None:
        self.ranks = ranks
        self.joiner = joiner
        self._made: dict[tuple[int, ...], Node] = {}

    def merged(self, path: Path = ()) -> Node:
        """Return the merged tree. In errors, the names of entries begin with `path`."""
        return self._node(path, [each.root for each in self.ranks])

    def _node(self, path: Path, nodes: Sequence[Node]) -> Node:
        key = tuple(map(id, nodes))
        if key not in self._made:
            check("depth", len(path), "levels of values")
            self._made[key] = self._merge(path, nodes)
        return self._made[key]

    def _merge(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        piece = self.joiner.piece(path, first)
        if piece is not None:
            return self._pieces(path, piece, nodes)
        if first is not None and as_tensor(first) is not None:
            held = []
            for ranked, node in zip(self.ranks, nodes, strict=True):
                tensor = as_tensor(node)
                if tensor is None:
                    raise self._differ(path, ranked, "a tensor", "none")
                held.append((tensor, ranked.file))
            return self.joiner.same(join(path), held)
        if isinstance(first, (dict, list, tuple)):
            return self._entries(path, nodes)
        # Strings, bytes and numbers must be equal on all ranks. All other objects must have the
        # same class. The merged tree contains the first rank's object.
        plain = isinstance(first, _PLAIN)
        for ranked, node in zip(self.ranks, nodes, strict=True):
            equal = type(node) is type(first) and (not plain or repr(node) == repr(first))
            if not equal and self.joiner.policy != "first":
                raise self._differ(path, ranked, _value(first), _value(node))
        return first

    def _pieces(self, path: Path, first: Piece, nodes: Sequence[Node]) -> Node:
        """Join the ranks' shards of a tensor. Raises CorruptError if the shards do not match."""
        held: list[tuple[LocalShard, str]] = []
        for ranked, node in zip(self.ranks, nodes, strict=True):
            piece = self.joiner.piece(path, node)
            if piece is None:
                raise self._differ(path, ranked, "one rank's shard of a tensor", "not a shard")
            if (piece.dtype, piece.shape) != (first.dtype, first.shape):
                whole, other = (f"{each.dtype} {each.shape}" for each in (first, piece))
                raise self._differ(path, ranked, whole, other)
            try:
                held += [(box, ranked.file) for box in piece.boxes(ranked.rank)]
            except CkptkitError as error:
                error.message = f"{_name(path)} in {ranked.file}: {error.message}"
                raise
        name = join(path)
        if name.rpartition(".")[2] == FLAT:
            raise UnsupportedError(
                f"contains flat parameters of FSDP (LOCAL_STATE_DICT), e.g. {_name(path)}; the "
                "files do not record the names and shapes of the parameters inside",
                hint="load it in the training script, and save with SHARDED_STATE_DICT or "
                "FULL_STATE_DICT",
            )
        return self.joiner.tensor(name, first.dtype, first.shape, held)

    def _entries(self, path: Path, nodes: Sequence[Node]) -> Node:
        """Merge dicts with the same keys, or lists of the same length."""
        first, dicts = nodes[0], []
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if isinstance(node, dict) != isinstance(first, dict) or not isinstance(
                node, (dict, list, tuple)
            ):
                raise self._differ(path, ranked, _value(first), _value(node))
            entries = node if isinstance(node, dict) else dict(enumerate(node))
            dicts.append(entries)
            every = (*dicts[0], *entries)
            odd = [key for key in every if key not in dicts[0] or key not in entries]
            if odd:
                places = (self.ranks[0].file, ranked.file)
                has, lacks = places if odd[0] in dicts[0] else places[::-1]
                raise CorruptError(
                    f"{_name((*path, odd[0]))} is in {has}, but not in {lacks}", hint=MIXED
                )
        made = {key: self._node((*path, key), [each[key] for each in dicts]) for key in dicts[0]}
        if isinstance(first, dict):
            return like(first, made)
        return tuple(made.values()) if isinstance(first, tuple) else list(made.values())

    def _differ(self, path: Path, ranked: Ranked, first: str, other: str) -> CorruptError:
        return CorruptError(
            f"{_name(path)} is {first} in {self.ranks[0].file}, but {other} in {ranked.file}",
            hint=MIXED,
        )


_PLAIN = (str, bytes, int, float, complex, type(None))


def _name(path: Path) -> str:
    return repr(join(path)[:SHOWN])


def _value(node: Node) -> str:
    if isinstance(node, (str, bytes)):
        return repr(node[:SHOWN])
    return key_text(node)[:SHOWN] if isinstance(node, _PLAIN) else f"a {type_name(node)}"
