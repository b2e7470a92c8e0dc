"""Matching: keys that only one side has, paired where they are one key with two names.

In this order, each on what is left by those before:

``suffix``   the longest common dotted suffix: what stands before it gives a rule
             (``encoder.layer`` -> ``blocks``), and the rules that explain most are used first,
             and everywhere: :mod:`renaming`
``shape``    no other key on either side has that shape and dtype
``order``    as many keys of that shape and dtype on both sides, taken in order
``edit``     the nearest names of that shape

Keys that differ in their numbers alone go together wherever they can: what happens to one layer
happens to all. Each key is used once, and shapes are equal. A bound on the work keeps it linear: of
two files with nothing in common, only some names are compared (``unsearched``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ckptkit.analysis.families import INDICES, NONE, NUMBERS, Family, Parts, families
from ckptkit.analysis.renaming import Rule, Rules
from ckptkit.analysis.similarity import similarity
from ckptkit.core.tensor import Shape
from ckptkit.core.text import flatten

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

COMPARISONS = 8_000  # of names, in all
BUCKET = 2_048  # comparisons among names of one shape
NEAR, NEAR_RESHAPED, NEAR_VAGUE = 0.5, 0.6, 0.4  # similarity from which on names may be one


class Kind(NamedTuple):
    dtype: str
    shape: Shape


class Renamed(NamedTuple):
    """`old` in A is `new` in B. `confidence` is between 0 and 1, `why` one of suffix, shape, order,
    edit; "torch" where torch itself has changed the name."""

    old: str
    new: str
    a: Kind
    b: Kind
    confidence: float
    why: str


@dataclass(frozen=True)
class Matching:
    """`renamed` are of one shape, `reshaped` have names that may be one but are not. Both in the
    order of A.

    `unsearched` counts the keys of A without a partner whose names were not compared with all of B.
    """

    renamed: tuple[Renamed, ...] = ()
    reshaped: tuple[Renamed, ...] = ()
    unsearched: int = 0


def match(old: Mapping[str, Kind], new: Mapping[str, Kind]) -> Matching:
    """Pair the keys that only A has (`old`) with those that only B has (`new`)."""
    matcher = _Matcher(old, new)
    for numbers in (INDICES, NUMBERS, NONE):
        if matcher.group(numbers):
            matcher.by_suffix()
            matcher.by_order()
    matcher.by_edit()
    matcher.reshape()
    place = {name: number for number, name in enumerate(old)}
    matcher.renamed.sort(key=lambda pair: place[pair.old])
    matcher.reshaped.sort(key=lambda pair: place[pair.old])
    return Matching(tuple(matcher.renamed), tuple(matcher.reshaped), matcher.unsearched)


class _Matcher:
    """The matching in progress: ``old`` and ``new`` are the keys without a partner yet."""

    def __init__(self, old: Mapping[str, Kind], new: Mapping[str, Kind]) -> None:
        self.old, self.new = dict(old), dict(new)
        self.renamed: list[Renamed] = []
        self.reshaped: list[Renamed] = []
        self.rules: list[Rule] = []
        self.ours: dict[Parts, Family] = {}
        self.theirs: dict[Parts, Family] = {}
        self.unsearched = 0
        self._comparisons = COMPARISONS

    def fitting(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the pairs that are both still unmatched and of one shape."""
        old, new = self.old, self.new
        return {
            a: b for a, b in names.items() if a in old and b in new and old[a].shape == new[b].shape
        }

    def joined(self, ours: Family, theirs: Family) -> dict[str, str]:
        """Pair the names of two families in the way that pairs most of them."""
        return max(map(self.fitting, ours.meets(theirs)), key=len)

    def accept(self, names: Mapping[str, str], confidence: float, why: str) -> None:
        for a, b in names.items():
            self.renamed.append(Renamed(a, b, self.old.pop(a), self.new.pop(b), confidence, why))

    def group(self, numbers: re.Pattern[str]) -> bool:
        """Put the unmatched keys into families; return whether any of these is new.

        Returns whether they differ from the last ones.
        """
        before = self.ours.keys(), self.theirs.keys()
        self.ours, self.theirs = families(self.old, numbers), families(self.new, numbers)
        return not (before[0] >= self.ours.keys() and before[1] >= self.theirs.keys())

    # suffix

    def by_suffix(self) -> None:
        for rule, names, alone in Rules(self.ours, self.theirs, self.joined).found():
            self.accept(names, sure(rule, len(names), alone), "suffix")
            self.rules.append(rule)

    # shape and order

    def by_order(self) -> None:
        """Families of the same shapes and dtypes, those with the same last part first."""
        self._parents = _grouped(self.ours.values(), lambda family: family.parts[:-1])
        for leaves, dtypes in ((True, True), (False, True), (False, False)):
            self._in_order(leaves, dtypes)

    def _in_order(self, leaves: bool, dtypes: bool) -> None:
        ours, theirs = (
            self._alike(self.ours, self.old, leaves, dtypes),
            self._alike(self.theirs, self.new, leaves, dtypes),
        )
        common = [each for each in ours if each in theirs and len(ours[each]) == len(theirs[each])]
        for each in sorted(common, key=lambda each: len(ours[each])):
            why, confidence = ("shape", 0.65) if len(ours[each]) == 1 else ("order", 0.5)
            for a, b in zip(ours[each], theirs[each], strict=True):
                self._pair(a, b, confidence, why)

    def _alike(
        self, side: Mapping[Parts, Family], kinds: Mapping[str, Kind], leaves: bool, dtypes: bool
    ) -> dict[Hashable, list[Family]]:
        """Return families by their unmatched members: ranks, shapes, dtypes, last part of the
        name."""
        found: dict[Hashable, list[Family]] = {}
        for parts, family in side.items():
            left = tuple(
                [
                    (rank, kinds[name] if dtypes else kinds[name].shape)
                    for rank, name in family.ranked.items()
                    if name in kinds
                ]
            )
            if left:
                found.setdefault((parts[-1], left) if leaves else left, []).append(family)
        return found

    def _pair(self, ours: Family, theirs: Family, confidence: float, why: str) -> None:
        """Pair two families, then the rest of the same modules: a bias follows its weight."""
        names = self.joined(ours, theirs)
        if not names or (
            self._is_vague(names) and similarity(ours.parts, theirs.parts) < NEAR_VAGUE
        ):
            return
        self.accept(names, confidence, why)
        rule = Rule(ours.parts[:-1], theirs.parts[:-1])
        if ours.parts[-1] != theirs.parts[-1] or not rule.old or not rule.new:
            return
        self.rules.append(rule)
        for sibling in self._parents[rule.old]:
            other = self.theirs.get((*rule.new, sibling.parts[-1]))
            if other is not None:
                self.accept(self.joined(sibling, other), confidence + 0.1, why)

    def _is_vague(self, names: Mapping[str, str]) -> bool:
        """Return whether the shape says little: of one vector or number alone."""
        return len(names) == 1 and all(len(self.old[name].shape) < 2 for name in names)

    # edit distance

    def by_edit(self) -> None:
        ours = _grouped(self.old, lambda name: self.old[name].shape)
        theirs = _grouped(self.new, lambda name: self.new[name].shape)
        for shape in sorted(
            ours.keys() & theirs.keys(), key=lambda each: len(ours[each]) * len(theirs[each])
        ):
            for near, a, b in self._nearest(ours[shape], theirs[shape], NEAR):
                self.accept({a: b}, round(0.6 * near, 2), "edit")

    def _nearest(
        self, ours: list[str], theirs: list[str], least: float
    ) -> Iterator[tuple[float, str, str]]:
        """Names by similarity, each once; none where they are too many to compare."""
        number = len(ours) * len(theirs)
        if number > min(BUCKET, self._comparisons):
            self.unsearched += len(ours)
            return
        self._comparisons -= number
        split = {name: name.split(".") for name in (*ours, *theirs)}
        found = []
        for i, a in enumerate(ours):
            for j, b in enumerate(theirs):
                near = similarity(split[a], split[b])
                found.append((-near, abs(i - j), near, i, j))
        found.sort(key=lambda each: each[:2])
        seen: set[tuple[str, int]] = set()
        for _, _, near, i, j in found:
            if near >= least and ("a", i) not in seen and ("b", j) not in seen:
                seen |= {("a", i), ("b", j)}
                yield near, ours[i], theirs[j]

    # other shapes

    def reshape(self) -> None:
        """Pair names that a rule makes equal, or that are near, of other shapes: guesses."""
        ours, theirs = families(self.old), families(self.new)
        heads = _grouped(dict.fromkeys(self.rules), lambda rule: rule.old)
        for family in ours.values():
            for rule in flatten(heads.get(family.parts[:n], ()) for n in range(len(family.parts))):
                other = theirs.get((*rule.new, *family.parts[len(rule.old) :]))
                if other is not None:
                    self._guess(max(family.meets(other), key=len), 0.4, "suffix")
        self.unsearched = 0
        for near, a, b in list(self._nearest(list(self.old), list(self.new), NEAR_RESHAPED)):
            self._guess({a: b}, round(0.3 * near, 2), "edit")

    def _guess(self, names: Mapping[str, str], confidence: float, why: str) -> None:
        for a, b in names.items():
            if a in self.old and b in self.new and self.old[a].shape != self.new[b].shape:
                self.reshaped.append(
                    Renamed(a, b, self.old.pop(a), self.new.pop(b), confidence, why)
                )


def sure(rule: Rule, hits: int, alone: bool) -> float:
    """Return the confidence in a rule, from the keys that it explains, alone or with a rival."""
    if not alone:
        return 0.7
    if not rule.old or not rule.new:  # a prefix is all there is
        return 0.99 if hits > 1 else 0.9
    if hits >= 4:
        return 0.95
    return 0.85 if hits > 1 else 0.6


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
