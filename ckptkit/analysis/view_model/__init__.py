"""The view model of inspect, diff and stats: headings, columns, rows and remarks, each decided
once.

In: the facts of `analysis`. Out: texts and tables, which the terminal, the notebook, the page and
the browser print, and JSON values. To add a fact about tensors, add a line to `tensors.FACTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of escaped text below headings; the columns named in `right` are right-aligned.

    `things` is the number of things in it, which may be more than the folded rows.
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    things: int = 0

    def without_empty(self) -> Table:
        """Return the table without the columns that are empty in every row."""
        used = [n for n in range(len(self.headers)) if any(row[n] for row in self.rows)]
        if len(used) == len(self.headers):
            return self
        headers = tuple(self.headers[n] for n in used)
        return self._replace(
            headers=headers, rows=[tuple([row[n] for n in used]) for row in self.rows]
        )
