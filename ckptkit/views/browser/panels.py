"""The panels beside the tree, as styled text. Strings of a file are escaped and never markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.text import Text

from ckptkit.analysis import columns
from ckptkit.analysis.shares import OPTIMIZER, Branch
from ckptkit.analysis.slices import show
from ckptkit.analysis.view_model import Listing, described
from ckptkit.core.text import escape, plural, size
from ckptkit.diagnosis.cause import ERROR, WARNING, Cause
from ckptkit.views.browser.contents import Contents, Values

LISTED = 200
BINS, BAR = 16, 30
CELL = 10  # characters of a number and the space before it
EIGHTHS = " ▏▎▍▌▋▊▉█"
STYLES = {ERROR: "bold red", WARNING: "bold yellow"}


def bar(part: float, width: int) -> str:
    """Return a bar of at most so many characters."""
    whole, eighths = divmod(round(8 * width * min(1.0, part)), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def amount(branch: Branch, measure: str) -> str:
    return f"{branch.parameters:,}" if measure == "parameters" else size(branch.nbytes)


def label(branch: Branch, above: str, total: int, measure: str) -> Text:
    """Return the label of a tree node: its name below `above`, and its share."""
    name = branch.path[len(above) :].lstrip(".") or branch.label or "(empty)"
    made = Text(escape(name), no_wrap=True)
    if branch.share is not None and not branch.children:
        facts = columns.brief(branch.share.row)
        made.append(f"  {facts['dtype']} {facts['shape']}", "dim")
    else:
        made.append(f"  {plural(branch.tensors, 'tensor')}", "dim")
    value = getattr(branch, measure)
    if value and total:
        made.append(f"  {amount(branch, measure)} ", "cyan")
        made.append(bar(value / total, 10), "blue")
    return made


def heading(contents: Contents) -> Text:
    made = Text(no_wrap=True).append(escape(contents.path), "bold")
    return made.append(f"  {described(contents.summary)}", "dim")


def overview(contents: Contents) -> Text:
    """Return totals, and their parts."""
    summary, totals = contents.summary, contents.summary.totals
    optimizer = sum(share.nbytes for share in contents.shares if share.role == OPTIMIZER)
    facts = [
        ("format", summary.format),
        ("on disk", size(summary.size)),
        (
            "weights at",
            ""
            if summary.weights is None
            else escape(".".join(map(str, summary.weights))) or "the root",
        ),
        ("tensors", f"{totals.tensors:,}"),
        ("parameters", f"{totals.parameters:,}"),
        ("bytes of tensors", size(totals.nbytes)),
        ("bytes of storages", size(totals.storage_nbytes)),
        ("in no tensor", size(totals.unused_nbytes) if totals.unused_nbytes else ""),
        ("optimizer", size(optimizer) if optimizer else ""),
        (
            "ties",
            f"{n:,}" if (n := sum(share.same is not None for share in contents.shares)) else "",
        ),
    ]
    made = _facts(facts)
    for title in ("dtype", "device"):
        sums: Counter[str] = Counter()
        for share in contents.shares:
            sums[columns.brief(share.row)[title]] += share.nbytes
        _bars(made, title, sums, sum(sums.values()))
    for line in summary.warnings:
        made.append(f"\nwarning: {escape(line)}", "yellow")
    return made


def _bars(made: Text, title: str, sums: Counter[str], total: int) -> None:
    made.append(f"\n{title}\n", "bold")
    for name, value in sums.most_common(12):
        made.append(f"  {escape(name):<12} {size(value):>9}  ")
        made.append(f"{bar(value / total, BAR) if value else ''}\n", "blue")


def _facts(pairs: Iterable[tuple[str, str]]) -> Text:
    made = Text()
    for name, value in pairs:
        if value:
            made.append(f"{name:<18}", "dim").append(f"{value}\n")
    return made


def group(branch: Branch, contents: Contents) -> Text:
    """Return the panel of a branch."""
    whole = contents.tree
    made = Text().append(f"{escape(branch.path)}\n\n", "bold")
    made.append_text(
        _facts(
            [
                ("tensors", f"{branch.tensors:,}"),
                ("parameters", f"{branch.parameters:,}{_of(branch.parameters, whole.parameters)}"),
                ("bytes", f"{size(branch.nbytes)}{_of(branch.nbytes, whole.nbytes)}"),
            ]
        )
    )
    children = sorted(branch.children.values(), key=lambda child: -child.nbytes)[:12]
    if len(children) > 1:
        _bars(
            made,
            "bytes below",
            Counter({child.label or "(empty)": child.nbytes for child in children}),
            branch.nbytes,
        )
    return made


def _of(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    if not share:
        return ""
    return f"  ({share:.1%})" if share >= 0.0005 else "  (<0.1%)"


def tensor(branch: Branch, contents: Contents, seen: Values | str | None) -> Text:
    """Return the panel of a tensor, with its values.

    `seen` is None if values were not requested, a text if they cannot be shown.
    """
    share = branch.share
    assert share is not None
    made = Text().append(f"{escape(share.label)}\n\n", "bold")
    same = "" if share.same is None else escape(contents.shares[share.same].label)
    facts = [
        *columns.details(share.row),
        ("the same as", same),
        ("place", escape(share.place) if share.place != share.label else ""),
    ]
    if isinstance(seen, str):
        made.append(f"{escape(seen)}\n\n", "yellow")
    elif seen is not None:
        made.append_text(_values(seen)).append("\n")
    made.append_text(_facts(facts))
    return (
        made
        if seen is not None
        else made.append("\nv shows values, : a part of them", "dim italic")
    )


def _values(seen: Values) -> Text:
    made = Text().append(f"{show(seen.corner)}\n", "bold")
    many = [pick for pick in seen.corner if not pick.single]
    if not seen.cells:
        return made.append("no elements", "dim")
    down, across = (many[0] if len(many) > 1 else None), (many[-1] if many else None)
    side = len(str(down.start + down.size * down.step)) if down else 0
    if across is not None:
        heads = (f"{across.start + n * across.step:>{CELL}}" for n in range(across.size))
        made.append(f"{'':{side}}{''.join(heads)}\n", "dim")
    for number, row in enumerate(seen.cells):
        made.append(f"{down.start + number * down.step:>{side}}" if down else "", "dim")
        made.append(f"{''.join(f'{cell(value):>{CELL}}' for value in row)}\n")
    if seen.tally is None:
        return made.append(
            f"\n{show(seen.picks)} is too large for statistics here; see `show --stats`",
            "dim",
        )
    return made.append_text(_statistics(seen))


def _statistics(seen: Values) -> Text:
    tally = seen.tally
    assert tally is not None
    made = Text()
    if tally.finite:
        named = (
            ("mean", tally.mean),
            ("std", tally.std),
            ("min", tally.low),
            ("max", tally.high),
            ("norm", tally.norm),
        )
        made.append(f"\n{show(seen.picks)}: {plural(tally.count, 'value')}\n", "bold")
        shown = [f"{name} {cell(value)}" for name, value in named if value is not None]
        made.append(f"{', '.join(shown[:2])}\n{', '.join(shown[2:])}\n")
    odd = (("zeros", tally.zeros), ("NaN", tally.nan), ("infinite", tally.infinite))
    if any(count for _, count in odd):
        made.append(", ".join(f"{count:,} {name}" for name, count in odd if count) + "\n")
    histogram = tally.histogram.at_most(BINS)
    most = max(histogram.counts, default=0) or 1
    for edge, count in zip(histogram.edges, histogram.counts, strict=False):
        made.append(f"{cell(edge):>{CELL}} ", "dim").append(bar(count / most, BAR), "blue")
        made.append(f" {count:,}\n" if count else "\n", "dim")
    return made


def cell(value: Any) -> str:
    """Format a number with three digits."""
    if isinstance(value, complex):
        return f"{value.real:.2g}{value.imag:+.2g}j"
    return str(value) if isinstance(value, (bool, int)) else f"{value:.3g}"


def diagnosis(causes: Sequence[Cause]) -> Text:
    """Return what keeps the file from loading, with the commands that fix it."""
    if not causes:
        return Text("nothing found that keeps it from loading\n", "green")
    made = Text()
    for cause in causes:
        made.append(f"{cause.level}  ", STYLES.get(cause.level, "bold blue"))
        made.append(f"{escape(cause.title)}\n", "bold").append(
            f"{escape(cause.explanation)}\n", "dim"
        )
        if cause.command is not None:
            made.append(f"  {escape(cause.command)}\n", "cyan")
        made.append("\n")
    return made


def listed(found: Listing) -> Text:
    made = Text().append(f"{found.title}\n\n", "bold")
    for name, text in found.rows[:LISTED]:
        made.append(f"{name}: ", "dim").append(f"{text}\n")
    if len(found.rows) > LISTED:
        made.append(f"and {len(found.rows) - LISTED:,} more, which `inspect --tree` lists", "dim")
    return made
