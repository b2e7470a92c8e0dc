"""Adapters are read from names and headers: layouts, scales, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError, UsageError
from ckptkit.lora.changes import problems
from ckptkit.lora.reading import is_adapter, matches, read_adapter, unwrapped
from tests.conftest import Run
from tests.lora.adapters import CONFIG, WEIGHTS, Shapes, adapter, base, drawn, factors, pair, save


def peft(folder: Path, path: str = "fc", rank: int = 2, **config: Any) -> Path:
    return adapter(folder, factors(path, 4, 5, rank), **config)


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
    found = read_adapter(peft(tmp_path, "a.fc", 3, **config))
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


@pytest.mark.parametrize(
    ("pattern", "path", "word"),
    [
        ("(", "x" * 400, "pattern"),
        ("(x|xx)+y", "x" * 400, "pattern"),
        # Each of these matches a short name at once.
        *((pattern, "b", r"nested repetitions|5,000 characters")
          for pattern in ("(a+)+", "((?:x*)b?){2,}", r"(\)|x{1,9})*", "x" * 5000)),
    ],
)  # fmt: skip
def test_bad_and_slow_patterns_are_refused(pattern: str, path: str, word: str) -> None:
    with pytest.raises(CorruptError, match=word):
        matches(pattern, path)


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
    path = peft(tmp_path)
    with pytest.raises(UsageError, match="contains scales"):
        read_adapter(path, alpha=5)
    (path / CONFIG).unlink()
    assert [each.code for each in problems(read_adapter(path))] == ["no-config"]
    assert read_adapter(path, alpha=5).modules["fc"].scale == 2.5


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
    up = name.replace("down", "up").replace("lora_A", "lora_B")
    found = read_adapter(save(tmp_path / "a.safetensors", drawn({name: (2, 5), up: (4, 2)})))
    (module,) = found.modules.values()
    assert (found.layout, module.path, module.component) == (layout, path, component)
    assert module.kind == "lora"
    assert module.scale == (None if layout == "peft" else 1.0)


KOHYA: Shapes = {"lora_unet_a.lora_down.weight": (2, 5), "lora_unet_a.lora_up.weight": (4, 2)}


@pytest.mark.parametrize(("alpha", "scale"), [(1.0, 0.5), (0.0, 1.0)])
def test_alpha_of_kohya(tmp_path: Path, alpha: float, scale: float) -> None:
    tensors = drawn(KOHYA) | {"lora_unet_a.alpha": torch.tensor(alpha)}
    found = read_adapter(save(tmp_path / "a.safetensors", tensors))
    assert [each.scale for each in found.modules.values()] == [scale]


def test_what_is_not_of_the_layout_is_unknown(tmp_path: Path) -> None:
    tensors = drawn({**KOHYA, "lora_unet_a.w_norm": (2, 2)})
    (problem,) = problems(read_adapter(save(tmp_path / "a.safetensors", tensors)))
    assert (problem.code, problem.modules) == ("method", ("lora_unet_a.w_norm",))


def test_whole_tensors_of_the_base(tmp_path: Path) -> None:
    whole: Shapes = {
        "fc.base_layer.bias": (4,),
        "head.modules_to_save.default.out.weight": (3, 3),
        "head.original_module.out.weight": (3, 3),
    }
    found = read_adapter(adapter(tmp_path, factors("fc", 4, 5) | drawn(whole)))
    assert list(found.replaced) == ["fc.bias", "head.out.weight"]
    assert found.ignored == ("base_model.model.head.original_module.out.weight",)


def test_several_adapters_in_one_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        adapter(tmp_path, factors("fc", 4, 5), name)
    with pytest.raises(UsageError, match="contains 2 adapters") as error:
        read_adapter(tmp_path)
    assert "first" in (error.value.hint or "")


def test_what_is_no_adapter(tmp_path: Path) -> None:
    path = base(tmp_path, drawn({"fc.weight": (2, 2)}))
    with pytest.raises(CkptkitError, match="not an adapter"):
        read_adapter(path)
    both = save(tmp_path / "both.safetensors", drawn({"fc.weight": (2, 2), **pair("fc", 2, 2)}))
    for each, expected in ((path, False), (peft(tmp_path), True), (both, False)):
        assert is_adapter(ckptkit.open(each)) is expected


def test_components(tmp_path: Path) -> None:
    tensors = factors("unet.a", 2, 2) | factors("text_encoder.a", 2, 2)
    file = save(tmp_path / "a.safetensors", tensors)
    assert list(read_adapter(file, component="unet").modules) == ["unet.a"]
    with pytest.raises(UsageError, match="no component 'vae'"):
        read_adapter(file, component="vae")


@pytest.mark.parametrize("other", ["base_layer", "modules_to_save", "modules_to_save.default"])
def test_two_tensors_for_one_tensor_of_the_base(tmp_path: Path, other: str) -> None:
    """peft saves biases of modules_to_save twice with `bias="all"`. Different tensors are refused."""
    bias = dict.fromkeys(("x.bias", f"x.{other}.bias"), torch.ones(2))
    path = adapter(tmp_path, factors("fc", 2, 2) | bias)
    assert read_adapter(path).replaced.keys() == {"x.bias"}
    file = path / WEIGHTS
    save(file, load_file(file) | {"base_model.model.x.bias": torch.zeros(2)})
    with pytest.raises(UsageError, match=r"contains 'x\.bias' twice"):
        read_adapter(path)


# In other commands: inspect, diff, scan and the page name rank, alpha and targets

LINE = "adapter of peft, LORA, 2 modules, rank 2, alpha 6, targets q_proj, to_out.0"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    tensors = factors("layers.0.q_proj", 4, 5) | factors("blocks.1.attn.to_out.0", 4, 5)
    return adapter(tmp_path, tensors, base_model_name_or_path="org/tiny")


def test_inspect(two: Path, in_process: Run) -> None:
    shown = in_process("inspect", two).stdout.replace("\n", " ")
    assert LINE in shown and "(org/tiny)" in shown
    found = json.loads(in_process("inspect", "--json", two).stdout)["files"][0]["adapter"]
    assert found == {
        "layout": "peft", "method": "LORA", "modules": 2, "ranks": [2], "alphas": [6.0],
        "targets": ["q_proj", "to_out.0"], "base_model": "org/tiny",
    }  # fmt: skip


def test_targets_of_names_with_underscores(tmp_path: Path) -> None:
    name = "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_out_0"
    tensors = drawn({f"{name}.lora_down.weight": (2, 5), f"{name}.lora_up.weight": (4, 2)})
    found = read_adapter(save(tmp_path / "k.safetensors", tensors))
    assert found.targets == ["attn1_to_out.0"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_scan(suffix: str, two: Path, tmp_path: Path, in_process: Run) -> None:
    if suffix == "bin":
        torch.save(load_file(two / WEIGHTS), two / "adapter_model.bin")
        (two / WEIGHTS).unlink()
    done = in_process("scan", two / f"adapter_model.{suffix}")
    assert done.code == 0, done.stderr
    assert LINE in done.stdout.replace("\n", " ").replace("  ", " ")
    plain = base(tmp_path, drawn({"fc.weight": (4, 5)}))
    assert "adapter" not in in_process("scan", plain).stdout.partition(":")[2]
    assert "adapter of" not in in_process("scan", "--quiet", two).stdout


def test_diff_of_two_adapters(tmp_path: Path, in_process: Run) -> None:
    """Equal tensors with another alpha are different adapters."""
    tensors, named = factors("layers.0.q_proj", 4, 5), {"base_model_name_or_path": "org/tiny"}
    one = adapter(tmp_path, tensors, "a", **named)
    two = adapter(tmp_path, tensors, "b", lora_alpha=12, **named)
    done = in_process("diff", "--json", one, two)
    assert done.code == 1
    found = json.loads(done.stdout)
    assert found["entries"] == [{"path": "adapter: alpha", "a": "6", "b": "12"}]
    assert not found["changed"]
    other = adapter(tmp_path, factors("layers.0.k_proj", 4, 5, 3), "c", r=3)
    entries = json.loads(in_process("diff", "--json", one, other).stdout)["entries"]
    assert {each["path"].removeprefix("adapter: "): (each["a"], each["b"]) for each in entries} == {
        "rank": ("2", "3"), "targets": ("q_proj", "k_proj"), "base model": ("org/tiny", None),
    }  # fmt: skip
    assert in_process("diff", one, one).code == 0


def test_diff_of_an_adapter_and_its_base(tmp_path: Path, in_process: Run) -> None:
    path = peft(tmp_path, lora_alpha=0.01)
    model = save(tmp_path / "base.safetensors", {"fc.weight": torch.ones(4, 5)})
    for names in ((path, model), (model, path)):
        done = in_process("diff", *names)
        assert done.code == 1
        command = done.stdout.rpartition("ckptkit ")[2].split()
        assert command[:2] == ["lora", "check"]
        checked = in_process(*command)
        assert checked.code == 0, checked.stdout


def test_the_page(two: Path, tmp_path: Path, in_process: Run) -> None:
    page = tmp_path / "page.html"
    assert in_process("report", two, page).code == 0
    assert "It is an adapter (LORA, 2 modules, rank 2, alpha 6" in page.read_text("utf-8")
