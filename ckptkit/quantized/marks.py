"""The names that quantized weights are known by: whether a checkpoint need be looked at."""

from __future__ import annotations

from ckptkit.core.tree import Node, Object
from ckptkit.core.weights import Weights

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
