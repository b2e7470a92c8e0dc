"""Warnings as values: a text to print, and a code and facts for code that asks what happened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Codes: stable, one for each kind of warning that other code asks about.
NO_CHECKSUM = "no-checksum"  # storages without one: damage to them cannot be seen
NO_VERSION = "no-version"  # an archive without a version record, which torch refuses
RUNS_CODE = "runs-code"  # a value whose loading would call what it should not
WRONG_TOTAL = "wrong-total"  # the index of shards contradicts the bytes of their tensors


class Notice(str):
    """A warning with a stable `code` and its `facts`.

    It is a text like any other: printed, compared, hashed and written as JSON as such. Pickling
    and copying keep the code and the facts.
    """

    code: str
    facts: dict[str, Any]

    def __new__(cls, code: str, text: str, **facts: Any) -> Notice:
        made = super().__new__(cls, text)
        made.code = code
        made.facts = facts
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.code, str(self), self.facts)


def _made(code: str, text: str, facts: dict[str, Any]) -> Notice:
    return Notice(code, text, **facts)


def within(place: str, warning: str) -> str:
    """Return `warning` with the place that it is about before it; a Notice keeps its code."""
    text = f"{place}: {warning}"
    return Notice(warning.code, text, **warning.facts) if isinstance(warning, Notice) else text


def coded(warnings: Iterable[str], code: str) -> list[Notice]:
    """Return the warnings with this code, in order."""
    return [each for each in warnings if isinstance(each, Notice) and each.code == code]
