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


@pytest.fixture(autouse=True)
def net(here: None) -> None:
    odd = {"odd\nname": torch.zeros(1)}
    torch.save({"b": torch.ones(2), "a": torch.arange(3), **odd}, "net.pth")


def test_a_list_like_that_of_sha256sum(ckptkit: Ckptkit) -> None:
    first, *lines = ckptkit("digest net.pth").stdout.splitlines()
    assert [line.partition("  ")[2] for line in lines] == ["a", "b", "odd\\nname"]
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
    for out in ("a.pth", "a.safetensors", "a.npz", "dcp", "sharded", "sharded-bin"):
        how = () if "." in out else ("--format", out)
        ckptkit("convert", FOLDER / name, out, *how, code=0)
        assert ckptkit("digest", out).stdout == listed


def test_a_manifest_and_its_check(ckptkit: Ckptkit) -> None:
    listed = ckptkit("digest net.pth").stdout
    ckptkit("digest net.pth --output net.manifest", code=0)
    assert Path("net.manifest").read_text() == listed and "net" not in listed
    ckptkit("digest net.pth --output net.manifest", code=2)
    ckptkit("digest net.pth --output net.manifest --force", code=0)
    check = "digest --check net.manifest net.pth"
    assert ckptkit(check, code=0).stdout == "net.pth: ok: 3 tensors match the manifest\n"
    assert ckptkit(f"{check} -q").stdout == ""
    torch.save({"b": torch.zeros(2), "a": torch.arange(3), "\x1b[1m": torch.ones(1)}, "net.pth")
    assert ckptkit(check, code=1).stdout.splitlines() == [
        "net.pth: 3 differences from the 3 tensors of the manifest",
        "  missing: the tensor is only in the manifest (odd\\nname)",
        "  not in the manifest (\\x1b[1m)",
        "  differs from the manifest (b)",
    ]
    ckptkit(f"{check} --keys a", code=0)
    assert json.loads(ckptkit(f"{check} --json").stdout) == {
        "schema": "ckptkit.digest/1", "file": "net.pth", "manifest": "net.manifest", "equal": False,
        "missing": ["odd\nname"], "unexpected": ["\x1b[1m"], "differing": ["b"],
    }  # fmt: skip


def test_several_files(ckptkit: Ckptkit) -> None:
    torch.save({"c": torch.ones(1)}, "other.pth")
    done = ckptkit("digest net.pth other.pth missing.pth", code=3)
    assert "missing.pth: does not exist" in done.stderr
    assert "did you mean" not in done.stderr  # --output takes one FILE
    heads = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert [head.split()[-1] for head in heads] == ["net.pth", "other.pth"]


def test_json(as_json: Callable[..., Any]) -> None:
    found = as_json("digest net.pth")
    assert found["schema"] == "ckptkit.digest/1"
    (file,) = found["files"]
    assert (file["file"], file["format"], file["without"]) == ("net.pth", "torch-zip", [])
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
    ("words", "code", "said"),
    [
        ("a b --output m", 2, ""),
        ("a b --check m", 2, ""),
        ("a --output m --json", 2, ""),
        ("--check net.pth net.pth", 3, "is not a manifest"),
    ],
)
def test_what_does_not_go_together(ckptkit: Ckptkit, words: str, code: int, said: str) -> None:
    assert said in ckptkit(f"digest {words}", code=code).stderr
