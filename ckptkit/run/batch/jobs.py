"""What a batch does: an input, the name of its output, and a digest that tells whether it has been
done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ckptkit import __version__, formats
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.formats.format import Format, Probe
from ckptkit.remote import urls
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
    """The jobs for `inputs`. `recipe` is plain data (JSON) that says all that their outputs depend
    on.

    `format` is that of the outputs, None for one that each input decides; `shards`, that each is a
    folder of them. Raises UsageError for an unknown format, and where two inputs would become one
    output.
    """
    given = formats.for_writing("", format, shards=shards) if format is not None else None
    jobs = [Job(each, _output(each, given, shards), _digest(each, recipe)) for each in inputs]
    _check(jobs)
    return jobs


def _digest(each: Input, recipe: object) -> str:
    said = [__version__, recipe, urls.shown(each.path), each.mark]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _output(each: Input, given: Format | None, shards: bool) -> str:
    """The input's name, its suffix changed to that of the output's format where that is known and
    another."""
    chosen = given if given is not None or shards or not each.is_folder else _kept(each)
    if chosen is None and not shards:
        return each.name
    if chosen is not None and chosen.suffixes and each.name.lower().endswith(chosen.suffixes):
        return each.name
    stem = _stem(each.name)
    return stem if shards or chosen is None or not chosen.suffixes else stem + chosen.suffixes[0]


def _kept(each: Input) -> Format | None:
    """The format in which a folder is written when nobody says which; None where that is not
    known."""
    try:
        read = formats.identify(Probe(formats.open_place(each.path)))
        return formats.for_writing(each.name, keep=read.name)
    except CkptkitError:  # which reading it will say again
        return None


def _stem(name: str) -> str:
    suffix = next((each for each in _suffixes() if name.lower().endswith(each)), "")
    stem = name[: len(name) - len(suffix)]
    return name if not stem or stem.endswith("/") else stem


@cache
def _suffixes() -> Sequence[str]:
    """Those of all formats that can be written, the longest first."""
    return sorted(
        (suffix for each in formats.writable() for suffix in each.suffixes), key=len, reverse=True
    )


def _check(jobs: Iterable[Job]) -> None:
    """Refuse two inputs for one output, and an output that would lie in another."""
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
    names = f"{urls.shown(first.input.path)} and {urls.shown(second.input.path)}"
    where = first.output if first.output == second.output else f"{first.output} and {second.output}"
    return UsageError(
        f"the outputs of {names} would be in each other's way, as {where}",
        hint="a pattern keeps the folders below its fixed part: 'runs/**/*.pth'; or run them as two batches",
    )
