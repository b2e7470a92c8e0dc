"""Jobs of a batch: an input, the name of its output, and a digest to recognize finished ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from ckptkit import formats
from ckptkit.core import __version__
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.text import shown_url
from ckptkit.formats.format import Format, Probe, open_unchecked
from ckptkit.run.batch.inputs import Input


@dataclass(frozen=True, slots=True)
class Job:
    """`input` becomes `output`, a name with slashes below the batch's folder."""

    input: Input
    output: str
    digest: str


def plan(
    inputs: Iterable[Input], recipe: object, *, format: str | None = None, shards: bool = False
) -> list[Job]:
    """Return the jobs for `inputs`.

    `recipe` is plain data (JSON) that contains all that their outputs depend on. `format` is that
    of the outputs, None for one that depends on each input; `shards` means that each output is a
    folder of shards. Raises UsageError for an unknown format, and where two inputs would become one
    output.
    """
    given = formats.for_writing("", format, shards=shards) if format is not None else None
    jobs = [Job(each, _output(each, given, shards), _digest(each, recipe)) for each in inputs]
    _check(jobs)
    return jobs


def _digest(each: Input, recipe: object) -> str:
    facts = [__version__, recipe, shown_url(each.path), each.mark]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _output(each: Input, given: Format | None, shards: bool) -> str:
    """Return the input's name with the suffix of the output's format, where known and different."""
    chosen = given
    if given is None and each.is_folder and not shards:
        chosen = _kept(each)
    suffixes = () if chosen is None else chosen.suffixes
    if chosen is None and not shards:
        return each.name
    return formats.named(each.name, () if shards else suffixes)


def _kept(each: Input) -> Format | None:
    """Return the format in which a folder is written by default; None where that is not known."""
    try:
        read = formats.identify(Probe(open_unchecked(each.path)))
        return formats.for_writing(each.name, keep=read.name)
    except CkptkitError:  # reported again when it is read
        return None


def _check(jobs: Iterable[Job]) -> None:
    """Refuse two inputs for one output, and an output that would be inside another."""
    by_output: dict[str, Job] = {}
    for job in jobs:
        if (other := by_output.setdefault(job.output, job)) is not job:
            raise _collision(other, job)
    for job in by_output.values():
        at = job.output.find("/")
        while at >= 0:
            if other_job := by_output.get(job.output[:at]):
                raise _collision(other_job, job)
            at = job.output.find("/", at + 1)


def _collision(first: Job, second: Job) -> UsageError:
    names = f"{shown_url(first.input.path)} and {shown_url(second.input.path)}"
    where = first.output if first.output == second.output else f"{first.output} and {second.output}"
    return UsageError(
        f"the outputs of {names} would collide, as {where}",
        hint="a pattern keeps the folders below its fixed part: 'runs/**/*.pth'; "
        "or run them as two batches",
    )
