"""Edit a safetensors file in place: another header over the same tensors.

A header that is no longer than the old one is padded to its length, and nothing else changes. A
longer one grows over the first tensors of the buffer, as few as will do; these move to the end of
the file:

    N | old header     | a | b | c | d            N' = N + bytes of a and b
    N'| new header, spaces     | c | d | a | b
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptkit import compute
from ckptkit.core.bytesource import LocalFile, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.tensor import Tensor
from ckptkit.formats.format import WriteOptions
from ckptkit.formats.safetensors.writing import Contents, contents, header_text

_MOVED = (
    16 << 20
)  # bytes of tensors that may move; a copy of the file is the better way to move more
_ALIGNMENT = 8  # bytes
_BREAKS = Edit(0, b"\xff" * 8)  # a length that no file has


class _Buffer(NamedTuple):
    """The tensors' bytes in the file, from `start` to `stop`, and the place of each."""

    start: int
    stop: int
    places: Mapping[str, int]


def patch(before: Checkpoint, after: Checkpoint, options: WriteOptions) -> Patch | None:
    """Plan the edit of `before` into `after`; None if tensors differ or too many would move.

    Raises what writing `after` raises.
    """
    source, target = before.source, contents(after, options)
    if not isinstance(source, LocalFile):
        return None
    start = 8 + int.from_bytes(source.read(0, 8), "little")
    places = _places(source, target.tensors)
    if places is None or not _tile(target.tensors, places, start, source.size):
        return None
    buffer = _Buffer(start, source.size, places)
    text = _header(target, buffer)
    moved: list[Edit] = []
    while len(text) > buffer.start - 8:
        grown = _grown(source, target.tensors, buffer, len(text) - (buffer.start - 8))
        if grown is None:
            return None
        edit, buffer = grown
        moved.append(edit)
        text = _header(target, buffer)
    length = buffer.start - 8
    if length > LIMITS.safetensors_header_bytes or sum(len(edit.data) for edit in moved) > _MOVED:
        return None
    edits = (Edit(8, text.ljust(length)), *moved)
    seal = Edit(0, length.to_bytes(8, "little"))
    return Patch(source, _BREAKS, edits, seal, buffer.stop, tuple(target.notes))


def _header(target: Contents, buffer: _Buffer) -> bytes:
    offsets = {name: place - buffer.start for name, place in buffer.places.items()}
    return header_text(target.tensors, offsets, target.metadata)


def _places(source: LocalFile, tensors: Mapping[str, Tensor]) -> dict[str, int] | None:
    """Return the begin of each tensor in `source`; None if some are elsewhere or computed."""
    places = {}
    for name, tensor in tensors.items():
        extent = compute.contiguous(tensor).locate()
        if not isinstance(extent, Range) or extent.source is not source:
            return None
        places[name] = extent.offset
    return places


def _tile(tensors: Mapping[str, Tensor], places: Mapping[str, int], start: int, stop: int) -> bool:
    """Return whether the tensors follow each other from `start` to `stop`."""
    for place, length in sorted((places[name], tensor.nbytes) for name, tensor in tensors.items()):
        if place != start:
            return False
        start += length
    return start == stop


def _grown(
    source: LocalFile, tensors: Mapping[str, Tensor], buffer: _Buffer, need: int
) -> tuple[Edit, _Buffer] | None:
    """Move the first tensors to the end to free `need` more bytes; None if those are too large.

    The others stay where they are; moved ones keep their alignment.
    """
    places, taken = dict(buffer.places), 0
    if buffer.stop % _ALIGNMENT:
        return None
    for name in sorted(places, key=lambda name: (places[name], tensors[name].nbytes)):
        if taken >= need and taken % _ALIGNMENT == 0:
            break
        places[name] = buffer.stop + taken
        taken += tensors[name].nbytes
        if taken > _MOVED:
            return None
    if taken < need or taken % _ALIGNMENT:
        return None
    moved = Edit(buffer.stop, source.read(buffer.start, taken))
    return moved, _Buffer(buffer.start + taken, buffer.stop + taken, places)
