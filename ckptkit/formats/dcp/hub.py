"""The folder that HuggingFaceStorageWriter of torch.distributed.checkpoint writes unconsolidated.

    shard-<rank>-model-<file>-of-<files>.safetensors        five digits each, ranks from 1

Each is a safetensors file whose ``__metadata__`` locate its chunks (:mod:`items`). Names are flat.
The size of a tensor is not stored: it reaches as far as its chunks do.
(torch/distributed/checkpoint/hf_storage.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shown
from ckptkit.core.weights import as_tensor
from ckptkit.formats.dcp.items import Files
from ckptkit.formats.dcp.metadata import Chunk, DcpIndex, Entry, Place, Whole

SHARD = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OPEN = (
    "the shards do not store the shapes of whole tensors: a missing last shard would not be noticed"
)


def describe(files: Files, names: Iterable[str]) -> DcpIndex:
    """Return the index that the headers of the shards give.

    Raises CorruptError where they contradict each other.
    """
    found: dict[str, tuple[DType, list[Chunk]]] = {}
    for file in names:
        try:
            _add_shard(found, files, file)
        except CkptkitError as error:
            raise error.at(files.folder.open(file).name) from error.__cause__
    entries: dict[str, Entry] = {}
    for name, (dtype, chunks) in found.items():
        entries[name] = Whole(
            dtype, _shape(chunks), tuple(chunk for chunk in chunks if 0 not in chunk.sizes)
        )
    return DcpIndex(entries, {}, (_OPEN,))


def _add_shard(found: dict[str, tuple[DType, list[Chunk]]], files: Files, file: str) -> None:
    shard = files.header(file)
    for name, node in shard.tensors.items():
        tensor = as_tensor(node)
        if tensor is None:
            raise FormatError(f"holds {shown(name)}, which is not a tensor")
        offsets = shard.offsets.get(name, (0,) * len(tensor.shape))
        dtype, chunks = found.setdefault(name, (tensor.dtype, []))
        if dtype != tensor.dtype or any(len(each.sizes) != len(tensor.shape) for each in chunks):
            raise CorruptError(
                f"holds {shown(name)} with another dtype or rank than earlier shards"
            )
        if len(offsets) != len(tensor.shape):
            raise CorruptError(
                f"holds {shown(name)} of {len(tensor.shape)} dimensions at {offsets}"
            )
        chunks.append(Chunk(offsets, tensor.shape, Place(file, 0, tensor.nbytes)))


def _shape(chunks: list[Chunk]) -> Shape:
    """Return the shape of a tensor: as far as its chunks reach in each dimension."""
    ends = [[o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
    return tuple(map(max, zip(*ends, strict=True)))
