"""The similarity of two names, in parts between dots: 1 for equal, 0 for nothing in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

LONGEST = 64  # characters of a part, and parts of a name, that are looked at
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")


def similarity(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """One minus the edit distance of two sequences of parts, by the length of the longer one.

    Exchanging a part for another costs what these two have not in common.
    """
    ours, theirs = ours[:LONGEST], theirs[:LONGEST]
    row = [float(n) for n in range(len(theirs) + 1)]
    for number, part in enumerate(ours, 1):
        before, row[0] = row[0], float(number)
        for n, other in enumerate(theirs, 1):
            before, row[n] = (
                row[n],
                min(row[n] + 1, row[n - 1] + 1, before + 1 - _alike(part, other)),
            )
    return 1 - row[-1] / max(len(ours), len(theirs), 1)


@lru_cache(maxsize=1 << 16)
def _alike(one: str, other: str) -> float:
    """Return half for what an edit leaves, half for a common beginning (``q``, ``query``)."""
    if one == other:
        return 1.0
    one, other = one[:LONGEST], other[:LONGEST]
    left = 1 - _distance(one, other) / max(len(one), len(other))
    begun = max((_begun(a, b) for a, b in product(_words(one), _words(other))), default=0.0)
    return min(0.99, (left + begun) / 2)


def _words(part: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(part)][:8]


def _begun(one: str, other: str) -> float:
    """Return the share of the shorter word that the longer one begins with."""
    shorter = min(len(one), len(other))
    same = next((n for n in range(shorter) if one[n] != other[n]), shorter)
    return same / shorter


def _distance(one: str, other: str) -> int:
    """Return the number of characters to insert, delete or exchange."""
    row = list(range(len(other) + 1))
    for number, char in enumerate(one, 1):
        before, row[0] = row[0], number
        for n, each in enumerate(other, 1):
            before, row[n] = row[n], min(row[n] + 1, row[n - 1] + 1, before + (char != each))
    return row[-1]
