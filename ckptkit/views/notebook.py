"""Format checkpoints and diffs as HTML tables for notebooks.

The HTML contains the output of the terminal, without scripts, colors and links. Strings from a file
are first escaped like in the terminal, and then escaped for HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as escape_html
from itertools import islice
from typing import cast

from ckptkit.analysis import columns, view_model
from ckptkit.analysis.columns import Table
from ckptkit.analysis.diff import Diff
from ckptkit.analysis.summary import TensorRow, summarize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import and_more, escape, plural, shape
from ckptkit.core.tree import LEAVES, Node, children, key_text, type_name

ROWS = 200  # maximum number of rows of a table
LONG = 80  # maximum number of characters of a value


def text(words: str) -> str:
    """Escape a string for HTML text and for attributes of HTML elements."""
    return escape_html(escape(words))


def page(heading: str, parts: Iterable[str]) -> str:
    """Return the HTML of a heading, followed by `parts`."""
    return f"<div><strong>{text(heading)}</strong>{''.join(parts)}</div>"


def line(words: str) -> str:
    return f"<div>{text(words)}</div>"


def table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], opened: bool = True
) -> str:
    """Return a table with at most ROWS rows. A click on the title hides or shows the table."""
    cells = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:ROWS])
    head = "".join(f'<th style="text-align:left">{text(each)}</th>' for each in headers)
    more = line(and_more(len(rows) - ROWS).strip()) if len(rows) > ROWS else ""
    return (
        f"<details{' open' if opened else ''}><summary>{text(title)}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>{more}</details>"
    )


def _cell(words: str) -> str:
    return f'<td style="text-align:left">{text(words)}</td>'


def html(value: object) -> str:
    """Return a Checkpoint or a Diff as HTML."""
    return checkpoint(value) if isinstance(value, Checkpoint) else diff(cast(Diff, value))


def checkpoint(ck: Checkpoint) -> str:
    """Return a table of the weights, and a table of the other root entries.

    Like in the terminal, the table of the weights has one row for similar tensors.
    """
    weights = columns.tables(_weights(ck))
    parts = [_table(found, plural(found.total, "tensor")) for found in weights]
    if others := _others(ck):
        parts.append(table("other entries" if parts else "entries", ("entry", "value"), others))
    return page(ck.heading, parts)


def diff(found: Diff) -> str:
    """Return the summary of a diff, the tables of differences and the notes."""
    report = view_model.of_diff(found)
    shown = [_table(each, f"{each.title.rstrip(':')}: {each.total:,}") for each in report.tables]
    return page(report.title, (*shown, *map(line, report.notes)))


def _weights(ck: Checkpoint) -> list[TensorRow]:
    """Return the tensors of the weights. If the weights are ambiguous, return an empty list."""
    try:
        return [row for row in summarize(ck).rows if row.name is not None]
    except CkptkitError:
        return []


def _others(ck: Checkpoint) -> list[tuple[str, str]]:
    """List the root entries without the weights. Return (key, short description) for each entry."""
    try:
        weights = ck.selection
    except CkptkitError:  # the heading shows this error
        weights = None
    if weights is not None and not weights.path:
        return []
    inside = key_text(weights.path[0]) if weights is not None else None
    named = ((key_text(key), node) for key, node in islice(children(ck.root), ROWS))
    return [(name, _short(node)) for name, node in named if name != inside]


def _table(found: Table, title: str) -> str:
    return table(title, found.headers, found.rows)


def _short(node: Node) -> str:
    """Return a short description of a value. For containers and objects, return the type."""
    if isinstance(node, Tensor):
        return f"tensor, {node.dtype} {shape(node.shape)}"
    if isinstance(node, str):
        return repr(node[:LONG]) + ("..." if len(node) > LONG else "")
    if isinstance(node, int) and not isinstance(node, bool):
        return f"{node:,}" if abs(node) >> 64 == 0 else f"an integer of {node.bit_length():,} bits"
    if isinstance(node, (bool, float, complex, type(None))):
        return repr(node)
    if isinstance(node, LEAVES):
        return type_name(node)
    return f"{type_name(node)} of {sum(1 for _ in children(node)):,}"
