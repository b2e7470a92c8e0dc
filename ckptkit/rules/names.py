"""Evaluate the sizes in rules, and match tensor names with rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from ckptkit.core.limits import LIMITS, check
from ckptkit.core.text import flatten, typed
from ckptkit.rules.notation import (
    ABSENT,
    REST,
    SOURCES,
    STAR,
    STARS,
    Choice,
    Dimension,
    Given,
    Kind,
    MisfitError,
    Name,
    Rule,
    RuleError,
    Side,
    Term,
    dimension_text,
    given_text,
)

# A size can be given on the command line, in the rule, the step, the recipe, or config.json.
#
# A size is one value, or one value for each label of a variable. If a value is None,
# ckptkit infers the size from shapes.


MOST = 1 << 62

Config = Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None
Size = tuple[int | None, ...]


class Settings:
    """Sizes that arguments, the step, the recipe, config.json or the metadata give."""

    def __init__(
        self,
        args: Mapping[str, int] | None = None,
        sizes: Mapping[str, Given] | None = None,
        defaults: Mapping[str, Given] | None = None,
        config: Config = None,
        meta: Config = None,
    ) -> None:
        self.args = dict(args or {})
        self.sizes = dict(sizes or {})
        self.defaults = dict(defaults or {})
        self._documents = {"config": config, "meta": meta}
        for word, value in self.args.items():
            checked(word, value, least=0)

    def given(self, word: str, rule: Rule) -> tuple[Given | int, str] | None:
        """Return the value of a size, and a name for the place that gives the value.

        The places are searched in this order: arguments, rule, step, recipe. Return None if no
        place gives a value.
        """
        if word in self.args:
            return self.args[word], typed(f"--arg {word}", f"args[{word!r}]")
        places = {"rule": dict(rule.sizes), "step": self.sizes, "recipe": self.defaults}
        found = ((sizes[word], where) for where, sizes in places.items() if word in sizes)
        return next(found, None)

    def lookup(self, place: str, path: str) -> int | None:
        """Return the number at a path in config.json or in the metadata.

        Metadata is flat, so the complete path is one key. Return None if the path is missing, or if
        its value in config.json is null.
        """
        found = self._documents[place]
        if callable(found):
            found = self._documents[place] = found()
        node: Any = found
        for part in path.split(".") if place == "config" else (path,):
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and part.isdigit() and len(part) < 10:
                node = node[int(part)] if int(part) < len(node) else None
            else:
                return None
        if node is None:
            return None
        if type(node) is not int:
            is_list = isinstance(node, Sized) and not isinstance(node, str)
            value = "a list" if is_list else repr(str(node)[:40])
            raise RuleError(f"{place}.{path}: expected an integer, got {value}")
        return node


class KnownSizes:
    """The given sizes of one rule, and a name for the place that gives each size.

    If a size refers to a missing entry of config.json or the metadata, ``unset`` maps the size to
    the path of the entry. Raises RuleError for an invalid size. A size of 0 is valid here.
    `check_none_empty` rejects the size 0 where it is not allowed.
    """

    def __init__(self, rule: Rule, settings: Settings) -> None:
        self.rule, self.settings = rule, settings
        self.origins: dict[str, str] = {}
        self.unset: dict[str, str] = {}
        self._done: dict[str, Size | None] = {}
        self._open: set[str] = set()
        values = {word: self.size(word) for word in sorted(words_of(rule))}
        self.sizes = {word: value for word, value in values.items() if value is not None}

    def size(self, word: str) -> Size | None:
        """Return the values of a size: one value, or one value for each label.

        Return None if the size is not given.
        """
        if word in self._open:
            raise RuleError(f"the size {word} depends on itself")
        if word not in self._done:
            self._open.add(word)
            self._done[word] = self._size(word)
            self._open.discard(word)
        return self._done[word]

    def _size(self, word: str) -> Size | None:
        found = self.settings.given(word, self.rule)
        if found is None:
            return None
        given, self.origins[word] = found
        if isinstance(given, int):
            return (given,)
        value = tuple(self._choice(word, choice) for choice in given)
        if any(n is None and choice for n, choice in zip(value, given, strict=True)):
            self.unset[word] = given_text(given)
        first = given[0]
        if self.origins[word] != "step" and first is not None and first[0].operator in SOURCES:
            self.origins[word] = str(first[0])
        return None if value == (None,) else value

    def _choice(self, word: str, choice: Choice) -> int | None:
        for term in choice or ():
            value = self._value(term)
            if value is not None:
                return checked(word, value, least=0)
        return None

    def _value(self, term: Term) -> int | None:
        first = term.values[0]
        if term.operator == "number":
            assert isinstance(first, int)
            return first
        if term.operator in SOURCES:
            return self.settings.lookup(term.operator, str(first))
        if term.operator == "word":
            size = self.size(str(first))
            if size is not None and len(size) > 1:
                raise RuleError(f"{first} has {len(size)} values, but expressions need one value")
            return None if size is None else size[0]
        left, right = (self._value(each) for each in term.values if isinstance(each, Term))
        if left is None or right is None:
            return None
        if term.operator in "+-":
            value = left + right if term.operator == "+" else left - right
        elif term.operator == "*":
            value = left * right
        elif right == 0 or left % right:
            raise RuleError(f"{term}: {left} is not divisible by {right}")
        else:
            value = left // right
        if abs(value) > MOST:
            raise RuleError(f"{term} is too large for a size")
        return value


def checked(word: str, value: int, least: int = 1, origin: str | None = None) -> int:
    """Return `value` if it is a valid size. Otherwise, raise RuleError.

    `origin` is the place that gives the size, for the error message.
    """
    if not least <= value <= MOST:
        place = f" ({origin})" if origin else ""
        raise RuleError(f"the size {word} is {value}{place}", hint="a size is at least 1")
    return value


def words_of(rule: Rule) -> set[str]:
    """Return the names of all axes, variables and sizes in a rule."""
    found = {word for word, _ in rule.sizes}
    for side in (rule.left, rule.right):
        found.update(side.axes, side.words, side.shift_words)
    choices = flatten(given for _, given in rule.sizes)
    waiting: list[int | str | Term] = list(flatten(choice for choice in choices if choice))
    while waiting:
        term = waiting.pop()
        if isinstance(term, Term):
            found.update(map(str, term.values) if term.operator == "word" else ())
            waiting.extend(term.values)
    return found


# Matching a key with the name in a rule, and rendering a name from values.
#
# A match assigns a value to each variable in the name. The value is a number, the position of a
# label, or a string. The search backtracks. The number of steps is limited, because hostile names
# and rules could result in exponential time.


Value = int | str
Values = dict[tuple[str, ...], Value]  # each key contains the names of the variables of an Index

_DIGITS = re.compile("[0-9]+")
_LONGEST = 18  # maximum number of digits of a number in a name


class Steps:
    """Limits the number of steps for matching names. `names` is the number of names."""

    def __init__(self, names: int) -> None:
        self.allowed = self.left = LIMITS.rule_steps + 64 * names

    def take(self, more: int = 0) -> None:
        self.left -= 1 + more
        if self.left < 0:
            check("rule_steps", self.allowed + 1, "steps of matching names")


@dataclass(frozen=True, slots=True)
class Index:
    """A variable in a name, its kind and its offset.

    The number in the name is the value of the variable plus the offset `shift`.
    """

    words: tuple[str, ...]
    kind: Kind
    shift: int = 0

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.kind if isinstance(self.kind, tuple) else None


Part = str | Index


class Pattern:
    """The name on one side of a rule, as strings and variables."""

    def __init__(self, name: Name, kinds: Mapping[str, Kind], shifts: Mapping[str, int]) -> None:
        parts: list[Part] = []
        for part in name:
            if isinstance(part, str):
                parts.append(part)
                continue
            sign, amount = (part.shift.sign, part.shift.amount) if part.shift else (1, 0)
            kind = kinds.get(part.words[0]) if len(part.words) == 1 else None
            shift = sign * (shifts[amount] if isinstance(amount, str) else amount)
            parts.append(Index(part.words, kind, shift))
        self.parts = tuple(parts)
        first, last = self.parts[0], self.parts[-1]
        # `may_match` compares the part of the name before the first digit or variable, and the part
        # after the last digit or variable.
        self._begin = re.split("[0-9]", first)[0] if isinstance(first, str) else ""
        self._end = re.split("[0-9]", last)[-1] if isinstance(last, str) else ""

    @property
    def indices(self) -> tuple[Index, ...]:
        return tuple(part for part in self.parts if isinstance(part, Index))

    def may_match(self, family: str) -> bool:
        """Return False if no key of a family can match.

        The keys of a family differ only in their numbers. `family` is one of these keys, with 0
        in place of each number.
        """
        return family.startswith(self._begin) and family.endswith(self._end)

    def match(self, key: str, steps: Steps) -> Values | None:
        """Match the name with `key`. Return the values of the variables.

        Return None if the name does not match.
        """
        values: Values = {}
        return values if self._match(key, 0, 0, values, steps) else None

    def _match(self, key: str, number: int, at: int, values: Values, steps: Steps) -> bool:
        parts = self.parts
        while number < len(parts):
            part = parts[number]
            if isinstance(part, Index):
                break
            if not key.startswith(part, at):
                return False
            at += len(part)
            number += 1
        else:
            return at == len(key)
        known = values.get(part.words)
        for value, end in self._choices(part, key, number, at, steps):
            steps.take((end - at) >> 8)
            if known is None or known == value:
                values[part.words] = value
                if self._match(key, number + 1, end, values, steps):
                    return True
        if known is None:
            values.pop(part.words, None)
        return False

    def _choices(
        self, index: Index, key: str, number: int, at: int, steps: Steps
    ) -> Iterator[tuple[Value, int]]:
        """Yield (value, end) for each possible value of a variable at position `at` of the key.

        `end` is the position in the key after the value.
        """
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
        """Yield (string, end) for a variable of kind `*` or `**`, shortest first.

        Yield only strings that are followed by the next part of the name.
        """
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
        """Return the name for these values.

        Return None if the value of a variable is the label `-`.
        """
        made = []
        for part in self.parts:
            text = part if isinstance(part, str) else _text(part, values, sizes)
            if text is None:
                return None
            made.append(text)
        return "".join(made)


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
            # The size of the first variable has no effect, because `number` is still 0.
            number = number * sizes.get(word, 1) + value
        return str(number + index.shift)
    value = values[index.words[0]]
    if isinstance(value, str):
        return value
    if index.labels is not None:
        label = index.labels[value]
        return None if label == ABSENT else label
    written = value + index.shift
    if written < 0:
        raise MisfitError(
            f"a name would contain the negative number {written}, because a variable is {value}"
        )
    return str(written)


# Checking the names of axes and variables in a single rule


_STARS = 2  # maximum number of ** in one name


@dataclass(frozen=True, slots=True)
class Words:
    """The variables of a rule, grouped by where they occur.

    * ``loops`` contains the variables in both names.
    * ``gathered`` contains variables that occur in the left name and as axes of the right shape.
      The rule stacks tensors along each of these axes.
    * ``scattered`` contains variables that occur in the right name and as axes of the left shape.
      The rule splits a tensor along each of these axes.
    """

    loops: tuple[str, ...]
    gathered: tuple[str, ...]
    scattered: tuple[str, ...]
    left_kinds: Mapping[str, Kind]
    right_kinds: Mapping[str, Kind]

    def labels(self, word: str) -> int | None:
        """Return the number of labels of a variable. Return None if the variable has no labels."""
        kind = self.left_kinds.get(word)
        return len(kind) if isinstance(kind, tuple) else None


def axis_words(rule: Rule) -> Words:
    """Return the variables of a rule.

    Raises RuleError if an axis or variable occurs on one side only, or twice on one side.
    """
    sides = (rule.left, "left"), (rule.right, "right")
    for side, where in sides:
        indices = flatten(dict.fromkeys(each.words for each in side.variables))
        rest = (each for each in side.shape if each == REST)
        for word, count in Counter([*indices, *side.axes, *rest]).items():
            if count > 1:
                hint = "an axis may occur only once on each side: in the name or in the shape"
                raise RuleError(f"{word} occurs twice on the {where}", hint=hint)
        if sum(variable.kind == STARS for variable in side.variables) > _STARS:
            raise RuleError(f"the name on the {where} has more than {_STARS} variables with **")
    left, right = ({*side.words, *side.axes} for side, _ in sides)
    for word in (*rule.left.words, *rule.left.axes, *rule.right.words, *rule.right.axes):
        if word not in left or word not in right:
            noun = "axis" if word in (*rule.left.axes, *rule.right.axes) else "index"
            where = "right" if word in left else "left"
            hint = (
                f"add {{{word}}} to the name on the {where}, or {word} to the shape on the {where}"
            )
            raise RuleError(
                f"{noun} {word} occurs on one side only, but must occur on both", hint=hint
            )
    if (REST in rule.left.shape) != (REST in rule.right.shape):
        raise RuleError(
            "... occurs on one side only, but must occur on both",
            hint="a side without [ ] means [...]",
        )
    left_kinds, right_kinds = _kinds(rule)
    names = set(rule.left.words), set(rule.right.words)
    return Words(
        tuple(word for word in rule.left.words if word in names[1]),
        tuple(word for word in rule.left.words if word not in names[1]),
        tuple(word for word in rule.right.words if word not in names[0]),
        left_kinds,
        right_kinds,
    )


def _kinds(rule: Rule) -> tuple[dict[str, Kind], dict[str, Kind]]:
    """Return the kind of each variable in the left name, and in the right name.

    If one side gives no kind for a variable, use the kind on the other side.
    """
    left, right = dict[str, Kind](), dict[str, Kind]()
    for side, kinds in ((rule.left, left), (rule.right, right)):
        for each in side.variables:
            word = each.words[0]
            if each.kind is not None and kinds.setdefault(word, each.kind) != each.kind:
                raise RuleError(f"{word} has different labels in one name")
    for word in {**left, **right}:
        one, other = left.get(word, right.get(word)), right.get(word, left.get(word))
        are_labels = isinstance(one, tuple) and isinstance(other, tuple)
        if one != other and not (are_labels and len(one or "") == len(other or "")):
            texts = ("|".join(k) if isinstance(k, tuple) else str(k) for k in (one, other))
            raise RuleError(
                f"{word} must have the same kind on both sides, but is "
                f"{' on the left and '.join(texts)} on the right"
            )
        if one in (STAR, STARS) and not (word in rule.left.words and word in rule.right.words):
            raise RuleError(f"{word} matches any string, and must occur in both names")
        left[word], right[word] = one, other
    for variable in (*rule.left.variables, *rule.right.variables):
        if len(variable.words) == 1:
            if variable.shift is not None and left.get(variable.words[0]) is not None:
                raise RuleError(f"{variable}: only a number can have an offset")
            continue
        odd = [word for word in variable.words if left.get(word) in (STAR, STARS)]
        if odd:
            raise RuleError(f"{variable}: {odd[0]} matches any string, not a digit of a number")
    return left, right


def ragged(rule: Rule, words: Words, known: KnownSizes) -> dict[str, str]:
    """Map each size with several values to the variable whose labels select a value.

    The variable must have one label for each value of the size. Raises RuleError if no variable or
    several variables have this number of labels.
    """
    found = {}
    for word, size in known.sizes.items():
        if len(size) > 1:
            found[word] = _differs_with(word, len(size), rule, words)
    for word, variable in found.items():
        for side in (rule.left, rule.right):
            # If both are axes of one side, `word` must follow `variable` in the same ( ).
            if {variable, word} <= set(side.axes) and not any(
                word in axes and variable in axes[: axes.index(word)] for axes in side.shape
            ):
                raise RuleError(
                    f"{word} depends on {variable}, so {word} must follow {variable} in one ( )",
                    hint=f"write ({variable} {word})",
                )
    return found


def _differs_with(word: str, parts: int, rule: Rule, words: Words) -> str:
    before: list[str] = []  # axes before `word` in the same dimension, on both sides
    for axes in (*rule.left.shape, *rule.right.shape):
        if word in axes and not isinstance(axes, str):
            before += axes[: axes.index(word)]
    for candidates in (before, (*words.gathered, *words.scattered), words.loops):
        fitting = [each for each in candidates if words.labels(each) == parts and each != word]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            names = " and ".join(fitting)
            raise RuleError(
                f"cannot tell which variable selects the {parts} values of {word}: {names} each "
                f"have {parts} labels"
            )
    raise RuleError(
        f"{word} has {parts} values, but no variable has {parts} labels",
        hint="give one value for each label",
    )


def check_none_empty(
    rule: Rule, words: Words, known: KnownSizes, uneven: Mapping[str, str]
) -> None:
    """Raise RuleError for a size of 0. Only the size for the label `-` may be 0: `-` is the label
    of padding, and the size 0 means that there is no padding."""
    placed: set[str] = set()
    for side in (rule.left, rule.right):
        placed.update(side.axes, side.words, side.shift_words)
    for word in sorted(placed & known.sizes.keys()):
        variable = uneven.get(word)
        labels = [kinds.get(variable or "") for kinds in (words.left_kinds, words.right_kinds)]
        for part, size in enumerate(known.sizes[word]):
            absent = any(isinstance(kind, tuple) and kind[part] == ABSENT for kind in labels)
            if size is not None and not absent:
                checked(word, size, origin=known.origins.get(word))


def expanded(dimensions: tuple[Dimension, ...], rest: int) -> list[tuple[str, ...]]:
    """Replace ``...`` by `rest` dimensions."""
    found: list[tuple[str, ...]] = []
    for dimension in dimensions:
        if isinstance(dimension, tuple):
            found.append(dimension)
        else:
            found += [(f"{REST}{number}",) for number in range(rest)]
    return found


def shape_text(side: Side) -> str:
    """Format the shape of a side in the notation, for example ``[(h d) i]``."""
    return f"[{' '.join(map(dimension_text, side.shape))}]"
