"""TorchScript archives are told apart from checkpoints, by what torch itself goes by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptkit.bytesource import LocalFile, Memory
from ckptkit.errors import UnsupportedError
from ckptkit.formats.format import Probe
from ckptkit.formats.torch import torchscript, zip_archive
from tests.conftest import Corpus
from tests.formats.torch.zips import Member, build


def refuse(probe: Probe) -> None:
    assert torchscript.FORMAT.matches(probe) and not zip_archive.FORMAT.matches(probe)
    with pytest.raises(UnsupportedError, match="TorchScript") as refused:
        torchscript.FORMAT.read(probe)
    assert refused.value.hint and "torch.jit.load" in refused.value.hint


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_D_29_a_script_of_this_torch(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "a.pt")
    refuse(Probe(LocalFile(tmp_path / "a.pt")))


@pytest.mark.parametrize("name", ["DeepLog__traced_model.pt", "silero-vad__2021-02_model_micro.jit"])
def test_D_29_corpus(corpus: Corpus, name: str) -> None:
    refuse(Probe(LocalFile(corpus / name)))


@pytest.mark.parametrize("name", ["constants.pkl", "bytecode.pkl"])
def test_ZP_21_one_name_decides(name: str) -> None:
    refuse(Probe(Memory(build(Member("a/data.pkl", b"\x80\x02N."), Member(f"a/{name}", b"\x80\x02).")))))


@pytest.mark.parametrize("name", ["a/code/model.py", "a/x/constants.pkl", "a/data/constants.pkl"])
def test_D_30_other_names_do_not(name: str) -> None:
    probe = Probe(Memory(build(Member("a/data.pkl", b"\x80\x02N."), Member("a/version", b"3"), Member(name, b"?"))))
    assert not torchscript.FORMAT.matches(probe) and zip_archive.FORMAT.matches(probe)
    assert any(name.rpartition("/")[2] in said for said in zip_archive.FORMAT.read(probe).warnings)


def test_other_files_are_not_its_business() -> None:
    for data in (b"", b"PK", b"\x80\x02N.", build(Member("a/0", b""))):
        assert not torchscript.FORMAT.matches(Probe(Memory(data)))
