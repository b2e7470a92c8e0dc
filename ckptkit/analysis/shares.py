"""Compute the number of parameters and bytes of each tensor, and of all tensors below each path.

If several tensors share elements, the elements are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptkit.analysis.summary import Summary, TensorRow
from ckptkit.core.tree import Node, Path, join, key_text, walk
from ckptkit.core.weights import is_optimizer

WEIGHTS, OPTIMIZER, OTHER = ROLES = ("weights", "optimizer", "other")
LEVELS = 32  # maximum depth of the tree of paths


class Share(NamedTuple):
    """The numbers of parameters and bytes that a tensor adds to the totals.

    - `role` is one of ROLES.
    - `place` is the dotted path in the file. In a pickled module, `place` is the path of the module
      and the name of the weight.
    - `parameters` is the number of elements, or 0 if an earlier row already counts these elements.
      If the file contains weights, `parameters` is 0 for all tensors that are not weights.
    - `nbytes` is the number of bytes, or 0 if an earlier row has the same elements.
    - `same` is the index of the first row with the same elements, or None if this row is the first.
    """

    row: TensorRow
    role: str
    place: str
    parameters: int
    nbytes: int
    same: int | None = None

    @property
    def label(self) -> str:
        """The key of a weight, or the path of any other tensor."""
        return self.row.label


@dataclass(slots=True)
class Branch:
    """The totals of all tensors below a dotted path. ``share`` is the tensor at exactly this
    path."""

    label: str
    path: str = ""
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    share: Share | None = None
    children: dict[str, Branch] = field(default_factory=dict)

    def add(self, share: Share) -> None:
        self.tensors += 1
        self.parameters += share.parameters
        self.nbytes += share.nbytes


def shares(summary: Summary, root: Node) -> list[Share]:
    """Return a Share for each row of `summary`. `root` is the tree of the checkpoint."""
    optimizers: set[tuple[str, ...]] = set()  # the path of each optimizer state_dict
    inside: Path | None = None
    for path, node in walk(root):
        inside = None if inside is not None and len(path) <= len(inside) else inside
        if inside is None and is_optimizer(node):
            inside = path
            optimizers.add(tuple(map(key_text, path)))
    lengths = sorted({len(path) for path in optimizers})
    prefix = join(summary.weights) + "." if summary.weights else ""
    in_weights = any(row.name is not None for row in summary.rows)
    first: dict[tuple[object, ...], int] = {}
    counted: set[tuple[object, ...]] = set()
    found: list[Share] = []
    for number, row in enumerate(summary.rows):
        role, place = OTHER, row.place
        if row.name is not None:
            role, place = WEIGHTS, prefix + row.name
        elif optimizers:
            keys = tuple(map(key_text, row.path))
            role = OPTIMIZER if any(keys[:n] in optimizers for n in lengths) else OTHER
        key = row.memory(number)
        same = first.setdefault(key, number)
        counts = (row.name is not None or not in_weights) and key not in counted
        if counts:
            counted.add(key)
        is_first = same == number
        parameters, nbytes = row.tensor.numel if counts else 0, row.nbytes if is_first else 0
        found.append(Share(row, role, place, parameters, nbytes, None if is_first else same))
    return found


def branches(shares: Iterable[Share]) -> Branch:
    """Return the tree of the dotted paths of tensors, with totals for each path."""
    root = Branch("")
    for share in shares:
        root.add(share)
        branch = root
        *above, last = parts(share.place)
        for part in above:
            branch = _below(branch, part)
            branch.add(share)
        while last in branch.children and branch.children[last].share is not None:
            last += "'"  # the key occurs twice in the file
        branch = _below(branch, last)
        branch.add(share)
        branch.share = share
    return root


def parts(place: str) -> list[str]:
    """Split a dotted path into at most LEVELS components."""
    return place.split(".", LEVELS - 1)


def _below(branch: Branch, label: str) -> Branch:
    found = branch.children.get(label)
    if found is None:
        found = branch.children[label] = Branch(
            label, f"{branch.path}.{label}" if branch.path else label
        )
    return found


def joined(branch: Branch) -> Branch:
    """Skip branches that are not a tensor and have only one child.

    Return the first branch, from `branch` downwards, that is not skipped.
    """
    while branch.share is None and len(branch.children) == 1:
        (branch,) = branch.children.values()
    return branch
