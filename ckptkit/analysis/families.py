"""Families: names that differ only in their numbers, ``encoder.layer.{}.output.weight``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeVar

# Which numbers count, from those that are most surely an index: alone between dots (``layers.3``),
# any (``layer_3``).
INDICES, NUMBERS, NONE = (
    re.compile(text) for text in (r"(?<![^.])([0-9]+)(?![^.])", r"([0-9]+)", r"(?!)")
)

MOST = 64  # dots of a name that are looked at; one with more stands for itself

Parts = tuple[str, ...]  # of a name, between dots
Numbers = tuple[str, ...]
Key = TypeVar("Key")


class Family:
    """Names with the same parts, their numbers aside.

    ``members`` are by these numbers, in order of the file.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.members: dict[Numbers, str] = {}

    @cached_property
    def ranked(self) -> dict[tuple[int, ...], str]:
        """Return the members by the rank of each number among all in its position.

        ``layers.1`` to ``layers.12`` and ``blocks.0`` to ``blocks.11`` have equal ranks.
        """
        if len(self.members) == 1:
            return {(): next(iter(self.members.values()))}
        places = [
            sorted(set(values), key=lambda n: (len(n), n))
            for values in zip(*self.members, strict=True)
        ]
        ranks = [{value: rank for rank, value in enumerate(values)} for values in places]
        varying = [place for place, values in enumerate(places) if len(values) > 1]
        return {
            tuple([ranks[place][numbers[place]] for place in varying]): name
            for numbers, name in self.members.items()
        }

    def meets(self, other: Family) -> Iterable[Mapping[str, str]]:
        """Yield ways to rename this family to the other: by equal numbers, by equal ranks."""
        yield _joined(self.members, other.members)
        if (
            len(self.members) == len(other.members) == 1
            and self.members.keys() == other.members.keys()
        ):
            return
        if len(self.ranked) == len(other.ranked) and self.ranked.keys() == other.ranked.keys():
            yield _joined(self.ranked, other.ranked)


def _joined(ours: Mapping[Key, str], theirs: Mapping[Key, str]) -> dict[str, str]:
    return {name: theirs[key] for key, name in ours.items() if key in theirs}


def families(names: Iterable[str], numbers: re.Pattern[str] = INDICES) -> dict[Parts, Family]:
    """The families of `names`, by their parts; `numbers` finds what may differ."""
    found: dict[Parts, Family] = {}
    for name in names:
        pieces = [name] if name.count(".") >= MOST else numbers.split(name)
        parts = tuple("{}".join(pieces[::2]).split(".", MOST))
        family = found.get(parts)
        if family is None:
            family = found[parts] = Family(parts)
        family.members[tuple(pieces[1::2])] = name
    return found
