"""Text output of doctor: numbered causes, each with its explanation and command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from ckptkit.analysis.advice import fixed
from ckptkit.api import Conversion
from ckptkit.cli.edit_report import tensors
from ckptkit.cli.render import escape, paint, plural, size, terminal_width, wrapped
from ckptkit.core.text import argument, shell_command
from ckptkit.diagnosis.cause import ERROR, LEVELS, NOTE, WARNING, Cause
from ckptkit.diagnosis.diagnose import Diagnosis

COLOURS = {ERROR: "red", WARNING: "yellow", NOTE: "cyan"}
WIDEST, NARROWEST = 100, 40  # characters of a line of explanation


def lines(
    found: Diagnosis, done: Conversion | None, left: Diagnosis, destination: str | None
) -> Iterator[str]:
    """Yield the causes found, what was `done` about them, and the causes `left`."""
    yield from wrapped(_heading(found), whole=True)
    yield from _causes(found)
    if done is not None:
        yield ""
        yield from _done(found, done, left)
    elif destination is not None and found.causes:
        yield ""
        yield "--fix cannot fix any of this: nothing was written"
    elif len(found.causes) > 1 and found.fix is not None:
        yield ""
        yield "to fix everything that can be fixed:"
        words = (
            "ckptkit",
            "doctor",
            *found.words,
            "--fix",
            fixed(found.path),
            *argument(found.path),
        )
        yield f"  {escape(shell_command(words))}"


def _heading(found: Diagnosis) -> str:
    if found.checkpoint is None:
        return f"{escape(found.path)}: cannot be read"
    number = _counted(found.causes) or "nothing found that keeps it from loading"
    kind = found.checkpoint.format if found.readable else f"{found.checkpoint.format}, damaged"
    return f"{escape(found.path)}: {kind}: {number}"


def _counted(causes: Sequence[Cause]) -> str:
    """Count the causes of each level: ``1 error, 2 notes``."""
    counts = {level: len([each for each in causes if each.level == level]) for level in LEVELS}
    return ", ".join(plural(count, level) for level, count in counts.items() if count)


def _causes(found: Diagnosis) -> Iterator[str]:
    width = terminal_width()
    wide = WIDEST if width is None else max(NARROWEST, min(WIDEST, width - 4))
    numbers: dict[str, int] = {}
    for number, cause in enumerate(found.causes, 1):
        yield ""
        title = wrapped(f"{number}. {cause.level}: {escape(cause.title)}")
        yield from (paint(line, COLOURS[cause.level]) for line in title)
        text = wrap(cause.explanation, wide, break_long_words=False, break_on_hyphens=False)
        yield from (f"   {escape(line)}" for line in text)
        if cause.command in numbers:
            yield f"     (same command as {numbers[cause.command]})"
        elif cause.command is not None:
            numbers[cause.command] = number
            yield f"     {escape(cause.command)}"


def _done(found: Diagnosis, done: Conversion, left: Diagnosis) -> Iterator[str]:
    count = plural(tensors(done.checkpoint, done.plan), "tensor")
    yield escape(
        f"wrote {done.path}: {'; '.join((f'{count}, {size(done.plan.size)}', *done.notes))}"
    )
    if left.causes:
        yield f"what remains in {escape(done.path)}: {_counted(left.causes)}"
        yield from _causes(left)
    elif found.lost:
        lost = plural(len(found.lost), "entry")
        yield f"{escape(done.path)} loads, without {lost} that cannot be recovered"
    elif found.unmended:
        causes = [
            str(number) for number, each in enumerate(found.causes, 1) if each in found.unmended
        ]
        yield f"not fixed: {', '.join(causes)} above"
    else:
        into = " into the model" if left.words else ""
        yield f"no problems left: {escape(done.path)} loads{into}"
