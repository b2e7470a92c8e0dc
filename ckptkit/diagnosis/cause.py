"""A cause, the command that helps, and what a plan can do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptkit import edits
from ckptkit.edits import OPTIONS
from ckptkit.edits import Fix as Fix

ERROR = "error"  # it does not load
WARNING = "warning"  # it does not load everywhere, or not as its name promises
NOTE = "note"  # it loads, and costs more or is something else than one may think
LEVELS = (ERROR, WARNING, NOTE)  # most severe first


DROP_OBJECTS: Fix = {OPTIONS: {"objects": "drop"}}  # a fix that leaves out Python objects


@dataclass(frozen=True)
class Cause:
    """A reason why it does not load: `title`, `explanation`, and the `command` to type, if any.

    ``fix`` is what one plan can do about it, None if nothing; an empty fix rewrites the checkpoint,
    enough for a faulty file.
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
    return edits.together(fixes) if fixes else None
