"""ckptkit doctor: print why a checkpoint does not load.

Each cause has a number, an explanation and a command that fixes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ckptkit.cli import options, reading, render, request
from ckptkit.core.errors import InputError, UsageError
from ckptkit.core.text import argument, shell_command, shell_word

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.options import Options
    from ckptkit.diagnosis.cause import Cause
    from ckptkit.diagnosis.diagnose import Diagnosis

SCHEMA = "ckptkit.doctor/1"
FOUND = 1
UNCHECKED = "note: names and shapes were not checked against a model; --model checks them"
# color of each level, most severe level first
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
WIDEST, NARROWEST = 100, 40  # maximum and minimum width of explanations, in characters


@click.command("doctor", cls=reading.Reader)
@reading.files
@options.of("doctor")
def command(
    files: tuple[str, ...],
    spec: str | None,
    args: dict[str, object],
    read: Options,
    level: str,
    as_json: bool,
    destination: str | None,
    force: bool,
) -> int:
    """Explain why a checkpoint does not load, and how to fix it.

    Lists every cause with an explanation and the command that fixes it. --fix applies all possible
    fixes in one pass. With --model, `doctor` also reports why the file does not fit the model. With
    --model, `doctor` imports and runs the code of the model. For a folder of checkpoints, `doctor`
    examines each checkpoint.

    An error prevents loading. A warning prevents loading in some environments. A note is only
    information. The exit code is 1 if there is an error or a warning (see --fail-on). With --fix,
    the exit code is 1 if an error or a warning remains. The exit code is 3 if a FILE is unreadable.
    With --json, each of several files is one JSON object on its own line.

    \b
    Example: ckptkit doctor run.pth
             ckptkit doctor run.pth --model models.py:CNN --arg classes=10 --fix fixed.pth
    """
    from json import dumps

    from ckptkit.analysis.advice import fixed
    from ckptkit.diagnosis.cause import at_least
    from ckptkit.diagnosis.diagnose import apply_fixes, examine, report

    if destination is not None and len(files) > 1:
        raise click.UsageError("--fix takes one FILE")
    if args and spec is None:
        raise click.UsageError("--arg needs --model")
    model, words = None, []
    if spec is not None:
        from ckptkit.cli.model_class import built

        model, words = built(spec, args), ["--model", spec]
        for name, value in args.items():
            words += ["--arg", f"{name}={dumps(value)}"]
    codes: list[int] = []

    def look(file: str) -> None:
        """Examine one file and print the results. If a destination is given, write a fixed copy."""
        exist = destination is not None and os.path.exists(file) and os.path.exists(destination)
        if destination is not None and exist and os.path.samefile(file, destination):
            what = "is FILE itself, and --fix writes a new file"
            hint = f"use --fix {shell_word(fixed(file))}"
            raise UsageError(what, where=destination, hint=hint)
        chosen = () if read.key is None else ("--key", read.key)
        found = left = examine(file, read, model=model, words=(*words, *chosen))
        done = None
        if destination is not None and found.checkpoint is not None:
            found.checkpoint.require_complete()
            if found.fix is not None:
                with render.Progress("writing") as progress:
                    done = apply_fixes(found, destination, force=force, progress=progress)
                left = examine(done.path, model=model, words=tuple(words))
        if as_json:
            render.emit_json({"schema": SCHEMA, **report(found, done, left, spec)})
        else:
            render.emit(*([""] if codes else []), *_lines(found, done, left, destination))
            if done is not None:
                request.print_messages(found.lost, done.warnings, done.plan.notes)
            if spec is None and left.readable and left.checkpoint is not None:
                render.emit("", *render.remark(UNCHECKED))
        causes = left.causes if done is None else (*left.causes, *found.unfixed)
        fails = level != "never" and (at_least(causes, level) or (done and found.lost))
        codes.append(FOUND * bool(fails) if left.readable else InputError.exit_code)

    failures = reading.each_of(files, look, walks=destination is None)
    return max(codes + [error.exit_code for error in failures])


def _lines(
    found: Diagnosis, done: Conversion | None, left: Diagnosis, destination: str | None
) -> Iterator[str]:
    """Yield lines for the causes in `found`, the fixes in `done`, and the remaining causes in
    `left`."""
    from ckptkit.analysis.advice import fixed

    title = "cannot be read"
    if found.checkpoint is not None:
        kind = found.checkpoint.format + ("" if found.readable else ", damaged")
        title = f"{kind}: {_counted(found.causes) or 'found nothing that prevents loading'}"
    yield from render.wrapped(f"{render.escape(found.path)}: {title}", whole=True)
    yield from _causes(found)
    if done is not None:
        name = render.escape(done.path)
        count = render.plural(request.tensors(done.checkpoint, done.plan), "tensor")
        what = "; ".join((f"{count}, {render.size(done.plan.size)}", *done.notes))
        yield from ("", f"wrote {name}: {render.escape(what)}")
        if left.causes:
            yield f"remaining problems in {name}: {_counted(left.causes)}"
            yield from _causes(left)
        elif found.lost:
            lost = render.plural(len(found.lost), "entry")
            yield f"{name} loads, but {lost} could not be recovered"
        elif found.unfixed:
            numbers = (str(n) for n, each in enumerate(found.causes, 1) if each in found.unfixed)
            yield f"not fixed: problem {', '.join(numbers)}"
        else:
            yield f"no problems left: {name} loads{' into the model' if left.words else ''}"
    elif destination is not None and found.causes:
        yield from ("", "--fix cannot fix any of these problems; it wrote nothing")
    elif len(found.causes) > 1 and found.fix is not None:
        words = ("doctor", *found.words, "--fix", fixed(found.path), *argument(found.path))
        command = render.escape(shell_command(("ckptkit", *words)))
        yield from ("", "to fix everything fixable:", f"  {command}")


def _counted(causes: Sequence[Cause]) -> str:
    """Count the causes of each level: ``1 error, 2 notes``."""
    counts = {level: len([each for each in causes if each.level == level]) for level in COLOURS}
    return ", ".join(render.plural(count, level) for level, count in counts.items() if count)


def _causes(found: Diagnosis) -> Iterator[str]:
    from textwrap import wrap

    width = render.terminal_width()
    wide = WIDEST if width is None else max(NARROWEST, min(WIDEST, width - 4))
    numbers: dict[str, int] = {}
    for number, cause in enumerate(found.causes, 1):
        yield ""
        title = render.wrapped(f"{number}. {cause.level}: {render.escape(cause.title)}")
        yield from (render.paint(line, COLOURS[cause.level]) for line in title)
        text = wrap(cause.explanation, wide, break_long_words=False, break_on_hyphens=False)
        yield from (f"   {render.escape(line)}" for line in text)
        if cause.command in numbers:
            yield f"     (same command as {numbers[cause.command]})"
        elif cause.command is not None:
            numbers[cause.command] = number
            yield f"     {render.escape(cause.command)}"
