"""The sizes that are said: on the command line, in the rule, in its step, in config.json.

A size has one value, or one for each label of a variable ("ragged"). None stands for a value that
is not said: the shapes must give it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.text import flatten, typed
from ckptkit.rules.errors import RuleError
from ckptkit.rules.notation import Choice, Given, Rule, Shift, Term, Variable

MOST = 1 << 62

Config = Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None
Size = tuple[int | None, ...]


class Settings:
    """The sizes that are said beside the rules: arguments, step, defaults, config.json."""

    def __init__(
        self,
        args: Mapping[str, int] | None = None,
        sizes: Mapping[str, Given] | None = None,
        defaults: Mapping[str, Given] | None = None,
        config: Config = None,
    ) -> None:
        self.args = dict(args or {})
        self.sizes = dict(sizes or {})
        self.defaults = dict(defaults or {})
        self._config = config
        for word, value in self.args.items():
            checked(word, value, least=0)

    def given(self, word: str, rule: Rule) -> tuple[Given | int, str] | None:
        """Return the value of a word, and its source; the first that applies."""
        if word in self.args:
            return self.args[word], typed(f"--arg {word}", f"args[{word!r}]")
        for places, where in (
            (dict(rule.sizes), "rule"),
            (self.sizes, "step"),
            (self.defaults, "recipe"),
        ):
            if word in places:
                return places[word], where
        return None

    def configured(self, path: str) -> int | None:
        """The number at a path of config.json; None if it is not there, or null."""
        if callable(self._config):
            self._config = self._config()
        node: Any = self._config
        for part in path.split("."):
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and part.isdigit() and len(part) < 10:
                node = node[int(part)] if int(part) < len(node) else None
            else:
                return None
        if node is None:
            return None
        if type(node) is not int:
            raise RuleError(f"config.{path} is {str(node)[:40]!r}, which is not a whole number")
        return node


@dataclass(frozen=True, slots=True)
class Known:
    """The known sizes of the words of one rule: by word, the size and its source."""

    sizes: dict[str, Size]
    origins: dict[str, str]


def evaluate(rule: Rule, settings: Settings) -> Known:
    """The sizes of a rule that are said. Raises RuleError for one that is not a size.

    A size may be 0 here: `checks.check_none_empty` says where it may stay so.
    """
    machine = _Evaluation(rule, settings)
    sizes: dict[str, Size] = {}
    for word in sorted(words_of(rule)):
        value = machine.size(word)
        if value is not None:
            sizes[word] = value
    return Known(sizes, machine.origins)


class _Evaluation:
    def __init__(self, rule: Rule, settings: Settings) -> None:
        self.rule, self.settings = rule, settings
        self.origins: dict[str, str] = {}
        self._done: dict[str, Size | None] = {}
        self._open: set[str] = set()

    def size(self, word: str) -> Size | None:
        """The value of a word, or its values by label; None if nothing is said."""
        if word in self._done:
            return self._done[word]
        if word in self._open:
            raise RuleError(f"the size {word} is given by itself")
        self._open.add(word)
        found = self.settings.given(word, self.rule)
        value: Size | None = None
        if found is not None:
            given, where = found
            if isinstance(given, int):
                value = (given,)
            else:
                value = tuple(self._choice(word, choice) for choice in given)
            self.origins[word] = _origin(given, where)
        self._open.discard(word)
        self._done[word] = None if value == (None,) else value
        return self._done[word]

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
        if term.operator == "config":
            return self.settings.configured(str(first))
        if term.operator == "word":
            size = self.size(str(first))
            if size is not None and len(size) > 1:
                raise RuleError(f"{first} has {len(size)} values, and one is needed")
            return None if size is None else size[0]
        return self._computed(term)

    def _computed(self, term: Term) -> int | None:
        left, right = (self._value(each) for each in term.values if isinstance(each, Term))
        if left is None or right is None:
            return None
        if term.operator == "+":
            value = left + right
        elif term.operator == "-":
            value = left - right
        elif term.operator == "*":
            value = left * right
        elif right == 0 or left % right:
            raise RuleError(f"{term}: {left} / {right} is not a whole number")
        else:
            value = left // right
        if abs(value) > MOST:
            raise RuleError(f"{term} is too large for a size")
        return value


def checked(word: str, value: int, least: int = 1) -> int:
    """`value`, if it can be the size of `word`."""
    if not least <= value <= MOST:
        raise RuleError(f"the size {word} would be {value}", hint="a size is 1 or more")
    return value


def _origin(given: Given | int, where: str) -> str:
    """Describe the source of a size, for the report."""
    if isinstance(given, int) or where == "step":
        return where
    first = given[0]
    if first is not None and first[0].operator == "config":
        return str(first[0])
    return where


def words_of(rule: Rule) -> set[str]:
    """All words of a rule: axes, indices, and those that its sizes are computed from."""
    found: set[str] = set()
    for side in (rule.left, rule.right):
        found.update(side.axes, side.words)
        found.update(shift_words(side.variables))
    for word, given in rule.sizes:
        found.add(word)
        found |= _words_of_given(given)
    return found


def shift_words(variables: tuple[Variable, ...]) -> set[str]:
    shifts = (variable.shift for variable in variables)
    return {
        shift.amount
        for shift in shifts
        if isinstance(shift, Shift) and isinstance(shift.amount, str)
    }


def _words_of_given(given: Given) -> set[str]:
    found: set[str] = set()
    waiting: list[int | str | Term] = list(flatten(choice for choice in given if choice))
    while waiting:
        term = waiting.pop()
        if isinstance(term, Term):
            if term.operator == "word":
                found.add(str(term.values[0]))
            waiting.extend(term.values)
    return found
