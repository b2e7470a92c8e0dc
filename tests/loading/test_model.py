"""Weights into models: `load_state_dict` of torch is the oracle."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.analysis.matching import prefixes
from ckptkit.core.errors import AmbiguousError, ModelError, UsageError
from ckptkit.loading import model as loading
from tests.loading.test_like_torch import Renaming


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.head = nn.Linear(2, classes)


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape, generator=generator) * 10)
    return model


def saved(value: Any, folder: Path) -> Path:
    torch.save(value, folder / "a.pth")
    return folder / "a.pth"


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


class Compiled(nn.Module):
    """torch.compile(model), as far as names go."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


class Lit(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


WRAPS: list[Any] = [
    lambda m: m,
    nn.DataParallel,
    Compiled,
    Lit,
    lambda m: nn.DataParallel(Compiled(m)),
    lambda m: Lit(Lit(m)),
]


@pytest.mark.parametrize("inside", range(len(WRAPS)))
@pytest.mark.parametrize("outside", range(len(WRAPS)))
def test_wrapped_or_not_on_either_side(tmp_path: Path, inside: int, outside: int) -> None:
    source, target = WRAPS[inside](filled(Net())), WRAPS[outside](Net())
    report = ckptkit.load_into(
        target, saved({"state_dict": source.state_dict(), "epoch": 3}, tmp_path)
    )
    assert report.complete
    assert report.loaded == tuple(target.state_dict())
    assert equal(source, target)
    assert (inside == outside) == (not report.stripped and not report.added)


def test_report_reads_well(tmp_path: Path) -> None:
    path = saved(nn.DataParallel(Net()).state_dict(), tmp_path)
    report = ckptkit.load_into(Net(), path)
    assert str(report) == "loaded 9 entries; stripped 'module.'"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loaded = ()  # type: ignore[misc]


def test_what_does_not_fit_is_said_and_only_what_fits_is_loaded(tmp_path: Path) -> None:
    """If the load is strict, nothing is copied."""
    source = filled(Net()).state_dict()
    del source["head.bias"]
    path = saved({"n": torch.ones(()), **{f"module.{k}": v for k, v in source.items()}}, tmp_path)
    model = filled(Net(classes=4), 1)
    with pytest.raises(ModelError) as caught:
        ckptkit.load_into(model, path)
    faults = [
        "missing in the file: head.bias",
        "not in the model: n",
        "different shapes: head.weight (3, 2) instead of (4, 2)",
    ]
    assert str(caught.value) == "; ".join([f"{path}: does not fit Net", *faults])
    hint = f"`ckptkit diff {path} --model {__name__}:Net` lists the differences"
    assert caught.value.hint == hint
    assert equal(model, filled(Net(classes=4), 1))
    report = ckptkit.load_into(model, path, strict=False)
    assert [*report.faults()] == faults and str(report).splitlines()[1:] == faults
    assert (report.missing, report.unexpected) == (("head.bias",), ("n",))
    assert report.mismatched == {"head.weight": ((3, 2), (4, 2))}
    assert "head.weight" not in report.loaded
    assert torch.equal(model.body[0].weight, source["body.0.weight"])
    assert torch.equal(model.head.weight, filled(Net(classes=4), 1).head.weight)


def test_dtype_and_storage_of_the_model_stay(tmp_path: Path) -> None:
    model = Net().half()
    places = [value.data_ptr() for value in model.state_dict().values()]
    ckptkit.load_into(model, saved(filled(Net()).state_dict(), tmp_path))
    assert [value.data_ptr() for value in model.state_dict().values()] == places
    assert equal(model, filled(Net()).half())


def test_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of a module with its own loading come together, whatever their size."""
    groups: list[list[str]] = []

    def watched(model: nn.Module, part: Any, strict: bool = True, assign: bool = False) -> Any:
        groups.append(list(part))
        return load_state_dict(model, part, strict, assign)

    load_state_dict = nn.Module.load_state_dict
    monkeypatch.setattr(nn.Module, "load_state_dict", watched)
    monkeypatch.setattr(loading, "GROUP", 1)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    ckptkit.load_into(model, saved(filled(deepcopy(model)).state_dict(), tmp_path))
    assert [{name.rpartition(".")[0] for name in group} for group in groups] == [{"0"}, {"2"}]
    assert equal(model, filled(deepcopy(model)))


def test_of_tied_weights_one_name_is_enough(tmp_path: Path) -> None:
    """As transformers leaves them; equal bytes elsewhere are no tie, and neither is a part of the
    same memory."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("part", self.embedding.weight.detach()[:1])
            self.register_buffer("twin", self.embedding.weight.detach().clone())

    path, model = tmp_path / "run.pth", Tied()
    torch.save({"embedding.weight": torch.ones(3, 2)}, path)
    with pytest.raises(ckptkit.CkptkitError, match=r"(?m)missing in the file: part, twin$"):
        ckptkit.load_into(model, path)
    torch.save(
        {"embedding.weight": torch.ones(3, 2), "part": torch.ones(1, 2), "twin": torch.ones(3, 2)},
        path,
    )
    assert ckptkit.load_into(model, path).complete
    assert torch.equal(model.head.weight, torch.ones(3, 2))


def test_a_pickled_module_a_checkpoint_and_a_key_as_source(tmp_path: Path) -> None:
    model = Net()
    assert ckptkit.load_into(model, saved(nn.DataParallel(filled(Net())), tmp_path)).complete
    assert equal(model, filled(Net()))
    path = saved({"a": filled(Net()).state_dict(), "b": filled(Net(), 1).state_dict()}, tmp_path)
    with pytest.raises(AmbiguousError):
        ckptkit.load_into(model, path)
    ckptkit.load_into(model, path, key="b")
    assert equal(model, filled(Net(), 1))
    ckptkit.load_into(model, ckptkit.extract(ckptkit.open(path), "a"))
    assert equal(model, filled(Net()))


# prefixes


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ("a.w b.w", "a.w b.w", ("", "")),
        ("module.a.w module.b.w", "a.w b.w", ("module.", "")),
        ("a.w b.w", "module.a.w module.b.w", ("", "module.")),
        ("module.a.w module.b.w", "_orig_mod.a.w _orig_mod.b.w", ("module.", "_orig_mod.")),
        ("module.module.w", "module.w", ("module.", "")),
        ("net.a.w net.b.w critic.a.w", "a.w b.w", ("net.", "")),
        ("n_averaged module.a.w", "a.w", ("module.", "")),
        ("a.w b.w", "c.w d.w", ("", "")),  # as good one way as another
        ("w", "a.w b.w", ("", "")),
        ("x y", "a b", ("", "")),
        ("", "a", ("", "")),
        ("a", "", ("", "")),
        # what both sides have is never changed
        ("a.x.w a.y.w n.w", "b.x.w b.y.w n.w", ("", "")),
        ("x.w y.w n.w", "b.x.w b.y.w n.w", ("", "")),
        ("a.x.w a.y.w a.n.w", "b.x.w b.y.w b.n.w", ("a.", "b.")),
        ("a.x.w x.w", "x.w", ("", "")),
    ],
)
def test_prefixes(ours: str, theirs: str, wanted: tuple[str, str]) -> None:
    sides = (dict.fromkeys(side.split(), (1,)) for side in (ours, theirs))
    assert prefixes(*sides) == wanted


def test_prefixes_by_shape() -> None:
    """Two parts with equal names: the one whose shapes fit is meant."""
    ours = {"g.0.w": (2, 3), "g.1.w": (4, 2), "d.0.w": (9, 9), "d.1.w": (1, 9)}
    assert prefixes(ours, {"0.w": (9, 9), "1.w": (1, 9)}) == ("d.", "")


# diff


def test_diff_with_a_model(tmp_path: Path) -> None:
    """Which has no values to compare."""
    path = saved(nn.DataParallel(Net()).state_dict(), tmp_path)
    found = ckptkit.diff(path, Net())
    assert not found.equal
    assert "body.0.weight" in found.missing
    stripped = ckptkit.strip_prefix(ckptkit.open(path))
    for model in (Net(), f"{__name__}:Net"):
        found = ckptkit.diff(stripped, model)
        assert found.equal and not found.values_compared and "names and shapes" in found.summary
    with pytest.raises(ModelError):
        ckptkit.diff(path, f"{__name__}:Nothing")
    with pytest.raises(UsageError, match="values of a model are not compared"):
        ckptkit.diff(path, Net(), atol=0.1)


def test_diff_with_another_file(tmp_path: Path) -> None:
    path = saved(filled(Net()).state_dict(), tmp_path)
    other = tmp_path / "module.py:b"  # a file, although it looks like a class
    torch.save(filled(Net(), 1).state_dict(), other)
    assert ckptkit.diff(path, other, values=False).equal
    assert ckptkit.diff(path, str(other), values=False).equal
    assert not ckptkit.diff(path, other).equal
    assert ckptkit.diff(path, other, keys=["nothing*"]).common == 0
    assert ckptkit.diff(path, other, atol=100).equal
    assert ckptkit.diff(path, ckptkit.open(path), values=True).equal


# One pairing


class Named(nn.Module):
    """Keys of which most, not all, share a beginning: another one if `renamed`."""

    def __init__(self, renamed: bool = False) -> None:
        super().__init__()
        layers, embed = nn.ModuleList(nn.Linear(4, 4) for _ in range(8)), nn.Embedding(7, 4)
        if renamed:
            self.tok, self.encoder = embed, nn.ModuleDict({"blocks": layers})
        else:
            self.embed, self.layers = embed, layers
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)


def test_no_name_is_both_missing_and_too_much(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        ckptkit.load_into(Named(), saved(Named(renamed=True).state_dict(), tmp_path))
    assert "norm." not in str(caught.value) and "head." not in str(caught.value)
    report = ckptkit.load_into(
        Named(), saved(Named(renamed=True).state_dict(), tmp_path), strict=False
    )
    assert {"norm.weight", "norm.bias", "head.weight", "head.bias"} == {*report.loaded}
    assert (report.stripped, report.added) == ("", "")


def normed(new: bool, which: str) -> nn.Module:
    torch.manual_seed(new)
    old: Any = getattr(torch.nn.utils, which)
    made: Any = getattr(torch.nn.utils.parametrizations, which) if new else old
    return nn.Sequential(nn.Linear(3, 3), made(nn.Linear(3, 2)))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("which", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("saved_new", [False, True])
@pytest.mark.parametrize("loaded_new", [False, True])
def test_norms_of_either_kind(
    tmp_path: Path, which: str, saved_new: bool, loaded_new: bool
) -> None:
    """torch.nn.utils and its parametrizations have two names for one thing."""
    source, target = normed(saved_new, which), normed(loaded_new, which)
    path = saved(nn.DataParallel(source).state_dict(), tmp_path)
    assert ckptkit.load_into(target, path).complete
    rows = torch.randn(4, 3)
    assert torch.equal(source.eval()(rows), target.eval()(rows))
    found = ckptkit.diff(path, normed(loaded_new, which))
    assert {pair.old for pair in found.renamed} == {*found.unexpected}
    assert all(pair.confidence >= 0.9 for pair in found.renamed)


def test_a_model_that_cannot_be_copied() -> None:
    """Then our own count stands."""

    class Single(Renaming):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is but one")

    with pytest.raises(ModelError, match="missing in the file: new; not in the model: old"):
        ckptkit.load_into(Single(), {"old": torch.ones(3)})
