"""Conversion of adapters: names by hand, changes computed from both files with numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptkit.core.errors import AmbiguousError, CkptkitError, UnsupportedError, UsageError
from ckptkit.lora.check import check_lora
from ckptkit.lora.writing import convert_lora
from tests.lora.adapters import CONFIG, WEIGHTS, adapter, loaded, save, scales_of

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(5)
ROLES = {"lora_down": "A", "lora_A": "A", "lora_up": "B", "lora_B": "B"}
AT = "base_model.model."


def factors(out: int, inner: int, rank: int, kernel: tuple[int, ...] = ()) -> dict[str, Array]:
    a = RANDOM.integers(-8, 9, (rank, inner, *kernel)).astype("f4")
    b = RANDOM.integers(-8, 9, (out, rank, *(1 for _ in kernel))).astype("f4")
    return {"A": a, "B": b}


def kohya(modules: dict[str, tuple[dict[str, Array], float]]) -> dict[str, Array]:
    made: dict[str, Array] = {}
    for name, (each, alpha) in modules.items():
        made |= {f"{name}.lora_down.weight": each["A"], f"{name}.lora_up.weight": each["B"]}
        made[f"{name}.alpha"] = np.array(alpha, "f4")
    return made


def diffusers(modules: dict[str, dict[str, Array]]) -> dict[str, Array]:
    return {f"{name}.lora_{role}.weight": x for name, e in modules.items() for role, x in e.items()}


def changes(path: Path) -> dict[str, Array]:
    """Return the change of each module, as a reader of the layout computes it, in float64."""
    found: dict[str, dict[str, Array]] = {}
    for name, tensor in loaded(path).items():
        module, _, role = name.removeprefix(AT).rpartition(".")
        if role == "weight":
            module, _, role = module.rpartition(".")
        found.setdefault(module, {})[ROLES.get(role, role)] = tensor.numpy()
    scales, made = scales_of(path), {}
    for name, each in found.items():
        rank = len(each["A"])
        scale = float(each["alpha"]) / rank if "alpha" in each else scales[name]
        b, a = (each[role].reshape(len(each[role]), -1).astype("f8") for role in "BA")
        made[name] = (b @ a * scale).reshape(len(b), *each["A"].shape[1:])
    return made


def converted(tmp_path: Path, tensors: dict[str, Array], to: str, **options: Any) -> Path:
    source = save(tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}.safetensors", tensors)
    path = tmp_path / (to if to == "peft" else f"{to}.safetensors")
    convert_lora(source, path, to, force=True, **options)
    return path


def same(one: dict[str, Array], other: dict[str, Array], exact: bool = True) -> None:
    assert one.keys() == other.keys()
    error = 0 if exact else 1e-5
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=error, atol=error)


def test_flux_there_and_back(tmp_path: Path) -> None:
    """Ranks and scales differ; q, k, v and the MLP of a single block are rows of one matrix."""
    names = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
    before = {
        f"transformer.single_transformer_blocks.2.{name}": factors(28 if "mlp" in name else 7, 5, 2)
        for name in names
    }
    before["transformer.transformer_blocks.0.attn.to_k"] = factors(6, 5, 3)
    before["transformer.transformer_blocks.0.attn.to_v"] = factors(6, 5, 1)
    before["transformer.norm_out.linear"] = factors(8, 5, 2)
    there = converted(tmp_path, diffusers(before), "kohya")
    found = changes(there)
    plain = changes(tmp_path / "adapter-0.safetensors")
    k, v = (plain[f"transformer.transformer_blocks.0.attn.to_{each}"] for each in "kv")
    halves = np.split(plain["transformer.norm_out.linear"], 2)
    same(found, {
        "lora_unet_single_blocks_2_linear1": np.concatenate(
            [plain[f"transformer.single_transformer_blocks.2.{name}"] for name in names]
        ),
        "lora_unet_double_blocks_0_img_attn_qkv": np.concatenate([np.zeros((6, 5)), k, v]),
        "lora_unet_final_layer_adaLN_modulation_1": np.concatenate(halves[::-1]),
    })  # fmt: skip
    back = tmp_path / "back.safetensors"
    convert_lora(there, back, "diffusers")
    again = changes(back)
    assert not again.pop("transformer.transformer_blocks.0.attn.to_q").any()
    same(again, plain)
    for name in names:  # block-diagonal: each has its own factors again
        at = f"transformer.single_transformer_blocks.2.{name}.lora_A.weight"
        np.testing.assert_array_equal(
            load_file(back)[at], load_file(tmp_path / "adapter-0.safetensors")[at]
        )


def test_unequal_scales_are_multiplied_into_b(tmp_path: Path) -> None:
    name = "lora_transformer_single_transformer_blocks_0_attn_to_"
    modules = {
        f"{name}{each}": (factors(4, 3, 2), alpha)
        for each, alpha in zip("qkv", (2, 1, 6), strict=True)
    }
    path = converted(tmp_path, kohya(modules), "comfy")
    plain = changes(tmp_path / "adapter-0.safetensors")
    made = changes(path)["diffusion_model.single_blocks.0.linear1"]
    expected = np.concatenate([*(plain[f"{name}{each}"] for each in "qkv"), np.zeros((16, 3))])
    np.testing.assert_array_equal(made, expected)
    assert float(load_file(path)["diffusion_model.single_blocks.0.linear1.alpha"]) == 6


@pytest.mark.parametrize("bake", [False, True])
@pytest.mark.parametrize("to", ["diffusers", "comfy", "peft"])
def test_a_unet_of_kohya(tmp_path: Path, to: str, bake: bool) -> None:
    modules = {
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": (factors(4, 3, 2), 1),
        "lora_unet_up_blocks_0_upsamplers_0_conv": (factors(4, 3, 2, (3, 3)), 0.5),
        "lora_unet_up_blocks_1_upsamplers_0_conv": (factors(4, 3, 4, (3, 3)), 4),
        "lora_unet_mid_block_resnets_1_conv2": (factors(4, 3, 3, (3, 3)), 1),
    }  # fmt: skip
    path = converted(tmp_path, kohya(modules), to, bake=bake)
    names = {
        "diffusers": [
            "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
            "unet.up_blocks.0.upsamplers.0.conv", "unet.up_blocks.1.upsamplers.0.conv",
            "unet.mid_block.resnets.1.conv2",
        ],
        "comfy": [
            "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q",
            "diffusion_model.output_blocks.2.1.conv", "diffusion_model.output_blocks.5.2.conv",
            "diffusion_model.middle_block.2.out_layers.3",
        ],
    }  # fmt: skip
    names["peft"] = [name.removeprefix("unet.") for name in names["diffusers"]]
    plain = changes(tmp_path / "adapter-0.safetensors")
    expected = dict(zip(names[to], (plain[name] for name in modules), strict=True))
    same(changes(path), expected, exact=not bake)
    if not bake:  # byte for byte
        values = [
            {x.numpy().tobytes() for n, x in loaded(file).items() if "alpha" not in n}
            for file in (tmp_path / "adapter-0.safetensors", path)
        ]
        assert values[0] == values[1]


def test_sdxl_has_two_text_encoders(tmp_path: Path) -> None:
    text = "text_model.encoder.layers.0.self_attn.q_proj"
    modules = {
        f"text_encoder.{text}": factors(4, 4, 2), f"text_encoder_2.{text}": factors(4, 4, 2),
        "unet.up_blocks.0.upsamplers.0.conv": factors(4, 4, 2, (3, 3)),
    }  # fmt: skip
    assert set(changes(converted(tmp_path, diffusers(modules), "comfy"))) == {
        f"text_encoders.clip_l.transformer.{text}", f"text_encoders.clip_g.transformer.{text}",
        "diffusion_model.output_blocks.2.2.conv",
    }  # fmt: skip
    back = tmp_path / "again.safetensors"
    convert_lora(tmp_path / "comfy.safetensors", back, "diffusers")
    same(changes(back), changes(tmp_path / "adapter-0.safetensors"))
    convert_lora(tmp_path / "comfy.safetensors", tmp_path / "k.safetensors", "kohya")
    assert {name.split("_text")[0] for name in changes(tmp_path / "k.safetensors")} == {
        "lora_te1", "lora_te2", "lora_unet_output_blocks_2_2_conv",
    }  # fmt: skip


def test_t5_is_the_second_text_encoder_of_flux(tmp_path: Path) -> None:
    name = "encoder_block_0_layer_0_SelfAttention_q"
    modules = {
        "lora_unet_single_blocks_0_linear2": (factors(4, 4, 2), 2.0),
        f"lora_te3_{name}": (factors(4, 4, 2), 2.0),
    }
    found = changes(converted(tmp_path, kohya(modules), "diffusers"))
    assert "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q" in found
    back = tmp_path / "back.safetensors"
    convert_lora(tmp_path / "diffusers.safetensors", back, "kohya")
    assert changes(back).keys() == modules.keys()


def test_names_of_the_same_layout_stay(tmp_path: Path) -> None:
    name = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    found = changes(converted(tmp_path, kohya({name: (factors(4, 4, 2), 1.0)}), "kohya", bake=True))
    assert list(found) == [name]


def test_one_text_encoder_is_that_of_sd15(tmp_path: Path) -> None:
    name = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    found = changes(converted(tmp_path, diffusers({name: factors(4, 4, 2)}), "kohya"))
    assert list(found) == ["lora_te_text_model_encoder_layers_0_mlp_fc1"]


def test_dora_of_some_rows(tmp_path: Path) -> None:
    tensors = kohya({"lora_unet_double_blocks_0_img_attn_qkv": (factors(6, 5, 2), 2)})
    magnitude = np.arange(6, dtype="f4").reshape(6, 1)
    tensors["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"] = magnitude
    path = converted(tmp_path, tensors, "diffusers")
    part = {name: x for name, x in load_file(path).items() if "to_v" not in name}
    with pytest.raises(UnsupportedError, match="only some rows"):
        converted(tmp_path, part, "comfy")


def test_dora_of_convolutions_and_columns(tmp_path: Path) -> None:
    name = "lora_unet_mid_block_resnets_0_conv1"
    tensors = kohya({name: (factors(4, 3, 2, (3, 3)), 2)})
    tensors[f"{name}.dora_scale"] = np.arange(4, dtype="f4").reshape(4, 1, 1, 1)
    path, back = converted(tmp_path, tensors, "peft"), tmp_path / "back.safetensors"
    found = loaded(path)[f"{AT}mid_block.resnets.0.conv1.lora_magnitude_vector"]
    assert found.shape == (1, 4, 1, 1)
    assert json.loads((path / CONFIG).read_text())["use_dora"] is True
    convert_lora(path, back, "kohya")
    assert loaded(back)[f"{name}.dora_scale"].shape == (4, 1, 1, 1)
    tensors[f"{name}.dora_scale"] = np.ones((1, 3, 1, 1), "f4")
    with pytest.raises(UnsupportedError, match="each column"):
        converted(tmp_path, tensors, "peft")
    found = loaded(converted(tmp_path, tensors, "comfy"))[
        "diffusion_model.middle_block.0.in_layers.2.dora_scale"
    ]
    assert found.shape == (1, 3, 1, 1)


def test_kinds_that_only_kohya_and_comfy_have(tmp_path: Path) -> None:
    name = "lora_unet_down_blocks_0_resnets_0_conv1"
    tensors = {f"{name}.hada_w{n}_{each}": np.ones((2, 2), "f4") for n in (1, 2) for each in "ab"}
    with pytest.raises(UnsupportedError, match=r"cannot convert.*loha"):
        converted(tmp_path, tensors, "peft")
    with pytest.raises(UnsupportedError, match="bake in"):
        converted(tmp_path, tensors, "comfy", bake=True)


@pytest.mark.parametrize(
    ("tensors", "to", "options", "error", "words"),
    [
        (kohya({"lora_unet_blocks_0_mlp_in_fc_1": (factors(2, 2, 1), 1)}), "comfy", {},
         UnsupportedError, "underscores"),
        (diffusers({"unet.conv_in": factors(2, 2, 1), "text_encoder.x": factors(2, 2, 1)}), "peft",
         {}, UnsupportedError, "2 components"),
        (diffusers({"unet.up_blocks.0.upsamplers.0.conv": factors(2, 2, 1, (3, 3))}), "comfy", {},
         AmbiguousError, "SDXL"),
        (diffusers({"transformer.transformer_blocks.0.attn.to_q": factors(2, 1536, 1)}), "kohya",
         {}, UnsupportedError, "SD 3"),
        *((diffusers({f"transformer.{block}.{module}": factors(2, 3072, 1) for block, module in (
              ("transformer_blocks.0", "attn.to_q"), (odd, "attn.to_q"))}),
           "kohya", {}, UnsupportedError, "HunyuanVideo")
          for odd in ("context_embedder.token_refiner.refiner_blocks.0", "transformer_blocks.19",
                      "single_transformer_blocks.38")),
        (diffusers({"transformer.transformer_blocks.0.ff.net.0.proj": factors(6144, 1536, 1)}),
         "kohya", {}, UnsupportedError, "SD 3"),
        (kohya({"lora_unet_conv_in": (factors(2, 2, 1), 1), "lora_unet_conv_out": (
            factors(2, 2, 1), 1)}) | {"lora_unet_conv_in.dora_scale": np.ones((2, 1), "f4")},
         "peft", {}, UnsupportedError, "conv_out has no DoRA magnitude"),
        (kohya({"lora_unet_conv_in": (factors(2, 2, 1), 1)})
         | {"lora_unet_conv_in.diff_b": np.ones(2, "f4")},
         "peft", {}, UnsupportedError, r"lora_unet_conv_in \(diff_b\)"),
        (diffusers({f"transformer.transformer_blocks.0.attn.to_{x}": factors(4, 2, 1) for x in "qkv"})
         | {f"transformer.transformer_blocks.0.attn.to_{x}.lora_magnitude_vector": np.ones(
            4, "f2" if x == "q" else "f4") for x in "qkv"},
         "kohya", {}, UnsupportedError, "differ in dtype"),
        (diffusers({"vae.encoder.conv_in": factors(2, 2, 1)}), "kohya", {}, UnsupportedError,
         "'vae'"),
        (kohya({"lora_unet_single_blocks_0_linear1": (factors(8, 2, 1), 1)}), "diffusers", {},
         UnsupportedError, "not divisible by 7"),
        (diffusers({"transformer.single_transformer_blocks.0.attn.to_q": factors(2, 2, 1),
                    "transformer.single_transformer_blocks.0.attn.to_k": factors(3, 2, 1)}),
         "kohya", {}, UnsupportedError, "differ in dtype or size"),
        (diffusers({"blocks.0.q": factors(2, 2, 1)}), "kohya", {}, CkptkitError, "scale"),
        (diffusers({"unet.conv_in": factors(2, 2, 1), "unet.input_blocks.0.0": factors(2, 2, 1)}),
         "comfy", {}, AmbiguousError, "two modules"),
        (diffusers({"unet.a.b_c": factors(2, 2, 1), "unet.a_b.c": factors(2, 2, 1)}), "kohya", {},
         AmbiguousError, "two modules"),
        (diffusers({"layers.0.q": factors(2, 2, 1)}), "kohya", {"alpha": 2.0}, UnsupportedError,
         "language model"),
        ({"unet.conv_in.lora_A.weight": np.ones((1, 2), "f4")}, "kohya", {}, UnsupportedError,
         "conv_in"),
        (diffusers({"unet.conv_in": factors(2, 2, 1)}), "onnx", {}, UsageError, "'onnx'"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path, tensors: dict[str, Array], to: str, options: Any, error: Any, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        converted(tmp_path, tensors, to, **options)
    assert caught.value.hint or to == "onnx"
    assert len(list(tmp_path.iterdir())) == 1


def test_names_of_two_models_are_told(tmp_path: Path) -> None:
    """Flux and others have double blocks, SD 1.5 and SDXL the same blocks: a warning says so."""
    for name, word in (
        ("transformer.transformer_blocks.0.attn.to_q", "Flux"),
        ("unet.down_blocks.1.attentions.0.proj_in", "SDXL"),
    ):
        source = save(tmp_path / "one.safetensors", diffusers({name: factors(2, 2, 1)}))
        done = convert_lora(source, tmp_path / f"{word}.safetensors", "kohya")
        assert word in str(done.warnings)


def test_of_peft(tmp_path: Path) -> None:
    """The default component is that whose names it has; rslora becomes alpha."""
    tensors = diffusers({"down_blocks.0.attentions.0.proj_in": factors(2, 3, 4)})
    config = {"r": 4, "lora_alpha": 8, "use_rslora": True}
    source, made = adapter(tmp_path, tensors, **config), tmp_path / "k.safetensors"
    convert_lora(source, made, "kohya")
    assert float(loaded(made)["lora_unet_down_blocks_0_attentions_0_proj_in.alpha"]) == 16
    for odd in ({"use_bdlora": {"nblocks": 2}}, {"fan_in_fan_out": True}, {"peft_type": "IA3"}):
        source = adapter(tmp_path, tensors, **config | odd)
        with pytest.raises(UnsupportedError):
            convert_lora(source, tmp_path / "x.safetensors", "kohya")


EMBEDDING = "text_model.embeddings.token_embedding"


def test_an_embedding_of_dora(tmp_path: Path) -> None:
    shapes = {"embedding_A": (2, 9), "embedding_B": (4, 2), "magnitude_vector": (4,)}
    tensors = {f"{EMBEDDING}.lora_{role}": np.ones(shape, "f4") for role, shape in shapes.items()}
    source, made = adapter(tmp_path, tensors, use_dora=True), tmp_path / "d.safetensors"
    convert_lora(source, made, "diffusers", component="text_encoder")
    found = {name.rpartition(".")[2]: x.shape for name, x in loaded(made).items()}
    assert found == {f"lora_{role}": shape for role, shape in shapes.items()}
    with pytest.raises(UnsupportedError, match="embedding"):
        convert_lora(source, tmp_path / "k.safetensors", "kohya", component="text_encoder")


def test_an_embedding_is_transposed(tmp_path: Path) -> None:
    pair = {"A": RANDOM.random((2, 9), "f4"), "B": RANDOM.random((4, 2), "f4")}
    own = {f"{EMBEDDING}.lora_embedding_{role}": each for role, each in pair.items()}
    source, made = adapter(tmp_path, own, lora_alpha=4), tmp_path / "k.safetensors"
    convert_lora(source, made, "kohya", component="text_encoder")
    (found,) = changes(made).values()
    np.testing.assert_allclose(found, (pair["B"] @ pair["A"]).T * 2, rtol=1e-6)
    convert_lora(made, tmp_path / "back", "peft")
    back = load_file(tmp_path / "back" / WEIGHTS)
    same(back, {f"{AT}{key}": each for key, each in own.items()})
    name = f"lora_te_{EMBEDDING.replace('.', '_')}.dora_scale"
    with pytest.raises(UnsupportedError, match="DoRA of an embedding"):
        converted(tmp_path, load_file(made) | {name: np.ones((1, 4), "f4")}, "peft")


def test_an_alpha_of_zero(tmp_path: Path) -> None:
    """sd-scripts and ComfyUI disagree: in kohya's files, alpha 0 means the rank."""
    own = diffusers({"diffusion_model.conv_in": factors(2, 2, 2)})
    own["diffusion_model.conv_in.alpha"] = np.array(0, "f4")
    with pytest.raises(UnsupportedError, match="alpha 0") as caught:
        converted(tmp_path, own, "kohya")
    assert "bake=True" in str(caught.value.hint)
    (found,) = changes(converted(tmp_path, own, "kohya", bake=True)).values()
    assert not found.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [("fan_in_fan_out", True), ("layer_replication", [[0, 1]]), ("ensure_weight_tying", True)],
)
def test_fields_that_only_peft_stores(field: str, value: Any, tmp_path: Path) -> None:
    own = diffusers({"conv_in": factors(2, 2, 2)})
    source = adapter(tmp_path, own, **{field: value})
    convert_lora(source, tmp_path / "made", "peft")
    assert json.loads((tmp_path / "made" / CONFIG).read_text())[field] == value
    for to in ("kohya", "comfy", "diffusers"):
        with pytest.raises(UnsupportedError, match=f"cannot convert {field} to {to}"):
            convert_lora(source, tmp_path / "x.safetensors", to)


def test_an_adapter_of_a_residual_base_stays_one(tmp_path: Path) -> None:
    own = diffusers({"conv_in": factors(2, 2, 2)})
    source = adapter(tmp_path, own, init_lora_weights="pissa")
    for to in ("peft", "diffusers", "kohya"):
        path = tmp_path / (to if to == "peft" else f"{to}.safetensors")
        assert "trained on a residual base" in str(convert_lora(source, path, to).warnings)
        assert to == "kohya" or [each.code for each in check_lora(path).findings] == ["residual"]


def test_outputs_are_safetensors_and_not_replaced(tmp_path: Path) -> None:
    source = save(tmp_path / "one.safetensors", diffusers({"unet.conv_in": factors(2, 2, 1)}))
    with pytest.raises(UsageError, match="not as"):
        convert_lora(source, tmp_path / "x.pth", "kohya")
    with pytest.raises(UsageError):
        convert_lora(source, source, "comfy", force=True)
    with pytest.raises(UsageError, match="is a folder"):
        convert_lora(source, tmp_path / "x.safetensors", "peft")
    convert_lora(source, tmp_path / "k.safetensors", "kohya", dry_run=True)
    assert not (tmp_path / "k.safetensors").exists()
