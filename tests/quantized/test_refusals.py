"""Quantized weights that are never guessed: each reason has a file, made by hand, and a word that
names it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit import quantized
from ckptkit.core.dtypes import GGML
from ckptkit.core.errors import CollisionError, UnsupportedError, UsageError
from ckptkit.quantized.fp8 import METHODS, OTHERS
from ckptkit.quantized.group import QuantizedWeight
from tests.conftest import Run
from tests.formats.gguf_files import Entry
from tests.formats.gguf_files import made as of_gguf
from tests.formats.parallel.old_forms import Wrapped, save
from tests.quantized.made import Refusal, Row, ones, row, text, write
from tests.quantized.unfit import UNFIT
from tests.reached import is_called, modules, unreached, watch

L = "model.layers.0.mlp.up_proj"
FP8 = {f"{L}.weight": row("F8_E4M3", [200, 130]), f"{L}.weight_scale_inv": ones([2, 2])}
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GPTQ = {
    f"{L}.qweight": row("I32", [8, 16]), f"{L}.qzeros": row("I32", [2, 2]), f"{L}.scales": ones([2, 16], "F16"),
    f"{L}.g_idx": row("I32", [64], struct.pack("<64i", *(k // 32 for k in range(64)))),
}  # fmt: skip
AWQ = {
    f"{L}.qweight": row("I32", [64, 2]),
    f"{L}.qzeros": row("I32", [2, 2]),
    f"{L}.scales": ones([2, 16], "F16"),
}
PACKED = {
    f"{L}.weight_packed": row("I32", [4, 4]), f"{L}.weight_scale": ones([4, 1], "BF16"),
    f"{L}.weight_shape": row("I64", [2], struct.pack("<2q", 4, 32)),
}  # fmt: skip
NVFP4 = {
    f"{L}.weight": row("U8", [8, 16]), f"{L}.weight_scale": row("F8_E4M3", [8, 2]), f"{L}.weight_scale_2": ones([]),
}  # fmt: skip
STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 16]}


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


def bnb(**state: Any) -> dict[str, Row]:
    return {
        f"{L}.weight": row("U8", [64, 1]), f"{L}.weight.absmax": ones([2]), f"{L}.weight.quant_map": ones([16]),
        f"{L}.weight.quant_state.bitsandbytes__nf4": text({**STATE, **state}),
    }  # fmt: skip


def ct(bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
    return method("compressed-tensors", config_groups={"group_0": {"weights": weights}}, **more)


def comfy(**said: Any) -> dict[str, Row]:
    return {
        f"{L}.weight": row("F8_E4M3", [8, 16]),
        f"{L}.weight_scale": ones([]),
        f"{L}.comfy_quant": text(said),
    }


def torchao(kind: str, **data: Any) -> dict[str, str]:
    said = {
        "_type": kind,
        "_data": {"block_size": [1, 16], **data},
        "_tensor_data_names": ["qdata", "scale"],
    }
    return {"tensor_names": f'["{L}.weight"]', f"{L}.weight": json.dumps(said)}


AO = {f"{L}._weight_qdata": row("I8", [8, 16]), f"{L}._weight_scale": ones([8, 1])}


def without(tensors: dict[str, Row], *endings: str) -> dict[str, Row]:
    return {name: each for name, each in tensors.items() if not name.endswith(endings)}


REFUSALS = {
    # parts that are missing, or in a shard that was not given
    "fp8 without its scale": Refusal(without(FP8, "_inv"), "missing", BLOCKS),
    "a scale without its weight": Refusal(without(FP8, ".weight"), "but not the weight", BLOCKS),
    "gptq without zero points": Refusal(without(GPTQ, ".qzeros"), "qzeros are missing", method("gptq", bits=4)),
    "gptq with codes of int8": Refusal(
        {**GPTQ, f"{L}.qweight": row("I8", [8, 16])}, "qweight of dtype int8", method("gptq", bits=4)
    ),
    "gptq with zero points of int8": Refusal(
        {**GPTQ, f"{L}.qzeros": row("I8", [2, 2])}, "qzeros of dtype int8", method("gptq", bits=4)
    ),
    "packed without a scale": Refusal(without(PACKED, "_scale"), "_scale", ct(4)),
    "packed without a shape": Refusal(without(PACKED, "_shape"), "_shape", ct(4)),
    "torchao without a scale": Refusal(without(AO, "_scale"), "missing", None, torchao("Int8Tensor")),
    "gpt-oss without scales": Refusal({f"{L}_blocks": row("U8", [2, 4, 2, 16])}, "scales"),
    # parameters that are not known
    "the size of blocks": Refusal(FP8, "weight_block_size"),
    "v1 or v2": Refusal(GPTQ, "gptq_v2"),
    "the group size of awq": Refusal(AWQ, "group_size", method("awq", version="gemm")),
    "the bits of packed integers": Refusal(PACKED, "bits", method("compressed-tensors")),
    "who packed nvfp4": Refusal(NVFP4, "the library that packed its codes"),
    "in which dtype fp8 is multiplied": Refusal(
        {f"{L}.weight": row("F8_E4M3", [8, 16]), f"{L}.weight_scale": ones([])}, "dtype"
    ),
    "the bits of mlx": Refusal(
        {f"{L}.weight": row("U32", [4, 8]), f"{L}.scales": ones([4, 1]), f"{L}.biases": ones([4, 1])}, "bits"
    ),
    "the bits of quanto": Refusal(
        {f"{L}.weight._data._data": row("U8", [4, 128]), f"{L}.weight._scale": ones([8, 1])}, "bits"
    ),
    # a block is never what the shapes would give
    "blocks that do not fit": Refusal(
        {f"{L}.weight": row("F8_E4M3", [200, 130]), f"{L}.weight_scale_inv": ones([2, 1])}, "do not fit", BLOCKS
    ),
    "a grid of compressed-tensors that no scheme names": Refusal(
        {f"{L}.weight": row("F8_E4M3", [256, 128]), f"{L}.weight_scale": ones([2, 1], "BF16")},
        "in any strategy", ct(8),
    ),
    # packings that two versions read differently
    "3 bits in as many words": Refusal(
        {**PACKED, f"{L}.weight_packed": row("I32", [4, 2]),
         f"{L}.weight_shape": row("I64", [2], struct.pack("<2q", 4, 20))},
        "version", ct(3),
    ),
    # formats, types and versions
    "gptq_p": Refusal(GPTQ, "gptq_p", method("gptq", bits=4, checkpoint_format="gptq_p")),
    "marlin of gptq": Refusal(GPTQ, "marlin", method("gptq", bits=4, is_marlin_format=True)),
    "words of other sizes": Refusal(GPTQ, "pack_dtype", method("gptq", bits=4, pack_dtype="int16")),
    "packings of AutoRound": Refusal(GPTQ, "packing_format", method("auto-round", packing_format="auto_round:x")),
    "awq gemv": Refusal(AWQ, "gemv", method("awq", version="gemv", group_size=32)),
    "int8 of kernels": Refusal(
        {f"{L}.weight": row("I8", [4, 8]), f"{L}.SCB": ones([4]), f"{L}.weight_format": row("U8", [], b"\2")},
        "weight_format",
    ),
    "a format of ComfyUI": Refusal(comfy(format="asym_w4a8_int8"), "asym_w4a8"),
    "a type of torchao": Refusal(AO, "Int4TilePacked", None, torchao("Int4TilePackedTo4dTensor")),
    "hqq in hqq": Refusal({f"{L}.W_q": row("U8", [4, 8]), f"{L}.quant_scale": row("U8", [], b"\1")}, "quantized"),
    "act-order of compressed-tensors": Refusal({**PACKED, f"{L}.weight_g_idx": row("I32", [32])}, "g_idx", ct(4)),
    # JSON that does not fit the bytes
    "a shape that is too large": Refusal(bnb(shape=[80, 16]), "do not fit"),
    "a shape of texts": Refusal(bnb(shape=["8", "16"]), "JSON"),
    "a block size of 0": Refusal(bnb(blocksize=0), "do not fit"),
    "a quant_type that is not known": Refusal(bnb(quant_type="nf3"), "nf3"),
    # the weight alone is not the model's
    "pre_quant_scale": Refusal({**NVFP4, f"{L}.pre_quant_scale": ones([32])}, "pre_quant_scale", method("modelopt")),
    "svdquant": Refusal({**NVFP4, f"{L}.svdquant_lora_a": ones([4, 32])}, "svdquant", method("modelopt")),
    "transform_config": Refusal(PACKED, "rotated", ct(4, transform_config={"config_groups": {"u": {}}})),
    "convrot": Refusal(comfy(format="float8_e4m3fn", convrot=True), "convrot"),
    "act_pre_scale": Refusal(AO, "act_pre_scale", None, torchao("Int8Tensor", act_pre_scale=1)),
    # families that are named
    "AQLM": Refusal({f"{L}.codes": row("I8", [2, 4, 1]), f"{L}.codebooks": ones([1, 8, 1, 8], "F16"),
                     f"{L}.scales": ones([2, 1, 1, 1], "F16")}, "AQLM"),
    "EETQ": Refusal({f"{L}.weight": row("I8", [8, 4]), f"{L}.weight_scales": ones([4], "F16")}, "EETQ"),
    "VPTQ": Refusal({f"{L}.indices": row("I32", [4]), f"{L}.centroids.weight": ones([1, 8])}, "VPTQ"),
    "BitNet": Refusal({f"{L}.weight": row("U8", [2, 8]), f"{L}.weight_scale": ones([1])}, "BitNet", method("bitnet")),
    "EXL2": Refusal({f"{L}.q_weight": row("I32", [4, 8]), f"{L}.q_scale": row("I32", [1, 1]),
                     f"{L}.q_groups": row("I32", [2])}, "EXL2"),
    "EXL3": Refusal({f"{L}.trellis": row("I32", [4, 8]), f"{L}.suh": ones([4], "F16"),
                     f"{L}.svh": ones([4], "F16")}, "EXL3"),
    "Marlin": Refusal({f"{L}.B": row("I32", [4, 8]), f"{L}.s": ones([1, 8], "F16")}, "Marlin"),
    "QQQ": Refusal({f"{L}.B": row("I32", [4, 8]), f"{L}.s_channel": ones([1, 8]), f"{L}.s_group": ones([1])}, "QQQ"),
    "HIGGS": Refusal({f"{L}.weight": row("I32", [4, 8]), f"{L}.tables": ones([4], "F16"),
                      f"{L}.tables2": ones([4])}, "HIGGS"),
    "Quark": Refusal(FP8, "Quark", method("quark")),
    "SINQ": Refusal(AWQ, "SINQ", method("sinq", group_size=32)),
    "ParoQuant": Refusal({**AWQ, f"{L}.theta": ones([1]), f"{L}.pairs": ones([1])}, "ParoQuant"),
    "FP-Quant": Refusal({f"{L}.qweight": row("U8", [4, 8]), f"{L}.forward_hadamard_matrix": ones([4, 4])}, "FP-Quant"),
    "SpQR": Refusal({f"{L}.dense_weights": row("I32", [8]), f"{L}.row_offsets": row("I32", [2])}, "SpQR"),
    "marlin-24": Refusal({f"{L}.weight_packed": row("I32", [4, 8]), f"{L}.meta": row("I32", [4])}, "marlin-24"),
    "sparse-bitmask": Refusal({f"{L}.compressed": ones([8]), f"{L}.bitmask": row("U8", [4, 2]),
                               f"{L}.row_offsets": row("I64", [4])}, "sparse-bitmask"),
    "sparse-24-bitmask": Refusal({f"{L}.compressed": ones([8]), f"{L}.bitmask": row("U8", [4, 2]),
                                  f"{L}.shape": row("I64", [2, 1])}, "sparse-24-bitmask"),
    "BitBLAS": Refusal(GPTQ, "BitBLAS", method("bitblas")),
    # more of the reasons above, in other families
    "bitsandbytes without absmax": Refusal(without(bnb(), ".absmax"), "absmax"),
    "nested absmax without its own": Refusal({**bnb(), f"{L}.weight.absmax": row("U8", [2])}, "absmax is quantized"),
    "ComfyUI without a scale": Refusal(without(comfy(format="float8_e4m3fn"), "_scale"), "missing"),
    "nvfp4 without its global scale": Refusal(
        {f"{L}.weight_packed": row("U8", [8, 16]), f"{L}.weight_scale": row("F8_E4M3", [8, 2])},
        "second scale", method("compressed-tensors"),
    ),
    "the group size of gptq": Refusal(without(GPTQ, ".g_idx"), "group_size", method("gptq", bits=4)),
    "who made mxfp8": Refusal(
        {f"{L}.weight": row("F8_E4M3", [8, 32]), f"{L}.weight_scale": row("U8", [8, 1])}, "the library that quantized the weight"
    ),
    "mlx without biases": Refusal(
        {f"{L}.weight": row("U32", [4, 8]), f"{L}.scales": ones([4, 1])}, "biases",
        {"quantization": {"group_size": 64, "bits": 4}},
    ),
}  # fmt: skip
REFUSALS |= UNFIT


def test_each_family_that_is_not_read_has_a_file() -> None:
    named = {each.name.removeprefix("compressed-tensors ") for each in OTHERS} | {*METHODS.values()}
    assert named <= REFUSALS.keys()


def test_each_refusal_of_the_package_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watch(monkeypatch, (QuantizedWeight, "refused"))
    quantized.find(ckptkit.open(pickled(tmp_path)))
    for number, refusal in enumerate(REFUSALS.values()):
        (tmp_path / str(number)).mkdir()
        quantized.find(ckptkit.open(made(refusal, tmp_path / str(number))))
    for number in GGUF:
        quantized.find(ckptkit.open(gguf(tmp_path, number)))
    for name in ("refused", "unfit"):
        assert unreached(modules(quantized), found, is_called(name)) == []


# Types of GGUF: the order of bytes, and a word of the reason.
GGUF = {155: ("<", "155 is unknown"), 31: ("<", "interleaved"), 15: ("<", "intermediate results"),
        16: (">", "big-endian")}  # fmt: skip


def gguf(folder: Path, number: int) -> Path:
    dtype = GGML.get(number)
    shape, data = ((2, dtype.block), bytes(2 * dtype.itemsize)) if dtype else ((2, 3), bytes(64))
    path = folder / f"{number}.gguf"
    path.write_bytes(of_gguf((), [Entry("w", shape, number, data)], order=GGUF[number][0]))
    return path


@pytest.mark.parametrize("number", GGUF)
def test_types_of_gguf(run: Run, tmp_path: Path, number: int) -> None:
    """They are shown; who needs their numbers gets the reason, and the other tensors by name."""
    path, out = gguf(tmp_path, number), tmp_path / "out.safetensors"
    reason = GGUF[number][1]
    shown = run("inspect", path)
    assert (shown.code, reason in shown.stdout) == (0, True)
    done = run("convert", path, out, "--dequantize", "float32")
    assert done.code == 3
    assert reason in done.stderr
    assert "--drop" in done.stderr
    assert not out.exists()


def pickled(folder: Path) -> Path:
    """A subclass of torchao's that says another shape than its parts make."""
    parts = {"qdata": torch.zeros(8, 16, dtype=torch.uint8), "scale": torch.ones(8, 1)}
    parts["scale"] = parts["scale"].to(torch.float8_e8m0fnu)
    state = {**parts, "block_size": 32, "elem_dtype": torch.float4_e2m1fn_x2}
    weight = Wrapped(
        "torchao.prototype.mx_formats.mx_tensor", "MXTensor", torch.zeros(8, 16), state
    )
    save({"fc.weight": weight}, folder / "model.pth")
    return folder / "model.pth"


def test_a_pickled_weight_of_another_shape_than_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="which the pickle declares"):
        ckptkit.dequantize(ckptkit.open(pickled(tmp_path)), "bfloat16")


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("act-order of compressed-tensors", "compressed-tensors 0.17"),
        ("sparse-bitmask", "compressed-tensors 0.10"),
        ("sparse-24-bitmask", "compressed-tensors 0.10"),
    ],
)
def test_a_refusal_names_what_reads_it(reason: str, hint: str, tmp_path: Path, run: Run) -> None:
    path = made(REFUSALS[reason], tmp_path)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 3 and REFUSALS[reason].word in done.stderr and hint in done.stderr
    assert hint[1:] in run("doctor", path).stdout and not (tmp_path / "out.safetensors").exists()


def test_a_shard_alone_is_not_dequantized(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "model-00001-of-00002.safetensors", without(FP8, "_inv"), config=BLOCKS)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 3 and not (tmp_path / "out.safetensors").exists()
    assert "shard" in done.stderr


def made(refusal: Refusal, folder: Path) -> Path:
    tensors = {"model.norm.weight": ones([4], "BF16"), **refusal.tensors}
    for name, value in (refusal.beside or {}).items():
        (folder / name).write_text(json.dumps(value))
    return write(folder / "model.safetensors", tensors, refusal.metadata, refusal.config)


@pytest.mark.parametrize("reason", REFUSALS)
def test_it_is_refused_with_its_reason(reason: str, tmp_path: Path) -> None:
    ck = ckptkit.open(made(REFUSALS[reason], tmp_path))
    with pytest.raises(UnsupportedError, match=REFUSALS[reason].word):
        ckptkit.dequantize(ck, "bfloat16")
    with pytest.raises(UsageError, match="quantized as"):  # nor is it cast
        ckptkit.cast(ck, "float32")
    assert ckptkit.cast(ck, {"*norm*": "float32"}).notes  # other tensors are


@pytest.mark.parametrize("reason", ["the size of blocks", "AQLM", "fp8 without its scale"])
def test_it_is_shown_and_explained(reason: str, tmp_path: Path, run: Run) -> None:
    path = made(REFUSALS[reason], tmp_path)
    done = run("inspect", path)
    assert (
        done.code == 0 and "not dequantized" in done.stdout and REFUSALS[reason].word in done.stdout
    )
    done = run("doctor", path)
    assert done.code == 1 and REFUSALS[reason].word in done.stdout
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize", "bfloat16")
    assert done.code == 3 and not (tmp_path / "out.safetensors").exists()


def test_what_is_not_quantized_is_said_and_nothing_is_written(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "model.safetensors", {"fc.weight": ones([4, 4])})
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert (
        done.code == 2
        and "has no quantized" in done.stderr
        and not (tmp_path / "out.safetensors").exists()
    )


def test_codes_that_are_only_a_cast_are_cast(tmp_path: Path) -> None:
    path = write(
        tmp_path / "model.safetensors",
        {"fc.weight": row("F8_E4M3", [4, 4]), "norm.scale": ones([4])},
    )
    assert not quantized.find(ckptkit.open(path))
    assert (
        ckptkit.cast(ckptkit.open(path), "bfloat16").weights["fc.weight"].dtype.name == "bfloat16"
    )


@pytest.mark.parametrize("command", ["average", "join"])
def test_codes_are_not_mixed(command: str, tmp_path: Path, run: Run) -> None:
    fp8 = write(tmp_path / "a" / "model.safetensors", FP8, config=BLOCKS)
    gptq = write(
        tmp_path / "b" / "model.safetensors", GPTQ, config=method("gptq", bits=4, group_size=32)
    )
    done = run(command, fp8, fp8 if command == "average" else gptq, tmp_path / "out.safetensors")
    assert done.code == 2 and "fp8-block" in done.stderr and "--dequantize" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_a_weight_and_its_codes_are_not_merged(tmp_path: Path) -> None:
    codes = ckptkit.open(write(tmp_path / "a.safetensors", GPTQ))
    floats = ckptkit.open(write(tmp_path / "b.safetensors", {f"{L}.weight": ones([16, 64])}))
    with pytest.raises(UsageError, match="only one checkpoint"):
        ckptkit.join([codes, floats], last_wins=True)
    other = ckptkit.open(write(tmp_path / "c.safetensors", {"head.weight": ones([2, 2])}))
    assert len(ckptkit.join([codes, other]).weights) == 5


def test_averaged_codes_are_not_taken_out(tmp_path: Path) -> None:
    ck = ckptkit.open(write(tmp_path / "a.safetensors", FP8, config=BLOCKS))
    with pytest.raises(UsageError, match="fp8-block"):
        ckptkit.ema(ckptkit.wrap(ck, "ema", {"model": None}).with_key("ema"))


def test_a_name_that_is_taken_is_a_collision(tmp_path: Path) -> None:
    tensors = {**GPTQ, f"{L}.weight": ones([16, 64])}
    path = write(
        tmp_path / "model.safetensors", tensors, config=method("gptq", bits=4, group_size=32)
    )
    with pytest.raises(CollisionError, match="both"):
        ckptkit.dequantize(ckptkit.open(path))


def test_other_tensors_of_gguf(run: Run, tmp_path: Path) -> None:
    """The command of the hint leaves out the tensor whose type is not known."""
    tensors = [Entry("odd", (2, 3), 155, bytes(64)), Entry("w", (2, 32), 8, bytes(68))]
    (tmp_path / "m.gguf").write_bytes(of_gguf((), tensors))
    done = run("convert", "m.gguf", "x.safetensors", "--dequantize", cwd=tmp_path)
    assert done.code == 3 and "its type 155 is unknown" in done.stderr
    assert "`ckptkit convert m.gguf m.safetensors --dequantize bfloat16 --drop odd`" in done.stderr
    done = run("convert", "m.gguf", "x.safetensors", "--dequantize", "--drop", "odd", cwd=tmp_path)
    assert done.code == 0
    assert list(ckptkit.open(tmp_path / "x.safetensors").weights) == ["w"]
