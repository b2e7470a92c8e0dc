"""The verbs of a table: how the parts of a tensor that several ranks hold are its whole, and back.

    Cut(dim)                 joined along a dimension
    Cut(dim, blocks=2)       the same for each of so many blocks that every part has ([gate; up])
    Cut(dim, blocks=(8, 4))  blocks of sizes in this ratio ([q; k]), `exact`: of these sizes in all
    Widths(dim, ((4, 4), (2, 2)))  blocks of these widths in each part
    Heads(from_, heads)      joined along dimension 0, and the rows of heads put in another order
    Same()                   equal in all parts
    Sum(), Mean()            added up, averaged; Mean of equal parts is one of them
    Drop(reason)             left out
    Refuse(reason)           known, and not put together

Widths of parts are those of the files: they need not be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.mixing import has_mean, mean_record, sum_record
from ckptkit.core.errors import CorruptError, UsageError
from ckptkit.core.pieces import Box, part
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.formats.parallel.copies import Copy
from ckptkit.formats.parallel.joining import Held, Joiner

Parts = Sequence[
    tuple[Tensor, str]
]  # those of one tensor in the order of the ranks, and the files that hold them


@dataclass(frozen=True, slots=True)
class Verb:
    """A way to merge the parts of a tensor."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        """The whole. Raises CorruptError where the parts do not go together in this way."""
        raise NotImplementedError

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        """The boxes that each of `count` parts is made of. Raises UsageError where they do not come
        out even."""
        raise UsageError(
            f"{name!r} cannot be cut: its parts would not be the ones that were put together"
        )


@dataclass(frozen=True, slots=True)
class Cut(Verb):
    """Joined along a dimension, block by block."""

    dim: int
    blocks: int | tuple[int, ...] = 1
    exact: bool = False

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        _alike(name, parts, self.dim)
        widths = [self._widths(name, tensor.shape[self.dim], file) for tensor, file in parts]
        made = _by_blocks(name, parts, self.dim, widths, joiner)
        expected = sum(self.blocks) if isinstance(self.blocks, tuple) else 0
        if self.exact and made.shape[self.dim] != expected:
            raise CorruptError(
                f"{name!r} has {made.shape[self.dim]:,} rows in all, and blocks of {expected:,}"
            )
        return made

    def _widths(self, name: str, size: int, file: str) -> list[int]:
        """The sizes of the blocks of a part."""
        if isinstance(self.blocks, int):
            if size % self.blocks:
                raise CorruptError(f"{name!r}: {size:,} rows in {file} are no {self.blocks} blocks")
            return [size // self.blocks] * self.blocks
        total = sum(self.blocks)
        widths = [size * block // total for block in self.blocks]
        if any(size * block % total for block in self.blocks):
            raise CorruptError(f"{name!r}: {size:,} rows in {file} are not cut like {self.blocks}")
        return widths

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        if self.dim >= len(whole.shape):
            raise UsageError(f"{name!r} has no dimension {self.dim} to be cut along")
        widths = self._widths(name, whole.shape[self.dim], "it")
        if any(width % count for width in widths):
            raise UsageError(f"{name!r}: {whole.shape} does not come out even in {count} parts")
        made: list[list[Box]] = []
        for rank in range(count):
            boxes, at, start = [], 0, 0
            for width in widths:
                own = width // count
                boxes.append(_slab(whole, self.dim, start + rank * own, own, at))
                at, start = at + own, start + width
            made.append(boxes)
        return made


@dataclass(frozen=True, slots=True)
class Widths(Verb):
    """Joined along a dimension, block by block, whose widths in each part are given."""

    dim: int
    blocks: tuple[tuple[int, ...], ...]  # of each block, by part

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        _alike(name, parts, self.dim)
        widths = [[block[rank] for block in self.blocks if rank < len(block)]
                  for rank in range(len(parts))]  # fmt: skip
        for (tensor, file), own in zip(parts, widths, strict=True):
            size = tensor.shape[self.dim]
            if len(own) != len(self.blocks) or sum(own) != size:
                raise CorruptError(f"{name!r}: {size:,} rows in {file} are no blocks of {own}")
        return _by_blocks(name, parts, self.dim, widths, joiner)


@dataclass(frozen=True, slots=True)
class Heads(Verb):
    """Rows of heads, of ``h`` heads, ``3`` kinds and ``d`` rows, from the order `order` to head by
    head (h3d).

    Megatron-LM wrote ``3hd`` at first (checkpoint_version 0), ``hd3`` then (1), and ``h3d`` since.
    """

    order: str
    rows: int  # of one head

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _alike(name, parts, 0)
        held: list[Held] = []
        at = 0
        for tensor, file in parts:
            heads, rest = divmod(tensor.shape[0], 3 * self.rows)
            if rest:
                raise CorruptError(
                    f"{name!r}: {tensor.shape[0]:,} rows in {file} are no heads of {self.rows}"
                )
            sizes = {"3": 3, "h": heads, "d": self.rows}
            steps = {axis: _after(self.order, axis, sizes) for axis in self.order}
            for head, kind in product(range(heads), range(3)):
                start = head * steps["h"] + kind * steps["3"]
                box = self._box(tensor, start, steps["d"], at)
                held.append(Held(box, file))
                at += self.rows
        return joiner.tensor(name, first.dtype, _with(first.shape, 0, at), held)

    def _box(self, tensor: Tensor, start: int, step: int, at: int) -> Box:
        sizes = _with(tensor.shape, 0, self.rows)
        stride = (tensor.stride[0] * step, *tensor.stride[1:])
        offset = tensor.offset + start * tensor.stride[0]
        rows = Tensor(tensor.storage, tensor.dtype, sizes, stride, offset)
        return Box(_with((0,) * len(sizes), 0, at), sizes, rows)


def _after(order: str, axis: str, sizes: dict[str, int]) -> int:
    step = 1
    for each in order[order.index(axis) + 1 :]:
        step *= sizes[each]
    return step


@dataclass(frozen=True, slots=True)
class Same(Verb):
    """Equal in all parts."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        return joiner.same(name, parts)

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        return [[Box((0,) * len(whole.shape), whole.shape, whole)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Sum(Verb):
    """Added up."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _numbers(name, parts)
        records = tuple(contiguous(tensor) for tensor, _ in parts)
        return _computed(first, Storage(sum_record(records, first.dtype)))


@dataclass(frozen=True, slots=True)
class Mean(Verb):
    """Averaged; equal parts are copied."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _numbers(name, parts)
        (tensor, file), *others = parts
        if all(
            joiner.copies.same(Copy(name, tensor, each, (file, place))) for each, place in others
        ):
            joiner.copies.equal += len(others)
            return joiner.plain(tensor)
        records = tuple(contiguous(each) for each, _ in parts)
        shares = (1.0,) * len(parts)
        return _computed(first, Storage(mean_record(records, (first.dtype,) * len(parts), shares)))


@dataclass(frozen=True, slots=True)
class Drop(Verb):
    """Left out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse(Verb):
    """Known, and not put together."""

    reason: str


def _by_blocks(
    name: str, parts: Parts, dim: int, widths: Sequence[Sequence[int]], joiner: Joiner
) -> Tensor:
    """The first blocks of all parts, then the second ones, and so on; `widths` are by part."""
    held: list[Held] = []
    at = 0
    for block in range(len(widths[0])):
        for (tensor, file), own in zip(parts, widths, strict=True):
            box = _slab(tensor, dim, sum(own[:block]), own[block], at)
            held += [Held(box, file)] if box.tensor.numel else []
            at += own[block]
    first = parts[0][0]
    return joiner.tensor(name, first.dtype, _with(first.shape, dim, at), held)


def _alike(name: str, parts: Parts, dim: int) -> Tensor:
    """The first of the parts, which agree in everything but one dimension."""
    (first, file), *_ = parts
    if dim >= len(first.shape):
        raise CorruptError(
            f"{name!r} is of shape {first.shape} in {file}: it has no dimension {dim}"
        )
    for tensor, place in parts:
        same = tensor.dtype == first.dtype and len(tensor.shape) == len(first.shape)
        if not same or _with(tensor.shape, dim, 0) != _with(first.shape, dim, 0):
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file}, {tensor.dtype} "
                f"{tensor.shape} in {place}",
                hint="the files are not of one save",
            )
    return first


def _numbers(name: str, parts: Parts) -> Tensor:
    """The first of the parts, which are of one shape and type, and have a mean."""
    (first, file), *_ = parts
    for tensor, place in parts:
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape) or not has_mean(tensor.dtype):
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file} and {tensor.dtype} "
                f"{tensor.shape} in {place}: "
                "they cannot be added up"
            )
    return first


def _computed(like: Tensor, storage: Storage) -> Tensor:
    return Tensor(storage, like.dtype, like.shape, contiguous_stride(like.shape))


def _slab(tensor: Tensor, dim: int, start: int, width: int, at: int) -> Box:
    """`width` indices of a dimension from `start`, which stand at index `at` of the result."""
    zeros = (0,) * len(tensor.shape)
    sizes = _with(tensor.shape, dim, width)
    return Box(_with(zeros, dim, at), sizes, part(tensor, _with(zeros, dim, start), sizes))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
