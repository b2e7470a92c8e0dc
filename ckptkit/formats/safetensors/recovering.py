"""A cut or damaged safetensors file: each entry of the header stands for itself."""

from __future__ import annotations

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, TruncatedError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.formats.common.recovering import nothing
from ckptkit.formats.format import Loss, Probe, Salvaged
from ckptkit.formats.safetensors.header import matches, read_entry, read_header
from ckptkit.formats.safetensors.record import restore


def salvage(probe: Probe) -> Salvaged | None:
    """The tensors that lie inside the file. The format has no checksums: damage to their bytes cannot be seen.

    What is beside the tensors (ties, ``_metadata``, a whole tree) comes back only if all tensors do. Raises what is
    wrong with the header.
    """
    if probe.is_folder or not matches(probe):
        return None
    text, header, metadata = read_header(probe.source)
    whole: dict[str, Tensor] = {}
    lost: list[Loss] = []
    for name, entry in header.items():
        try:
            whole[name] = _tensor(entry, probe.source, 8 + len(text))
        except CkptkitError as error:
            lost.append(Loss(name, _said(entry), error.message))
    if not whole:
        raise nothing()
    found = restore(whole, metadata)
    checkpoint = Checkpoint(found.root, "safetensors", probe.source, found.metadata, found.globals, found.warnings)
    return Salvaged(checkpoint, tuple(lost))


def _tensor(entry: object, source: ByteSource, start: int) -> Tensor:
    dtype, shape, begin, end = read_entry(entry)
    if start + end > source.size:
        raise TruncatedError(f"the file is cut {start + end - source.size:,} bytes before its end")
    return Tensor(Storage(Range(source, start + begin, end - begin)), dtype, shape, contiguous_stride(shape))


def _said(entry: object) -> str:
    if not isinstance(entry, dict):
        return "an entry"
    return f"{str(entry.get('dtype'))[:20]} {str(entry.get('shape'))[:60]}"
