"""The steps of a recipe backwards: what undoes each, and what cannot be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ckptkit.core.errors import UsageError


class WrittenStep(NamedTuple):
    """A step as a recipe says it: its word, what it is given, and the words beside it."""

    word: str
    given: Any
    options: dict[str, Any]


# Steps whose effect is left as it is: they lose nothing that the layout needs.
PASSED_OVER = frozenset({"config", "weights", "select", "cast", "remap", "compact", "drop-entry"})
CHECKS = frozenset({"expect"})  # of the other layout


def backwards(steps: Sequence[WrittenStep]) -> tuple[list[WrittenStep], list[str]]:
    """The steps that undo the given ones, and what to say of those that are not undone.

    Raises UsageError for a step that cannot be undone.
    """
    found: list[WrittenStep] = []
    left: list[str] = []
    for number, step in reversed(list(enumerate(steps, 1))):
        undone = list(_undone(number, step))
        found += undone
        if not undone and step.word not in CHECKS:
            left.append(step.word)
    return found, [f"not undone: {', '.join(left)}"] if left else []


def _undone(number: int, step: WrittenStep) -> Iterator[WrittenStep]:
    if step.word == "rules":
        yield step
    elif step.word in _UNDO:
        given = _UNDO[step.word](step.given)
        if given is None:
            raise _irreversible(number, step)
        yield given
    elif step.word == "strip":  # which of several prefixes were there is not known
        if isinstance(step.given, str):
            yield WrittenStep("add", step.given, {})
    elif step.word not in PASSED_OVER and step.word not in CHECKS:
        raise _irreversible(number, step)


def _irreversible(number: int, step: WrittenStep) -> UsageError:
    hint = "write a recipe for the way back, or take the step out"
    return UsageError(f"not reversible: step {number} ({step.word})", hint=hint)


def _added(given: Any) -> WrittenStep | None:
    return WrittenStep("strip", given, {})


def _renamed(given: Any) -> WrittenStep | None:
    mapping = given.get("map", {}) if isinstance(given, dict) else {}
    if not mapping or given.get("sub") or len(set(mapping.values())) < len(mapping):
        return None
    return WrittenStep("rename", {"map": {new: old for old, new in mapping.items()}}, {})


def _wrapped(given: Any) -> WrittenStep | None:
    return WrittenStep("extract", given, {})


def _extracted(given: Any) -> WrittenStep | None:
    path = given[0] if isinstance(given, list) and len(given) == 1 else given
    return WrittenStep("wrap", path, {}) if isinstance(path, str) and "." not in path else None


def _tied(given: Any) -> WrittenStep | None:
    return WrittenStep("untie", given, {})


def _untied(given: Any) -> WrittenStep | None:
    return WrittenStep("tie", given, {})


_UNDO: dict[str, Callable[[Any], WrittenStep | None]] = {
    "add": _added,
    "rename": _renamed,
    "wrap": _wrapped,
    "extract": _extracted,
    "tie": _tied,
    "untie": _untied,
}
