"""Files whose codes, scales and settings do not fit each other: a row for each place that says so."""

from __future__ import annotations

import json
import struct
from typing import Any

from tests.quantized.made import Refusal, Row, ones, row, text

L = "model.layers.0.mlp.up_proj"
W, S = f"{L}.weight", f"{L}.weight_scale"


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


def integers(*numbers: int) -> Row:
    return row("I64", [len(numbers)], struct.pack(f"<{len(numbers)}q", *numbers))


def number(value: int) -> Row:
    return row("I64", [], struct.pack("<q", value))


def hqq(**settings: Row) -> dict[str, Row]:
    known = {
        "W_q": row("U8", [4, 8]), "scale": ones([1, 8], "F16"), "zero": ones([1, 8], "F16"), "shape": integers(8, 8),
        "axis": number(0), "nbits": number(4), "group_size": number(8), "packing": row("U8", [7], b"4bit_u8"),
    }  # fmt: skip
    return {f"{L}.{name}": each for name, each in {**known, **settings}.items()}


def comfy(form: str, weight: Row, scale: Row, **others: Row) -> dict[str, Row]:
    parts = {f"{L}.{name}": each for name, each in others.items()}
    return {W: weight, S: scale, f"{L}.comfy_quant": text({"format": form}), **parts}


def nested(**parts: Row) -> dict[str, Row]:
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 16], "nested_blocksize": 256,
        "nested_offset": 0.5,
    }  # fmt: skip
    known = {
        "absmax": row("U8", [2]), "quant_map": ones([16]), "nested_absmax": ones([1]), "nested_quant_map": ones([256]),
        "quant_state.bitsandbytes__nf4": text(state),
    }  # fmt: skip
    others = {f"{W}.{name}": each for name, each in {**known, **parts}.items()}
    return {W: row("U8", [64, 1]), **others}


def ct(kind: str, strategy: str = "channel", bits: int = 8, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **more}
    return method("compressed-tensors", config_groups={"group_0": {"weights": weights}})


def packed(codes: Row, scale: Row, *shape: int, **others: Row) -> dict[str, Row]:
    size = {f"{W}_shape": integers(*shape)} if shape else {}
    return {f"{W}_packed": codes, S: scale, **size, **{f"{W}_{k}": v for k, v in others.items()}}


def torchao(kind: str, names: list[str], **data: Any) -> dict[str, str]:
    recorded = {"_type": kind, "_data": data, "_tensor_data_names": names}
    return {"tensor_names": json.dumps([W]), W: json.dumps(recorded)}


def inner(**parts: Row) -> dict[str, Row]:
    return {f"{L}._weight_{name}": each for name, each in parts.items()}


def mlx(**settings: Any) -> dict[str, Any]:
    return {"quantization": settings}


FP8, I8, U8 = row("F8_E4M3", [8, 32]), row("I8", [8, 32]), row("U8", [8, 16])
AWQ = {f"{L}.qweight": row("I32", [64, 2]), f"{L}.scales": ones([2, 16], "F16")}
GPTQ = {
    f"{L}.qweight": row("I32", [8, 16]),
    f"{L}.scales": ones([2, 16], "F16"),
    f"{L}.g_idx": row("I32", [64]),
}
MLX = {W: row("U32", [4, 8]), f"{L}.scales": ones([4, 1])}
MODELOPT = method("modelopt")
QMAP = {"quanto_qmap.json": {L: {"weights": "qint4"}}}
QUANTO = {
    f"{W}._data._data": row("U8", [4, 32]),
    f"{W}._scale": ones([8, 1]),
    f"{W}._shift": ones([8, 1]),
}

UNFIT = {
    "awq without zero points": Refusal(AWQ, "qzeros are missing", method("awq", group_size=32)),
    "awq with zero points of int8": Refusal(
        {**AWQ, f"{L}.qzeros": row("I8", [2, 2])}, "qzeros of dtype int8", method("awq", group_size=32)
    ),
    "awq with zero points of 5 groups": Refusal(
        {**AWQ, f"{L}.qzeros": row("I32", [5, 2])}, "qzeros of dtype int32 and shape", method("awq", group_size=32)
    ),
    "gptq of 5 bits": Refusal(
        {**GPTQ, f"{L}.qzeros": row("I32", [2, 3])}, "2, 3, 4 or 8 bits", method("gptq", bits=5)
    ),
    "nested scales": Refusal(nested(nested_absmax=ones([3])), "nested absmax of dtype"),
    "scales of int8": Refusal({W: I8, f"{L}.SCB": ones([4])}, "SCB of dtype"),
    "a scale of ComfyUI": Refusal(comfy("float8_e4m3fn", FP8, ones([2])), "do not fit"),
    "old scales of ComfyUI": Refusal({W: FP8, f"{L}.scale_weight": ones([2])}, "it must have one element"),
    "int8 scales of ComfyUI": Refusal(comfy("int8_tensorwise", I8, ones([3])), "do not fit"),
    "int8 codes of ComfyUI": Refusal(comfy("int8_tensorwise", FP8, ones([])), "with the format int8_tensorwise"),
    "nvfp4 of ComfyUI": Refusal(
        comfy("nvfp4", U8, row("F8_E4M3", [8, 2]), weight_scale_2=ones([])), "tiles of 128x4"
    ),
    "mxfp8 of ComfyUI": Refusal(comfy("mxfp8", FP8, row("U8", [8, 1])), "blocks of 32 in tiles"),
    "a rotated fp8 of compressed-tensors": Refusal(
        {W: FP8, S: ones([8, 1])}, "rotated", method("compressed-tensors", transform_config={"a": 1})
    ),
    "zero points of compressed-tensors": Refusal(
        {W: I8, S: ones([8, 1]), f"{W}_zero_point": row("I8", [4, 1])}, "zero points", ct("int")
    ),
    "exponents of compressed-tensors": Refusal(
        {W: FP8, S: row("U8", [8, 2])}, "do not fit", ct("float")
    ),
    "codes and exponents": Refusal(
        packed(U8, row("U8", [8, 5])), "codes of", ct("float", bits=4)
    ),
    "nvfp4 scales": Refusal(
        packed(U8, row("F8_E4M3", [8, 3]), global_scale=ones([1])), "blocks of 16", ct("float")
    ),
    "exponents of fp4": Refusal(packed(U8, row("U8", [4, 1])), "do not fit", ct("float", bits=4)),
    "a grid of packed integers": Refusal(
        packed(row("I32", [4, 4]), ones([2, 1], "BF16"), 4, 32), "in any strategy", ct("int", bits=4)
    ),
    "packed zero points": Refusal(
        packed(row("I32", [4, 4]), ones([4, 1], "BF16"), 4, 32, zero_point=row("I32", [3, 1])),
        "zero points", ct("int", bits=4),
    ),
    "the packing of hqq": Refusal(hqq(packing=row("U8", [7], b"4bit_xx")), "packing is"),
    "the floats of hqq": Refusal(hqq(view_as_float=number(1)), "stored as floats"),
    "the axis of hqq": Refusal(hqq(axis=number(2)), "axis"),
    "the groups of hqq": Refusal(hqq(scale=ones([1, 4], "F16")), "in groups of"),
    "scales of mlx": Refusal(MLX, "do not fit", mlx(group_size=32, bits=4)),
    "a mode of mlx and its scales": Refusal(
        {W: MLX[W], f"{L}.scales": ones([4, 2])}, "with blocks of 32", mlx(mode="mxfp4")
    ),
    "scales of fp8 blocks for a vector": Refusal(
        {W: row("F8_E4M3", [64]), f"{W}_scale_inv": ones([2])}, "do not fit",
        method("fp8", weight_block_size=[1, 32]),
    ),
    "nvfp4 of ModelOpt": Refusal(
        {W: U8, S: row("F8_E4M3", [8, 3]), f"{W}_scale_2": ones([])}, "blocks of 16", MODELOPT
    ),
    "exponents of ModelOpt": Refusal({W: FP8, S: row("U8", [8, 2])}, "blocks of 32", MODELOPT),
    "stacked experts of ModelOpt, as many as rows": Refusal(
        {W: row("F8_E4M3", [4, 4, 32]), S: ones([4])}, "any known layout", MODELOPT
    ),
    "scales of FBGEMM": Refusal({W: FP8, S: ones([4, 1])}, "do not fit", method("fbgemm_fp8")),
    "codes of quanto": Refusal({f"{W}._data": row("U8", [8, 32]), f"{W}._scale": ones([8, 1])}, "codes of dtype uint8"),
    "scales of quanto": Refusal({f"{W}._data": I8, f"{W}._scale": ones([3, 1])}, "do not fit"),
    "the rows of quanto": Refusal(QUANTO, "neither the shape nor a bias", beside=QMAP),
    "quanto without a shift": Refusal(
        {**QUANTO, f"{W}._shift": ones([4, 1]), f"{L}.bias": ones([8])}, "_shift", beside=QMAP
    ),
    "the groups of quanto": Refusal({**QUANTO, f"{L}.bias": ones([3])}, "3 rows", beside=QMAP),
    "blocks of torchao": Refusal(
        inner(qdata=FP8, scale=ones([8, 1])), "do not fit", None,
        torchao("Float8Tensor", ["qdata", "scale"], block_size=[8, 32]),
    ),
    "the size of blocks of torchao": Refusal(
        inner(qdata=U8, scale=row("U8", [8, 1])), "a block_size of", None,
        torchao("MXTensor", ["qdata", "scale"]),
    ),
    "zero points of torchao": Refusal(
        inner(qdata=I8, scale=ones([8, 1]), zero_point=ones([8, 1])), "zero points", None,
        torchao("Int8Tensor", ["qdata", "scale", "zero_point"], block_size=[1, 32]),
    ),
}  # fmt: skip
