"""inspect: the JSON schema against torch, the table, several files, hostile names."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit

Facts = Callable[..., Any]


@pytest.fixture
def facts(as_json: Callable[..., Any]) -> Facts:
    """``facts("run.pth")``: the JSON of one file."""

    def invoke(*words: object) -> Any:
        found = as_json("inspect", *words)
        assert found["schema"] == "ckptkit.inspect/1"
        (only,) = found["files"]
        return only

    return invoke


def test_what_torch_sees(facts: Facts, run_pth: Path) -> None:
    whole = torch.load(run_pth, weights_only=True)
    found = facts(run_pth, "--digest")
    assert (found["file"], found["format"]) == ("run.pth", "torch-zip")
    assert (found["size"], found["weights"]) == (run_pth.stat().st_size, "model")
    assert "collections.OrderedDict" in found["globals"]
    expected = {f"model.{name}": tensor for name, tensor in whole["model"].items()}
    for number, state in whole["optimizer"]["state"].items():
        expected[f"optimizer.state.{number}.momentum_buffer"] = state["momentum_buffer"]
    tensors = {each["path"]: each for each in found["tensors"]}
    assert set(tensors) == set(expected)
    for path, tensor in expected.items():
        each = tensors[path]
        assert each["shape"] == list(tensor.shape)
        assert f"torch.{each['dtype']}" == str(tensor.dtype)
        assert (each["stride"], each["offset"]) == (list(tensor.stride()), tensor.storage_offset())
        assert each["nbytes"] == tensor.nbytes
        assert each["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert each["device"] == "cpu"
    first, *_, last = found["tensors"]
    assert (first["name"], first["keys"]) == ("module.0.weight", ["model", "module.0.weight"])
    assert (last["name"], last["keys"][:3]) == (None, ["optimizer", "state", 5])
    values = {each["path"]: (each["type"], each["value"]) for each in found["values"]}
    wanted = {
        "epoch": ("int", 3), "name": ("str", "näme"), "loss": ("float", "NaN"),
        "optimizer.param_groups.0.lr": ("float", 0.1),
        "optimizer.param_groups.0.nesterov": ("bool", False),
        "optimizer.param_groups.0.params.1": ("int", 1),
    }  # fmt: skip
    assert values | wanted == values


def test_shared_storages(facts: Facts) -> None:
    base = torch.arange(12.0)
    torch.save({"a": base, "b": base[4:].view(2, 4).t(), "c": torch.zeros(2)}, "s.pth")
    a, b, c = facts("s.pth")["tensors"]
    assert a["storage"] == b["storage"] != c["storage"]
    assert (b["shape"], b["stride"], b["offset"]) == ([4, 2], [1, 4], 4)


def test_objects(facts: Facts) -> None:
    torch.save({"w": torch.zeros(2), "args": argparse.Namespace(lr=0.5)}, "o.pth")
    found = facts("o.pth")
    assert found["objects"] == [{"path": "args", "keys": ["args"], "global": "argparse.Namespace"}]
    inside = {"path": "args.lr", "keys": ["args", "lr"], "type": "float", "value": 0.5}
    assert inside in found["values"]


def test_ambiguous_weights_are_a_warning(facts: Facts) -> None:
    torch.save({"g": {"w": torch.zeros(1)}, "d": {"w": torch.zeros(2)}}, "two.pth")
    found = facts("two.pth")
    assert found["weights"] is None and "g, d" in found["warnings"][0]
    chosen = facts("--key", "d", "two.pth")
    assert chosen["weights"] == "d"
    assert [each["name"] for each in chosen["tensors"]] == [None, "w"]


def test_the_table(ckptkit: Ckptkit) -> None:
    layers = {f"layers.{i}.weight": torch.zeros(2, 3) for i in range(12)}
    torch.save({**layers, "head.weight": torch.zeros(5, dtype=torch.int64)}, "t.pth")
    text = ckptkit("inspect t.pth", code=0).stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "layers.{0..11}.weight float32 [2, 3] 12 288 B cpu" in rows
    assert "head.weight int64 [5] 40 B cpu" in rows
    assert "13 tensors, 77 parameters" in text
    assert {*layers} <= {*ckptkit("inspect --flat t.pth").stdout.split()}


def test_keys_and_sort(ckptkit: Ckptkit, facts: Facts, run_pth: Path) -> None:
    sizes = {"b.weight": 2, "a.weight": 9, "a.bias": 1}
    torch.save({name: torch.zeros(size) for name, size in sizes.items()}, "t.pth")
    for words, names in (
        ("--keys *.weight", ["b.weight", "a.weight"]),
        ("--keys a.* --sort name", ["a.bias", "a.weight"]),
        ("--sort size", ["a.weight", "b.weight", "a.bias"]),
        ("--sort file", ["b.weight", "a.weight", "a.bias"]),
    ):
        assert [each["name"] for each in facts("t.pth", *words.split())["tensors"]] == names
        assert ckptkit(f"inspect --names t.pth {words}").stdout.split() == names
    text = ckptkit("inspect --keys x* --keys y run.pth").stdout
    assert "no tensor name or path matches --keys x*, y" in text
    assert "matches" not in ckptkit("inspect --keys *0.weight --keys y run.pth").stdout


def test_totals_of_what_is_selected(ckptkit: Ckptkit, facts: Facts) -> None:
    weight = torch.ones(3, 4)
    torch.save({"a.weight": weight, "tied.weight": weight, "b": torch.ones(2)}, "a.pth")
    text = ckptkit("inspect --keys *.weight a.pth").stdout
    assert "selected: 2 tensors, 12 parameters, 48 B" in text
    assert "selected" not in ckptkit("inspect a.pth").stdout
    found = facts("--keys", "*.weight", "a.pth")
    assert found["selected"] == {"tensor_count": 2, "parameters": 12, "nbytes": 48}
    assert found["totals"]["tensor_count"] == 3
    assert facts("a.pth")["selected"] is None
    nothing = {"tensor_count": 0, "parameters": 0, "nbytes": 0}
    assert facts("--keys", "x", "a.pth")["selected"] == nothing


def test_advice(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert "ckptkit strip-module run.pth run-stripped.pth" in ckptkit("inspect run.pth").stdout


@pytest.mark.parametrize("options", ["", "--json"])
def test_of_several_files_the_readable_are_shown(
    ckptkit: Ckptkit, run_pth: Path, options: str
) -> None:
    Path("bad.pth").write_bytes(b"no checkpoint")
    result = ckptkit(f"inspect {options} bad.pth run.pth absent.pth", code=3)
    assert "bad.pth" in result.stderr and "absent.pth" in result.stderr
    assert "module.0.weight" in result.stdout
    alone = ckptkit(f"inspect {options} bad.pth", code=3)
    assert alone.stderr.startswith("error: bad.pth: ")
    if options:
        bad, shown, absent = json.loads(result.stdout)["files"]
        assert shown["file"] == "run.pth"
        assert (bad["file"], bad["error"]["code"]) == ("bad.pth", "format")
        assert absent["error"]["code"] == "missing-file"
        found = json.loads(alone.stdout)
        assert (found["schema"], found["error"]["code"]) == ("ckptkit.error/1", "format")
    else:
        assert alone.stdout == ""


@pytest.mark.parametrize("words", ["--digest", "--key nope", "--names --json"])
def test_what_makes_no_sense_is_usage(ckptkit: Ckptkit, run_pth: Path, words: str) -> None:
    assert not ckptkit(f"inspect run.pth {words}", code=2).stdout.startswith("run.pth")


HOSTILE = "a\x1b]0;x\x07\n[OK] safe\u202e\u0085\r\ud800"


def test_CL_03_json_of_odd_values(ckptkit: Ckptkit) -> None:
    odd = {"inf": -math.inf, "huge": 1 << 70, 7: {(1, "a"): 2}, "bytes": b"\xff", None: 1}
    torch.save({HOSTILE: torch.zeros(1), **odd}, "h.pth")
    text = ckptkit("inspect --json h.pth").stdout
    assert text.isascii()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (found,) = json.loads(text, parse_constant=refuse)["files"]
    assert found["tensors"][0]["keys"] == [HOSTILE]
    values = {tuple(each["keys"]): each["value"] for each in found["values"]}
    assert values == {
        ("inf",): "-Infinity", ("huge",): 1 << 70, (7, "(1, 'a')"): 2, ("bytes",): r"\xff", ("None",): 1,
    }  # fmt: skip


def test_a_long_value_is_cut_in_the_table_and_whole_in_json(ckptkit: Ckptkit, facts: Facts) -> None:
    torch.save({"w": torch.zeros(1), "log": "x" * 5_000}, "l.pth")
    assert "x" * 200 + "... (5,000 characters)" in ckptkit("inspect l.pth").stdout
    assert [each["value"] for each in facts("l.pth")["values"]] == ["x" * 5_000]


def test_values_near_the_root_come_first_and_lists_are_one_row(ckptkit: Ckptkit) -> None:
    groups = [{"betas": (0.9, 0.95), "params": list(range(n, n + 12))} for n in (0, 12)]
    torch.save({"w": torch.zeros(1), "optimizer": {"groups": groups}, "epoch": 3}, "v.pth")
    lines = ckptkit("inspect v.pth").stdout.splitlines()
    assert lines[lines.index("values") + 1 :] == [
        "  epoch: 3",
        "  optimizer.groups.{0..1}.betas.{0..1}: 0.9, 0.95",
        "  optimizer.groups.0.params.{0..11}: 0, 1, 2, 3, 4, 5, 6, 7, ... (12)",
        "  optimizer.groups.1.params.{0..11}: 12, 13, 14, 15, 16, 17, 18, 19, ... (12)",
    ]


def test_a_file_that_is_one_value(ckptkit: Ckptkit) -> None:
    for value, shown in ((5, "(root): 5"), ([1, 2], "{0..1}: 1, 2"), (torch.zeros(2), "(root)")):
        torch.save(value, "one.pth")
        assert shown in ckptkit("inspect one.pth").stdout


def test_of_a_pickled_module_the_weights_are_shown(ckptkit: Ckptkit) -> None:
    torch.save({"net": torch.nn.Sequential(torch.nn.Linear(2, 2)), "epoch": 1}, "m.pth")
    text = ckptkit("inspect m.pth").stdout
    assert "0.weight" in text and "  net: torch.nn.modules.container.Sequential\n" in text
    assert "training" not in text
    assert "training: True" in ckptkit("inspect --tree m.pth").stdout


def test_corpus_names_are_those_of_torch(facts: Facts, corpus: Any) -> None:
    path = corpus / "pytorch_resnet_cifar10__resnet20.th"
    found = facts(path)
    state_dict = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    assert [each["name"] for each in found["tensors"]] == list(state_dict)
    assert {each["device"] for each in found["tensors"]} == {"cuda:0"}
