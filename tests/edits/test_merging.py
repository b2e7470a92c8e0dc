"""Merged models, against the methods written anew with torch, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.conftest import Ok, Run

Weights = dict[str, torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model(seed: int, dtype: torch.dtype) -> Weights:
    """A model of three layers near to that of seed 0."""
    made = {}
    own, shared = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    shapes = {"model.embed_tokens.weight": (50, 8), "model.norm.weight": (8,)}
    shapes |= {f"model.layers.{n}.mlp.up.weight": (31, 17) for n in range(3)}
    shapes |= {f"model.layers.{n}.norm.weight": (7,) for n in range(3)}
    for name, shape in shapes.items():
        base = torch.randn(shape, generator=shared)
        change = torch.randn(shape, generator=own) * 0.1 if seed else torch.zeros(shape)
        made[name] = (base + change).to(dtype)
    return made


@pytest.fixture(params=DTYPES, ids=str)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> list[Weights]:
    made = [model(seed, request.param) for seed in range(4)]
    for number, each in enumerate(made):
        save_file(each, tmp_path / f"{number}.safetensors")
    return made


def stored(folder: Path, *names: str) -> None:
    """Models at these paths, of the seeds 0, 1..."""
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(model(seed, torch.float32), folder / name)


def merged(folder: Path, numbers: list[int], **given: Any) -> Weights:
    if isinstance(given.get("base"), int):
        given["base"] = folder / f"{given['base']}.safetensors"
    paths = [folder / f"{number}.safetensors" for number in numbers]
    ckptkit.save(ckptkit.merge(paths, **given), folder / "out.safetensors", force=True)
    return load_file(folder / "out.safetensors")


def assert_close(found: Weights, expected: Weights, terms: list[Weights]) -> None:
    """Assert equality within a unit in the last place of the largest term, or of float32 two."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        largest = torch.stack([each[name].abs().double() for each in terms]).amax(0)
        unit = torch.finfo(tensor.dtype).eps * (1 + (tensor.dtype == torch.float32))
        assert ((tensor.double() - expected[name].double()).abs() <= unit * largest).all(), name


def test_linear_is_the_weighted_mean(models: list[Weights], tmp_path: Path) -> None:
    found = merged(
        tmp_path, [1, 2, 3], method="linear", weight=[0.3, {"*": 0.5, "*.mlp.*": 0.1}, 0.9]
    )
    expected = {}
    for name in found:
        shares = [0.3, 0.1 if ".mlp." in name else 0.5, 0.9]
        total = sum(
            each[name].float() * share for each, share in zip(models[1:], shares, strict=True)
        )
        assert isinstance(total, torch.Tensor)
        expected[name] = (total / sum(shares)).to(models[0][name].dtype)
    assert_close(found, expected, models)
    plain = merged(tmp_path, [1, 2], method="linear", normalize=False)
    both = {name: (models[1][name].float() + models[2][name].float()) for name in plain}
    assert_close(plain, {k: v.to(models[0][k].dtype) for k, v in both.items()}, [both])


def test_slerp_is_on_the_arc(models: list[Weights], tmp_path: Path) -> None:
    found = merged(tmp_path, [1, 3], method="slerp", scale=0.3)
    expected = {}
    for name, tensor in found.items():
        x, y = models[1][name].double(), models[3][name].double()
        cosine = (x * y).sum() / x.norm() / y.norm()
        angle = torch.arccos(cosine)
        shares = torch.sin(0.7 * angle) / angle.sin(), torch.sin(0.3 * angle) / angle.sin()
        if abs(cosine) > 0.9995:
            shares = torch.tensor(0.7), torch.tensor(0.3)
        expected[name] = (x * shares[0] + y * shares[1]).to(tensor.dtype)
    assert_close(found, expected, models)
    again = merged(tmp_path, [3], method="slerp", base=1, scale=0.3)
    assert all(torch.equal(again[name], found[name]) for name in found)


def differences(
    models: list[Weights], name: str, weights: list[float], densities: list[float], *,
    consensus: bool, normalize: bool, scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """The sum of the largest differences, each step in the dtype of the tensors."""
    base = models[0][name]
    kept = []
    for each, density in zip(models[1:], densities, strict=True):
        change = each[name] - base
        count = max(1, int(density * change.numel()))
        least = change.abs().flatten().sort(descending=True).values[count - 1]
        kept.append(change * (change.abs() >= least))
    stacked = torch.stack(kept)
    shares = torch.tensor(weights, dtype=base.dtype).reshape(-1, *[1] * base.dim())
    weighted = stacked * shares
    agrees = torch.ones_like(weighted, dtype=torch.bool)
    if consensus:
        sign = torch.where(weighted.sum(0) >= 0, 1, -1)
        agrees = weighted.sign() == sign
    total, divisor = (weighted * agrees).sum(0), (shares * agrees).sum(0)
    if normalize:
        total = total / torch.where(divisor == 0, 1, divisor)
    return base + (total * scale if scale != 1 else total)


def test_task_adds_differences(models: list[Weights], tmp_path: Path) -> None:
    found = merged(tmp_path, [1, 2, 3], method="task", base=0, weight=[0.3, 0.5, 0.9], scale=0.7)
    expected = {
        name: differences(
            models, name, [0.3, 0.5, 0.9], [1, 1, 1], consensus=False, normalize=False, scale=0.7
        )
        for name in found
    }
    assert_close(found, expected, models)


def test_ties_keeps_the_largest_of_the_sign_of_the_majority(
    models: list[Weights], tmp_path: Path
) -> None:
    weights, densities = [0.3, 0.5, 0.9], [0.5, 0.2, 1.0]
    found = merged(tmp_path, [1, 2, 3], method="ties", base=0, weight=weights, density=densities)
    for name, tensor in found.items():
        wanted = differences(models, name, weights, densities, consensus=True, normalize=True)
        same = (tensor == wanted).double().mean()
        # Where magnitudes are equal at the limit, the first ones stay here and all in `differences`.
        assert same == 1 if tensor.dtype == torch.float32 else same > 0.9, name


@pytest.mark.parametrize("density", [0.1, 0.5, 0.999, 1e-9, 0.0])
def test_as_many_differences_stay_as_the_density_says(
    models: list[Weights], tmp_path: Path, density: float
) -> None:
    found = merged(
        tmp_path, [1], method="ties", base=0, density=[density], normalize=False, dtype="float64"
    )
    for name, tensor in found.items():
        change = models[1][name].double() - models[0][name].double()
        kept = tensor - models[0][name].double() != 0
        count = max(int(density > 0), int(density * change.numel()))
        assert int(kept.sum()) == min(count, int((change != 0).sum())), name
        if 0 < count < change.numel():
            assert change[kept].abs().min() >= change[~kept].abs().max()


def test_rescaled_differences_have_the_sum_of_all(models: list[Weights], tmp_path: Path) -> None:
    for method in ("ties", "dare-linear"):
        found = merged(
            tmp_path, [1], method=method, base=0, density=[0.4], rescale=True, dtype="float64"
        )
        for name, tensor in found.items():
            base = models[0][name].double()
            before = (models[1][name].double() - base).abs().sum()
            torch.testing.assert_close((tensor - base).abs().sum(), before, rtol=1e-9, atol=0)


def test_dare_leaves_differences_out_by_chance(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000, 500)}, tmp_path / "0.safetensors")
    save_file({"w": torch.ones(1000, 500)}, tmp_path / "1.safetensors")
    given: dict[str, Any] = {"method": "dare-linear", "base": 0, "density": [0.3], "rescale": False}
    found = merged(tmp_path, [1], **given)["w"]
    assert {0.0, 1.0} == {*found.unique().tolist()}
    assert abs(float(found.mean()) - 0.3) < 0.005
    rows = found.mean(1)
    assert 0.2 < float(rows.min()) < float(rows.max()) < 0.4
    assert torch.equal(merged(tmp_path, [1], **given)["w"], found)
    assert not torch.equal(merged(tmp_path, [1], **given, seed=7)["w"], found)
    assert torch.equal(merged(tmp_path, [1], **given, seed=1 << 80)["w"], found)


def test_layers_of_several_models(tmp_path: Path, ok: Ok) -> None:
    first, second = model(1, torch.float32), model(2, torch.float32)
    for name, weights in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"num_hidden_layers": 3, "vocab_size": 50}')
    words = ["merge", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--method", "passthrough"]
    ok(*words, "--layers", "0:2", "--layers", "1:3")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
    expected = {
        "model.embed_tokens.weight": first["model.embed_tokens.weight"],
        "model.norm.weight": second["model.norm.weight"],
    }
    for place, (weights, number) in enumerate(((first, 0), (first, 1), (second, 1), (second, 2))):
        for part in ("mlp.up", "norm"):
            name = f"model.layers.{{}}.{part}.weight"
            expected[name.format(place)] = weights[name.format(number)]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


CONFIG = """
merge_method: task_arithmetic
base_model: org/base
models:
  - model: one
    parameters: {weight: [{filter: mlp, value: [0, 1]}, {value: 0.25}]}
  - model: two
    parameters: {weight: 0}
parameters: {lambda: 2}
dtype: float32
"""


def test_a_configuration_of_mergekit_is_a_recipe(tmp_path: Path, ok: Ok) -> None:
    stored(tmp_path, *(f"{name}/model.safetensors" for name in ("base", "one", "two")))
    (tmp_path / "merge.yml").write_text(CONFIG)
    ok("run", tmp_path / "merge.yml", tmp_path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    base, one = model(0, torch.float32), model(1, torch.float32)
    for name, tensor in found.items():
        number = re.search(r"layers\.(\d)\.mlp", name)
        weight = int(number[1]) / 2 if number else 0.25
        torch.testing.assert_close(tensor, base[name] + 2 * weight * (one[name] - base[name]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("merge_method: della", "merge_method 'della' is not supported"),
        ("tokenizer_source: union", "makes a new vocabulary"),
        ("modules: {}", "'modules' is not supported"),
        ("base_model: not/there", "'not/there' does not exist"),
        ("slices: []", "needs either models or slices"),
        ("models: []", "is not a list of inputs"),
        ("parameters: {gamma: 1}", "'gamma' is not supported"),
        ("parameters: {normalize: 3}", "normalize must be true or false, got '3'"),
        ("models: [{model: one, parameters: {weight: x}}]", "'x' is not a number"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, run: Run, changed: str, said: str) -> None:
    stored(tmp_path, "base", "one", "two")
    word = changed.partition(":")[0]
    lines = re.sub(rf"^{word}:.*?(?=^\w|\Z)", "", CONFIG, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "merge.yml").write_text(f"{lines}\n{changed}\n")
    done = run("run", tmp_path / "merge.yml", tmp_path, tmp_path / "out")
    assert done.code in (2, 3) and said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "task"}, "needs a base model: base="),
        ({"method": "linear", "base": 0}, "linear does not use a base"),
        ({"method": "slerp"}, "merges two models, got 3"),
        ({"method": "linear", "weight": [1]}, "weight: got 1 value, but there are 3 models"),
        ({"method": "linear", "weight": [1, 2]}, "weight: got 2 values, but there are 3 models"),
        ({"method": "linear", "scale": 0.3}, "linear does not use scale"),
        ({"method": "slerp", "normalize": False}, "slerp does not use normalize"),
        ({"method": "task", "base": 0, "rescale": True}, "task does not use rescale"),
        ({"method": "task", "base": 0, "density": [1, 1, 1]}, "task does not use density"),
        ({"method": "passthrough", "layers": ["0:1"]}, "got 1 layer range for 3 models"),
        ({"method": "passthrough", "layers": ["0:1", "2:9", "0:1"]},
         "'2:9' is not a valid layer range"),
        ({"method": "passthrough"}, "needs a layer range for each"),
        ({"method": "linear", "layers": ["0:1"] * 3}, "only passthrough uses layers"),
        ({"method": "median"}, "'median' is not a method"),
        ({}, "a method is required: method="),
    ],
)  # fmt: skip
def test_numbers_that_a_method_does_not_use(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    stored(tmp_path, *(f"{number}.safetensors" for number in range(4)))
    with pytest.raises(CkptkitError, match=re.escape(said)):
        merged(tmp_path, [1, 2, 3], **given)


def test_parts_of_one_model_are_named_join(tmp_path: Path, run: Run) -> None:
    save_file({"encoder.w": torch.ones(2)}, tmp_path / "encoder.safetensors")
    save_file({"decoder.w": torch.ones(2)}, tmp_path / "decoder.safetensors")
    parts = [tmp_path / "encoder.safetensors", tmp_path / "decoder.safetensors"]
    done = run("merge", *parts, tmp_path / "out.safetensors")
    assert done.code == 2
    assert f"`ckptkit join {parts[0]} {parts[1]} {tmp_path / 'out.safetensors'}`" in done.stderr


def test_what_has_no_mean_and_what_is_tied(tmp_path: Path, run: Run) -> None:
    for number in range(2):
        weight = torch.full((4, 4), float(number))
        held = {"w": weight, "tied": weight, "steps": torch.tensor(number), "none": torch.ones(0)}
        torch.save(held, tmp_path / f"{number}.pth")
    words = ["merge", "0.pth", "1.pth", "out.pth", "--method", "linear", "--weight", "1"]
    done = run(*words, "--weight", "3", cwd=tmp_path)
    assert done.code == 0 and "copied 'steps' from 0.pth" in done.stdout
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["w"].data_ptr() == found["tied"].data_ptr()
    assert found["w"].unique().tolist() == [0.75] and found["steps"] == 0
    assert found["none"].shape == (0,)


def test_complex_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"c": torch.ones(2, dtype=torch.complex64)}, tmp_path / "a.pth")
    with pytest.raises(CkptkitError, match="'c' is complex: linear computes with real numbers"):
        ckptkit.merge([tmp_path / "a.pth"] * 2, method="linear")
    assert ckptkit.average([tmp_path / "a.pth"] * 2).weights["c"].numpy().tolist() == [1, 1]
