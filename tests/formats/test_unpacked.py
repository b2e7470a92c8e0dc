"""Archives of torch.save that were unpacked: folders with data.pkl."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CorruptError, InputError
from tests.formats.torchscript.scripts import QUIET, script

pytestmark = QUIET
STATE = {
    "w": torch.arange(6.0).view(2, 3),
    "b": torch.ones(2, dtype=torch.float16),
    "t": torch.arange(6.0).view(2, 3).t(),
}


def unpacked(path: Path) -> Path:
    """The folder of an archive, as unzip leaves it."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.parent / "out")
    (folder,) = (path.parent / "out").iterdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "a.pth")
    return unpacked(tmp_path / "a.pth")


@pytest.mark.parametrize("name", ["", "data.pkl"])
def test_the_folder_and_its_pickle_are_the_checkpoint(
    folder: Path, name: str, tmp_path: Path
) -> None:
    checkpoint = ckptkit.open(folder / name)
    assert checkpoint.format == "torch-unpacked" and checkpoint.warnings == ()
    ckptkit.save(checkpoint, tmp_path / "b.pth")
    for made in (ckptkit.load(folder / name), torch.load(tmp_path / "b.pth")):
        assert list(made) == list(STATE)
        assert all(
            torch.equal(made[key], STATE[key]) and made[key].stride() == STATE[key].stride()
            for key in STATE
        )


def test_a_file_that_is_missing_or_cut(folder: Path) -> None:
    os.truncate(folder / "data" / "0", 20)
    with pytest.raises(CorruptError, match="20 bytes"):
        ckptkit.open(folder)
    (folder / "data" / "0").unlink()
    with pytest.raises(CorruptError, match="has no record"):
        ckptkit.open(folder)


def test_links_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "0").replace(tmp_path / "elsewhere")
    (folder / "data" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        ckptkit.open(folder)


def test_other_folders_are_not_its_business(tmp_path: Path) -> None:
    script(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(InputError):
        ckptkit.open(unpacked(tmp_path / "a.pt"))
