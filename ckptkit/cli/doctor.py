"""ckptkit doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import edit_report, options, render
from ckptkit.core.errors import InputError, UsageError
from ckptkit.core.text import flatten, shell_word
from ckptkit.diagnosis.cause import LEVELS, WARNING, at_least

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.options import Options
    from ckptkit.diagnosis.diagnose import Diagnosis

SCHEMA = "ckptkit.doctor/3"
FOUND = 1
UNCHECKED = "note: names and shapes were not checked against a model: --model does that"


@options.reads
@click.command("doctor")
@click.argument("file", metavar="FILE")
@options.model
@options.model_arguments
@click.option(
    "--fix",
    "destination",
    metavar="DST",
    help="Write a repaired copy to DST.",
)
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
@click.option(
    "--fail-on",
    "level",
    type=click.Choice([*LEVELS, "never"]),
    default=WARNING,
    help="Exit with 1 if a cause is of this level or a more severe one.",
)
@options.as_json(SCHEMA)
@options.key
def command(
    file: str,
    spec: str | None,
    args: dict[str, object],
    read: Options,
    level: str,
    as_json: bool,
    **fix: Any,
) -> int:
    """Explain why a checkpoint does not load, and how to fix it.

    Names every cause, what it means, and the command that fixes it. --fix applies all possible
    fixes in one pass. With --model, also finds what keeps the file from fitting that model; the
    model's code is imported and run.

    An error keeps the file from loading, a warning does so in some places, a note is worth knowing.
    Exit code 1 if an error or a warning is found (or remains after --fix; see --fail-on), 3 if FILE
    cannot be read, else 0.

    \b
    Example: ckptkit doctor run.pth
             ckptkit doctor run.pth --model models.py:CNN --arg classes=10 --fix fixed.pth
    """
    from ckptkit.diagnosis.diagnose import examine

    _check_destination(file, fix["destination"])
    if args and spec is None:
        raise click.UsageError("--arg needs --model")
    model, words = _model(spec, args), _words(spec, args)
    chosen = () if read.key is None else ("--key", read.key)
    found = examine(file, read, model=model, words=(*words, *chosen))
    done = _mended(found, **fix)
    left = found if done is None else examine(done.path, model=model, words=words)
    if as_json:
        from ckptkit.diagnosis.report import report

        render.emit_json({"schema": SCHEMA, **report(found, done, left, spec)})
    else:
        _say(found, done, left, fix["destination"])
        if spec is None and left.readable and left.checkpoint is not None:
            render.emit("", *map(render.labelled, render.wrapped(UNCHECKED)))
    return _exit_code(found, done, left, level)


def _exit_code(found: Diagnosis, done: Conversion | None, left: Diagnosis, level: str) -> int:
    """Return the exit code for what is left, where causes of `level` count."""
    if not left.readable:
        return InputError.exit_code
    if level == "never":
        return 0
    unmended = at_least(found.unmended, level) if done else []
    lost = done is not None and found.lost
    return FOUND if at_least(left.causes, level) or unmended or lost else 0


def _check_destination(file: str, destination: str | None) -> None:
    """Raise UsageError if --fix would overwrite the file that is diagnosed."""
    import os

    from ckptkit.analysis.advice import fixed

    paths = (file, destination)
    if destination is None or not all(map(os.path.exists, filter(None, paths))):
        return
    if os.path.samefile(file, destination):
        what = "is FILE itself; --fix writes a new file"
        raise UsageError(what, where=destination, hint=f"--fix {shell_word(fixed(file))}")


def _model(spec: str | None, args: dict[str, object]) -> Any:
    from ckptkit.cli.model_class import built

    return None if spec is None else built(spec, args)


def _words(spec: str | None, args: dict[str, object]) -> tuple[str, ...]:
    """Return the options that name the model on the command line."""
    if spec is None:
        return ()
    from json import dumps

    return (
        "--model",
        spec,
        *flatten(("--arg", f"{name}={dumps(value)}") for name, value in args.items()),
    )


def _mended(found: Diagnosis, destination: str | None, force: bool) -> Conversion | None:
    if destination is not None and found.checkpoint is not None:
        found.checkpoint.whole()
    if destination is None or found.fix is None:
        return None
    from ckptkit.cli.progress import Progress
    from ckptkit.diagnosis.diagnose import cure

    with Progress("writing") as progress:
        return cure(found, destination, force=force, progress=progress)


def _say(
    found: Diagnosis, done: Conversion | None, left: Diagnosis, destination: str | None
) -> None:
    from ckptkit.cli import doctor_text

    render.emit(*doctor_text.lines(found, done, left, destination))
    if done is not None:
        edit_report.print_messages(found.lost, done.warnings, done.plan.notes)
