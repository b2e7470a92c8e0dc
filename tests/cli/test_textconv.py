"""`inspect --textconv`: what git shows of two versions of a checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit
from tests.conftest import ENVIRONMENT


def saved(path: Path, **changed: Any) -> Path:
    weights = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}
    torch.save({"model": weights, "epoch": 3, "note": "x" * 300, **changed}, path)
    return path


def test_a_line_for_each(ckptkit: Ckptkit, tmp_path: Path) -> None:
    lines = ckptkit("inspect", "--textconv", saved(tmp_path / "run.pth")).stdout.splitlines()
    assert lines[:2] == ["format: torch-zip", "weights: model"]
    # (printf of the six floats) | sha256sum
    import hashlib
    import struct

    digest = hashlib.sha256(struct.pack("<6f", *range(6))).hexdigest()
    assert lines[2] == f"model.a.weight: float32 [2, 3] cpu sha256 {digest[:16]}"
    assert lines[4] == "epoch: 3"
    assert lines[5].startswith("note: 'xxx") and "(302 characters, sha256 " in lines[5]


def test_equal_wherever_the_file_is(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = ckptkit("inspect", "--textconv", saved(tmp_path / "run.pth"))
    second = ckptkit("inspect", "--textconv", saved(tmp_path / "other/net.bin"))
    assert first.stdout == second.stdout and str(tmp_path) not in first.stdout


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 2000,
        b"PK\x03\x04 cut",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
    ],
)
def test_what_cannot_be_read_is_text_too(ckptkit: Ckptkit, tmp_path: Path, content: bytes) -> None:
    """git gives up where the program fails."""
    path = tmp_path / "run.pth"
    path.write_bytes(content)
    done = ckptkit("inspect", "--textconv", path)
    assert done.exit_code == 0
    assert done.stdout.startswith("unreadable: ") and str(tmp_path) not in done.stdout
    if content.startswith(b"version"):
        assert "oid sha256:ab\n" in done.stdout


def test_hostile_names_stay_on_their_line(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"a\nb\x1b[2J": torch.ones(1)}, tmp_path / "run.pth")
    assert (
        ckptkit("inspect", "--textconv", tmp_path / "run.pth")
        .stdout.splitlines()[2]
        .startswith(r"a\nb\x1b[2J: ")
    )


def test_one_file(ckptkit: Ckptkit, tmp_path: Path) -> None:
    assert ckptkit("inspect", "--textconv", "a", "b").exit_code == 2


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_diff(tmp_path: Path) -> None:
    """In a repository with .gitattributes and the one line of configuration."""
    settings = (
        "user.name=a",
        "user.email=a@b",
        f"diff.ckptkit.textconv='{sys.executable}' -m ckptkit inspect --textconv",
    )

    def git(*words: str) -> str:
        configured = [each for setting in settings for each in ("-c", setting)]
        env = {
            **ENVIRONMENT,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_PAGER": "cat",
        }
        command = ["git", *configured, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", check=True
        ).stdout

    git("init", "-q")
    (tmp_path / ".gitattributes").write_text("*.pth diff=ckptkit\n")
    saved(tmp_path / "run.pth")
    git("add", ".")
    git("commit", "-qm", "first")
    saved(tmp_path / "run.pth", epoch=4)
    changed = [
        line
        for line in git("diff").splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changed == ["-epoch: 3", "+epoch: 4"]
    (tmp_path / "run.pth").write_bytes(b"cut")
    assert "+unreadable: " in git("diff")
    (tmp_path / "run.pth").unlink()
    assert "-format: torch-zip" in git("diff")
