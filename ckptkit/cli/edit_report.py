"""The report of a command that writes: a sentence, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptkit.cli import render
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options
    from ckptkit.core.plan import Patch, Plan
    from ckptkit.formats.format import Loss

SCHEMA = "ckptkit.edit/3"
SHOWN = 20  # lines of what was lost


def report(
    done: Conversion,
    inputs: Iterable[str],
    options: Options,
    lost: Sequence[Loss] = (),
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Print warnings and what was lost; then what was done, and notes on what is left out."""
    count = tensors(done.checkpoint, done.plan)
    if not quiet:
        print_messages(lost, done.warnings)
    if as_json:
        facts = _facts(inputs, options, done, count)
        if lost:
            facts["lost"] = list(map(asdict, lost))
        if done.checkpoint.reports:
            from ckptkit.cli.rules_report import facts_of

            facts.update(facts_of(done.checkpoint.reports))
        render.emit_json(facts)
    elif not quiet:
        _print(options.dry_run, done, count)
    if not quiet:
        print_messages(notes=done.plan.notes)


def print_messages(
    lost: Sequence[Loss] = (), warnings: Iterable[str] = (), notes: Iterable[str] = ()
) -> None:
    """Print on standard error what was lost, the warnings, and the notes on what is left out."""
    for line in (*what_was_lost(lost), *warnings):
        render.warn(line)
    for line in notes:
        render.note(line)


def _print(dry_run: bool, done: Conversion, count: int) -> None:
    """Print the sentence; with --dry-run, the plan."""
    from ckptkit.core.plan import Patch

    plan = done.plan
    if isinstance(plan, Patch):
        verb = "would change" if dry_run else "kept" if plan.seal is None else "changed"
        size = f"{render.size(plan.written)} of {render.size(plan.size)} rewritten"
    else:
        verb, size = "would write" if dry_run else "wrote", render.size(plan.size)
    copied = [f"with {', '.join(done.copied)}"] if done.copied else []
    sentence = "; ".join((f"{render.plural(count, 'tensor')}, {size}", *done.notes, *copied))
    render.emit_text(f"{verb} {done.path}: {sentence}")
    if dry_run and done.checkpoint.reports:
        from ckptkit.cli.rules_report import lines_of

        for each in done.checkpoint.reports:
            render.emit_text(*lines_of(each))
    if dry_run:
        render.emit_text(*str(plan).split("\n"))


def what_was_lost(lost: Sequence[Loss]) -> list[str]:
    lines = [f"lost: {each.path or '(root)'} ({each.what}): {each.why}" for each in lost[:SHOWN]]
    return lines + (
        [f"lost: {len(lost) - SHOWN:,} more, which --json lists"] if len(lost) > SHOWN else []
    )


def tensors(checkpoint: Checkpoint, plan: Plan | Patch) -> int:
    """The tensors that are written: what the plan counts, and names of one tensor; else the
    weights, or every tensor where it is not clear which they are."""
    from ckptkit.core.errors import AmbiguousError
    from ckptkit.core.plan import Plan

    written = plan.tensors if isinstance(plan, Plan) else None
    try:
        if checkpoint.selection is not None:
            nodes = checkpoint.selection.nodes.values()
            again = len(nodes) - len({id(node) for node in nodes})
            return len(nodes) if written is None else written + again
    except AmbiguousError:
        pass
    if written is not None:
        return written
    from ckptkit.analysis.summary import summarize

    return summarize(checkpoint).totals.tensors


def _facts(inputs: Iterable[str], options: Options, done: Conversion, count: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "inputs": list(map(shown_url, inputs)),
        "output": done.path,
        "format": done.format,
        "in_place": options.in_place,
        "dry_run": options.dry_run,
        "tensor_count": count,
        "size": done.plan.size,
        "done": list(done.notes),
        "copied": list(done.copied),
        "left_out": list(done.plan.notes),
        "warnings": list(done.warnings),
    }
