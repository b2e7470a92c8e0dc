"""Keep the tensors of a quantized weight together under rules, and its blocks whole.

A rename takes the codes and scales of a weight along. A layout may change where whole blocks move,
and where the codes and scales that come out are known as one weight again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptkit import quantized
from ckptkit.compute.strided import ZEROS, StridedCopy, normal
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Shape
from ckptkit.rules.planner import Outcome, Target
from ckptkit.transforms import groups

if TYPE_CHECKING:
    from ckptkit.quantized import QuantizedWeight


def followers(ck: Checkpoint, outcome: Outcome) -> tuple[dict[str, str], Checkpoint]:
    """New names of kept tensors that are one weight with renamed ones.

    With the checkpoint that knows the new names. Raises UsageError as `groups.followed` does.
    """
    moved = {made.sources[0]: name for name, made in outcome.made.items() if made.is_moved}
    names, known = groups.followed(ck, moved)
    kept = set(outcome.kept)
    return {old: new for old, new in names.items() if old in kept and old != new}, known


def check_blocks(ck: Checkpoint, made: Checkpoint, relaid: Mapping[str, Target]) -> None:
    """Raise UsageError where a rule cuts the blocks of a quantized weight, or loses its scales."""
    found = quantized.find(ck)
    if not found:
        return
    known = quantized.find(made).by_member
    shapes = {name: tensor.shape for name, tensor in ck.required.tensors.items()}
    for name, target in relaid.items():
        for group in found.touching(target.sources):
            if not _is_whole(target, group, shapes):
                problem = "would cut its blocks"
            elif _is_known(known.get(name), group):
                continue
            else:
                problem = "makes tensors that are no such weight; its codes and scales need a rule"
            groups.refuse(ck, group.parts, f"rule {target.rule} {problem}")


def _is_known(new: QuantizedWeight | None, old: QuantizedWeight) -> bool:
    """Return whether the weight that was made is read as the old one is."""
    if new is None or new.family != old.family:
        return False
    return new.layout is not None or old.layout is None


def _is_whole(target: Target, group: QuantizedWeight, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the target is made of runs of whole blocks of the group's tensors."""
    sources = [name for name in target.sources if name in group.members]
    for copy in target.copies:
        source = None if copy.source == ZEROS else target.sources[copy.source]
        if source in sources and not _is_run(copy, shapes[source], target, _rows(group, source)):
            return False
    return True


def _rows(group: QuantizedWeight, source: str) -> int:
    """The rows of a tensor that belong together; 0: all."""
    layout = group.layout
    if layout is None:
        return 0
    is_flat = layout.packing.kind == "flat" and all(
        numbers.grid.order == "rows" for numbers in layout.scales
    )
    if not is_flat or len(group.parts) > 2:
        return 0
    return max(numbers.grid.height for numbers in layout.scales) if source == group.parts[0] else 1


def _is_run(copy: StridedCopy, shape: Shape, target: Target, rows: int) -> bool:
    """Return whether a copy is one run of matrices, or of blocks of `rows` rows."""
    dims = normal(copy.dims)
    if len(dims) > 1 or any(read != written for _, read, written in dims):
        return False
    if target.shape[-2:] == shape[-2:]:
        return True
    if not rows or target.shape[-1:] != shape[-1:]:
        return False
    step = rows * shape[-1]
    count = dims[0][0] if dims else 1
    return not (copy.start % step or copy.place % step or count % step)
