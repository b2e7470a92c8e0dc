"""Extraction and resizing: errors compared with numpy's SVD, tensors with the factors' product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptkit.core.errors import NothingToDoError, TensorError, UnsupportedError, UsageError
from ckptkit.lora.writing import extract_lora, resize_lora
from tests.lora.adapters import CONFIG, WEIGHTS, adapter, save

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(3)


def normal(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype("f4")


def pair(tmp_path: Path, base: dict[str, Array], change: dict[str, Array]) -> tuple[Path, Path]:
    tuned = {name: each + change.get(name, np.zeros_like(each)) for name, each in base.items()}
    new = {name: each for name, each in change.items() if name not in base}
    old = save(tmp_path / "base.safetensors", base)
    return save(tmp_path / "t.safetensors", tuned | new), old


def read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    found = load_file(path / WEIGHTS)
    plain = {name.removeprefix("base_model.model."): each for name, each in found.items()}
    return plain, json.loads((path / CONFIG).read_text())


def low(rows: int, columns: int, rank: int) -> Array:
    return normal(rows, rank) @ normal(rank, columns)


def test_kinds_of_modules(tmp_path: Path) -> None:
    base = {
        "fc.weight": normal(6, 5), "conv.weight": normal(4, 3, 3, 3), "one.weight": normal(3, 4, 3),
        "wte.weight": normal(20, 6), "h.0.attn.c_attn.weight": normal(4, 12), "same.weight": normal(2, 2),
        "fc.bias": normal(6), "steps": np.array([3], "i8"),
    }  # fmt: skip
    change = {
        "fc.weight": low(6, 5, 2), "conv.weight": low(4, 27, 2).reshape(4, 3, 3, 3),
        "one.weight": low(3, 12, 1).reshape(3, 4, 3), "wte.weight": low(20, 6, 2),
        "h.0.attn.c_attn.weight": low(4, 12, 2), "fc.bias": normal(6), "steps": np.array([1], "i8"),
    }  # fmt: skip
    report = extract_lora(*pair(tmp_path, base, change), tmp_path / "out", rank=2, conv_rank=3)
    tensors, config = read(tmp_path / "out")
    tuned = load_file(tmp_path / "t.safetensors")
    assert {name: rank for name, (rank, _) in report.modules.items()} == {
        "conv": 2, "fc": 2, "h.0.attn.c_attn": 2, "one": 1, "wte": 2,
    }  # fmt: skip
    assert sorted(report.left) == ["fc.bias", "steps"]
    assert report.error < 1e-6
    assert config["fan_in_fan_out"] and config["r"] == config["lora_alpha"] == 2
    assert config["rank_pattern"] == config["alpha_pattern"] == {"^one": 1}
    for name in ("fc", "conv", "one", "h.0.attn.c_attn"):
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        assert b.shape[2:] == (1,) * (a.ndim - 2)
        made = b.reshape(len(b), -1) @ a.reshape(len(a), -1)
        made = made.T if "c_attn" in name else made.reshape(base[f"{name}.weight"].shape)
        np.testing.assert_allclose(
            base[f"{name}.weight"] + made, tuned[f"{name}.weight"], atol=1e-5
        )
    made = (tensors["wte.lora_embedding_B"] @ tensors["wte.lora_embedding_A"]).T
    np.testing.assert_allclose(base["wte.weight"] + made, tuned["wte.weight"], atol=1e-5)


def test_linear_layers_with_names_of_gpt2(tmp_path: Path) -> None:
    """GPT-Neo and StarCoder have linear layers where GPT-2 has Conv1D."""
    base = {"h.0.mlp.c_fc.weight": normal(8, 4), "h.0.mlp.c_proj.weight": normal(4, 8)}
    change = {name: low(*each.shape, 1) for name, each in base.items()}
    extract_lora(*pair(tmp_path, base, change), tmp_path / "out", rank=1)
    tensors, config = read(tmp_path / "out")
    assert not config["fan_in_fan_out"]
    assert tensors["h.0.mlp.c_fc.lora_A.weight"].shape == (1, 4)


def test_names_that_end_as_others(tmp_path: Path) -> None:
    """peft takes a name in a list for the end of names, and an expression for whole names."""
    base = {"fc.weight": normal(4, 4), "inner.fc.weight": normal(4, 4)}
    extract_lora(*pair(tmp_path, base, {"fc.weight": low(4, 4, 1)}), tmp_path / "out", rank=1)
    assert read(tmp_path / "out")[1]["target_modules"] == "fc"


@pytest.mark.parametrize("shape", [(300, 400), (900, 260)])
def test_large_matrices_are_nearly_the_best(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Random products give an error within 1 % of that of the SVD, and the report is exact."""
    change = low(*shape, 6) + 0.05 * normal(*shape)
    base = {"fc.weight": normal(*shape)}
    report = extract_lora(*pair(tmp_path, base, {"fc.weight": change}), tmp_path / "out", rank=4)
    difference = load_file(tmp_path / "t.safetensors")["fc.weight"].astype("f8") - base["fc.weight"]
    values = np.linalg.svd(difference, compute_uv=False)
    best = float(np.sqrt((values[4:] ** 2).sum() / (values**2).sum()))
    tensors, _ = read(tmp_path / "out")
    made = tensors["fc.lora_B.weight"].astype("f8") @ tensors["fc.lora_A.weight"]
    error = float(np.linalg.norm(difference - made) / np.linalg.norm(difference))
    assert report.error == pytest.approx(error, rel=1e-5)
    assert best - 1e-6 <= report.error <= 1.01 * best


def test_tied_matrices_are_extracted_once(tmp_path: Path) -> None:
    shared, change = normal(8, 4), low(8, 4, 1)
    for name in ("embed_tokens", "model.embed_tokens"):  # before and after the head
        base = {f"{name}.weight": shared, "lm_head.weight": shared.copy()}
        changes = dict.fromkeys(base, change)
        report = extract_lora(*pair(tmp_path, base, changes), tmp_path / name, rank=1)
        assert list(report.modules) == [name]


def test_modules_stored_whole(tmp_path: Path) -> None:
    base = {"norm.weight": normal(4), "fc.weight": normal(4, 4)}
    change = {"norm.weight": normal(4), "score.weight": normal(2, 4)}
    files = pair(tmp_path, base, change)
    report = extract_lora(*files, tmp_path / "out", rank=1, save_modules=["norm", "score"])
    tensors, config = read(tmp_path / "out")
    assert report.saved == sorted(tensors) == ["norm.weight", "score.weight"]
    assert config["modules_to_save"] == ["norm", "score"]
    np.testing.assert_array_equal(tensors["score.weight"], change["score.weight"])
    with pytest.raises(UnsupportedError, match="is new") as caught:
        extract_lora(*files, tmp_path / "x", rank=1, save_modules=["norm"])
    assert "score" in str(caught.value.hint)
    with pytest.raises(UsageError, match="head"):
        extract_lora(*files, tmp_path / "x", rank=1, save_modules=["head"])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("base", "change", "error", "words"),
    [
        ({"fc.weight": normal(2, 2)}, {}, NothingToDoError, "no matrix differs"),
        ({"fc.bias": normal(2)}, {"fc.bias": normal(2)}, NothingToDoError, "fc.bias"),
        ({"fc.weight": normal(2, 2)}, {"fc.weight": np.full((2, 2), np.nan, "f4")}, TensorError,
         "finite"),
        ({"pos": normal(2, 2)}, {"pos": normal(2, 2)}, UnsupportedError, "pos"),
        ({"mlp.experts.up.weight": normal(2, 2, 2)}, {"mlp.experts.up.weight": normal(2, 2, 2)},
         UnsupportedError, "experts"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path, base: dict[str, Array], change: dict[str, Array], error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        extract_lora(*pair(tmp_path, base, change), tmp_path / "out", rank=1)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_gone(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, {"a.weight": normal(2, 2)}, {"b.weight": normal(2, 2)})
    for rank, word in ((1, r"lacks 'b\.weight'"), (0, "at least 1")):
        with pytest.raises(UsageError, match=word):
            extract_lora(base, tuned, tmp_path / "out", rank=rank)


@pytest.mark.parametrize("layout", ["peft", "kohya"])
def test_resize(tmp_path: Path, layout: str) -> None:
    """The nearest of a lower rank, with the scale in the factors; other ranks stay."""
    a, b, module = normal(4, 6), normal(5, 4), "lora_unet_conv_in"
    if layout == "peft":
        tensors = {"x.fc.lora_A.weight": a, "x.fc.lora_B.weight": b}
        source = adapter(tmp_path, tensors, r=4, lora_alpha=8, task_type="CAUSAL_LM")
        report = resize_lora(source, tmp_path / "out", rank=2)
        tensors, config = read(tmp_path / "out")
        assert config["r"] == config["lora_alpha"] == 2
        assert config["task_type"] == "CAUSAL_LM"
        new = tensors["x.fc.lora_B.weight"] @ tensors["x.fc.lora_A.weight"]
    else:
        tensors = {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b}
        source = save(
            tmp_path / "one.safetensors", tensors | {f"{module}.alpha": np.array(8, "f4")}
        )
        report = resize_lora(source, tmp_path / "out.safetensors", rank=2)
        found = load_file(tmp_path / "out.safetensors")
        assert found[f"{module}.alpha"] == 2
        new = found[f"{module}.lora_up.weight"] @ found[f"{module}.lora_down.weight"]
    left, values, right = np.linalg.svd(2.0 * b @ a)
    np.testing.assert_allclose(new, left[:, :2] * values[:2] @ right[:2], atol=1e-5)
    best = np.sqrt((values[2:] ** 2).sum() / (values**2).sum())
    assert report.error == pytest.approx(float(best), rel=1e-5)


def test_names_that_peft_loads_after_resizing(tmp_path: Path) -> None:
    """peft saves the bias of a LoRA module as that of its base layer, and checks the rank."""
    whole = {"fc.base_layer.bias": normal(5), "head.bias": normal(3)}
    pair = {"fc.lora_A.weight": normal(4, 6), "fc.lora_B.weight": normal(5, 4)}
    source = adapter(tmp_path, whole | pair, r=4, lora_alpha=8, init_lora_weights="orthogonal")
    resize_lora(source, tmp_path / "out", rank=3)
    tensors, config = read(tmp_path / "out")
    assert tensors.keys() == {*whole, *pair}
    assert config["init_lora_weights"] is True


def test_other_kinds_are_not_resized(tmp_path: Path) -> None:
    names = [f"lora_unet_conv_in.hada_w{n}_{each}" for n in (1, 2) for each in "ab"]
    source = save(tmp_path / "one.safetensors", {name: normal(2, 2) for name in names})
    with pytest.raises(UnsupportedError, match="loha"):
        resize_lora(source, tmp_path / "out.safetensors", rank=1)
