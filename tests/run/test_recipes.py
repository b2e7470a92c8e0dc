"""Recipes: those that come with ckptkit, on checkpoints laid out as frameworks do, and what may go
wrong."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.api import Step
from ckptkit.core.errors import UsageError
from ckptkit.run import recipes
from tests.conftest import ROOT, Ok, Run

Loaded = dict[str, torch.Tensor]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    parts = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    return torch.nn.Sequential(*parts)


def renamed(prefix: str, shift: float = 0.0) -> Loaded:
    """The state_dict under a prefix; floats moved by `shift`."""
    state = net().state_dict()
    return OrderedDict(
        (prefix + name, t + shift if t.is_floating_point() else t) for name, t in state.items()
    )


def lightning() -> dict[str, Any]:
    return {
        "epoch": 9, "global_step": 1000, "pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {},
        "state_dict": {**renamed("model."), "criterion.weight": torch.ones(2)},
        "optimizer_states": [torch.optim.Adam(net().parameters()).state_dict()],
        "hyper_parameters": {"lr": 0.1}, "hparams_name": "kwargs",
    }  # fmt: skip


def timm() -> dict[str, Any]:
    return {
        "epoch": 9, "arch": "resnet18", "version": 2, "args": Namespace(lr=0.1), "metric": 0.7,
        "state_dict": renamed("module."), "state_dict_ema": renamed("module.", 0.5),
        "optimizer": torch.optim.SGD(net().parameters(), 0.1, momentum=0.9).state_dict(),
    }  # fmt: skip


def torchvision() -> dict[str, Any]:
    return {
        "model": renamed("module."), "optimizer": torch.optim.SGD(net().parameters(), 0.1).state_dict(),
        "lr_scheduler": {"last_epoch": 3}, "epoch": 3, "args": Namespace(device="cuda"),
    }  # fmt: skip


def fairseq() -> dict[str, Any]:
    model = renamed("") | {"encoder.version": torch.tensor([3.0])}
    model["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    return {"args": None, "cfg": {"model": {"arch": "x"}}, "model": model, "criterion": None}


def llama_c() -> dict[str, Any]:
    rest = {"optimizer": {}, "model_args": {"dim": 288}, "iter_num": 5, "config": {}}
    return {"model": renamed("_orig_mod."), **rest}


MADE: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "lightning": (lightning, 0),
    "timm": (timm, 0.5),
    "torchvision": (torchvision, 0),
    "fairseq": (fairseq, 0),
    "llama.c": (llama_c, 0),
}


@pytest.mark.parametrize("name", MADE)
def test_the_plain_network_comes_out(
    name: str, tmp_path: Path, ok: Ok, simulated_cuda: Any
) -> None:
    make, shift = MADE[name]
    with simulated_cuda(1):
        torch.save(make(), tmp_path / "run.ckpt")
    ok("run", name, tmp_path / "run.ckpt", tmp_path / "net.pth")
    found = ckptkit.load(tmp_path / "net.pth", map_location="cpu")
    expected = renamed("", shift)
    assert list(found) == list(expected)
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    net().load_state_dict(found)
    # Nothing of the framework is left.
    torch.load(tmp_path / "net.pth", weights_only=True, map_location="cpu")


def test_a_zero_folder_for_transformers(tmp_path: Path, ok: Ok) -> None:
    source = ROOT / "fixtures" / "deepspeed" / "zero3-bf16-3ranks"
    ok("run", "deepspeed-hf", source, tmp_path / "hf")
    expected = {n: each for n, each in ckptkit.load(source).items() if each.is_floating_point()}
    found = ckptkit.load(tmp_path / "hf")
    assert list(tmp_path.glob("hf/*.safetensors")) and expected
    for name, tensor in expected.items():
        assert torch.equal(found[name.removeprefix("module.")], tensor.bfloat16())


def test_each_recipe_is_tested() -> None:
    others = {name for name in recipes.names() if not recipes.load(name).source}
    assert others == {*MADE, "deepspeed-hf", "gguf"}
    assert all(recipes.load(name).about for name in recipes.names())


def write(folder: Path, text: str, suffix: str = "yaml") -> Path:
    path = folder / f"recipe.{suffix}"
    path.write_text(text)
    return path


def source(folder: Path) -> Path:
    path = folder / "run.pth"
    torch.save({"model": renamed("module."), "epoch": 3}, path)
    return path


STEPS = """
about: every step that a single file allows
steps:
  - weights: true
  - strip: module.
  - select: {keep: ["0.*", "2.*"], drop: "*.bias"}
  - rename: {map: {0.weight: first.weight}, sub: {"^2": last}}
  - cast: {"*": float64, "last*": bfloat16}
  - remap: cuda:1
  - remap: {"cuda:1": cpu}
  - compact: true
  - add: net.
  - extract: [nothing, net.last.weight, net]
  - wrap: weight
output: {format: safetensors}
"""
TOML = """
about = "the same file, in the other language"
steps = [{weights = true}, {strip = ["module."]}, {cast = {"*" = "float64"}}]
[output]
format = "torch-zip"
"""


def test_steps_in_their_order(tmp_path: Path, ok: Ok) -> None:
    ok("run", write(tmp_path, STEPS), source(tmp_path), tmp_path / "out")
    found = load_file(tmp_path / "out")
    assert torch.equal(found["weight"], net().state_dict()["2.weight"].bfloat16())


def test_toml(tmp_path: Path, ok: Ok) -> None:
    ok("run", write(tmp_path, TOML, "toml"), source(tmp_path), tmp_path / "out")
    assert torch.load(tmp_path / "out", weights_only=True)["0.weight"].dtype == torch.float64


def test_the_command_line_comes_first(tmp_path: Path, ok: Ok) -> None:
    recipe = write(tmp_path, "steps: [{weights: true}]\noutput: {format: safetensors}")
    ok("run", recipe, source(tmp_path), tmp_path / "out", "--format", "torch-zip")
    assert torch.load(tmp_path / "out", weights_only=True)


def test_a_dry_run_shows_and_writes_nothing(tmp_path: Path, run: Run) -> None:
    done = run("run", "llama.c", source(tmp_path), tmp_path / "out.pth", "--dry-run")
    assert done.stdout.startswith(f"would write {tmp_path / 'out.pth'}: 9 tensors")
    assert not (tmp_path / "out.pth").exists()


def test_files_beside(tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save(renamed("module.", 1.0), other)

    def step(word: str, given: object) -> Step:
        text = json.dumps({"steps": [{word: given}]})
        (found,) = recipes.load(str(write(tmp_path, text))).steps
        return found

    mean = ckptkit.open(source(tmp_path))
    ckptkit.save(step("average", str(other))(mean), tmp_path / "mean.pth")
    found = torch.load(tmp_path / "mean.pth", weights_only=True)["module.0.weight"]
    torch.testing.assert_close(found, net().state_dict()["0.weight"] + 0.5)
    with pytest.raises(ckptkit.CkptkitError, match=r"both have 9 names"):
        step("join", [str(other)])(ckptkit.open(source(tmp_path)))


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("steps: [{strip: 3}]", "step 1 (strip): 3 is not a string", None),
        ("steps: [{strop: module.}]", "step 1: 'strop' is not a step", "did you mean strip?"),
        ("steps: [strip]", "step 1 must be a mapping from the name of one step to its argument",
         "write, for example, `- strip: module.`"),
        ("steps: []", "has no list of steps", None),
        ("about: x", "has no list of steps", None),
        ("stops: []", "unknown: 'stops'; the known keys are about", None),
        ("- 1", "unknown: [1]; the known keys are about", None),
        ("steps: [{weights: yes please}]", "step 1 (weights): must be true, got 'yes please'",
         None),
        ("steps: [{select: {kept: a}}]",
         "step 1 (select): unknown: 'kept'; the known keys are drop, keep", None),
        ("steps: [{rename: {map: a}}]",
         "step 1 (rename): 'a' is not a mapping whose keys and values are strings", None),
        ("steps: [{weights: true}]\noutput: {all: 3}",
         "output: all has a value of the wrong type: 3", None),
        ("steps: [{weights: true}]\nabout: [x]", "about is ['x']", None),
        ("steps: [", "is not valid: while parsing a flow node", None),
        ("steps: !!python/object/apply:os.system [id]",
         "is not valid: could not determine a constructor", None),
    ],
)  # fmt: skip
def test_what_is_no_recipe(text: str, said: str, hint: str | None, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        recipes.load(str(write(tmp_path, text)))
    assert said in str(refused.value)
    assert refused.value.hint == hint


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no recipe 'lightening'") as refused:
        recipes.load("lightening")
    assert refused.value.hint == "did you mean lightning? A recipe file must end in .yaml or .toml"
    with pytest.raises(UsageError, match="does not exist"):
        recipes.load(str(tmp_path / "x.yaml"))
    with pytest.raises(UsageError, match="too large for a recipe"):
        recipes.load(str(write(tmp_path, "#" * 2_000_000)))
    with pytest.raises(UsageError, match="is not valid"):
        recipes.load(str(write(tmp_path, "a = ", "toml")))


def test_an_entry_that_is_not_there(tmp_path: Path, run: Run) -> None:
    done = run("run", "lightning", source(tmp_path), tmp_path / "out.pth")
    assert done.code == 2
    assert "there is no entry 'state_dict'" in done.stderr


def test_the_list(run: Run) -> None:
    others, _, layouts = run("run", "--list").stdout.partition("\n\n")
    found = [[line.split()[0] for line in text.splitlines()[1:]] for text in (others, layouts)]
    assert sorted([*found[0], *found[1]]) == recipes.names()
    assert all(recipes.load(name).source for name in found[1])


def test_the_help_lists_what_ships() -> None:
    text = (ROOT / "ckptkit" / "help" / "rules.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    shipped = [each for each in map(recipes.load, recipes.names()) if each.source]
    assert len(shipped) > 20
    for each in shipped:
        row = f"| `{each.name}` | {each.about} | {each.checked or 'not checked'} |"
        assert rows[each.name] == row
