"""Pairing of the names of two sides, the same for diff, the doctor and load_into.

Names that both sides have are the same. Of the others, first a prefix is looked for that makes most
of them meet (:func:`prefixes`), then names that torch itself has changed (:func:`certain`), then
what :mod:`matching` finds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain, product
from typing import NamedTuple

from ckptkit.analysis.matching import Kind, Matching, Renamed, match, sure
from ckptkit.analysis.renaming import Rule
from ckptkit.core.tensor import Shape
from ckptkit.core.text import without

Shapes = Mapping[str, "Shape | None"]  # None: not a tensor, or one whose shape is not known yet

SAMPLE = 500  # names that are looked at to find the prefixes
PREFIXES = 16  # of each side that are tried

CERTAIN = "torch"  # why two names are one: torch.nn.utils called it so, and parametrizations do now
_PARAMETRIZED = re.compile(r"(.*\.)?parametrizations\.([^.]+)\.(original[01]?|0\._[uv])", re.DOTALL)
_BEFORE = {
    "original0": "_g", "original1": "_v",  # weight_norm
    "original": "_orig", "0._u": "_u", "0._v": "_v",  # spectral_norm
}  # fmt: skip


class Way(NamedTuple):
    """The prefixes to take from the names of one side, and to put before what is left."""

    strip: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.strip)


def pair(ours: Mapping[str, Kind], theirs: Mapping[str, Kind], way: Way) -> Matching:
    """Pair the names that only one side has, after `way` has renamed ours.

    `ours` are as they are in the file, and so are the old names of the pairs.
    """
    back = {way(name): name for name in ours}
    rest = {name: ours[old] for name, old in back.items() if name not in theirs}
    lacking = without(theirs, back)
    fixed = certain(shapes_of(rest), shapes_of(lacking))
    taken = {*fixed.values()}
    found = match(
        without(rest, fixed),
        without(lacking, taken),
    )
    known = [Renamed(old, new, rest[old], lacking[new], 1.0, CERTAIN) for old, new in fixed.items()]
    place = {name: number for number, name in enumerate(ours)}

    def in_file(pairs: Iterable[Renamed]) -> tuple[Renamed, ...]:
        named = [each._replace(old=back[each.old]) for each in pairs]
        return tuple(sorted(named, key=lambda each: place[each.old]))

    return Matching(in_file((*known, *found.renamed)), in_file(found.reshaped), found.unsearched)


def pairs(ours: Mapping[str, Kind], theirs: Mapping[str, Kind], common: Iterable[str]) -> Matching:
    """Pair the names that only one side has; those that both have are `common`."""
    way = prefixes(shapes_of(ours), shapes_of(theirs), common)
    met = list(moved(ours, theirs, way))
    found = pair(ours, theirs, way)
    place = {name: number for number, name in enumerate(ours)}

    def in_order(*groups: Iterable[Renamed]) -> tuple[Renamed, ...]:
        return tuple(sorted(chain(*groups), key=lambda each: place[each.old]))

    same = [each for each in met if each.a.shape == each.b.shape]
    other = [each for each in met if each.a.shape != each.b.shape]
    renamed, reshaped = in_order(same, found.renamed), in_order(other, found.reshaped)
    return Matching(renamed, reshaped, found.unsearched)


def shapes_of(kinds: Mapping[str, Kind]) -> dict[str, Shape]:
    """Return the shape of each name."""
    return {name: kind.shape for name, kind in kinds.items()}


def moved(ours: Mapping[str, Kind], theirs: Mapping[str, Kind], way: Way) -> Iterator[Renamed]:
    """The pairs that `way` makes, of equal shapes or not."""
    met = {name: new for name in ours if (new := way(name)) != name and new in theirs}
    confidence = sure(Rule(*(tuple(each.split(".")[:-1]) for each in way)), len(met), True)
    for name, new in met.items():
        a, b = ours[name], theirs[new]
        yield Renamed(name, new, a, b, confidence if a.shape == b.shape else 0.4, "suffix")


def is_taken_by_torch(pair: Renamed) -> bool:
    """Return whether the model itself takes the old name, as a hook of today's weight_norm does."""
    found = _PARAMETRIZED.fullmatch(pair.new)
    return pair.why == CERTAIN and found is not None and found[3] in ("original0", "original1")


def certain(ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """Names on both sides that are one because torch changed them, in either direction."""
    found = {old: new for new, old in _before(theirs, ours)}
    return found | dict(_before(ours, theirs))


def _before(new: Shapes, old: Shapes) -> Iterator[tuple[str, str]]:
    for name, shape in new.items():
        parts = _PARAMETRIZED.fullmatch(name)
        if parts is not None:
            other = f"{parts[1] or ''}{parts[2]}{_BEFORE[parts[3]]}"
            if other in old and fits(shape, old[other]):
                yield name, other


def fits(ours: Shape | None, theirs: Shape | None) -> bool:
    """Return whether torch would take it.

    Before torch 0.4 scalars had the shape (1,).
    """
    return ours is None or theirs is None or ours == theirs or (ours == (1,) and theirs == ())


def prefixes(ours: Shapes, theirs: Shapes, common: Iterable[str] = ()) -> Way:
    """Return the prefixes to strip from the file's names and to add, so that most are the model's.

    Names that both sides have (and those in `common`) are never changed, nothing is added to some
    names alone, and no two names become one. Both are empty where nothing is better, or where two
    ways are equally good and give different tensors.
    """
    common = {*common, *(ours.keys() & theirs.keys())}
    rest = [name for name in ours if name not in common]
    sample = {name: ours[name] for name in rest[:: max(1, len(rest) // SAMPLE)]}
    lacking = [name for name in theirs if name not in common]
    ways = [Way(*each) for each in product(_leading(sample), _leading(lacking))]
    best, most, unique = Way(), 0, True
    images: list[str | None] = []
    for way in sorted(ways, key=lambda way: len(way.strip) + len(way.add)):
        made = [_image(name, shape, way, theirs) for name, shape in sample.items()]
        hits = len(made) - made.count(None)
        worse = hits < max(most, 1) or (hits == most and made == images)
        if worse or not _is_harmless(way, ours, common):
            continue
        unique = hits > most
        if unique:
            best, most, images = way, hits, made
    return best if unique else Way()


def _is_harmless(way: Way, ours: Shapes, common: AbstractSet[str]) -> bool:
    if any(way(name) != name for name in common):
        return False
    if way.strip and way.add and not all(name.startswith(way.strip) for name in ours):
        return False
    images = {way(name) for name in ours}
    return len(images) == len(ours) and images.isdisjoint(common - ours.keys())


def _leading(names: Iterable[str]) -> list[str]:
    """The empty prefix and the most common dotted beginnings of names."""
    sample = list(names)
    counts: Counter[str] = Counter()
    for name in sample[:: max(1, len(sample) // SAMPLE)]:
        parts = name.split(".")[:PREFIXES]
        counts.update(".".join(parts[:n]) + "." for n in range(1, len(parts)))
    return ["", *(prefix for prefix, _ in counts.most_common(PREFIXES))]


def _image(name: str, shape: Shape | None, way: Way, theirs: Shapes) -> str | None:
    """Return the changed name, if the other side has it."""
    new = way(name)
    return new if new in theirs and fits(shape, theirs[new]) else None
