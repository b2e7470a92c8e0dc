"""Names: match a key against the name of a rule, and write the name that values give.

A match gives one value for each index of the name: a number, the position of a label, or text. The
search goes back where a choice does not fit; its steps are counted, since names and rules may come
from people who want it to take long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.limits import LIMITS, check
from ckptkit.rules.errors import MisfitError
from ckptkit.rules.notation import ABSENT, STAR, STARS, Kind, Name, Variable

Value = int | str
Values = dict[tuple[str, ...], Value]  # by the words of an index

_DIGITS = re.compile("[0-9]+")
_LONGEST = 18  # digits of a number in a name


class Steps:
    """The remaining steps of matching, for a number of names."""

    def __init__(self, names: int) -> None:
        self.allowed = self.left = LIMITS.rule_steps + 64 * names

    def take(self, more: int = 0) -> None:
        self.left -= 1 + more
        if self.left < 0:
            check("rule_steps", self.allowed + 1, "steps of matching names against rules")


@dataclass(frozen=True, slots=True)
class Index:
    """A variable that is ready to be matched: its kind and the number that is added to it."""

    words: tuple[str, ...]
    kind: Kind
    shift: int = 0

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.kind if isinstance(self.kind, tuple) else None


Part = str | Index


class Pattern:
    """The name on one side of a rule."""

    def __init__(self, name: Name, kinds: Mapping[str, Kind], shifts: Mapping[str, int]) -> None:
        self.parts: tuple[Part, ...] = tuple(_part(each, kinds, shifts) for each in name)
        first, last = self.parts[0], self.parts[-1]
        # What every key of a family begins and ends with: numbers are another matter.
        self._begin = re.split("[0-9]", first)[0] if isinstance(first, str) else ""
        self._end = re.split("[0-9]", last)[-1] if isinstance(last, str) else ""

    @property
    def indices(self) -> tuple[Index, ...]:
        return tuple(part for part in self.parts if isinstance(part, Index))

    def may_match(self, family: str) -> bool:
        """Return whether a key can match that is `family` except for its numbers."""
        return family.startswith(self._begin) and family.endswith(self._end)

    def match(self, key: str, steps: Steps) -> Values | None:
        """The values that make this name `key`, None if there are none."""
        values: Values = {}
        return values if self._match(key, 0, 0, values, steps) else None

    def _match(self, key: str, number: int, at: int, values: Values, steps: Steps) -> bool:
        parts = self.parts
        while number < len(parts):
            part = parts[number]
            if isinstance(part, Index):
                return self._index(part, key, number, at, values, steps)
            if not key.startswith(part, at):
                return False
            at += len(part)
            number += 1
        return at == len(key)

    def _index(
        self, index: Index, key: str, number: int, at: int, values: Values, steps: Steps
    ) -> bool:
        known = values.get(index.words)
        for value, end in self._choices(index, key, number, at, steps):
            steps.take((end - at) >> 8)
            if known is not None and known != value:
                continue
            values[index.words] = value
            if self._match(key, number + 1, end, values, steps):
                return True
        if known is None:
            values.pop(index.words, None)
        else:
            values[index.words] = known
        return False

    def _choices(
        self, index: Index, key: str, number: int, at: int, steps: Steps
    ) -> Iterator[tuple[Value, int]]:
        """Yield the values that a variable may have at a place of the key, and where they end."""
        if index.kind in (STAR, STARS):
            yield from self._texts(index, key, number, at)
        elif index.labels is None:
            yield from _numbers(key, at, index.shift)
        else:
            steps.take(len(index.labels) // 16)
            for position, label in enumerate(index.labels):
                if label != ABSENT and key.startswith(label, at):
                    yield position, at + len(label)

    def _texts(self, index: Index, key: str, number: int, at: int) -> Iterator[tuple[str, int]]:
        """Yield texts from the shortest on, which end where the literal text after them begins."""
        dot = key.find(".", at) if index.kind == STAR else -1
        stop = len(key) if dot < 0 else dot
        first = at + (index.kind == STAR)
        following = self.parts[number + 1] if number + 1 < len(self.parts) else None
        if following is None:
            if first <= len(key) == stop:
                yield key[at:], len(key)
        elif isinstance(following, Index):
            for end in range(first, stop + 1):
                yield key[at:end], end
        else:
            end = key.find(following, first)
            while 0 <= end <= stop:
                yield key[at:end], end
                end = key.find(following, end + 1)

    def render(self, values: Mapping[str, Value], sizes: Mapping[str, int]) -> str | None:
        """The name that the values give; None if a label says that the tensor is not there."""
        made = []
        for part in self.parts:
            text = part if isinstance(part, str) else _text(part, values, sizes)
            if text is None:
                return None
            made.append(text)
        return "".join(made)


def _part(part: str | Variable, kinds: Mapping[str, Kind], shifts: Mapping[str, int]) -> Part:
    if isinstance(part, str):
        return part
    shift = 0
    if part.shift is not None:
        amount = part.shift.amount
        shift = part.shift.sign * (amount if isinstance(amount, int) else shifts[amount])
    kind = kinds.get(part.words[0]) if len(part.words) == 1 else None
    return Index(part.words, kind, shift)


def _numbers(key: str, at: int, shift: int) -> Iterator[tuple[int, int]]:
    run = _DIGITS.match(key, at)
    if run is None:
        return
    longest = 1 if key[at] == "0" else min(len(run[0]), _LONGEST)
    for length in range(longest, 0, -1):
        value = int(key[at : at + length]) - shift
        if value >= 0:
            yield value, at + length


def _text(index: Index, values: Mapping[str, Value], sizes: Mapping[str, int]) -> str | None:
    if len(index.words) > 1:
        number = 0
        for word in index.words:
            value = values[word]
            assert isinstance(value, int)
            number = number * sizes.get(word, 1) + value  # the size of the first is not needed
        return str(number + index.shift)
    value = values[index.words[0]]
    if isinstance(value, str):
        return value
    if index.labels is not None:
        label = index.labels[value]
        return None if label == ABSENT else label
    written = value + index.shift
    if written < 0:
        raise MisfitError(f"a name would have the number {written}, from {value}")
    return str(written)
