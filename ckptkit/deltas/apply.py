"""Apply deltas to a checkpoint, and determine the version of a checkpoint by checksums.

An edit in place of safetensors files writes only the bytes that change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ckptkit import formats
from ckptkit.api import Conversion, convert, open_checkpoint
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.lazy import np
from ckptkit.compute.operation import Concat, RecordSlice, in_step, stream_reusing_buffer
from ckptkit.core.arguments import checked
from ckptkit.core.bytesource import Folder, LocalFile, Pending, Range, Record
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.errors import CorruptError, UnsupportedError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.text import flatten, plural, quoted, shown, size, typed
from ckptkit.core.tree import Node, join, rebuild, walk
from ckptkit.deltas.forms import WHOLE, Change, Delta, Paths, hashing, read_all
from ckptkit.formats.format import open_place
from ckptkit.formats.table import SAFETENSORS, SHARDED
from ckptkit.publish.in_place import LARGEST, apply_all, can_patch

STATE = ".weight_sync", "state.json"  # path of the version file below the checkpoint folder
_VERIFY = "`delta verify` shows the version of a checkpoint"
_BREAKS = Edit(0, b"\xff" * 8)  # an invalid header length, so readers refuse a half-edited file
_AT_ONCE = 1 << 20  # number of bytes to compare at once
_PER_BYTE = 6  # bytes of journal for each changed byte: position (4), old byte, new byte


@checked
def apply_delta(
    base: Source,
    deltas: Paths,
    path: str | os.PathLike[str] | None = None,
    *,
    to: int | None = None,
    base_version: int | None = None,
    unchecked: bool = False,
    options: Options | None = None,
    **changes: Any,
) -> Conversion:
    """Apply deltas in order to `base`, and write the result to `path`.

    With ``in_place=True``, `apply_delta` edits `base` itself. `deltas` are folders and files of
    deltas, or one folder that contains deltas. `to` is the last version to apply. If the folder of
    `base` does not record a version, pass the version of `base` as `base_version`. If `unchecked`
    is false, ckptkit refuses deltas without checksums. Pass the options as one :class:`Options`
    object or as keyword arguments.

    Raises UsageError if a delta requires another version than the result of the deltas before it
    has. Raises CorruptError for a damaged delta or a wrong base. After a UsageError or
    CorruptError, the destination is unchanged.
    """
    found = read_all(deltas, to)

    def step(checkpoint: Checkpoint) -> Checkpoint:
        return apply(checkpoint, found, base_version=base_version, unchecked=unchecked)

    settings = made(options, changes)
    if not settings.in_place or not isinstance(base, (str, os.PathLike)):
        return convert(base, path, step, options=settings)
    before = formats.read(open_place(base, undo=not settings.dry_run))
    files = _files(before)
    is_known = before.format in (SAFETENSORS.name, SHARDED.name) and files
    if not is_known or not all(can_patch(file.path) for file in files):
        before.close()
        return convert(base, path, step, options=settings)
    after = step(before)
    # All new bytes are computed and their checksums are verified before the first byte is written.
    patches: list[Patch] = []
    room = LARGEST // _PER_BYTE
    for file in files:
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
    state = "/".join(STATE)
    texts = [data.decode() for name, data in after.companions if name == state]
    then = (state, texts[0]) if texts and isinstance(before.source, Folder) else None
    done = apply_all(patches, settings, then)
    edits = tuple(edit for patch in patches for edit in patch.edits)
    whole = sum(patch.size for patch in patches)
    seal = next((patch.seal for patch in patches if patch.seal), None)
    # One Patch with the edits of all files, to describe what was done.
    patch = Patch(patches[0].base, _BREAKS if edits else None, edits, seal, whole)
    name = before.name or ""
    return Conversion(after, patch, before.format, name, None if settings.dry_run else done)


def _files(checkpoint: Checkpoint) -> list[LocalFile]:
    """Return the local files that contain the weights, sorted by name."""
    found: dict[int, LocalFile] = {}
    for tensor in checkpoint.required.tensors.values():
        extent = None if tensor.storage is None else tensor.storage.record.locate()
        if isinstance(extent, Range) and isinstance(extent.source, LocalFile):
            found[id(extent.source)] = extent.source
    return sorted(found.values(), key=lambda each: each.path)


def _edits(file: LocalFile, before: Checkpoint, after: Checkpoint) -> Iterator[Edit]:
    """Yield edits that replace the changed bytes of a file, sorted by offset."""
    new = after.required.tensors
    pairs: dict[int, tuple[Range, Record]] = {}
    for name, tensor in before.required.tensors.items():
        extent = contiguous(tensor).locate()
        if new[name] is tensor or not isinstance(extent, Range) or extent.source is not file:
            continue
        known = pairs.get(extent.offset)
        # If several views start at this offset, use the longest.
        if known is None or known[0].length < extent.length:
            pairs[extent.offset] = extent, contiguous(new[name])

    def work(offset: int) -> list[Edit]:
        extent, record = pairs[offset]
        at, edits = offset, []
        streams = [stream_reusing_buffer(extent), stream_reusing_buffer(record.locate())]
        for pieces in in_step(streams, (1, 1), _AT_ONCE):
            old, made = (np.frombuffer(piece, np.uint8) for piece in pieces)
            places = np.flatnonzero(old != made)
            if len(places):
                edits.append(Edit(at, made[places].tobytes(), places.astype("<u4").tobytes()))
            at += len(made)
        return edits

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from flatten(pool.map(work, sorted(pairs)))


def apply(
    base: Checkpoint,
    deltas: Sequence[Delta],
    *,
    base_version: int | None = None,
    unchecked: bool = False,
) -> Checkpoint:
    """Apply deltas in order to `base`, and return the resulting checkpoint.

    This function reads only headers. It raises the same errors as :func:`apply_delta`.
    """
    if not deltas:
        raise UsageError("no deltas to apply")
    at = version_of(base) if base_version is None else base_version
    known = [each.version for each in deltas]
    if at is not None and at in known:
        base = base.with_root(base.root, notes=[f"already at version {at:06d}"])
        deltas = deltas[len(known) - known[::-1].index(at) :]
    for delta in deltas:
        if delta.encoding == WHOLE:
            whole = open_checkpoint(delta.name)
            if _kinds(whole) != _kinds(base):
                what = f"is a checkpoint whose tensors do not match {base.name or 'the base'}"
                raise UsageError(what, where=delta.name)
            base, at = whole, delta.version
            continue
        if not (unchecked or delta.is_proven):
            raise UsageError(
                f"{delta.form} records no checksums, so ckptkit cannot verify that this is the "
                "right base",
                where=delta.name,
                hint=f"{typed('--unchecked', 'unchecked=True')} applies it without a check",
            )
        if at is None and delta.base_version == 0:
            at = 0  # a base without a recorded version is assumed to be version 0
        _check_order(base, delta, at)
        base, at = _applied(base, delta), delta.version
    if at is not None:
        state = "/".join(STATE), json.dumps({"version": f"{at:06d}"}).encode()
        others = tuple(each for each in base.companions if each[0] != state[0])
        base = replace(base, companions=(*others, state))
    return base


def _kinds(checkpoint: Checkpoint) -> dict[str, tuple[object, ...]]:
    return {name: (each.dtype, each.shape) for name, each in checkpoint.required.tensors.items()}


def version_of(checkpoint: Checkpoint) -> int | None:
    """Return the version that the folder of a checkpoint records.

    Return None if the folder records no version.
    """
    source = checkpoint.source
    folder = source if isinstance(source, Folder) else checkpoint.folder
    if folder is None or STATE[0] not in folder.folders():
        return None
    inside = folder.sub(STATE[0])
    if STATE[1] not in inside:
        return None
    found = inside.open(STATE[1])
    try:
        return int(json.loads(found.read(0, min(found.size, 4096)))["version"])
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError("contains no version", where=found.name) from error


def _check_order(base: Checkpoint, delta: Delta, at: int | None) -> None:
    """Raise UsageError unless `delta` applies to version `at`, the version of `base`."""
    expected = delta.base_version
    if expected is None and delta.version is not None and at is not None:
        expected = delta.version - 1
    if expected is None or expected == at:
        return
    if at is None:
        option = typed(f"--base-version {expected}", f"base_version={expected}")
        raise UsageError(
            f"applies to version {expected:06d}, but {base.name or 'the base'} records no version",
            where=delta.name,
            hint=f"if the base is at version {expected:06d}, use {option}; {_VERIFY}",
        )
    raise UsageError(
        f"applies to version {expected:06d}, but {base.name or 'the base'} is at version {at:06d}",
        where=delta.name,
        hint="first apply the versions in between" if expected > at else _VERIFY,
    )


def _applied(base: Checkpoint, delta: Delta) -> Checkpoint:
    """Apply one delta to a checkpoint, and return the resulting checkpoint."""
    tensors = base.required.tensors
    if unknown := [name for name in delta.changes if name not in tensors]:
        raise UsageError(
            f"changes {quoted(unknown)}, which {base.name or 'the base'} does not have",
            where=delta.name,
            hint="`inspect --names` lists the names of the base",
        )
    spans: dict[int, list[_Span]] = {}  # the key is the id of a storage
    apart: dict[tuple[object, ...], Tensor] = {}  # tensors with a new storage
    for name, change in delta.changes.items():
        tensor = tensors[name]
        storage = tensor.storage
        if storage is None or tensor.layout != "strided":
            raise UnsupportedError(f"{shown(name)} is not a strided tensor", where=base.name)
        start, length = tensor.extent
        if not tensor.is_contiguous or tensor.conj or tensor.neg or storage.big_endian:
            record = change.applied(contiguous(tensor), delta.name)
            apart[tensor.elements_key] = Tensor(
                Storage(record, storage.device), tensor.dtype, tensor.shape,
                contiguous_stride(tensor.shape), 0, tensor.requires_grad, tensor.kind,
            )  # fmt: skip
        elif length:
            spans.setdefault(id(storage), []).append((start, start + length, name, change))
    storages = {id(tensor.storage): tensor.storage for tensor in tensors.values() if tensor.storage}
    changed = {key: _patched(storages[key], found, delta) for key, found in spans.items()}
    replaced = {key[0] for key in apart}
    for path, node in walk(base.root) if apart else ():
        if not isinstance(node, Tensor) or id(node.storage) not in replaced:
            continue
        if node.elements_key not in apart:
            raise UnsupportedError(
                f"{shown(join(path))} shares memory with a changed tensor, but has other strides: "
                "ckptkit cannot apply the change to both",
                where=base.name,
                hint="`ckptkit convert {where} {new} --format safetensors` separates them",
            )

    def leaf(node: Node) -> Node:
        if isinstance(node, Tensor) and node.elements_key in apart:
            new = apart[node.elements_key]
            return replace(new, requires_grad=node.requires_grad, kind=node.kind)
        if isinstance(node, Tensor) and id(node.storage) in changed:
            return node.over(changed[id(node.storage)])
        if isinstance(node, TypedStorage) and id(node.storage) in changed:
            return replace(node, storage=changed[id(node.storage)])
        return node

    changes = plural(len(delta.changes), "tensor")
    at = "" if delta.version is None else f"version {delta.version:06d}: "
    return base.with_root(rebuild(base.root, leaf), notes=[f"{at}{changes} changed"])


# A byte range of a storage (start, stop), and the change of the tensor in this range.
_Span = tuple[int, int, str, Change]


def _patched(storage: Storage, spans: list[_Span], delta: Delta) -> Storage:
    """Apply the changes of all spans to a storage. Tied tensors have equal spans."""
    records: list[Record] = []
    at, last = 0, None
    for span in sorted(spans, key=lambda each: each[:2]):
        start, stop, name, change = span
        if last is not None and last[:2] == (start, stop):
            if change.checksum is None or change.checksum != last[3].checksum:
                what = f"changes {shown(last[2])} and {shown(name)}, which share memory"
                raise CorruptError(f"{what}, in different ways", where=delta.name)
            continue
        if last is not None and start < at:
            what = f"{shown(last[2])} and {shown(name)} overlap in memory"
            raise UnsupportedError(f"{what}, which deltas do not support", where=delta.name)
        if start > at:
            records.append(RecordSlice(storage.record, at, start - at))
        whole = stop - start == storage.nbytes
        base = storage.record if whole else RecordSlice(storage.record, start, stop - start)
        records.append(change.applied(base, delta.name))
        at, last = stop, span
    if at < storage.nbytes:
        records.append(RecordSlice(storage.record, at, storage.nbytes - at))
    joined = records[0] if len(records) == 1 else Pending(Concat(), (*records,), storage.nbytes)
    return replace(storage, record=joined, crc32=None)


@dataclass(frozen=True, slots=True)
class Position:
    """The version of a checkpoint in a chain of deltas, found by checksums.

    ``versions`` maps the name of each changed tensor to the versions whose checksum matches the
    tensor's current bytes. If no version matches, the tuple of versions is empty. ``version`` is
    the latest version that matches all changed tensors, or None. ``recorded`` is the version that
    the checkpoint's folder records, or None.
    """

    versions: dict[str, tuple[int, ...]]
    version: int | None
    recorded: int | None

    @property
    def strangers(self) -> list[str]:
        """Names of the tensors whose current bytes match no version."""
        return [name for name, found in self.versions.items() if not found]


def verify_delta(base: Source, deltas: Paths) -> Position:
    """Find the version of a checkpoint in a chain of deltas by comparing checksums.

    `verify_delta` reads the tensors that the deltas change, and writes nothing. To detect the
    version before the first delta, `verify_delta` applies the first delta in memory.
    """
    found = [each for each in read_all(deltas) if each.encoding != WHOLE]
    if not found or any(each.version is None or not each.is_proven for each in found):
        raise UsageError("ckptkit can verify only deltas with versions and checksums")
    with open_checkpoint(base) as checkpoint:
        tensors = checkpoint.required.tensors
        names = dict.fromkeys(name for each in found for name in each.changes)
        if missing := [name for name in names if name not in tensors]:
            raise UsageError(f"lacks tensors of the deltas: {quoted(missing)}", where=str(base))
        known = {name: _versions_of(name, tensors[name], found) for name in names}
        common = {each.version for each in found} | {found[0].base_version}
        for of_one in known.values():
            common &= set(of_one)
        version = max((each for each in common if each is not None), default=None)
        return Position(known, version, version_of(checkpoint))


def _versions_of(name: str, tensor: Tensor, deltas: Sequence[Delta]) -> tuple[int, ...]:
    """Return the versions in which the tensor `name` has the bytes of `tensor`."""
    digests: dict[str, str] = {}
    found: list[int | None] = []
    # `latest` is True if the latest change of the tensor results in the bytes of `tensor`.
    latest = False
    for delta in deltas:
        change = delta.changes.get(name)
        if change is not None and change.checksum is not None:
            algorithm, digest = change.checksum
            if algorithm not in digests:
                total = hashing(algorithm)
                for piece in stream_reusing_buffer(contiguous(tensor).locate()):
                    total.update(piece)
                digests[algorithm] = total.hexdigest()
            latest = digests[algorithm] == digest
        if latest:
            found.append(delta.version)
    if not found:  # the current bytes may be older than the first change
        changes = [delta.changes.get(name) for delta in deltas]
        first = next(number for number, change in enumerate(changes) if change is not None)
        made = deltas[first].changes[name].applied(contiguous(tensor), deltas[first].name)
        try:  # the last byte is read only if the checksum matches
            for _ in stream_reusing_buffer(made.locate()):
                pass
            found = [deltas[0].base_version, *(delta.version for delta in deltas[:first])]
        except CorruptError:
            return ()
    return tuple(version for version in found if version is not None)
