"""Compute how the elements of source tensors are copied to target tensors.

A rule and the shapes of a group of source tensors determine the copies. Each copy moves a block of
elements. A copy has a start in the source and a start in the target. For each axis inside the
block, a copy has a size, a source stride and a target stride.

A group contains the source tensors that one rule combines, such as the tensors of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

from ckptkit.compute.strided import ZEROS, StridedCopy
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape
from ckptkit.core.text import plural
from ckptkit.rules.names import (
    KnownSizes,
    Pattern,
    Settings,
    Steps,
    Value,
    Values,
    Words,
    check_none_empty,
    expanded,
    ragged,
    shape_text,
)
from ckptkit.rules.notation import (
    ABSENT,
    REST,
    MisfitError,
    Rule,
    RuleError,
    about,
    dimension_text,
    give_size,
    settings,
    unknown_size,
)

Axes = tuple[str, ...]
# A pair: the name of a size, and the index of the label to which the size applies. If the size
# applies to all labels, the index is None.
Symbol = tuple[str, int | None]
Indices = Mapping[str, int]


class ArrangedRule(NamedTuple):
    """One target tensor of a group."""

    indices: dict[str, int]  # values of the variables that occur only in the right name
    shape: Shape
    copies: tuple[StridedCopy, ...]


class SourceTensor(NamedTuple):
    """One source tensor of a group."""

    key: str
    indices: tuple[int, ...]  # values of the variables that occur only in the left name
    shape: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """The target tensors for one group, or for all groups with the same shapes."""

    made: tuple[ArrangedRule, ...]
    sizes: dict[Symbol, int]
    dropped: int  # number of elements
    zeros: int  # number of elements


class Arrangement:
    """A rule and the given sizes. The method :meth:`solve` infers the other sizes."""

    def __init__(
        self, number: int, rule: Rule, words: Words, known: KnownSizes, ragged: Mapping[str, str]
    ) -> None:
        self.number, self.rule, self.words, self.ragged = number, rule, words, ragged
        self.bases, self.unset = set(ragged.values()), known.unset
        self.known_sizes: dict[Symbol, int] = {}
        for word, size in known.sizes.items():
            for part, value in enumerate(size):
                if value is not None:
                    self.known_sizes[word, part if word in ragged else None] = value
        for word in (*words.loops, *words.gathered, *words.scattered):
            count = words.labels(word)
            if count is not None and self.known_sizes.setdefault((word, None), count) != count:
                given = self.known_sizes[word, None]
                message = f"{word} has {count} labels, but the given size is {word}={given}"
                raise about(number, RuleError(message))

    def symbol(self, word: str, indices: Indices) -> Symbol:
        variable = self.ragged.get(word)
        return (word, None) if variable is None else (word, indices[variable])

    def extent(self, axes: Axes, indices: Indices, sizes: Mapping[Symbol, int]) -> int:
        """Return the number of elements along some axes of a dimension.

        The number is the product of the sizes of the axes. If the size of an axis depends on a
        label, the sizes for all labels are added.
        """
        total = 1
        for position, word in enumerate(axes):
            if word in self.bases:
                rest = axes[position + 1 :]
                parts = range(self.known_sizes[word, None])
                return total * sum(self.extent(rest, {**indices, word: n}, sizes) for n in parts)
            total *= sizes[self.symbol(word, indices)]
        return total

    def unknown(self, axes: Axes, indices: Indices, sizes: Mapping[Symbol, int]) -> list[Symbol]:
        """Return the unknown sizes that :meth:`extent` needs, without duplicates."""
        found: dict[Symbol, None] = {}
        for position, word in enumerate(axes):
            if word in self.bases:
                for n in range(self.known_sizes[word, None]):
                    inner = self.unknown(axes[position + 1 :], {**indices, word: n}, sizes)
                    found.update(dict.fromkeys(inner))
                break
            symbol = self.symbol(word, indices)
            if symbol not in sizes:
                found[symbol] = None
        return list(found)

    # Inferring sizes from shapes

    def solve(
        self, loops: Indices, sizes: Mapping[Symbol, int], members: Sequence[SourceTensor]
    ) -> Solved:
        """Infer the sizes for a group. Raises MisfitError if the shapes do not match the rule."""
        rest = self._rest(members)
        left = expanded(self.rule.left.shape, rest)
        right = expanded(self.rule.right.shape, rest)
        solved = [self._solve(member, left, loops, sizes) for member in members]
        merged = dict(sizes)
        for found in solved:
            for symbol, value in found.items():
                if merged.setdefault(symbol, value) != value:
                    raise self._differs(symbol, members, solved)
        return Solved(self, left, right, loops, merged, members)

    def _rest(self, members: Sequence[SourceTensor]) -> int:
        """Return the number of dimensions that ``...`` matches."""
        dimensions = self.rule.left.shape
        fixed = sum(dimension != REST for dimension in dimensions)
        open_ended = fixed < len(dimensions)
        for member in members:
            rank = len(member.shape)
            if rank < fixed or (rank > fixed and not open_ended):
                shape = shape_text(self.rule.left)
                has = f"{member.key} has {plural(rank, 'dimension')}, but {shape} requires"
                message = f"{has} {'at least ' * open_ended}{fixed}"
                raise about(self.number, MisfitError(message))
            if rank != len(members[0].shape):
                message = f"{members[0].key} and {member.key} have different numbers of dimensions"
                raise about(self.number, MisfitError(message))
        return len(members[0].shape) - fixed if open_ended else 0

    def _solve(
        self, member: SourceTensor, left: list[Axes], loops: Indices, sizes: Mapping[Symbol, int]
    ) -> dict[Symbol, int]:
        """Infer sizes from the shape of one source tensor."""
        indices = {**loops, **dict(zip(self.words.gathered, member.indices, strict=True))}
        known = dict(sizes)
        found = {}
        for number, (axes, elements) in enumerate(zip(left, member.shape, strict=True)):
            missing = self.unknown(axes, indices, known)
            if len(missing) > 1:
                raise self._unsaid(axes, elements, missing)
            if not missing and self.extent(axes, indices, known) == elements:
                continue
            if missing:
                (symbol,) = missing
                none, one = (self.extent(axes, indices, {**known, symbol: n}) for n in (0, 1))
                value, odd = divmod(elements - none, one - none) if one > none else (0, 1)
                if not odd and value >= 0:
                    known[symbol] = found[symbol] = value
                    continue
            held = f"{elements} elements of dimension {number}"
            if number < 2:
                held = plural(elements, ("row", "column")[number]).replace(",", "")
            pairs = ((word, known[name]) for word in axes for name in known if name[0] == word)
            given, product = settings(pairs), "*".join(axes)
            if missing:
                message = f"{held} are not divisible by {product}{' with ' * bool(given)}{given}"
            elif axes:
                made = self.extent(axes, indices, known)
                message = f"{held}, but ({' '.join(axes)}) with {given} requires {made}"
            else:
                message = f"{held}, but the rule requires 1"
            raise about(self.number, MisfitError(f"{member.key}: {message}"))
        return found

    def _unsaid(self, axes: Axes, elements: int, missing: list[Symbol]) -> RuleError:
        words = list(dict.fromkeys(word for word, _ in missing))
        word = next((each for each in words if each in self.unset), words[0])
        what, hint = f"all but one of {', '.join(words)}", give_size(word, self.unset)
        if len(words) == 1:
            what = f"{word} for all labels but one"
            numbers = "|".join(["8"] * (self.words.labels(self.ragged[word]) or 0))
            hint = f"give a number for each label, as in `with {word}={numbers}`"
            if word in self.unset:
                hint = f"{self.unset[word]} is not set; {hint}"
        message = f"cannot infer how {elements} splits into {dimension_text(axes)}: give {what}"
        return about(self.number, RuleError(message, hint=hint))

    def _differs(
        self, symbol: Symbol, members: Sequence[SourceTensor], solved: list[dict[Symbol, int]]
    ) -> MisfitError:
        """Return the error for a size that differs between the source tensors of a group."""
        word = "the dimensions of ..." if symbol[0].startswith(REST) else symbol[0]
        by: dict[object, str] = {}  # the first source tensor with each size
        for member, found in zip(members, solved, strict=True):
            by.setdefault(found.get(symbol), member.key)
        pairs = ", ".join(f"{key}: {size}" for size, key in list(by.items())[:6])
        message = f"the size of {word} differs between source tensors ({pairs})"
        hint = "numbered tensors must have equal sizes; tensors with labels may differ"
        labels = [count for each in self.words.gathered if (count := self.words.labels(each))]
        if labels:
            sizes = "|".join("_" * labels[0])
            hint = (
                f"if the size differs for each label, add `with {word}={sizes}` to the rule to "
                "infer the sizes"
            )
        return about(self.number, MisfitError(message, hint=hint))


@dataclass
class Solved:
    """A group of source tensors, its sizes, and the number of its targets.

    :attr:`layout` computes the targets.
    """

    rule: Arrangement
    left: list[Axes]
    right: list[Axes]
    loops: Indices
    sizes: dict[Symbol, int]
    members: Sequence[SourceTensor]

    def __post_init__(self) -> None:
        self.sources = {member.indices: number for number, member in enumerate(self.members)}
        self.targets = prod(self._size(word) for word in self.rule.words.scattered)
        check("rule_targets", self.targets, "target tensors of a rule")
        check("rule_copies", self.targets * len(self.members), "copies of a rule")

    @cached_property
    def layout(self) -> Layout:
        words = self.rule.words
        made, dropped, zeros = [], 0, 0
        for indices in self._all(words.scattered):
            target = self._made(indices)
            if self._is_absent(indices, words.right_kinds):
                dropped += prod(target.shape)
                continue
            made.append(target)
            zeros += sum(copy.elements for copy in target.copies if copy.source == ZEROS)
        return Layout(tuple(made), self.sizes, dropped, zeros)

    def _size(self, word: str) -> int:
        size = self.sizes.get((word, None))
        if size is None:
            raise about(self.rule.number, unknown_size([word], self.rule.unset))
        return size

    def _all(self, variables: Axes) -> Iterator[dict[str, int]]:
        for values in product(*(range(self._size(word)) for word in variables)):
            yield dict(zip(variables, values, strict=True))

    def _is_absent(self, indices: Indices, kinds: Mapping[str, object]) -> bool:
        for word, index in {**self.loops, **indices}.items():
            labels = kinds.get(word)
            if isinstance(labels, tuple) and labels[index] == ABSENT:
                return True
        return False

    def _made(self, scattered: dict[str, int]) -> ArrangedRule:
        words = self.rule.words
        outer = {**self.loops, **scattered}
        shape = tuple(self._extent(axes, outer) for axes in self.right)
        # `uneven` contains axes that occur on both sides and determine the sizes of other axes.
        # Each index along these axes needs a separate copy.
        named = {*words.loops, *words.gathered, *words.scattered}
        uneven = tuple(word for word in self.rule.rule.left.axes if word in self.rule.bases - named)
        copies = []
        for gathered in self._all(words.gathered):
            source = ZEROS
            if not self._is_absent(gathered, words.left_kinds):
                source = self.sources[tuple(gathered.values())]
            for inner in self._all(uneven):
                copy = self._copy({**outer, **gathered, **inner}, source, shape)
                if copy.elements:
                    copies.append(copy)
        assert sum(copy.elements for copy in copies) == prod(shape)
        return ArrangedRule(scattered, shape, tuple(copies))

    def _copy(self, indices: Indices, source: int, shape: Shape) -> StridedCopy:
        start, read = (0, {}) if source == ZEROS else self._strides(self.left, indices)
        place, written = self._strides(self.right, indices)
        dims = []
        for axes in self.right:
            for word in axes:
                if word not in indices:
                    size = self.sizes[self.rule.symbol(word, indices)]
                    dims.append((size, read.get(word, 0), written[word]))
        return StridedCopy(source, start, place, tuple(dims))

    def _strides(self, dimensions: list[Axes], indices: Indices) -> tuple[int, dict[str, int]]:
        """Return the offset of the element at `indices`, and the strides of all other axes."""
        strides: dict[str, int] = {}
        start, step = 0, 1
        for axes in reversed(dimensions):
            inner = 1
            for position in range(len(axes) - 1, -1, -1):
                word, rest = axes[position], axes[position + 1 :]
                if word not in indices:
                    strides[word] = inner * step
                elif word in self.rule.bases:
                    before = ({**indices, word: n} for n in range(indices[word]))
                    start += step * sum(self._extent(rest, each) for each in before)
                else:
                    start += step * inner * indices[word]
                inner = self._extent(axes[position:], indices)
            step *= inner
        return start, strides

    def _extent(self, axes: Axes, indices: Indices) -> int:
        missing = self.rule.unknown(axes, indices, self.sizes)
        if missing:
            words = [word for word, _ in missing]
            raise about(self.rule.number, unknown_size(words, self.rule.unset))
        return self.rule.extent(axes, indices, self.sizes)


# Matching keys with a rule, and planning the targets of each group of keys


T = TypeVar("T")


def numbered(number: int, function: Callable[..., T], *given: Any) -> T:
    """Call a function. Prefix the message of a RuleError with the number of the rule."""
    try:
        return function(*given)
    except RuleError as error:
        if error.part:
            raise
        raise about(number, RuleError(error.message, hint=error.hint)) from None


class BoundRule:
    """A rule and its given sizes. A BoundRule matches keys, and infers sizes for groups."""

    def __init__(self, number: int, rule: Rule, words: Words, settings: Settings) -> None:
        self.number, self.rule, self.words = number, rule, words
        self.known = KnownSizes(rule, settings)
        uneven = ragged(rule, words, self.known)
        check_none_empty(rule, words, self.known, uneven)
        self.arrangement = Arrangement(number, rule, words, self.known, uneven)
        shifts = self._shifts()
        self.left = Pattern(rule.left.name, words.left_kinds, shifts)
        self.right = Pattern(rule.right.name, words.right_kinds, shifts)
        self.composites = [each.words for each in self.left.indices if len(each.words) > 1]
        self.label_loops = [word for word in words.loops if words.labels(word) is not None]
        self.solved: dict[object, Solved] = {}

    def _shifts(self) -> dict[str, int]:
        found = {}
        for word in (*self.rule.left.shift_words, *self.rule.right.shift_words):
            size = self.known.sizes.get(word, ())
            if len(size) != 1 or size[0] is None:
                raise unknown_size([word], self.known.unset)
            found[word] = size[0]
        return found

    def solve(self, loops: Mapping[str, Value], members: list[SourceTensor]) -> Solved:
        """Infer the sizes for a group. Groups with the same shapes share one result."""
        labels = tuple(int(loops[word]) for word in self.label_loops)
        key = (labels, tuple(member[1:] for member in members))
        if key not in self.solved:
            # If a size is not given, the highest number in the keys determines the size.
            sizes = dict(self.arrangement.known_sizes)
            choices: list[Sequence[int]] = []
            for position, word in enumerate(self.words.gathered):
                kind = self.words.left_kinds.get(word)
                if isinstance(kind, tuple):
                    choices.append([n for n, label in enumerate(kind) if label != ABSENT])
                else:
                    most = 1 + max(each.indices[position] for each in members)
                    choices.append(range(sizes.setdefault((word, None), most)))
            self._check_complete(members, choices)
            given = dict(zip(self.label_loops, labels, strict=True))
            self.solved[key] = self.arrangement.solve(given, sizes, members)
        return self.solved[key]

    def _check_complete(self, members: list[SourceTensor], choices: list[Sequence[int]]) -> None:
        """Raise MisfitError unless the group has one tensor for each combination of indices."""
        held = {member.indices: member.key for member in members}
        for indices, key in held.items():
            for word, index, choice in zip(self.words.gathered, indices, choices, strict=True):
                if index not in choice:
                    message = f"{key}: {word}={index} must be less than the size {len(choice)}"
                    raise about(self.number, MisfitError(message))
        if len(held) < prod(map(len, choices)):
            missing = next(each for each in _product(choices) if each not in held)
            raise self._missing(members[0], missing)

    def _missing(self, like: SourceTensor, indices: tuple[int, ...]) -> MisfitError:
        matched = self.left.match(like.key, Steps(1)) or {}
        values = {words[0]: value for words, value in matched.items() if len(words) == 1}
        sizes = {word: size for (word, _), size in self.arrangement.known_sizes.items()}

        def name(pattern: Pattern) -> str | None:
            try:
                return pattern.render({**dict.fromkeys(self.words.scattered, 0), **values}, sizes)
            except KeyError:  # there are no values for combined variables such as ``{(m e)}``
                return None

        target = name(self.right) or self.rule.right
        chosen = []
        for word, index in zip(self.words.gathered, indices, strict=True):
            labels = self.words.left_kinds.get(word)
            values[word] = index
            chosen.append(f"{word}={labels[index] if isinstance(labels, tuple) else index}")
        key = name(self.left)
        missing = f"{' '.join(chosen)}{f' ({key})' if key else ''}"
        message = f"{target} lacks the source tensor with {missing}"
        hint = "add the missing tensor, or correct the rule"
        return about(self.number, MisfitError(message, hint=hint))


def _product(choices: list[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield the same tuples as itertools.product, but do not copy the choices."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(choices[1:]):
            yield (first, *rest)


class Digits:
    """Splits a number in a name into the values of several variables, such as ``{(m e)}``."""

    def __init__(self, matches: Mapping[str, tuple[BoundRule, Values]]) -> None:
        # Each key is (number of a rule, combined variables, values of the other loop variables).
        # Each value is the highest number in the names that match the key.
        self.most: dict[object, int] = {}
        for ready, raw in matches.values():
            for words in ready.composites:
                place = self._place(ready, words, raw)
                self.most[place] = max(self.most.get(place, 0), int(raw[words]))

    def _place(self, ready: BoundRule, words: Axes, raw: Values) -> object:
        loops = set(ready.words.loops)
        others = tuple(raw[each] for each in raw if {*each} <= loops and each != words)
        return ready.number, words, others

    def decoded(self, ready: BoundRule, key: str, raw: Values) -> dict[str, Value]:
        """Return the value of each variable in `raw`.

        Raises RuleError if the size of a variable is unknown. Raises MisfitError if a number in
        `key` is too large for the sizes of its variables.
        """
        values: dict[str, Value] = {}
        for words, value in raw.items():
            if len(words) == 1:
                values[words[0]] = value
                continue
            number, text = int(value), f"({' '.join(words)})"
            # In `sizes`, 0 means that a size is unknown. The first variable needs no size.
            sizes = [ready.arrangement.known_sizes.get((word, None), 0) for word in words]
            missing = [word for word, n in zip(words[1:], sizes[1:], strict=True) if not n]
            if missing:
                count = self.most[self._place(ready, words, raw)] + 1
                known = prod(size for size in sizes if size)
                if len(missing) > 1 or not sizes[0] or count % known:
                    message = f"cannot infer how {count} numbers split into {text}"
                    hint = give_size(missing[0], ready.known.unset)
                    raise about(ready.number, RuleError(message, hint=hint))
                sizes = [size or count // known for size in sizes]
            for word, size in zip(reversed(words[1:]), reversed(sizes[1:]), strict=True):
                number, values[word] = divmod(number, size)
            values[words[0]] = number
            if sizes[0] and number >= sizes[0]:
                given = settings(zip(words, sizes, strict=True))
                message = f"{key}: {value} is too large for {text} with {given}"
                raise about(ready.number, MisfitError(message))
        return values
