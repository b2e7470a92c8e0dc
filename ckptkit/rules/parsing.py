"""Reads the notation of rules.

rule   = side ("->" | "->?") side ["with" size {size}] ["#" comment]
side   = name ["[" {axis} "]"]
axis   = word | "1" | "..." | "(" {word | "1"} ")"
name   = {text | "{" variable "}"}
variable = index [shift] [":" kind]
index  = word | "(" word word {word} ")"
shift  = ("+" | "-") (number | word)
kind   = "*" | "**" | label {"|" label}
size   = word "=" given
given  = choice {"|" choice}
choice = "_" | sum {"or" sum}
sum    = term {("+" | "-") term}
term   = atom {("*" | "/") atom}
atom   = number | word | "config." path | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.core.limits import check
from ckptkit.rules.errors import RuleError
from ckptkit.rules.notation import (
    REST,
    STAR,
    STARS,
    Choice,
    Dimension,
    Given,
    Kind,
    Rule,
    Shift,
    Side,
    Term,
    Variable,
)  # fmt: skip

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]+")
_VARIABLE = re.compile(
    r"\s*(?:(?P<word>[A-Za-z]\w*)|\((?P<words>[^()]*)\))\s*"
    r"(?:(?P<sign>[+-])\s*(?P<amount>[0-9]+|[A-Za-z]\w*)\s*)?(?P<kind>:.*)?",
    re.ASCII | re.DOTALL,
)
_TOKEN = re.compile(
    r"\s*(?:(?P<config>config(?:\.[A-Za-z0-9_]+)+)"
    r"|(?P<word>[A-Za-z][A-Za-z0-9_]*)|(?P<number>[0-9]+)"
    r"|(?P<sign>[-+*/()|=_]))"
)
_DIGITS = 18  # of a number

_SIDES = "a rule has two sides, as in 'fc.{x} -> head.{x}'"


def parse_rule(text: str) -> Rule:
    """Read one line. Raises RuleError that says what is wrong, and where."""
    check("rule_bytes", len(text), "characters of a rule")
    reader = _Reader(text)
    left = reader.side()
    reader.blanks()
    arrow = next((each for each in ("->?", "->") if text.startswith(each, reader.at)), None)
    if arrow is None:
        is_shape = text.startswith("(", reader.at)
        hint = "a shape is in [ ], as in 'fc.weight [(h d) i] -> ...'" if is_shape else _SIDES
        raise RuleError(f"{text!r} has no -> after {text[: reader.at].strip()!r}", hint=hint)
    reader.at += len(arrow)
    right = reader.side()
    reader.blanks()
    sizes: tuple[tuple[str, Given], ...] = ()
    rest = _uncommented(text[reader.at :])
    if rest:
        sizes = tuple(_sizes(rest))
    return Rule(left, right, arrow == "->?", sizes, text.strip())


def parse_given(text: str | int) -> Given:
    """Read what a size may be: ``32``, ``config.n_heads or 8``, ``4|1|1``."""
    check("rule_bytes", len(str(text)) if isinstance(text, str) else 0, "characters of a size")
    tokens = _Tokens(str(text))
    given = tokens.given()
    tokens.end()
    return given


def is_word(text: str) -> bool:
    """Return whether `text` can name an axis."""
    return _WORD.fullmatch(text) is not None


def _uncommented(text: str) -> str:
    found = re.search(r"(?:^|\s)#", text)
    return (text[: found.start()] if found else text).strip()


class _Reader:
    """A place in a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def side(self) -> Side:
        self.blanks()
        name = tuple(self._name())
        if not name or name == ("->",):
            raise RuleError(f"{self.text!r} lacks a name", hint=_SIDES)
        self.blanks()
        if not self.text.startswith("[", self.at):
            return Side(name)
        end = self.text.find("]", self.at)
        if end < 0:
            raise RuleError(f"{self.text[self.at :]!r} has no ]")
        inside = self.text[self.at + 1 : end]
        self.at = end + 1
        return Side(name, tuple(_dimensions(inside)))

    def _name(self) -> Iterator[str | Variable]:
        text, literal, found = self.text, "", 0
        while self.at < len(text) and not text[self.at].isspace():
            character = text[self.at]
            if character == "}":
                raise RuleError(f"{text!r} has a }} without its {{")
            if character != "{":
                literal += character
                self.at += 1
                continue
            end = text.find("}", self.at)
            if end < 0:
                raise RuleError(f"{text[self.at :]!r} has no }}")
            if literal:
                yield literal
            literal = ""
            found += 1
            check("rule_variables", found, "variables in a name")
            yield _variable(text[self.at + 1 : end])
            self.at = end + 1
        if literal:
            yield literal


def _variable(text: str) -> Variable:
    found = _VARIABLE.fullmatch(text)
    if found is None:
        raise RuleError(
            f"{{{text}}} is not a variable", hint="e.g. {l}, {l+1}, {p:q|k|v}, {m:*}, {(m e)}"
        )
    words: tuple[str, ...] = (found["word"],) if found["word"] else tuple(found["words"].split())
    odd = [word for word in words if not is_word(word)]
    if odd or (not found["word"] and len(words) < 2):
        raise RuleError(f"{{{text}}}: ( ) needs two words or more, of letters, digits and _")
    shift = None
    if found["sign"]:
        amount = found["amount"]
        number = _integer(amount) if amount.isdigit() else amount
        shift = Shift(1 if found["sign"] == "+" else -1, number)
    kind = None if found["kind"] is None else _kind(found["kind"][1:], text)
    if kind is not None and (shift is not None or len(words) > 1):
        raise RuleError(f"{{{text}}}: only a number can be shifted or made of several words")
    return Variable(words, shift, kind)


def _kind(text: str, whole: str) -> Kind:
    if text.strip() in (STAR, STARS):
        return text.strip()
    labels = tuple(label.strip() for label in text.split("|"))
    check("rule_labels", len(labels), "labels of a variable")
    if any("*" in label for label in labels):
        raise RuleError(
            f"{{{whole}}}: a label has no *", hint="{m:*} is any component, {m:**} any text"
        )
    twice = (
        [label for label in labels if labels.count(label) > 1][:1]
        if len(set(labels)) < len(labels)
        else []
    )
    if twice:
        raise RuleError(f"{{{whole}}} has the label {twice[0]!r} twice")
    return labels


def _dimensions(text: str) -> Iterator[Dimension]:
    inner: list[str] | None = None
    for token in re.findall(r"\.\.\.|[()]|[^\s()]+", text):
        if token == "(":
            if inner is not None:
                raise RuleError(f"[{text}]: ( ) inside ( )", hint="(a b c) needs no inner ( )")
            inner = []
        elif token == ")":
            if inner is None:
                raise RuleError(f"[{text}]: a ) without its (")
            yield tuple(inner)
            inner = None
        elif token == REST and inner is None:
            yield REST
        elif inner is None:
            yield tuple(_axis(token, text))
        else:
            inner += _axis(token, text)
    if inner is not None:
        raise RuleError(f"[{text}]: a ( without its )")


def _axis(token: str, text: str) -> Iterator[str]:
    if token == "1":
        return
    if token.isdigit():
        raise RuleError(
            f"[{text}]: {token} is not an axis", hint=f"name it, e.g. n, and `with n={token}`"
        )
    if not is_word(token):
        raise RuleError(
            f"[{text}]: {token!r} is not an axis",
            hint="axes are words, with spaces between",
        )
    yield token


def _sizes(text: str) -> Iterator[tuple[str, Given]]:
    tokens = _Tokens(text)
    if tokens.next() != ("word", "with"):
        raise RuleError(f"{text!r} is not understood", hint="with h=32 two=2")
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
    """The tokens of sizes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[Token] = []
        at, stripped = 0, text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise RuleError(f"{text!r}: {stripped[at:].strip()[:20]!r} is not understood")
            assert match.lastgroup is not None
            self.found.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.at = 0
        self.depth = 0  # of ( )
        self.operators = 0  # in the part that is being read

    def peek(self, ahead: int = 0) -> Token | None:
        place = self.at + ahead
        return self.found[place] if place < len(self.found) else None

    def next(self) -> Token:
        token = self.peek()
        if token is None:
            raise RuleError(f"{self.text!r} ends too early")
        self.at += 1
        return token

    def end(self) -> None:
        if (token := self.peek()) is not None:
            raise RuleError(f"{self.text!r}: {token[1]!r} is not understood")

    def takes(self, *signs: str) -> str | None:
        """The next token, taken, if it is one of these signs."""
        token = self.peek()
        if token is None or token[0] != "sign" or token[1] not in signs:
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
        while self.peek() == ("word", "or"):
            self.at += 1
            sums.append(self._sum())
        return tuple(sums)

    def _sum(self) -> Term:
        left = self._term()
        while (sign := self.takes("+", "-")) is not None:
            left = self._joined(sign, left, self._term())
        return left

    def _term(self) -> Term:
        left = self._atom()
        while (sign := self.takes("*", "/")) is not None:
            left = self._joined(sign, left, self._atom())
        return left

    def _joined(self, sign: str, left: Term, right: Term) -> Term:
        self.operators += 1
        check("rule_terms", self.operators, "operators in a size")
        return Term(sign, (left, right))

    def _atom(self) -> Term:
        kind, text = self.next()
        if kind == "number":
            return Term("number", (_integer(text),))
        if kind == "config":
            return Term("config", (text.removeprefix("config."),))
        if kind == "word" and text != "or":
            return Term("word", (text,))
        if text == "(":
            self.depth += 1
            check("rule_terms", self.depth, "( ) inside each other in a size")
            inner = self._sum()
            self.depth -= 1
            if self.takes(")"):
                return inner
            raise RuleError(f"{self.text!r}: a ( without its )")
        raise RuleError(
            f"{self.text!r}: {text!r} is not a size",
            hint="a number, a word, or an entry of config.json, as config.hidden_size",
        )


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise RuleError(f"{text[:30]}... is not a size: it has {len(text)} digits")
    return int(text)
