"""ckptkit batch: run a command that writes on many files."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckptkit.cli import options, render
from ckptkit.cli import request as requests
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.text import and_more, on_command_line, shown_url

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.run.batch import Job, Outcome

SCHEMA = "ckptkit.batch/1"
# Options that do not change the bytes of an output. If only these options change, `batch` does not
# repeat finished jobs.
HOW = {
    "force", "dry_run", "as_json", "quiet", "verify", "durable", "allow_expand", "workers",
    "scheduler",
}  # fmt: skip
# Maps each state of a job to the words that the report prints.
STATES = {
    "planned": "to write", "done": "written", "found": "already correct",
    "skipped": "already done", "failed": "failed",
}  # fmt: skip
SHOWN = requests.SHOWN  # maximum number of printed warnings, and of printed errors


class Commands(click.Group):
    """A group of the commands that write. The commands take SRC... and --into instead of SRC and
    DST."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(options.BATCHABLE)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command `name` for many inputs. In the help of the options, "an output"
        replaces DST."""
        if name not in options.BATCHABLE:
            return None
        found = copy(_original(name))
        text = "Folder or URL to write the outputs to."
        params = [copy(p) for p in found.params if p.name not in ("src", "dst", "in_place")]
        for each in params:
            if isinstance(each, click.Option) and each.help:
                each.hidden = each.hidden and each.name != "workers"
                each.help = each.help.replace("DST", "an output").replace(requests.SCHEMA, SCHEMA)
        sources = click.Argument(["sources"], metavar="SRC...", nargs=-1, required=True)
        into = click.Option(["--into"], metavar="DIR", required=True, help=text)
        found.params = [*params, sources, into]
        example = f"\b\nExample: ckptkit batch {name} ... --into DIR 'runs/**/*.pth'"
        found.help = cleandoc(found.help or "").partition("\b")[0] + example
        found.epilog = None

        def run(sources: tuple[str, ...], into: str, **given: Any) -> int:
            return _run(name, sources, into, given)

        found.callback = run
        if ctx.resilient_parsing:
            from ckptkit.cli import completing

            completing.attach(found)
        return found


@click.group("batch", cls=Commands)
def command() -> None:
    """Run a command on many files.

    COMMAND is a command that writes one checkpoint, followed by its options. Each SRC is a path, a
    URL or a quoted pattern of files or checkpoint folders. `batch` writes the outputs to the folder
    or URL --into. An output keeps the path that its SRC has below the fixed part of the pattern
    (below `runs` in 'runs/**/*.pth'). `batch` skips finished outputs. If a job fails, the other
    jobs continue.

    \b
    Example: ckptkit batch strip-module --into plain --workers 8 'runs/**/*.pth'
             ckptkit batch convert --format safetensors --into s3://me/out 's3://me/in/*.pth'
    """


def _original(name: str) -> options.Writer:
    from ckptkit.cli import main

    found = main.get_command(click.Context(main), name)
    assert isinstance(found, options.Writer)
    return found


@dataclass(frozen=True)
class _OneOfMany(requests.Request):
    """A request for one file of a batch, without a progress bar."""

    alone: ClassVar[bool] = False


class _Checked(requests.Request):
    """A request that writes nothing and returns itself. `batch` uses this class to check
    options."""

    def run(self, *_: object, **__: object) -> Any:
        return self


@dataclass(frozen=True)
class _Work:
    """A command with its options. Call the object with SRC and DST. The object is picklable,
    because workers receive a pickle."""

    name: str
    given: dict[str, Any]

    def __call__(self, source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
        how = {"force": force, "dry_run": dry_run}
        done: Conversion
        with on_command_line():  # worker processes do not run main(), which enters this context
            request, given = self._asked(_OneOfMany, source, destination, **how)
            done, lost = _original(self.name).run(request=request, **given)
        warnings = (*done.warnings, *requests.what_was_lost(lost))
        return replace(done, checkpoint=replace(done.checkpoint, warnings=warnings))

    def check(self, source: str) -> requests.Request:
        """Return the request that the command makes from its options.

        Raises UsageError for options that are invalid for every input.
        """
        # DST is empty here, because the suffix of DST would choose the format.
        request, given = self._asked(_Checked, source, "")
        with suppress(InputError):  # the job reports an unreadable input later
            request = _original(self.name).run(request=request, **given)
        return request

    def _asked(
        self, kind: type[requests.Request], source: str, destination: str, **how: bool
    ) -> tuple[requests.Request, dict[str, Any]]:
        """Return a request of class `kind`, and a dict of the other arguments of the command."""
        given = {**self.given, **how, "dst": destination, "workers": None, "scheduler": None}
        return options.taken(given, (source,), kind), given

    @property
    def recipe(self) -> list[object]:
        """Return the settings that change the output: the options, and the content of a recipe
        file."""
        given = sorted((name, value) for name, value in self.given.items() if name not in HOW)
        parts: list[object] = [self.name, given]
        path = self.given.get("recipe", "")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                parts.append(file.read().hex())
        return parts


def _run(name: str, sources: tuple[str, ...], into: str, given: dict[str, Any]) -> int:
    from ckptkit.run import batch, workers

    gc.enable()  # main() disables garbage collection, but a batch can run for a long time
    if os.path.isfile(given.get("recipe", "")):
        given["recipe"] = os.path.abspath(
            given["recipe"]
        )  # workers can have other working directories
    work = _Work(name, given)
    found = batch.find(sources, into)
    asked = work.check(found[0].path).options
    shards = asked.shard_size is not None
    jobs = batch.plan(found, work.recipe, format=asked.format, shards=shards)
    outcomes: dict[str, Outcome] = {}
    warned = 0
    how = {"force": given["force"], "dry_run": given["dry_run"]}
    with (
        render.Progress("batch", sum(job.input.size for job in jobs)) as progress,
        workers.opened(given["workers"], given["scheduler"]) as pool,
        closing(batch.run(work, jobs, into, pool=pool, **how)) as results,
    ):
        for job, outcome in results:
            progress(job.input.size)
            outcomes[job.output] = outcome
            lines = (*outcome.warnings, *outcome.left_out)
            if lines and not given["quiet"]:  # print the first warning, or else the first note
                warned += 1
                more = f" ({and_more(len(lines) - 1).strip()})" if len(lines) > 1 else ""
                say = render.warn if outcome.warnings else render.note
                if warned <= SHOWN:
                    say(f"{job.output}: {lines[0]}{more}")
    rows = [(job, outcomes[job.output]) for job in jobs]
    states = Counter(outcome.state for _, outcome in rows)
    size = sum(outcome.size for _, outcome in rows)
    if given["as_json"]:
        facts = {
            "schema": SCHEMA,
            "command": name,
            "into": shown_url(into),
            "dry_run": given["dry_run"],
            "counts": {state: states[state] for state in STATES},
            "size": size,
            "jobs": (_facts(job, outcome) for job, outcome in rows),
        }
        render.emit_json(facts)
    elif not given["quiet"]:
        for job, outcome in rows if given["dry_run"] else ():
            source = shown_url(job.input.path)
            render.emit_text(f"{job.output}: {STATES[outcome.state]}, from {source}")
        counts = (f"{states[state]:,} {word}" for state, word in STATES.items() if states[state])
        written = f"; {render.size(size)}" if size else ""
        render.emit_text(f"{name} into {shown_url(into)}: {', '.join(counts)}{written}")
    if warned > SHOWN:
        render.note(f"{warned - SHOWN:,} more files with warnings or notes (--json lists them)")
    failed = [outcome for _, outcome in rows if outcome.error is not None]
    for each in failed[:SHOWN]:
        render.error(str(each.error), each.hint)
    if len(failed) > SHOWN:
        render.error(f"{len(failed) - SHOWN:,} more failed (--json lists them)")
    return failed[0].exit_code if failed else 0


def _facts(job: Job, outcome: Outcome) -> dict[str, Any]:
    error = None
    if outcome.error is not None:
        from ckptkit.analysis.json_facts import failure

        failed = CkptkitError(outcome.error, hint=outcome.hint, code=outcome.code)
        error = failure(failed)["error"]
    return {
        "file": shown_url(job.input.path),
        "output": job.output,
        "state": outcome.state,
        "size": outcome.size,
        "format": outcome.format,
        "done": outcome.notes,
        "left_out": outcome.left_out,
        "warnings": outcome.warnings,
        "error": error,
    }
