"""Print the tree of `inspect --tree`: all values, with bars for the parameters.

The tree splits names at dots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ckptkit.analysis.columns import sentence
from ckptkit.analysis.shares import Share, parts
from ckptkit.analysis.summary import plain
from ckptkit.analysis.view_model import value_text
from ckptkit.cli.render import NARROWEST, escape, horizontal_bars, plural, shortened, terminal_width
from ckptkit.core.tree import Global, Node, Object, Pairs, SetNode, key_text, type_name, walk
from ckptkit.core.weights import as_tensor
from ckptkit.pickles.judge import describe

BAR, SHORT_BAR = 20, 10  # width of a bar, in characters
WIDE, MEDIUM = 110, 72  # minimum width of a terminal for BAR and for SHORT_BAR
ALIGNED = 100  # without a terminal, maximum width of the column of labels


@dataclass(eq=False)
class TreeLine:
    """A line of the tree, for a value or for a prefix that several names share (``layers.``)."""

    label: str
    text: str = ""
    parent: TreeLine | None = None
    is_group: bool = False
    children: list[TreeLine] = field(default_factory=list)
    groups: dict[str, TreeLine] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0

    def add(self, label: str, text: str = "", is_group: bool = False) -> TreeLine:
        self.children.append(TreeLine(label, text, self, is_group))
        return self.children[-1]


def tree(
    root: Node, shares: Collection[Share], chosen: set[int] | None = None, sort: str = "file"
) -> Iterator[str]:
    """Yield the lines of the tree.

    `shares` contains a Share for each tensor. `chosen` contains the ``id()`` of each TensorRow to
    show. If `chosen` is given, show only these tensors and their parents.
    """
    top = _grown(root, iter(shares), chosen)
    rows = list(_rows(top, sort, chosen is not None))
    total = top.parameters if chosen is None else sum(share.parameters for share in shares)
    width, digits = terminal_width(), len(f"{total:,}")
    bar = BAR
    if width is not None and width < WIDE:
        bar = SHORT_BAR if width >= MEDIUM else 0
    others = (
        bar + digits + 12 if bar else digits + 10
    )  # number of characters of a line in addition to its label
    room = ALIGNED if width is None else max(NARROWEST, width - others - 1)
    room = min(max((len(line) for entry, line in rows if entry.parameters), default=0), room)
    bars = horizontal_bars([total, *(entry.parameters for entry, _ in rows)], bar)
    next(bars)
    for (entry, line), drawn in zip(rows, bars, strict=True):
        if width is not None:
            line = shortened(line, room if entry.parameters else max(NARROWEST, width - 1))
        if entry.parameters:
            share = entry.parameters / total
            percent = f"{share:.1%}" if share >= 0.0005 else "<0.1%"
            line = f"{line:<{room}}  {entry.parameters:>{digits},}  {percent:>6}  {drawn}".rstrip()
        yield line


def _rows(top: TreeLine, sort: str, filtered: bool) -> Iterator[tuple[TreeLine, str]]:
    """Yield each entry with its line, in the order `sort`. If a group contains only one entry,
    yield one line with both labels."""
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
        if sort == "size":
            below.sort(key=lambda each: -each.parameters)
        elif sort == "name":
            below.sort(key=lambda each: each.label)
        waiting += [(child, "", depth + 1) for child in reversed(below)]


def _grown(root: Node, shares: Iterator[Share], chosen: set[int] | None) -> TreeLine:
    """Build the entries of all nodes. Do not descend into values and tensors."""
    shown = 1 << 62
    above: list[tuple[TreeLine, Node]] = []  # entry and node of each parent level
    for path, node in walk(root):
        depth = len(path)
        if depth > shown:
            continue
        shown = 1 << 62
        value = plain(node)
        share = next(shares) if value is None and as_tensor(node) is not None else None
        text = value_text(*value) if value is not None else _node(node, share)
        del above[depth:]
        entry = _placed(*above[-1], path[-1], text) if above else TreeLine("", text)
        above.append((entry, node))
        if value is not None or share is not None:
            shown = depth
        if share is not None:
            # skip the inner tensors of a tensor subclass
            deque(islice(shares, len(share.row.inside)), maxlen=0)
            counted: TreeLine | None = entry
            while counted is not None and (chosen is None or id(share.row) in chosen):
                counted.tensors += 1
                counted.parameters += share.parameters
                counted = counted.parent
    return above[0][0]


def _placed(parent: TreeLine, holder: Node, key: Node, text: str) -> TreeLine:
    """Add an entry below a parent and return the entry. Put names with dots into nested groups."""
    if not isinstance(key, str) or "." not in key or not isinstance(holder, (dict, Pairs)):
        return parent.add(escape(key_text(key)), text)
    *groups, last = parts(key)
    for group in groups:
        label = f"{escape(group)}."
        if label not in parent.groups:
            parent.groups[label] = parent.add(label, is_group=True)
        parent = parent.groups[label]
    return parent.add(escape(last), text)


def _node(node: Node, share: Share | None) -> str:
    if share is not None:
        made = f" ({escape(describe(node.callable))})" if isinstance(node, Object) else ""
        return sentence(share.row) + made
    if isinstance(node, Object):
        return escape(describe(node.callable))
    if isinstance(node, Global):
        return f"the class or function {escape(str(node))}"
    if isinstance(node, Pairs):
        return f"mapping of {len(node.pairs):,}, with repeated or unhashable keys"
    if isinstance(node, SetNode):
        return f"set of {len(node.items):,}"
    return f"{type_name(node)} of {len(node):,}"
