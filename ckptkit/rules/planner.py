"""Apply rules to names and shapes of source tensors, and plan the target tensors.

This module reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from math import prod
from typing import Any

from ckptkit.compute.strided import StridedCopy
from ckptkit.core.errors import CollisionError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Shape
from ckptkit.core.text import nearest, some, typed
from ckptkit.rules.arrange import BoundRule, Digits, Solved, SourceTensor, Symbol, numbered
from ckptkit.rules.names import Config, Settings, Steps, Value, Values, axis_words, words_of
from ckptkit.rules.notation import (
    Given,
    MisfitError,
    NotReversibleError,
    Rule,
    RuleError,
    UncoveredError,
    about,
    parse_given,
    parse_rule,
)

REST = "rest"  # value of `keep` that keeps every key that no rule matches


@dataclass(frozen=True, slots=True)
class Target:
    """The shape of a target tensor, and the copies that fill the tensor.

    The source of each copy is an index in `sources`, or ZEROS.
    """

    shape: Shape
    sources: tuple[str, ...]
    copies: tuple[StridedCopy, ...]
    rule: int  # number of the rule, counted from 1

    @property
    def is_moved(self) -> bool:
        """True if the target has the same elements as its only source, in the same order."""
        if len(self.copies) != 1 or len(self.sources) != 1:
            return False
        (copy,) = self.copies
        straight = all(read == written for _, read, written in copy.dims)
        whole = prod(n for n, _, _ in copy.dims) == prod(self.shape)
        return straight and whole and copy.source == 0 and copy.start == copy.place == 0


@dataclass(slots=True)
class Taken:
    """Counts for one rule: matched keys, targets, dropped elements and zero elements.

    If the rule is applied to a checkpoint, ``how``, ``bytes`` and ``forms`` describe the new
    tensors.
    """

    number: int
    rule: Rule
    matched: int = 0
    made: int = 0
    dropped: int = 0  # number of elements
    zeros: int = 0  # number of elements
    sizes: dict[Symbol, set[int]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    how: str = "moved"
    bytes: int = 0
    forms: set[str] = field(default_factory=set)  # shapes and dtypes, as "[2, 3] float32"


@dataclass(frozen=True, slots=True)
class RulesOutcome:
    """The result of the rules of one step.

    `targets` maps each output name to its target. The target of a kept key is None.
    """

    targets: dict[str, Target | None]
    taken: tuple[Taken, ...]
    dropped: tuple[str, ...]  # keys that result in no target

    @property
    def made(self) -> dict[str, Target]:
        return {name: target for name, target in self.targets.items() if target is not None}

    @property
    def kept(self) -> list[str]:
        return [name for name, target in self.targets.items() if target is None]


class RuleSet:
    """The rules of one step."""

    def __init__(
        self,
        rules: Sequence[Rule],
        sizes: Mapping[str, Given] | None = None,
        defaults: Mapping[str, Given] | None = None,
    ) -> None:
        check("rule_labels", len(rules), "rules of a step")
        self.rules = tuple(rules)
        self.sizes = dict(sizes or {})
        self.defaults = dict(defaults or {})
        self._words = [numbered(n, axis_words, rule) for n, rule in enumerate(self.rules, 1)]

    @classmethod
    def parse(
        cls,
        lines: Iterable[str],
        sizes: Mapping[str, str | int] | None = None,
        defaults: Mapping[str, str | int] | None = None,
    ) -> RuleSet:
        """Parse lines. Each line is one rule. RuleErrors contain the number of the rule."""
        rule_lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        rules = [numbered(number, parse_rule, line) for number, line in enumerate(rule_lines, 1)]
        given = {word: parse_given(value) for word, value in (sizes or {}).items()}
        known = {word: parse_given(value) for word, value in (defaults or {}).items()}
        return cls(rules, given, known)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))

    def reversed(self) -> RuleSet:
        """Exchange the sides of each rule. Return the rules in the same order."""
        return RuleSet([rule.reversed() for rule in self.rules], self.sizes, self.defaults)

    def words(self) -> set[str]:
        """Return the names of all axes and variables whose size can be passed as an argument."""
        found: set[str] = set()
        for rule in self.rules:
            found |= words_of(rule)
        holder = Rule(self.rules[0].left, self.rules[0].right, sizes=tuple(self.sizes.items()))
        return found | words_of(holder) | self.defaults.keys()

    def plan(self, shapes: Mapping[str, Shape], **given: Any) -> dict[str, Target]:
        """Return the target tensors by name.

        Raises RuleError for invalid rules, and MisfitError if the shapes do not match the rules.
        Raises CollisionError if two targets have the same name, and LimitError for too many
        targets.
        """
        unused = (given.get("args") or {}).keys() - self.words()
        if unused:
            raise unused_argument(min(unused), self.words())
        return self.outcome(shapes, **given).made

    def outcome(self, shapes: Mapping[str, Shape], **given: Any) -> RulesOutcome:
        """Return the targets, the kept keys, and the counts for each rule."""
        return self.planning(shapes, **given).outcome()

    def planning(
        self,
        shapes: Mapping[str, Shape],
        *,
        keep: str | Sequence[str] = (),
        config: Config = None,
        meta: Config = None,
        args: Mapping[str, int] | None = None,
    ) -> Planning:
        """Evaluate the sizes of the rules. Return a Planning for the keys of `shapes`."""
        settings = Settings(args, self.sizes, self.defaults, config, meta)
        ready = []
        for number, (rule, words) in enumerate(zip(self.rules, self._words, strict=True), 1):
            ready.append(numbered(number, BoundRule, number, rule, words, settings))
        return Planning(ready, shapes, keep)


def unused_argument(word: str, known: Iterable[str]) -> RuleError:
    """Return a RuleError for an argument that no rule uses."""
    close = nearest(word, sorted(known))
    hint = f"did you mean {', '.join(close)}?" if close else f"rules use {some(sorted(known), 8)}"
    return RuleError(f"no rule uses {typed(f'--arg {word}', f'args[{word!r}]')}", hint=hint)


Group = tuple[int, tuple[Value, ...]]  # index of the rule, values of its loop variables


class Planning:
    """Matches all keys, groups the keys, and plans the targets in the order of the keys."""

    def __init__(
        self, rules: list[BoundRule], shapes: Mapping[str, Shape], keep: str | Sequence[str]
    ) -> None:
        self.rules, self.shapes = rules, shapes
        self.keep = [keep] if isinstance(keep, str) else list(keep)
        self.steps = Steps(len(shapes))
        self.families: dict[str, list[BoundRule]] = {}
        self.taken = tuple(
            Taken(each.number, each.rule, origins=each.known.origins) for each in rules
        )

    def outcome(self) -> RulesOutcome:
        matches: dict[str, tuple[BoundRule, Values]] = {}
        for key in self.shapes:
            match = self.first(key)
            if match is not None:
                matches[key] = match
                self.taken[match[0].number - 1].matched += 1
        self._check_covered(matches)
        digits = Digits(matches)
        groups: dict[Group, list[SourceTensor]] = {}
        order: list[str | Group] = []
        for key, shape in self.shapes.items():
            if key not in matches:
                order.append(key)
                continue
            ready, raw = matches[key]
            if ready.composites:
                values = digits.decoded(ready, key, raw)
            else:
                values = {words[0]: value for words, value in raw.items()}
            group = (ready.number - 1, tuple([values[word] for word in ready.words.loops]))
            indices = tuple([int(values[word]) for word in ready.words.gathered])
            if group not in groups:
                groups[group] = []
                order.append(group)
            groups[group].append(SourceTensor(key, indices, shape))
        total = len(order)
        for group, members in groups.items():
            if self.rules[group[0]].words.scattered:
                total += self._solved(group, members).targets - 1
            if total > LIMITS.rule_targets:  # raise the error before the targets take memory
                check("rule_targets", total, "target tensors of a rule step")
        targets: dict[str, Target | None] = {}
        dropped: list[str] = []
        for item in order:
            made: dict[str, Target | None] = {}
            if isinstance(item, str):
                made[item] = None
            else:
                made.update(self._made(item, groups[item]))
                dropped += [] if made else [member.key for member in groups[item]]
            for name, target in made.items():
                if name in targets:
                    numbers = [each.rule for each in (targets[name], target) if each is not None]
                    rules = " and ".join(f"rule {number}" for number in numbers)
                    kept = "" if len(numbers) == 2 else " and `keep`"
                    raise CollisionError(f"{rules}{kept} both write {name}")
                targets[name] = target
        return RulesOutcome(targets, self.taken, tuple(dropped))

    def first(self, key: str) -> tuple[BoundRule, Values] | None:
        """Return the first rule that matches the key, and the values of the rule's variables."""
        family = _NUMBERS.sub("0", key)
        candidates = self.families.get(family)
        if candidates is None:
            candidates = [rule for rule in self.rules if rule.left.may_match(family)]
            self.families[family] = candidates
        for rule in candidates:
            values = rule.left.match(key, self.steps)
            if values is not None:
                return rule, values
        return None

    def _check_covered(self, matches: Mapping[str, tuple[BoundRule, Values]]) -> None:
        """Raise UncoveredError if a rule matches no key, or if no rule matches a key.

        Optional rules may match no key. Keys that match `keep` need no rule.
        """
        for taken, ready in zip(self.taken, self.rules, strict=True):
            if not taken.matched and not ready.rule.optional:
                raise about(ready.number, self._matches_none(ready, matches), " ")
        globs = [re.compile(translate(glob)) for glob in self.keep if glob != REST]
        left = [key for key in self.shapes if key not in matches]
        left = [key for key in left if not any(glob.match(key) for glob in globs)]
        if REST in self.keep or not left:
            return
        noun = "1 key is" if len(left) == 1 else f"{len(left):,} keys are"
        numbers = {ready.rule.left.name_text: ready.number for ready in self.rules}
        close = nearest(left[0], numbers)
        near = f"; nearest: rule {numbers[close[0]]}, {close[0]}" if close else ""
        raise UncoveredError(
            f"{noun} matched by no rule: {', '.join(left[:4])}{', ...' * (len(left) > 4)}{near}",
            hint="`keep: rest` keeps unmatched keys; otherwise add a rule",
        )

    def _matches_none(
        self, ready: BoundRule, matches: Mapping[str, tuple[BoundRule, Values]]
    ) -> UncoveredError:
        match, message = ready.left.match, "matches no key"
        shadowed = next((k for k in matches if match(k, self.steps) is not None), None)
        if shadowed is not None:
            first = matches[shadowed][0].number
            return UncoveredError(
                f"{message}, because rule {first} matches {shadowed} first",
                hint="put the more specific rule first",
            )
        close = nearest(ready.rule.left.name_text, self.shapes)
        near = f"; nearest: {close[0]}" if close else ""
        has_star = any("*" in part for part in ready.rule.left.name if isinstance(part, str))
        hint = (
            "write * in braces: {m:*}"
            if has_star
            else "use ->? instead of -> if the rule may match no key"
        )
        return UncoveredError(message + near, hint=hint)

    def _solved(self, group: Group, members: list[SourceTensor]) -> Solved:
        ready = self.rules[group[0]]
        members.sort(key=lambda member: member.indices)
        return ready.solve(dict(zip(ready.words.loops, group[1], strict=True)), members)

    def _made(self, group: Group, members: list[SourceTensor]) -> dict[str, Target]:
        position, values = group
        ready, taken = self.rules[position], self.taken[position]
        layout = self._solved(group, members).layout
        loops = dict(zip(ready.words.loops, values, strict=True))
        sizes = {word: size for (word, part), size in layout.sizes.items() if part is None}
        for symbol, size in layout.sizes.items():
            taken.sizes.setdefault(symbol, set()).add(size)
        taken.dropped += layout.dropped
        taken.zeros += layout.zeros
        sources = tuple([member.key for member in members])
        made: dict[str, Target] = {}
        for each in layout.made:
            try:
                name = ready.right.render({**loops, **each.indices}, sizes)
            except MisfitError as error:
                raise about(ready.number, MisfitError(error.message)) from None
            if not name or name in made:
                message = f"{name} is written twice" if name else "a target name is empty"
                raise about(ready.number, CollisionError(message))
            made[name] = Target(each.shape, sources, each.copies, ready.number)
        taken.made += len(made)
        return made


_NUMBERS = re.compile("[0-9]+")


# To check whether rules are reversible, ckptkit plans the reversed rules. The result must have the
# original names and shapes.


def check_reversible(
    rules: RuleSet, shapes: Mapping[str, Shape], outcome: RulesOutcome, **given: Any
) -> None:
    """Raise NotReversibleError unless the reversed rules restore the names and shapes.

    `given` contains the arguments with which `outcome` was made.
    """
    for taken in outcome.taken:
        if taken.dropped:
            message = f"drops {taken.dropped:,} elements"
            raise about(taken.number, NotReversibleError(message), " ")
    made = {
        name: shapes[name] if target is None else target.shape
        for name, target in outcome.targets.items()
    }
    back = rules.reversed()
    try:
        found = back.outcome(made, **given)
        again = {name: made[name] if t is None else t.shape for name, t in found.targets.items()}
        odd = sorted(again.keys() ^ shapes.keys()) or [n for n in shapes if again[n] != shapes[n]]
        counts = [[each.matched + each.made for each in one.taken] for one in (found, outcome)]
        if not odd and counts[0] == counts[1]:
            return
        lost = NotReversibleError(f"the reversed rules would not restore {', '.join(odd[:3])}")
    except (RuleError, MisfitError, CollisionError) as error:
        lost = NotReversibleError(f"in reverse: {error.message}")
    # For each target, the first reversed rule that matches must be the reverse of the rule that
    # made the target. No reversed rule may match a kept key.
    planning = back.planning(made, **given)
    for name, target in outcome.targets.items():
        match = planning.first(name)
        if match is not None and (target is None or match[0].number != target.rule):
            what = f"{name} was kept" if target is None else f"rule {target.rule} made {name}"
            lost = NotReversibleError(f"would match {name} in reverse, but {what}")
            raise about(match[0].number, lost, " ")
    raise lost
