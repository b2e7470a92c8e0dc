"""Run the same commands on the same files, to compare two interpreters or two source trees.

``python -m tests.net FOLDER > one.json`` copies each file and each folder of FOLDER into an empty
directory, runs the commands below on it, and prints the exit code, the output and the SHA-256 of
each file written. Run it again with another interpreter, or from another checkout; equal behavior
is equal text. With a number after FOLDER, it takes so many of each kind: folder and suffix. torch
is hidden: whether it is installed, and which devices it has, changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckptkit.cli import main

COMMANDS = [
    "inspect --json --digest SRC",
    "inspect --tree SRC",
    "scan --json SRC",
    "doctor SRC",
    "verify SRC",
    "stats --json SRC",
    "strip-module SRC out.pth",
    "remap SRC out.pth --to cpu",
    "convert SRC out.safetensors",
    "convert SRC out.safetensors --all",
    "convert SRC out.npz --cast float32",
    "convert SRC out.pth --format torch-legacy --cast *.weight=bfloat16",
    "convert SRC out --format dcp",
    "recover SRC out.pth --force",
]


def results(source: Path) -> dict[str, Any]:
    """Return what each command does with `source`: its exit code, its output, its files."""
    return {command: _result(command, source) for command in COMMANDS}


def _result(command: str, source: Path) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        if source.is_dir():
            shutil.copytree(source, source.name)
        else:
            shutil.copy(source, source.name)
        before = _files()
        words = [source.name if word == "SRC" else word for word in command.split()]
        done = CliRunner().invoke(main, words)
        after = _files()
        made = {name: after[name] for name in sorted(after) if after[name] != before.get(name)}
        failure = repr(done.exception) if done.exit_code not in range(5) else None
        return [done.exit_code, done.stdout, done.stderr, failure, made]


def _files() -> dict[str, str]:
    """Return the SHA-256 of each file below the current directory."""
    names = (os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names)
    return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names}


def sources(folder: Path, few: int | None = None) -> list[Path]:
    """Return the files and folders in the subfolders of `folder`, of each kind the first `few`."""
    kinds: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.glob("[!_]*/[!_]*")):
        kinds.setdefault((path.parent.name, path.suffix), []).append(path)
    return sorted(
        path for (_, suffix), kind in kinds.items() if suffix != ".py" for path in kind[:few]
    )


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    chosen = sources(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    found = {str(path): results(path.absolute()) for path in chosen}
    json.dump(found, sys.stdout, indent=1)
