"""Files that the newest torch of the corpus wrote, against what that torch said of them.

The tests run under the torch that constraints.txt pins; a change of format in a later one is seen
here. Needs CKPTKIT_CORPUS.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.conftest import Corpus, Run

VERSION = re.compile(r"torch(\d+)\.(\d+)\.(\d+)")


def newest(folder: Path) -> str:
    """``torch2.15.0``: what the names of the newest files begin with."""
    found = filter(None, (VERSION.match(path.name) for path in folder.iterdir()))
    return max(found, key=lambda match: tuple(map(int, match.groups())))[0]


def digests(run: Run, path: Path) -> dict[str, dict[str, Any]]:
    """Return the line of ``inspect`` for each tensor, by path."""
    done = run("inspect", "--json", "--digest", path)
    assert done.code == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    return {tensor["path"]: tensor for tensor in file["tensors"]}


def test_a_distributed_checkpoint(corpus: Corpus, run: Run) -> None:
    """Its TensorProperties have a sixth field since torch 2.15."""
    folder = corpus / "dcp"
    said = json.loads((folder / f"{newest(folder)}.json").read_text())
    found = digests(run, folder / newest(folder))
    assert found.keys() == said.keys()
    for name, facts in said.items():
        assert {key: found[name][key] for key in facts} == facts, name


def test_strides_are_those_of_the_tensors_that_were_saved(corpus: Corpus) -> None:
    """Of channels_last and transposed tensors; an expanded one is stored row by row."""
    weights = ckptkit.load(corpus / "dcp" / newest(corpus / "dcp"), key="model")
    strides = {name: tensor.stride() for name, tensor in weights.items()}
    assert strides["conv.weight"] == (75, 1, 15, 3)
    assert strides["fc.weight"] == (1, 6)
    assert strides["emb"] == (5, 1)


@pytest.mark.parametrize("way", ["default", "legacy"])
@pytest.mark.parametrize("device", ["cpu", "cuda1"])
@pytest.mark.parametrize("kind", ["bare", "full"])
def test_a_file(corpus: Corpus, run: Run, way: str, device: str, kind: str) -> None:
    folder = corpus / "versions"
    name = f"{newest(folder)}-{way}-{device}-{kind}.pth"
    said = json.loads((folder / f"{newest(folder)}-{device}.json").read_text())[name]
    found = digests(run, folder / name)
    assert found.keys() == said.keys()
    for path, facts in said.items():
        assert found[path]["dtype"] == facts.pop("dtype").removeprefix("torch.")
        assert {key: found[path][key] for key in facts} == facts, path
