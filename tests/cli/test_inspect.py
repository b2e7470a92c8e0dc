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

Json = Callable[..., Any]

TENSOR = {
    "name", "path", "keys", "shape", "dtype", "device", "stride", "offset", "storage", "nbytes", "requires_grad",
    "kind", "layout", "local_shapes", "quantization",
}  # fmt: skip


def file(found: Any) -> Any:
    assert found["schema"] == "ckptkit.inspect/1"
    (only,) = found["files"]
    return only


def test_the_schema(as_json: Json, run_pth: Path) -> None:
    found = file(as_json("inspect", run_pth))
    assert set(found) == {
        "file", "format", "size", "weights", "tensors", "values", "objects", "globals", "metadata", "warnings",
        "totals", "selected", "about", "adapter", "part",
    }  # fmt: skip
    assert (found["file"], found["format"], found["size"]) == (
        str(run_pth),
        "torch-zip",
        run_pth.stat().st_size,
    )
    assert found["weights"] == "model"
    assert all(set(each) == TENSOR for each in found["tensors"])
    assert set(found["totals"]) == {"tensor_count", "parameters", "nbytes", "storage_nbytes"}
    assert "collections.OrderedDict" in found["globals"]


def test_tensors_are_those_that_torch_sees(as_json: Json, run_pth: Path) -> None:
    whole = torch.load(run_pth, weights_only=True)
    found = {
        each["path"]: each for each in file(as_json("inspect", "--digest", run_pth))["tensors"]
    }
    expected = {f"model.{name}": tensor for name, tensor in whole["model"].items()}
    for number, state in whole["optimizer"]["state"].items():
        expected[f"optimizer.state.{number}.momentum_buffer"] = state["momentum_buffer"]
    assert set(found) == set(expected)
    for path, tensor in expected.items():
        each = found[path]
        assert each["shape"] == list(tensor.shape)
        assert f"torch.{each['dtype']}" == str(tensor.dtype)
        assert (each["stride"], each["offset"]) == (list(tensor.stride()), tensor.storage_offset())
        assert each["nbytes"] == tensor.nbytes
        assert each["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert each["device"] == "cpu"


def test_names_and_keys(as_json: Json, run_pth: Path) -> None:
    tensors = file(as_json("inspect", run_pth))["tensors"]
    assert tensors[0]["name"] == "module.0.weight"
    assert tensors[0]["keys"] == ["model", "module.0.weight"]
    assert tensors[-1]["name"] is None
    assert tensors[-1]["keys"][:3] == ["optimizer", "state", 5]


def test_values(as_json: Json, run_pth: Path) -> None:
    values = {
        each["path"]: (each["type"], each["value"])
        for each in file(as_json("inspect", run_pth))["values"]
    }
    assert values["epoch"] == ("int", 3)
    assert values["name"] == ("str", "näme")
    assert values["loss"] == ("float", "NaN")
    assert values["optimizer.param_groups.0.lr"] == ("float", 0.1)
    assert values["optimizer.param_groups.0.nesterov"] == ("bool", False)
    assert values["optimizer.param_groups.0.params.1"] == ("int", 1)


def test_shared_storages(as_json: Json, tmp_path: Path) -> None:
    base = torch.arange(12.0)
    torch.save({"a": base, "b": base[4:].view(2, 4).t(), "c": torch.zeros(2)}, tmp_path / "s.pth")
    a, b, c = file(as_json("inspect", tmp_path / "s.pth"))["tensors"]
    assert a["storage"] == b["storage"] != c["storage"]
    assert (b["shape"], b["stride"], b["offset"]) == ([4, 2], [1, 4], 4)


def test_objects(as_json: Json, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2), "args": argparse.Namespace(lr=0.5)}, tmp_path / "o.pth")
    found = file(as_json("inspect", tmp_path / "o.pth"))
    assert found["objects"] == [{"path": "args", "keys": ["args"], "global": "argparse.Namespace"}]
    assert {"path": "args.lr", "keys": ["args", "lr"], "type": "float", "value": 0.5} in found[
        "values"
    ]


def test_ambiguous_weights_are_a_warning(as_json: Json, tmp_path: Path) -> None:
    path = tmp_path / "two.pth"
    torch.save({"g": {"w": torch.zeros(1)}, "d": {"w": torch.zeros(2)}}, path)
    found = file(as_json("inspect", path))
    assert found["weights"] is None
    assert "g, d" in found["warnings"][0]
    chosen = file(as_json("inspect", "--key", "d", path))
    assert chosen["weights"] == "d"
    assert [each["name"] for each in chosen["tensors"]] == [None, "w"]


def test_a_key_that_is_not_there(ckptkit: Ckptkit, run_pth: Path) -> None:
    result = ckptkit("inspect", "--key", "nope", run_pth)
    assert result.exit_code == 2
    assert "nope" in result.stderr and result.stdout == ""


def test_the_table(ckptkit: Ckptkit, tmp_path: Path) -> None:
    layers = {f"layers.{i}.weight": torch.zeros(2, 3) for i in range(12)}
    torch.save({**layers, "head.weight": torch.zeros(5, dtype=torch.int64)}, tmp_path / "t.pth")
    result = ckptkit("inspect", tmp_path / "t.pth")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["layers.{0..11}.weight", "float32", "[2,", "3]", "12", "288", "B", "cpu"] in rows
    assert ["head.weight", "int64", "[5]", "40", "B", "cpu"] in rows
    assert "13 tensors, 77 parameters" in result.stdout


def test_flat(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({f"layers.{i}.weight": torch.zeros(2) for i in range(12)}, tmp_path / "t.pth")
    text = ckptkit("inspect", "--flat", tmp_path / "t.pth").stdout
    assert all(f"layers.{i}.weight" in text for i in range(12))


def test_keys_and_sort(as_json: Json, tmp_path: Path) -> None:
    path = tmp_path / "t.pth"
    torch.save(
        {"b.weight": torch.zeros(2), "a.weight": torch.zeros(9), "a.bias": torch.zeros(1)}, path
    )

    def names(*options: str) -> list[str]:
        return [each["name"] for each in file(as_json("inspect", *options, path))["tensors"]]

    assert names("--keys", "*.weight") == ["b.weight", "a.weight"]
    assert names("--keys", "a.*", "--sort", "name") == ["a.bias", "a.weight"]
    assert names("--sort", "size") == ["a.weight", "b.weight", "a.bias"]
    assert names("--sort", "file") == ["b.weight", "a.weight", "a.bias"]


def test_keys_that_nothing_has_are_named(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert (
        "no tensor name or path matches --keys x*, y"
        in ckptkit("inspect", "--keys", "x*", "--keys", "y", run_pth).stdout
    )
    assert "matches" not in ckptkit("inspect", "--keys", "*0.weight", "--keys", "y", run_pth).stdout


def test_the_tree(ckptkit: Ckptkit, run_pth: Path) -> None:
    lines = ckptkit("inspect", "--tree", run_pth).stdout.splitlines()
    assert lines[1].split() == ["model:", "OrderedDict", "of", "9", "36", "100.0%", "█" * 20]
    assert lines[2].startswith("    module. 9 tensors ")
    assert lines[4].split() == [
        "weight:",
        "float32",
        "[3,",
        "4]",
        "on",
        "cpu",
        "12",
        "33.3%",
        "██████▋",
    ]
    assert "  epoch: 3" in lines
    assert "  name: 'näme'" in lines


def test_advice(ckptkit: Ckptkit, run_pth: Path) -> None:
    text = ckptkit("inspect", run_pth).stdout
    assert f"ckptkit strip-module {run_pth} {run_pth.with_name('run-stripped.pth')}" in text


def test_several_files_in_one_object(as_json: Json, run_pth: Path, tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "b.pth")
    found = as_json("inspect", run_pth, tmp_path / "b.pth")
    assert [each["file"] for each in found["files"]] == [str(run_pth), str(tmp_path / "b.pth")]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_of_several_files_the_readable_are_shown(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "bad.pth").write_bytes(b"no checkpoint")
    result = ckptkit("inspect", *options, tmp_path / "bad.pth", run_pth, tmp_path / "absent.pth")
    assert result.exit_code == 3
    assert "bad.pth" in result.stderr and "absent.pth" in result.stderr
    assert "module.0.weight" in result.stdout
    if options:
        bad, shown, absent = json.loads(result.stdout)["files"]
        assert shown["file"] == str(run_pth)
        assert (bad["file"], bad["error"]["code"]) == (str(tmp_path / "bad.pth"), "format")
        assert absent["error"]["code"] == "missing-file"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_one_bad_file_prints_nothing_else(
    ckptkit: Ckptkit, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "bad.pth").write_bytes(b"no checkpoint")
    result = ckptkit("inspect", *options, tmp_path / "bad.pth")
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {tmp_path / 'bad.pth'}: ")
    if options:
        found = json.loads(result.stdout)
        assert (found["schema"], found["error"]["code"]) == ("ckptkit.error/1", "format")
    else:
        assert result.stdout == ""


def test_digest_needs_json(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert ckptkit("inspect", "--digest", run_pth).exit_code == 2


HOSTILE = "a\x1b]0;x\x07\n[OK] safe\u202e\u0085\r\ud800"


@pytest.mark.parametrize("options", [[], ["--flat"], ["--tree"], ["--sort", "name"]])
def test_CL_01_CL_02_hostile_names_are_shown_escaped(
    ckptkit: Ckptkit, tmp_path: Path, options: list[str]
) -> None:
    torch.save({HOSTILE: torch.zeros(1), "inner": {HOSTILE: HOSTILE}}, tmp_path / "h.pth")
    result = ckptkit("inspect", *options, tmp_path / "h.pth")
    assert result.exit_code == 0
    assert r"a\x1b]0;x\x07\n[OK] safe\u202e\x85\r\ud800" in result.stdout
    assert all(line.isprintable() for line in result.stdout.split("\n"))


def test_CL_01_hostile_names_in_errors(ckptkit: Ckptkit, tmp_path: Path) -> None:
    path = tmp_path / "bad\n\x1b[2J.pth"
    path.write_bytes(b"no checkpoint")
    result = ckptkit("inspect", path)
    assert r"bad\n\x1b[2J.pth" in result.stderr
    assert all(line.isprintable() for line in result.stderr.split("\n"))


def test_CL_03_json_of_odd_values(ckptkit: Ckptkit, tmp_path: Path) -> None:
    root = {
        HOSTILE: torch.zeros(1),
        "inf": -math.inf,
        "huge": 1 << 70,
        7: {(1, "a"): 2},
        "bytes": b"\xff",
        None: 1,
    }
    torch.save(root, tmp_path / "h.pth")
    result = ckptkit("inspect", "--json", tmp_path / "h.pth")
    assert result.stdout.isascii()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = file(json.loads(result.stdout, parse_constant=refuse))
    assert found["tensors"][0]["keys"] == [HOSTILE]
    values = {tuple(each["keys"]): each["value"] for each in found["values"]}
    assert values[("inf",)] == "-Infinity"
    assert values[("huge",)] == 1 << 70
    assert values[(7, "(1, 'a')")] == 2
    assert values[("bytes",)] == r"\xff"
    assert values[("None",)] == 1


def test_a_long_value_is_cut_in_the_table_and_whole_in_json(
    ckptkit: Ckptkit, as_json: Json, tmp_path: Path
) -> None:
    torch.save({"w": torch.zeros(1), "log": "x" * 5_000}, tmp_path / "l.pth")
    assert "x" * 200 + "... (5,000 characters)" in ckptkit("inspect", tmp_path / "l.pth").stdout
    (log,) = file(as_json("inspect", tmp_path / "l.pth"))["values"]
    assert log["value"] == "x" * 5_000


def test_values_near_the_root_come_first_and_lists_are_one_row(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    groups = [{"betas": (0.9, 0.95), "params": list(range(n, n + 12))} for n in (0, 12)]
    torch.save(
        {"w": torch.zeros(1), "optimizer": {"groups": groups}, "epoch": 3}, tmp_path / "v.pth"
    )
    lines = ckptkit("inspect", tmp_path / "v.pth").stdout.splitlines()
    assert lines[lines.index("values") + 1 :] == [
        "  epoch: 3",
        "  optimizer.groups.{0..1}.betas.{0..1}: 0.9, 0.95",
        "  optimizer.groups.0.params.{0..11}: 0, 1, 2, 3, 4, 5, 6, 7, ... (12)",
        "  optimizer.groups.1.params.{0..11}: 12, 13, 14, 15, 16, 17, 18, 19, ... (12)",
    ]


def test_a_file_that_is_one_value(ckptkit: Ckptkit, tmp_path: Path) -> None:
    for value, shown in ((5, "(root): 5"), ([1, 2], "{0..1}: 1, 2"), (torch.zeros(2), "(root)")):
        torch.save(value, tmp_path / "one.pth")
        assert shown in ckptkit("inspect", tmp_path / "one.pth").stdout


def test_of_a_pickled_module_the_weights_are_shown(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"net": torch.nn.Sequential(torch.nn.Linear(2, 2)), "epoch": 1}, tmp_path / "m.pth")
    text = ckptkit("inspect", tmp_path / "m.pth").stdout
    assert "0.weight" in text and "  net: torch.nn.modules.container.Sequential\n" in text
    assert "training" not in text
    assert "training: True" in ckptkit("inspect", "--tree", tmp_path / "m.pth").stdout


def test_corpus_names_are_those_of_torch(as_json: Json, corpus: Any) -> None:
    path = corpus / "pytorch_resnet_cifar10__resnet20.th"
    found = file(as_json("inspect", path))
    state_dict = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    assert [each["name"] for each in found["tensors"]] == list(state_dict)
    assert {each["device"] for each in found["tensors"]} == {"cuda:0"}
