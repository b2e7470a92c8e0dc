"""Measure how much each layer of a model changed between two checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple

from ckptkit.analysis.matching import grouped
from ckptkit.compute.compare import Difference
from ckptkit.core.text import family, ranges

SAME, CHANGED = "same", "changed"
Relative = float | None


class ComparedTensor(NamedTuple):
    """A compared tensor: its dotted path, its state ("same", "changed"...), and its difference.

    If the values are equal or not floating point, `difference` is None.
    """

    place: str
    state: str
    difference: Difference | None = None


class MovedPart(NamedTuple):
    """A group of tensors of a model. `states` contains the number of tensors in each state.

    - `pattern` is a glob that selects the tensors.
    - `relative` is the relative change: the norm of the differences, divided by the norm of the
      changed tensors in A. If no tensor changed, `relative` is 0. If the norm in A is zero or the
      values are not floats, `relative` is None.
    - `blocks` contains (name, relative change) for each block, if there are several blocks.
    """

    label: str
    pattern: str
    states: dict[str, int]
    relative: Relative
    blocks: tuple[tuple[str, Relative], ...] = ()


def parts(tensors: Iterable[ComparedTensor]) -> list[MovedPart]:
    """Return the blocks of a model, such as ``layers.0``, in the order of the file."""
    found = grouped(tensors, lambda each: _block(each.place))
    return [_moved(name, f"{name}.*", same) for name, same in found.items()]


def layers(tensors: Iterable[ComparedTensor]) -> list[MovedPart]:
    """Group modules whose paths differ only in an index, such as ``layers.{0..11}.attn``. Return
    the groups with the largest relative change first."""
    made = []
    for kind, found in grouped(tensors, lambda each: family(_module(each.place))).items():
        names = dict.fromkeys(_module(each.place) for each in found)
        blocks = grouped(found, lambda each: _block(each.place))
        below = tuple((name, relative(each)) for name, each in blocks.items())
        label = ranges(names) or "(root)"
        made.append(_moved(label, f"{kind}.*", found, below if len(below) > 1 else ()))

    def order(part: MovedPart) -> tuple[bool, float]:
        """Missing and mismatched tensors come first, then the largest changes."""
        others = part.states.keys() - {CHANGED, SAME}
        return not others, float("-inf") if part.relative is None else -part.relative

    return sorted(made, key=order)


def relative(tensors: Iterable[ComparedTensor]) -> Relative:
    """Return the norm of the differences, divided by the norm of the changed tensors in A."""
    distance = norm = 0.0
    changed = False
    for _, state, found in tensors:
        changed = changed or state == CHANGED
        if found is not None and found.distance is not None:
            distance += found.distance**2
            norm += (found.distance / found.relative) ** 2 if found.relative else 0.0
    if not changed:
        return 0.0
    return (distance / norm) ** 0.5 if norm and isfinite(distance) and isfinite(norm) else None


def _moved(
    label: str,
    pattern: str,
    found: Sequence[ComparedTensor],
    blocks: tuple[tuple[str, Relative], ...] = (),
) -> MovedPart:
    states = Counter(each.state for each in found)
    return MovedPart(label or "(root)", pattern.lstrip("."), dict(states), relative(found), blocks)


def _module(place: str) -> str:
    return place.rpartition(".")[0]


def _block(place: str) -> str:
    """Return the path up to the first index, such as ``model.layers.3``. If the path has no index,
    return the path of the module."""
    names = place.split(".")
    for number, name in enumerate(names[:-1], 1):
        if name.isdecimal():
            return ".".join(names[:number])
    return _module(place)
