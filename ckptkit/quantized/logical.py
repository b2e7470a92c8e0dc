"""A checkpoint with each quantized weight as one tensor: what commands show and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Node, OrderedMapping, rebuild
from ckptkit.core.weights import Weights, as_tensor, plain_state_dict
from ckptkit.quantized.group import QuantizedWeight, TensorView
from ckptkit.quantized.quantization import Quantization

TARGETS = ("bfloat16", "float16", "float32")  # dtypes that weights are dequantized to
_HALF = ("gptq", "awq")  # families whose libraries compute in float16


def look_through(ck: Checkpoint, found: Quantization, types: Mapping[str, DType]) -> Checkpoint:
    """The checkpoint with a tensor in the place of each quantized weight that is read.

    `types` names dtypes of weights; the others get those that `dequantize` would give them. Nothing
    is read. The groups are in ``logical``, by the id of their tensors.
    """
    groups = [group for group in found.groups if group.layout is not None]
    if not groups or found.view is None:
        return ck
    view = found.view
    dtypes = {id(group): types.get(group.name) or default_dtype(view, group) for group in groups}
    root, made = exchanged(ck, Quantization(tuple(groups), (), view), dtypes)
    return replace(ck, root=root, logical=made)


def float_types(ck: Checkpoint) -> dict[str, DType]:
    """The dtypes of the floating-point weights."""
    return {
        name: tensor.dtype for name, tensor in ck.weights.items() if tensor.dtype.name in TARGETS
    }


def exchanged(
    ck: Checkpoint, found: Quantization, types: Mapping[int, DType]
) -> tuple[Node, dict[int, tuple[Tensor, QuantizedWeight]]]:
    """The tree with a tensor in the place of each group, and these tensors by their ids.

    `types` are dtypes by the id of the group. Names in ``serving`` are left out.
    """
    weights = ck.required
    made: dict[int, tuple[Tensor, QuantizedWeight]] = {}
    entries = dict(_entries(weights, found, types, made))
    old = mapping_of(weights)
    node: Node = OrderedMapping(entries, old.state) if isinstance(old, OrderedMapping) else entries
    return rebuild(ck.root, swap={id(weights.node): node}), made


def mapping_of(weights: Weights) -> Mapping[Node, Node]:
    """The mapping that holds the weights; of a pickled module, its state_dict."""
    node: Mapping[Node, Node] = (
        plain_state_dict(weights.nodes) if weights.is_module else weights.node
    )
    return node


def _entries(
    weights: Weights,
    found: Quantization,
    types: Mapping[int, DType],
    made: dict[int, tuple[Tensor, QuantizedWeight]],
) -> Iterator[tuple[Node, Node]]:
    serving, done = set(found.serving), set()
    for key, node in mapping_of(weights).items():
        group = found.by_member.get(key) if isinstance(key, str) else None
        if group is None:
            if not isinstance(key, str) or key not in serving:
                yield key, node
        elif id(group) not in done:
            done.add(id(group))
            first = as_tensor(weights.nodes[group.parts[0]])
            device = "cpu" if first is None or first.device == "meta" else first.device
            tensor = group.tensor(types[id(group)], device)
            made[id(tensor)] = tensor, group
            yield group.name, tensor


def default_dtype(view: TensorView, group: QuantizedWeight) -> DType:
    """The dtype that a weight gets if none is asked for."""
    recorded = view.config.get("torch_dtype") or view.config.get("dtype")
    for name in (recorded, group.own, "float16" if group.family in _HALF else None):
        plain = str(name).removeprefix("torch.")
        if plain in TARGETS:
            return BY_NAME[plain]
    return BY_NAME["bfloat16"]
