"""Find the quantized weights of a checkpoint by names, dtypes and the configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckptkit.compute.ggml import DECODERS, FIELDS, GgmlDequantize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import contiguous_stride
from ckptkit.core.text import flatten
from ckptkit.core.weights import Weights
from ckptkit.quantized import compressed_tensors, fp8, int4, modelopt_mlx, torchao_quanto
from ckptkit.quantized import group as g
from ckptkit.quantized.fp8 import METHODS, OTHERS
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView
from ckptkit.quantized.quantization import (
    KINDS,
    Quantization,
    is_marked,
    is_subclass,
    last_component,
)

# Weights of GGUF files: each tensor of a quantized type is one weight

# Maps each type that must not occur in files to the reason for this.
_NOT_IN_FILES = {
    "Q8_1": "llama.cpp uses this type only for intermediate results",
    "Q8_K": "llama.cpp uses this type only for intermediate results",
    **dict.fromkeys(
        ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"),
        "its rows are interleaved for some processors, and llama.cpp removed this layout",
    ),
}


def recognize_gguf(view: TensorView, name: str) -> QuantizedWeight:
    """Recognize the weight `name`. Refuse tensors of unsupported types."""
    tensor = view.tensors[name]
    type, storage = tensor.dtype.name, tensor.storage
    group = QuantizedWeight("gguf", type, name, tensor.shape, (name,))
    others = "--drop drops such tensors"
    if tensor.dtype.kind == "unknown":
        number = type.rpartition(" ")[2]
        return group.refused(f"its type {number} is unknown", others)
    if type in _NOT_IN_FILES:
        hint = f"quantize the original model again; {others}"
        return group.refused(f"{type}: {_NOT_IN_FILES[type]}", hint)
    big_endian = storage is not None and storage.big_endian
    if big_endian and type not in FIELDS:
        return group.refused(
            f"its layout is unknown: no converter writes {type} to big-endian files", others
        )
    assert type in DECODERS and tensor.stride == contiguous_stride(tensor.shape)
    group.layout = GgmlDequantize(type, big_endian=big_endian)
    group.inputs = (tensor,)
    return group


GGUF = QuantizationMethod(
    "gguf", "GGUF (llama.cpp)", recognize_gguf,
    oracle="gguf-py 0.19.0; ggml for Q1_0 and Q2_0",
)  # fmt: skip


# All methods

# Quantization methods in the order in which ckptkit tries them. Methods whose tensor names are
# unique come first.
FAMILIES: tuple[QuantizationMethod, ...] = (
    GGUF, torchao_quanto.TORCHAO, *fp8.COMFY, *int4.BITSANDBYTES, int4.HQQ,
    torchao_quanto.QUANTO, fp8.UNREAD, int4.GPTQ, int4.AWQ, modelopt_mlx.MLX, int4.GPT_OSS,
    *compressed_tensors.COMPRESSED_TENSORS, *modelopt_mlx.MODELOPT, fp8.FP8_BLOCK,
)  # fmt: skip
# Only quantized inference uses tensors whose names end in one of these components.
SERVING = frozenset(
    {"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "scaled_fp8", "kv_scale"}
)
_SERVING_FAMILIES = ("ct-", "modelopt", "fbgemm", "nvfp4", "mxfp", "fp8", "comfy")
_SMALL = 4096  # maximum number of elements in a tensor that `serving` lists
_CONFIGURED = ("fp8", "modelopt", "compressed-tensors", "fbgemm_fp8")


def find(ck: Checkpoint, weights: Weights) -> Quantization:
    """Find the quantized weights. Read only tensors of at most 64 KiB."""
    marked = [name for name, node in weights.nodes.items() if is_marked(name) or is_subclass(node)]
    tensors = weights.tensors
    view = TensorView(ck, weights.nodes, tensors)
    # GGUF weights are recognized without config.json.
    blocks = [name for name, tensor in tensors.items() if tensor.dtype.kind in KINDS]
    groups = [recognize_gguf(view, name) for name in blocks]
    groups += _groups(view, marked)
    groups += _incomplete(view, set(flatten(group.members for group in groups)), marked)
    for group in groups:
        group.nbytes = sum([tensors[name].nbytes for name in group.members])
        if len(group.parts) == 1:  # tensors inside a pickled tensor subclass have no names
            group.nbytes = max(group.nbytes, sum([each.nbytes for each in group.inputs]))
    order = {name: number for number, name in enumerate(weights.nodes)}
    groups.sort(key=lambda group: min(order[name] for name in group.members))
    found = Quantization(tuple(groups), (), view)
    if not any(group.family.startswith(_SERVING_FAMILIES) for group in groups):
        return found
    serving = (
        name
        for name, tensor in tensors.items()
        if last_component(name) in SERVING
        and name not in found.by_member
        and tensor.numel <= _SMALL
    )
    return replace(found, serving=tuple(serving))


def _groups(view: TensorView, marked: list[str]) -> Iterator[QuantizedWeight]:
    taken: set[str] = set()
    by_last: dict[str, list[str]] = defaultdict(list)
    for name in marked:
        by_last[last_component(name)].append(name)
    unread = METHODS.get(view.method) if marked else None
    for family in FAMILIES:
        names: list[str] = []
        for last, some in by_last.items():
            if last in family.marks or last.endswith(family.endings):
                names += some
        if family.subclasses:
            names += [name for name in marked if is_subclass(view.nodes[name])]
        for name in names:
            group = None if name in taken else family.recognize(view, name)
            if group is None or not taken.isdisjoint(group.members):
                continue
            taken.update(group.members)
            if unread is not None:
                group.family = unread
                group.refused(f"ckptkit does not support {unread}")
            yield group


def _incomplete(view: TensorView, taken: set[str], marked: list[str]) -> Iterator[QuantizedWeight]:
    """Yield a group for each weight without a scale, and for each scale without a weight.

    The group contains the reason why ckptkit cannot dequantize the weight.
    """
    codes = (name for name, tensor in view.tensors.items() if tensor.dtype.name in g.FLOAT8)
    float8 = [name for name in codes if name not in taken]
    is_configured = view.method in _CONFIGURED if float8 or marked else False
    family = view.method if view.method not in ("", "fp8") else "fp8-block"
    for name in float8 if is_configured else ():
        group = QuantizedWeight(family, "fp8", name, view.tensors[name].shape, (name,))
        yield group.refused("its scale is missing, but the configuration requires one", g.ELSEWHERE)
    for name in marked:
        weight = name.removesuffix("_scale_inv")
        if weight == name and is_configured and name.endswith(".weight_scale"):
            weight = name.removesuffix("_scale")
        if weight != name and name not in taken and weight not in view.tensors:
            group = QuantizedWeight(family, "fp8", weight, (), (name,))
            yield group.refused("the file contains its scale, but not the weight", g.ELSEWHERE)


def markdown() -> str:
    """Return two Markdown tables: the supported methods, and the unsupported methods."""
    rows = [
        "| family | detected by | read | option to write | tested against |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        if family.read:
            marks = (*family.marks, *(f"*{ending}" for ending in family.endings))
            written = f"`--quantize {family.written}`" if family.written else ""
            known = ", ".join(f"`{mark}`" for mark in marks) or "dtypes"
            rows.append(f"| {family.title} | {known} | yes | {written} | {family.oracle} |")
    rows += ["", "| recognized and refused | detected by | read by |", "|---|---|---|"]
    others: dict[str, str] = {}
    for other in OTHERS:
        known = ", ".join(f"`{mark}`" for mark in (other.codes, *other.companions))
        others.setdefault(other.name, f"| {other.name} | {known} | {other.reader} |")
    for name in METHODS.values():
        others.setdefault(name, f"| {name} | `quant_method` | the library {name} |")
    return "\n".join([*rows, *others.values()]) + "\n"
