"""Commands that show or compare look at the weights, not at codes and scales."""

from __future__ import annotations

import json
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit import quantized
from ckptkit.core.errors import ModelError
from ckptkit.diagnosis.cause import ERROR
from ckptkit.diagnosis.diagnose import examine
from ckptkit.quantized import quantization
from tests.conftest import Run
from tests.quantized.made import Row, ones, row, write
from tests.quantized.refusals import BLOCKS, FP8, GPTQ, L, method


@pytest.fixture
def path(tmp_path: Path) -> Path:
    scale = row("F32", [2, 2], struct.pack("<4f", 0.5, 2, 4, 0.25))
    tensors = {**FP8, f"{L}.weight_scale_inv": scale, "norm.weight": ones([4], "BF16")}
    return write(tmp_path / "codes" / "model.safetensors", tensors, config=BLOCKS)


@pytest.fixture
def plain(path: Path, tmp_path: Path) -> Path:
    ckptkit.save(ckptkit.dequantize(ckptkit.open(path), "bfloat16"), tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


def inspected(run: Run, *words: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("inspect", "--json", *words).stdout)["files"][0]
    return found


def test_inspect_shows_one_row(path: Path, run: Run) -> None:
    done = run("inspect", path)
    line = next(line for line in done.stdout.splitlines() if f"{L}.weight" in line)
    assert "fp8 128x128" in line and "[200, 130]" in line and "26.0 kB" in line
    assert "scale_inv" not in done.stdout and "26,004 parameters" in done.stdout
    assert "1 of 2 weights" in done.stdout
    assert f"{L}.weight_scale_inv" in run("inspect", path, "--stored").stdout
    assert "fp8" not in run("inspect", path, "--keys", "norm*").stdout


def test_json_says_how_each_tensor_is_quantized(path: Path, run: Run) -> None:
    found = inspected(run, path)
    tensors = {each["name"]: each for each in found["tensors"]}
    said = tensors[f"{L}.weight"]["quantization"]
    assert (said["family"], said["label"], said["reason"]) == ("fp8-block", "fp8 128x128", None)
    assert said["parts"] == [f"{L}.weight", f"{L}.weight_scale_inv"]
    assert tensors[f"{L}.weight"]["nbytes"] == 200 * 130 + 16
    assert tensors["norm.weight"]["quantization"] is None
    assert found["totals"]["parameters"] == 26_004
    stored = {each["name"]: each for each in inspected(run, path, "--stored")["tensors"]}
    assert stored[f"{L}.weight_scale_inv"]["quantization"]["weight"] == f"{L}.weight"


def test_statistics_are_of_the_weights(path: Path, plain: Path, run: Run) -> None:
    means = [
        {
            each["name"]: each["mean"]
            for each in json.loads(run("stats", "--json", file).stdout)["tensors"]
        }
        for file in (path, plain)
    ]
    assert means[0] == means[1]
    assert len(json.loads(run("stats", "--json", "--stored", path).stdout)["tensors"]) == 3


def test_values_are_of_the_weights(path: Path, plain: Path, run: Run) -> None:
    words = f"{L}.weight", "[126:130, 126:130]"
    shown = [json.loads(run("show", "--json", each, *words).stdout) for each in (path, plain)]
    ours, theirs = (each["tensors"][0]["values"] for each in shown)
    assert ours == theirs


def test_codes_and_floats_are_compared_as_floats(
    path: Path, plain: Path, run: Run, tmp_path: Path
) -> None:
    assert run("diff", "--values", path, plain).code == 0
    assert run("diff", "--values", path, path).code == 0
    other = {**FP8, "norm.weight": ones([4], "BF16")}
    second = write(tmp_path / "other" / "model.safetensors", other, config=BLOCKS)
    done = run("diff", "--values", path, second)
    assert done.code == 1 and "1 changed" in done.stdout
    assert run("diff", "--stored", path, plain).code == 1
    assert ckptkit.diff(path, plain, values=True).equal


def test_digests_stay_those_of_the_file(path: Path, plain: Path, run: Run) -> None:
    done = run("digest", path)
    assert f"{L}.weight_scale_inv" in done.stdout and "stored codes and scales" in done.stderr
    assert run("digest", "--dequantize", "bfloat16", path).stdout == run("digest", plain).stdout


def test_the_page_has_the_weights(path: Path, run: Run, tmp_path: Path) -> None:
    assert run("report", path, "-o", tmp_path / "page.html", "--values").code == 0
    text = (tmp_path / "page.html").read_text()
    assert "fp8 128x128" in text and f"{L}.weight_scale_inv" not in text


def test_the_doctor_names_the_family_and_the_command(path: Path, run: Run, tmp_path: Path) -> None:
    done = run("doctor", path)
    assert done.code == 0 and "fp8-block" in done.stdout and "--dequantize bfloat16" in done.stdout
    file = tmp_path / "empty" / "model.safetensors"
    empty = write(file, {"fc.weight": ones([4, 4])}, config=BLOCKS)
    assert "no tensor is" in run("doctor", empty).stdout


MODEL = """
import torch

def tree(names, leaf):
    for name in reversed(names):
        parent = torch.nn.Module()
        parent.add_module(name, leaf)
        leaf = parent
    return leaf

def Up():
    linear = torch.nn.Linear(130, 200, bias=False)
    model = tree("model.layers.0.mlp.up_proj".split("."), linear)
    model.add_module("norm", torch.nn.RMSNorm(4))
    return model.bfloat16()

def Codes():
    model = Up()
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    linear.register_buffer("weight_scale_inv", torch.ones(2, 2))
    return model
"""


@pytest.fixture
def models(tmp_path: Path) -> Any:
    """The file of two models: of floats, and of codes and scales."""
    (tmp_path / "models.py").write_text(MODEL)
    return tmp_path / "models.py"


def test_diff_with_a_model_sees_the_weights(path: Path, models: Path, run: Run) -> None:
    assert run("diff", path, "--model", f"{models}:Up").code == 0
    done = run("diff", "--stored", path, "--model", f"{models}:Up")
    assert done.code == 1 and f"{L}.weight_scale_inv" in done.stdout
    assert run("diff", path, "--model", f"{models}:Codes").code == 0


def test_the_doctor_compares_the_weights_with_a_model(
    path: Path, models: Path, run: Run, tmp_path: Path
) -> None:
    done = run("doctor", path, "--model", f"{models}:Up")
    assert "weight_scale_inv" not in done.stdout
    assert "that the model does not have" not in done.stdout
    assert "--dequantize" in done.stdout
    found = examine(path, model=built(models, "Up"))
    assert [(each.code, each.level) for each in found.causes] == [("quantized", ERROR)]
    fixed = tmp_path / "fixed.safetensors"
    assert run("doctor", path, "--model", f"{models}:Up", "--fix", fixed).code == 0
    assert run("doctor", fixed, "--model", f"{models}:Up").code == 0


def test_codes_of_a_packed_weight_are_its_weight_for_a_model(run: Run, models: Path) -> None:
    tensors = {**GPTQ, "norm.weight": ones([4])}
    config = method("gptq", bits=4, group_size=32)
    path = write(models.parent / "gptq" / "model.safetensors", tensors, config=config)
    models.write_text(MODEL.replace("130, 200", "64, 16"))
    assert run("diff", path, "--model", f"{models}:Up").code == 0
    found = ckptkit.diff(path, f"{models}:Up")
    assert found.equal and not found.missing and not found.unexpected


def built(models: Path, name: str) -> Any:
    space: dict[str, Any] = {}
    exec(compile(models.read_text(), str(models), "exec"), space)
    return space[name]()


@pytest.mark.parametrize("strict", [True, False])
def test_codes_are_not_loaded_as_numbers(path: Path, models: Path, strict: bool) -> None:
    model = built(models, "Up")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match="fp8-block") as caught:
        ckptkit.load_into(model, path, strict=strict)
    assert "--dequantize bfloat16" in str(caught.value.hint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert ckptkit.load_into(model, ckptkit.dequantize(ckptkit.open(path), "float32")).complete


def test_a_model_of_codes_gets_codes(path: Path, models: Path) -> None:
    model = built(models, "Codes")
    assert ckptkit.load_into(model, path).complete
    linear = model.get_submodule(L)
    assert linear.weight_scale_inv.flatten().tolist() == [0.5, 2, 4, 0.25]


def test_what_is_not_read_is_not_loaded_either(models: Path) -> None:
    path = write(models.parent / "unknown" / "model.safetensors", {**FP8, "norm.weight": ones([4])})
    with pytest.raises(ModelError, match="weight_block_size"):
        ckptkit.load_into(built(models, "Up"), path)


NAN_AND_ZERO = struct.pack("<4f", 0.5, float("nan"), float("inf"), 0)
NVFP4 = method("compressed-tensors", format="nvfp4-pack-quantized")


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({**FP8, f"{L}.weight_scale_inv": row("F32", [2, 2], NAN_AND_ZERO)}, BLOCKS,
         ("1 NaN and 1 infinite of 4", "scales are zero, so these weights are zero too: "
          f"{L}.weight_scale_inv (1 of 4)")),
        ({f"{L}_blocks": row("U8", [2, 4, 2, 16]),
          f"{L}_scales": row("U8", [2, 4, 2], bytes([127] * 15 + [255]))}, None,
         (f"{L}_scales", "1 of 16 scales")),
        ({f"{L}.weight_packed": row("U8", [8, 16]),
          f"{L}.weight_scale": row("F8_E4M3", [8, 2], bytes([56] * 16)),
          f"{L}.weight_global_scale": row("F32", [1], bytes(4))}, NVFP4,
         (f"{L}.weight_global_scale", "1 of 1 scales are 0, and weights are divided by them")),
    ],
)  # fmt: skip
def test_verify_names_scales_that_are_no_numbers(
    tensors: dict[str, Row], config: Any, said: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.safetensors", tensors, config=config)
    done = run("verify", "--values", path)
    assert done.code == 1 and all(each in " ".join(done.stdout.split()) for each in said)
    assert run("verify", path).code == 0


def test_a_recipe_dequantizes(path: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps:\n  - dequantize: float16\n  - cast: float32\n")
    done = run("run", tmp_path / "recipe.yaml", path, tmp_path / "out.safetensors")
    assert done.code == 0, done.stderr
    assert ckptkit.open(tmp_path / "out.safetensors").weights[f"{L}.weight"].dtype.name == "float32"


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (("--dequantize",), "bfloat16"),
        (("--dequantize", "fp32"), "float32"),
        (("--dequantize=float16",), "float16"),
    ],
)
def test_the_dtype_may_be_left_out(
    words: tuple[str, ...], dtype: str, path: Path, run: Run, tmp_path: Path
) -> None:
    done = run("convert", *words, path, tmp_path / "out.safetensors")
    assert done.code == 0, done.stderr
    assert ckptkit.open(tmp_path / "out.safetensors").weights[f"{L}.weight"].dtype.name == dtype


def test_many_files_at_once(path: Path, run: Run, tmp_path: Path) -> None:
    done = run("batch", "convert", "--into", tmp_path / "out", "--dequantize", path)
    assert done.code == 0, done.stderr
    (made,) = (tmp_path / "out").rglob("*.safetensors")
    assert ckptkit.open(made).weights[f"{L}.weight"].dtype.name == "bfloat16"


def test_integers_are_no_target(path: Path) -> None:
    with pytest.raises(ckptkit.CkptkitError, match="int8"):
        ckptkit.dequantize(ckptkit.open(path), "int8")


def test_an_index_that_leads_out_of_the_scales_is_damage(tmp_path: Path, run: Run) -> None:
    tensors = {**GPTQ, f"{L}.g_idx": row("I32", [64], struct.pack("<64i", *([9] * 64)))}
    config = method("gptq", bits=4, group_size=32)
    path = write(tmp_path / "model.safetensors", tensors, config=config)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 3 and "g_idx" in done.stderr


def test_the_manual_has_every_family() -> None:
    from ckptkit.edits.quantized import KINDS
    from ckptkit.quantized.finding import markdown

    text = markdown()
    page = (Path(ckptkit.__file__).parent / "help" / "quantized.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == [line for line in text.splitlines() if line]
    for family in quantized.families():
        assert family.title in text or not family.read
    assert {family.written for family in quantized.families()} - {""} == set(KINDS)
    assert "AQLM" in text and "2.9" in text


def test_all_marks_are_in_the_list_that_is_looked_at_first() -> None:
    families = quantized.families()
    assert frozenset(mark for family in families for mark in family.marks) == quantization.MARKS
    assert {ending for family in families for ending in family.endings} == set(quantization.ENDINGS)
    assert all(family.oracle for family in families if family.read)


def test_the_doctor_makes_a_folder_of_a_folder_in_the_dtype_of_the_model(
    tmp_path: Path, run: Run
) -> None:
    config = method("fp8", weight_block_size=[2, 2]) | {"torch_dtype": "float16"}
    tensors = {"fc.weight": row("F8_E4M3", [4, 4]), "fc.weight_scale_inv": ones([2, 2])}
    source = tmp_path / "model"
    write(source / "model.safetensors", tensors, config=config)
    lines = run("doctor", source).stdout.splitlines()
    command = next(line for line in lines if line.strip().startswith("ckptkit convert"))
    assert run(*shlex.split(command)[1:]).code == 0
    made = json.loads((tmp_path / "model-float" / "config.json").read_text())
    assert made == {"torch_dtype": "float16"}
    weights = ckptkit.load(tmp_path / "model-float")
    assert weights["fc.weight"].dtype == torch.float16
