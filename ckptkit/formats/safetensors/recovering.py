"""Recover a cut or damaged safetensors file: each entry of the header by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptkit.core.bytesource import ByteSource, Extent, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.formats import format
from ckptkit.formats.common.recovering import (
    AGAIN,
    UNVERIFIED,
    nothing,
    recovered,
    unsummed,
    zeros_from,
)
from ckptkit.formats.common.saved_record import WHOLE, restore
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
    nothing says where that begins; and a file that ends in zeros may not be written to its end. A
    whole tree is kept without what refers to lost tensors. Raises what is wrong with the header.
    """
    if probe.is_folder or not matches(probe):
        return None
    source = probe.source
    text = read_text(source)
    header, metadata = read_header(text)
    start = 8 + len(text)
    shifted = "" if unverified else _shifted(header, source.size - start)
    zeros = source.size if unverified else zeros_from(source)
    tensors: dict[str, Tensor] = {}
    invalid: list[Loss] = []
    reasons: dict[ByteSource | None, str] = {}  # by what stands in for lost bytes
    for name, entry in header.items():
        try:
            kind, begin = read_entry(entry, {})
        except CkptkitError as error:
            invalid.append(Loss(name, "an entry", error.message))
            continue
        place = Range(source, start + begin, kind.nbytes)
        if why := _doubt(place, shifted, zeros):
            place = Range(Memory(b"", source.name), 0, kind.nbytes)
            reasons[place.source] = why
        tensors[name] = kind.like.over(Storage(place))
    if not tensors and invalid:
        raise nothing(invalid)
    found = restore(tensors, metadata)
    checkpoint = Checkpoint(
        found.root, "safetensors", source, found.metadata, found.globals,
        (*found.warnings, unsummed()), origin=WHOLE if found.is_whole else None,
    )  # fmt: skip
    hint = UNVERIFIED if shifted or zeros < source.size else AGAIN
    result = recovered(checkpoint, lambda lost: reasons.get(_source(lost.record.locate())), hint)
    return replace(result, lost=(*invalid, *result.lost))


def _source(extent: Extent) -> ByteSource | None:
    return extent.source if isinstance(extent, Range) else None


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


def _doubt(place: Range, shifted: str, zeros: int) -> str:
    """Return why the bytes of a tensor may not be intact; "" if nothing tells."""
    source, end = place.source, place.offset + place.length
    if end > source.size:
        return f"the file is cut {end - source.size:,} bytes before its end"
    if place.length and not shifted and end > zeros:
        return f"the file ends in {source.size - zeros:,} zeros: it was not written to its end"
    return shifted if place.length else ""
