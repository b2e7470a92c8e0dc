"""The hooks for pre-commit: their definition is one that it takes, and their commands do what they
say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ckptkit.formats.table import BY_SUFFIX
from tests.conftest import ROOT, Run
from tests.scanning.hostile_pickles import archive, call, pickle2, text

FILE = ROOT / ".pre-commit-hooks.yaml"
HOOKS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_pre_commit_takes_it() -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib", reason="pre-commit is not installed")
    assert [hook["id"] for hook in clientlib.load_manifest(FILE)] == [
        "ckptkit-scan",
        "ckptkit-verify",
    ]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_it_says_what_it_must(hook: dict[str, Any]) -> None:
    assert hook.keys() == {"id", "name", "description", "entry", "language", "files"}
    assert all(isinstance(each, str) for each in hook.values())
    assert hook["language"] == "python" and hook["entry"].startswith("ckptkit ")
    others = {
        "ckptkit-scan": set(),
        "ckptkit-verify": {".bin", ".npz"},
    }  # which many other files have
    for suffix in BY_SUFFIX.keys() - others[hook["id"]]:
        assert re.search(hook["files"], f"models/net{suffix}")
    for name in ("net.py", "pth", "notes.txt", "run.pth.md"):
        assert not re.search(hook["files"], name)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_its_entry_runs(hook: dict[str, Any], run: Run, tmp_path: Path) -> None:
    """Files are given behind the entry; the exit code says whether the commit may be made."""
    good, bad = tmp_path / "good.pth", tmp_path / "bad.pth"
    torch.save({"w": torch.ones(1000)}, good)
    if hook["id"] == "ckptkit-scan":
        bad.write_bytes(archive(pickle2(call("os.system", text("true")))))
    else:
        bad.write_bytes(good.read_bytes()[:3000])
    program, *words = shlex.split(hook["entry"])
    assert program == "ckptkit"
    assert run(*words, good) == (0, "", "")
    assert run(*words, good, bad).code not in (0, 5)
