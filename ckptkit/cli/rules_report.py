"""Reports of --dry-run for steps of rules, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptkit.cli import render
from ckptkit.core.text import flatten
from ckptkit.edits.rules import Done, Report
from ckptkit.rules.notation import REST


def lines_of(report: Report) -> Iterator[str]:
    """Yield what a step of rules does, two lines for each rule."""
    matched = [f"{done.taken.matched:,}" for done in report.rules if done.taken.matched]
    taken = " + ".join(matched) or "0"
    yield (
        f"step {report.step}, rules: {taken} of {report.keys:,} keys taken, {report.kept:,} kept; "
        f"{report.made:,} written"
    )
    for done in report.rules:
        yield f"  {done.taken.number}  {done.taken.rule.text or done.taken.rule}"
        yield f"     {_done(done)}"
    values = list(dict.fromkeys(flatten(map(_size_lines, report.rules))))
    if values:
        yield f"  sizes: {'  '.join(values)}"
    yield f"  reversible: {report.reversible or 'yes'}"


def _done(done: Done) -> str:
    taken = done.taken
    made = render.plural(taken.made, "tensor")
    if len(done.forms) == 1:
        made += " " + next(iter(done.forms))
    text = f"{taken.matched:,} -> {made}, {render.size(done.bytes)} {done.how}"
    if taken.dropped:
        text += f", {taken.dropped:,} elements dropped"
    if taken.zeros:
        text += f", {taken.zeros:,} zeros"
    sizes = [f"{word}={text}" for word, text in _sizes(done).items()]
    return text + (f"   {' '.join(sizes)}" if sizes else "")


def _sizes(done: Done) -> dict[str, str]:
    """Words with their sizes; those that differ with a label as they are written."""
    found: dict[str, list[str]] = {}
    for (word, _), sizes in done.taken.sizes.items():
        if not word.startswith(REST):
            found.setdefault(word, []).append(_range(sizes))
    return {word: "|".join(parts) for word, parts in found.items()}


def _range(sizes: set[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low}..{high}"


def _size_lines(done: Done) -> Iterator[str]:
    sizes = _sizes(done)
    for word, origin in done.taken.origins.items():
        if word in sizes:
            yield f"{word}={sizes[word]} ({origin})"


def facts_of(reports: Sequence[Report]) -> dict[str, Any]:
    """Steps of rules for --json."""
    why = [report.reversible for report in reports if report.reversible]
    rules: list[dict[str, Any]] = []
    for report in reports:
        rules += [{"step": report.step, **_facts(done)} for done in report.rules]
    return {"rules": rules, "reversible": not why, "not_reversible": why[0] if why else None}


def _facts(done: Done) -> dict[str, Any]:
    taken = done.taken
    return {
        "rule": taken.number,
        "text": taken.rule.text or str(taken.rule),
        "matched": taken.matched,
        "made": taken.made,
        "nbytes": done.bytes,
        "how": done.how,
        "dropped": taken.dropped,
        "zeros": taken.zeros,
        "sizes": _sizes(done),
    }
