"""Recover a cut or damaged safetensors file: each entry of the header by itself."""

from __future__ import annotations

from typing import Any

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, TruncatedError
from ckptkit.core.tensor import Tensor
from ckptkit.formats import format
from ckptkit.formats.common.recovering import AGAIN, UNVERIFIED, nothing, zeros_from
from ckptkit.formats.common.saved_record import restore
from ckptkit.formats.format import Loss, Probe, Recovered
from ckptkit.formats.safetensors.header import (
    Kinds,
    matches,
    read_entry,
    read_header,
    read_text,
)


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover a file that is as long as its header says; with `unverified`, any tensor inside it.

    The format has no checksums: where bytes are missing or too many, all tensors may be shifted, as
    nothing says where that begins; and a file that ends in zeros may not be written to its end.
    Everything but the tensors (ties, ``_metadata``, a whole tree) is recovered only if all tensors
    are. Raises what is wrong with the header.
    """
    if probe.is_folder or not matches(probe):
        return None
    source = probe.source
    text = read_text(source)
    header, metadata = read_header(text)
    start = 8 + len(text)
    shifted = "" if unverified else _shifted(header, source.size - start)
    zeros = source.size if unverified else zeros_from(source)
    whole: dict[str, Tensor] = {}
    lost: list[Loss] = []
    for name, entry in header.items():
        try:
            whole[name] = tensor = _tensor(entry, source, start)
            if why := _doubt(tensor, shifted, zeros):
                del whole[name]
                lost.append(Loss(name, _described(entry), why))
        except CkptkitError as error:
            lost.append(Loss(name, _described(entry), error.message))
    if not any(tensor.nbytes for tensor in whole.values()) and lost:
        raise nothing(lost, UNVERIFIED if shifted or zeros < source.size else AGAIN)
    found = restore(whole, metadata)
    checkpoint = Checkpoint(
        found.root, "safetensors", source, found.metadata, found.globals, found.warnings
    )
    return Recovered(checkpoint, tuple(lost))


def recoverable(probe: Probe) -> str:
    """Return the command that may recover something; "" unless the header can be read."""
    if probe.is_folder or not matches(probe):
        return ""
    try:
        text = read_text(probe.source)
        header, _ = read_header(text)
    except CkptkitError:
        return ""
    return (
        format.UNVERIFIED if _shifted(header, probe.source.size - 8 - len(text)) else format.RECOVER
    )


def _shifted(header: dict[str, Any], size: int) -> str:
    """Describe what is wrong with the number of bytes after the header; "" if nothing is."""
    end = 0
    kinds: Kinds = {}
    for entry in header.values():
        try:
            kind, begin = read_entry(entry, kinds)
        except CkptkitError:
            continue
        end = max(end, begin + kind.nbytes)
    if end == size:
        return ""
    which = f"{end - size:,} bytes are missing" if end > size else f"{size - end:,} extra bytes"
    return f"its bytes may be shifted: {which} in the file, and nothing says where"


def _doubt(tensor: Tensor, shifted: str, zeros: int) -> str:
    """Return why a tensor that is inside the file may not be intact."""
    record = tensor.storage.record.locate() if tensor.storage is not None else None
    if not isinstance(record, Range) or not record.length:
        return ""
    if not shifted and record.offset + record.length > zeros:
        return (
            f"the file ends in {record.source.size - zeros:,} zeros: it was not written to its end"
        )
    return shifted


def _tensor(entry: object, source: ByteSource, start: int) -> Tensor:
    kind, begin = read_entry(entry, {})
    end = start + begin + kind.nbytes
    if end > source.size:
        raise TruncatedError(f"the file is cut {end - source.size:,} bytes before its end")
    return kind.tensor(source, start + begin)


def _described(entry: object) -> str:
    if not isinstance(entry, dict):
        return "an entry"
    return f"{str(entry.get('dtype'))[:20]} {str(entry.get('shape'))[:60]}"
