"""Adapters are read from names and headers: layouts, scales, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.core.errors import CkptkitError, CorruptError, UsageError
from ckptkit.lora.changes import problems
from ckptkit.lora.reading import is_adapter, matches, read_adapter, unwrapped

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
LINEAR = {"lora_A.weight": (2, 5), "lora_B.weight": (4, 2)}


def folder(
    path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    made = {name: torch.ones(shape) for name, shape in tensors.items()}
    save_file(made, path / "adapter_model.safetensors")
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def peft(
    tmp_path: Path, path: str = "fc", shapes: dict[str, tuple[int, ...]] = LINEAR, **config: Any
) -> Path:
    names = {f"base_model.model.{path}.{role}": shape for role, shape in shapes.items()}
    return folder(tmp_path / "adapter", names, CONFIG | config)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.fc.x", "fc.x"),
        ("module.base_model.model._orig_mod.fc.x", "fc.x"),
        ("_orig_mod.module.base_model.model.a._orig_mod.b", "a.b"),
        ("model.layers.0.x", "model.layers.0.x"),
    ],
)
def test_wrappers_are_removed_in_any_order(name: str, plain: str) -> None:
    assert unwrapped(name) == plain


def test_a_folder_of_peft(tmp_path: Path) -> None:
    found = read_adapter(peft(tmp_path))
    (module,) = found.modules.values()
    assert (found.layout, found.method, found.ranks) == ("peft", "LORA", [2])
    assert (module.path, module.kind, module.scale, module.expected) == ("fc", "lora", 3.0, 2)
    assert not list(problems(found))


@pytest.mark.parametrize("path", ["lora_A", "a.lora_B.weight", "default.alpha", "base_layer.model"])
def test_names_of_modules_may_look_like_roles(tmp_path: Path, path: str) -> None:
    assert list(read_adapter(peft(tmp_path, path)).modules) == [path]


def test_scales_of_patterns(tmp_path: Path) -> None:
    """The first pattern that matches wins, for the rank and for alpha apart."""
    config = {
        "use_rslora": True,
        "rank_pattern": {"^fc": 2, "fc": 3},
        "alpha_pattern": {"a.fc": 1, "fc": 9},
    }
    shapes = {"lora_A.weight": (3, 5), "lora_B.weight": (4, 3)}
    found = read_adapter(peft(tmp_path, "a.fc", shapes, **config))
    assert found.modules["a.fc"].scale == 1 / math.sqrt(3)


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("q_proj", "model.q_proj", True),
        ("q_proj", "model.xq_proj", False),
        (r"^model\.q_proj", "model.q_proj", True),
        (r"^q_proj", "model.q_proj", False),
        (r".*\.mlp\..*", "layers.0.mlp.up", True),
        (r"(?:.*?(?:text|lang).*?)\.[\d]{1,}\.((q|k)_proj)?", "lang.0.q_proj", True),
        (r"layers\.(1|[2-3]+){1}\.[(a+)+]", "layers.2.+", True),
    ],
)
def test_patterns(pattern: str, path: str, is_match: bool) -> None:
    assert matches(pattern, path) is is_match


@pytest.mark.parametrize("pattern", ["(", "(x|xx)+y"])
def test_bad_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(CorruptError, match="pattern"):
        matches(pattern, "x" * 400)


@pytest.mark.parametrize("pattern", ["(a+)+", "((?:x*)b?){2,}", r"(\)|x{1,9})*", "x" * 5000])
def test_slow_patterns_are_refused_for_any_name(pattern: str) -> None:
    """Each of these matches a short name at once."""
    with pytest.raises(CorruptError, match=r"nested repetitions|5,000 characters"):
        matches(pattern, "b")


@pytest.mark.parametrize(
    ("config", "code", "word"),
    [
        ({"r": 4}, "rank", "4"),
        ({"peft_type": "PREFIX_TUNING"}, "method", "PREFIX_TUNING"),
        ({"peft_type": "VERA", "save_projection": False}, "method", "projection"),
        ({"peft_type": "WONDER"}, "method", "WONDER"),
        ({"init_lora_weights": "pissa_niter_16"}, "residual", "pissa"),
        ({"init_lora_weights": "lora_ga"}, "residual", "lora_ga"),
        ({"init_lora_weights": "wonder"}, "residual", "initialization 'wonder'"),
        ({"init_lora_weights": ["pissa"]}, "residual", "pissa"),
        ({"kasa_config": {}}, "method", "kasa_config"),
        ({"arrow_config": {"k": 1}}, "method", "Arrow"),
    ],
)
def test_problems(tmp_path: Path, config: dict[str, Any], code: str, word: str) -> None:
    first = next(problems(read_adapter(peft(tmp_path, **config))))
    assert first.code == code
    assert word in first.title


def test_a_scale_is_never_guessed(tmp_path: Path) -> None:
    names = {f"base_model.model.fc.{role}": shape for role, shape in LINEAR.items()}
    path = folder(tmp_path / "bare", names)
    assert [each.code for each in problems(read_adapter(path))] == ["no-config"]
    assert read_adapter(path, alpha=5).modules["fc"].scale == 2.5
    with pytest.raises(UsageError, match="contains scales"):
        read_adapter(peft(tmp_path), alpha=5)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"r": "two"}, "'r'"),
        ({"r": 0}, "rank 0"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_parameters": 3}, "'target_parameters' in adapter_config.json must be a list"),
        ({"rank_pattern": ["fc"]}, "'rank_pattern' .* must be an object"),
        ({"feedforward_modules": {}}, "must be a list or a string"),
        ({"use_bdlora": {"target_modules_bd_a": "fc"}}, "'target_modules_bd_a' .* must be a list"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    with pytest.raises(CorruptError, match=what):
        read_adapter(peft(tmp_path, **config))


@pytest.mark.parametrize(
    ("name", "layout", "path", "component"),
    [
        ("lora_te1_text_model_x.lora_down.weight", "kohya", "text_model_x", "text_encoder"),
        ("lycoris_a_b.lora_down.weight", "kohya", "a_b", ""),
        ("unet.a.b.lora_A.weight", "diffusers", "a.b", "unet"),
        ("text_encoder_2.a.lora_linear_layer.down.weight", "diffusers", "a", "text_encoder_2"),
        ("unet.attn1.processor.to_out_lora.down.weight", "diffusers", "attn1.to_out.0", "unet"),
        ("diffusion_model.a.b.lora_down.weight", "comfy", "a.b", "unet"),
        ("blocks.0.q.lora_A.default.weight", "peft", "blocks.0.q", ""),
    ],
)
def test_layouts(tmp_path: Path, name: str, layout: str, path: str, component: str) -> None:
    file = tmp_path / "a.safetensors"
    up = name.replace("down", "up").replace("lora_A", "lora_B")
    save_file({name: torch.ones(2, 5), up: torch.ones(4, 2)}, file)
    found = read_adapter(file)
    (module,) = found.modules.values()
    assert (found.layout, module.path, module.component) == (layout, path, component)
    assert module.kind == "lora"
    assert module.scale == (None if layout == "peft" else 1.0)


@pytest.mark.parametrize(("alpha", "scale"), [(1.0, 0.5), (0.0, 1.0)])
def test_alpha_of_kohya(tmp_path: Path, alpha: float, scale: float) -> None:
    file = tmp_path / "a.safetensors"
    names = {"lora_unet_a.lora_down.weight": (2, 5), "lora_unet_a.lora_up.weight": (4, 2)}
    tensors = {name: torch.ones(shape) for name, shape in names.items()}
    save_file(tensors | {"lora_unet_a.alpha": torch.tensor(alpha)}, file)
    assert [each.scale for each in read_adapter(file).modules.values()] == [scale]


def test_what_is_not_of_the_layout_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    names = ["lora_unet_a.lora_down.weight", "lora_unet_a.lora_up.weight", "lora_unet_a.w_norm"]
    save_file({name: torch.ones(2, 2) for name in names}, file)
    (problem,) = problems(read_adapter(file))
    assert (problem.code, problem.modules) == ("method", ("lora_unet_a.w_norm",))


def test_whole_tensors_of_the_base(tmp_path: Path) -> None:
    shapes = {
        "fc.lora_A.weight": (2, 5),
        "fc.lora_B.weight": (4, 2),
        "fc.base_layer.bias": (4,),
        "head.modules_to_save.default.out.weight": (3, 3),
        "head.original_module.out.weight": (3, 3),
    }
    names = {f"base_model.model.{name}": shape for name, shape in shapes.items()}
    found = read_adapter(folder(tmp_path / "adapter", names, CONFIG))
    assert list(found.replaced) == ["fc.bias", "head.out.weight"]
    assert found.ignored == ("base_model.model.head.original_module.out.weight",)


def test_several_adapters_in_one_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        names = {f"base_model.model.fc.{role}": shape for role, shape in LINEAR.items()}
        folder(tmp_path / name, names, CONFIG)
    with pytest.raises(UsageError, match="contains 2 adapters") as error:
        read_adapter(tmp_path)
    assert "first" in (error.value.hint or "")


def test_what_is_no_adapter(tmp_path: Path) -> None:
    import ckptkit

    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CkptkitError, match="not an adapter"):
        read_adapter(tmp_path / "model.safetensors")
    assert not is_adapter(ckptkit.open(tmp_path / "model.safetensors"))
    assert is_adapter(ckptkit.open(peft(tmp_path)))
    names = ["fc.weight", "fc.lora_A.weight", "fc.lora_B.weight"]
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "both.safetensors")
    assert not is_adapter(ckptkit.open(tmp_path / "both.safetensors"))


def test_components(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    names = [f"{part}.a.lora_{ab}.weight" for part in ("unet", "text_encoder") for ab in "AB"]
    save_file({name: torch.ones(2, 2) for name in names}, file)
    assert list(read_adapter(file, component="unet").modules) == ["unet.a"]
    with pytest.raises(UsageError, match="no component 'vae'"):
        read_adapter(file, component="vae")


@pytest.mark.parametrize("other", ["base_layer", "modules_to_save", "modules_to_save.default"])
def test_two_tensors_for_one_tensor_of_the_base(tmp_path: Path, other: str) -> None:
    """peft saves biases of modules_to_save twice with `bias="all"`. Different tensors are refused."""
    names = ("fc.lora_A.weight", "fc.lora_B.weight", "x.bias", f"x.{other}.bias")
    path = folder(tmp_path / "a", {f"base_model.model.{name}": (2, 2) for name in names}, CONFIG)
    assert read_adapter(path).replaced.keys() == {"x.bias"}
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.x.bias": torch.zeros(2, 2)}, file)
    with pytest.raises(UsageError, match=r"contains 'x\.bias' twice"):
        read_adapter(path)
