"""Torch storages that are parts of mapped files: no byte is read before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptkit.compute.torch_memory import native
from ckptkit.core.bytesource import LocalFile, Range
from ckptkit.core.tensor import Storage

if TYPE_CHECKING:
    from mmap import mmap

    import torch


class MappedFiles:
    """Maps local files, each once, copy on write: what is written to a tensor stays in memory."""

    def __init__(self) -> None:
        self._maps: dict[LocalFile, mmap | None] = {}

    def torch_storage(self, storage: Storage, component: int) -> torch.UntypedStorage | None:
        """Return the bytes of a storage where they are in its file.

        None where they have to be read: they are not plain bytes of a local file that can be
        mapped, have the other byte order, or begin at no multiple of `component` bytes, the size
        of the numbers in them.
        """
        import torch

        place = native(storage, component).locate()
        if not isinstance(place, Range) or not isinstance(place.source, LocalFile):
            return None
        if not place.length or place.offset % component:
            return None
        if place.source not in self._maps:
            self._maps[place.source] = place.source.map()
        whole = self._maps[place.source]
        if whole is None:
            return None
        memory = torch.frombuffer(whole, dtype=torch.uint8, count=place.length, offset=place.offset)
        return memory.untyped_storage()
