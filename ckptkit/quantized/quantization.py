"""What was found: the quantized weights of a checkpoint, by names that mark them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckptkit.core.text import owners
from ckptkit.core.tree import Node, Object
from ckptkit.core.weights import Weights

if TYPE_CHECKING:
    from ckptkit.quantized.group import QuantizedWeight, TensorView

# The names that quantized weights are known by: whether a checkpoint need be looked at.


# The marks of all families, so that none is imported without need (a test compares them).
MARKS = frozenset({
    "SCB", "W_q", "_data", "bitmask", "bitsandbytes__fp4", "bitsandbytes__nf4", "blocks",
    "codebooks", "comfy_quant", "dense_weights", "down_proj_scale", "forward_hadamard_matrix",
    "gate_up_proj_scale", "indices", "meta", "q_weight", "qscale_weight", "qweight", "s",
    "s_channel", "scale", "scale_weight", "scales", "tables2",
    "theta", "trellis", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scales",
})  # fmt: skip
ENDINGS = ("_blocks", "_qdata", "_scale_inv")


def last_component(name: str) -> str:
    """The part of a name behind its last dot."""
    return name.rpartition(".")[2]


def is_marked(name: str) -> bool:
    """Return whether a name ends like the weights of a family of quantized models."""
    last = last_component(name)
    return last in MARKS or last.endswith(ENDINGS)


def is_subclass(node: Node) -> bool:
    """Return whether a node is a pickled subclass of torch's tensors."""
    return node.__class__ is Object and node.tensor is not None and node.tensor.layout == "subclass"


def concern(weights: Weights) -> bool:
    """Return whether some weights may be quantized: by their names, or because they have 8 bits."""
    nodes = weights.nodes.values()
    if any(map(is_marked, weights.endings)):
        return True
    if Object in {*map(type, nodes)} and any(is_subclass(node) for node in nodes):
        return True
    return any(dtype.kind == "float" and dtype.bits == 8 for dtype in weights.dtypes)


# The quantized groups of tensors in a checkpoint.


@dataclass(frozen=True)
class Quantization:
    """The groups of a checkpoint in order, and the names of what serves none of them alone."""

    groups: tuple[QuantizedWeight, ...] = ()
    serving: tuple[str, ...] = ()
    view: TensorView | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @cached_property
    def by_member(self) -> dict[str, QuantizedWeight]:
        """Name of a tensor -> the group that it belongs to."""
        return owners((group, group.members) for group in self.groups)

    @property
    def labels(self) -> dict[str, int]:
        """Count the weights of each kind."""
        counts: dict[str, int] = defaultdict(int)
        for group in self.groups:
            counts[group.label] += 1
        return dict(counts)

    @property
    def unread(self) -> tuple[QuantizedWeight, ...]:
        """The groups that cannot be dequantized."""
        return tuple(group for group in self.groups if group.layout is None)

    def foreign_to(self, names: Iterable[str]) -> Quantization:
        """The groups that a model with these names does not hold as codes and scales.

        It holds those of whose other parts it has names with the same last components.
        """
        endings = set(map(last_component, names))
        groups = (each for each in self.groups if not _holds(endings, each))
        return replace(self, groups=tuple(groups))

    def touching(self, names: Iterable[str]) -> Iterator[QuantizedWeight]:
        """The groups that some names belong to, each once."""
        seen = {
            id(group): group for name in names if (group := self.by_member.get(name)) is not None
        }
        yield from seen.values()


def _holds(endings: Collection[str], group: QuantizedWeight) -> bool:
    others = [last_component(name) for name in group.parts if name != group.name]
    return bool(others) and all(each in endings for each in others)
