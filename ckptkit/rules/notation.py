"""The notation of rules: classes for the parts of a rule, a parser, and errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptkit.core.errors import CkptkitError, TensorError, UsageError
from ckptkit.core.limits import check
from ckptkit.core.text import flatten, typed

# Errors in rules, and errors for checkpoints that do not match the rules


Error = TypeVar("Error", bound=CkptkitError)


class RuleError(UsageError):
    """A rule is malformed, or ckptkit cannot apply the rule."""


class UncoveredError(RuleError):
    """A rule matches no key, or no rule matches a key."""


class MisfitError(TensorError):
    """The tensors of a checkpoint do not have the shapes that a rule requires."""


class NotReversibleError(RuleError):
    """The reversed rules would not restore the original names and shapes."""


def about(number: int, error: Error, between: str = ": ") -> Error:
    """Prefix the message of an error with the number of the rule."""
    error.part = f"rule {number}"
    error.message = f"{error.part}{between}{error.message}"
    return error


def in_step(number: int, error: Error) -> Error:
    """Prefix the message of an error with the number of the recipe step."""
    between = ", " if error.part else ": "
    error.message = f"step {number}{between}{error.message}"
    return error


def settings(sizes: Iterable[tuple[str, int]]) -> str:
    """Format sizes: ``h=32 two=2``."""
    return " ".join(f"{word}={size:,}".replace(",", "") for word, size in sizes)


def give_size(word: str, unset: Mapping[str, str]) -> str:
    """Return the hint for an unknown size `word`.

    `unset` maps sizes to entries that config.json or the metadata lacks.
    """
    asked = typed(f"--arg {word}=32", f"args={{{word!r}: 32}}")
    hint = f"give the size with {asked}, as `with {word}=32` in the rule, or in config.json"
    return f"{unset[word]} is not set; {hint}" if word in unset else hint


def unknown_size(words: Sequence[str], unset: Mapping[str, str]) -> RuleError:
    """Return the error for sizes that are unknown."""
    what = f"the size of {', '.join(dict.fromkeys(words))} is unknown"
    return RuleError(what, hint=give_size(words[0], unset))


# The parts of a rule. `str` converts each part back to the notation.


STAR, STARS = "*", "**"
ABSENT = "-"  # label of a tensor that does not exist
REST = "..."

# The kind of a variable is STAR, STARS, a tuple of labels, or None. If the kind is None, the
# variable matches numbers, unless the other side of the rule gives a kind.
Kind = str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Shift:
    """The offset of a variable in a name, such as +1 in ``{l+1}``: a number, or a size."""

    sign: int
    amount: int | str

    def __str__(self) -> str:
        return f"{'+' if self.sign > 0 else '-'}{self.amount}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in braces in a name. ``{(m e)}`` combines several variables into one number."""

    words: tuple[str, ...]
    shift: Shift | None = None
    kind: Kind = None

    def __str__(self) -> str:
        index = self.words[0] if len(self.words) == 1 else f"({' '.join(self.words)})"
        kind = self.kind if isinstance(self.kind, str) or self.kind is None else "|".join(self.kind)
        return f"{{{index}{self.shift or ''}{'' if kind is None else ':' + kind}}}"


Name = tuple[str | Variable, ...]
# The axes of a dimension, outermost first, or REST. The empty tuple is a dimension of size 1.
Dimension = tuple[str, ...] | str


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a rule: a name, and the dimensions of the tensor.

    If ``dimensions`` is None, the rule changes no dimension.
    """

    name: Name
    dimensions: tuple[Dimension, ...] | None = None

    @property
    def shape(self) -> tuple[Dimension, ...]:
        return (REST,) if self.dimensions is None else self.dimensions

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes in the shape, in order."""
        return tuple(flatten(each for each in self.shape if not isinstance(each, str)))

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(part for part in self.name if isinstance(part, Variable))

    @property
    def name_text(self) -> str:
        """The name as text in the notation."""
        return "".join(map(str, self.name))

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the variables in the tensor name, in order, without duplicates."""
        return tuple(dict.fromkeys(flatten(each.words for each in self.variables)))

    @property
    def shift_words(self) -> set[str]:
        """Names of the sizes in the offsets of variables."""
        amounts = (variable.shift.amount for variable in self.variables if variable.shift)
        return {amount for amount in amounts if isinstance(amount, str)}

    def __str__(self) -> str:
        if self.dimensions is None:
            return self.name_text
        return f"{self.name_text} [{' '.join(map(dimension_text, self.dimensions))}]"


def dimension_text(dimension: Dimension) -> str:
    """Format a dimension in the notation, for example ``o``, ``(h d)``, ``1`` or ``...``."""
    if isinstance(dimension, str):
        return dimension
    if len(dimension) == 1:
        return dimension[0]
    return f"({' '.join(dimension)})" if dimension else "1"


SOURCES = ("config", "meta")  # first words of paths: config.json and the metadata


@dataclass(frozen=True, slots=True)
class Term:
    """Part of an expression for a size: a number, a name, a path, or an operation on two terms.

    A name refers to another size. A path refers to an entry of config.json or of the metadata.
    """

    operator: str  # "number", "word", one of SOURCES, "+", "-", "*", "/"
    values: tuple[int | str | Term, ...]

    def __str__(self) -> str:
        if self.operator in SOURCES:
            return f"{self.operator}.{self.values[0]}"
        if self.operator in ("number", "word"):
            return str(self.values[0])
        left, right = self.values
        after = f"({right})" if isinstance(right, Term) and len(right.values) == 2 else str(right)
        before = f"({left})" if isinstance(left, Term) and len(left.values) == 2 else str(left)
        return f"{before}{self.operator}{after}"


# Alternatives for a size (``a or b``). The first term with a value is used. None ("_") means that
# the size is inferred from the shapes.
Choice = tuple[Term, ...] | None
Given = tuple[Choice, ...]  # one choice, or one choice for each label of a variable


def given_text(given: Given) -> str:
    """Format a size in the notation, for example ``config.n_head|1|1``."""
    return "|".join("_" if part is None else " or ".join(map(str, part)) for part in given)


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule. `text` is the original line."""

    left: Side
    right: Side
    optional: bool = False
    sizes: tuple[tuple[str, Given], ...] = ()
    text: str = field(default="", compare=False)

    def reversed(self) -> Rule:
        """Exchange the sides of the rule."""
        new = Rule(self.right, self.left, self.optional, self.sizes)
        return Rule(new.left, new.right, new.optional, new.sizes, str(new))

    def __str__(self) -> str:
        sizes = "".join(f" {word}={given_text(given)}" for word, given in self.sizes)
        arrow = "->?" if self.optional else "->"
        return f"{self.left} {arrow} {self.right}{' with' if sizes else ''}{sizes}"


# This is the grammar of the notation:
#
# rule   = side ("->" | "->?") side ["with" size {size}] ["#" comment]
# side   = name ["[" {axis} "]"]
# axis   = word | "1" | "..." | "(" {word | "1"} ")"
# name   = {text | "{" variable "}"}
# variable = index [shift] [":" kind]
# index  = word | "(" word word {word} ")"
# shift  = ("+" | "-") (number | word)
# kind   = "*" | "**" | label {"|" label}
# size   = word "=" given
# given  = choice {"|" choice}
# choice = "_" | sum {"or" sum}
# sum    = term {("+" | "-") term}
# term   = atom {("*" | "/") atom}
# atom   = number | word | ("config." | "meta.") path | "(" sum ")"


_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]+")
_VARIABLE = re.compile(
    r"\s*(?:(?P<word>[A-Za-z]\w*)|\((?P<words>[^()]*)\))\s*"
    r"(?:(?P<sign>[+-])\s*(?P<amount>[0-9]+|[A-Za-z]\w*)\s*)?(?P<kind>:.*)?",
    re.ASCII | re.DOTALL,
)
_TOKEN = re.compile(
    r"\s*(?:(?P<path>(?:config|meta)(?:\.[A-Za-z0-9_]+)+)"
    r"|(?P<word>[A-Za-z][A-Za-z0-9_]*)|(?P<number>[0-9]+)"
    r"|(?P<sign>[-+*/()|=_]))"
)
_DIGITS = 18  # maximum number of digits in an integer

_SIDES = "a rule has two sides, as in 'fc.{x} -> head.{x}'"


_SIDE = re.compile(r"\s*(?P<name>(?:[^\s{}]|\{[^{}]*\})+)\s*(?:\[(?P<shape>[^\]]*)\]\s*)?")


def parse_rule(text: str) -> Rule:
    """Parse one line. The message of a RuleError quotes the invalid part of the line."""
    check("rule_bytes", len(text), "characters of a rule")
    left, at = _side(text, 0)
    arrow = next((each for each in ("->?", "->") if text.startswith(each, at)), None)
    if arrow is None:
        is_shape = text.startswith("(", at)
        hint = "write a shape in [ ], as in 'fc.weight [(h d) i] -> ...'" if is_shape else _SIDES
        raise RuleError(f"{text!r} has no -> after {text[:at].strip()!r}", hint=hint)
    right, at = _side(text, at + len(arrow))
    rest = re.split(r"(?:^|\s)#", text[at:], maxsplit=1)[0].strip()
    return Rule(left, right, arrow == "->?", tuple(_sizes(rest)) if rest else (), text.strip())


def parse_given(text: str | int) -> Given:
    """Parse a size, for example ``32``, ``config.n_heads or 8`` or ``4|1|1``."""
    check("rule_bytes", len(str(text)) if isinstance(text, str) else 0, "characters of a size")
    tokens = _Tokens(str(text))
    given = tokens.given()
    if (token := tokens.peek()) is not None:
        raise RuleError(f"{tokens.text!r}: unexpected {token[1]!r}")
    return given


def is_word(text: str) -> bool:
    """Return True if `text` can name an axis."""
    return _WORD.fullmatch(text) is not None


def _side(text: str, at: int) -> tuple[Side, int]:
    """Parse the side of a rule that begins at index `at`. Return the side and the index of its
    end."""
    found = _SIDE.match(text, at)
    end = at if found is None else found.end()
    rest = text[end:].lstrip()
    for opening, closing in ("{}", "[]"):
        if rest.startswith(opening):
            raise RuleError(f"{rest!r} lacks a {closing}")
    if rest.startswith("}"):
        raise RuleError(f"{text!r} has a }} without a {{")
    if found is None or found["name"] == "->":
        raise RuleError(f"{text!r} lacks a name", hint=_SIDES)
    pieces = re.split(r"\{([^{}]*)\}", found["name"])  # text and variables in turns
    check("rule_variables", len(pieces) // 2, "variables in a name")
    parts = (_variable(each) if number % 2 else each for number, each in enumerate(pieces))
    dimensions = None if found["shape"] is None else tuple(_dimensions(found["shape"]))
    return Side(tuple(filter(None, parts)), dimensions), end


def _variable(text: str) -> Variable:
    found = _VARIABLE.fullmatch(text)
    if found is None:
        raise RuleError(
            f"{{{text}}} is not a variable", hint="e.g. {l}, {l+1}, {p:q|k|v}, {m:*}, {(m e)}"
        )
    words: tuple[str, ...] = (found["word"],) if found["word"] else tuple(found["words"].split())
    odd = [word for word in words if not is_word(word)]
    if odd or (not found["word"] and len(words) < 2):
        raise RuleError(f"{{{text}}}: expected two or more axis names in ( )")
    shift = None
    if found["sign"]:
        amount = found["amount"]
        number = _integer(amount) if amount.isdigit() else amount
        shift = Shift(1 if found["sign"] == "+" else -1, number)
    kind = None if found["kind"] is None else _kind(found["kind"][1:], text)
    if kind is not None and (shift is not None or len(words) > 1):
        raise RuleError(f"{{{text}}}: a variable with labels or * cannot have an offset or ( )")
    return Variable(words, shift, kind)


def _kind(text: str, whole: str) -> Kind:
    if text.strip() in (STAR, STARS):
        return text.strip()
    labels = tuple(label.strip() for label in text.split("|"))
    check("rule_labels", len(labels), "labels of a variable")
    if any("*" in label for label in labels):
        raise RuleError(
            f"{{{whole}}}: a label cannot contain *",
            hint="{m:*} matches a component, {m:**} any string",
        )
    label, count = Counter(labels).most_common(1)[0]
    if count > 1:
        raise RuleError(f"{{{whole}}} has the label {label!r} twice")
    return labels


def _dimensions(text: str) -> Iterator[Dimension]:
    for match in re.finditer(r"\((?P<axes>[^()]*)\)|(?P<axis>[^\s()]+)|[()]", text):
        if match["axes"] is None and match["axis"] is None:
            hint = "(a b c) needs no inner ( )"
            raise RuleError(f"[{text}]: each ( needs a ), without ( ) inside ( )", hint=hint)
        if match["axis"] == REST:
            yield REST
        else:
            tokens = (match["axes"] or match["axis"] or "").split()
            yield tuple(flatten(_axis(token, text) for token in tokens))


def _axis(token: str, text: str) -> Iterator[str]:
    if token == "1":
        return
    if token.isdigit():
        raise RuleError(
            f"[{text}]: {token} is not an axis",
            hint=f"name the axis, e.g. n, and add `with n={token}`",
        )
    if not is_word(token):
        raise RuleError(
            f"[{text}]: {token!r} is not an axis",
            hint="separate the names of axes by spaces; a name has letters, digits and _",
        )
    yield token


def _sizes(text: str) -> Iterator[tuple[str, Given]]:
    tokens = _Tokens(text)
    if tokens.next() != ("word", "with"):
        raise RuleError(f"{text!r}: expected sizes", hint="with h=32 two=2")
    seen: set[str] = set()
    while tokens.peek() is not None:
        kind, word = tokens.next()
        if kind != "word" or tokens.next() != ("sign", "="):
            raise RuleError(f"{text!r}: {word!r} is not a size", hint="with h=32 two=2")
        if word in seen:
            raise RuleError(f"{text!r} gives {word} twice")
        seen.add(word)
        yield word, tokens.given()
    if not seen:
        raise RuleError(f"{text!r} gives no size", hint="with h=32 two=2")


Token = tuple[str, str]


class _Tokens:
    """Splits an expression for sizes into tokens, and parses the tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[Token] = []
        at, stripped = 0, text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise RuleError(f"{text!r}: unexpected {stripped[at:].strip()[:20]!r}")
            assert match.lastgroup is not None
            self.found.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.at = 0
        self.depth = 0  # number of open parentheses
        self.operators = 0  # number of operators in the current choice

    def peek(self) -> Token | None:
        return self.found[self.at] if self.at < len(self.found) else None

    def next(self) -> Token:
        token = self.peek()
        if token is None:
            raise RuleError(f"{self.text!r} is incomplete")
        self.at += 1
        return token

    def takes(self, *tokens: str) -> str | None:
        """If the next token is one of `tokens`, advance and return the token.

        Otherwise, return None.
        """
        token = self.peek()
        if token is None or token[1] not in tokens:
            return None
        self.at += 1
        return token[1]

    def given(self) -> Given:
        parts = [self._choice()]
        while self.takes("|"):
            parts.append(self._choice())
        check("rule_labels", len(parts), "parts of a size")
        return tuple(parts)

    def _choice(self) -> Choice:
        self.operators = 0
        if self.takes("_"):
            return None
        sums = [self._sum()]
        while self.takes("or"):
            sums.append(self._sum())
        return tuple(sums)

    def _sum(self) -> Term:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Term:
        return self._chain(("*", "/"), self._atom)

    def _chain(self, signs: tuple[str, str], operand: Callable[[], Term]) -> Term:
        left = operand()
        while (sign := self.takes(*signs)) is not None:
            self.operators += 1
            check("rule_terms", self.operators, "operators in a size")
            left = Term(sign, (left, operand()))
        return left

    def _atom(self) -> Term:
        kind, text = self.next()
        if kind == "number":
            return Term("number", (_integer(text),))
        if kind == "path":
            place, _, path = text.partition(".")
            return Term(place, (path,))
        if kind == "word" and text != "or":
            return Term("word", (text,))
        if text == "(":
            self.depth += 1
            check("rule_terms", self.depth, "nested ( ) in a size")
            inner = self._sum()
            self.depth -= 1
            if self.takes(")"):
                return inner
            raise RuleError(f"{self.text!r}: a ( without a )")
        raise RuleError(
            f"{self.text!r}: {text!r} is not a size",
            hint="use a number, a word, or an entry of config.json such as config.hidden_size",
        )


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise RuleError(f"{text[:30]}... is not a size: {len(text)} digits are too many")
    return int(text)
