"""`lora check` and `doctor`: each finding, on the smallest adapter that has it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.lora.check import check_lora
from ckptkit.lora.writing import convert_lora, resize_lora
from tests.conftest import Run
from tests.lora import adapters
from tests.lora.adapters import CONFIG, Shapes, Weights, adapter, base, pair, save


def full(value: float, shapes: Shapes) -> Weights:
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def factors(name: str, out: int = 4, inner: int = 3, rank: int = 2) -> Weights:
    return full(0.1, pair(name, out, inner, rank))


def ones(folder: Path, *names: str, shape: tuple[int, int] = (4, 3), **config: Any) -> Path:
    return base(folder, full(1, {f"{name}.weight": shape for name in names}), **config)


def kohya(folder: Path, *names: str) -> Path:
    shapes: Shapes = {"lora_down.weight": (1, 2), "lora_up.weight": (2, 1)}
    tensors = {f"{n}.{role}": shape for n in names for role, shape in shapes.items()}
    return save(folder / "k.safetensors", full(0.1, tensors))


def codes(path: Path, **options: Any) -> dict[str, str]:
    return {each.code: each.level for each in check_lora(path, **options).findings}


def test_nothing_is_wrong(tmp_path: Path) -> None:
    path = adapter(tmp_path, factors("fc"))
    report = check_lora(path, base=ones(tmp_path, "fc", "other"), target="vllm")
    assert report.findings == ()
    assert report.as_json()["adapter"] == {
        "layout": "peft", "method": "LORA", "modules": 1, "ranks": [2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "config", "code"),
    [
        ({"A": torch.zeros(2, 0)}, {}, "empty"),
        ({"A": None}, {}, "pair"),
        ({"B": torch.full((4, 2), torch.inf)}, {}, "nonfinite"),
        ({"B": torch.zeros(4, 2)}, {}, "zero"),
        ({"B": torch.ones(4, 5)}, {}, "shape"),
        ({}, {"use_dora": True}, "pair"),
        ({}, {"r": 4}, "rank"),
        ({}, {"peft_type": "PREFIX_TUNING"}, "method"),
        ({}, {"init_lora_weights": "pissa"}, "residual"),
        ({}, {"use_qalora": True}, "method"),
    ],
)
def test_of_its_own_files(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], code: str
) -> None:
    """Each finding tells the next step."""
    tensors = factors("fc") | {f"fc.lora_{role}.weight": each for role, each in change.items()}
    kept = {name: each for name, each in tensors.items() if each is not None}
    path = adapter(tmp_path, kept, **config)
    level = "warning" if code == "zero" else "error"
    assert codes(path)[code] == level
    found = check_lora(path, base=ones(tmp_path, "fc"), target="vllm").findings
    assert {each.code: each.level for each in found}[code] == level
    assert all(each.command or each.hint for each in found)
    assert code != "residual" or "--base-is residual" in str(found[0].command)
    assert {each["code"]: each["level"] for each in ckptkit.doctor(path)["causes"]}[code] == level


def test_an_untrained_ia3(tmp_path: Path) -> None:
    tensors = full(1, {"fc.ia3_l": (4, 1)})
    assert codes(adapter(tmp_path, tensors, peft_type="IA3")) == {"zero": "warning"}


def test_without_a_configuration(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", factors("blocks.0.q"))
    assert codes(path) == {"no-config": "error"}


def test_with_a_base(tmp_path: Path) -> None:
    path = adapter(tmp_path, factors("model.fc") | factors("model.head"))
    assert codes(path, base=ones(tmp_path, "fc", "head")) == {"prefix": "error"}
    (found,) = check_lora(path, base=ones(tmp_path, "model.fc", "model.hand")).findings
    assert (found.code, found.modules) == ("module", ("model.head",))
    wide = ones(tmp_path, "model.fc", "model.head", shape=(4, 5))
    assert codes(path, base=wide) == {"shape": "error"}


def test_the_command_with_several_renames_works(tmp_path: Path, in_process: Run) -> None:
    names = {
        "model.language_model.layers.0.q_proj": "language_model.model.layers.0.q_proj",
        "model.vision_tower.x.fc1": "vision_tower.x.fc1",
        "lm_head": "language_model.lm_head",
    }
    path = adapter(tmp_path, {k: each for name in names for k, each in factors(name).items()})
    (found,) = check_lora(path, base=ones(tmp_path, *names.values())).findings
    assert found.code == "prefix" and found.command is not None
    done = in_process(*shlex.split(found.command)[1:])
    assert done.code == 0
    said = done.stdout + done.stderr
    assert "merged 3 modules" in said and "renamed" not in said


def test_tied_matrices_and_tokens(tmp_path: Path) -> None:
    name, tied = "model.embed_tokens", {"tie_word_embeddings": True}
    folder = ones(tmp_path, name, **tied)
    rows = full(1, {f"{name}.token_adapter.trainable_tokens_delta": (2, 3)})
    for tokens, expected in (([1, 4], {"shape": "error"}), ([1, 3], {})):
        path = adapter(tmp_path, rows, trainable_token_indices=tokens)
        assert codes(path, base=folder) == expected
    path = adapter(tmp_path, full(0, {"lm_head.weight": (4, 3)}), modules_to_save=["lm_head"])
    assert codes(path, base=folder) == {"tied": "warning"}
    (found,) = check_lora(adapter(tmp_path, factors("lm_head")), base=folder).findings
    assert (found.code, found.level) == ("tied", "warning")
    assert found.command and "--tied untie" in found.command


def test_other_vocabularies(tmp_path: Path) -> None:
    name = "model.embed_tokens"
    tensors = factors("fc") | full(1, {f"{name}.weight": (6, 3)})
    path = adapter(tmp_path, tensors, modules_to_save=["embed_tokens"])
    # The head of a tied pair is not larger.
    both = {"tied": "warning", "vocab": "warning", "shape": "error"}
    for is_tied, expected in ((True, both), (False, {"vocab": "warning"})):
        config = {"model_type": "llama", "tie_word_embeddings": is_tied, "vocab_size": 4}
        assert codes(path, base=ones(tmp_path, "fc", name, **config)) == expected
    tensors = full(0.1, {f"{name}.lora_embedding_A": (2, 6), f"{name}.lora_embedding_B": (3, 2)})
    path = adapter(tmp_path, tensors)
    assert codes(path, base=ones(tmp_path, name)) == {"vocab": "warning", "shape": "error"}


def test_commands_with_the_options_of_all_findings(tmp_path: Path, run: Run) -> None:
    """The base has another prefix, is the residual, and ties the two matrices."""
    names = "language_model.model.fc", "language_model.model.embed_tokens"
    folder = ones(tmp_path, *names, tie_word_embeddings=True)
    tensors = factors("model.language_model.fc") | factors("lm_head")
    path = adapter(tmp_path, tensors, init_lora_weights="pissa")
    found = {each.code: each.command for each in check_lora(path, base=folder).findings}
    assert found.keys() == {"residual", "prefix", "tied"}
    for code, command in found.items():
        done = run(*shlex.split(command or "")[1:-1], tmp_path / code)
        assert done.code == 0, (command, done.stderr)


def test_a_norm_above_that_of_the_weight(tmp_path: Path) -> None:
    path = adapter(tmp_path, factors("fc"), lora_alpha=2000)
    (found,) = check_lora(path, base=ones(tmp_path, "fc")).findings
    assert (found.code, found.modules) == ("norm", ("fc",)) and found.hint
    # 0.1 * 0.1 * 2 in each of 12 elements, times 1000; the weight is 12 ones.
    assert f"fc ({1000 * 0.02 * 12**0.5:.3g} of {12**0.5:.3g})" in found.title


KINDS: dict[str, tuple[Shapes, float]] = {
    "LORA": ({"lora_magnitude_vector": (4,)}, 3**0.5),
    "LOHA": ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 3), "hada_w2_a": (4, 2), "hada_w2_b": (2, 3)}, 0.4),
    "LOKR": ({"lokr_w1": (2, 1), "lokr_w2_a": (2, 2), "lokr_w2_b": (2, 3)}, 0.4),
    "IA3": ({"ia3_l": (4, 1)}, 1.5),
}  # fmt: skip


@pytest.mark.parametrize("method", KINDS)
def test_the_norm_of_every_kind(method: str, tmp_path: Path) -> None:
    """The base is a matrix of ones, so the norm of a row is sqrt(3)."""
    shapes, small = KINDS[method]
    config = {"peft_type": method, "use_dora": method == "LORA", "alpha": 2, "lora_alpha": 2}
    there, found = ones(tmp_path, "fc"), list[Any]()
    for value in (small, 5.0, torch.nan):
        tensors = full(value, {f"fc.{role}": shape for role, shape in shapes.items()})
        tensors |= factors("fc") if method == "LORA" else {}
        found.append(check_lora(adapter(tmp_path, tensors, **config), base=there).findings)
    assert [[each.code for each in of_one] for of_one in found] == [[], ["norm"], ["nonfinite"]]
    assert ("BASE must be" in str(found[1][0].hint)) == (method in ("LORA", "IA3"))


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
@pytest.mark.parametrize("names", [["fc"], ["other"], None])
def test_the_vector_of_ia3_has_the_shape_of_its_side(
    names: list[str] | None, shape: tuple[int, int], tmp_path: Path
) -> None:
    """A square weight has rows and columns of the same number; only the shape tells them apart."""
    tensors = full(1.5, {"fc.ia3_l": shape})
    path = adapter(tmp_path, tensors, peft_type="IA3", feedforward_modules=names)
    is_right = (shape == (1, 4)) == (names == ["fc"])
    for options in ({}, {"base": ones(tmp_path, "fc", shape=(4, 4))}):
        found = check_lora(path, **options).findings
        assert [each.code for each in found] == ([] if is_right else ["shape"])
        assert is_right or "feedforward_modules" in str(found[0].hint)


def test_the_component_that_the_base_has(tmp_path: Path) -> None:
    names = "lora_unet_conv_in", "lora_te_text_model_encoder_layers_0_mlp_fc1"
    there = ones(tmp_path, "conv_in", shape=(2, 2))
    (found,) = check_lora(kohya(tmp_path, *names), base=there).findings
    assert (found.code, found.modules) == ("module", names[1:])
    assert found.command and "--component unet" in found.command


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"use_dora": True}, "vllm-dora"),
        ({"modules_to_save": ["head"]}, "vllm-modules-to-save"),
        ({"bias": "all"}, "vllm-bias"),
        ({"alpha_pattern": {"x": 8}}, "vllm-pattern"),
        ({"peft_type": "IA3"}, "vllm-method"),
    ],
)
def test_for_vllm(tmp_path: Path, config: dict[str, Any], code: str) -> None:
    path = adapter(tmp_path, factors("fc"), **config)
    assert codes(path, target="vllm").get(code) == "error"
    assert code not in codes(path)


def test_ranks_and_layouts_for_vllm(tmp_path: Path) -> None:
    path, file = (
        adapter(tmp_path, factors("fc", rank=32), r=32),
        kohya(tmp_path, "lora_unet_conv_in"),
    )
    assert codes(path, target="vllm") == {"vllm-rank": "warning"}
    assert codes(file, target="vllm") == {"vllm-layout": "error"}
    for name, expected in (("unet.conv_in", {}), ("unet.conv_out", {"no-module": "error"})):
        assert codes(file, base=ones(tmp_path, name, shape=(2, 2))) == expected
    with pytest.raises(UsageError):
        check_lora(path, target="tgi")


def test_the_command(tmp_path: Path, in_process: Run) -> None:
    path, held = adapter(tmp_path, factors("model.fc")), ones(tmp_path, "fc")
    done = in_process("lora", "check", path, "--base", held)
    assert done.code == 1
    assert "error (prefix)" in done.stdout
    command = done.stdout.splitlines()[-1].split()
    assert command[:4] == ["ckptkit", "lora", "merge", "--sub"]
    for words, code in (
        ((path, "--base", held, "--fail-on", "never"), 0), ((path,), 0), ((tmp_path / "none",), 3),
        ((held,), 2),
    ):  # fmt: skip
        assert in_process("lora", "check", *words).code == code
    merged = in_process(*[word.strip("'") for word in command[1:]])  # what is told works
    assert merged.code == 0, merged.stderr


def test_a_broken_configuration(tmp_path: Path) -> None:
    path = adapter(tmp_path, factors("fc"))
    (path / CONFIG).write_text("{")
    assert [each["code"] for each in ckptkit.doctor(path)["causes"]] == ["adapter"]


ODD: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "without elements": (torch.ones(2, 0), torch.ones(0, 2)),
    "without elements, of one dimension": (torch.ones(0), torch.ones(0)),
    "a number": (torch.tensor(1.0), torch.ones(4, 2)),
    "two numbers": (torch.tensor(1.0), torch.tensor(1.0)),
    "a factor of one dimension": (torch.ones(2), torch.ones(4, 2)),
    "of one dimension": (torch.ones(3), torch.ones(4, 2)),
    "of other ranks": (torch.ones(3, 3), torch.ones(4, 2)),
    "integers": (torch.ones(2, 3).long(), torch.ones(4, 2)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors(tmp_path: Path, kind: str) -> None:
    """They are findings; what writes an adapter refuses them, and says why."""
    path = adapter(tmp_path, dict(zip(pair("fc", 4, 3), ODD[kind], strict=True)))
    assert "error" in codes(path, base=ones(tmp_path, "fc")).values()
    for function, words in ((convert_lora, {"to": "kohya", "component": "unet"}),
                            (resize_lora, {"rank": 1})):  # fmt: skip
        with pytest.raises(UnsupportedError, match="fc"):
            function(path, tmp_path / "out.safetensors", **words)  # type: ignore[operator]
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("role", ["diff_b", "dora_scale", "hada_t1"])
def test_tensors_without_dimensions(role: str, tmp_path: Path) -> None:
    loha = full(1, {f"hada_w{n}_{x}": (2, 2) for n in (1, 2) for x in "ab"})
    tensors = {role: torch.tensor(1.0), **(loha if role != "diff_b" else {})}
    named = {f"lora_unet_conv_in.{key}": each for key, each in tensors.items()}
    path = save(tmp_path / "k.safetensors", named)
    for options in ({}, {"base": ones(tmp_path, "conv_in", shape=(2, 2))}):
        assert "error" in codes(path, **options).values()


@pytest.mark.parametrize("alpha", [torch.ones(2), torch.ones(0), torch.tensor(torch.nan)])
def test_odd_alphas(tmp_path: Path, alpha: torch.Tensor) -> None:
    name = "lora_unet_conv_in"
    path = kohya(tmp_path, name)
    save(path, adapters.load_file(path) | {f"{name}.alpha": alpha})
    with pytest.raises(CkptkitError, match=r"alpha|scale"):
        convert_lora(path, tmp_path / "out.safetensors", "diffusers")


def test_all_problems_are_listed(tmp_path: Path) -> None:
    """A wrong rank, a missing partner, a wrong shape and a module that the base lacks, at once."""
    tensors = factors("fc") | factors("wide", inner=5) | factors("gone") | factors("high", rank=3)
    path = adapter(tmp_path, tensors | full(1, {"half.lora_A.weight": (2, 3)}))
    found = check_lora(path, base=ones(tmp_path, "fc", "wide", "half", "high")).findings
    assert {each.code: each.modules for each in found} == {
        "rank": ("high",), "pair": ("half",), "module": ("gone",), "shape": ("wide",),
    }  # fmt: skip
    assert all(each.command or each.hint for each in found)


def test_a_quantized_base_and_the_command(tmp_path: Path, in_process: Run) -> None:
    weight = {"fc.weight": torch.ones(4, 3).char(), "fc.weight_scale": torch.ones(4, 1)}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8,
              "type": "int", "strategy": "channel", "symmetric": True}}}}  # fmt: skip
    folder = base(tmp_path, weight, quantization_config=config)
    (found,) = check_lora(adapter(tmp_path, factors("fc")), base=folder).findings
    assert found.code == "quantized" and found.command
    done = in_process(*found.command.split()[1:])
    assert done.code == 0, done.stderr
