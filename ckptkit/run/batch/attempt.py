"""A worker's part of a batch: jobs, one after another, each with its outcome."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from ckptkit.api import Conversion
from ckptkit.core import __version__
from ckptkit.core.bytesource import Folder
from ckptkit.core.errors import CkptkitError, OutputError, OutputExistsError, foreseen
from ckptkit.core.plan import Plan
from ckptkit.core.text import is_url, shown_url
from ckptkit.formats.format import open_unchecked
from ckptkit.publish.copying import checksums, in_order
from ckptkit.publish.preflight import check_folder
from ckptkit.run.batch.inputs import Mark, mark

BUG = 5  # exit code


class Work(Protocol):
    """Makes `destination` from `source`, or with `dry_run` only its plan; picklable for workers."""

    def __call__(
        self, source: str, destination: str, *, force: bool, dry_run: bool
    ) -> Conversion: ...


class Task(NamedTuple):
    """A job as workers see it: its number, two paths, whether the output may be replaced, and
    whether the job is only planned."""

    number: int
    source: str
    destination: str
    force: bool
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    ``state``: ``done``; ``skipped``: an earlier batch did it; ``found``: not in the manifest, but
    the output exists and is what this job makes; ``failed``; ``planned``, in a dry run. ``made`` is
    the output's mark.
    """

    state: str
    size: int = 0  # bytes of the output
    format: str | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    made: Mark | None = None
    error: str | None = None
    hint: str | None = None
    exit_code: int = 0
    code: str = ""  # of the error


def attempt(work: Work, tasks: Sequence[Task], version: str) -> list[Outcome]:
    """Run `tasks`, and go on after failures.

    Raises OutputError if this is another version of ckptkit.
    """
    if version != __version__:
        raise OutputError(
            f"a worker has ckptkit {__version__}, and this is {version}",
            hint="install the same version on every worker",
        )
    return [_one(work, task) for task in tasks]


def failed(error: Exception) -> Outcome:
    """Return the outcome of a job that ended in `error`."""
    known = foreseen(error)
    if isinstance(known, CkptkitError):
        return Outcome(
            "failed", error=str(known), hint=known.hint, exit_code=known.exit_code, code=known.code
        )
    message = f"a bug in ckptkit: {type(error).__name__}: {error}"
    return Outcome("failed", error=message, hint="please report it", exit_code=BUG, code="bug")


def _one(work: Work, task: Task) -> Outcome:
    try:
        return _done(work, task)
    except CkptkitError as error:
        return failed(error.at(shown_url(task.source)))
    except Exception as error:
        return failed(error)


def _done(work: Work, task: Task) -> Outcome:
    state = "planned" if task.dry_run else "done"
    try:
        made = _planned(work, task) if task.dry_run else _made(work, task)
    except OutputExistsError as error:
        made = work(task.source, _beside(task.destination), force=False, dry_run=True)
        if not isinstance(made.plan, Plan) or not same(made.plan, task.destination):
            raise error from None
        state = "found"  # an earlier attempt made it, and ended before that was recorded
    return Outcome(
        state,
        made.plan.size,
        made.format,
        made.notes,
        made.plan.notes,
        made.warnings,
        None if task.dry_run else mark(task.destination),
    )


def _made(work: Work, task: Task) -> Conversion:
    """Run the job, in a folder that is made where it does not exist."""
    _for_folder(task, partial(os.makedirs, exist_ok=True))
    return work(task.source, task.destination, force=task.force, dry_run=False)


def _planned(work: Work, task: Task) -> Conversion:
    """Plan the job; where its folder does not exist yet, as if it wrote to the one above."""
    _for_folder(task, check_folder)
    folder, name = os.path.split(task.destination)
    if is_url(folder) or os.path.isdir(folder):
        return work(task.source, task.destination, force=task.force, dry_run=True)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    place = _beside(os.path.join(folder, name))
    try:
        return work(task.source, place, force=False, dry_run=True)
    except CkptkitError as error:
        if error.where == place:
            error.where = task.destination
        raise


def _for_folder(task: Task, act: Callable[[str], None]) -> None:
    """Make or check the folder of an output. Raises OutputError."""
    folder = os.path.dirname(task.destination)
    try:
        if not is_url(folder):
            act(folder)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", where=folder) from error


def _beside(path: str) -> str:
    """Return a path in the same folder where nothing is, with the same suffix."""
    start = max(path.rfind("/"), path.rfind(os.sep)) + 1
    return f"{path[:start]}.{os.urandom(8).hex()}-{path[start:][-200:]}"  # names have 255 bytes


def same(plan: Plan, destination: str) -> bool:
    """Return whether the output at `destination` is, byte for byte, what `plan` would write."""
    place = open_unchecked(destination)
    if isinstance(place, Folder):
        if not plan.is_folder or place.list() != sorted(file.name for file in plan.files):
            return False
        sources = [place.open(file.name) for file in plan.files]
    elif plan.is_folder:
        return False
    else:
        sources = [place]
    if any(source.size != file.size for source, file in zip(sources, plan.files, strict=True)):
        return False
    for source, file in zip(sources, plan.files, strict=True):
        at = 0
        for piece in in_order(file.segments, checksums(file.segments)):
            # startswith compares a buffer of any kind at the speed of memory
            if not source.read(at, len(piece)).startswith(piece):
                return False
            at += len(piece)
    return True
