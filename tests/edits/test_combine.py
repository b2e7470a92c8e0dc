"""Several checkpoints as one, checked against torch's own arithmetic."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.api import convert
from ckptkit.core.errors import CollisionError, UsageError
from tests.conftest import Ok, Run
from tests.torch_equality import bits

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.float8_e5m2, torch.float8_e4m3fn,
]  # fmt: skip


def state(seed: int, dtype: torch.dtype = torch.float32) -> OrderedDict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = OrderedDict(
        (name, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in (("a.weight", (7, 5)), ("a.bias", (7,)), ("scale", ()), ("none", (0, 3)))
    )
    made["a.num_batches_tracked"] = torch.tensor(seed)
    made["mask"] = torch.tensor([seed % 2 == 0])
    made._metadata = OrderedDict([("", {"version": 1}), ("a", {"version": 2})])  # type: ignore[attr-defined]
    return made


def saved(folder: Path, *states: Any) -> list[Path]:
    paths = []
    for number, each in enumerate(states):
        paths.append(folder / f"{number}.pth")
        torch.save(each, paths[-1])
    return paths


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def averaged(
    paths: list[Path], out: Path, shares: list[float] | None = None
) -> dict[str, torch.Tensor]:
    convert(ckptkit.average(paths, shares), out)
    return loaded(out)


def mean(tensors: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    if tensors[0].is_complex():
        return torch.view_as_complex(mean([torch.view_as_real(each) for each in tensors], shares))
    total = sum(each.to(torch.float64) * share for each, share in zip(tensors, shares, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / sum(shares)).to(tensors[-1].dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mean_is_that_of_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    states = [state(seed, dtype) for seed in range(3)]
    found = averaged(saved(tmp_path, *states), tmp_path / "out.pth")
    assert list(found) == list(states[-1])
    assert found._metadata == states[-1]._metadata  # type: ignore[attr-defined]
    for name, tensor in found.items():
        row = [each[name] for each in states]
        is_float = tensor.is_floating_point() or tensor.is_complex()
        expected = mean(row, [1, 1, 1]) if is_float else row[-1]
        assert tensor.dtype == expected.dtype
        assert bits(tensor) == bits(expected), name


def test_as_torch_averages_models(tmp_path: Path) -> None:
    """torch.optim.swa_utils over three steps: means of parameters, buffers of the last."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    swa = torch.optim.swa_utils.AveragedModel(net)
    states = []
    for _ in range(3):
        net(torch.rand(8, 4, dtype=torch.float64))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.rand_like(parameter))
        swa.update_parameters(net)
        states.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
    found = averaged(saved(tmp_path, *states), tmp_path / "out.pth")
    expected = swa.module.state_dict()
    assert found["1.num_batches_tracked"] == expected["1.num_batches_tracked"] == 3
    for name, _ in net.named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-14, atol=0)


@settings(max_examples=25)
@given(
    st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=4).filter(
        lambda given: sum(given) > 0.01
    ),
    st.lists(st.floats(width=32), min_size=1, max_size=9),
)
def test_weights(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], numbers: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    states = [{"w": torch.tensor(numbers).roll(turn)} for turn in range(len(shares))]
    found = averaged(saved(folder, *states), folder / "out.pth", shares)["w"]
    expected = mean([each["w"] for each in states], shares)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_ties_views_and_types(tmp_path: Path) -> None:
    """Tensors that are tied in all stay tied; views, other dtypes and large tensors are read
    unchanged.
    """
    big = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)
    first = {"e": big, "d": big, "t": big.T[:7], "h": torch.ones(3, dtype=torch.bfloat16)}
    second = {"e": big + 1, "t": big.T[3:10], "h": torch.full((3,), 2.0, dtype=torch.float32)}
    second = {"e": second["e"], "d": second["e"], "t": second["t"], "h": second["h"]}
    found = averaged(saved(tmp_path, first, second), tmp_path / "out.pth")
    assert torch.equal(found["e"], big + 0.5)
    assert found["e"].data_ptr() == found["d"].data_ptr()
    assert torch.equal(found["t"], (first["t"] + second["t"]) / 2)
    assert found["h"].dtype == torch.float32 and found["h"].tolist() == [1.5] * 3


def test_only_weights_are_kept_and_it_is_said(tmp_path: Path, ok: Ok) -> None:
    paths = saved(tmp_path, *({"model": state(n), "epoch": n} for n in range(2)))
    said = ok("average", *paths, tmp_path / "out.safetensors")
    assert (
        "averaged 4 tensors of 2 checkpoints; took 'a.num_batches_tracked', 'mask' from the last"
        in said
    )
    assert "dropped 1 other entry" in said


@pytest.mark.parametrize("scale", [None, torch.zeros(2)])
def test_what_differs_is_refused(scale: torch.Tensor | None, tmp_path: Path) -> None:
    other = state(1) | {"scale": scale}
    paths = saved(tmp_path, {k: v for k, v in other.items() if v is not None}, state(2))
    said = "0.pth: differs in names or shapes from .*1.pth: 'scale'"
    with pytest.raises(UsageError, match=said):
        ckptkit.average(paths)


@pytest.mark.parametrize(
    "shares", [[1.0], [0.0, 0.0], [-1.0, 2.0], [float("inf"), 1.0], [float("nan"), 1.0]]
)
def test_weights_that_make_no_mean(shares: list[float], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="checkpoints need"):
        ckptkit.average(saved(tmp_path, state(1), state(2)), shares)


def test_merge(tmp_path: Path, ok: Ok) -> None:
    first = state(1)
    second = OrderedDict((f"b.{name}", tensor) for name, tensor in state(2).items())
    second._metadata = OrderedDict([("b", {"version": 3})])  # type: ignore[attr-defined]
    ok("join", *saved(tmp_path, {"model": first}, second), tmp_path / "out.pth")
    found = loaded(tmp_path / "out.pth")
    assert list(found) == [*first, *second]
    assert all(torch.equal(found[name], {**first, **second}[name]) for name in found)
    assert found._metadata == {"": {"version": 1}, "a": {"version": 2}, "b": {"version": 3}}


def test_merging_the_same_names(tmp_path: Path, run: Run) -> None:
    paths = saved(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, {"b": torch.ones(2)})
    with pytest.raises(CollisionError, match=r"1.pth and .*0.pth both have 1 name \('b'\)"):
        ckptkit.join(paths)
    done = run("join", "--last-wins", *paths, tmp_path / "out.pth")
    assert f"took 1 name ('b') from {paths[1]}, not from {paths[0]}" in done.stdout
    assert loaded(tmp_path / "out.pth")["b"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema", "ema", "params_ema", "shadow"])
def test_ema_by_its_name(name: str, tmp_path: Path, ok: Ok) -> None:
    (path,) = saved(tmp_path, {"state_dict": state(1), name: state(2), "epoch": 3})
    ok("ema", path, tmp_path / "out.pth")
    found = loaded(tmp_path / "out.pth")
    assert all(torch.equal(found[each], tensor) for each, tensor in state(2).items())


@pytest.mark.parametrize("parallel", [False, True])
def test_ema_of_torch_loads(parallel: bool, tmp_path: Path, ok: Ok) -> None:
    """AveragedModel counts, and has the model as its `module`; DataParallel has another."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    inner = torch.nn.DataParallel(net) if parallel else net
    model = torch.optim.swa_utils.AveragedModel(inner)
    (path,) = saved(tmp_path, {"state_dict": net.state_dict(), "ema": model.state_dict()})
    ok("ema", path, tmp_path / "out.pth")
    net.load_state_dict(loaded(tmp_path / "out.pth"))


def test_ema_keeps_a_wrapper_that_the_trained_weights_have(tmp_path: Path, ok: Ok) -> None:
    net = torch.nn.DataParallel(torch.nn.Linear(3, 2))
    for trained in (net.state_dict(), net.module.state_dict()):
        (path,) = saved(tmp_path, {"state_dict": trained, "model_ema": net.state_dict()})
        ok("ema", path, tmp_path / "out.pth", "--force")
        assert loaded(tmp_path / "out.pth").keys() == trained.keys()


ADAPTERS = {
    "peft": {"base_model.model.q.lora_A.weight": (2, 4), "base_model.model.q.lora_B.weight": (4, 2)},
    "kohya": {"lora_unet_q.lora_down.weight": (2, 4), "lora_unet_q.alpha": ()},
    "lycoris": {"lycoris_q.hada_w1_a": (2, 4)},
    "state_dict": {"q.lora_A.default.weight": (2, 4), "head.weight": (3, 3)},
}  # fmt: skip


@pytest.mark.parametrize("layout", ADAPTERS)
def test_adapters_are_refused(layout: str, tmp_path: Path, run: Run) -> None:
    adapter = {name: torch.ones(shape) for name, shape in ADAPTERS[layout].items()}
    base, path, held = saved(tmp_path, {"q.weight": torch.ones(4, 4)}, adapter, {"ema": adapter})
    for words in (["join", base, path], ["average", path, path], ["ema", held]):
        done = run(*words, tmp_path / "out.pth")
        assert done.code == 3 and not (tmp_path / "out.pth").exists()
        assert "is an adapter of a model, such as LoRA" in done.stderr
        assert "ckptkit help lora" in done.stderr


def test_what_else_peft_writes_is_refused_by_its_configuration(tmp_path: Path, run: Run) -> None:
    """A prompt has no factors."""
    torch.save({"prompt_embeddings": torch.ones(2, 4)}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")
    (base,) = saved(tmp_path, {"q.weight": torch.ones(4, 4)})
    done = run("join", base, tmp_path / "adapter_model.bin", tmp_path / "out.pth")
    assert done.code == 3 and "adapter_config.json is beside it" in done.stderr


def test_models_with_adapters_inside_are_models(tmp_path: Path, ok: Ok) -> None:
    weights = {"q.base_layer.weight": torch.ones(4, 4), "q.lora_A.speech.weight": torch.ones(2, 4)}
    paths = saved(tmp_path, weights, weights)
    ok("average", *paths, tmp_path / "out.pth")


def test_folders_are_combined_into_a_folder(tmp_path: Path, ok: Ok) -> None:
    """As `convert` does: with config.json."""
    from safetensors.torch import load_file, save_file

    for name, value in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"model_type": "bert"}')
    for name, *options, expected in (("average", 2), ("join", "--last-wins", 3)):
        ok(name, *options, tmp_path / "a", tmp_path / "b", out := tmp_path / name)
        assert (out / "config.json").read_text() == '{"model_type": "bert"}'
        assert load_file(out / "model.safetensors")["w"].unique().item() == expected


def test_ema_without_names(tmp_path: Path, ok: Ok) -> None:
    """diffusers keeps a list of the parameters, in their order."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    weights = OrderedDict((name, parameter) for name, parameter in net.named_parameters())
    weights.update(net.named_buffers())  # type: ignore[arg-type]
    shadow = [torch.full_like(parameter, n) for n, parameter in enumerate(net.parameters())]
    averages = {"decay": 0.99, "shadow_params": shadow}
    (path,) = saved(tmp_path, {"state_dict": weights, "ema": averages})
    assert json.loads(ok("ema", "--json", path, tmp_path / "out.pth"))["done"] == [
        "extracted 4 tensors from 'ema.shadow_params', named like the weights",
        "added 3 buffers from the trained weights",
    ]
    found = loaded(tmp_path / "out.pth")
    assert [found[name].unique().item() for name, _ in net.named_parameters()] == [0, 1, 2, 3]


def test_ema_that_is_not_there(tmp_path: Path, run: Run) -> None:
    (path,) = saved(tmp_path, {"state_dict": state(1)})
    done = run("ema", path, tmp_path / "out.pth")
    assert done.code == 2
    assert "has no averaged weights under any name that training loops use" in done.stderr
