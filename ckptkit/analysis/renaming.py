"""Rules of renaming: what stands before a common dotted suffix, ``encoder.layer`` -> ``blocks``.

Every pair of families with a common suffix proposes the rule that is left of their longest one. A
rule counts the keys that it explains, each by the parts that it leaves alone; the highest is used
first, on all keys that it fits. Of rules that count the same and claim the same keys, the one whose
names are nearer is used, if it is clearly nearer; else none, and the order of the keys decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from ckptkit.analysis.families import Family, Parts
from ckptkit.analysis.similarity import similarity

# of families with one suffix and shape that are looked at; with more, the suffix says nothing
PAIRS = 4_096
COMPARED = 10_000  # rules whose names are compared
WORK = 3_000_000  # names that are looked at, in all
DEEPEST = 24  # parts of a suffix
MARGIN = 0.05  # of similarity, that makes a name clearly nearer


class Rule(NamedTuple):
    """Names that begin with `old` begin with `new` instead; numbers are ``{}``."""

    old: Parts
    new: Parts


Families = Mapping[Parts, Family]
Join = Callable[[Family, Family], dict[str, str]]


class Rules:
    """The rules between two sets of families; `join` gives the names of two families that may still
    be one."""

    def __init__(self, ours: Families, theirs: Families, join: Join) -> None:
        self.ours, self.theirs, self.join = ours, theirs, join
        self.work = WORK
        self.votes: dict[Rule, int] = defaultdict(int)
        self.claims: dict[tuple[bool, Parts], list[Rule]] = defaultdict(
            list
        )  # rules by the heads that they exchange
        self._vote()
        self.heads: dict[Parts, list[Family]] = defaultdict(list)
        known = {rule.old for rule in self.votes}
        for parts, family in ours.items():
            for n in range(len(parts)):
                if parts[:n] in known:
                    self.heads[parts[:n]].append(family)

    def _vote(self) -> None:
        """Rules that pairs of families propose, the longest suffixes first."""
        done: set[tuple[Parts, Parts]] = set()
        for length in range(min(DEEPEST, _longest(self.ours), _longest(self.theirs)), 0, -1):
            ours, theirs = _by_suffix(self.ours, length), _by_suffix(self.theirs, length)
            for suffix in ours.keys() & theirs.keys():
                if len(ours[suffix]) * len(theirs[suffix]) > PAIRS:
                    continue
                for a in ours[suffix]:
                    for b in theirs[suffix]:
                        if (a.parts, b.parts) not in done and self.work > 0:
                            done.add((a.parts, b.parts))
                            self._propose(
                                Rule(a.parts[:-length], b.parts[:-length]),
                                length,
                                self._names(a, b),
                            )

    def _propose(self, rule: Rule, length: int, names: Mapping[str, str]) -> None:
        if not names:
            return
        if rule not in self.votes:
            self.claims[False, rule.old].append(rule)
            self.claims[True, rule.new].append(rule)
        self.votes[rule] += len(names) * length

    def _names(self, ours: Family, theirs: Family) -> dict[str, str]:
        self.work -= len(ours.members)
        return self.join(ours, theirs)

    def found(self) -> Iterator[tuple[Rule, dict[str, str], bool]]:
        """Yield rules in the order of use, the names that each gives, and whether it had no rival.

        The caller takes the names away before it asks for the next one.
        """
        near = {rule: similarity(rule.old, rule.new) for rule in islice(self.votes, COMPARED)}
        heap = [
            (-votes, -near.get(rule, 0), n, rule)
            for n, (rule, votes) in enumerate(self.votes.items())
        ]
        heapify(heap)
        while heap and self.work > 0:
            votes, nearness, number, rule = heappop(heap)
            names, weight = self._effect(rule)
            if weight < -votes:
                if weight:
                    heappush(heap, (-weight, nearness, number, rule))
                continue
            rivals = [
                near.get(each, 0)
                for each in self._rivals(rule)
                if self._contest(each, names, weight)
            ]
            if not rivals or near.get(rule, 0) >= max(rivals) + MARGIN:
                yield rule, names, not rivals

    def _effect(self, rule: Rule) -> tuple[dict[str, str], int]:
        """Return the names that a rule explains now, and their weight."""
        names: dict[str, str] = {}
        weight = 0
        for family in self.heads[rule.old]:
            rest = family.parts[len(rule.old) :]
            other = self.theirs.get((*rule.new, *rest))
            if other is not None:
                found = self._names(family, other)
                names |= found
                weight += len(found) * len(rest)
        return names, weight

    def _rivals(self, rule: Rule) -> list[Rule]:
        claims = (*self.claims[False, rule.old], *self.claims[True, rule.new])
        return [each for each in claims if each != rule and self.votes[each] >= self.votes[rule]]

    def _contest(self, rival: Rule, names: Mapping[str, str], weight: int) -> bool:
        """Return whether a rule explains as much as another one, and some of the same keys."""
        theirs, as_much = self._effect(rival)
        return as_much >= weight and (
            not names.keys().isdisjoint(theirs)
            or not set(names.values()).isdisjoint(theirs.values())
        )


def _longest(side: Families) -> int:
    return max(map(len, side), default=0)


def _by_suffix(side: Families, length: int) -> dict[Parts, list[Family]]:
    found: dict[Parts, list[Family]] = defaultdict(list)
    for parts, family in side.items():
        if len(parts) >= length:
            found[parts[-length:]].append(family)
    return found
