"""`lora check` and `doctor`: each finding, on the smallest adapter that has it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.lora.check import check_lora
from ckptkit.lora.writing import convert_lora, resize_lora
from tests.conftest import Run

Array = np.ndarray[Any, Any]
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}


def factors(name: str, out: int = 4, inner: int = 3, rank: int = 2) -> dict[str, Array]:
    at = f"base_model.model.{name}.lora_"
    ones = np.full((rank, inner), 0.1, "f4"), np.full((out, rank), 0.1, "f4")
    return {f"{at}A.weight": ones[0], f"{at}B.weight": ones[1]}


def adapter(folder: Path, tensors: dict[str, Array], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def base(folder: Path, *names: str, shape: tuple[int, int] = (4, 3)) -> Path:
    path = folder / "base.safetensors"
    save_file({f"{name}.weight": np.ones(shape, "f4") for name in names}, path)
    return path


def codes(path: Path, **options: Any) -> dict[str, str]:
    return {each.code: each.level for each in check_lora(path, **options).findings}


def test_nothing_is_wrong(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", factors("fc"))
    report = check_lora(path, base=base(tmp_path, "fc", "other"), target="vllm")
    assert report.findings == ()
    assert report.as_json()["adapter"] == {
        "layout": "peft", "method": "LORA", "modules": 1, "ranks": [2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "config", "expected"),
    [
        ({"B": np.zeros((4, 2), "f4")}, {}, {"zero": "warning"}),
        ({"B": np.full((4, 2), np.inf, "f4")}, {}, {"nonfinite": "error"}),
        ({"A": np.zeros((2, 0), "f4")}, {}, {"empty": "error"}),
        ({"A": None}, {}, {"pair": "error"}),
        ({}, {"use_dora": True}, {"pair": "error"}),
        ({}, {"r": 4}, {"rank": "error"}),
        ({}, {"peft_type": "PREFIX_TUNING"}, {"method": "error"}),
        ({}, {"init_lora_weights": "pissa"}, {"residual": "error"}),
        ({}, {"use_qalora": True}, {"method": "error"}),
    ],
)  # fmt: skip
def test_of_its_own_files(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], expected: dict[str, str]
) -> None:
    tensors = factors("fc")
    for role, array in change.items():
        tensors[f"base_model.model.fc.lora_{role}.weight"] = array
    kept = {name: each for name, each in tensors.items() if each is not None}
    path = adapter(tmp_path / "a", kept, **config)
    found = codes(path)
    assert expected.items() <= found.items()
    assert expected.items() <= codes(path, base=base(tmp_path, "fc")).items()
    doctor = ckptkit.doctor(path)
    assert expected.items() <= {each["code"]: each["level"] for each in doctor["causes"]}.items()


def test_an_untrained_ia3(tmp_path: Path) -> None:
    tensors = {"base_model.model.fc.ia3_l": np.ones((4, 1), "f4")}
    assert codes(adapter(tmp_path / "a", tensors, peft_type="IA3")) == {"zero": "warning"}


def test_without_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"blocks.0.q.lora_A.weight": np.ones((2, 3), "f4"),
               "blocks.0.q.lora_B.weight": np.ones((4, 2), "f4")}, path)  # fmt: skip
    assert codes(path) == {"no-config": "error"}


def test_with_a_base(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", factors("model.fc") | factors("model.head"))
    assert codes(path, base=base(tmp_path, "fc", "head")) == {"prefix": "error"}
    found = check_lora(path, base=base(tmp_path, "model.fc", "model.hand")).findings
    assert [each.code for each in found] == ["module"]
    assert found[0].modules == ("model.head",)
    wide = base(tmp_path, "model.fc", "model.head", shape=(4, 5))
    assert codes(path, base=wide) == {"shape": "error"}


def test_the_command_with_several_renames_works(tmp_path: Path, in_process: Run) -> None:
    names = "model.language_model.layers.0.q_proj", "model.vision_tower.x.fc1", "lm_head"
    path = adapter(tmp_path / "a", factors(names[0]) | factors(names[1]) | factors(names[2]))
    there = "language_model.model.layers.0.q_proj", "vision_tower.x.fc1", "language_model.lm_head"
    (found,) = check_lora(path, base=base(tmp_path, *there)).findings
    assert found.code == "prefix" and found.command is not None
    done = in_process(*shlex.split(found.command)[1:])
    assert done.code == 0
    said = done.stdout + done.stderr
    assert "merged 3 modules" in said and "renamed" not in said


def test_tokens_and_matrices_of_a_tied_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": np.ones((4, 3), "f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    at = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = {at: np.ones((2, 3), "f4")}
    path = adapter(tmp_path / "a", rows, trainable_token_indices=[1, 4])
    assert codes(path, base=folder) == {"shape": "error"}
    path = adapter(tmp_path / "a", rows, trainable_token_indices=[1, 3])
    assert codes(path, base=folder) == {}
    head = {"base_model.model.lm_head.weight": np.zeros((4, 3), "f4")}
    path = adapter(tmp_path / "a", head, modules_to_save=["lm_head"])
    assert codes(path, base=folder) == {"tied": "warning"}


def test_a_norm_above_that_of_the_weight(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", factors("fc"), lora_alpha=2000)
    found = check_lora(path, base=base(tmp_path, "fc")).findings
    assert [(each.code, each.modules) for each in found] == [("norm", ("fc",))]
    # 0.1 * 0.1 * 2 in each of 12 elements, times 1000; the weight is 12 ones.
    assert f"fc ({1000 * 0.02 * 12**0.5:.3g} of {12**0.5:.3g})" in found[0].title


KINDS: dict[str, tuple[dict[str, tuple[int, ...]], float]] = {
    "LORA": ({"lora_magnitude_vector": (4,)}, 3**0.5),
    "LOHA": ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 3), "hada_w2_a": (4, 2), "hada_w2_b": (2, 3)}, 0.4),
    "LOKR": ({"lokr_w1": (2, 1), "lokr_w2_a": (2, 2), "lokr_w2_b": (2, 3)}, 0.4),
    "IA3": ({"ia3_l": (4, 1)}, 1.5),
}  # fmt: skip


@pytest.mark.parametrize("method", KINDS)
def test_the_norm_of_every_kind(method: str, tmp_path: Path) -> None:
    """The base is a matrix of ones, so the norm of a row is sqrt(3)."""
    shapes, small = KINDS[method]
    config = {"peft_type": method, "use_dora": method == "LORA", "alpha": 2}
    there, found = base(tmp_path, "fc"), list[Any]()
    for value in (small, 5.0, np.nan):
        at = "base_model.model.fc."
        tensors = {at + role: np.full(shape, value, "f4") for role, shape in shapes.items()}
        tensors |= factors("fc") if method == "LORA" else {}
        path = adapter(tmp_path / f"{value:.0f}", tensors, **config)
        found.append(check_lora(path, base=there).findings)
    assert [[each.code for each in of_one] for of_one in found] == [[], ["norm"], ["nonfinite"]]
    assert ("BASE must be" in str(found[1][0].hint)) == (method in ("LORA", "IA3"))


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
@pytest.mark.parametrize("names", [["fc"], ["other"], None])
def test_the_vector_of_ia3_has_the_shape_of_its_side(
    names: list[str] | None, shape: tuple[int, int], tmp_path: Path
) -> None:
    """A square weight has rows and columns of the same number; only the shape tells them apart."""
    tensors = {"base_model.model.fc.ia3_l": np.full(shape, 1.5, "f4")}
    path = adapter(tmp_path / "a", tensors, peft_type="IA3", feedforward_modules=names)
    is_right = (shape == (1, 4)) == (names == ["fc"])
    for options in ({}, {"base": base(tmp_path, "fc", shape=(4, 4))}):
        found = check_lora(path, **options).findings
        assert [each.code for each in found] == ([] if is_right else ["shape"])
        assert is_right or "feedforward_modules" in str(found[0].hint)


def test_tied_matrices_and_other_vocabularies(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": np.ones((4, 3), "f4")}, folder / "model.safetensors")
    config = {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    found = check_lora(adapter(tmp_path / "a", factors("lm_head")), base=folder).findings
    assert [(each.code, each.level) for each in found] == [("tied", "warning")]
    assert found[0].command and "--tied untie" in found[0].command
    rows = {"base_model.model.model.embed_tokens.weight": np.ones((6, 3), "f4")}
    tensors = factors("fc") | rows
    save_file({"fc.weight": np.ones((4, 3), "f4"), "model.embed_tokens.weight": np.ones((4, 3), "f4")},
              folder / "model.safetensors")  # fmt: skip
    path = adapter(tmp_path / "b", tensors, modules_to_save=["embed_tokens"])
    both = {"tied": "warning", "vocab": "warning"}
    assert codes(path, base=folder) == {**both, "shape": "error"}  # the head is not larger
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    assert codes(path, base=folder) == {"vocab": "warning"}


def test_commands_with_the_options_of_all_findings(tmp_path: Path, run: Run) -> None:
    """The base has another prefix, is the residual, and ties the two matrices."""
    folder = tmp_path / "base"
    folder.mkdir()
    names = "language_model.model.fc", "language_model.model.embed_tokens"
    ones = {f"{name}.weight": np.ones((4, 3), "f4") for name in names}
    save_file(ones, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    tensors = factors("model.language_model.fc") | factors("lm_head")
    path = adapter(tmp_path / "a", tensors, init_lora_weights="pissa")
    found = {each.code: each.command for each in check_lora(path, base=folder).findings}
    assert found.keys() == {"residual", "prefix", "tied"}
    for code, command in found.items():
        done = run(*shlex.split(command or "")[1:-1], tmp_path / code)
        assert done.code == 0, (command, done.stderr)


def test_factors_that_do_not_fit(tmp_path: Path) -> None:
    tensors = factors("fc")
    tensors["base_model.model.fc.lora_B.weight"] = np.ones((4, 5), "f4")
    path = adapter(tmp_path / "a", tensors)
    assert codes(path) == {"shape": "error"}
    assert codes(path, base=base(tmp_path, "fc")) == {"shape": "error"}


def test_an_embedding_with_other_rows(tmp_path: Path) -> None:
    at = "base_model.model.embed_tokens.lora_embedding_"
    tensors = {f"{at}A": np.full((2, 6), 0.1, "f4"), f"{at}B": np.full((3, 2), 0.1, "f4")}
    path = adapter(tmp_path / "a", tensors)
    found = codes(path, base=base(tmp_path, "embed_tokens", shape=(4, 3)))
    assert found == {"vocab": "warning", "shape": "error"}


def test_the_component_that_the_base_has(tmp_path: Path) -> None:
    names = "lora_unet_conv_in", "lora_te_text_model_encoder_layers_0_mlp_fc1"
    tensors = {f"{name}.lora_down.weight": np.full((1, 2), 0.1, "f4") for name in names}
    tensors |= {f"{name}.lora_up.weight": np.full((2, 1), 0.1, "f4") for name in names}
    path = tmp_path / "k.safetensors"
    save_file(tensors, path)
    (found,) = check_lora(path, base=base(tmp_path, "conv_in", shape=(2, 2))).findings
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
    path = adapter(tmp_path / "a", factors("fc"), **config)
    assert codes(path, target="vllm").get(code) == "error"
    assert code not in codes(path)


def test_ranks_and_layouts_for_vllm(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", factors("fc", rank=32), r=32)
    assert codes(path, target="vllm") == {"vllm-rank": "warning"}
    kohya = tmp_path / "k.safetensors"
    names = "lora_unet_conv_in.lora_{}.weight"
    save_file(
        {names.format("down"): np.ones((1, 2), "f4"), names.format("up"): np.ones((2, 1), "f4")},
        kohya,
    )
    assert codes(kohya, target="vllm") == {"vllm-layout": "error"}
    assert codes(kohya, base=base(tmp_path, "unet.conv_in", shape=(2, 2))) == {}
    assert codes(kohya, base=base(tmp_path, "unet.conv_out", shape=(2, 2))) == {
        "no-module": "error"
    }
    with pytest.raises(UsageError):
        check_lora(path, target="tgi")


def test_the_command(tmp_path: Path, in_process: Run) -> None:
    path = adapter(tmp_path / "a", factors("model.fc"))
    held = base(tmp_path, "fc")
    done = in_process("lora", "check", path, "--base", held)
    assert done.code == 1
    assert "error (prefix)" in done.stdout
    command = done.stdout.splitlines()[-1].split()
    assert command[:4] == ["ckptkit", "lora", "merge", "--sub"]
    assert in_process("lora", "check", path, "--base", held, "--fail-on", "never").code == 0
    assert in_process("lora", "check", path).code == 0
    assert in_process("lora", "check", tmp_path / "none").code == 3
    merged = in_process(*[word.strip("'") for word in command[1:]])  # what is told works
    assert merged.code == 0, merged.stderr
    assert in_process("lora", "check", held).code == 2


def test_a_broken_configuration(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", factors("fc"))
    (path / "adapter_config.json").write_text("{")
    assert [each["code"] for each in ckptkit.doctor(path)["causes"]] == ["adapter"]


ODD: dict[str, tuple[Array, Array]] = {
    "without elements": (np.ones((2, 0), "f4"), np.ones((0, 2), "f4")),
    "without elements, of one dimension": (np.ones(0, "f4"), np.ones(0, "f4")),
    "a number": (np.array(1, "f4"), np.ones((4, 2), "f4")),
    "two numbers": (np.array(1, "f4"), np.array(1, "f4")),
    "a factor of one dimension": (np.ones(2, "f4"), np.ones((4, 2), "f4")),
    "of one dimension": (np.ones(3, "f4"), np.ones((4, 2), "f4")),
    "of other ranks": (np.ones((3, 3), "f4"), np.ones((4, 2), "f4")),
    "integers": (np.ones((2, 3), "i8"), np.ones((4, 2), "f4")),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors(tmp_path: Path, kind: str) -> None:
    """They are findings; what writes an adapter refuses them, and says why."""
    a, b = ODD[kind]
    tensors = {"base_model.model.fc.lora_A.weight": a, "base_model.model.fc.lora_B.weight": b}
    path = adapter(tmp_path / "a", tensors)
    assert "error" in codes(path, base=base(tmp_path, "fc")).values()
    for function, words in ((convert_lora, {"to": "kohya", "component": "unet"}),
                            (resize_lora, {"rank": 1})):  # fmt: skip
        with pytest.raises(UnsupportedError, match="fc"):
            function(path, tmp_path / "out.safetensors", **words)  # type: ignore[operator]
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("role", ["diff_b", "dora_scale", "hada_t1"])
def test_tensors_without_dimensions(role: str, tmp_path: Path) -> None:
    loha = {f"hada_w{n}_{x}": np.ones((2, 2), "f4") for n in (1, 2) for x in "ab"}
    tensors = {role: np.array(1, "f4"), **(loha if role != "diff_b" else {})}
    path = tmp_path / "k.safetensors"
    save_file({f"lora_unet_conv_in.{key}": each for key, each in tensors.items()}, path)
    for options in ({}, {"base": base(tmp_path, "conv_in", shape=(2, 2))}):
        assert "error" in codes(path, **options).values()


@pytest.mark.parametrize("alpha", [np.ones(2, "f4"), np.ones(0, "f4"), np.array(np.nan, "f4")])
def test_odd_alphas(tmp_path: Path, alpha: Array) -> None:
    name, path = "lora_unet_conv_in", tmp_path / "k.safetensors"
    factors = {f"{name}.lora_down.weight": np.ones((1, 2), "f4")}
    factors |= {f"{name}.lora_up.weight": np.ones((2, 1), "f4"), f"{name}.alpha": alpha}
    save_file(factors, path)
    with pytest.raises(CkptkitError, match=r"alpha|scale"):
        convert_lora(path, tmp_path / "out.safetensors", "diffusers")


def test_all_problems_are_listed_each_with_its_next_step(tmp_path: Path) -> None:
    """A wrong rank, a missing partner, a wrong shape and a module that the base lacks, at once."""
    tensors = factors("fc") | factors("wide", inner=5) | factors("gone") | factors("high", rank=3)
    tensors["base_model.model.half.lora_A.weight"] = np.ones((2, 3), "f4")
    path = adapter(tmp_path / "a", tensors)
    held = base(tmp_path, "fc", "wide", "half", "high")
    found = check_lora(path, base=held).findings
    assert {each.code: each.modules for each in found} == {
        "rank": ("high",), "pair": ("half",), "module": ("gone",), "shape": ("wide",),
    }  # fmt: skip
    assert all(each.command or each.hint for each in found)


@pytest.mark.parametrize(
    ("change", "config", "base_is"),
    [
        ({}, {"init_lora_weights": "pissa"}, "--base-is residual"),
        ({"lora_B": np.zeros((4, 2), "f4")}, {}, None),
        ({"lora_A": np.zeros((2, 0), "f4")}, {}, None),
        ({}, {"r": 8}, None),
        ({}, {"peft_type": "PREFIX_TUNING"}, None),
        ({}, {"lora_alpha": 4000}, None),
    ],
)
def test_each_finding_tells_the_next_step(
    tmp_path: Path, change: dict[str, Array], config: dict[str, Any], base_is: str | None
) -> None:
    tensors = factors("fc")
    tensors |= {f"base_model.model.fc.{role}.weight": each for role, each in change.items()}
    path = adapter(tmp_path / "a", tensors, **config)
    found = check_lora(path, base=base(tmp_path, "fc"), target="vllm").findings
    assert found and all(each.command or each.hint for each in found)
    if base_is is not None:
        assert found[0].command and base_is in found[0].command


def test_a_quantized_base_and_the_command(tmp_path: Path, in_process: Run) -> None:
    weight = {"fc.weight": np.ones((4, 3), "i1"), "fc.weight_scale": np.ones((4, 1), "f4")}
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(weight, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8,
              "type": "int", "strategy": "channel", "symmetric": True}}}}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (found,) = check_lora(adapter(tmp_path / "a", factors("fc")), base=folder).findings
    assert found.code == "quantized" and found.command
    done = in_process(*found.command.split()[1:])
    assert done.code == 0, done.stderr
