"""The tree of `inspect --tree`: every value at its place, and bars of the parameters.

Names are split at their dots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckptkit.analysis.columns import sentence
from ckptkit.analysis.shares import Share, parts
from ckptkit.analysis.summary import plain
from ckptkit.analysis.view_model import value_text
from ckptkit.cli.bars import horizontal_bars
from ckptkit.cli.narrow import NARROWEST, shortened
from ckptkit.cli.render import escape, plural, terminal_width
from ckptkit.core.tree import Global, Node, Object, Pairs, SetNode, key_text, type_name, walk
from ckptkit.core.weights import as_tensor
from ckptkit.pickles.trust import describe

BAR, SHORT_BAR = 20, 10  # characters
WIDE, MEDIUM = 110, 72  # characters of a terminal from which on there are such bars
ALIGNED = 100  # characters of a line that numbers are aligned behind where there is no terminal


@dataclass(eq=False)
class TreeLine:
    """A line: a value or a common prefix of names (``layers.``), with the parameters below it."""

    label: str
    text: str = ""
    parent: TreeLine | None = None
    children: list[TreeLine] = field(default_factory=list)
    groups: dict[str, TreeLine] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    is_group: bool = False

    def add(self, entry: TreeLine) -> TreeLine:
        entry.parent = self
        self.children.append(entry)
        return entry

    def group(self, label: str) -> TreeLine:
        """Return the entry of the names that start with `label`, added if new."""
        found = self.groups.get(label)
        if found is None:
            found = self.groups[label] = self.add(TreeLine(label, is_group=True))
        return found

    def count(self, parameters: int) -> None:
        """Count one more tensor, here and in all parents."""
        entry: TreeLine | None = self
        while entry is not None:
            entry.tensors += 1
            entry.parameters += parameters
            entry = entry.parent


def tree(
    root: Node,
    shares: Collection[Share],
    chosen: Callable[[Share], bool] | None = None,
    sort: str = "file",
) -> Iterator[str]:
    """Yield the lines of the tree.

    `shares` are those of all tensors; those that are `chosen` are shown, with their parents and
    without sibling values.
    """
    top = _grown(root, iter(shares), chosen)
    rows = list(_rows(top, sort, chosen is not None))
    total = top.parameters if chosen is None else sum(share.parameters for share in shares)
    width = terminal_width()
    bar = _bar_length(width)
    digits = len(f"{total:,}")
    room = _room(rows, width, bar + digits + 12 if bar else digits + 10)
    bars = horizontal_bars([total, *(entry.parameters for entry, _ in rows)], bar)
    next(bars)
    for (entry, line), drawn in zip(rows, bars, strict=True):
        numbers = _numbers(entry.parameters, total, digits) if entry.parameters else ""
        if width is not None:
            line = shortened(line, room if numbers else max(NARROWEST, width - 1))
        yield f"{line:<{room}}  {numbers}  {drawn}".rstrip() if numbers else line


def _numbers(parameters: int, total: int, digits: int) -> str:
    """Format parameters and share: `` 4,096 1.5%``"""
    share = parameters / total
    return f"{parameters:>{digits},}  {f'{share:.1%}' if share >= 0.0005 else '<0.1%':>6}"


def _bar_length(width: int | None) -> int:
    """Return the length of the bars that fit in a terminal of this width."""
    if width is None or width >= WIDE:
        return BAR
    return SHORT_BAR if width >= MEDIUM else 0


def _room(rows: list[tuple[TreeLine, str]], width: int | None, others: int) -> int:
    """Return the characters left for labels, before the numbers."""
    longest = max((len(line) for entry, line in rows if entry.parameters), default=0)
    return min(longest, ALIGNED if width is None else max(NARROWEST, width - others - 1))


def _rows(top: TreeLine, sort: str, filtered: bool) -> Iterator[tuple[TreeLine, str]]:
    """Yield the entries in order, with their lines. A group of one name gets no line of its own."""
    orders: dict[str, Callable[[TreeLine], Any]] = {
        "size": lambda e: -e.parameters,
        "name": lambda e: e.label,
    }
    waiting = [(top, "", 0)]
    while waiting:
        entry, prefix, depth = waiting.pop()
        if filtered and not entry.tensors:
            continue
        below = [child for child in entry.children if child.tensors or not filtered]
        if entry.is_group and len(below) == 1:
            waiting.append((below[0], prefix + entry.label, depth))
            continue
        text = plural(entry.tensors, "tensor") if entry.is_group else entry.text
        if depth:
            between = " " if entry.is_group else ": "
            text = f"{'  ' * depth}{prefix}{entry.label}{between}{text}"
        yield entry, text
        if sort in orders:
            below.sort(key=orders[sort])
        waiting += [(child, "", depth + 1) for child in reversed(below)]


def _grown(root: Node, shares: Iterator[Share], chosen: Callable[[Share], bool] | None) -> TreeLine:
    """Build the entries of all nodes, without descending into values and tensors."""
    shown = 1 << 62
    above: list[tuple[TreeLine, Node]] = []  # the entry of each level, and the node
    for path, node in walk(root):
        depth = len(path)
        if depth > shown:
            continue
        shown = 1 << 62
        value = plain(node)
        share = next(shares) if value is None and as_tensor(node) is not None else None
        text = value_text(*value) if value is not None else _node(node, share)
        del above[depth:]
        entry = _placed(above[-1], path[-1], text) if above else TreeLine("", text)
        above.append((entry, node))
        if value is not None or share is not None:
            shown = depth
        if share is not None:
            deque(islice(shares, len(share.row.inside)), maxlen=0)  # what a subclass is made of
            if chosen is None or chosen(share):
                entry.count(share.parameters)
    return above[0][0]


def _placed(above: tuple[TreeLine, Node], key: Node, text: str) -> TreeLine:
    """Return a new entry below a parent; names with dots go into groups."""
    parent, holder = above
    if not isinstance(key, str) or "." not in key or not isinstance(holder, (dict, Pairs)):
        return parent.add(TreeLine(escape(key_text(key)), text))
    *groups, last = parts(key)
    for group in groups:
        parent = parent.group(f"{escape(group)}.")
    return parent.add(TreeLine(escape(last), text))


def _node(node: Node, share: Share | None) -> str:
    if share is not None:
        made = f" ({escape(describe(node.callable))})" if isinstance(node, Object) else ""
        return sentence(share.row) + made
    if isinstance(node, Object):
        return escape(describe(node.callable))
    if isinstance(node, Global):
        return f"the class or function {escape(str(node))}"
    if isinstance(node, Pairs):
        return f"mapping of {len(node.pairs):,}, its keys repeated or not hashable"
    if isinstance(node, SetNode):
        return f"set of {len(node.items):,}"
    return f"{type_name(node)} of {len(node):,}"
