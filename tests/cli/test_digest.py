"""ckptkit digest"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit
from tests.matrix import FOLDER, of_net


@pytest.fixture
def net() -> Path:
    torch.save(
        {"b": torch.ones(2), "a": torch.arange(3), "odd\nname": torch.zeros(1)},
        "net.pth",
    )
    return Path("net.pth")


def test_a_list_like_that_of_sha256sum(ckptkit: Ckptkit, net: Path) -> None:
    first, *lines = ckptkit("digest", net).stdout.splitlines()
    assert [
        line[-len(name) :] for line, name in zip(lines, ("  a", "  b", "  odd\\nname"), strict=True)
    ]
    assert lines[2].startswith("\\")
    assert lines[1].split()[0] == hashlib.sha256(b"float32 2\n" + b"\0\0\x80?" * 2).hexdigest()
    whole = hashlib.sha256("".join(f"{line}\n" for line in sorted(lines)).encode()).hexdigest()
    assert first == f"# ckptkit.digest/1 tensors=3 sha256={whole}"


@pytest.mark.parametrize(
    "name", [name for name in of_net() if "safetensors" in name or "sharded" in name]
)
def test_converted_it_is_the_same(name: str, ckptkit: Ckptkit) -> None:
    """The fixtures, into every format that can be written."""
    listed = ckptkit("digest", FOLDER / name).stdout
    for out in ("a.pth", "a.safetensors", "a.npz"):
        assert ckptkit("convert", FOLDER / name, out).exit_code == 0
        assert ckptkit("digest", out).stdout == listed
    for format in ("dcp", "sharded", "sharded-bin"):
        assert ckptkit("convert", FOLDER / name, format, "--format", format).exit_code == 0
        assert ckptkit("digest", format).stdout == listed


def test_a_manifest_and_its_check(ckptkit: Ckptkit, net: Path, tmp_path: Path) -> None:
    out = Path("net.manifest")
    listed = ckptkit("digest", net).stdout
    assert ckptkit("digest", net, "--output", out).exit_code == 0
    assert out.read_text() == listed
    assert str(tmp_path) not in listed
    assert ckptkit("digest", net, "--output", out).exit_code == 2
    assert ckptkit("digest", net, "--output", out, "--force").exit_code == 0
    same = ckptkit("digest --check", out, net)
    assert (same.exit_code, same.stdout) == (0, f"{net}: ok: 3 tensors match the manifest\n")
    assert ckptkit("digest --check", out, "-q", net).stdout == ""
    torch.save({"b": torch.zeros(2), "a": torch.arange(3), "\x1b[1m": torch.ones(1)}, net)
    found = ckptkit("digest --check", out, net, code=1)
    assert found.stdout.splitlines() == [
        f"{net}: 3 differences from the 3 tensors of the manifest",
        "  missing: the tensor is only in the manifest (odd\\nname)",
        "  not in the manifest (\\x1b[1m)",
        "  differs from the manifest (b)",
    ]
    assert ckptkit("digest --check", out, "--keys", "a", net).exit_code == 0
    found = json.loads(ckptkit("digest --check", out, "--json", net).stdout)
    assert found == {
        "schema": "ckptkit.digest/1", "file": str(net), "manifest": str(out), "equal": False, "missing": ["odd\nname"], "unexpected": ["\x1b[1m"],
        "differing": ["b"],
    }  # fmt: skip


def test_several_files(ckptkit: Ckptkit, net: Path) -> None:
    torch.save({"c": torch.ones(1)}, "other.pth")
    done = ckptkit("digest", net, "other.pth", "missing.pth", code=3)
    assert "missing.pth: does not exist" in done.stderr
    assert "did you mean" not in done.stderr  # --output takes one FILE
    heads = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert [head.split()[-1] for head in heads] == ["net.pth", "other.pth"]


def test_json(as_json: Callable[..., Any], net: Path) -> None:
    found = as_json("digest", net)
    assert found["schema"] == "ckptkit.digest/1"
    (file,) = found["files"]
    assert (file["file"], file["format"], file["without"]) == (str(net), "torch-zip", [])
    assert [(each["name"], each["dtype"], each["shape"]) for each in file["tensors"]] == [
        ("b", "float32", [2]), ("a", "int64", [3]), ("odd\nname", "float32", [1]),
    ]  # fmt: skip
    assert {len(each["digest"]) for each in file["tensors"]} == {len(file["digest"])} == {64}


def test_what_is_left_out_is_said(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(2), "ghost": torch.ones(2, device="meta")}, "a.pth")
    done = ckptkit("digest a.pth", code=0)
    assert "no digest of ghost" in done.stderr
    assert "no tensor name matches" in ckptkit("digest --keys nothing a.pth").stderr


@pytest.mark.parametrize(
    "words",
    [("a", "b", "--output", "m"), ("a", "b", "--check", "m"), ("a", "--output", "m", "--json")],
)
def test_what_does_not_go_together(ckptkit: Ckptkit, words: tuple[str, ...]) -> None:
    assert ckptkit("digest", *words).exit_code == 2


def test_a_manifest_that_is_none(ckptkit: Ckptkit, net: Path) -> None:
    done = ckptkit("digest --check", net, net, code=3)
    assert "is not a manifest" in done.stderr
