"""Rules on quantized weights: codes and scales stay together, and blocks stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit import quantized
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from tests.quantized.made import Row, ones, row, write
from tests.quantized.refusals import BLOCKS, FP8, GPTQ, L

STACK = [
    f"x.{{e}}.{{m:w1|w3}}.weight{part} [o i] -> x.gate_up{part} [e (m o) i]"
    for part in ("", "_scale_inv")
]


def opened(folder: Path, tensors: Mapping[str, Row], config: Any = BLOCKS) -> Checkpoint:
    return ckptkit.open(write(folder / "model.safetensors", tensors, config=config))


def experts(rows: int) -> dict[str, Row]:
    """Two experts with matrices of `rows` x 130, in blocks of 128 x 128."""
    found = {}
    for number, name in enumerate(f"x.{e}.{m}.weight" for e in (0, 1) for m in ("w1", "w3")):
        codes = bytes((number * 31 + n) % 120 for n in range(rows * 130))
        found[name] = row("F8_E4M3", [rows, 130], codes)
        found[f"{name}_scale_inv"] = ones([-(-rows // 128), 2])
    return found


@pytest.mark.parametrize(("tensors", "code"), [(FP8, "weight"), (GPTQ, "qweight")])
def test_a_rename_moves_the_group_whole(
    tensors: Mapping[str, Row], code: str, tmp_path: Path
) -> None:
    ck = opened(tmp_path, {**tensors, "norm.weight": ones([4])})
    made = ckptkit.apply_rules(ck, f"{L}.{code} -> fc.{code}", keep="rest")
    assert set(made.weights) == {*(name.replace(L, "fc") for name in tensors), "norm.weight"}
    (group,), (old,) = quantized.find(made).groups, quantized.find(ck).groups
    assert (group.name, group.family, group.shape) == ("fc.weight", old.family, old.shape)
    assert len(group.parts) == len(old.parts)
    back = ckptkit.apply_rules(made, f"{L}.{code} -> fc.{code}", keep="rest", reverse=True)
    assert set(back.weights) == set(ck.weights)


def test_parts_do_not_go_to_two_modules(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp8-block.*would move to"):
        ckptkit.apply_rules(
            opened(tmp_path, FP8),
            [f"{L}.weight -> a.weight", f"{L}.weight_scale_inv -> b.weight_scale_inv"],
        )


def test_whole_blocks_are_stacked_and_joined(tmp_path: Path) -> None:
    import torch

    ck = opened(tmp_path, experts(256))
    made = ckptkit.apply_rules(ck, STACK)
    (group,) = quantized.find(made).groups
    assert group.name == "x.gate_up" and group.shape == (2, 512, 130)
    stacked = ckptkit.load(ckptkit.dequantize(made, "float32"))["x.gate_up"]
    plain = ckptkit.load(ckptkit.dequantize(ck, "float32"))
    for e in (0, 1):
        both = torch.cat([plain[f"x.{e}.{m}.weight"] for m in ("w1", "w3")])
        assert torch.equal(stacked[e], both)


def test_blocks_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp8-block.*rule 1 would cut its blocks") as caught:
        ckptkit.apply_rules(opened(tmp_path, experts(200)), STACK)
    assert "--dequantize" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("tensors", "rule", "family"),
    [
        (FP8, f"{L}.weight [(h r two) i] -> {L}.weight [(h two r) i] with h=2 two=2", "fp8-block"),
        (FP8, f"{L}.weight [o i] -> {L}.weight [i o]", "fp8-block"),
        (GPTQ, f"{L}.qweight [i o] -> {L}.qweight [o i]", "gptq"),
        (GPTQ, f"{L}.qweight [i (p o)] -> {{p:a|b}}.qweight [i o]", "gptq"),
    ],
)
def test_elements_are_not_moved_inside_of_blocks(
    tensors: Mapping[str, Row], rule: str, family: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"{family}.*rule 1 would cut its blocks"):
        ckptkit.apply_rules(opened(tmp_path, tensors), rule, keep="rest")


def test_codes_are_not_stacked_without_their_scales(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp8-block.*rule 1 separates codes and scales"):
        ckptkit.apply_rules(opened(tmp_path, experts(256)), STACK[:1], keep="rest")
