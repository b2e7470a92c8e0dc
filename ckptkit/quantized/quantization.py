"""The quantized weights of a checkpoint, and the checkpoint with dequantized weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import owners
from ckptkit.core.tree import Node, Object, OrderedMapping, rebuild
from ckptkit.core.weights import Weights, as_tensor, plain_state_dict

if TYPE_CHECKING:
    from ckptkit.quantized.group import QuantizedWeight, TensorView

# The union of ``marks`` of all quantization methods, repeated here because an import of all methods
# takes time. A test compares this set with the marks of all methods.
MARKS = frozenset({
    "SCB", "W_q", "_data", "bitmask", "bitsandbytes__fp4", "bitsandbytes__nf4", "blocks",
    "codebooks", "comfy_quant", "dense_weights", "down_proj_scale", "forward_hadamard_matrix",
    "gate_up_proj_scale", "indices", "meta", "q_weight", "qscale_weight", "qweight", "s",
    "s_channel", "scale", "scale_weight", "scales", "tables2",
    "theta", "trellis", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scales",
})  # fmt: skip
KINDS = ("blocks", "unknown")  # kinds of dtypes that only quantized weights (GGUF) have
ENDINGS = ("_blocks", "_qdata", "_scale_inv")


def last_component(name: str) -> str:
    """Return the part of a name after the last dot."""
    return name.rpartition(".")[2]


def is_marked(name: str) -> bool:
    """Return True if the last component of a name is typical of a quantization method."""
    last = last_component(name)
    return last in MARKS or last.endswith(ENDINGS)


def is_subclass(node: Node) -> bool:
    """Return True if a node is a pickled tensor subclass."""
    return node.__class__ is Object and node.tensor is not None and node.tensor.layout == "subclass"


def may_be_quantized(weights: Weights) -> bool:
    """Return True if a name, a dtype or a tensor subclass suggests that weights are quantized."""
    nodes = weights.nodes.values()
    endings = weights.endings
    if not MARKS.isdisjoint(endings) or any(each.endswith(ENDINGS) for each in endings):
        return True
    if Object in {*map(type, nodes)} and any(is_subclass(node) for node in nodes):
        return True
    return any(
        (dtype.kind == "float" and dtype.bits == 8) or dtype.kind in KINDS
        for dtype in weights.dtypes
    )


@dataclass(frozen=True)
class Quantization:
    """The quantized weights of a checkpoint.

    ``groups`` contains one group of tensors for each weight, in the order of the file. ``serving``
    contains names of tensors that only quantized inference uses.
    """

    groups: tuple[QuantizedWeight, ...] = ()
    serving: tuple[str, ...] = ()
    view: TensorView | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @cached_property
    def by_member(self) -> dict[str, QuantizedWeight]:
        """A dict that maps the name of each tensor in a group to the group."""
        return owners((group, group.members) for group in self.groups)

    @property
    def labels(self) -> dict[str, int]:
        """A dict that maps each label to its number of weights."""
        return dict(Counter(group.label for group in self.groups))

    @property
    def unread(self) -> tuple[QuantizedWeight, ...]:
        """Groups that ckptkit cannot dequantize."""
        return tuple(group for group in self.groups if group.layout is None)

    def foreign_to(self, names: Iterable[str]) -> Quantization:
        """Return the groups whose codes and scales do not exist in a model with these tensor names.

        Codes and scales count as existing in the model if tensors of the model have the same last
        components in their names, such as ``weight_scale``. If a group contains a tensor with the
        name of the weight, this tensor is not compared.
        """
        endings, groups = set(map(last_component, names)), []
        for group in self.groups:
            others = {last_component(name) for name in group.parts if name != group.name}
            if not others or not others <= endings:
                groups.append(group)
        return replace(self, groups=tuple(groups))

    def touching(self, names: Iterable[str]) -> Iterator[QuantizedWeight]:
        """Yield the groups that contain any of the tensors `names`. Yield each group once."""
        found = (self.by_member.get(name) for name in names)
        yield from {id(group): group for group in found if group is not None}.values()


# Checkpoints with one dequantized tensor in place of each quantized weight

TARGETS = ("bfloat16", "float16", "float32")  # dtypes of dequantized weights
_HALF = ("gptq", "awq")  # methods whose libraries compute in float16


def float_types(ck: Checkpoint) -> dict[str, DType]:
    """Map the names of weights with bfloat16, float16 or float32 elements to their dtypes."""
    return {
        name: tensor.dtype for name, tensor in ck.weights.items() if tensor.dtype.name in TARGETS
    }


def exchanged(
    ck: Checkpoint, found: Quantization, types: Mapping[int, DType]
) -> tuple[Node, dict[int, tuple[Tensor, QuantizedWeight]]]:
    """Replace each group of tensors by one dequantized tensor, and drop tensors in ``serving``.

    Return the new tree, and a dict that maps the id of each new tensor to the tensor and its group.
    `types` maps the id of each group to the dtype of its new tensor.
    """
    weights = ck.required
    made: dict[int, tuple[Tensor, QuantizedWeight]] = {}
    entries: dict[Node, Node] = {}
    done, serving = set[int](), set(found.serving)
    old = mapping_of(weights)
    for key, node in old.items():
        group = found.by_member.get(key) if isinstance(key, str) else None
        if group is None:
            if key not in serving:
                entries[key] = node
        elif id(group) not in done:
            done.add(id(group))
            first = as_tensor(weights.nodes[group.parts[0]])
            device = "cpu" if first is None or first.device == "meta" else first.device
            tensor = group.tensor(types[id(group)], device)
            made[id(tensor)] = tensor, group
            entries[group.name] = tensor
    new: Node = OrderedMapping(entries, old.state) if isinstance(old, OrderedMapping) else entries
    return rebuild(ck.root, swap={id(weights.node): new}), made


def mapping_of(weights: Weights) -> Mapping[Node, Node]:
    """Return the dict that contains the weights. For a pickled module, return its state_dict."""
    return plain_state_dict(weights.nodes) if weights.is_module else weights.node


def default_dtype(view: TensorView, group: QuantizedWeight) -> DType:
    """Return the dtype of a dequantized weight if the user requests no dtype."""
    if group.family == "gguf":  # a GGUF file does not use config.json
        return BY_NAME["float32"]
    recorded = view.config.get("torch_dtype") or view.config.get("dtype")
    for name in (recorded, group.own, "float16" if group.family in _HALF else None):
        plain = str(name).removeprefix("torch.")
        if plain in TARGETS:
            return BY_NAME[plain]
    return BY_NAME["bfloat16"]
