"""doctor over all fixtures: what --fix writes loads in torch, and doctor finds nothing more to mend
in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckptkit.core.errors import CkptkitError
from ckptkit.diagnosis.diagnose import apply_fixes, examine
from ckptkit.loading import building
from tests.conftest import Corpus
from tests.matrix import NAMES, Fixture

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mended_loads(name: str, tmp_path: Path) -> None:
    fixture = Fixture(name).needs_reader()
    found = examine(fixture.path)
    assert found.readable
    if found.fix is None or fixture.facts["weights"] is None:
        return
    out = tmp_path / "mended.pth"
    apply_fixes(found, out)
    again = examine(out)
    assert [cause.code for cause in again.causes if cause.fix is not None] == []
    expected = fixture.state()
    state = torch.load(out, weights_only=True)
    short = {_plain(key): value for key, value in expected.items()}
    assert {_bare(key) for key in state} == {
        key.removeprefix("net.") for key in short
    } or state.keys() == short.keys()
    for key, value in state.items():
        other = short.get(key, short.get(f"net.{key}"))
        assert other is not None and other.shape == value.shape and value.device.type == "cpu"


def _plain(key: str) -> str:
    """Return a key without what wraps the model or, under FSDP, its parts."""
    inside = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in _bare(key).split(".") if part not in inside)


def _bare(key: str) -> str:
    while key.startswith(PREFIXES):
        key = key.partition(".")[2]
    return key


def test_the_whole_corpus_is_examined(corpus: Corpus) -> None:
    """No file of the corpus is more than doctor can say something about."""
    seen = 0
    for folder, _, files in os.walk(corpus.folder):
        for file in files:
            try:
                found = examine(Path(folder) / file)
            except CkptkitError as error:
                assert error.exit_code in (2, 3)
            else:
                seen += 1
                assert found.readable or found.causes
    assert seen > 10


def test_ties_of_a_model() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
    model["b"].weight = model["a"].weight
    assert building.model_ties(model) == [["a.weight", "b.weight"]]
    assert building.model_ties(torch.nn.Linear(2, 2, device="meta")) == []


def test_names_that_torch_lacks() -> None:
    lacking = [("torch", "float2_new"), ("torch._utils", "_rebuild_tensor_v9")]
    names = [("torch", "float32"), *lacking, ("torch.not_a_module", "x")]
    assert building.torch_lacks(names) == [".".join(each) for each in lacking]


def test_reading_is_bounded(
    tmp_path: Path, lengths_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is known by its headers alone."""
    from ckptkit.diagnosis import diagnose

    torch.save({"a": torch.ones(1_000_000)}, tmp_path / "run.pth")
    monkeypatch.setattr(diagnose, "READ", 1_000)
    assert examine(tmp_path / "run.pth").causes == ()
    assert sum(lengths_read) < 200_000  # the end of the archive, twice
