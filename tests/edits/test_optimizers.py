"""Optimizers follow the names of the weights, against what torch loads afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CollisionError, UsageError


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


def trained(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.Adam(model.named_parameters(), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def by_name(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Any]:
    """As FSDP and torch.distributed.checkpoint save it: names in place of numbers."""
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    names = [prefix + name for name in group.pop("param_names")]
    state = {names[number]: value for number, value in saved["state"].items()}
    return {"state": state, "param_groups": [{**group, "params": names}]}


def save(folder: Path, prefix: str = "module.", *, named: bool = True, **more: Any) -> Path:
    model, optimizer = trained()
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    state = by_name(optimizer, prefix) if named else optimizer.state_dict()
    torch.save({"model": weights, "optimizer": state, **more}, folder / "in.pth")
    return folder / "in.pth"


def written(checkpoint: ckptkit.Checkpoint, folder: Path) -> Any:
    ckptkit.save(checkpoint, folder / "out.pth", force=True)
    return torch.load(folder / "out.pth")


def names_of(state: Any) -> tuple[list[str], list[str]]:
    return list(state["state"]), state["param_groups"][0]["params"]


EDITS = {
    "strip": lambda path: ckptkit.strip_prefix(path),
    "rename": lambda path: ckptkit.rename(path, sub=[(r"^module\.", "")]),
    "map": lambda path: ckptkit.rename(
        path, {f"module.{n}.{w}": f"{n}.{w}" for n in (0, 1) for w in ("weight", "bias")}
    ),
    "rules": lambda path: ckptkit.apply_rules(path, "module.{n}.{w:weight|bias} -> {n}.{w}"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_state_by_name_follows(edit: str, tmp_path: Path) -> None:
    made = EDITS[edit](save(tmp_path))
    assert any("renamed 4 parameters in optimizer" in note for note in made.notes)
    assert not any("optimizer" in warning for warning in made.warnings)
    found = written(made, tmp_path)["optimizer"]
    model, optimizer = trained()
    expected = by_name(optimizer, "")
    assert names_of(found) == names_of(expected) == ([n for n, _ in model.named_parameters()],) * 2
    for name, state in expected["state"].items():
        assert all(torch.equal(found["state"][name][key], value) for key, value in state.items())


def test_a_prefix_is_added(tmp_path: Path) -> None:
    found = written(ckptkit.add_prefix(save(tmp_path, ""), "net."), tmp_path)["optimizer"]
    names = [f"net.{n}.{w}" for n in (0, 1) for w in ("weight", "bias")]
    assert names_of(found) == (names, names)


def test_names_beside_numbers_follow_and_torch_loads_them(tmp_path: Path) -> None:
    """Optimizers made of named parameters: torch 2.6 and later."""
    path = save(tmp_path, "", named=False)
    found = written(ckptkit.rename(path, sub=[("^", "net.")]), tmp_path)["optimizer"]
    assert found["param_groups"][0]["param_names"][0] == "net.0.weight"
    model, _ = trained()
    torch.optim.Adam([(f"net.{n}", p) for n, p in model.named_parameters()]).load_state_dict(found)


def test_numbers_alone_stay(tmp_path: Path) -> None:
    model = net()
    state = torch.optim.Adam(model.parameters()).state_dict()
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "in.pth")
    made = ckptkit.strip_prefix(tmp_path / "in.pth")
    assert not any("follow" in note for note in made.notes)
    assert written(made, tmp_path)["optimizer"] == state


def test_several_optimizers_are_left_where_nothing_tells_them_apart(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {"a": by_name(optimizer, "module."), "b": by_name(optimizer, "module.")}
    torch.save({"generator": weights, "discriminator": dict(weights), **saved}, tmp_path / "in.pth")
    made = ckptkit.strip_prefix(tmp_path / "in.pth", key="generator")
    found = written(made, tmp_path)
    assert all(names_of(found[each])[0][0] == "module.0.weight" for each in "ab")
    (warning,) = (each for each in made.warnings if "also occurs" in each)
    assert "a.state" in warning and "b.state" in warning
    both = ckptkit.strip_prefix(tmp_path / "in.pth", key=["generator", "discriminator"])
    found = written(both, tmp_path)
    assert all(names_of(found[each])[0][0] == "0.weight" for each in "ab")


def test_an_average_beside_the_weights_is_no_obstacle(tmp_path: Path) -> None:
    model, _ = trained()
    ema = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    made = ckptkit.strip_prefix(save(tmp_path, ema=ema), key="model")
    assert names_of(written(made, tmp_path)["optimizer"])[0][0] == "0.weight"


def test_two_states_of_one_name(tmp_path: Path) -> None:
    state = {"module.a": {}, "a": {}}
    weights = {"module.a": torch.ones(1)}
    saved = {"model": weights, "optimizer": {"state": state, "param_groups": [{"params": []}]}}
    torch.save(saved, tmp_path / "in.pth")
    with pytest.raises(CollisionError, match=r"two parameters of optimizer\.state"):
        ckptkit.strip_prefix(tmp_path / "in.pth")


def test_rules_that_move_elements_refuse_state_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="optimizer state fits only the old order"):
        ckptkit.apply_rules(
            save(tmp_path), "module.{n}.{w:weight} [o i] -> {n}.{w} [i o]", keep="rest"
        )


class Headed(torch.nn.Module):
    """A head in the middle, which the loss can do without, and buffers."""

    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        if head:
            self.head = torch.nn.Linear(3, 2)
        self.z = torch.nn.Linear(3, 3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that depend on nothing but the parameter."""
    for name, each in model.named_parameters():
        each.grad = torch.sin(each.detach() + len(name))
    optimizer.step()


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def split(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The head and the rest in groups of their own."""
    params = list(model.named_parameters())
    heads = [each for each in params if each[0].startswith("head")]
    rest = [each for each in params if each not in heads]
    groups = [{"params": heads, "lr": 0.5}] if heads else []
    return torch.optim.AdamW([*groups, {"params": rest}], lr=0.1)


@pytest.mark.parametrize("made", [plain, split])
def test_a_selection_takes_the_optimizer_along(made: Any, tmp_path: Path) -> None:
    """Training goes on with the same step for each weight that is left."""
    model = Headed()
    optimizer = made(model)
    step(model, optimizer)
    other = {"generator": torch.nn.Linear(9, 9).state_dict(), "epoch": 1}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **other}
    torch.save(state, tmp_path / "in.pth")
    found = ckptkit.select(tmp_path / "in.pth", drop="head*")
    assert any("kept 6 of 8 parameters of optimizer" in note for note in found.notes)
    saved = written(found, tmp_path)
    smaller = Headed(head=False)
    smaller.load_state_dict(saved["model"])
    resumed = made(smaller)
    resumed.load_state_dict(saved["optimizer"])
    step(model, optimizer)
    step(smaller, resumed)
    known = dict(model.named_parameters())
    assert all(torch.equal(each, known[name]) for name, each in smaller.named_parameters())


def test_an_optimizer_that_cannot_follow_is_dropped(tmp_path: Path) -> None:
    """Where groups, several optimizers or ties leave a doubt; each is named."""
    model = Headed()
    first, *rest = model.parameters()
    groups = torch.optim.SGD([{"params": rest}, {"params": [first]}], momentum=0.9)
    alone = plain(model)
    for each in (groups, alone):
        step(model, each)
    tied = {**model.state_dict(), "tied": model.a.weight.detach()}
    both = [alone.state_dict(), plain(Headed()).state_dict()]
    for weights, optimizers, globs, why in (
        (model.state_dict(), groups.state_dict(), "head*", "several groups"),
        (model.state_dict(), both, "head*", "several optimizers"),
        (tied, alone.state_dict(), "a.weight", "is tied"),
        (
            model.state_dict(),
            alone.state_dict(),
            ["*weight", "*bias"],
            "no parameter of the optimizer",
        ),
    ):
        torch.save({"model": weights, "optim": optimizers, "epoch": 1}, tmp_path / "in.pth")
        found = ckptkit.select(tmp_path / "in.pth", drop=globs)
        assert any("dropped optim, because" in line and why in line for line in found.warnings), why
        assert written(found, tmp_path).keys() == {"model", "epoch"}
    torch.save([model.state_dict(), groups.state_dict()], tmp_path / "in.pth")
    with pytest.raises(UsageError, match="not a dict entry"):
        ckptkit.select(tmp_path / "in.pth", drop="head*")


def test_an_optimizer_of_other_weights_stays(tmp_path: Path) -> None:
    model, critic = Headed(), torch.nn.Linear(7, 7)
    optimizer = plain(critic)
    step(critic, optimizer)
    step(model, own := plain(model))
    state = {"net": model.state_dict(), "critic": critic.state_dict()}
    torch.save({**state, "a": optimizer.state_dict(), "b": own.state_dict()}, tmp_path / "in.pth")
    found = written(ckptkit.select(tmp_path / "in.pth", drop="head*"), tmp_path)
    assert found["a"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert found["b"]["param_groups"][0]["params"] == list(range(6))
    buffers = ckptkit.select(tmp_path / "in.pth", drop="*num_batches*")
    assert written(buffers, tmp_path)["b"]["param_groups"] == own.state_dict()["param_groups"]
