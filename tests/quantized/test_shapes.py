"""Shapes that no vector has, against the formula, computed by torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit


def dequantized(
    folder: Path, tensors: dict[str, torch.Tensor], config: Any, dtype: str = "float32"
) -> Any:
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return ckptkit.load(ckptkit.dequantize(ckptkit.open(folder / "model.safetensors"), dtype))


def spread(scale: torch.Tensor, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)
    return wide[..., : like.shape[-2], : like.shape[-1]]


@pytest.mark.parametrize("shape", [(3, 130, 260), (2, 1, 7), (5, 300), (1, 1)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128)])
def test_fp8_blocks_of_any_shape(
    shape: tuple[int, ...], block: tuple[int, int], tmp_path: Path
) -> None:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scale = torch.rand(grid) * 300
    name = "experts.gate_up_proj" if len(shape) == 3 else "fc.weight"
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    found = dequantized(tmp_path, {name: codes, f"{name}_scale_inv": scale}, config)
    assert torch.equal(found[name], codes.float() * spread(scale, *block, codes))


def test_one_scale_for_all_experts(tmp_path: Path) -> None:
    codes = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    tensors = {"experts.up": codes, "experts.up_scale_inv": torch.tensor([0.75])}
    found = dequantized(tmp_path, tensors, {"quantization_config": {"quant_method": "fp8"}})
    assert torch.equal(found["experts.up"], codes.float() * 0.75)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_codes_with_scales_of_any_size(code: torch.dtype, dtype: str, tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(8, 1).view(code)
    scale = torch.tensor([1e-38, 1e-41, 0.37, 127.9, 128.1, 1e30, 0.0, float("inf")])[:, None]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 256]}}
    found = dequantized(tmp_path, {"fc.weight": codes, "fc.weight_scale_inv": scale}, config, dtype)
    expected = (codes.float() * scale).to(getattr(torch, dtype))
    ours, bits = found["fc.weight"], torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num(7.0).view(bits), expected.nan_to_num(7.0).view(bits))


@pytest.mark.parametrize("order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize(
    ("bits", "rows", "columns", "size"), [(4, 4104, 64, 48), (8, 64, 4096, 128), (2, 32, 96, -1)]
)
def test_gptq_of_any_shape(
    bits: int, rows: int, columns: int, size: int, order: bool, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(bits)
    groups = 1 if size == -1 else -(-columns // size)
    codes = torch.randint(0, 1 << bits, (columns, rows), generator=draw)
    zeros = torch.randint(1, 1 << bits, (groups, rows), generator=draw)
    index = torch.arange(columns) // (columns if size == -1 else size)
    index = index[torch.randperm(columns, generator=draw)] if order else index
    scales = torch.rand(groups, rows, generator=draw).half()
    tensors = {
        "fc.qweight": packed(codes.T, bits).T, "fc.qzeros": packed(zeros - 1, bits), "fc.scales": scales,
        "fc.g_idx": index.int(),
    }  # fmt: skip
    config = {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": size}}
    found = dequantized(tmp_path, tensors, config, "bfloat16")
    expected = (codes - zeros[index]).float() * scales[index].float()
    assert torch.equal(found["fc.weight"], expected.T.bfloat16())


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last dimension in words of 32 bits, from the low bits up."""
    each = 32 // bits
    words = codes.reshape(*codes.shape[:-1], -1, each).long() << (torch.arange(each) * bits)
    whole = words.sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize(
    "exponents", [(100, 140), (180, 188), (180, 189), (188, 190), (0, 1), (254, 256), (0, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_turned(
    dtype: torch.dtype, exponents: tuple[int, int], experts: int, tmp_path: Path
) -> None:
    """Bit by bit: zeros have signs, products are below the normal numbers, and 2**128 a scale."""
    rows, columns = 200, 96
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(*exponents, (experts, rows, columns // 32), dtype=torch.uint8)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    found = dequantized(tmp_path, tensors, {}, str(dtype).removeprefix("torch."))["w"]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).reshape(experts, rows, columns // 32, 32)
    wide = torch.ldexp(table[codes.long()].double(), scales[..., None].double() - 127)
    expected = wide.to(dtype).reshape(experts, rows, columns).transpose(1, 2).contiguous()
    unit = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(found.view(unit), expected.view(unit))


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_in_the_middle_of_two_bfloat16_numbers_are_rounded_to_even(
    code: torch.dtype, tmp_path: Path
) -> None:
    numbers = torch.arange(0x7C, dtype=torch.uint8)
    codes = torch.cat([numbers, numbers | 0x80]).repeat(512, 1).view(code)
    few = 1 + torch.arange(256) / 256  # of few bits: a product of which lies in the middle
    many = torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5
    scale = torch.cat([few, many])[:, None] / 64
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 248]}}
    for factor in (1.0, 2.0**-120):  # the second gives numbers below the normal ones
        part = scale * factor
        tensors = {"fc.weight": codes, "fc.weight_scale_inv": part}
        found = dequantized(tmp_path, tensors, config, "bfloat16")["fc.weight"]
        expected = (codes.float() * part).bfloat16()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        for row in range(500, 512):  # whose products have no such middle, by themselves
            tensors = {"fc.weight": codes[row:][:1], "fc.weight_scale_inv": part[row:][:1]}
            alone = dequantized(tmp_path, tensors, config, "bfloat16")["fc.weight"]
            assert torch.equal(alone.view(torch.int16), expected[row:][:1].view(torch.int16))


def test_experts_of_llama_4_by_fbgemm(tmp_path: Path) -> None:
    codes = torch.randn(3, 8, 12).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 1, 12)
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    name = "experts.gate_up_proj"
    found = dequantized(tmp_path, {name: codes, f"{name}_scale": scale}, config)
    assert torch.equal(found[name], codes.float() * scale)


MODELOPT = {
    "channel": ([24], {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "blocks with dimensions of 1 between": (
        [3, 1, 2, 1], {"quant_algo": "FP8_PB_WO", "weight_block_size": [8, 16]},
    ),
    "square blocks": ([3, 4], {"quant_algo": "FP8_PB_WO", "group_size": 8}),
}  # fmt: skip


@pytest.mark.parametrize("layout", MODELOPT)
def test_modelopt_rounds_scales_to_the_target_first(layout: str, tmp_path: Path) -> None:
    shape, said = MODELOPT[layout]
    draw = torch.Generator().manual_seed(4)
    codes = torch.randn(24, 32, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=draw)
    config = {"quantization_config": {"quant_method": "modelopt", **said}}
    found = dequantized(
        tmp_path, {"fc.weight": codes, "fc.weight_scale": scale}, config, "bfloat16"
    )
    flat = scale[:, None] if len(shape) == 1 else scale.squeeze()
    rows, columns = flat.shape
    wide = spread(flat, 24 // rows, 32 // columns, codes)
    assert torch.equal(found["fc.weight"], codes.bfloat16() * wide.bfloat16())
