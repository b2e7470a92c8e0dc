"""`load_into` against `load_state_dict`: modules that rename, compute, tie, narrow, and meta models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ckptkit
from ckptkit.core.errors import ModelError
from tests.torch_equality import same

Make = Callable[[], nn.Module]


class Renaming(nn.Module):
    """Takes the names of an older version, in `_load_from_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "new"] = state.pop(prefix + "old")
        super()._load_from_state_dict(state, prefix, *rest)


class Computing(nn.Module):
    """Joins three matrices of the file to one, in a pre-hook of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 6, bias=False)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def join(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        parts = [f"{prefix}{name}.weight" for name in "qkv"]
        if all(part in state for part in parts):
            state[f"{prefix}inner.weight"] = torch.cat([state.pop(part) for part in parts])


class Looking(nn.Module):
    """Its hook looks at values, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_load_state_dict_pre_hook(self.scale)

    @staticmethod
    def scale(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state and state[prefix + "scale"].item() > 0:
            state[prefix + "w"] = state[prefix + "codes"].float() * state.pop(prefix + "scale")
            del state[prefix + "codes"]


class Reshaping(nn.Module):
    """Takes a flat weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "w" in state:
            state[prefix + "w"] = state[prefix + "w"].reshape(2, 3)
        super()._load_from_state_dict(state, prefix, *rest)


class Adding(nn.Module):
    """Makes up what older files lack, and drops what newer ones have too much."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_pre_hook(self.add)

    @staticmethod
    def add(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state.setdefault(prefix + "steps", torch.tensor(7))
        state.pop(prefix + "debris", None)


class Overriding(nn.Module):
    """Overrides `load_state_dict` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.replace("trunk.", "body."): value for name, value in state.items()}
        return super().load_state_dict(state, strict, assign)


class Stateful(nn.Module):
    """Has an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))


def new_weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 2)))


def parametrized() -> nn.Module:
    model = nn.Linear(2, 2)
    parametrize.register_parametrization(model, "weight", Double())
    return model


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def without_counter(version: int) -> Any:
    """Return the state of a batch norm without its counter: before version 2, there was none."""
    state: Any = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = version
    return state


# Model, and what is loaded: the state_dict of another model of that kind, or a dict.
KINDS: dict[str, Make] = {
    "plain": lambda: nn.Linear(3, 2),
    "new weight norm": new_weight_norm,
    "spectral norm": spectral,
    "parametrized": parametrized,
    "batch norm": lambda: nn.BatchNorm1d(2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": lambda: nn.LSTM(2, 3),
    "tied": Tied,
}
CASES: dict[str, tuple[Make, Callable[[], Any]]] = {
    **{name: (make, lambda make=make: make().state_dict()) for name, make in KINDS.items()},  # type: ignore[misc]
    "renaming": (Renaming, lambda: {"old": random((3,))}),
    "renaming, inside": (
        lambda: nn.Sequential(Renaming(), nn.Linear(2, 2)),
        lambda: {"0.old": random((3,)), "1.weight": random((2, 2)), "1.bias": random((2,))},
    ),
    "computing": (Computing, lambda: {f"{name}.weight": random((2, 2)) for name in "qkv"}),
    "computing, inside": (
        lambda: nn.Sequential(Computing()),
        lambda: {f"0.{name}.weight": random((2, 2)) for name in "qkv"},
    ),
    "looking": (Looking, lambda: {"codes": random((3,)).int(), "scale": torch.tensor(0.5)}),
    "reshaping": (Reshaping, lambda: {"w": random((6,))}),
    "adding": (Adding, lambda: {"w": random((2,)), "debris": random((1,))}),
    "overriding": (Overriding, lambda: {"trunk.weight": random((2, 2)), "trunk.bias": random((2,))}),
    "old weight norm": (new_weight_norm, lambda: old_weight_norm().state_dict()),
    "old batch norm": (lambda: nn.BatchNorm1d(2), lambda: dict(without_counter(2))),
    "batch norm of version 1": (lambda: nn.BatchNorm1d(2), lambda: without_counter(1)),
    "batch norm without its counter": (lambda: nn.BatchNorm1d(2), lambda: without_counter(2)),
    "extra state": (Stateful, lambda: {"_extra_state": {"extra": (1, {2})}}),
    "renaming, and too much": (
        lambda: nn.Sequential(Renaming(), nn.Linear(2, 2)),
        lambda: {"0.old": random((3,)), "0.other": random((2,)), "1.weight": random((2, 2))},
    ),
    "lazy": (lambda: nn.LazyLinear(2), lambda: nn.Linear(3, 2).state_dict()),
    "scalar": (lambda: nn.ParameterDict({"s": nn.Parameter(torch.zeros(()))}), lambda: {"s": torch.ones(1)}),
    "list": (lambda: nn.ParameterList([torch.zeros(2)]), lambda: {"0": random((2,))}),
    "half": (lambda: nn.Linear(2, 2).half(), lambda: nn.Linear(2, 2).state_dict()),
    "missing": (lambda: nn.Linear(2, 2), lambda: {"weight": random((2, 2))}),
    "unexpected": (
        lambda: nn.Linear(2, 2, bias=False), lambda: {"weight": random((2, 2)), "x": random((1,))}
    ),
    "quantized": (lambda: nn.Embedding(3, 2), lambda: {"weight": random((3, 2)).to(torch.float8_e5m2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", ["file", "dict"])
def test_model_and_report_are_as_torch_leaves_them(
    name: str, strict: bool, form: str, tmp_path: Path
) -> None:
    make, state = CASES[name]
    torch.manual_seed(1)
    given = state()
    torch.manual_seed(2)
    ours = make()
    theirs, before = deepcopy(ours), deepcopy(ours).state_dict()
    source: Any = deepcopy(given)
    if form == "file":
        source = tmp_path / "a.pth"
        torch.save(given, source)
    try:
        expected = theirs.load_state_dict(deepcopy(given), strict=strict)
    except RuntimeError:
        with pytest.raises(ModelError):
            ckptkit.load_into(ours, source, strict=strict)
        same(ours.state_dict(), before)  # nothing is copied
        return
    report = ckptkit.load_into(ours, source, strict=strict)
    same(ours.state_dict(), theirs.state_dict())
    assert set(report.missing) == set(expected.missing_keys)
    assert set(report.unexpected) == set(expected.unexpected_keys)
    assert not report.mismatched


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Tied, lambda: nn.BatchNorm1d(2)])
def test_meta_models_by_assign(make: Make, tmp_path: Path) -> None:
    source = make()
    torch.save(source.state_dict(), tmp_path / "a.pth")
    with torch.device("meta"):
        ours, theirs = make(), make()
    with pytest.raises(ModelError) as caught:
        ckptkit.load_into(ours, tmp_path / "a.pth")
    assert "assign=True" in str(caught.value.hint) and "to_empty" in str(caught.value.hint)
    assert ckptkit.load_into(ours, tmp_path / "a.pth", assign=True).complete
    theirs.load_state_dict(torch.load(tmp_path / "a.pth"), assign=True)
    same(ours.state_dict(), theirs.state_dict())
    assert all(isinstance(each, nn.Parameter) for each in ours.parameters())


def test_assign_keeps_ties_and_dtypes(tmp_path: Path) -> None:
    torch.save({"embedding.weight": torch.ones(3, 2).half()}, tmp_path / "a.pth")
    with torch.device("meta"):
        model = Tied()
    assert ckptkit.load_into(model, tmp_path / "a.pth", assign=True).complete
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == torch.float16


NARROWED: dict[str, tuple[torch.Tensor, torch.dtype, str | None]] = {
    "imaginary": (torch.tensor([1 + 2j]), torch.float32, "complex64 to float32: imaginary parts"),
    "fractions": (torch.tensor([1.5]), torch.int64, "float32 to int64: fractions"),
    "overflow": (torch.tensor([1.0, 7e4, -7e4]), torch.float16, "float32 to float16: 2 values too large"),
    "infinite before": (torch.tensor([float("inf"), 1.0]), torch.float16, None),
    "fits": (torch.tensor([1.0, 6e4]), torch.float16, None),
    "bfloat16": (torch.tensor([1e38], dtype=torch.bfloat16), torch.float16, "bfloat16 to float16: 1 value too large"),
    "double": (torch.tensor([1e300], dtype=torch.float64), torch.float32, "float64 to float32: 1 value too large"),
    "integers": (torch.tensor([300, 3]), torch.int8, "int64 to int8: 1 value too large"),
    "wider": (torch.tensor([3], dtype=torch.int8), torch.int64, None),
    "integer to float": (torch.tensor([3]), torch.float32, None),
}  # fmt: skip


@pytest.mark.parametrize("name", NARROWED)
def test_what_is_narrowed_is_said_and_refused(name: str) -> None:
    value, dtype, expected = NARROWED[name]
    model = nn.Module()
    model.register_buffer("w", torch.zeros(value.shape, dtype=dtype))
    if expected is not None:
        with pytest.raises(ModelError) as caught:
            ckptkit.load_into(model, {"w": value})
        assert f"w ({expected})" in str(caught.value)
        assert not model.w.any()
    with pytest.warns(UserWarning) if name == "imaginary" else pytest.MonkeyPatch.context():
        report = ckptkit.load_into(model, {"w": value}, strict=False)
    assert dict(report.narrowed) == ({} if expected is None else {"w": expected})
    assert (expected in str(report)) if expected else True


@pytest.mark.parametrize("model", [None, "net", nn.Linear])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
        ckptkit.load_into(model, {"w": torch.ones(1)})
