"""Prove that the chunks of a tensor cover it: every element is in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

from ckptkit.core.errors import CorruptError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape

Box = tuple[Shape, Shape]  # offsets and sizes, in elements
Region = tuple[tuple[int, int], ...]  # begin and end in each dimension


def check_cover(shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise CorruptError unless the boxes tile an array of `shape`; empty boxes are ignored.

    The array is cut along planes that no box crosses, dimension by dimension, until each part has
    one box: the chunks of a device mesh take a few steps. Raises LimitError where it takes too
    many.
    """
    whole = tuple((0, n) for n in shape)
    inside = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"a chunk has {len(sizes)} dimensions, the tensor {len(shape)}")
        region = tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True))
        if any(end > n for (_, end), n in zip(region, shape, strict=True)):
            raise CorruptError(f"the chunk {_text(region)} reaches out of shape {shape}")
        if 0 not in sizes:
            inside.append(region)
    waiting = [(whole, inside)] if 0 not in shape else []
    visits = 0
    while waiting:
        region, held = waiting.pop()
        visits += len(shape) * len(held)
        check("chunk_visits", visits, "looks at the chunks of one tensor")
        waiting.extend(_cut(region, held))


def _cut(region: Region, held: list[Region]) -> list[tuple[Region, list[Region]]]:
    """Return the parts of the region, with the boxes in each; empty if one box fills it."""
    if held == [region]:
        return []
    for axis in range(len(region)):
        parts = _cut_along(axis, region, held)
        if len(parts) > 1:
            return parts
    _check_uncut(region, held)
    return []


def _cut_along(axis: int, region: Region, held: list[Region]) -> list[tuple[Region, list[Region]]]:
    begin, stop = region[axis]
    parts: list[tuple[Region, list[Region]]] = []
    group: list[Region] = []
    reached = begin
    for box in sorted(held, key=lambda box: box[axis]):
        low, high = box[axis]
        if low > reached:
            raise _hole(axis, region, reached, low)
        if low == reached and group:
            parts.append((_narrowed(axis, region, begin, low), group))
            begin, group = low, []
        group.append(box)
        reached = max(reached, high)
    if reached < stop:
        raise _hole(axis, region, reached, stop)
    return [*parts, (_narrowed(axis, region, begin, stop), group)]


def _check_uncut(region: Region, held: list[Region]) -> None:
    """Raise CorruptError for boxes that overlap or leave a hole, LimitError for a pinwheel layout.

    No plane separates them.
    """
    check("chunk_visits", len(held) ** 2, "looks at the chunks of one tensor")
    for one, other in combinations(held, 2):
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
        if all(low < high for low, high in common):
            raise CorruptError(f"two of its chunks overlap in {_text(common)}")
    if sum(map(_volume, held)) != _volume(region):
        raise CorruptError(f"its chunks leave a hole in {_text(region)}")


def _volume(region: Region) -> int:
    return prod(high - low for low, high in region)


def _narrowed(axis: int, region: Region, low: int, high: int) -> Region:
    return (*region[:axis], (low, high), *region[axis + 1 :])


def _hole(axis: int, region: Region, low: int, high: int) -> CorruptError:
    return CorruptError(f"its chunks do not cover {_text(_narrowed(axis, region, low, high))}")


def _text(region: Region) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in region)}]"
