"""A cause, the command that helps, and what a plan can do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

ERROR = "error"  # it does not load
WARNING = "warning"  # it does not load everywhere, or not as its name promises
NOTE = "note"  # it loads, and costs more or is something else than one may think
LEVELS = (ERROR, WARNING, NOTE)  # most severe first


@dataclass(frozen=True)
class Fix:
    """The work of one plan.

    An empty fix rewrites the checkpoint: enough for a faulty file.
    """

    bare: bool = False  # the weights as a checkpoint of their own
    strip: tuple[str, ...] = ()
    add: str = ""
    names: Mapping[str, str] = field(default_factory=dict)  # after strip and add
    ties: Mapping[str, str] = field(
        default_factory=dict
    )  # new name -> the one that it stands for as well
    to_cpu: bool = False
    compact: bool = False
    drop_objects: bool = False
    dequantize: bool = False


@dataclass(frozen=True)
class Cause:
    """A reason why it does not load: `title`, `explanation`, and the `command` to type, if any.

    ``fix`` is what one plan can do about it, None if nothing.
    """

    code: str
    level: str
    title: str
    explanation: str
    command: str | None = None
    fix: Fix | None = None


def at_least(causes: Iterable[Cause], level: str) -> list[Cause]:
    """Return the causes that are as severe as `level`, or more."""
    return [cause for cause in causes if LEVELS.index(cause.level) <= LEVELS.index(level)]


def together(causes: Iterable[Cause]) -> Fix | None:
    """Return one fix for all of the causes, None if none has a fix."""
    fixes = [cause.fix for cause in causes if cause.fix is not None]
    return reduce(_both, fixes) if fixes else None


def _both(one: Fix, other: Fix) -> Fix:
    return Fix(
        bare=one.bare or other.bare,
        strip=(*one.strip, *other.strip),
        add=one.add or other.add,
        names={**one.names, **other.names},
        ties={**one.ties, **other.ties},
        to_cpu=one.to_cpu or other.to_cpu,
        compact=one.compact or other.compact,
        drop_objects=one.drop_objects or other.drop_objects,
        dequantize=one.dequantize or other.dequantize,
    )
