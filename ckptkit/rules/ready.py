"""A rule whose sizes are known as far as they are said: match keys, and lay out groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from ckptkit.rules.checks import Words, check_none_empty, ragged
from ckptkit.rules.copies import Arrangement, Axes, Solved, SourceTensor, Symbol
from ckptkit.rules.errors import MisfitError, RuleError, about, give_size, settings
from ckptkit.rules.names import Pattern, Steps, Value, Values
from ckptkit.rules.notation import ABSENT, Rule
from ckptkit.rules.sizes import Known, Settings, evaluate

T = TypeVar("T")


def numbered(number: int, function: Callable[..., T], *given: Any) -> T:
    """Call a function; what it raises of a rule is said of rule `number`."""
    try:
        return function(*given)
    except RuleError as error:
        if error.part:
            raise
        raise about(number, RuleError(error.message, hint=error.hint)) from None


class Ready:
    """A rule with its sizes as far as they are said, ready to match."""

    def __init__(self, number: int, rule: Rule, words: Words, settings: Settings) -> None:
        self.number, self.rule, self.words = number, rule, words
        self.known: Known = evaluate(rule, settings)
        uneven = ragged(rule, words, self.known)
        check_none_empty(rule, words, self.known, uneven)
        self.arrangement = Arrangement(number, rule, words, self.known, uneven)
        shifts = self._shifts()
        self.left = Pattern(rule.left.name, words.left_kinds, shifts)
        self.right = Pattern(rule.right.name, words.right_kinds, shifts)
        self.composites = [each.words for each in self.left.indices if len(each.words) > 1]
        self.label_loops = [word for word in words.loops if words.labels(word) is not None]
        self.counted = [word for word in words.gathered if words.labels(word) is None]
        self.solved: dict[object, Solved] = {}

    def _shifts(self) -> dict[str, int]:
        found = {}
        for variable in (*self.rule.left.variables, *self.rule.right.variables):
            amount = variable.shift.amount if variable.shift is not None else 0
            if isinstance(amount, str):
                size = self.known.sizes.get(amount)
                if size is None or len(size) != 1 or size[0] is None:
                    hint = give_size(amount)
                    raise RuleError(f"nothing says {amount}", hint=hint)
                found[amount] = size[0]
        return found

    def solve(self, loops: Mapping[str, Value], members: list[SourceTensor]) -> Solved:
        """A group with its sizes; groups that look alike have one."""
        labels = tuple(int(loops[word]) for word in self.label_loops)
        key = (labels, tuple(member[1:] for member in members))
        if key not in self.solved:
            given = dict(zip(self.label_loops, labels, strict=True))
            self.solved[key] = self.arrangement.solve(given, self._sizes(members), members)
        return self.solved[key]

    def _sizes(self, members: list[SourceTensor]) -> dict[Symbol, int]:
        """Return the given sizes, and the counts of numbers in names."""
        sizes = dict(self.arrangement.known_sizes)
        for word in self.counted:
            position = self.words.gathered.index(word)
            sizes.setdefault((word, None), 1 + max(each.indices[position] for each in members))
        self._check_complete(members, sizes)
        return sizes

    def _check_complete(self, members: list[SourceTensor], sizes: Mapping[Symbol, int]) -> None:
        """Raise MisfitError unless the members have every combination of their indices, once."""
        choices = [self._choices(word, sizes) for word in self.words.gathered]
        held = {member.indices: member.key for member in members}
        for indices, key in held.items():
            for word, index, choice in zip(self.words.gathered, indices, choices, strict=True):
                if index not in choice:
                    message = f"{key}: {word}={index}, and the size {word} is {len(choice)}"
                    raise about(self.number, MisfitError(message))
        if len(held) == prod(map(len, choices)):
            return
        missing = next(each for each in _product(choices) if each not in held)
        raise self._missing(members[0], missing)

    def _choices(self, word: str, sizes: Mapping[Symbol, int]) -> Sequence[int]:
        labels = self.words.left_kinds.get(word)
        if isinstance(labels, tuple):
            return [number for number, label in enumerate(labels) if label != ABSENT]
        return range(sizes[word, None])

    def _missing(self, like: SourceTensor, indices: tuple[int, ...]) -> MisfitError:
        chosen = []
        values = self._loops(like)
        sizes = {word: size for (word, _), size in self.arrangement.known_sizes.items()}
        target = self._rendered(
            self.right, {**dict.fromkeys(self.words.scattered, 0), **values}, sizes
        )
        for word, index in zip(self.words.gathered, indices, strict=True):
            labels = self.words.left_kinds.get(word)
            values[word] = index
            chosen.append(f"{word}={labels[index] if isinstance(labels, tuple) else index}")
        key = self._rendered(self.left, values, sizes)
        message = (
            f"{target or self.rule.right} lacks {' '.join(chosen)}{f' ({key})' if key else ''}"
        )
        hint = "the tensor is missing, or the rule is wrong"
        return about(self.number, MisfitError(message, hint=hint))

    def _loops(self, member: SourceTensor) -> dict[str, Value]:
        found = self.left.match(member.key, Steps(1)) or {}
        return {words[0]: value for words, value in found.items() if len(words) == 1}

    def _rendered(
        self, pattern: Pattern, values: Mapping[str, Value], sizes: Mapping[str, int]
    ) -> str | None:
        try:
            return pattern.render(values, sizes)
        except KeyError:  # of an index of several words, which is not known here
            return None


def _product(choices: list[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Like itertools.product, without a list of what may be very many."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(choices[1:]):
            yield (first, *rest)


class Digits:
    """Numbers that are made of several indices, each with the size of all but the first."""

    def __init__(self, matches: Mapping[str, tuple[Ready, Values]]) -> None:
        self.most: dict[tuple[int, Axes, tuple[Value, ...]], int] = {}
        for ready, raw in matches.values():
            for words in ready.composites:
                place = self._place(ready, words, raw)
                self.most[place] = max(self.most.get(place, 0), _integer(raw[words]))

    def _place(self, ready: Ready, words: Axes, raw: Values) -> tuple[int, Axes, tuple[Value, ...]]:
        """The numbers that are counted together: those of one rule with the same other loops."""
        loops = set(ready.words.loops)
        return (
            ready.number,
            words,
            tuple(raw[each] for each in raw if {*each} <= loops and each != words),
        )

    def decoded(self, ready: Ready, key: str, raw: Values) -> dict[str, Value]:
        """The value of each word. Raises RuleError, MisfitError."""
        values: dict[str, Value] = {}
        for words, value in raw.items():
            if len(words) == 1:
                values[words[0]] = value
                continue
            number = _integer(value)
            sizes = self._sizes(ready, words, self.most[self._place(ready, words, raw)] + 1)
            for word, size in zip(reversed(words[1:]), reversed(sizes[1:]), strict=True):
                number, values[word] = divmod(number, size)
            values[words[0]] = number
            if sizes[0] and number >= sizes[0]:
                sizes_text = settings(zip(words, sizes, strict=True))
                message = f"{key}: {value} is too large for ({' '.join(words)}) with {sizes_text}"
                raise about(ready.number, MisfitError(message))
        return values

    def _sizes(self, ready: Ready, words: Axes, count: int) -> list[int]:
        """The sizes of the words, that of the first 0 where it is not needed."""
        sizes = [ready.arrangement.known_sizes.get((word, None), 0) for word in words]
        missing = [word for word, size in zip(words[1:], sizes[1:], strict=True) if not size]
        if not missing:
            return sizes
        known = prod(size for size in sizes if size)
        if len(missing) > 1 or not sizes[0] or count % known:
            text = f"nothing says how {count} numbers fall into ({' '.join(words)})"
            hint = give_size(missing[0])
            raise about(ready.number, RuleError(text, hint=hint))
        return [size or count // known for size in sizes]


def _integer(value: Value) -> int:
    assert isinstance(value, int)
    return value
