"""The parts of a rule, as plain values. `str` of each is the notation again."""

from __future__ import annotations

from dataclasses import dataclass, field

STAR, STARS = "*", "**"
ABSENT = "-"  # the label of a part that is not there
REST = "..."

Kind = (
    str | tuple[str, ...] | None
)  # STAR, STARS, labels; None: a number, or what the rule says elsewhere


@dataclass(frozen=True, slots=True)
class Shift:
    """A number, or the name of a size, that is added to an index."""

    sign: int
    amount: int | str

    def __str__(self) -> str:
        return f"{'+' if self.sign > 0 else '-'}{self.amount}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in braces in a name. Several words are the digits of one number."""

    words: tuple[str, ...]
    shift: Shift | None = None
    kind: Kind = None

    def __str__(self) -> str:
        index = self.words[0] if len(self.words) == 1 else f"({' '.join(self.words)})"
        kind = self.kind if isinstance(self.kind, str) or self.kind is None else "|".join(self.kind)
        return f"{{{index}{self.shift or ''}{'' if kind is None else ':' + kind}}}"


Name = tuple[str | Variable, ...]
Dimension = tuple[str, ...] | str  # axes, outermost first; REST; a dimension of one element is ()


@dataclass(frozen=True, slots=True)
class Side:
    """A name and the dimensions of its tensor; None: all dimensions as they are."""

    name: Name
    dimensions: tuple[Dimension, ...] | None = None

    @property
    def shape(self) -> tuple[Dimension, ...]:
        return (REST,) if self.dimensions is None else self.dimensions

    @property
    def axes(self) -> tuple[str, ...]:
        """The words of the shape, in order."""
        found: list[str] = []
        for dimension in self.shape:
            if not isinstance(dimension, str):
                found += dimension
        return tuple(found)

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(part for part in self.name if isinstance(part, Variable))

    @property
    def name_text(self) -> str:
        """The name as it is written."""
        return "".join(map(str, self.name))

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the name, each once, in order."""
        found: dict[str, None] = {}
        for variable in self.variables:
            found.update(dict.fromkeys(variable.words))
        return tuple(found)

    def __str__(self) -> str:
        if self.dimensions is None:
            return self.name_text
        return f"{self.name_text} [{' '.join(map(dimension_text, self.dimensions))}]"


def dimension_text(dimension: Dimension) -> str:
    """A dimension as it is written: ``o``, ``(h d)``, ``1``, ``...``."""
    if isinstance(dimension, str):
        return dimension
    if len(dimension) == 1:
        return dimension[0]
    return f"({' '.join(dimension)})" if dimension else "1"


@dataclass(frozen=True, slots=True)
class Term:
    """A number, a word, a path in the configuration, or an operation on two of them."""

    operator: str  # "number", "word", "config", "+", "-", "*", "/"
    values: tuple[int | str | Term, ...]

    def __str__(self) -> str:
        if self.operator == "config":
            return f"config.{self.values[0]}"
        if self.operator in ("number", "word"):
            return str(self.values[0])
        left, right = self.values
        after = f"({right})" if isinstance(right, Term) and len(right.values) == 2 else str(right)
        before = f"({left})" if isinstance(left, Term) and len(left.values) == 2 else str(left)
        return f"{before}{self.operator}{after}"


Choice = tuple[Term, ...] | None  # the first that has a value; None: "_", what the shapes say
Given = tuple[Choice, ...]  # one, or one for each label of a variable


def given_text(given: Given) -> str:
    """A size as it is written: ``config.n_head|1|1``."""
    return "|".join("_" if part is None else " or ".join(map(str, part)) for part in given)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line. `text` is how it was written."""

    left: Side
    right: Side
    optional: bool = False
    sizes: tuple[tuple[str, Given], ...] = ()
    text: str = field(default="", compare=False)

    def reversed(self) -> Rule:
        """The rule with its sides exchanged."""
        new = Rule(self.right, self.left, self.optional, self.sizes)
        return Rule(new.left, new.right, new.optional, new.sizes, str(new))

    def __str__(self) -> str:
        sizes = "".join(f" {word}={given_text(given)}" for word, given in self.sizes)
        arrow = "->?" if self.optional else "->"
        return f"{self.left} {arrow} {self.right}{' with' if sizes else ''}{sizes}"
