"""Browse a checkpoint in the terminal.

The browser shows a tree of names, a panel with details, and the command that prints the panel.
ckptkit reads only the headers of the file until the user asks for values. The browser uses the
library textual. Strings of the file are escaped and never interpreted as markup.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, Static, Tree
from textual.widgets.tree import TreeNode

from ckptkit.analysis import columns
from ckptkit.analysis.columns import Table
from ckptkit.analysis.shares import OPTIMIZER, Branch, Share, branches, joined, shares
from ckptkit.analysis.slices import Picks, parse, plane, select, show
from ckptkit.analysis.summary import Summary, summarize
from ckptkit.analysis.view_model import described, listings, measured, numbers
from ckptkit.compute import tallies
from ckptkit.compute.tallies import Tally
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import argument, escape, plural, shell_command, size
from ckptkit.diagnosis.cause import ERROR, WARNING, Cause
from ckptkit.formats.format import steady
from ckptkit.quantized import dequantized_view

ROWS = 16  # maximum number of rows of values to show
COUNTED = 1 << 20  # maximum number of elements of a slice for which statistics are computed
SORTS = ("file", "size", "name")
MEASURES = ("parameters", "nbytes")


@dataclass
class TreeContents:
    """An open checkpoint. `path` and `key` are the arguments that the user typed."""

    checkpoint: Checkpoint
    path: str
    key: str | None = None
    summary: Summary = field(init=False)
    shares: list[Share] = field(init=False)
    tree: Branch = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint = dequantized_view(self.checkpoint)
        self.summary = summarize(self.checkpoint)
        self.shares = shares(self.summary, self.checkpoint.root)
        self.tree = branches(self.shares)

    def search(self, words: str) -> Branch:
        """Return the tree of tensors whose path, shape, dtype or device contains all words."""
        searched = words.lower().split()
        if not searched:
            return self.tree
        found = []
        for share in self.shares:
            facts = columns.brief(share.row)
            # Do not search the sizes. A search for "b" would match the unit of each size.
            del facts[columns.SIZE.name]
            text = " ".join([share.place, *facts.values()]).lower()
            if all(word in text for word in searched):
                found.append(share)
        return branches(found)

    def command(self, name: str, *words: str) -> str:
        """Return a shell command about this file that the user can copy."""
        chosen = self.summary.chosen
        return shell_command(("ckptkit", name, *chosen, *argument(self.path), *words))

    def shows(self, branch: Branch, index: str = "") -> str:
        """Return the command that shows a branch, or a slice of a tensor."""
        if branch is self.tree:
            return self.command("inspect")
        if branch.share is not None and not branch.children:
            return self.command("show", branch.share.label, *([index] if index else []))
        return self.command("inspect", "--tree", "--keys", f"{glob.escape(branch.path)}.*")

    def finds(self, words: str) -> str:
        """Return the command that lists the tensors whose names match a search."""
        return self.command("inspect", "--keys", f"*{'*'.join(map(glob.escape, words.split()))}*")


def below(branch: Branch, sort: str, measure: str) -> list[Branch]:
    """Return one branch for each child of `branch`, sorted.

    If a child is not a tensor and has only one child, return a branch below it instead: the first
    branch that is a tensor or has several children.
    """
    found = [joined(child) for child in branch.children.values()]
    if sort == "size":
        found.sort(key=lambda each: -getattr(each, measure))
    elif sort == "name":
        found.sort(key=lambda each: each.path)
    return found


@dataclass(frozen=True)
class ValuePanel:
    """The first elements of a slice, and statistics of the slice.

    For a large slice, `tally` is None.
    """

    picks: Picks
    corner: Picks
    cells: list[list[Any]]
    tally: Tally | None


def values(share: Share, index: str = "", columns: int = 8) -> ValuePanel:
    """Read the first elements of a slice, in at most ROWS rows and `columns` columns.

    For a slice with at most COUNTED elements, also compute statistics. Raises CkptkitError if
    the tensor cannot be read, and UsageError if `index` is invalid for the shape of the tensor.
    """
    tensor = share.row.tensor
    picks = parse(index, tensor.shape)
    corner = plane(picks, ROWS, columns)
    cells = tallies.numbers(select(tensor, corner))
    chosen = select(tensor, picks)
    tally = None
    if chosen.numel <= COUNTED:
        tally = Tally()
        for part in tallies.parts(chosen):
            tally.add(tallies.tally(part))
    rows = next((pick.size for pick in corner if not pick.single), 1) if cells.ndim > 1 else 1
    return ValuePanel(picks, corner, cells.reshape(rows, -1).tolist() if cells.size else [], tally)


LISTED = 200
BINS, BAR = 16, 30
CELL = 10  # number of characters per table column
EIGHTHS = " ▏▎▍▌▋▊▉█"
STYLES = {ERROR: "bold red", WARNING: "bold yellow"}


def bar(part: float, width: int) -> str:
    """Return a bar of at most `width` characters. `part` is between 0 and 1 (full width)."""
    whole, eighths = divmod(round(8 * width * min(1.0, part)), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def amount(branch: Branch, measure: str) -> str:
    return f"{branch.parameters:,}" if measure == "parameters" else size(branch.nbytes)


def node_label(branch: Branch, above: str, total: int, measure: str) -> Text:
    """Return the label of a tree node. `above` is the path of the parent node.

    The label contains the name relative to `above`, the size, and a bar for the fraction of
    `total`.
    """
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


def heading(contents: TreeContents) -> Text:
    made = Text(no_wrap=True).append(escape(contents.path), "bold")
    return made.append(f"  {described(contents.summary)}", "dim")


def overview(contents: TreeContents) -> Text:
    """Return the panel with the totals of the file."""
    summary, totals = contents.summary, contents.summary.totals
    weights = ""
    if summary.weights is not None:
        weights = escape(".".join(map(str, summary.weights))) or "the root"
    optimizer = sum(share.nbytes for share in contents.shares if share.role == OPTIMIZER)
    tied = sum(share.same is not None for share in contents.shares)
    made = _facts(
        ("format", summary.format),
        ("on disk", size(summary.size)),
        ("weights at", weights),
        ("tensors", f"{totals.tensors:,}"),
        ("parameters", f"{totals.parameters:,}"),
        ("bytes of tensors", size(totals.nbytes)),
        ("bytes of storages", size(totals.storage_nbytes)),
        ("in no tensor", size(totals.unused_nbytes) if totals.unused_nbytes else ""),
        ("optimizer", size(optimizer) if optimizer else ""),
        ("ties", f"{tied:,}" if tied else ""),
    )
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


def _facts(*pairs: tuple[str, str]) -> Text:
    made = Text()
    for name, value in pairs:
        if value:
            made.append(f"{name:<18}", "dim").append(f"{value}\n")
    return made


def group(branch: Branch, contents: TreeContents) -> Text:
    """Return the panel with the totals of a branch."""

    def share(part: int, whole: int) -> str:
        if not part:
            return ""
        return f"  ({part / whole:.1%})" if part / whole >= 0.0005 else "  (<0.1%)"

    whole = contents.tree
    made = Text().append(f"{escape(branch.path)}\n\n", "bold")
    made.append_text(
        _facts(
            ("tensors", f"{branch.tensors:,}"),
            ("parameters", f"{branch.parameters:,}{share(branch.parameters, whole.parameters)}"),
            ("bytes", f"{size(branch.nbytes)}{share(branch.nbytes, whole.nbytes)}"),
        )
    )
    children = sorted(branch.children.values(), key=lambda child: -child.nbytes)[:12]
    if len(children) > 1:
        sums = Counter({child.label or "(empty)": child.nbytes for child in children})
        _bars(made, "bytes below", sums, branch.nbytes)
    return made


def tensor(branch: Branch, contents: TreeContents, seen: ValuePanel | str | None) -> Text:
    """Return the panel with the details of a tensor.

    `seen` contains the values or an error message. If the user did not ask for values, `seen` is
    None.
    """
    share = branch.share
    assert share is not None
    made = Text().append(f"{escape(share.label)}\n\n", "bold")
    if isinstance(seen, str):
        made.append(f"{escape(seen)}\n\n", "yellow")
    elif seen is not None:
        made.append_text(_values(seen)).append("\n")
    same = "" if share.same is None else escape(contents.shares[share.same].label)
    place = escape(share.place) if share.place != share.label else ""
    facts = (*columns.details(share.row), ("the same as", same), ("place", place))
    made.append_text(_facts(*facts))
    if seen is None:
        made.append("\npress v for the values, : for a slice", "dim italic")
    return made


def _values(seen: ValuePanel) -> Text:
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
            f"\n{show(seen.picks)} is too large for statistics here; use `show --stats`",
            "dim",
        )
    named = measured(numbers(seen.tally, "float"))
    made.append(f"\n{show(seen.picks)}: {plural(seen.tally.count, 'value')}\n", "bold")
    made.append("".join(f"{each}\n" for each in named))
    histogram = seen.tally.histogram.at_most(BINS)
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
    """Return the panel with the reasons why the file does not load, and the commands that help."""
    if not causes:
        return Text("no problem found\n", "green")
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


def listed(found: Table) -> Text:
    made = Text().append(f"{found.title}\n\n", "bold")
    for name, text in found.rows[:LISTED]:
        made.append(f"{name}: ", "dim").append(f"{text}\n")
    if len(found.rows) > LISTED:
        made.append(f"and {len(found.rows) - LISTED:,} more; `inspect --tree` lists all", "dim")
    return made


OPENED = 200  # maximum number of search results for which the browser expands the whole tree
AT_ONCE = 500  # maximum number of children that are added to a node at once


def _key(key: str, action: str, name: str, about: str, shown: str | None = None) -> Binding:
    """Return a key binding. The footer shows `name`. The list of keys shows `about`."""
    return Binding(key, action, name, key_display=shown, tooltip=about, show=key != "escape")


MOVES = (
    ("↑ ↓", "go to the previous or next line"),
    ("→", "expand the line, or go to its first child"),
    ("←", "collapse the line, or go to its parent"),
    ("enter", "expand or collapse the line, or show values"),
)


# The data of a tree node. A list contains children that are not in the tree yet.
Data = Branch | Table | list[Branch]


class NameTree(Tree[Data]):
    """The tree of names. The keys left and right behave like in a file manager."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "open", "Open", show=False),
        Binding("left", "close", "Close", show=False),
    ]

    def action_open(self) -> None:
        """Expand the node. If the node is already expanded, go to its first child."""
        node = self.cursor_node
        if node is None or not node.allow_expand:
            return
        if node.is_expanded and node.children:
            self.move_cursor(node.children[0])
        else:
            node.expand()

    def action_close(self) -> None:
        """Collapse the node. If the node is already collapsed, go to its parent."""
        node = self.cursor_node
        if node is not None and node.is_expanded and node.allow_expand and not node.is_root:
            node.collapse()
        else:
            self.action_cursor_parent()


class Browser(App[str]):
    """The terminal program. The key c quits, and returns the command that prints the panel.

    If the user presses d, ``diagnose`` runs in a thread and returns the reasons why the file does
    not load.
    """

    CSS_PATH = "static/browser.tcss"
    TITLE = "ckptkit"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = [
        _key("slash", "search", "Find", "find by name, shape, dtype, device"),
        _key("v", "values", "Values", "read and show the values of the tensor"),
        _key("colon", "slice", "Slice", "show a slice of the tensor, such as 0, :, 3:7", ":"),
        _key("d", "diagnosis", "Doctor", "show why the file does not load"),
        _key("o", "overview", "Totals", "show the totals of the file"),
        _key("s", "sort", "Sort", "sort by size, by name, or by the order in the file"),
        _key("m", "measure", "Unit", "count parameters, or bytes"),
        _key("c", "command", "Command", "quit, and print the command for this panel"),
        _key("question_mark", "keys", "Keys", "show this list", "?"),
        _key("q", "quit", "Quit", "quit"),
        _key("escape", "leave", "Back", "close the search or this list", "esc"),
    ]

    def __init__(self, contents: TreeContents, diagnose: Callable[[], tuple[Cause, ...]]) -> None:
        super().__init__()
        self.contents = contents
        self.diagnose = diagnose
        self.shown = contents.tree
        self.words = ""
        self.index = ""
        self.sort, self.measure = SORTS[0], MEASURES[0]
        if not contents.tree.parameters:
            self.measure = MEASURES[1]
        self.command = contents.command("inspect")

    def compose(self) -> ComposeResult:
        yield Static(heading(self.contents), id="heading")
        with Horizontal(id="main"):
            with Vertical(id="side"):
                yield Input(id="entry")
                yield NameTree("", id="tree")
            with VerticalScroll(id="beside"):
                yield Static(id="panel")
        yield Static(id="command")
        footer = Footer()
        footer.compact = True
        yield footer

    def on_mount(self) -> None:
        self.entry.display = False
        self.names.guide_depth = 2
        self._plant(self.contents.tree)
        self.names.focus()
        self.action_overview()

    @property
    def names(self) -> Tree[Data]:
        found: Tree[Data] = self.query_one("#tree", Tree)
        return found

    @property
    def entry(self) -> Input:
        return self.query_one("#entry", Input)

    def _show(self, text: Text, command: str) -> None:
        self.query_one("#panel", Static).update(text)
        self.query_one("#beside", VerticalScroll).scroll_home(animate=False)
        self.command = command
        self.query_one("#command", Static).update(Text(f"$ {escape(command)}"))

    # The tree of names. Expanding a node adds its children.

    def _plant(self, branch: Branch) -> None:
        self.shown = branch
        found = f"{branch.tensors:,} found" if self.words else "everything"
        label = Text(found, "bold").append(f"  {amount(branch, self.measure)}", "not bold cyan")
        root = self.names.reset(label, branch).root
        self._add(root, below(branch, self.sort, self.measure))
        if not self.words:
            for listed in listings(self.contents.summary):
                if listed.rows:
                    label = Text(listed.title).append(f"  {listed.total:,}", "dim")
                    root.add_leaf(label, data=listed)
        root.expand()
        if self.words and branch.tensors <= OPENED:
            self._open(root)

    def _replant(self) -> None:
        """Fill the tree again, in the current order and unit. Keep the cursor and the expanded
        nodes."""
        before = list(self._branches())
        expanded = {branch.path for node, branch in before if node.is_expanded}
        chosen = [branch.path for node, branch in before if node is self.names.cursor_node]
        self._plant(self.shown)
        self._open(self.names.root, expanded)
        for node, branch in self._branches():
            if branch.path in chosen:
                self.call_after_refresh(self.names.move_cursor, node)

    def _branches(self) -> Iterator[tuple[TreeNode[Data], Branch]]:
        """Yield the nodes that show a branch."""
        waiting = [self.names.root]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            if isinstance(node.data, Branch):
                yield node, node.data

    def _open(self, root: TreeNode[Data], paths: Container[str] | None = None) -> None:
        """Expand a node and the nodes below it, or only the nodes whose path is in `paths`."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if not isinstance(node.data, Branch) or not node.data.children:
                continue
            if paths is None or node.data.path in paths:
                if not node.children:
                    self._add(node, below(node.data, self.sort, self.measure))
                node.expand()
                waiting += node.children

    def _add(self, node: TreeNode[Data], branches: list[Branch]) -> None:
        above = node.data.path if isinstance(node.data, Branch) else ""
        total = getattr(self.contents.tree, self.measure)
        for branch in branches[:AT_ONCE]:
            label = node_label(branch, above, total, self.measure)
            node.add(label, data=branch, allow_expand=bool(branch.children))
        if len(branches) > AT_ONCE:
            rest = branches[AT_ONCE:]
            text = f"{len(rest):,} more: enter shows {min(len(rest), AT_ONCE)}"
            node.add_leaf(Text(text, "italic"), data=rest)

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Data]) -> None:
        node = event.node
        if isinstance(node.data, Branch) and not node.children:
            self._add(node, below(node.data, self.sort, self.measure))

    def on_tree_node_selected(self, event: Tree.NodeSelected[Data]) -> None:
        node = event.node
        if isinstance(node.data, list) and node.parent is not None:
            parent, rest = node.parent, node.data
            node.remove()
            self._add(parent, rest)
        elif isinstance(node.data, Branch) and not node.data.children:
            self.action_values()

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Data]) -> None:
        self.index = ""
        self._describe(event.node.data)

    def _describe(self, data: Data | None) -> None:
        if isinstance(data, Table):
            self._show(listed(data), self.contents.command("inspect", "--tree"))
        elif isinstance(data, Branch) and data is not self.shown:
            is_tensor = data.share is not None and not data.children
            text = tensor(data, self.contents, None) if is_tensor else group(data, self.contents)
            self._show(text, self.contents.shows(data))
        elif isinstance(data, Branch):
            self.action_overview()

    # Actions of the keys

    def action_overview(self) -> None:
        found = self.contents.finds(self.words) if self.words else self.contents.command("inspect")
        self._show(overview(self.contents), found)

    def action_keys(self) -> None:
        made = Text("keys\n\n", "bold")
        keys = [each for each in self.BINDINGS if isinstance(each, Binding)]
        pairs = [
            (each.key_display or each.key.replace("slash", "/"), each.tooltip) for each in keys
        ]
        for shown, about in (*MOVES, *pairs):
            made.append(f"{shown:<8}", "cyan").append(f"{about}\n")
        self._show(made, self.command)

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        how = "sorted by the order in the file" if self.sort == "file" else f"sorted by {self.sort}"
        self.notify(how, timeout=2)
        self._replant()

    def action_measure(self) -> None:
        self.measure = MEASURES[1 - MEASURES.index(self.measure)]
        self._replant()

    def _later(self, command: str, first: Text, find: Callable[[], Text]) -> None:
        """Show `first` and run `find` in a thread. Then show the result of `find`.

        If the user has opened another panel meanwhile, the result is not shown.
        """

        def work() -> None:
            self.call_from_thread(late, find())

        def late(text: Text) -> None:
            if command == self.command:
                self._show(text, command)

        self._show(first, command)
        self.run_worker(work, thread=True, exclusive=True, group="beside")

    def action_diagnosis(self) -> None:
        def find() -> Text:
            try:
                return diagnosis(self.diagnose())
            except CkptkitError as error:
                return Text(escape(str(error)), "yellow")

        self._later(self.contents.command("doctor"), Text("looking...", "dim"), find)

    def action_values(self) -> None:
        node = self.names.cursor_node
        branch = node.data if node is not None else None
        if not isinstance(branch, Branch) or branch.share is None:
            self.notify("select a tensor to see its values", timeout=2)
            return
        share, index = branch.share, self.index
        # the number of columns that fit into the panel
        across = max(1, (self.query_one("#panel").size.width - 8) // CELL)

        def find() -> Text:
            try:
                with steady(self.contents.checkpoint.source, remote=True):
                    seen = values(share, index, across)
                return tensor(branch, self.contents, seen)
            except CkptkitError as error:
                return tensor(branch, self.contents, error.message)

        first = tensor(branch, self.contents, "reading...")
        self._later(self.contents.shows(branch, index), first, find)

    def action_search(self) -> None:
        self._ask("search: words in names, shapes, dtypes", self.words)

    def action_slice(self) -> None:
        self._ask("a slice of the tensor: 0, :, 3:7", self.index, "slice")

    def _ask(self, what: str, value: str, name: str = "search") -> None:
        entry = self.entry
        entry.set_classes(name)
        entry.placeholder = what
        entry.display = True
        entry.value = value
        entry.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        is_slice = event.input.has_class("slice")
        event.input.display = bool(event.value) and not is_slice
        if is_slice:
            self.index = event.value
            self.action_values()
        else:
            self.words = event.value.strip()
            self._plant(self.contents.search(self.words))
            self.action_overview()
        self.names.focus()

    def action_leave(self) -> None:
        """Close the input field or the search."""
        if self.entry.has_focus and self.entry.has_class("slice"):
            self.entry.display = False
        elif self.entry.display or self.words:
            self.words = self.entry.value = ""
            self.entry.display = False
            self._plant(self.contents.tree)
        elif self.names.cursor_node is not None:
            self._describe(self.names.cursor_node.data)
        self.names.focus()

    def action_command(self) -> None:
        self.exit(self.command)
