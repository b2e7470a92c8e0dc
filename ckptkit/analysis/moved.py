"""Measure how much training changed each part of a model: differences of two checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import NamedTuple

from ckptkit.compute.compare import Difference
from ckptkit.core.text import family, ranges

SAME, CHANGED = "same", "changed"
Relative = float | None


class ComparedTensor(NamedTuple):
    """One compared tensor: dotted path, state, and difference of its values.

    `difference` is None unless floating-point values differ.
    """

    place: str
    state: str
    difference: Difference | None = None


class MovedPart(NamedTuple):
    """One part of a model: the number of its tensors in each state, and their relative change.

    `relative` is the norm of the differences divided by the norm in A, over the changed tensors.
    `relative` is 0 if no tensor changed, and None if the norm in A is zero or the values are not
    floats. `pattern` is a glob that selects the tensors. `blocks` contains (name, relative change)
    of each block, if there are several.
    """

    label: str
    pattern: str
    states: dict[str, int]
    relative: Relative
    blocks: tuple[tuple[str, Relative], ...] = ()


def parts(tensors: Iterable[ComparedTensor]) -> list[MovedPart]:
    """Return the blocks of a model in the order of the file: ``embed``, ``layers.0``, ``head``."""
    return [_moved(name, f"{name}.*", found) for name, found in _groups(tensors, _block).items()]


def layers(tensors: Iterable[ComparedTensor]) -> list[MovedPart]:
    """Return modules grouped by kind (``layers.{0..11}.attn``), the most changed first."""
    made = []
    for kind, found in _groups(tensors, lambda place: family(_module(place))).items():
        names = dict.fromkeys(_module(each.place) for each in found)
        blocks = _groups(found, _block)
        below = tuple((name, relative(each)) for name, each in blocks.items())
        label = ranges(names) or "(root)"
        made.append(_moved(label, f"{kind}.*", found, below if len(below) > 1 else ()))
    return sorted(made, key=_order)


def relative(tensors: Iterable[ComparedTensor]) -> Relative:
    """Return the norm of the differences divided by the norm in A, over the changed tensors."""
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


def _order(layer: MovedPart) -> tuple[bool, float]:
    """Return a sort key: other states than same and changed first, then the largest changes."""
    others = layer.states.keys() - {CHANGED, SAME}
    return not others, float("-inf") if layer.relative is None else -layer.relative


def _groups(
    tensors: Iterable[ComparedTensor], key: Callable[[str], str]
) -> dict[str, list[ComparedTensor]]:
    found: dict[str, list[ComparedTensor]] = {}
    for each in tensors:
        found.setdefault(key(each.place), []).append(each)
    return found


def _module(place: str) -> str:
    return place.rpartition(".")[0]


def _block(place: str) -> str:
    """Return the path up to its first index (``model.layers.3``), or else the module path."""
    names = place.split(".")
    for number, name in enumerate(names[:-1], 1):
        if name.isdecimal():
            return ".".join(names[:number])
    return _module(place)
