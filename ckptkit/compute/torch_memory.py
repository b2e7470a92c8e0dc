"""Elements of checkpoints in torch's memory: storages, tensors over them, parameters filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckptkit.compute.operations import PIECE, stream
from ckptkit.compute.tensors import contiguous
from ckptkit.compute.threads import BATCH, in_any_order
from ckptkit.compute.torch_dtypes import torch_dtype
from ckptkit.core.bytesource import Extent, Pending, Range, Record
from ckptkit.core.errors import DeviceError, UnsupportedError
from ckptkit.core.tensor import Storage, Tensor

if TYPE_CHECKING:
    import torch


class _Part(NamedTuple):
    """Bytes `start` to `stop` of an extent: elements of `dtype` for the flat tensor `target`."""

    extent: Extent
    start: int
    stop: int
    dtype: torch.dtype
    target: torch.Tensor


def to_torch_storage(
    storage: Storage, device: str | torch.device = "cpu", component: int = 1
) -> torch.UntypedStorage:
    """The bytes of a storage, read straight into torch's memory on `device`.

    Bytes of a big-endian storage are swapped in units of `component` (that of the dtype which its
    tensors have). Raises DeviceError if the device is not there or has not the memory.
    """
    import torch

    where = torch.device(device)
    extent = native(storage, component).locate()
    memory = _allocate(extent.length, where)
    if where.type != "meta":
        for part in _parts(extent, memory.dtype, memory):
            _fill(part)
    return memory.untyped_storage()


def fill(pairs: Iterable[tuple[Tensor, torch.Tensor]]) -> None:
    """Fill contiguous tensors of torch with the elements of others, by several threads.

    The two of a pair have one shape, and dtypes that torch casts to each other. Bytes are read
    straight into tensors of their own dtype on the CPU, and cast in small pieces for others.
    Everything is located before the first byte is read.
    """
    import torch

    parts: list[_Part] = []
    for tensor, target in pairs:
        extent = contiguous(tensor).locate()
        parts += _parts(extent, torch_dtype(tensor.dtype), target.detach().view(-1))
    in_any_order(_fill, parts, lambda part: part.stop - part.start)
    for part in parts:  # autograd has to know that they changed
        torch.autograd.graph.increment_version(part.target)


def _parts(extent: Extent, dtype: torch.dtype, target: torch.Tensor) -> Iterator[_Part]:
    """Yield the parts of an extent, for several threads; what is computed stays whole."""
    step = BATCH if isinstance(extent, Range) else extent.length
    for start in range(0, extent.length, step or 1):
        yield _Part(extent, start, min(start + step, extent.length), dtype, target)


def _fill(part: _Part) -> None:
    import torch

    extent, start, stop, dtype, target = part
    size = dtype.itemsize
    if target.device.type == "cpu" and target.dtype == dtype:
        _read(extent, start, stop, target[start // size : stop // size].view(torch.uint8))
        return
    step = PIECE if isinstance(extent, Range) else stop - start
    pinned = target.device.type == "cuda"
    memory = torch.empty(
        min(step, stop - start), dtype=torch.uint8, device="cpu", pin_memory=pinned
    )
    for at in range(start, stop, step):
        piece = memory[: min(step, stop - at)]
        _read(extent, at, at + len(piece), piece)
        target[at // size : (at + len(piece)) // size].copy_(piece.view(dtype))


def _read(extent: Extent, start: int, stop: int, memory: torch.Tensor) -> None:
    """Read bytes `start` to `stop` of an extent into a tensor of bytes on the CPU."""
    view = memory.numpy().data
    if isinstance(extent, Range):
        extent.source.read_into(extent.offset + start, view)
        return
    at = 0
    for piece in stream(extent, start, stop):
        view[at : at + len(piece)] = piece
        at += len(piece)


def native(storage: Storage, component: int) -> Record:
    """Return the bytes of a storage as little-endian numbers of `component` bytes."""
    if not storage.big_endian or component == 1:
        return storage.record
    return Pending("byteswap", (storage.record,), (component,), storage.nbytes)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().split("\n")[0]
        hint = None if device.type == "cpu" else "map_location='cpu' loads it without this device"
        raise DeviceError(f"no {nbytes:,} bytes on {device}: {why}", hint=hint) from error


def rebuild(tensor: Tensor, untyped: torch.UntypedStorage) -> torch.Tensor:
    """The torch tensor or Parameter that `tensor` describes, over memory that holds its storage.

    Raises UnsupportedError for what strides over a storage do not make: quantized and sparse
    tensors.
    """
    import torch

    if tensor.dtype.kind == "quantized" or tensor.layout != "strided":
        raise UnsupportedError(
            f"{tensor.layout} tensors of {tensor.dtype} cannot be rebuilt from their bytes alone"
        )
    made = torch.empty(0, dtype=torch_dtype(tensor.dtype), device=untyped.device)
    made.set_(untyped, tensor.offset, tensor.shape, tensor.stride)
    made = made.conj() if tensor.conj else made
    made = torch._neg_view(made) if tensor.neg else made
    if tensor.kind == "parameter":
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
