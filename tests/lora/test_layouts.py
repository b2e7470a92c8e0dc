"""Each layout changes a base alike: an adapter of each kind is converted to every layout.

The bases have the original names. Elements are small integers, so sums and products are exact.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.core.errors import UnsupportedError
from ckptkit.lora.writing import convert_lora
from tests.lora import adapters
from tests.lora.adapters import save

Array = np.ndarray[Any, Any]
Names = dict[str, tuple[int, ...]]
RANDOM = np.random.default_rng(3)
ORIGINALS = ("kohya", "comfy")
LAYOUTS = (*ORIGINALS, "diffusers", "peft")
COMPONENTS = {"flux": "transformer", "unet": "unet"}
# For each family, the shapes of modules with the original names, and with those of diffusers.
NAMES: dict[str, tuple[Names, Names]] = {
    "flux": ({
        "double_blocks.0.img_attn.qkv": (12, 4), "double_blocks.0.img_attn.proj": (4, 4),
        "single_blocks.0.linear1": (28, 4), "single_blocks.0.linear2": (4, 20),
        "final_layer.adaLN_modulation.1": (8, 4),
    }, {
        **{f"{block}.0.attn.to_{each}": (4, 4) for each in "qkv"
           for block in ("transformer_blocks", "single_transformer_blocks")},
        "transformer_blocks.0.attn.to_out.0": (4, 4),
        "single_transformer_blocks.0.proj_mlp": (16, 4),
        "single_transformer_blocks.0.proj_out": (4, 20), "norm_out.linear": (8, 4),
    }),
    "unet": ({
        "input_blocks.1.0.in_layers.2": (4, 4, 3, 3), "input_blocks.1.1.proj_in": (4, 4, 1, 1),
        "input_blocks.1.1.transformer_blocks.0.attn1.to_q": (4, 6),
        "output_blocks.5.2.conv": (4, 2, 3, 3),
    }, {
        "down_blocks.0.resnets.0.conv1": (4, 4, 3, 3),
        "down_blocks.0.attentions.0.proj_in": (4, 4, 1, 1),
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (4, 6),
        "up_blocks.1.upsamplers.0.conv": (4, 2, 3, 3),
    }),
}  # fmt: skip
PEFT = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight",
        "dora_scale": "lora_magnitude_vector", "diff_b": "lora_B.bias"}  # fmt: skip
ALIKE = ("lora", "dora", "bias")  # kinds that peft and diffusers have too
KINDS = (*ALIKE, "columns", "diff_b", "diff", "tucker", "loha", "lokr", "loha dora")


def integers(*shape: int, least: int = -4) -> Array:
    return RANDOM.integers(least, 5, shape).astype("f4")


def module(kind: str, shape: tuple[int, ...], rank: int = 2) -> dict[str, Array]:
    """Return the tensors of a module with the names and shapes of kohya."""
    rows, columns, *kernel = shape
    ones, most = [1 for _ in kernel], prod(shape[1:])
    found = {
        "lora_down.weight": integers(rank, columns, *kernel),
        "lora_up.weight": integers(rows, rank, *ones),
    }
    dora = {"dora_scale": integers(rows, 1, *ones, least=1)}
    loha = {f"hada_w{n}_a": integers(rows, rank) for n in (1, 2)}
    loha |= {f"hada_w{n}_b": integers(rank, most) for n in (1, 2)}
    return {
        "lora": found,
        "bias": found | {"diff_b": integers(rows)},
        "dora": found | dora,
        "columns": found | {"dora_scale": integers(1, columns, *ones, least=1)},
        "diff_b": {"diff_b": integers(rows)},
        "diff": {"diff": integers(*shape), "diff_b": integers(rows)},
        "tucker": found | {
            "lora_down.weight": integers(rank, columns, *ones),
            "lora_mid.weight": integers(rank, rank, *kernel),
        },
        "lokr": {
            "lokr_w1": integers(2, 2), "lokr_w2_a": integers(rows // 2, rank),
            "lokr_w2_b": integers(rank, most // 2),
        },
        "loha": loha,
        "loha dora": loha | dora,
    }[kind]  # fmt: skip


def adapter(folder: Path, family: str, names: Names, layout: str, kind: str) -> Path:
    """Write an adapter with alpha 6. Its modules have the ranks 2 and 3 in turn."""
    made: dict[str, Array] = {}
    component, ranks = COMPONENTS[family], {name: 2 + n % 2 for n, name in enumerate(names)}
    for name, shape in names.items():
        start = {"kohya": f"lora_unet_{name.replace('.', '_')}", "comfy": f"diffusion_model.{name}",
                 "peft": name, "diffusers": f"{component}.{name}"}[layout]  # fmt: skip
        for role, array in module(kind, shape, ranks[name]).items():
            if layout not in ORIGINALS and role == "dora_scale":
                array = array.reshape(1, -1, 1, 1) if shape[2:] else array.reshape(-1)
            made[f"{start}.{role if layout in ORIGINALS else PEFT[role]}"] = array
        if layout in ORIGINALS and kind not in ("diff", "diff_b"):
            made[f"{start}.alpha"] = np.array(6, "f4")
    config = {"r": 2, "lora_alpha": 6, "use_dora": kind == "dora", "lora_bias": kind == "bias",
              "rank_pattern": {f"^{re.escape(n)}": 3 for n in names if ranks[n] == 3}}  # fmt: skip
    if layout == "peft":
        return adapters.adapter(folder, made, **config)
    metadata = json.dumps({f"{component}.{key}": each for key, each in config.items()})
    path = folder / f"{layout}.safetensors"
    return save(path, made, {"lora_adapter_metadata": metadata} if "diff" in layout else None)


def merged(base: Path, own: Path) -> dict[str, Array]:
    weights = ckptkit.merge_lora(base, own).weights
    return {name: each.numpy().copy() for name, each in weights.items()}


CASES = [
    (family, spelling, layout, kind)
    for family in NAMES for spelling in (0, 1) for layout in LAYOUTS
    for kind in (KINDS if layout in ORIGINALS else ALIKE)
    if not (family == "flux" and kind == "tucker")  # Flux has no convolutions
    and (family, spelling, kind) != ("flux", 1, "columns")  # such a merge is refused
]  # fmt: skip


@pytest.mark.parametrize(("family", "spelling", "layout", "kind"), CASES)
def test_every_layout_changes_the_base_alike(
    family: str, spelling: int, layout: str, kind: str, tmp_path: Path
) -> None:
    names, weights = NAMES[family][spelling], dict[str, Array]()
    for name, shape in NAMES[family][0].items():
        at = f"model.diffusion_model.{name}"
        weights |= {f"{at}.weight": integers(*shape, least=1), f"{at}.bias": integers(shape[0])}
    base = save(tmp_path / "base.safetensors", weights)
    own = adapter(tmp_path, family, names, layout, kind)
    expected = merged(base, own)
    ends = {name.rpartition(".")[2] for name in weights if (expected[name] != weights[name]).any()}
    assert ends == {"bias": {"weight", "bias"}, "diff": {"weight", "bias"}, "diff_b": {"bias"}}.get(
        kind, {"weight"}
    )
    for to in LAYOUTS:
        for bake in (False, True) if kind in ALIKE else (False,):
            is_stored = kind in ("lora", "dora") or (
                to in ORIGINALS if kind != "bias" else to in ORIGINALS or layout not in ORIGINALS
            )
            is_split = family == "flux" and spelling == (1 if to in ORIGINALS else 0)
            out = tmp_path / f"to-{to}-{bake}{'' if to == 'peft' else '.safetensors'}"
            if not is_stored or (is_split and kind not in ALIKE):
                with pytest.raises(UnsupportedError, match=r"cannot (convert|store)|splits or"):
                    convert_lora(own, out, to, bake=bake)
                continue
            convert_lora(own, out, to, bake=bake)
            made = merged(base, out)
            for name, array in expected.items():
                np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-5)


def test_all_components_of_a_pipeline(tmp_path: Path) -> None:
    """The second text encoder of SDXL fuses q, k and v in a parameter, with their biases."""
    layer, made, weights = "text_model.encoder.layers.0", dict[str, Array](), dict[str, Array]()
    names = {"self_attn.q_proj": (4, 4), "self_attn.v_proj": (4, 4), "mlp.fc1": (8, 4)}
    for name, shape in names.items():
        at = f"conditioner.embedders.0.transformer.{layer}.{name}"
        weights |= {f"{at}.weight": integers(*shape), f"{at}.bias": integers(shape[0])}
        for encoder in ("text_encoder", "text_encoder_2"):
            own = {PEFT[role]: each for role, each in module("bias", shape).items()}
            made |= {f"{encoder}.{layer}.{name}.{role}": each for role, each in own.items()}
    block = "conditioner.embedders.1.model.transformer.resblocks.0"
    weights |= {f"{block}.attn.in_proj_weight": integers(12, 4), f"{block}.mlp.c_fc.bias": integers(8),
                f"{block}.attn.in_proj_bias": integers(12), f"{block}.mlp.c_fc.weight": integers(8, 4),
                "model.diffusion_model.input_blocks.0.0.weight": integers(4, 4, 3, 3)}  # fmt: skip
    unet = {
        f"unet.conv_in.{PEFT[role]}": each for role, each in module("lora", (4, 4, 3, 3)).items()
    }
    base = save(tmp_path / "base.safetensors", weights)
    first = save(tmp_path / "first.safetensors", made | unet)
    expected = merged(base, first)
    assert all((expected[name] != each).any() for name, each in weights.items())
    for to in ("kohya", "comfy", "diffusers"):
        convert_lora(first, tmp_path / f"{to}.safetensors", to)
        again = merged(base, tmp_path / f"{to}.safetensors")
        assert all((again[name] == each).all() for name, each in expected.items())
