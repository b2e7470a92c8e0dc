"""Run the request of a writing command, and print its report: a sentence, or a JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, ClassVar

from ckptkit.cli import render
from ckptkit.core.bytesource import STREAM
from ckptkit.core.errors import ADAPTER, coded
from ckptkit.core.options import Options
from ckptkit.core.text import flatten, is_url, shown_url

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.plan import Patch, Plan
    from ckptkit.edits.rules import RulesReport
    from ckptkit.formats.format import Loss
    from ckptkit.rules.planner import Taken

SCHEMA = "ckptkit.edit/1"
SHOWN = 20  # maximum number of printed lines about lost entries


@dataclass(frozen=True)
class Request:
    """A parsed command that writes: inputs, output, options, and the form of its report."""

    alone: ClassVar[bool] = True  # False for the requests of a batch

    sources: tuple[str, ...]
    dst: str | None
    options: Options
    like: str | None = None
    workers: int | None = None
    scheduler: str | None = None
    as_json: bool = False
    quiet: bool = False

    def run(
        self,
        *steps: Callable[[Checkpoint], Checkpoint],
        key: str | None = None,
        keep_format: bool = True,
        source: Checkpoint | None = None,
        lost: Sequence[Loss] = (),
    ) -> tuple[Conversion, Sequence[Loss]]:
        """Read the source, apply the steps and write the result.

        Return the conversion and `lost`, the entries that were lost while reading.

        `source` is a checkpoint that is already open.
        """
        from ckptkit.api import convert

        options = replace(
            self.options,
            key=key,
            keep_format=keep_format,
            part_only=self.options.part_only and source is None,
            fork=self.workers is None,
        )
        if self.like is not None:
            from ckptkit.cli.model_class import expected
            from ckptkit.edits.rules import check_like

            shapes = expected(self.like)
            steps = (*steps, partial(check_like, expected=shapes, name=self.like))
        where = self.sources[-1] if source is None else source
        with self.prepared(options) as options:
            if self.dst == STREAM:
                return self._streamed(where, steps, options), lost
            return convert(where, self.dst, *steps, options=options), lost

    @contextmanager
    def prepared(self, options: Options) -> Iterator[Options]:
        """Open the workers and the progress bar. Yield the options with the workers and the bar."""
        with ExitStack() as stack:
            if not options.dry_run and (self.workers is not None or self.scheduler is not None):
                if is_url(self.dst):
                    render.warn("--workers and --scheduler do not apply to an output at a URL")
                else:
                    from ckptkit.run import workers

                    pool = stack.enter_context(workers.opened(self.workers, self.scheduler))
                    options = replace(options, executor=pool)
            if self.alone and (render.progress_asked or render.is_terminal(sys.stderr)):
                progress = stack.enter_context(render.Progress("writing"))
                options = replace(options, progress=progress)
            yield options

    def _streamed(
        self, source: str | Checkpoint, steps: Sequence[Any], options: Options
    ) -> Conversion:
        """Write to standard output.

        Raises UsageError if standard output is a terminal, if --json is given, or if the format has
        several files.
        """
        from shutil import copyfileobj

        from ckptkit.api import convert, streamed
        from ckptkit.core.errors import UsageError

        def copy(file: IO[bytes]) -> None:
            render.begun = True
            copyfileobj(file, sys.stdout.buffer)

        if sys.stdout is None or render.is_terminal(sys.stdout) or self.as_json:
            why = "already contains the object of --json" if self.as_json else "is a terminal"
            raise UsageError(f"standard output {why}", where=STREAM, hint="name a file")
        return streamed(lambda path: convert(source, path, *steps, options=options), STREAM, copy)


def report(done: Conversion, request: Request, lost: Sequence[Loss]) -> None:
    """Print lost entries and warnings, then the changes, then notes on entries that were not
    written."""
    from ckptkit.core.plan import Patch

    plan, rules = done.plan, done.checkpoint.reports
    dry_run, quiet = request.options.dry_run, request.quiet
    count = tensors(done.checkpoint, plan)
    if not quiet and (lost or done.warnings):
        print_messages(lost, done.warnings)
    if request.as_json:
        facts = {
            "schema": SCHEMA,
            "inputs": list(map(shown_url, request.sources)),
            "output": done.path,
            "format": done.format,
            "in_place": request.options.in_place,
            "dry_run": dry_run,
            "tensor_count": count,
            "size": plan.size,
            "done": list(done.notes),
            "copied": list(done.copied),
            "left_out": list(plan.notes),
            "warnings": list(done.warnings),
        }
        if lost:
            facts["lost"] = list(map(asdict, lost))
        if merged := coded(done.notes, ADAPTER):
            facts["adapters"] = [each.facts for each in merged]
        if rules:
            facts |= _rules_facts(rules)
        render.emit_json(facts)
    elif not quiet:
        verb, size = "would write" if dry_run else "wrote", render.size(plan.size)
        if isinstance(plan, Patch):
            size = f"{render.size(plan.written)} of {size} rewritten"
            verb = "kept" if plan.seal is None else "changed"
            verb = "would change" if dry_run else verb
        copied = [f"with {', '.join(done.copied)}"] if done.copied else []
        what = "; ".join((f"{render.plural(count, 'tensor')}, {size}", *done.notes, *copied))
        line = f"{verb} {done.path}: {what}"
        if done.path == STREAM:  # standard output contains the file itself
            render.note(line)
        else:
            render.emit_text(line)
        if dry_run:
            lines = flatten(map(_rules_lines, rules))
            render.emit_text(*lines, *str(plan).split("\n"))
    if not quiet and plan.notes:
        print_messages(notes=plan.notes)


def print_messages(
    lost: Sequence[Loss] = (), warnings: Iterable[str] = (), notes: Iterable[str] = ()
) -> None:
    """On standard error, print lost entries, warnings, and notes on entries that were not
    written."""
    for line in (*what_was_lost(lost), *warnings):
        render.warn(line)
    for line in notes:
        render.note(line)


def what_was_lost(lost: Sequence[Loss]) -> list[str]:
    lines = [f"lost: {each.path or '(root)'} ({each.what}): {each.why}" for each in lost[:SHOWN]]
    more = len(lost) - SHOWN
    return [*lines, f"lost: {more:,} more (--json lists them)"] if more > 0 else lines


def tensors(checkpoint: Checkpoint, plan: Plan | Patch) -> int:
    """Return the number of written tensors. Count each name of a tied tensor.

    If the plan contains no number of tensors, return the number of weights. If it is also ambiguous
    which tensors are weights, return the number of all tensors.
    """
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


# Reports of rule steps


def _rules_lines(report: RulesReport) -> Iterator[str]:
    """Yield the report of one `rules` step, with two lines for each rule."""
    matched = [f"{done.matched:,}" for done in report.rules if done.matched]
    yield (
        f"step {report.step}, rules: {' + '.join(matched) or '0'} of {report.keys:,} keys taken, "
        f"{report.kept:,} kept; {report.made:,} written"
    )
    origins = []
    for taken in report.rules:
        sizes = _sizes(taken)
        yield f"  {taken.number}  {taken.rule.text or taken.rule}"
        made = render.plural(taken.made, "tensor")
        if len(taken.forms) == 1:
            made += " " + next(iter(taken.forms))
        text = f"{taken.matched:,} -> {made}, {render.size(taken.bytes)} {taken.how}"
        if taken.dropped:
            text += f", {taken.dropped:,} elements dropped"
        if taken.zeros:
            text += f", {taken.zeros:,} zeros"
        if sizes:
            text += "   " + " ".join(f"{word}={size}" for word, size in sizes.items())
        yield f"     {text}"
        known = [word for word in taken.origins if word in sizes]
        origins += [f"{word}={sizes[word]} ({taken.origins[word]})" for word in known]
    if origins:
        yield f"  sizes: {'  '.join(dict.fromkeys(origins))}"
    yield f"  reversible: {report.reversible or 'yes'}"


def _sizes(taken: Taken) -> dict[str, str]:
    """Map the name of each size to its values, such as ``64``, ``64..128`` or ``64|128``."""
    from ckptkit.rules.notation import REST

    found: dict[str, list[str]] = {}
    for (word, _), sizes in taken.sizes.items():
        if not word.startswith(REST):
            low, high = min(sizes), max(sizes)
            found.setdefault(word, []).append(str(low) if low == high else f"{low}..{high}")
    return {word: "|".join(parts) for word, parts in found.items()}


def _rules_facts(reports: Sequence[RulesReport]) -> dict[str, Any]:
    """Return the reports of rule steps for --json."""
    why = [report.reversible for report in reports if report.reversible]
    rules = [
        {
            "step": report.step,
            "rule": done.number,
            "text": done.rule.text or str(done.rule),
            "matched": done.matched,
            "made": done.made,
            "nbytes": done.bytes,
            "how": done.how,
            "dropped": done.dropped,
            "zeros": done.zeros,
            "sizes": _sizes(done),
        }
        for report in reports
        for done in report.rules
    ]
    return {"rules": rules, "reversible": not why, "not_reversible": why[0] if why else None}
