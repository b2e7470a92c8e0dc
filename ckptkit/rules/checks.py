"""Check a rule by itself: the words of its sides, and the kinds of its indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.text import flatten
from ckptkit.rules.errors import RuleError
from ckptkit.rules.notation import (
    ABSENT,
    REST,
    STAR,
    STARS,
    Dimension,
    Kind,
    Rule,
    Side,
    Variable,
    dimension_text,
)  # fmt: skip
from ckptkit.rules.sizes import Known, checked, shift_words

_STARS = 2  # of ** in one name


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a rule.

    ``loops`` stand in both names; ``gathered`` in the left name and the right shape; ``scattered``
    in the right name and the left shape.
    """

    loops: tuple[str, ...]
    gathered: tuple[str, ...]
    scattered: tuple[str, ...]
    left_kinds: Mapping[str, Kind]
    right_kinds: Mapping[str, Kind]

    def labels(self, word: str) -> int | None:
        """Return the number of labels of a variable, None if it has none."""
        kind = self.left_kinds.get(word)
        return len(kind) if isinstance(kind, tuple) else None


def words_of(rule: Rule) -> Words:
    """The words of a rule. Raises RuleError where the two sides do not say the same elements."""
    for side, where in ((rule.left, "left"), (rule.right, "right")):
        _check_side(side, where)
    left, right = (Counter([*side.words, *side.axes]) for side in (rule.left, rule.right))
    for word in [*left, *right]:
        if left[word] != right[word]:
            noun = "axis" if word in (*rule.left.axes, *rule.right.axes) else "index"
            hint = "an index of one name only is an axis of the other side's shape"
            raise RuleError(f"{noun} {word} stands on one side only", hint=hint)
    _check_rest(rule)
    names = set(rule.left.words), set(rule.right.words)
    left_kinds, right_kinds = _kinds(rule)
    return Words(
        tuple(word for word in rule.left.words if word in names[1]),
        tuple(word for word in rule.left.words if word not in names[1]),
        tuple(word for word in rule.right.words if word not in names[0]),
        left_kinds,
        right_kinds,
    )


def _check_side(side: Side, where: str) -> None:
    if side.shape.count(REST) > 1:
        raise RuleError(f"... stands twice on the {where}")
    counts = Counter([*side.words, *side.axes])
    for word, count in counts.items():
        if count > 1:
            hint = "a word is an index in the name or an axis of the shape, once"
            raise RuleError(f"{word} stands twice on the {where}", hint=hint)
    inside = Counter(variable.words for variable in set(side.variables))
    parts = Counter(flatten(inside))
    for word, count in parts.items():
        if count > 1:
            raise RuleError(f"{word} stands alone and in ( ) in the name on the {where}")
    if sum(variable.kind == STARS for variable in side.variables) > _STARS:
        raise RuleError(f"more than {_STARS} ** in the name on the {where}")


def _check_rest(rule: Rule) -> None:
    left, right = (REST in side.shape for side in (rule.left, rule.right))
    if left != right:
        raise RuleError("... stands on one side only", hint="a side without [ ] is [...]")


def _kinds(rule: Rule) -> tuple[dict[str, Kind], dict[str, Kind]]:
    """The kind of each index in the two names: as said there, or else as said on the other side."""
    left, right = _own_kinds(rule.left), _own_kinds(rule.right)
    for word in {**left, **right}:
        kinds = left.get(word, right.get(word)), right.get(word, left.get(word))
        _check_kinds(word, *kinds)
        if kinds[0] in (STAR, STARS) and not (word in rule.left.words and word in rule.right.words):
            raise RuleError(f"{word} is any text, and must stand in both names")
        left[word], right[word] = kinds
    for variable in (*rule.left.variables, *rule.right.variables):
        _check_number(variable, left)
    return left, right


def _own_kinds(side: Side) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for variable in side.variables:
        word = variable.words[0]
        if variable.kind is not None and kinds.setdefault(word, variable.kind) != variable.kind:
            raise RuleError(f"{word} has two kinds in one name")
    return kinds


def _check_kinds(word: str, left: Kind, right: Kind) -> None:
    if isinstance(left, tuple) and isinstance(right, tuple):
        if len(left) != len(right):
            raise RuleError(
                f"{word} has {len(left)} labels on the left and {len(right)} on the right"
            )
    elif left != right:
        raise RuleError(
            f"{word} is {_kind_text(left)} on the left and {_kind_text(right)} on the right"
        )


def _kind_text(kind: Kind) -> str:
    return "|".join(kind) if isinstance(kind, tuple) else str(kind)


def _check_number(variable: Variable, kinds: Mapping[str, Kind]) -> None:
    kind = kinds.get(variable.words[0])
    if len(variable.words) == 1:
        if variable.shift is not None and kind is not None:
            raise RuleError(f"{variable}: only a number can be shifted")
        return
    odd = [word for word in variable.words if kinds.get(word) in (STAR, STARS)]
    if odd:
        raise RuleError(f"{variable}: {odd[0]} is any text, and no digit of a number")


def ragged(rule: Rule, words: Words, known: Known) -> dict[str, str]:
    """The variable with whose labels each uneven size differs. Raises RuleError if unclear."""
    found = {}
    for word, size in known.sizes.items():
        if len(size) > 1:
            found[word] = _differs_with(word, len(size), rule, words)
    for word, variable in found.items():
        for side in (rule.left, rule.right):
            _check_order(word, variable, side)
    return found


def check_none_empty(rule: Rule, words: Words, known: Known, uneven: Mapping[str, str]) -> None:
    """Raise RuleError for a size of 0, but of the part of a label `-`: no padding."""
    placed: set[str] = set()
    for side in (rule.left, rule.right):
        placed.update(side.axes, side.words, shift_words(side.variables))
    for word in sorted(placed & known.sizes.keys()):
        absent = _absent(words, uneven.get(word))
        for part, size in enumerate(known.sizes[word]):
            if size is not None and part not in absent:
                checked(word, size)


def _absent(words: Words, variable: str | None) -> set[int]:
    """Return the positions of the labels `-` of a variable."""
    if variable is None:
        return set()
    kinds = words.left_kinds[variable], words.right_kinds[variable]
    named = (kind for kind in kinds if isinstance(kind, tuple))
    return set(flatten(_positions(kind) for kind in named))


def _positions(labels: tuple[str, ...]) -> list[int]:
    return [number for number, label in enumerate(labels) if label == ABSENT]


def _differs_with(word: str, parts: int, rule: Rule, words: Words) -> str:
    axes = (*words.gathered, *words.scattered)
    for candidates in (_before(word, rule), axes, words.loops):
        fitting = [each for each in candidates if words.labels(each) == parts and each != word]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            names = " and ".join(fitting)
            raise RuleError(f"{word} has {parts} values, and so many labels have {names}")
    raise RuleError(
        f"{word} has {parts} values, and no variable has {parts} labels",
        hint="one value for each label",
    )


def _before(word: str, rule: Rule) -> Iterator[str]:
    """The words that stand before a word in its dimension, on either side."""
    for side in (rule.left, rule.right):
        for dimension in side.shape:
            if word in dimension and not isinstance(dimension, str):
                yield from dimension[: dimension.index(word)]


def _check_order(word: str, variable: str, side: Side) -> None:
    """On the side where the variable is an axis, the word must follow it in the same dimension."""
    if variable not in side.axes or word not in side.axes:
        return
    for dimension in side.shape:
        if word in dimension and variable in dimension[: dimension.index(word)]:
            return
    raise RuleError(
        f"{word} differs with {variable}, and must follow it in one ( )",
        hint=f"({variable} {word})",
    )


def expanded(dimensions: tuple[Dimension, ...], rest: int) -> list[tuple[str, ...]]:
    """The dimensions, with so many in the place of ``...``."""
    found: list[tuple[str, ...]] = []
    for dimension in dimensions:
        if isinstance(dimension, tuple):
            found.append(dimension)
        else:
            found += [(f"{REST}{number}",) for number in range(rest)]
    return found


def shape_text(side: Side) -> str:
    """``[(h d) i]``."""
    return f"[{' '.join(map(dimension_text, side.shape))}]"
