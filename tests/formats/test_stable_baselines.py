"""Models of Stable-Baselines3, as its own writer lays them out."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import FormatError, UnsupportedError
from tests.formats.conformance import FormatConformance, State
from tests.formats.test_conformance import zip_boundaries

MEMBERS = ("data", "pytorch_variables.pth", "policy.optimizer.pth", "system_info.txt")


def saved(state: object) -> bytes:
    data = io.BytesIO()
    torch.save(state, data)
    return data.getvalue()


def model(path: Path, policy: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """Write what `save_to_zip_file` writes, in its order."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("data", "{}")
        archive.writestr("pytorch_variables.pth", saved(None))
        archive.writestr("policy.pth", policy)
        archive.writestr("policy.optimizer.pth", saved({"state": {}, "param_groups": []}))
        archive.writestr("_stable_baselines3_version", "1.7.0")
        archive.writestr("system_info.txt", "OS: none")
    return path


class TestStableBaselines(FormatConformance):
    name = "stable-baselines3"
    suffix = ".zip"
    dtypes = ("float32", "float16", "int64", "bool")

    def make(self, folder: Path, state: State) -> Path:
        return model(folder / "made.zip", saved(state))

    def oracle(self, path: Path) -> State:
        with zipfile.ZipFile(path) as archive:
            loaded: State = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
        return loaded

    def boundaries(self, data: bytes) -> Iterable[int]:
        return zip_boundaries(data)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_policy_is_what_torch_reads(tmp_path: Path, zipped: bool) -> None:
    data = io.BytesIO()
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    torch.save(state, data, _use_new_zipfile_serialization=zipped)
    path = model(tmp_path / "best_model.zip", data.getvalue())
    checkpoint = ckptkit.open(path)
    ckptkit.save(checkpoint, tmp_path / "policy.pth")
    found = torch.load(tmp_path / "policy.pth", weights_only=True)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    (warning,) = [each for each in checkpoint.warnings if "only policy.pth" in each]
    assert all(name in warning for name in MEMBERS)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    packed = model(tmp_path / "packed.zip", saved({"a": torch.zeros(999)}), zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match="compressed"):
        ckptkit.open(packed)
    with pytest.raises(FormatError, match=r"not a torch\.save file"):
        ckptkit.open(model(tmp_path / "other.zip", b"text"))
