"""GGUF files of the reference libraries, hostile ones too: CKPTKIT_VECTORS names their folder."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.conftest import Run, in_process

run = in_process

FOLDER = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "gguf"
CASES = {path.parent.name: json.loads(path.read_text()) for path in FOLDER.glob("*/case.json")}
KINDS = ("convert", "convert_without", "inspect", "digest", "stats", "scan", "run_ok", "error")
CHECKS = [
    pytest.param(name, check, id=f"{name}-{number}-{check['do']}")
    for name, case in sorted(CASES.items())
    for number, check in enumerate(case["checks"])
    if check["do"] in KINDS
]
SHORT = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16}

pytestmark = pytest.mark.skipif(
    not CHECKS, reason="CKPTKIT_VECTORS names no folder with vectors of GGUF"
)


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor of a file of safetensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (row["dtype"], row["shape"], data[start + begin : start + end])
        for name, row in header.items()
        for begin, end in [row["data_offsets"]]
    }


def same(ours: bytes, expected: bytes, dtype: str) -> bool:
    """Whether numbers are those of float32, rounded once; a NaN equals any other."""
    kind = np.dtype(NUMPY[dtype])
    with np.errstate(all="ignore"):
        wanted, found = np.frombuffer(expected, "<f4").astype(kind), np.frombuffer(ours, kind)
        odd = np.isnan(wanted.astype("f4")) & np.isnan(found.astype("f4"))
    bits = f"u{kind.itemsize}"
    return bool(((wanted.view(bits) == found.view(bits)) | odd).all())


def convert(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    dtype = check["dequantize"]
    words = ["--dequantize", dtype] if dtype else []
    done = run("convert", check["source"], out, *words, cwd=folder)
    assert done.code == 0, done.stderr
    found, expected = tensors(out), tensors(folder / check["expect"])
    assert found.keys() == expected.keys()
    for name, (kind, shape, data) in expected.items():
        if name in check["quantized"]:
            assert found[name][:2] == (SHORT[dtype], shape), name
            assert same(found[name][2], data, dtype), name
        else:
            assert found[name] == (kind, shape, data), name


def inspect(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    (file,) = json.loads(run("inspect", "--json", check["source"], cwd=folder).stdout)["files"]
    rows = [
        {
            "name": row["name"],
            "type": (row["quantization"] or {}).get("label") or SHORT[row["dtype"]],
            "shape": row["shape"],
            "nbytes": row["nbytes"],
        }
        for row in file["tensors"]
    ]
    if "tensors" in check:
        by_name = {row["name"]: row for row in check["tensors"]}
        assert {row["name"]: row for row in rows} == by_name
    if "names" in check:
        assert [row["name"] for row in rows] == check["names"]
    values = {each["path"]: each for each in file["values"]}
    for path, value in check.get("metadata", {}).items():
        assert values[path]["value"] == value
        assert values[path]["keys"] == [path]
    for path, count in check.get("arrays", {}).items():
        assert (values[path]["type"], values[path]["count"]) == ("array", count)
        assert len(json.dumps(values[path])) <= 4096


def digest(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    dtype = check.get("dequantize")
    words = ["--dequantize", dtype] if dtype else []
    done = run("digest", "--json", check["source"], *words, cwd=folder)
    (file,) = json.loads(done.stdout)["files"]
    found = {row["name"]: row["digest"] for row in file["tensors"]}
    for name, expected in check["of" if dtype else "stored"].items():
        assert found[name] == expected, name


def stats(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    rows = json.loads(run("stats", "--json", check["source"], cwd=folder).stdout)["tensors"]
    (row,) = (row for row in rows if row["name"] == check["tensor"])
    for fact in ("min", "max", "mean", "norm"):
        assert math.isclose(row[fact], check[fact], rel_tol=1e-6, abs_tol=1e-9), fact


def scan(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    done = run("scan", "--json", check["source"], cwd=folder)
    (file,) = json.loads(done.stdout)["files"]
    assert (done.code in check["exit"], file["verdict"]) == (True, check["verdict"])
    assert all(word in done.stdout for word in check["all"])


def run_ok(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    done = run(*check["command"], cwd=folder)
    assert done.code in check["exit"]
    assert all(word in done.stdout + done.stderr for word in check.get("all", ()))


def error(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    stem = str(out.with_suffix(""))
    command = check.get("command") or ["convert", check["source"], "{out}.safetensors"]
    done = run(*(word.replace("{out}", stem) for word in command), cwd=folder)
    assert done.code in check["exit"]
    assert done.stderr.startswith("error: ")
    message = done.stderr.lower()
    assert any(word.lower() in message for word in check["any"]), message
    assert not out.exists()


def convert_without(run: Run, folder: Path, out: Path, check: dict[str, Any]) -> None:
    copy = out.parent / "copy"
    shutil.copytree(folder, copy)
    (copy / check["remove"]).unlink()
    error(run, copy, out, check)


DO = {"convert": convert, "convert_without": convert_without, "inspect": inspect, "error": error,
      "digest": digest, "stats": stats, "scan": scan, "run_ok": run_ok}  # fmt: skip


@pytest.mark.parametrize("name, check", CHECKS)
def test_vectors(run: Run, tmp_path: Path, name: str, check: dict[str, Any]) -> None:
    DO[check["do"]](run, FOLDER / name, tmp_path / "out.safetensors", check)
