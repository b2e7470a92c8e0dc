"""Errors in rules, and in checkpoints that rules do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ckptkit.core.errors import CkptkitError, TensorError, UsageError
from ckptkit.core.text import typed

Error = TypeVar("Error", bound=CkptkitError)


class RuleError(UsageError):
    """A rule is not written as rules are, or cannot be carried out as written."""


class UncoveredError(RuleError):
    """A rule takes no key, or a key is taken by no rule."""


class MisfitError(TensorError):
    """The tensors of a checkpoint do not have the shapes that a rule needs."""


class NotReversibleError(RuleError):
    """The way back would not give the names and shapes that were there."""


def about(number: int, error: Error, between: str = ": ") -> Error:
    """Say of an error which rule it is about."""
    error.part = f"rule {number}"
    error.message = f"{error.part}{between}{error.message}"
    return error


def in_step(number: int, error: Error) -> Error:
    """Say of an error which step of a recipe it is about."""
    between = ", " if error.part else ": "
    error.message = f"step {number}{between}{error.message}"
    return error


def settings(sizes: Iterable[tuple[str, int]]) -> str:
    """``h=32 two=2``."""
    return " ".join(f"{word}={size:,}".replace(",", "") for word, size in sizes)


def give_size(word: str) -> str:
    """Return the hint for a size that is not known."""
    asked = typed(f"--arg {word}=32", f"args={{{word!r}: 32}}")
    return f"give it as in {asked}, as `with {word}=32` in the rule, or in config.json"
