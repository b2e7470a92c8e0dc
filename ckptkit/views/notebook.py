"""HTML for notebooks: the texts of the terminal in folded tables.

No script, no color, nothing is fetched. Strings from a file are escaped twice: as on the terminal,
and for HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as escape_html
from itertools import islice
from typing import cast

from ckptkit.analysis.diff import Diff
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.fold import Item, fold
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import and_more, escape, plural, shape, size
from ckptkit.core.tree import LEAVES, Node, children, key_text, type_name
from ckptkit.core.weights import Weights

ROWS = 200  # of a table
LONG = 80  # characters of a value


def text(words: str) -> str:
    """Return text escaped for HTML, also for use in attributes."""
    return escape_html(escape(words))


def page(heading: str, parts: Iterable[str]) -> str:
    """Return a heading and the HTML below it."""
    return f"<div><strong>{text(heading)}</strong>{''.join(parts)}</div>"


def line(words: str) -> str:
    return f"<div>{text(words)}</div>"


def table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], opened: bool = True
) -> str:
    """Return a table below a title that folds it; only the first rows of a very long one."""
    cells = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:ROWS])
    head = "".join(f'<th style="text-align:left">{text(each)}</th>' for each in headers)
    more = line(and_more(len(rows) - ROWS).strip()) if len(rows) > ROWS else ""
    return (
        f"<details{' open' if opened else ''}><summary>{text(title)}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>{more}</details>"
    )


def _cell(words: str) -> str:
    return f'<td style="text-align:left">{text(words)}</td>'


def folded(names: Iterable[str]) -> list[tuple[str]]:
    """Fold rows whose names differ only in an index."""
    return [(row.label,) for row in fold(Item(name, (), 0) for name in names)]


def html(value: object) -> str:
    """Return a Checkpoint or a Diff as HTML."""
    return checkpoint(value) if isinstance(value, Checkpoint) else diff(cast(Diff, value))


def checkpoint(ck: Checkpoint) -> str:
    """Return the weights, folded as on the terminal, and the other entries of the root."""
    try:
        weights = ck.selection
    except CkptkitError:  # the heading says it
        weights = None
    return _checkpoint(ck.heading, ck.root, weights)


def diff(found: Diff) -> str:
    """Return tables of renamed, missing, unexpected, mismatched and changed keys."""
    pairs = (*found.renamed, *found.reshaped)
    old, new = {pair.old for pair in pairs}, {pair.new for pair in pairs}
    missing = [name for name in found.missing if name not in new]
    unexpected = [name for name in found.unexpected if name not in old]
    renamed = [(pair.old, pair.new, f"{pair.confidence:.0%}", pair.why) for pair in pairs]
    kinds = [
        (name, f"{a.dtype} {shape(a.shape)}", f"{b.dtype} {shape(b.shape)}")
        for name, a, b in found.mismatched
    ]
    changed = [(name, f"{each.count:,}", str(each.largest)) for name, each in found.changed]
    tables: tuple[tuple[str, int, tuple[str, ...], Sequence[Sequence[str]]], ...] = (
        ("renamed", len(pairs), ("in A", "in B", "sure", "by"), renamed),
        ("missing (not in A)", len(missing), ("name",), folded(missing)),
        ("unexpected (only in A)", len(unexpected), ("name",), folded(unexpected)),
        ("mismatched", len(kinds), ("name", "A", "B"), kinds),
        ("changed", len(changed), ("name", "elements", "largest difference"), changed),
    )
    shown = [
        table(f"{title}: {count:,}", headers, rows)
        for title, count, headers, rows in tables
        if count
    ]
    return page(found.summary, (*shown, *(line(f"hint: {each}") for each in found.advice)))


def _checkpoint(heading: str, root: Node, weights: Weights | None) -> str:
    parts = [] if weights is None else [_weights(weights.tensors)]
    inside = key_text(weights.path[0]) if weights is not None and weights.path else None
    named = ((key_text(key), node) for key, node in islice(children(root), ROWS))
    others = [(name, _value_text(node)) for name, node in named if name != inside]
    if others and (weights is None or weights.path):
        parts += [table("other entries" if parts else "entries", ("entry", "value"), others)]
    return page(heading, parts)


def _weights(tensors: dict[str, Tensor]) -> str:
    rows = fold(
        Item(name, (str(each.dtype), shape(each.shape), each.device), each.nbytes)
        for name, each in tensors.items()
    )
    cells = [
        (row.label, row.columns[0], row.columns[1], size(row.nbytes), row.columns[2])
        for row in rows
    ]
    return table(
        plural(len(tensors), "tensor"), ("name", "dtype", "shape", "size", "device"), cells
    )


def _value_text(node: Node) -> str:
    """Return a short value as it is, anything else as its type."""
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
