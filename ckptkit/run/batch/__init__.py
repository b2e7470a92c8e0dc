"""One command over many files: which jobs there are, which are done, who does the others, and what
became of them.

Each output appears whole or not at all, as always. What is done is noted in the outputs' folder
(:mod:`manifest`), and skipped the next time. Jobs go to workers in groups, a few groups for each at
a time. A worker that dies takes its group with it: those jobs are done once more, one by one and
with nothing beside them, so that the one that killed it is known when it kills the second.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress

from ckptkit import __version__
from ckptkit.core.errors import OutputError
from ckptkit.remote import urls
from ckptkit.run.batch import manifest
from ckptkit.run.batch.attempt import Outcome, Task, Work, attempt
from ckptkit.run.batch.inputs import find
from ckptkit.run.batch.jobs import Job, plan
from ckptkit.run.batch.manifest import Manifest, Record
from ckptkit.run.workers import Pool

__all__ = ["Job", "Outcome", "Work", "find", "plan", "run", "state"]

AHEAD = 2  # groups for each worker: one that it does, one that waits for it
GROUP = 32  # jobs at most
GROUP_BYTES = 64 << 20  # of input; a larger job is a group of its own
ROUNDS = 8  # groups for each worker in a batch, at least, so that all are busy to the end
DEATHS = 8  # in a row, for each worker, after which something else is wrong

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
) -> Results:
    """Do `jobs`, of which each output goes below the folder or URL `into`, and tell what became of
    each, in any order.

    `work` is done in this process, or by the workers of `pool`, which are stopped if this generator
    is closed before its end. Outputs that an earlier batch made and nobody changed may be replaced,
    others with `force`. Raises what is no single job's failure: UsageError where another batch
    writes there, OutputError where the manifest cannot be written or the workers do not work.
    """
    with manifest.opened(into) as known:
        todo: list[_Item] = []
        for number, (job, before) in enumerate(_compared(jobs, known, force)):
            if before is not None:
                todo.append((job, Task(number, job.input.path, _joined(into, job.output), before)))
            else:
                yield job, Outcome("skipped")
        _prepare(into, [job for job, _ in todo])
        try:
            yield from _noted(_spread(work, todo, pool), known)
        finally:
            _sweep(into, [job for job, _ in todo])


def state(jobs: Sequence[Job], into: str) -> Results:
    """What `run` would do: ``skipped`` or ``planned`` for each job. Nothing is written."""
    with manifest.opened(into, reading=True) as known:
        for job, before in _compared(jobs, known, False):
            yield job, Outcome("skipped" if before is None else "planned")


def _compared(jobs: Sequence[Job], known: Manifest, force: bool) -> list[tuple[Job, bool | None]]:
    """For each job None where it is done, else whether its output may be replaced."""
    marks = known.marks(job.output for job in jobs if job.output in known.done)
    found: list[tuple[Job, bool | None]] = []
    for job in jobs:
        record = known.done.get(job.output)
        ours = record is not None and tuple(record.made) == marks.get(job.output)
        done = (
            ours and record is not None and record.job == job.digest and job.input.mark is not None
        )
        found.append((job, None if done else ours or force))
    return found


def _joined(into: str, name: str) -> str:
    return (
        urls.beside(into, name)
        if urls.is_url(into)
        else os.path.join(os.path.abspath(into), *name.split("/"))
    )


def _noted(results: Results, known: Manifest) -> Results:
    for job, outcome in results:
        if outcome.made is not None:
            known.add([Record(job.output, job.digest, outcome.made)])
        yield job, outcome


def _spread(work: Work, todo: Sequence[_Item], pool: Pool | None) -> Results:
    """Do the jobs; where a worker dies, those that it had are the last, each alone."""
    if pool is None:
        for job, task in todo:
            yield job, attempt(work, [task], __version__)[0]
        return
    lost: list[_Item] = []
    try:
        yield from _together(pool, work, todo, lost)
        for each in lost:
            yield each[0], _alone(pool, work, each)
    except BaseException:
        pool.stop()
        raise


def _together(pool: Pool, work: Work, todo: Sequence[_Item], lost: list[_Item]) -> Results:
    """Do the jobs, in groups; those whose worker dies are put into `lost`."""
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
        said = f"{urls.shown(each[0].input.path)}: its worker was killed, twice"
        hint = "it may need more memory than there is; `dmesg` may say what killed it"
        return Outcome("failed", error=said, hint=hint, exit_code=OutputError.exit_code)


def _submitted(pool: Pool, work: Work, group: Sequence[_Item]) -> Future[list[Outcome]]:
    return pool.submit(attempt, work, [task for _, task in group], __version__)


def _groups(todo: Sequence[_Item], workers: int) -> Iterator[list[_Item]]:
    """Jobs that a worker does in one go: many where they are small."""
    most = max(1, min(GROUP, len(todo) // (ROUNDS * max(1, workers))))
    group: list[_Item] = []
    size = 0
    for each in todo:
        if group and (len(group) >= most or size + each[0].input.size > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(each)
        size += each[0].input.size
    if group:
        yield group


def _prepare(into: str, jobs: Iterable[Job]) -> None:
    """Folders for the outputs, and nothing in them that a killed batch left half-written."""
    if urls.is_url(into):
        from ckptkit.remote import listing

        listing.make_folders(into, sorted({job.output.rpartition("/")[0] for job in jobs}))
    else:
        _sweep(into, jobs)


def _sweep(into: str, jobs: Iterable[Job]) -> None:
    """Remove temporaries beside the outputs of `jobs`: nobody writes them now but the ghosts of
    killed batches."""
    if urls.is_url(into):
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
