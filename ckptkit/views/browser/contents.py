"""The data of the browser: the tree of tensors, other entries, and parts of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.analysis import columns
from ckptkit.analysis.shares import Branch, Share, grown, joined, shares
from ckptkit.analysis.slices import Picks, parse, plane, select
from ckptkit.analysis.summary import Summary, summarize
from ckptkit.analysis.view_model import Listing, listings
from ckptkit.compute import tallies
from ckptkit.compute.tallies import Tally
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.text import argument, shell_command
from ckptkit.quantized import look_through

ROWS = 16  # of a grid
COUNTED = 1 << 20  # elements that are read for statistics
SORTS = ("file", "size", "name")
MEASURES = ("parameters", "nbytes")
SPECIAL = "[]*?"


@dataclass
class Contents:
    """An open checkpoint, with `path` and `key` as the user typed them."""

    checkpoint: Checkpoint
    path: str
    key: str | None = None
    summary: Summary = field(init=False)
    shares: list[Share] = field(init=False)
    tree: Branch = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint = look_through(self.checkpoint)
        self.summary = summarize(self.checkpoint)
        self.shares = shares(self.summary, self.checkpoint.root)
        self.tree = grown(self.shares)

    def search(self, words: str) -> Branch:
        """Return the tree of tensors whose path, shape, dtype or device has all these words."""
        wanted = words.lower().split()
        return (
            self.tree
            if not wanted
            else grown(share for share in self.shares if _has(share, wanted))
        )

    def listed(self) -> list[Listing]:
        """Return the entries that are not tensors."""
        return list(listings(self.summary))

    def command(self, name: str, *words: str) -> str:
        """Return a command on this file, ready to paste."""
        chosen = self.summary.chosen
        return shell_command(("ckptkit", name, *chosen, *argument(self.path), *words))

    def shows(self, branch: Branch, index: str = "") -> str:
        """Return the command that shows a branch, or a part of a tensor."""
        if branch is self.tree:
            return self.command("inspect")
        if branch.share is not None and not branch.children:
            return self.command("show", branch.share.label, *([index] if index else []))
        return self.command("inspect", "--tree", "--keys", f"{escaped(branch.path)}.*")

    def finds(self, words: str) -> str:
        """Return the command that lists the tensors of a search, as far as it concerns names."""
        return self.command("inspect", "--keys", f"*{'*'.join(map(escaped, words.split()))}*")


def escaped(name: str) -> str:
    """Return a glob that matches only this name."""
    return "".join(f"[{char}]" if char in SPECIAL and char != "]" else char for char in name)


def _has(share: Share, words: Sequence[str]) -> bool:
    facts = columns.brief(share.row)
    del facts[columns.SIZE.name]  # its unit would match a letter
    text = " ".join([share.place, *facts.values()]).lower()
    return all(word in text for word in words)


def below(branch: Branch, sort: str, measure: str) -> list[Branch]:
    """Return the children of a branch, in order.

    A branch with a single child is replaced by that child.
    """
    found = [joined(child) for child in branch.children.values()]
    if sort == "size":
        found.sort(key=lambda each: -getattr(each, measure))
    elif sort == "name":
        found.sort(key=lambda each: each.path)
    return found


@dataclass(frozen=True)
class Values:
    """A corner of the selected part, and statistics of all of it; None if it is too large."""

    picks: Picks
    corner: Picks
    cells: list[list[Any]]
    tally: Tally | None


def values(share: Share, index: str = "", columns: int = 8) -> Values:
    """Read a corner of at most so many columns, and the whole part for statistics if small.

    Raises read errors, and UsageError for an `index` that does not fit the tensor.
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
    return Values(picks, corner, cells.reshape(rows, -1).tolist() if cells.size else [], tally)
