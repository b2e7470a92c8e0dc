"""Folders of torch.distributed.checkpoint, made by torch; and its metadata, made by hand."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

DATA = "__0_0.distcp"
FIVE = (torch.float32, torch.strided, False, None, False)  # a state of TensorProperties

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@contextmanager
def alone() -> Iterator[None]:
    """torch says in several ways that it has no other processes."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """Save as one process does."""
    with alone():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def whole(folder: Path) -> dict[str, Any]:
    """Return what torch makes of a folder."""
    out = folder.with_name(f"{folder.name}.whole.pth")
    with alone():
        dcp_to_torch_save(folder, out)
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


@contextmanager
def properties(state: Any) -> Iterator[None]:
    """Pickle the properties of tensors with this state, or with what it makes of theirs."""
    five = TensorProperties.__getstate__

    def changed(of: TensorProperties) -> Any:
        return state(five(of)) if callable(state) else state

    with patch.object(TensorProperties, "__getstate__", five if state is ... else changed):
        yield


def archive(value: Any) -> bytes:
    """One item as torch writes it."""
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Crafted:
    """A folder put together item by item, its metadata pickled by torch's own classes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.metadata = Metadata({}, {}, {})
        self.metadata.planner_data = None
        self.data = bytearray()

    def value(self, name: str, data: bytes) -> None:
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self.place(MetadataIndex(name), data)

    def tensor(
        self, name: str, size: tuple[int, ...], chunks: list[tuple[Box, bytes]], dtype: Any = None
    ) -> None:
        """A tensor of `size` with so many boxes, and what is stored for each."""
        boxes = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for (offsets, sizes), _ in chunks
        ]
        properties = TensorProperties(dtype or torch.float32)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, torch.Size(size), boxes
        )
        for (offsets, _), data in chunks:
            self.place(MetadataIndex(name, offsets), data)

    def place(self, index: MetadataIndex, data: bytes) -> None:
        self.metadata.storage_data[index] = _StorageInfo(DATA, len(self.data), len(data))
        self.data += data

    def write(self) -> Path:
        (self.folder / DATA).write_bytes(self.data)
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        return self.folder
