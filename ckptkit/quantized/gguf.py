"""Recognize quantized weights in GGUF files. Each tensor of a quantized type is one weight."""

from __future__ import annotations

from ckptkit.compute.ggml import DECODERS, FIELDS, GgmlDequantize
from ckptkit.core.tensor import contiguous_stride
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# Maps each type that must not occur in files to the reason for this.
_REFUSED = {
    "Q8_1": "llama.cpp uses this type only for intermediate results",
    "Q8_K": "llama.cpp uses this type only for intermediate results",
    **dict.fromkeys(
        ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"),
        "its rows are interleaved for some processors, and llama.cpp removed this layout",
    ),
}
_AGAIN = "quantize the original model again"


def recognize(view: TensorView, name: str) -> QuantizedWeight:
    """Recognize the weight `name`. Refuse tensors of unsupported types."""
    tensor = view.tensors[name]
    type, storage = tensor.dtype.name, tensor.storage
    group = QuantizedWeight("gguf", type, name, tensor.shape, (name,))
    others = "--drop drops such tensors"
    if tensor.dtype.kind == "unknown":
        number = type.rpartition(" ")[2]
        return group.refused(f"its type {number} is unknown", others)
    if type in _REFUSED:
        return group.refused(f"{type}: {_REFUSED[type]}", f"{_AGAIN}; {others}")
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
    "gguf", "GGUF (llama.cpp)", recognize,
    oracle="gguf-py 0.19.0; ggml for Q1_0 and Q2_0",
)  # fmt: skip
