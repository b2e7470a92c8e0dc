"""Slice tensors with Python's syntax, such as ``[0, :, 3:7]``.

A slice is a view of the storage. Making a slice reads no bytes and evaluates no code.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from ckptkit.compute.arranged import refuse_without_elements
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Shape, Tensor

_NUMBER = r"-?[0-9]{1,18}"
_ITEM = re.compile(
    rf"(?P<at>{_NUMBER})|(?P<start>{_NUMBER})?:(?P<stop>{_NUMBER})?(?::(?P<step>[0-9]{{1,18}})?)?"
)


class Pick(NamedTuple):
    """The selected indices of one dimension: `size` indices that begin at `start`, with a step of
    `step`.

    If `single` is true, the dimension is removed, as by an integer index.
    """

    start: int
    size: int
    step: int = 1
    single: bool = False

    def __str__(self) -> str:
        if self.single:
            return str(self.start)
        stop = self.start + (self.size - 1) * self.step + 1 if self.size else self.start
        return f"{self.start}:{stop}" + (f":{self.step}" if self.step != 1 else "")

    def part(self, start: int, count: int) -> Pick:
        """Return at most `count` of the indices, beginning at position `start`."""
        return Pick(
            self.start + start * self.step, max(0, min(count, self.size - start)), self.step
        )


Picks = tuple[Pick, ...]


def parse(text: str, shape: Shape) -> Picks:
    """Parse a slice of a tensor with the shape `shape`. Return a Pick for each dimension.

    `text` contains integers, ``start:stop:step`` and at most one ``...``, separated by commas.
    Negative integers count from the end. Steps are positive. Dimensions without an item are
    selected completely. Raises UsageError for an invalid `text`, and for an index that is out of
    range.
    """
    items = [each.strip() for each in _unwrapped(text).split(",")] if _unwrapped(text) else []
    if items.count("...") > 1:
        raise UsageError(f"{text!r} has more than one ellipsis")
    if "..." not in items:
        items.append("...")
    missing = len(shape) - (len(items) - 1)
    if missing < 0:
        raise UsageError(
            f"{text!r} has {len(items) - 1} indices, but the tensor has {len(shape)} dimensions"
        )
    at = items.index("...")
    items[at : at + 1] = [":"] * missing
    return tuple(
        _pick(item, size, number, text)
        for number, (item, size) in enumerate(zip(items, shape, strict=True))
    )


def _unwrapped(text: str) -> str:
    text = text.strip()
    return text[1:-1].strip() if text[:1] == "[" and text[-1:] == "]" else text


def _pick(item: str, size: int, dimension: int, text: str) -> Pick:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise UsageError(
            f"{item!r} in {text!r} is not an index", hint="e.g. '[0, :, 3:7:2]'; steps are positive"
        )
    if found["at"] is not None:
        index = int(found["at"])
        if not -size <= index < size:
            raise UsageError(
                f"index {index} is out of range for dimension {dimension} of size {size:,}"
            )
        return Pick(index % size, 1, 1, True)
    start, stop, step = (
        None if (part := found[name]) is None else int(part) for name in ("start", "stop", "step")
    )
    if step == 0:
        raise UsageError(f"{item!r} in {text!r} has a step of 0")
    chosen = range(*slice(start, stop, step).indices(size))
    return Pick(chosen.start, len(chosen), chosen.step)


def show(picks: Picks) -> str:
    """Format picks as ``[0, 0:3, 3:7]``."""
    return f"[{', '.join(map(str, picks))}]"


def select(tensor: Tensor, picks: Picks) -> Tensor:
    """Return a view of `tensor` with the indices in `picks`.

    Raises TensorError for a tensor without a strided storage, such as a sparse tensor or a tensor
    on meta.
    """
    refuse_without_elements(tensor, "elements to show")
    offset = tensor.offset + sum(
        pick.start * s for pick, s in zip(picks, tensor.stride, strict=True)
    )
    kept = [(pick, s) for pick, s in zip(picks, tensor.stride, strict=True) if not pick.single]
    shape, stride = tuple(pick.size for pick, _ in kept), tuple(s * pick.step for pick, s in kept)
    return replace(
        tensor, shape=shape, stride=stride, offset=tensor.offset if 0 in shape else offset
    )


def _first(pick: Pick, size: int | None) -> Pick:
    """Return the first `size` indices of `pick`. If `size` is None, return the first index as an
    integer index."""
    if pick.single:
        return pick
    return Pick(pick.start, 1, 1, True) if size is None else pick.part(0, size)


def plane(picks: Picks, rows: int, columns: int) -> Picks:
    """Return a matrix: the first `rows` and `columns` of the last two dimensions of `picks`, and
    the first index of all other dimensions."""
    many = [n for n, pick in enumerate(picks) if not pick.single]
    sizes = dict(zip(reversed(many), (columns, rows), strict=False))
    return tuple(_first(pick, sizes.get(n)) for n, pick in enumerate(picks))
