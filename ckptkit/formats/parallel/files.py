"""The files of a folder that differ in the number of a rank alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th")
_RANK = re.compile(r"rank[_-]?([0-9]{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}")
_WORLD = re.compile(r"world_size_([0-9]{1,9})")
_SHARD = re.compile(r".*-[0-9]{1,9}-of-[0-9]{1,9}\..*", re.DOTALL)
_HOLE = "\0"


class Group(NamedTuple):
    """Files whose names differ in one number: the name with a hole, and the names by number, in
    order.

    ``certain``: the name calls the number a rank. ``world`` is the number of ranks that the name
    promises.
    """

    pattern: str
    files: Mapping[int, str]
    certain: bool
    world: int | None

    @property
    def first(self) -> str:
        return next(iter(self.files.values()))

    def name(self, number: int) -> str:
        """Return the name of the file with another number, spelled like the others."""
        width = min(len(self.spelled(name)) for name in self.files.values())
        digits = str(number)
        return self.pattern.replace(_HOLE, digits.zfill(width) if width > 1 else digits)

    def spelled(self, name: str) -> str:
        """The number in a name, as it is spelled."""
        head, _, tail = self.pattern.partition(_HOLE)
        return name[len(head) : len(name) - len(tail)]


def groups(names: Iterable[str]) -> list[Group]:
    """The groups of a folder, each name in one at most; those whose names speak of ranks first."""
    found: dict[str, dict[int, str]] = {}
    plain = []
    for name in sorted(names):
        if not name.endswith(SUFFIXES) or _SHARD.fullmatch(name):
            continue
        ranks = list(_RANK.finditer(name))
        if ranks:
            _put(found, name, *ranks[-1].span(1))
        else:
            plain.append(name)
    made = [_group(pattern, files, certain=True) for pattern, files in found.items()]
    return made + _unnamed(plain)


def _unnamed(names: list[str]) -> list[Group]:
    """Groups of names that do not say which of their numbers counts ranks: the number that varies
    most."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            _put(found, name, *number.span())
    taken: set[str] = set()
    made = []
    for pattern in sorted(found, key=lambda pattern: -len(found[pattern])):
        files = found[pattern]
        if len(files) > 1 and taken.isdisjoint(files.values()):
            taken.update(files.values())
            made.append(_group(pattern, files, certain=False))
    return made


def _put(found: dict[str, dict[int, str]], name: str, start: int, stop: int) -> None:
    found.setdefault(name[:start] + _HOLE + name[stop:], {})[int(name[start:stop])] = name


def _group(pattern: str, files: dict[int, str], *, certain: bool) -> Group:
    world = _WORLD.search(pattern)
    return Group(pattern, dict(sorted(files.items())), certain, int(world[1]) if world else None)


def rank_in(path: str) -> tuple[int, int | None] | None:
    """The rank that a file's name speaks of, and the number of ranks if it does; None if it speaks
    of none."""
    name = os.path.basename(path)
    ranks = list(_RANK.finditer(name))
    if not ranks:
        return None
    world = _WORLD.search(name)
    return int(ranks[-1][1]), int(world[1]) if world else None
