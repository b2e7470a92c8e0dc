"""The functions of the library that return what commands print with ``--json``."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from tests.conftest import Run
from tests.readme import sandbox

FILES = ("torch-zip/dp_wrapped_cuda1.pth", "safetensors/net.safetensors", "torch-zip/namespace_and_numpy.pth")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sandbox(tmp_path_factory.mktemp("reports"))


@pytest.fixture
def printed(folder: Path, run: Run) -> Callable[[str], Any]:
    return lambda command: json.loads(run(*command.split(), cwd=folder).stdout)


def same(ours: Any, theirs: Any) -> bool:
    return bool(json.loads(json.dumps(ours)) == theirs)


@pytest.mark.parametrize("name", FILES)
def test_they_are_what_is_printed(
    name: str,
    folder: Path,
    printed: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    path = f"fixtures/{name}"
    shown = printed(f"inspect --json {path}")["files"][0]
    assert same(ckptkit.inspect(path), shown)
    assert same(ckptkit.inspect(path, digest=True)["tensors"],
                printed(f"inspect --json --digest {path}")["files"][0]["tensors"])  # fmt: skip
    assert same(ckptkit.verify(path), printed(f"verify --json {path}")["files"][0])
    assert same(ckptkit.scan(path), printed(f"scan --json {path}")["files"])
    causes = printed(f"doctor --json {path}")
    del causes["schema"]
    assert same(ckptkit.doctor(path), causes)
    assert same(ckptkit.digest(path), printed(f"digest --json {path}")["files"][0])
    stats = printed(f"stats --json {path}")
    del stats["schema"]
    assert same(ckptkit.stats(path), stats)


def test_names_are_not_those_of_modules() -> None:
    """Importing a room must not hide a function of its name."""
    rooms = {each.name for each in pkgutil.iter_modules(ckptkit.__path__)}
    assert rooms & {*ckptkit.__all__} == set()


def test_diff_is_what_is_printed(
    folder: Path, printed: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    paths = [f"fixtures/{name}" for name in FILES[:2]]
    shown = printed(f"diff --json --values {' '.join(paths)}")
    names = ("schema", "a", "b", "model")
    expected = {name: value for name, value in shown.items() if name not in names}
    assert same(ckptkit.diff(*paths, values=True).as_json(), expected)


def test_arguments(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2), "b": torch.zeros(3)}}, tmp_path / "a.pth")
    ck = ckptkit.open(tmp_path / "a.pth")
    assert [each["name"] for each in ckptkit.inspect(ck, keys="a")["tensors"]] == ["a"]
    assert [each["name"] for each in ckptkit.stats(ck, keys=["b"])["tensors"]] == ["b"]
    assert [each["name"] for each in ckptkit.digest(ck, keys="b")["tensors"]] == ["b"]
    assert ckptkit.verify(ck)["ok"] and ckptkit.scan(ck)[0]["verdict"]
    found = ckptkit.doctor(ck, model=nn.Linear(2, 2))
    assert found["causes"]
    assert ckptkit.inspect({"w": torch.ones(2)})["totals"]["parameters"] == 2
    for function in (ckptkit.verify, ckptkit.scan, ckptkit.doctor):
        with pytest.raises(TypeError, match="source: expected a path"):
            function({"w": torch.ones(2)})


def test_commands_that_need_the_model_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is an object has no name for a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef make():\n    net = nn.Sequential(nn.Linear(2, 2, bias=False),"
        " nn.Linear(2, 2, bias=False))\n    net[1].weight = net[0].weight\n    return net\n"
    )
    torch.save({"0.weight": torch.ones(2, 2)}, "a.pth")
    namespace: dict[str, Any] = {}
    exec((tmp_path / "nets.py").read_text(), namespace)
    (by_name,) = ckptkit.doctor("a.pth", model="nets.py:make")["causes"]
    (by_object,) = ckptkit.doctor("a.pth", model=namespace["make"]())["causes"]
    assert by_name["code"] == by_object["code"] == "tied"
    assert "--model nets.py:make" in by_name["command"] and by_object["command"] is None


def test_advice_names_the_entry_that_was_asked_for(tmp_path: Path) -> None:
    state = {"module.a": torch.ones(2)}
    torch.save({"gen": state, "disc": {"a": torch.ones(2)}}, tmp_path / "a.pth")
    found = ckptkit.diff(tmp_path / "a.pth", {"gen": {"a": torch.ones(2)}}, key="gen")
    assert "strip-module --key gen" in found.advice[0]


def test_a_difference_is_true() -> None:
    a, b = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    assert not ckptkit.diff(a, b, values=False) and ckptkit.diff(a, b)
