"""ckptkit batch: every command that writes, applied to many files."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckptkit.cli import edit_report, options, render
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.text import and_more, on_command_line, shown_url

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.formats.format import Loss
    from ckptkit.run.batch import Job, Outcome

SCHEMA = "ckptkit.batch/2"
COMMANDS = (
    "strip-module",
    "add-module",
    "remap",
    "convert",
    "rename",
    "extract",
    "wrap",
    "ema",
    "run",
    "recover",
)
# What does not change the bytes of an output, and so not whether a job has been done.
HOW = {
    "force",
    "dry_run",
    "as_json",
    "quiet",
    "verify",
    "durable",
    "allow_expand",
    "workers",
    "scheduler",
}


class Commands(click.Group):
    """The commands that write, with SRC... and --into instead of SRC and DST."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found = _many(_original(name))
        if ctx.resilient_parsing:
            from ckptkit.cli import completing

            completing.attach(found)
        return found


@click.group("batch", cls=Commands)
def command() -> None:
    """Run a command over many files.

    COMMAND is any command that writes one checkpoint, with its options. SRC are files, checkpoint
    folders or quoted patterns, local or behind URLs. Each output goes to the folder or URL --into,
    under the same subfolders as below the fixed part of the pattern. Outputs that are already done
    are skipped; a failure does not stop the others.

    \b
    Example: ckptkit batch strip-module --into plain --workers 8 'runs/**/*.pth'
             ckptkit batch convert --format safetensors --into s3://me/out 's3://me/in/*.pth'
    """


def _original(name: str) -> click.Command:
    from ckptkit.cli import main

    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def _many(original: click.Command) -> click.Command:
    """Return the same command for many inputs."""
    name = original.name
    assert name is not None
    sources = click.Argument(["sources"], metavar="SRC...", nargs=-1, required=True)
    into = click.Option(
        ["--into"], metavar="DIR", required=True, help="Folder or URL to write the outputs to."
    )
    kept = [
        _worded(each) for each in original.params if each.name not in ("src", "dst", "in_place")
    ]
    text = cleandoc(original.help or "").partition("\b")[0]
    example = f"\b\nExample: ckptkit batch {name} ... --into DIR 'runs/**/*.pth'"

    def run(sources: tuple[str, ...], into: str, **given: Any) -> int:
        return _run(name, sources, into, given)

    made = type(original)  # which may read its arguments in a way of its own
    return made(name, callback=run, params=[*kept, sources, into], help=text + example)


def _worded(parameter: click.Parameter) -> click.Parameter:
    """Return a copy of an option whose help is about many outputs."""
    found = copy(parameter)
    if isinstance(found, click.Option) and found.help:
        found.hidden = found.hidden and found.name != "workers"
        found.help = found.help.replace("DST", "an output").replace(edit_report.SCHEMA, SCHEMA)
    return found


@dataclass(frozen=True)
class _One(options.Request):
    """A request whose report is appended to `reports` instead of printed."""

    alone: ClassVar[bool] = False
    reports: list[Conversion] = field(default_factory=list)

    def report(self, done: Conversion, lost: Sequence[Loss]) -> None:
        warnings = (*done.warnings, *edit_report.what_was_lost(lost))
        self.reports.append(replace(done, checkpoint=replace(done.checkpoint, warnings=warnings)))


@dataclass(frozen=True)
class _Checked(options.Request):
    """A request that writes nothing and appends itself to `found`, to check a command's options."""

    found: list[options.Request] = field(default_factory=list)

    def run(self, *_: object, **__: object) -> None:
        self.found.append(self)


@dataclass(frozen=True)
class _Work:
    """A command with its options, for any SRC and DST; pickled for the workers."""

    name: str
    given: dict[str, Any]

    def __call__(self, source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
        how = {"force": force, "dry_run": dry_run}
        with on_command_line():  # in a process of its own, perhaps
            request: _One = self._called(_One, source, destination, **how)
        return request.reports[0]

    def check(self, source: str) -> options.Request:
        """Return the request that the command makes of its options.

        Raises UsageError for options that are wrong for every input.
        """
        found: _Checked = self._called(_Checked, source, "")  # a suffix would choose the format
        return found.found[0] if found.found else found

    def _called(
        self, kind: type[options.Request], source: str, destination: str, **how: bool
    ) -> Any:
        """Call the command with a request of its own kind, and return that."""
        given = {**self.given, **how, "dst": destination, "workers": None, "scheduler": None}
        request = options.taken(given, (source,), kind)
        callback: Any = _original(self.name).callback
        # The check leaves what is wrong with the input to its own job.
        with suppress(InputError) if kind is _Checked else nullcontext():
            callback.__wrapped__(request=request, **given)
        return request

    @property
    def recipe(self) -> list[object]:
        """Return everything that an output depends on besides its input.

        That is the options, and the content of a recipe file.
        """
        parts: list[object] = [
            self.name,
            sorted((name, value) for name, value in self.given.items() if name not in HOW),
        ]
        path = self.given.get("recipe", "")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                parts.append(file.read().hex())
        return parts


def _run(name: str, sources: tuple[str, ...], into: str, given: dict[str, Any]) -> int:
    from ckptkit.run import batch

    gc.enable()  # a process that lives long
    if os.path.isfile(given.get("recipe", "")):
        given["recipe"] = os.path.abspath(given["recipe"])  # workers may be in other folders
    work = _Work(name, given)
    found = batch.find(sources, into)
    asked = work.check(found[0].path).options
    shards = asked.shard_size is not None
    jobs = batch.plan(found, work.recipe, format=asked.format, shards=shards)
    report = _Report(name, into, given)
    with closing(_results(work, jobs, into, given)) as results:
        for job, outcome in results:
            report.add(job, outcome)
    return report.end(jobs)


def _results(
    work: _Work, jobs: list[Job], into: str, given: dict[str, Any]
) -> Generator[tuple[Job, Outcome], None, None]:
    from ckptkit.cli.progress import Progress
    from ckptkit.run import batch, workers

    total = sum(job.input.size for job in jobs)
    with (
        Progress("batch", total) as progress,
        workers.opened(given["workers"], given["scheduler"]) as pool,
        closing(
            batch.run(work, jobs, into, force=given["force"], pool=pool, dry_run=given["dry_run"])
        ) as results,
    ):
        for job, outcome in results:
            progress(job.input.size)
            yield job, outcome


class _Report:
    """The outcome of all jobs, and the report printed at the end."""

    def __init__(self, name: str, into: str, given: dict[str, Any]) -> None:
        self._name = name
        self._into = into
        self._given = given
        self._states: dict[str, int] = {}
        self._size = 0
        self._failed: dict[str, Outcome] = {}
        self._warned = 0
        self._rows: dict[str, dict[str, Any]] = {}  # where --json or --dry-run lists them

    def add(self, job: Job, outcome: Outcome) -> None:
        self._states[outcome.state] = self._states.get(outcome.state, 0) + 1
        self._size += outcome.size
        if outcome.error is not None:
            self._failed[job.output] = outcome
        if not self._given["quiet"]:
            self._say(job, outcome)
        if self._given["as_json"] or self._given["dry_run"]:
            self._rows[job.output] = _facts(job, outcome)

    def _say(self, job: Job, outcome: Outcome) -> None:
        """Print the first message on a file: a warning, else a note."""
        lines = (*outcome.warnings, *outcome.left_out)
        if not lines:
            return
        self._warned += 1
        if self._warned > edit_report.SHOWN:
            return
        more = f" ({and_more(len(lines) - 1).strip()})" if len(lines) > 1 else ""
        say = render.warn if outcome.warnings else render.note
        say(f"{job.output}: {lines[0]}{more}")

    def end(self, jobs: Sequence[Job]) -> int:
        """Print the report; return the exit code."""
        failed = [self._failed[job.output] for job in jobs if job.output in self._failed]
        if self._given["as_json"]:
            render.emit_json(self._json(jobs))
        elif not self._given["quiet"]:
            if self._given["dry_run"]:
                render.emit_text(*(_line(self._rows[job.output]) for job in jobs))
            render.emit_text(self._sentence())
        if self._warned > edit_report.SHOWN:
            more = self._warned - edit_report.SHOWN
            render.note(f"{more:,} more files with warnings or notes, which --json lists")
        for each in failed[: edit_report.SHOWN]:
            render.error(str(each.error), each.hint)
        if len(failed) > edit_report.SHOWN:
            render.error(f"{len(failed) - edit_report.SHOWN:,} more failed, which --json lists")
        return failed[0].exit_code if failed else 0

    def _sentence(self) -> str:
        count = self._states.get
        parts = [f"{verb} {count(state, 0):,}" for state, verb in _STATES if count(state)]
        sentence = f"{self._name} into {shown_url(self._into)}: {', '.join(parts)}"
        return f"{sentence}; {render.size(self._size)}" if self._size else sentence

    def _json(self, jobs: Sequence[Job]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": self._name,
            "into": shown_url(self._into),
            "dry_run": self._given["dry_run"],
            "counts": {state: self._states.get(state, 0) for state, _ in _STATES},
            "size": self._size,
            "jobs": (self._rows[job.output] for job in jobs),
        }


# States of jobs, and what to say of them.
_STATES = (
    ("planned", "would write"),
    ("done", "wrote"),
    ("found", "already there and correct"),
    ("skipped", "done before"),
    ("failed", "failed"),
)


def _facts(job: Job, outcome: Outcome) -> dict[str, Any]:
    file = shown_url(job.input.path)
    error = None
    if outcome.error is not None:
        from ckptkit.analysis.json_facts import failure

        failed = CkptkitError(outcome.error, hint=outcome.hint, code=outcome.code)
        error = failure(failed)["error"]
    return {
        "file": file,
        "output": job.output,
        "state": outcome.state,
        "size": outcome.size,
        "format": outcome.format,
        "done": outcome.notes,
        "left_out": outcome.left_out,
        "warnings": outcome.warnings,
        "error": error,
    }


def _line(row: dict[str, Any]) -> str:
    verb = dict(_STATES)[row["state"]]
    return f"{verb} {row['output']}: from {row['file']}"
