"""Shards of HuggingFaceStorageWriter, and safetensors inside data files, that lie; written by
safetensors itself."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptkit import formats
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError
from tests.formats.conformance import elements_of
from tests.formats.dcp.making import DATA, Crafted

Shards = list[tuple[dict[str, torch.Tensor], Any]]  # tensors, and what is said of their offsets


def said(offsets: dict[str, Any]) -> dict[str, str]:
    info = {name: {"saved_offsets": each} for name, each in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}


def make(folder: Path, shards: Shards) -> Path:
    folder.mkdir()
    for rank, (tensors, offsets) in enumerate(shards, 1):
        metadata = said(offsets) if isinstance(offsets, dict) else {"DCP_SHARDING_INFO": offsets}
        save_file(tensors, folder / f"shard-{rank:05}-model-00001-of-00001.safetensors", metadata)
    return folder


def read(folder: Path) -> Checkpoint:
    return formats.read(Folder(folder))


def test_shards_in_any_order(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    shards: Shards = [
        ({"w": whole[2:].clone()}, {"w": [2, 0]}),
        ({"w": whole[:2].clone(), "b": torch.ones(3)}, {"w": [0, 0]}),
    ]
    checkpoint = read(make(tmp_path / "x", shards))
    assert checkpoint.format == "dcp"
    assert elements_of(checkpoint.weights["w"]) == whole.numpy().tobytes()
    assert elements_of(checkpoint.weights["b"]) == torch.ones(3).numpy().tobytes()
    (warning,) = checkpoint.warnings
    assert "missing last shard" in warning


@pytest.mark.parametrize(
    ("shards", "error"),
    [
        (
            [({"w": torch.ones(2)}, {"w": [0]}), ({"w": torch.ones(2)}, {"w": [4]})],
            CorruptError,
        ),  # the middle is missing
        ([({"w": torch.ones(2)}, {"w": [0]}), ({"w": torch.ones(2)}, {"w": [1]})], CorruptError),
        ([({"w": torch.ones(2)}, {"w": [0]}), ({"w": torch.ones(2)}, {"w": [0]})], CorruptError),
        (
            [({"w": torch.ones(2)}, {"w": [0]}), ({"w": torch.ones(2).double()}, {"w": [2]})],
            CorruptError,
        ),
        (
            [({"w": torch.ones(2)}, {"w": [0]}), ({"w": torch.ones(2, 1)}, {"w": [2, 0]})],
            CorruptError,
        ),
        ([({"w": torch.ones(2)}, {"w": [0, 0]})], CorruptError),
        ([({"w": torch.ones(2)}, {"w": [1 << 62]})], CorruptError),
        ([({"w": torch.ones(2)}, {"w": [-1]})], FormatError),
        ([({"w": torch.ones(2)}, {"w": [1 << 63]})], FormatError),
        ([({"w": torch.ones(2)}, {"w": None})], FormatError),
        ([({"w": torch.ones(2)}, "[]")], FormatError),
        ([({"w": torch.ones(2)}, '{"w": 1}')], FormatError),
        ([({"w": torch.ones(2)}, "{")], FormatError),
    ],
)
def test_DC_04_shards_that_are_no_whole(
    tmp_path: Path, shards: Shards, error: type[CkptkitError]
) -> None:
    with pytest.raises(error) as caught:
        read(make(tmp_path / "x", shards))
    assert caught.value.where is not None and caught.value.where.startswith(str(tmp_path / "x"))


def test_DC_06_a_shard_of_another_kind(tmp_path: Path) -> None:
    folder = make(tmp_path / "x", [({"w": torch.ones(2)}, {"w": [0]})])
    torch.save({"w": torch.ones(2)}, folder / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(CkptkitError):
        read(folder)


def inside(folder: Path, held: dict[str, torch.Tensor], offsets: dict[str, Any]) -> Path:
    """The tensor `w` of (2, 3), in a data file that is a safetensors file."""
    made = Crafted(folder)
    made.tensor("w", (2, 3), [(((0, 0), (2, 3)), b"")])
    folder = made.write()
    (folder / DATA).write_bytes(save(held, said(offsets)))
    (key,) = made.metadata.storage_data
    made.metadata.storage_data[key] = _StorageInfo(DATA, 0, 24)
    (folder / ".metadata").write_bytes(pickle.dumps(made.metadata))
    return folder


def test_safetensors_inside(tmp_path: Path) -> None:
    folder = inside(tmp_path / "x", {"v": torch.zeros(1), "w": torch.ones(2, 3)}, {"w": [0, 0]})
    assert elements_of(read(folder).weights["w"]) == torch.ones(2, 3).numpy().tobytes()


@pytest.mark.parametrize(
    ("held", "offsets"),
    [
        ({"w": torch.ones(2, 3)}, {"w": [2, 0]}),
        ({"w": torch.ones(2, 3)}, {"w": [0]}),
        ({"w": torch.ones(3, 2)}, {"w": [0, 0]}),
        ({"w": torch.ones(2, 3).double()}, {"w": [0, 0]}),
        ({"v": torch.ones(2, 3)}, {"w": [0, 0]}),
        ({"w": torch.ones(2, 3)}, {"w": "x"}),
    ],
)
def test_DC_06_safetensors_inside_that_are_something_else(
    tmp_path: Path, held: Any, offsets: Any
) -> None:
    folder = inside(tmp_path / "x", held, offsets)
    with pytest.raises(FormatError) as caught:
        elements_of(read(folder).weights["w"])
    assert caught.value.where == str(folder / DATA) and "'w', at byte 0" in caught.value.message
