"""Edit the safetensors files of a checkpoint in place. Write only bytes that change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import in_step, stream_reusing_buffer
from ckptkit.core.bytesource import LocalFile, Range, Record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.options import Options
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.text import flatten, size, typed
from ckptkit.formats.table import SAFETENSORS, SHARDED
from ckptkit.publish.in_place import LARGEST, apply_all, can_patch
from ckptkit.publish.publish import Published

_BREAKS = Edit(0, b"\xff" * 8)  # an invalid header length, so readers refuse a half-edited file
_AT_ONCE = 1 << 20  # number of bytes to compare at once
_PER_BYTE = 6  # bytes of journal for each changed byte: position (4), old byte, new byte


def can_change(before: Checkpoint) -> bool:
    """Return whether the checkpoint consists of safetensors files that can be edited in place."""
    files = _files(before)
    is_known = before.format in (SAFETENSORS.name, SHARDED.name) and files
    return bool(is_known) and all(can_patch(file.path) for file in files)


def change(
    before: Checkpoint, after: Checkpoint, then: tuple[str, str] | None, options: Options
) -> tuple[Patch, Published]:
    """Write the tensors of `after` into the files of `before`, atomically.

    All new bytes are computed and their checksums are verified before ckptkit writes the first
    byte. `then` is the name and contents of the file that records the version of a folder. Return
    one Patch with the edits of all files, and the result of the write. Raises UnsupportedError if
    the journal would be too large.
    """
    patches: list[Patch] = []
    room = LARGEST // _PER_BYTE
    for file in _files(before):
        edits = tuple(_edits(file, before, after))
        room -= sum(len(edit.data) for edit in edits)
        if room < 0:
            raise UnsupportedError(
                f"more than {size(LARGEST // _PER_BYTE)} change: the journal of an edit in place "
                "would be too large",
                where=before.name,
                hint=typed("write to another output", "pass a path"),
            )
        seal = Edit(0, file.read(0, 8)) if edits else None
        patches.append(Patch(file, _BREAKS if edits else None, edits, seal, file.size))
    done = apply_all(patches, options, then)
    edits = tuple(edit for patch in patches for edit in patch.edits)
    whole = sum(patch.size for patch in patches)
    seal = next((patch.seal for patch in patches if patch.seal), None)
    return Patch(patches[0].base, _BREAKS if edits else None, edits, seal, whole), done


def _files(checkpoint: Checkpoint) -> list[LocalFile]:
    """Return the local files that contain the weights, sorted by name."""
    found: dict[int, LocalFile] = {}
    for tensor in checkpoint.required.tensors.values():
        extent = None if tensor.storage is None else tensor.storage.record.locate()
        if isinstance(extent, Range) and isinstance(extent.source, LocalFile):
            found.setdefault(id(extent.source), extent.source)
    return sorted(found.values(), key=lambda each: each.path)


def _edits(file: LocalFile, before: Checkpoint, after: Checkpoint) -> Iterator[Edit]:
    """Yield edits that replace the changed bytes of a file, sorted by offset."""
    import numpy as np

    new = after.required.tensors
    pairs: dict[int, tuple[Range, Record]] = {}
    for name, tensor in before.required.tensors.items():
        if new[name] is tensor or not tensor.nbytes:
            continue
        extent = contiguous(tensor).locate()
        if not isinstance(extent, Range) or extent.source is not file:
            continue
        known = pairs.get(extent.offset)
        # If several views start at this offset, use the longest.
        if known is None or known[0].length < extent.length:
            pairs[extent.offset] = extent, contiguous(new[name])

    def work(pair: tuple[Range, Record]) -> list[Edit]:
        extent, record = pair
        at, edits = extent.offset, []
        for old, made in in_step(
            [stream_reusing_buffer(extent), stream_reusing_buffer(record.locate())],
            (1, 1),
            _AT_ONCE,
        ):
            one, other = np.frombuffer(old, np.uint8), np.frombuffer(made, np.uint8)
            places = np.flatnonzero(one != other)
            if len(places):
                edit = Edit(at, other[places].tobytes(), places.astype("<u4").tobytes())
                edits.append(edit)
            at += len(other)
        return edits

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from flatten(pool.map(work, (pairs[offset] for offset in sorted(pairs))))
