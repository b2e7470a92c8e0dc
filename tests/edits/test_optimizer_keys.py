"""Optimizers keyed by names and by numbers, against torch's own functions for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict

import ckptkit
from ckptkit.core.errors import UsageError
from tests.conftest import Run

Made = tuple[torch.nn.Module, torch.optim.Optimizer]


class Net(torch.nn.Module):
    """Buffers between the parameters, one whose name says nothing, a tied weight, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(7))
        self.fc = torch.nn.Linear(4, 3)
        self.frozen = torch.nn.Linear(3, 2)
        self.frozen.weight.requires_grad_(False)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x))
        return self.frozen(self.fc(hidden)).sum() + self.head(hidden).sum()


def made(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, named: bool = False
) -> Made:
    torch.manual_seed(0)
    model = Net()
    made_ = optimizer(model.named_parameters() if named else model.parameters(), lr=0.1)
    for _ in range(2):
        made_.zero_grad()
        model(torch.arange(5)).backward()
        made_.step()
    return model, made_


def save(folder: Path, saved: Made, *, by_name: bool = False) -> Path:
    model, optimizer = saved
    state = get_optimizer_state_dict(model, optimizer) if by_name else optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optim": state}, folder / "in.pth")
    return folder / "in.pth"


def assert_state(found: Any, expected: Any) -> None:
    """The same keys, tensors and settings; what torch leaves out of states is no difference."""
    assert found["state"].keys() == {k for k, v in expected["state"].items() if v}
    for key, state in found["state"].items():
        assert state.keys() == expected["state"][key].keys()
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(expected["state"][key][w]))
            for w, v in state.items()
        )
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {**ours, "params": 0} == {**theirs, "params": 0}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_names_are_those_that_torch_gives(
    optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    saved = made(optimizer)
    checkpoint = ckptkit.key_optimizer(save(tmp_path, saved), "names")
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")["optim"]
    expected = get_optimizer_state_dict(*saved)
    assert_state(found, expected)
    names = [name for name, _ in saved[0].named_parameters()]
    assert found["param_groups"][0]["params"] == names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("named", [False, True])
def test_a_run_resumes_from_names(named: bool, tmp_path: Path) -> None:
    """As FSDP2 does: torch's set_state_dict takes what we write, through a DCP folder.

    An optimizer made of ``named_parameters()`` asks the folder for its ``param_names``.
    """
    import torch.distributed.checkpoint as dcp

    saved = made(named=named)
    checkpoint = ckptkit.key_optimizer(save(tmp_path, saved), "names")
    ckptkit.save(checkpoint, tmp_path / "dcp", format="dcp")
    torch.manual_seed(1)
    model = Net()
    fresh = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.5)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    expected = saved[1].state_dict()
    assert_state(fresh.state_dict(), expected)
    assert fresh.state_dict()["param_groups"][0]["params"] == expected["param_groups"][0]["params"]


def test_numbers_are_those_that_torch_loads(tmp_path: Path) -> None:
    saved = made()
    path = save(tmp_path, saved, by_name=True)
    ckptkit.save(ckptkit.key_optimizer(path, "numbers"), tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")["optim"]
    fresh = torch.optim.AdamW(Net().parameters(), lr=0.5)
    fresh.load_state_dict(found)
    assert_state(fresh.state_dict(), saved[1].state_dict())


def test_the_names_of_the_optimizer_itself(tmp_path: Path) -> None:
    """Several groups, in another order than the weights."""
    torch.manual_seed(0)
    model = Net()
    named = dict(model.named_parameters())
    decayed = [(name, p) for name, p in named.items() if p.ndim > 1]
    others = [(name, p) for name, p in named.items() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}])
    model(torch.arange(5)).backward()
    optimizer.step()
    path = save(tmp_path, (model, optimizer))
    ckptkit.save(ckptkit.key_optimizer(path, "names"), tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")["optim"]
    assert [each["params"] for each in found["param_groups"]] == [
        [name for name, _ in others], [name for name, _ in decayed]
    ]  # fmt: skip
    assert torch.equal(
        found["state"]["fc.bias"]["exp_avg"], optimizer.state[named["fc.bias"]]["exp_avg"]
    )


def two_groups() -> Made:
    model = Net()
    first, *rest = model.parameters()
    return model, torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


def alike() -> Made:
    """A buffer with the shape of its neighbor."""
    model = torch.nn.Module()
    model.register_parameter("a", torch.nn.Parameter(torch.ones(2)))
    model.register_buffer("b", torch.ones(2))
    optimizer = torch.optim.Adam(model.parameters())
    model.get_parameter("a").sum().backward()
    optimizer.step()
    return model, optimizer


def other() -> Made:
    return torch.nn.Linear(2, 2), made()[1]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (two_groups, "several groups"),
        (alike, "several matches fit"),
        (other, "there are fewer"),
        (lambda: (torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(9))), made()[1]),
         "the shapes do not fit"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_refused(
    saved: Callable[[], Made], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ckptkit.key_optimizer(save(tmp_path, saved()), "names")
    assert "named_parameters" in (caught.value.hint or "")


def test_none_and_several(tmp_path: Path) -> None:
    model, optimizer = made()
    torch.save({"model": model.state_dict()}, tmp_path / "none.pth")
    with pytest.raises(UsageError, match="no state_dict of an optimizer"):
        ckptkit.key_optimizer(tmp_path / "none.pth", "names")
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "a": state, "b": state}, tmp_path / "two.pth")
    with pytest.raises(UsageError, match="several optimizers: a, b"):
        ckptkit.key_optimizer(tmp_path / "two.pth", "names")


def test_the_command(run: Run, tmp_path: Path) -> None:
    path = save(tmp_path, made())
    done = run("convert", path, tmp_path / "a.pth", "--optimizer-keys", "names")
    assert done.code == 0 and "keyed 7 parameters of optim by names" in done.stdout
    again = run("convert", tmp_path / "a.pth", tmp_path / "b.pth", "--optimizer-keys", "names")
    assert "already keyed by names" in again.stderr
    wrong = run("convert", path, tmp_path / "c.pth", "--optimizer-keys", "nams")
    assert wrong.code == 2 and "names" in wrong.stderr
