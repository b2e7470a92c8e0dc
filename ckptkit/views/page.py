"""Build the report, an HTML page with the facts as JSON and a script that shows the facts.

The page loads no other file and works offline. The content security policy of the page contains the
digests of the script and the style. Browsers therefore run no other code, even if a tensor name
contains code. The script creates text nodes, never markup. Strings of a checkpoint are escaped like
in the terminal. The page therefore contains no invisible characters, and no characters that change
the direction of text.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape as html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit import quantized
from ckptkit.analysis import columns, moved
from ckptkit.analysis.diff import Diff
from ckptkit.analysis.shares import OPTIMIZER, Share, branches, shares
from ckptkit.analysis.summary import Summary, summarize
from ckptkit.analysis.view_model import entries, listings
from ckptkit.core import __version__
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.text import escape, shape
from ckptkit.core.tree import join
from ckptkit.diagnosis import content
from ckptkit.diagnosis.cause import Facts
from ckptkit.views.treemap import arranged

if TYPE_CHECKING:
    from ckptkit.compute.tallies import Tally

SCHEMA = "ckptkit.page/1"
LISTINGS = ("values", "objects", "metadata")
LISTED = 400  # maximum number of values, of objects, and of metadata entries on the page
BINS = 32
LARGEST = 1e300  # larger numbers are omitted, because calculations in the script would overflow
MOST = 1 << 53  # maximum exact integer in JavaScript
# The page contains these scripts in this order inside one function. Each script uses definitions of
# earlier scripts.
SCRIPTS = (
    "treemap.js", "table.js", "facts.js", "map.js", "tensors.js", "differences.js", "report.js",
)  # fmt: skip
_MARK = re.compile(r"\{\{(\w+)\}\}")
_UNSAFE = re.compile("[<>&\u2028\u2029]")


def page(facts: dict[str, Any]) -> bytes:
    """Return the page that shows `facts`, encoded as UTF-8."""

    def digest(text: str) -> str:
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    style, script = static("report.css"), "(() => {\n" + "\n".join(map(static, SCRIPTS)) + "})();\n"
    names = " and ".join(file["name"] for file in facts["files"])
    given = {
        "title": html(names),
        "policy": f"default-src 'none'; script-src {digest(script)}; "
        f"style-src {digest(style)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": embedded(facts),
    }
    return _MARK.sub(lambda mark: given[mark[1]], static("report.html")).encode()


def embedded(value: Any) -> str:
    """Return a value as JSON inside ``<script>``. Characters with a meaning in HTML are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def static(name: str) -> str:
    """Return the content of a file in the folder ``static``."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class PageFile:
    """A checkpoint on the page. ``tallies`` maps the index of a tensor to its statistics."""

    checkpoint: Checkpoint
    summary: Summary
    shares: list[Share]
    tallies: dict[int, Tally] = field(default_factory=dict)


def page_file(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> PageFile:
    """Summarize a checkpoint.

    If `progress` is not None, also read all tensors and compute statistics. `progress` is called
    with the number of bytes read.
    """
    summary = summarize(checkpoint)
    tallies = {}
    if progress is not None:
        from ckptkit.analysis.stats import statistics

        numbers = {id(row): number for number, row in enumerate(summary.rows)}
        rows = statistics(summary.rows, progress=progress).rows
        tallies = {numbers[id(row.source)]: row.tally for row in rows}
    return PageFile(checkpoint, summary, shares(summary, checkpoint.root), tallies)


def facts(
    a: PageFile, b: PageFile | None = None, diff: Diff | None = None, *, everything: bool = False
) -> dict[str, Any]:
    """Return the JSON data of a page about one file, or about two files and their differences.

    If `diff` compares all tensors and values, `everything` is True. If `diff` compares only the
    weights, `everything` is False.
    """
    rows = [(share, a.tallies.get(number)) for number, share in enumerate(a.shares)]
    files = [_file(each) for each in (a, b) if each is not None]
    found: dict[str, Any] = {"schema": SCHEMA, "ckptkit": __version__, "files": files}
    if b is not None and diff is not None:
        found["diff"] = _differences(rows, a, b, diff, everything)
        values = entries(diff)
        found["diff"]["entries"] = {"count": values.total, "rows": values.rows[:LISTED]}
    placed = treemap([share for share, _ in rows], min(a.summary.totals.unused_nbytes, MOST))
    return {**found, "tensors": tensors(rows, valued=bool(a.tallies)), "treemap": placed}


def _file(seen: PageFile) -> dict[str, Any]:
    summary, whole = seen.summary, seen.checkpoint
    found = quantized.find(whole)
    # Users open a page on other machines too, so the causes must not mention this machine.
    what = Facts(summary.path, summary, whole.root, quantized=found, for_here=False)
    return {
        "name": escape(summary.path),
        "format": summary.format,
        "size": summary.size,
        "weights": None if summary.weights is None else escape(join(summary.weights)),
        "totals": {name: min(number, MOST) for name, number in summary.totals._asdict().items()},
        "optimizer": sum(share.nbytes for share in seen.shares if share.role == OPTIMIZER),
        "tied": sum(share.same is not None for share in seen.shares),
        "causes": [
            {
                "level": cause.level,
                "title": escape(cause.title),
                "explanation": escape(cause.explanation),
                "command": None if cause.command is None else escape(cause.command),
            }
            for cause in content.causes(what)
        ],
        "warnings": list(map(escape, summary.warnings)),
        **{
            name: {"count": listing.total, "rows": listing.rows[:LISTED]}
            for name, listing in zip(LISTINGS, listings(summary), strict=True)
        },
    }


# The JSON contains one list per property of the tensors. 100,000 tensors take a few megabytes.

# For COLUMNS, the lists contain indices into a table of strings. For MARKS, the JSON contains dicts
# instead of lists, because few tensors have these properties.
COLUMNS = tuple(fact for fact in columns.BRIEF if fact.title and fact is not columns.SIZE)
MARKS = tuple(fact for fact in columns.BRIEF if not fact.title)


def _number(table: dict[str, int], value: str) -> int:
    """Return the index of a string in a table. If the string is new, add it to the table."""
    return table.setdefault(value, len(table))


Row = tuple[Share, "Tally | None"]  # a tensor and its statistics


def tensors(rows: Sequence[Row], *, valued: bool) -> dict[str, Any]:
    """Return the properties of all tensors as JSON values.

    A property is a list with one item per tensor. A rare property is a dict that maps the index of
    a tensor to the value. `valued` is whether statistics were computed.
    """
    shares = [share for share, _ in rows]
    found: dict[str, Any] = {
        "name": [escape(share.label) for share in shares],
        "place": {
            number: escape(share.place)
            for number, share in enumerate(shares)
            if share.place != share.label
        },
        "facts": {fact.name: fact.title for fact in COLUMNS},
    }
    texts = {fact.name: [fact.text(fact.value(share.row)) for share in shares] for fact in COLUMNS}
    texts["role"] = [share.role for share in shares]
    for name, cells in texts.items():
        table: dict[str, int] = {}
        found[name] = [_number(table, cell) for cell in cells]
        found[f"{name}s"] = list(table)
    found["parameters"] = [min(share.parameters, MOST) for share in shares]
    found["nbytes"] = [min(share.nbytes, MOST) for share in shares]
    found["stored"] = [min(share.row.nbytes, MOST) for share in shares]
    found["same"] = {n: share.same for n, share in enumerate(shares) if share.same is not None}
    for fact in MARKS:
        marks = {n: fact.text(fact.value(share.row)) for n, share in enumerate(shares)}
        found[fact.name] = {number: mark for number, mark in marks.items() if mark}
    tallies = {n: _numbers(tally) for n, (_, tally) in enumerate(rows) if tally is not None}
    return {**found, "valued": valued, "stats": tallies}


def _numbers(tally: Tally) -> dict[str, Any]:
    """Return statistics, rounded to six digits. Infinite and complex numbers become None."""
    histogram = tally.histogram.at_most(BINS)
    found: dict[str, Any] = {
        "count": tally.count,
        "zeros": tally.zeros,
        "nan": tally.nan,
        "inf": tally.infinite,
    }
    if tally.finite:
        found |= {"norm": tally.norm, "std": tally.std, "min": tally.low, "max": tally.high}
        found["mean"] = None if isinstance(tally.mean, complex) else tally.mean
    if histogram.counts:
        edges = histogram.edges
        found |= {"from": edges[0], "to": edges[-1], "bins": histogram.counts}
    for name, value in found.items():
        if isinstance(value, float):
            found[name] = _plain(value)
    return found


def treemap(shares: Sequence[Share], unused: int) -> dict[str, Any]:
    """Return the tree of tensor names, and the layout of the treemap."""
    root, labels = branches(shares), dict[str, int]()
    rows = {id(share): number for number, share in enumerate(shares)}
    found: dict[str, list[int]] = {"label": [], "parent": [], "row": []}
    numbers: dict[int, int] = {}  # maps the id of each branch to a number, in ascending order
    waiting = [(root, -1)]  # -1: no parent
    while waiting:
        branch, parent = waiting.pop()
        number = numbers[id(branch)] = len(numbers)
        found["label"].append(_number(labels, escape(branch.label)))
        found["parent"].append(parent)
        found["row"].append(-1 if branch.share is None else rows[id(branch.share)])
        waiting += [(child, number) for child in reversed(branch.children.values())]
    bytes_placed = arranged(root, numbers, "nbytes", unused)
    placed = arranged(root, numbers, "parameters")
    return {
        "label": found["label"],
        "labels": list(labels),
        "parent": found["parent"],
        "row": found["row"],
        "nbytes": bytes_placed,
        "parameters": None if placed == bytes_placed else placed,
    }


# Two files

UNCOMPARED = "not compared"
STATES = (
    moved.SAME, "missing", "unexpected", "mismatched", "renamed", moved.CHANGED, UNCOMPARED,
)  # fmt: skip


def _differences(
    rows: list[Row], a: PageFile, b: PageFile, diff: Diff, everything: bool
) -> dict[str, Any]:
    """Return the state of each tensor, and facts about the matching tensor in `b`.

    `rows` contains the tensors of `a`. This function appends to `rows` the tensors that only `b`
    has. The state of a tensor is a string such as "renamed". If `everything` is True, `diff` also
    compares tensors outside the weights by their paths.
    """
    pairs = (*diff.renamed, *diff.reshaped)
    states = {
        **dict.fromkeys(diff.unexpected, "unexpected"),
        **{each.name: "mismatched" for each in diff.mismatched},
        **{each.name: moved.CHANGED for each in diff.changed},
        **{pair.old: "renamed" for pair in pairs},
    }
    paired = {pair.new for pair in pairs}
    ours, theirs = (_compared(seen, everything) for seen in (a, b))
    found = [UNCOMPARED] * len(a.shares)
    for name, number in ours.items():
        found[number] = states.get(name, moved.SAME)
    for name in diff.missing:
        if name not in paired:
            share = b.shares[theirs[name]]
            rows.append((share._replace(same=None), b.tallies.get(theirs[name])))
            found.append("missing")
    other = {ours[name]: facts for name, facts in _others(diff, a, b, ours, theirs)}
    differences = {
        ours[name]: found
        for name, found in diff.changed
        if a.shares[ours[name]].row.tensor.dtype.kind in ("float", "complex")
    }
    compared = [
        moved.ComparedTensor(share.place, state, differences.get(number))
        for number, ((share, _), state) in enumerate(zip(rows, found, strict=True))
        if state != UNCOMPARED
    ]
    parts = moved.parts(compared) if diff.values_compared else []
    layers = moved.layers(compared)
    if not diff.values_compared:
        layers = [each for each in layers if each.states.keys() != {moved.SAME}]
    return {
        "states": STATES,
        "state": [STATES.index(each) for each in found],
        "other": other,
        "parts": list(map(_part, parts)) if len(parts) > 1 else [],
        "layers": list(map(_part, layers)),
        "values": diff.values_compared,
        "advice": list(map(escape, diff.advice)),
        "uncompared": list(map(escape, diff.uncompared)),
    }


def _part(part: moved.MovedPart) -> dict[str, Any]:
    """Return the changes in a group of tensors as JSON values."""
    return {
        "label": escape(part.label),
        "pattern": escape(part.pattern),
        "states": part.states,
        "relative": _plain(part.relative),
        "blocks": [[escape(name), _plain(change)] for name, change in part.blocks],
    }


def _plain(number: float | None) -> float | None:
    """Round a number to six digits. Return None for NaN and for numbers above `LARGEST`."""
    if number is None or not abs(number) < LARGEST:  # also true for NaN
        return None
    return float(f"{number:.6g}")


def _compared(seen: PageFile, everything: bool) -> dict[str, int]:
    """Map the names of compared tensors to their row numbers.

    If `everything` is True, also map the paths of tensors outside the weights.
    """
    rows = [share.row for share in seen.shares]
    found = {row.name: number for number, row in enumerate(rows) if row.name is not None}
    for number, row in enumerate(rows if everything else ()):
        if row.name is None:
            found.setdefault(row.place, number)
    return found


def _others(
    diff: Diff, a: PageFile, b: PageFile, ours: dict[str, int], theirs: dict[str, int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in `a`, facts about the matching tensor in `b`) for each tensor that differs."""
    for name, _, kind, *_ in diff.mismatched:
        yield name, {"dtype": kind.dtype, "shape": shape(kind.shape)}
    for pair in (*diff.renamed, *diff.reshaped):
        found: dict[str, Any] = {
            "name": escape(pair.new),
            "confidence": round(pair.confidence, 2),
            "why": pair.why,
        }
        if pair.a != pair.b:
            found |= {"dtype": pair.b.dtype, "shape": shape(pair.b.shape)}
        yield pair.old, found

    for name, change in diff.changed:
        found = {
            "changed": change.count,
            "largest": _plain(change.largest),
            "relative": _plain(change.relative),
            "cosine": _plain(change.cosine),
        }
        if (tally := b.tallies.get(theirs[name])) is not None:
            found["norm"] = _numbers(tally).get("norm")
        yield name, found
