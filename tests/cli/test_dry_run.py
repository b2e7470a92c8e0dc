"""--dry-run: the exit code and the errors of the real run, of each command; nothing is written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Ckptkit

# Each command that writes, with SRC and DST to be filled in.
COMMANDS = {
    "strip-module": ["SRC", "DST"],
    "strip-module --prefix no.": ["--prefix", "no.", "SRC", "DST"],
    "add-module": ["SRC", "DST"],
    "remap": ["SRC", "DST", "--to", "cpu"],
    "convert": ["SRC", "DST"],
    "convert --keep": ["SRC", "DST", "--keep", "no"],
    "convert --format": ["SRC", "DST", "--format", "safetensors"],
    "convert --shard-size": ["SRC", "DST", "--shard-size", "1kB"],
    "rename": ["SRC", "DST", "--sub", "a=b"],
    "extract": ["SRC", "DST", "--key", "model"],
    "wrap": ["SRC", "DST", "--key", "model"],
    "run": ["lightning", "SRC", "DST"],
    "ema": ["SRC", "DST"],
    "recover": ["SRC", "DST"],
    "average": ["SRC", "SRC", "DST"],
    "join --last-wins": ["SRC", "SRC", "DST"],
    "batch strip-module": ["--into", "DST", "SRC"],
    "batch convert": ["--into", "DST", "--format", "safetensors", "SRC"],
}
# DST, and options, for what may be wrong with it.
CONDITIONS = {
    "new": "new.pth",
    "exists": "old.pth",
    "exists, --force": "old.pth --force",
    "is SRC": "run.pth",
    "is SRC, --force": "run.pth --force",
    "unknown suffix": "new.txt",
    "no suffix": "new",
    "safetensors": "new.safetensors",
    "a folder": "folder",
    "a new folder": "nowhere/",
    "an empty folder": "empty",
    "in no folder": "nowhere/new.pth",
    "in a file": "old.pth/new.pth",
    "read-only": "locked/new.pth",
    "too long": "x" * 300 + ".pth",
    "standard output": "-",
    "--verify": "new.pth --verify",
    "--in-place": "--in-place",
    "a web server": "http://localhost:9/new.pth",
    "in memory": "memory://dry/new.pth",
    "in memory, exists": "memory://dry/new.pth",
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A folder, the working directory, with a checkpoint and what DST may be."""
    weights = {"module.a": torch.ones(2), "module.b": torch.zeros(300)}
    torch.save({"model": weights, "state_dict": weights, "ema": weights}, "run.pth")
    save_file(weights, "weights.safetensors")
    Path("old.pth").write_bytes(b"old")
    for name in ("folder", "empty", "locked"):
        Path(name).mkdir()
    Path("folder/file").touch()
    if os.name == "posix" and os.geteuid() == 0:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "locked"], capture_output=True
        )
        yield tmp_path
        if mounted.returncode == 0:
            subprocess.run(["umount", Path("locked")], check=True)
    else:
        Path("locked").chmod(0o555)
        yield tmp_path


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with size and time of change."""
    places = [folder, *folder.rglob("*")]
    return {str(each): (each.stat().st_size, each.stat().st_mtime_ns) for each in places}


# These commands are tried with every condition, and these conditions with every command.
OFTEN = {"strip-module", "run", "join --last-wins", "batch convert"}, {"new", "exists", "is SRC"}


@pytest.mark.parametrize(
    ("command", "condition"),
    [(a, b) for a in COMMANDS for b in CONDITIONS if a in OFTEN[0] or b in OFTEN[1]],
)
def test_as_the_real_run(
    ckptkit: Ckptkit, files: Path, command: str, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTKIT_HINTS", raising=False)  # hints repeat a DST that is wrong here
    destination, *options = CONDITIONS[condition].split()
    source = "weights.safetensors" if command.startswith("join") else "run.pth"
    places = {"SRC": source, "DST": destination}
    words = [*command.split()[: 2 if "batch" in command else 1], *options]
    words += [places.get(each, each) for each in COMMANDS[command]]
    if "memory" in destination:
        memory = pytest.importorskip("fsspec").filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        in_folder = "/run.pth" if "batch" in command else ""
        if "exists" in condition:
            memory.pipe(f"/dry/new.pth{in_folder}", b"old")
    before = state(files)
    planned = ckptkit(*words, "--dry-run")
    assert state(files) == before
    done = ckptkit(*words)
    said = planned.stderr.replace(" --dry-run", "").replace("would write -", "wrote -")
    assert (planned.exit_code, said) == (done.exit_code, done.stderr), words
    assert "would" in planned.output or "to write" in planned.output or done.exit_code


@pytest.mark.parametrize("words", ["convert run.pth new.pth", "strip-module --in-place run.pth"])
def test_no_room(
    ckptkit: Ckptkit, files: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr("ckptkit.publish.preflight.free", lambda path: 10)
    planned, done = ckptkit(*words.split(), "--dry-run"), ckptkit(*words.split())
    assert planned.exit_code == done.exit_code == 4
    assert "10 are free" in planned.stderr and planned.stderr == done.stderr
