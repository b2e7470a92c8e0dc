"""Run one command over many files: find the jobs, skip the finished ones, run the others.

Each output appears whole or not at all, as always. Finished jobs are recorded in the outputs'
folder (:mod:`manifest`), and skipped the next time. Jobs go to workers in groups, a few groups for
each at a time. A worker that dies loses its group: those jobs are run once more, one by one and
with nothing in parallel, so that the one that killed the worker is known when it kills the second.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress

from ckptkit.core import __version__
from ckptkit.core.errors import OutputError
from ckptkit.core.text import in_folder, is_url, shown_url
from ckptkit.run.batch import manifest
from ckptkit.run.batch.attempt import Outcome, Task, Work, attempt, failed
from ckptkit.run.batch.inputs import find
from ckptkit.run.batch.jobs import Job, plan
from ckptkit.run.batch.manifest import JobRecord, Manifest
from ckptkit.run.workers import Pool

__all__ = ["Job", "Outcome", "Work", "find", "plan", "run"]

AHEAD = 2  # groups for each worker: a running one and a waiting one
GROUP = 32  # jobs at most
GROUP_BYTES = 64 << 20  # of input; a larger job is a group of its own
ROUNDS = 8  # groups for each worker in a batch, at least, so that all are busy to the end
DEATHS = 8  # in a row, for each worker, after which the batch is given up

_TEMPORARY = re.compile(r"\.(.+)\.ckptkit-\d+-[0-9a-f]{16}\.tmp")  # see temporaries.temporary_name

_Item = tuple[Job, Task]
Results = Generator[tuple[Job, Outcome], None, None]


def run(
    work: Work,
    jobs: Sequence[Job],
    into: str,
    *,
    force: bool = False,
    pool: Pool | None = None,
    dry_run: bool = False,
) -> Results:
    """Run `jobs`, with outputs below the folder or URL `into`, and yield outcomes in any order.

    `work` is done in this process, or by the workers of `pool`, which are stopped if this generator
    is closed before its end. Outputs that an earlier batch made and that have not changed since may
    be replaced, others with `force`. With `dry_run`, `work` only plans each job and nothing is
    written: jobs that would succeed are ``planned``, the others fail as they would. Raises only for
    failures that are not a single job's: UsageError where another batch writes to `into`,
    OutputError where the manifest cannot be written or the workers do not work.
    """
    with manifest.opened(into, reading=dry_run) as known:
        todo: list[_Item] = []
        for number, (job, before) in enumerate(_compared(jobs, known, force)):
            if before is not None:
                place = _joined(into, job.output)
                todo.append((job, Task(number, job.input.path, place, before, dry_run)))
            else:
                yield job, Outcome("skipped")
        if dry_run:
            yield from _spread(work, todo, pool)
            return
        _prepare(into, [job for job, _ in todo])
        try:
            yield from _noted(_spread(work, todo, pool), known)
        finally:
            _sweep(into, [job for job, _ in todo])


def _compared(jobs: Sequence[Job], known: Manifest, force: bool) -> list[tuple[Job, bool | None]]:
    """Return for each job None where it is done, else whether its output may be replaced."""
    marks = known.marks(job.output for job in jobs if job.output in known.done)
    found: list[tuple[Job, bool | None]] = []
    for job in jobs:
        record = known.done.get(job.output)
        if record is None or tuple(record.made) != marks.get(job.output):
            found.append((job, force))
        elif record.job == job.digest and job.input.mark is not None:
            found.append((job, None))
        else:
            found.append((job, True))
    return found


def _joined(into: str, name: str) -> str:
    if is_url(into):
        return in_folder(into, name)
    return os.path.join(os.path.abspath(into), *name.split("/"))


def _noted(results: Results, known: Manifest) -> Results:
    for job, outcome in results:
        if outcome.made is not None:
            known.add([JobRecord(job.output, job.digest, outcome.made)])
        yield job, outcome


def _spread(work: Work, todo: Sequence[_Item], pool: Pool | None) -> Results:
    """Run the jobs; those of a worker that dies are run last, each alone."""
    if pool is None:
        for job, task in todo:
            yield job, attempt(work, [task], __version__)[0]
        return
    lost: list[_Item] = []
    try:
        yield from _together(pool, work, todo, lost)
        for job, task in lost:
            yield job, _alone(pool, work, (job, task))
    except BaseException:
        pool.stop()
        raise


def _together(pool: Pool, work: Work, todo: Sequence[_Item], lost: list[_Item]) -> Results:
    """Run the jobs, in groups; those whose worker dies are put into `lost`."""
    groups = _groups(todo, pool.workers())
    waiting: dict[Future[list[Outcome]], list[_Item]] = {}
    deaths = 0
    while True:
        while len(waiting) < AHEAD * pool.workers() and (group := next(groups, None)):
            waiting[_submitted(pool, work, group)] = group
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            group = waiting.pop(future)
            try:
                outcomes = future.result()
            except BrokenExecutor as error:
                lost += group
                deaths += 1
                if deaths > DEATHS * pool.workers():
                    raise OutputError("workers keep ending before their work is done") from error
                continue
            deaths = 0
            yield from ((job, outcome) for (job, _), outcome in zip(group, outcomes, strict=True))


def _alone(pool: Pool, work: Work, each: _Item) -> Outcome:
    try:
        return _submitted(pool, work, [each]).result()[0]
    except BrokenExecutor:
        job, _ = each
        error = f"{shown_url(job.input.path)}: its worker was killed, twice"
        hint = "it may need more memory than there is; `dmesg` may say what killed it"
        return failed(OutputError(error, hint=hint))


def _submitted(pool: Pool, work: Work, group: Sequence[_Item]) -> Future[list[Outcome]]:
    return pool.submit(attempt, work, [task for _, task in group], __version__)


def _groups(todo: Sequence[_Item], workers: int) -> Iterator[list[_Item]]:
    """Yield the groups of jobs that a worker runs in one call: many jobs where they are small."""
    most = max(1, min(GROUP, len(todo) // (ROUNDS * max(1, workers))))
    group: list[_Item] = []
    size = 0
    for job, task in todo:
        if group and (len(group) >= most or size + job.input.size > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append((job, task))
        size += job.input.size
    if group:
        yield group


def _prepare(into: str, jobs: Iterable[Job]) -> None:
    """Make the folders for the outputs, and remove temporaries of killed batches from them."""
    if is_url(into):
        from ckptkit.remote import files

        files.make_folders(into, sorted({job.output.rpartition("/")[0] for job in jobs}))
    else:
        _sweep(into, jobs)


def _sweep(into: str, jobs: Iterable[Job]) -> None:
    """Remove stale temporaries that killed batches left beside the outputs of `jobs`."""
    if is_url(into):
        return
    places = [os.path.split(_joined(into, job.output)) for job in jobs]
    outputs = {*places}
    for folder in {folder for folder, _ in places}:
        with suppress(OSError):
            for name in os.listdir(folder):
                found = _TEMPORARY.fullmatch(name)
                if found and (folder, found[1]) in outputs:
                    _remove(os.path.join(folder, name))


def _remove(path: str) -> None:
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
