"""Files whose weights are not dequantized, made by hand: a row for each reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.quantized.made import Row, ones, row, text, write

L = "model.layers.0.mlp.up_proj"
W, S = f"{L}.weight", f"{L}.weight_scale"


class Refusal(NamedTuple):
    """A file, and the word that says why it is not dequantized; `beside`: files of JSON."""

    tensors: dict[str, Row]
    word: str
    config: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    beside: dict[str, Any] | None = None


def made(refusal: Refusal, folder: Path) -> Path:
    tensors = {"model.norm.weight": ones([4], "BF16"), **refusal.tensors}
    for name, value in (refusal.beside or {}).items():
        (folder / name).write_text(json.dumps(value))
    return write(folder / "model.safetensors", tensors, refusal.metadata, refusal.config)


# Configurations, and tensors of a module


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


def mlx(**settings: Any) -> dict[str, Any]:
    return {"quantization": settings}


def ct(bits: int = 8, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel"}
    return method("compressed-tensors", config_groups={"group_0": {"weights": weights}}, **more)


def module(**parts: Row) -> dict[str, Row]:
    return {f"{L}.{name}": each for name, each in parts.items()}


def weight(**parts: Row) -> dict[str, Row]:
    return {f"{W}.{name}": each for name, each in parts.items()}


def integers(*numbers: int) -> Row:
    return row("I64", [len(numbers)], struct.pack(f"<{len(numbers)}q", *numbers))


def number(value: int) -> Row:
    return row("I64", [], struct.pack("<q", value))


def hqq(**settings: Row) -> dict[str, Row]:
    known = {
        "W_q": row("U8", [4, 8]), "scale": ones([1, 8], "F16"), "zero": ones([1, 8], "F16"),
        "shape": integers(8, 8), "axis": number(0), "nbits": number(4), "group_size": number(8),
        "packing": row("U8", [7], b"4bit_u8"),
    }  # fmt: skip
    return module(**{**known, **settings})


def described(weight: Row, scale: Row, said: dict[str, Any], **others: Row) -> dict[str, Row]:
    """A weight of ComfyUI."""
    return {W: weight, S: scale, **module(comfy_quant=text(said), **others)}


def comfy(**said: Any) -> dict[str, Row]:
    return described(row("F8_E4M3", [8, 16]), ones([]), said)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 16]}


def bnb(state: Mapping[str, Any] = {}, **parts: Row) -> dict[str, Row]:
    known = {"absmax": ones([2]), "quant_map": ones([16])}
    said = text({**STATE, **state})
    return {
        W: row("U8", [64, 1]), **weight(**{**known, **parts}),
        f"{W}.quant_state.bitsandbytes__nf4": said,
    }  # fmt: skip


def packed(codes: Row, scale: Row, shape: tuple[int, ...] = (), **others: Row) -> dict[str, Row]:
    parts = {"packed": codes, "scale": scale, **others}
    parts |= {"shape": integers(*shape)} if shape else {}
    return {f"{W}_{name}": each for name, each in parts.items()}


def torchao(kind: str, names: tuple[str, ...] = ("qdata", "scale"), **data: Any) -> dict[str, str]:
    said = {"_type": kind, "_data": data, "_tensor_data_names": names}
    return {"tensor_names": json.dumps([W]), W: json.dumps(said)}


def inner(**parts: Row) -> dict[str, Row]:
    return {f"{L}._weight_{name}": each for name, each in parts.items()}


def without(tensors: dict[str, Row], *endings: str) -> dict[str, Row]:
    return {name: each for name, each in tensors.items() if not name.endswith(endings)}


FP8 = {W: row("F8_E4M3", [200, 130]), f"{W}_scale_inv": ones([2, 2])}
BLOCKS = method("fp8", weight_block_size=[128, 128])
INDEX = struct.pack("<64i", *(k // 32 for k in range(64)))
GPTQ = module(
    qweight=row("I32", [8, 16]),
    qzeros=row("I32", [2, 2]),
    scales=ones([2, 16], "F16"),
    g_idx=row("I32", [64], INDEX),
)
AWQ = module(qweight=row("I32", [64, 2]), qzeros=row("I32", [2, 2]), scales=ones([2, 16], "F16"))
PACKED = packed(row("I32", [4, 4]), ones([4, 1], "BF16"), (4, 32))
NVFP4 = {W: row("U8", [8, 16]), S: row("F8_E4M3", [8, 2]), f"{W}_scale_2": ones([])}
AO = inner(qdata=row("I8", [8, 16]), scale=ones([8, 1]))
CODES, I8, U8 = row("F8_E4M3", [8, 32]), row("I8", [8, 32]), row("U8", [8, 16])
MLX = {W: row("U32", [4, 8]), f"{L}.scales": ones([4, 1])}
NESTED = {"nested_blocksize": 256, "nested_offset": 0.5}
QMAP = {"quanto_qmap.json": {L: {"weights": "qint4"}}}
QUANTO = {
    f"{W}._data._data": row("U8", [4, 32]), f"{W}._scale": ones([8, 1]), f"{W}._shift": ones([8, 1])
}  # fmt: skip
GPTQ4, AWQ32, MODELOPT = method("gptq", bits=4), method("awq", group_size=32), method("modelopt")

REFUSALS = {
    # parts that are missing, or in a shard that was not given
    "fp8 without its scale": Refusal(without(FP8, "_inv"), "missing", BLOCKS),
    "a scale without its weight": Refusal(without(FP8, ".weight"), "but not the weight", BLOCKS),
    "gptq without zero points": Refusal(without(GPTQ, ".qzeros"), "qzeros are missing", GPTQ4),
    "gptq with codes of int8": Refusal(
        GPTQ | module(qweight=row("I8", [8, 16])), "qweight of dtype int8", GPTQ4
    ),
    "gptq with zero points of int8": Refusal(
        GPTQ | module(qzeros=row("I8", [2, 2])), "qzeros of dtype int8", GPTQ4
    ),
    "packed without a scale": Refusal(without(PACKED, "_scale"), "_scale", ct(4)),
    "packed without a shape": Refusal(without(PACKED, "_shape"), "_shape", ct(4)),
    "torchao without a scale": Refusal(
        without(AO, "_scale"), "missing", None, torchao("Int8Tensor")
    ),
    "gpt-oss without scales": Refusal({f"{L}_blocks": row("U8", [2, 4, 2, 16])}, "scales"),
    "awq without zero points": Refusal(without(AWQ, ".qzeros"), "qzeros are missing", AWQ32),
    "bitsandbytes without absmax": Refusal(without(bnb(), ".absmax"), "absmax"),
    "nested absmax without its own": Refusal(
        bnb(absmax=row("U8", [2])), "absmax is quantized"
    ),
    "ComfyUI without a scale": Refusal(
        without(comfy(format="float8_e4m3fn"), "_scale"), "missing"
    ),
    "nvfp4 without its global scale": Refusal(
        packed(U8, row("F8_E4M3", [8, 2])), "second scale", method("compressed-tensors")
    ),
    # parameters that are not known
    "the size of blocks": Refusal(FP8, "weight_block_size"),
    "v1 or v2": Refusal(GPTQ, "gptq_v2"),
    "the group size of awq": Refusal(AWQ, "group_size", method("awq", version="gemm")),
    "the group size of gptq": Refusal(without(GPTQ, ".g_idx"), "group_size", GPTQ4),
    "the bits of packed integers": Refusal(PACKED, "bits", method("compressed-tensors")),
    "who packed nvfp4": Refusal(NVFP4, "the library that packed its codes"),
    "who made mxfp8": Refusal(
        {W: CODES, S: row("U8", [8, 1])}, "the library that quantized the weight"
    ),
    "in which dtype fp8 is multiplied": Refusal({W: row("F8_E4M3", [8, 16]), S: ones([])}, "dtype"),
    "the bits of mlx": Refusal(MLX | module(biases=ones([4, 1])), "bits"),
    "mlx without biases": Refusal(MLX, "biases", mlx(group_size=64, bits=4)),
    "the bits of quanto": Refusal(
        {f"{W}._data._data": row("U8", [4, 128]), f"{W}._scale": ones([8, 1])}, "bits"
    ),
    # a block is never what the shapes would give
    "blocks that do not fit": Refusal(
        {**FP8, f"{W}_scale_inv": ones([2, 1])}, "do not fit", BLOCKS
    ),
    "a grid of compressed-tensors that no scheme names": Refusal(
        {W: row("F8_E4M3", [256, 128]), S: ones([2, 1], "BF16")}, "in any strategy", ct()
    ),
    # packings that two versions read differently
    "3 bits in as many words": Refusal(
        packed(row("I32", [4, 2]), ones([4, 1], "BF16"), (4, 20)), "version", ct(3)
    ),
    # formats, types and versions
    "gptq_p": Refusal(GPTQ, "gptq_p", method("gptq", bits=4, checkpoint_format="gptq_p")),
    "marlin of gptq": Refusal(GPTQ, "marlin", method("gptq", bits=4, is_marlin_format=True)),
    "words of other sizes": Refusal(
        GPTQ, "pack_dtype", method("gptq", bits=4, pack_dtype="int16")
    ),
    "packings of AutoRound": Refusal(
        GPTQ, "packing_format", method("auto-round", packing_format="auto_round:x")
    ),
    "awq gemv": Refusal(AWQ, "gemv", method("awq", version="gemv", group_size=32)),
    "int8 of kernels": Refusal(
        module(weight=row("I8", [4, 8]), SCB=ones([4]), weight_format=row("U8", [], b"\2")),
        "weight_format",
    ),
    "a format of ComfyUI": Refusal(comfy(format="asym_w4a8_int8"), "asym_w4a8"),
    "a type of torchao": Refusal(
        AO, "Int4TilePacked", None, torchao("Int4TilePackedTo4dTensor", block_size=[1, 16])
    ),
    "hqq in hqq": Refusal(
        module(W_q=row("U8", [4, 8]), quant_scale=row("U8", [], b"\1")), "quantized"
    ),
    "act-order of compressed-tensors": Refusal(
        {**PACKED, f"{W}_g_idx": row("I32", [32])}, "g_idx", ct(4)
    ),
    # JSON that does not fit the bytes
    "a shape that is too large": Refusal(bnb({"shape": [80, 16]}), "do not fit"),
    "a shape of texts": Refusal(bnb({"shape": ["8", "16"]}), "JSON"),
    "a block size of 0": Refusal(bnb({"blocksize": 0}), "do not fit"),
    "a quant_type that is not known": Refusal(bnb({"quant_type": "nf3"}), "nf3"),
    # the weight alone is not the model's
    "pre_quant_scale": Refusal(
        NVFP4 | module(pre_quant_scale=ones([32])), "pre_quant_scale", MODELOPT
    ),
    "svdquant": Refusal(NVFP4 | module(svdquant_lora_a=ones([4, 32])), "svdquant", MODELOPT),
    "transform_config": Refusal(
        PACKED, "rotated", ct(4, transform_config={"config_groups": {"u": {}}})
    ),
    "convrot": Refusal(comfy(format="float8_e4m3fn", convrot=True), "convrot"),
    "act_pre_scale": Refusal(
        AO, "act_pre_scale", None, torchao("Int8Tensor", block_size=[1, 16], act_pre_scale=1)
    ),
    # families that are named
    "AQLM": Refusal(module(
        codes=row("I8", [2, 4, 1]), codebooks=ones([1, 8, 1, 8], "F16"),
        scales=ones([2, 1, 1, 1], "F16"),
    ), "AQLM"),
    "EETQ": Refusal(module(weight=row("I8", [8, 4]), weight_scales=ones([4], "F16")), "EETQ"),
    "VPTQ": Refusal(
        {f"{L}.indices": row("I32", [4]), f"{L}.centroids.weight": ones([1, 8])}, "VPTQ"
    ),
    "BitNet": Refusal({W: row("U8", [2, 8]), S: ones([1])}, "BitNet", method("bitnet")),
    "EXL2": Refusal(module(
        q_weight=row("I32", [4, 8]), q_scale=row("I32", [1, 1]), q_groups=row("I32", [2])
    ), "EXL2"),
    "EXL3": Refusal(module(
        trellis=row("I32", [4, 8]), suh=ones([4], "F16"), svh=ones([4], "F16")
    ), "EXL3"),
    "Marlin": Refusal(module(B=row("I32", [4, 8]), s=ones([1, 8], "F16")), "Marlin"),
    "QQQ": Refusal(module(B=row("I32", [4, 8]), s_channel=ones([1, 8]), s_group=ones([1])), "QQQ"),
    "HIGGS": Refusal(module(
        weight=row("I32", [4, 8]), tables=ones([4], "F16"), tables2=ones([4])
    ), "HIGGS"),
    "Quark": Refusal(FP8, "Quark", method("quark")),
    "SINQ": Refusal(AWQ, "SINQ", method("sinq", group_size=32)),
    "ParoQuant": Refusal(AWQ | module(theta=ones([1]), pairs=ones([1])), "ParoQuant"),
    "FP-Quant": Refusal(module(
        qweight=row("U8", [4, 8]), forward_hadamard_matrix=ones([4, 4])
    ), "FP-Quant"),
    "SpQR": Refusal(module(dense_weights=row("I32", [8]), row_offsets=row("I32", [2])), "SpQR"),
    "marlin-24": Refusal(
        module(weight_packed=row("I32", [4, 8]), meta=row("I32", [4])), "marlin-24"
    ),
    "sparse-bitmask": Refusal(module(
        compressed=ones([8]), bitmask=row("U8", [4, 2]), row_offsets=row("I64", [4])
    ), "sparse-bitmask"),
    "sparse-24-bitmask": Refusal(module(
        compressed=ones([8]), bitmask=row("U8", [4, 2]), shape=row("I64", [2, 1])
    ), "sparse-24-bitmask"),
    "BitBLAS": Refusal(GPTQ, "BitBLAS", method("bitblas")),
    # codes, scales and settings that do not fit each other
    "awq with zero points of int8": Refusal(
        AWQ | module(qzeros=row("I8", [2, 2])), "qzeros of dtype int8", AWQ32
    ),
    "awq with zero points of 5 groups": Refusal(
        AWQ | module(qzeros=row("I32", [5, 2])), "qzeros of dtype int32 and shape", AWQ32
    ),
    "gptq of 5 bits": Refusal(
        GPTQ | module(qzeros=row("I32", [2, 3])), "2, 3, 4 or 8 bits", method("gptq", bits=5)
    ),
    "nested scales": Refusal(
        bnb(NESTED, absmax=row("U8", [2]), nested_absmax=ones([3]), nested_quant_map=ones([256])),
        "nested absmax of dtype",
    ),
    "scales of int8": Refusal(module(weight=I8, SCB=ones([4])), "SCB of dtype"),
    "a scale of ComfyUI": Refusal(
        described(CODES, ones([2]), {"format": "float8_e4m3fn"}), "do not fit"
    ),
    "old scales of ComfyUI": Refusal(
        module(weight=CODES, scale_weight=ones([2])), "it must have one element"
    ),
    "int8 scales of ComfyUI": Refusal(
        described(I8, ones([3]), {"format": "int8_tensorwise"}), "do not fit"
    ),
    "int8 codes of ComfyUI": Refusal(
        described(CODES, ones([]), {"format": "int8_tensorwise"}),
        "with the format int8_tensorwise",
    ),
    "nvfp4 of ComfyUI": Refusal(
        described(U8, row("F8_E4M3", [8, 2]), {"format": "nvfp4"}, weight_scale_2=ones([])),
        "tiles of 128x4",
    ),
    "mxfp8 of ComfyUI": Refusal(
        described(CODES, row("U8", [8, 1]), {"format": "mxfp8"}), "blocks of 32 in tiles"
    ),
    "a rotated fp8 of compressed-tensors": Refusal(
        {W: CODES, S: ones([8, 1])}, "rotated",
        method("compressed-tensors", transform_config={"a": 1}),
    ),
    "zero points of compressed-tensors": Refusal(
        {W: I8, S: ones([8, 1]), f"{W}_zero_point": row("I8", [4, 1])}, "zero points", ct()
    ),
    "exponents of compressed-tensors": Refusal(
        {W: CODES, S: row("U8", [8, 2])}, "do not fit", ct(kind="float")
    ),
    "codes and exponents": Refusal(packed(U8, row("U8", [8, 5])), "codes of", ct(4, "float")),
    "nvfp4 scales": Refusal(
        packed(U8, row("F8_E4M3", [8, 3]), global_scale=ones([1])), "blocks of 16", ct(8, "float")
    ),
    "exponents of fp4": Refusal(packed(U8, row("U8", [4, 1])), "do not fit", ct(4, "float")),
    "a grid of packed integers": Refusal(
        packed(row("I32", [4, 4]), ones([2, 1], "BF16"), (4, 32)), "in any strategy", ct(4)
    ),
    "packed zero points": Refusal(
        {**PACKED, f"{W}_zero_point": row("I32", [3, 1])}, "zero points", ct(4)
    ),
    "the packing of hqq": Refusal(hqq(packing=row("U8", [7], b"4bit_xx")), "packing is"),
    "the floats of hqq": Refusal(hqq(view_as_float=number(1)), "stored as floats"),
    "the axis of hqq": Refusal(hqq(axis=number(2)), "axis"),
    "the groups of hqq": Refusal(hqq(scale=ones([1, 4], "F16")), "in groups of"),
    "scales of mlx": Refusal(MLX, "do not fit", mlx(group_size=32, bits=4)),
    "a mode of mlx and its scales": Refusal(
        MLX | module(scales=ones([4, 2])), "with blocks of 32", mlx(mode="mxfp4")
    ),
    "scales of fp8 blocks for a vector": Refusal(
        {W: row("F8_E4M3", [64]), f"{W}_scale_inv": ones([2])}, "do not fit",
        method("fp8", weight_block_size=[1, 32]),
    ),
    "nvfp4 of ModelOpt": Refusal({**NVFP4, S: row("F8_E4M3", [8, 3])}, "blocks of 16", MODELOPT),
    "exponents of ModelOpt": Refusal({W: CODES, S: row("U8", [8, 2])}, "blocks of 32", MODELOPT),
    "stacked experts of ModelOpt, as many as rows": Refusal(
        {W: row("F8_E4M3", [4, 4, 32]), S: ones([4])}, "any known layout", MODELOPT
    ),
    "scales of FBGEMM": Refusal({W: CODES, S: ones([4, 1])}, "do not fit", method("fbgemm_fp8")),
    "codes of quanto": Refusal(
        {f"{W}._data": row("U8", [8, 32]), f"{W}._scale": ones([8, 1])}, "codes of dtype uint8"
    ),
    "scales of quanto": Refusal({f"{W}._data": I8, f"{W}._scale": ones([3, 1])}, "do not fit"),
    "the rows of quanto": Refusal(QUANTO, "neither the shape nor a bias", beside=QMAP),
    "quanto without a shift": Refusal(
        {**QUANTO, f"{W}._shift": ones([4, 1]), f"{L}.bias": ones([8])}, "_shift", beside=QMAP
    ),
    "the groups of quanto": Refusal(QUANTO | module(bias=ones([3])), "3 rows", beside=QMAP),
    "blocks of torchao": Refusal(
        inner(qdata=CODES, scale=ones([8, 1])), "do not fit", None,
        torchao("Float8Tensor", block_size=[8, 32]),
    ),
    "the size of blocks of torchao": Refusal(
        inner(qdata=U8, scale=row("U8", [8, 1])), "a block_size of", None, torchao("MXTensor")
    ),
    "zero points of torchao": Refusal(
        inner(qdata=I8, scale=ones([8, 1]), zero_point=ones([8, 1])), "zero points", None,
        torchao("Int8Tensor", ("qdata", "scale", "zero_point"), block_size=[1, 32]),
    ),
}  # fmt: skip
