"""Join the shards of tensors from several files, and compare replicas of the same shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import Arranged, contiguous
from ckptkit.compute.compare import compare
from ckptkit.compute.strided import StridedCopy, check_cover, normal, of_box
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import size, some, typed, typed_value
from ckptkit.core.tree import Node, OrderedMapping, Path, join, key_text, type_name
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.meshes import LocalShard, Mesh, Piece, piece_of

# Several files can contain replicas of the same shard. The replicas must be equal. If replicas
# differ, the files are from different saves.


COMPARE, CHECK, FIRST = "compare", "check", "first"  # policies for replicas
CHOICES = (COMPARE, CHECK, FIRST)
# If replicas have no checksums, ckptkit compares at most this number of bytes in total, unless the
# policy is `check`.
READ = 16 << 20
SHOWN = 80  # maximum length of a name in a message


class Replica(NamedTuple):
    """A tensor in one file, and its replica in another file. The two tensors must be equal."""

    name: str
    first: Tensor
    other: Tensor
    files: tuple[str, str]


class Copies:
    """Compares replicas and counts the results. `policy` is one of these strings:

    * ``compare`` compares checksums. Tensors without checksums are compared byte for byte, up to a
      total of 16 MiB.
    * ``check`` compares checksums. Tensors without checksums are compared byte for byte.
    * ``first`` is like ``compare``, but raises no error for differences.
    """

    def __init__(self, policy: str = COMPARE) -> None:
        self.policy = policy
        self.left: list[Replica] = []  # replicas that were not compared
        self.equal = 0
        self.passed: list[str] = []  # names of replicas that differ (only policy `first`)
        self._read = 0

    def same(self, copy: Replica, *, always: bool = True) -> bool | None:
        """Return whether two replicas are equal. Return None if the replicas were not compared.

        If checksums are missing, compare the bytes. If `always` is true, ignore the byte limit of
        the policy.
        """
        found = _by_checksum(copy.first, copy.other)
        if found is None and not always:
            self._read += copy.first.nbytes
            always = self.policy == CHECK or self._read <= READ
        return compare(copy.first, copy.other) is None if found is None and always else found

    def add(self, copy: Replica) -> None:
        """Compare two replicas.

        Raises CorruptError if the replicas differ, except with the policy ``first``.
        """
        same = self.same(copy, always=False)
        if same is None:
            self.left.append(copy)
        elif same:
            self.equal += 1
        elif self.policy == FIRST:
            self.passed.append(copy.name)
        else:
            how = "the checksums differ"
            if copy.first.nbytes <= READ:
                found = compare(copy.first, copy.other)
                how += ", although the bytes are equal: one of the files is damaged"
                if found is not None:
                    how = f"{found.count:,} of {copy.first.numel:,} elements differ"
            raise CorruptError(
                f"{copy.name[:SHOWN]!r} should be equal in {copy.files[0]} and {copy.files[1]}, "
                f"but {how}",
                hint="the files are of different saves, or the ranks diverged; "
                f"{typed_value('copies', 'first')} uses the first replica of each tensor",
            )

    def warnings(self) -> Iterator[str]:
        """Yield a warning if replicas differ, and a warning if replicas were not compared.

        If the policy is ``check``, also yield a warning if no two ranks have the same tensor.
        """
        if self.policy == CHECK and not (self.equal or self.passed):
            yield (
                "no two ranks have the same tensor: ckptkit cannot verify that the files are of "
                "one save"
            )
        if self.left:
            nbytes = sum(copy.first.nbytes for copy in self.left)
            check = typed("--check-copies", "copies='check'")
            yield (
                f"{len(self.left):,} replicas ({size(nbytes)}) were not compared, and ckptkit used "
                f"the first replica of each tensor: {check} compares the replicas"
            )
        if self.passed:
            names = list(dict.fromkeys(self.passed))
            yield f"replicas differ, and ckptkit used the first replica: {some(names)}"


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
    whole = a.is_contiguous and one.nbytes == a.nbytes
    return False if whole else None


# Joining the shards of a tensor from several files


class Held(NamedTuple):
    """A shard of a tensor, and the file that contains the shard."""

    box: LocalShard
    file: str


class Joiner:
    """Joins the shards of tensors. Tensors that are joined from the same bytes share a storage."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._made: dict[object, Storage] = {}
        self._cpu: dict[int, tuple[Storage, Storage]] = {}

    def tensor(self, name: str, dtype: DType, shape: Shape, held: Iterable[Held]) -> Tensor:
        """Return the tensor that consists of the shards `held`.

        Raises CorruptError if shards overlap, leave a gap, or differ from their replicas.
        """
        boxes: dict[tuple[Shape, Shape], Held] = {}
        for each in held:
            known = boxes.setdefault((each.box.offsets, each.box.sizes), each)
            if known is not each:
                self.copies.add(
                    Replica(name, known.box.tensor, each.box.tensor, (known.file, each.file))
                )
        try:
            check_cover(shape, list(boxes))
        except CkptkitError as error:
            error.message = f"{name[:SHOWN]!r}: {error.message}"
            raise
        held_boxes = [boxes[place].box for place in sorted(boxes)]
        copies = tuple(
            of_box(shape, box.offsets, box.sizes, contiguous_stride(box.sizes), source=number)
            for number, box in enumerate(held_boxes)
        )
        return self.arranged(name, dtype, shape, [box.tensor for box in held_boxes], copies)

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
            (copy,) = copies
            tensor = tensors[copy.source]
            dims = normal(copy.dims)
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
            on_cpu = Storage(storage.record, "cpu", storage.crc32, storage.big_endian)
            self._cpu[id(storage)] = storage, storage if storage.device == "cpu" else on_cpu
        return Tensor(
            self._cpu[id(storage)][1], tensor.dtype, tensor.shape, tensor.stride, tensor.offset,
            conj=tensor.conj, neg=tensor.neg,
        )  # fmt: skip

    def same(self, name: str, held: Sequence[tuple[Tensor, str]]) -> Tensor:
        """Return the first of several replicas. Raises CorruptError if the replicas differ."""
        first, file = held[0]
        for other, place in held[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                one, two = (f"{each.dtype} {each.shape}" for each in (first, other))
                raise CorruptError(
                    f"{name[:SHOWN]!r} is {one} in {file}, but {two} in {place}",
                    hint="the files are of different saves",
                )
            self.copies.add(Replica(name, first, other, (file, place)))
        return self.plain(first)


# Each rank saved a tree of dicts, lists and values. Merging the trees joins the shards of each
# tensor. All other values must be equal on all ranks.


FLAT = "_flat_param"
_MIXED = "the files are of different saves"


class Ranked(NamedTuple):
    """The tree that a rank saved, and the file that contains the tree."""

    rank: int
    file: str
    root: Node


class Merger:
    """Merges the trees of all ranks, entry by entry. Errors name the entry and the files."""

    def __init__(self, ranks: Sequence[Ranked], joiner: Joiner, known: Mapping[int, Piece]) -> None:
        self.ranks = ranks
        self.joiner = joiner
        self.known = known  # parsed shards, by the id of the node
        self._made: dict[tuple[int, ...], Node] = {}
        self._meshes: dict[int, Mesh] = {}

    def merged(self) -> Node:
        return self._node((), [each.root for each in self.ranks])

    def _node(self, path: Path, nodes: Sequence[Node]) -> Node:
        key = tuple(map(id, nodes))
        if key not in self._made:
            check("depth", len(path), "levels of values")
            self._made[key] = self._merge(path, nodes)
        return self._made[key]

    def _merge(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        pieces: list[Piece | None] = []
        for node in nodes:
            try:
                known = self.known.get(id(node))
                pieces.append(piece_of(node, self._meshes) if known is None else known)
            except CkptkitError as error:
                error.message = f"{_name(path)}: {error.message}"
                raise
        if pieces[0] is not None:
            return self._pieces(path, pieces[0], pieces)
        if first is not None and as_tensor(first) is not None:
            held = []
            for ranked, node in zip(self.ranks, nodes, strict=True):
                tensor = as_tensor(node)
                if tensor is None:
                    raise self._differ(path, ranked, "a tensor", "none")
                held.append((tensor, ranked.file))
            return self.joiner.same(join(path), held)
        if isinstance(first, dict):
            return self._mapping(path, nodes)
        if isinstance(first, (list, tuple)):
            return self._sequence(path, nodes)
        # Strings, bytes and numbers must be equal on all ranks. All other objects must have the
        # same class. The merged tree contains the first rank's object.
        plain = isinstance(first, (str, bytes, int, float, complex, type(None)))
        for ranked, node in zip(self.ranks, nodes, strict=True):
            equal = type(node) is type(first) and (not plain or repr(node) == repr(first))
            if not equal and self.joiner.copies.policy != FIRST:
                raise self._differ(path, ranked, _value(first), _value(node))
        return first

    def _pieces(self, path: Path, first: Piece, pieces: Sequence[Piece | None]) -> Node:
        """Join the ranks' shards of a tensor. Raises CorruptError if the shards do not match."""
        name = join(path)
        held: list[Held] = []
        for ranked, piece in zip(self.ranks, pieces, strict=True):
            if piece is None:
                raise self._differ(path, ranked, "one rank's shard of a tensor", "not a shard")
            if (piece.dtype, piece.shape) != (first.dtype, first.shape):
                whole, other = (f"{each.dtype} {each.shape}" for each in (first, piece))
                raise self._differ(path, ranked, whole, other)
            try:
                held += [Held(box, ranked.file) for box in piece.boxes(ranked.rank)]
            except CkptkitError as error:
                error.message = f"{_name(path)} in {ranked.file}: {error.message}"
                raise
        if name.rpartition(".")[2] == FLAT:
            raise UnsupportedError(
                f"contains flat parameters of FSDP (LOCAL_STATE_DICT), e.g. {_name(path)}; the "
                "files do not record the names and shapes of the parameters inside",
                hint="load it in the training script, and save with SHARDED_STATE_DICT or "
                "FULL_STATE_DICT",
            )
        return self.joiner.tensor(name, first.dtype, first.shape, held)

    def _mapping(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if not isinstance(node, dict):
                raise self._differ(path, ranked, "a dict", "none")
            odd = [key for key in (*first, *node) if key not in first or key not in node]
            if odd:
                where = (self.ranks[0].file, ranked.file)
                has, lacks = where if odd[0] in first else where[::-1]
                raise CorruptError(
                    f"{_name((*path, odd[0]))} is in {has}, but not in {lacks}", hint=_MIXED
                )
        made = {key: self._node((*path, key), [node[key] for node in nodes]) for key in first}
        return OrderedMapping(made, first.state) if isinstance(first, OrderedMapping) else made

    def _sequence(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if not isinstance(node, (list, tuple)) or len(node) != len(first):
                raise self._differ(path, ranked, f"{len(first):,} values", "another number")
        made = [
            self._node((*path, number), [node[number] for node in nodes])
            for number in range(len(first))
        ]
        return tuple(made) if isinstance(first, tuple) else made

    def _differ(self, path: Path, ranked: Ranked, first: str, other: str) -> CorruptError:
        return CorruptError(
            f"{_name(path)} is {first} in {self.ranks[0].file}, but {other} in {ranked.file}",
            hint=_MIXED,
        )


def _name(path: Path) -> str:
    return repr(join(path)[:SHOWN])


def _value(node: Node) -> str:
    if isinstance(node, (str, bytes, int, float, complex, type(None))):
        return key_text(node)[:SHOWN] if not isinstance(node, (str, bytes)) else repr(node[:SHOWN])
    return f"a {type_name(node)}"
