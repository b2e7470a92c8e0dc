"""The program: a tree, the panels beside it, and the command that shows the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, Static, Tree
from textual.widgets.tree import TreeNode

from ckptkit.analysis.shares import Branch
from ckptkit.analysis.view_model import Listing
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import escape
from ckptkit.diagnosis.cause import Cause
from ckptkit.formats.format import steady
from ckptkit.views.browser import panels
from ckptkit.views.browser.contents import MEASURES, SORTS, Contents, below, values

OPENED = 200  # tensors found up to which all of them are in sight
AT_ONCE = 500  # lines that are put below a node; the rest follows on request


class More(NamedTuple):
    """A node that stands for children not added yet."""

    branches: list[Branch]


Data = Branch | Listing | More


class Browser(App[str]):
    """The browser; its result is the command that shows the screen, if left with that key.

    ``diagnose`` finds what keeps the file from loading; it runs in a thread, on request.
    """

    CSS_PATH = "app.tcss"
    TITLE = "ckptkit"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("v", "values", "Values"),
        Binding("colon", "slice", "Slice", key_display=":"),
        Binding("d", "diagnosis", "Doctor"),
        Binding("o", "overview", "Totals"),
        Binding("s", "sort", "Sort"),
        Binding("m", "measure", "Unit"),
        Binding("c", "command", "Command"),
        Binding("q", "quit", "Quit"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, contents: Contents, diagnose: Callable[[], tuple[Cause, ...]]) -> None:
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
        yield Static(panels.heading(self.contents), id="heading")
        with Horizontal(id="main"):
            with Vertical(id="side"):
                yield Input(id="entry")
                yield Tree[Data]("", id="tree")
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

    def _say(self, text: Text, command: str) -> None:
        self.query_one("#panel", Static).update(text)
        self.query_one("#beside", VerticalScroll).scroll_home(animate=False)
        self.command = command
        self.query_one("#command", Static).update(Text(f"$ {escape(command)}"))

    # The tree, of which only what was opened is there

    def _plant(self, branch: Branch) -> None:
        self.shown = branch
        found = f"{branch.tensors:,} found" if self.words else "everything"
        label = Text(found, "bold").append(
            f"  {panels.amount(branch, self.measure)}", "not bold cyan"
        )
        root = self.names.reset(label, branch).root
        self._fill(root, branch)
        if not self.words:
            for listed in self.contents.listed():
                if listed.rows:
                    label = Text(listed.title).append(f"  {listed.things:,}", "dim")
                    root.add_leaf(label, data=listed)
        root.expand()
        if self.words and branch.tensors <= OPENED:
            self._open(root)

    def _open(self, root: TreeNode[Data]) -> None:
        """Expand all nodes below a node."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if isinstance(node.data, Branch) and node.data.children:
                if not node.children:
                    self._fill(node, node.data)
                node.expand()
                waiting += node.children

    def _fill(self, node: TreeNode[Data], branch: Branch) -> None:
        self._add(node, below(branch, self.sort, self.measure))

    def _add(self, node: TreeNode[Data], branches: list[Branch]) -> None:
        above = node.data.path if isinstance(node.data, Branch) else ""
        total = getattr(self.contents.tree, self.measure)
        for branch in branches[:AT_ONCE]:
            label = panels.label(branch, above, total, self.measure)
            node.add(label, data=branch, allow_expand=bool(branch.children))
        if len(branches) > AT_ONCE:
            rest = branches[AT_ONCE:]
            node.add_leaf(
                Text(f"{len(rest):,} more: enter shows {min(len(rest), AT_ONCE)}", "italic"),
                data=More(rest),
            )

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Data]) -> None:
        node = event.node
        if isinstance(node.data, Branch) and not node.children:
            self._fill(node, node.data)

    def on_tree_node_selected(self, event: Tree.NodeSelected[Data]) -> None:
        node = event.node
        if isinstance(node.data, More) and node.parent is not None:
            parent, rest = node.parent, node.data.branches
            node.remove()
            self._add(parent, rest)
        elif isinstance(node.data, Branch) and not node.data.children:
            self.action_values()

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Data]) -> None:
        self.index = ""
        self._describe(event.node.data)

    def _describe(self, data: Data | None) -> None:
        if isinstance(data, Listing):
            self._say(panels.listed(data), self.contents.command("inspect", "--tree"))
        elif isinstance(data, Branch) and data is not self.shown:
            is_tensor = data.share is not None and not data.children
            text = (
                panels.tensor(data, self.contents, None)
                if is_tensor
                else panels.group(data, self.contents)
            )
            self._say(text, self.contents.shows(data))
        elif isinstance(data, Branch):
            self.action_overview()

    # What the keys do

    def action_overview(self) -> None:
        command = (
            self.contents.finds(self.words) if self.words else self.contents.command("inspect")
        )
        self._say(panels.overview(self.contents), command)

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.notify(
            f"sorted by {self.sort}" if self.sort != "file" else "in the order of the file",
            timeout=2,
        )
        self._plant(self.shown)

    def action_measure(self) -> None:
        self.measure = MEASURES[1 - MEASURES.index(self.measure)]
        self._plant(self.shown)

    def action_diagnosis(self) -> None:
        command = self.contents.command("doctor")
        self._say(Text("looking...", "dim"), command)
        self.run_worker(
            partial(self._diagnosed, command), thread=True, exclusive=True, group="beside"
        )

    def _diagnosed(self, command: str) -> None:
        try:
            text = panels.diagnosis(self.diagnose())
        except CkptkitError as error:
            text = Text(escape(str(error)), "yellow")
        self.call_from_thread(self._late, command, text)

    def _late(self, command: str, text: Text) -> None:
        """Show a result that a thread found, if it is still wanted."""
        if command == self.command:
            self._say(text, command)

    def action_values(self) -> None:
        node = self.names.cursor_node
        branch = node.data if node is not None else None
        if not isinstance(branch, Branch) or branch.share is None:
            self.notify("choose a tensor to see its values", timeout=2)
            return
        command = self.contents.shows(branch, self.index)
        self._say(panels.tensor(branch, self.contents, "reading..."), command)
        self.run_worker(
            partial(self._read, branch, self.index, command),
            thread=True,
            exclusive=True,
            group="beside",
        )

    def _read(self, branch: Branch, index: str, command: str) -> None:
        assert branch.share is not None
        try:
            with steady(self.contents.checkpoint.source, remote=True):
                seen = values(branch.share, index, self._columns())
            text = panels.tensor(branch, self.contents, seen)
        except CkptkitError as error:
            text = panels.tensor(branch, self.contents, error.message)
        self.call_from_thread(self._late, command, text)

    def _columns(self) -> int:
        """Return the number of columns that fit."""
        return max(1, (self.query_one("#panel").size.width - 8) // panels.CELL)

    def action_search(self) -> None:
        self._ask("search: words of names, shapes, dtypes", self.words)

    def action_slice(self) -> None:
        self._ask("a part of the tensor: 0, :, 3:7", self.index, "slice")

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
        """Leave the input field or the search."""
        if self.entry.has_focus and self.entry.has_class("slice"):
            self.entry.display = False
        elif self.entry.display or self.words:
            self.words = self.entry.value = ""
            self.entry.display = False
            self._plant(self.contents.tree)
        self.names.focus()

    def action_command(self) -> None:
        self.exit(self.command)
