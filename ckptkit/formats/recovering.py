"""Recover a damaged checkpoint: return its tree without the lost tensors, and the list of losses.

A safetensors file has no checksums. `recover` checks each entry of the file's header separately. If
ckptkit finds damage while it writes an output, `damaged_in` returns the affected tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.bytesource import ByteSource, Memory, Range, leaves
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    NO_CHECKSUM,
    AmbiguousError,
    CkptkitError,
    CorruptError,
    InputError,
    Notice,
)
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import some
from ckptkit.core.tree import Node, Path, StoredBytes, join, nodes, type_name, walk
from ckptkit.core.weights import as_tensor, plain_state_dict
from ckptkit.formats import format
from ckptkit.formats.format import Loss, Probe, Recovered
from ckptkit.formats.record import WHOLE, restore
from ckptkit.formats.safetensors import Kinds, matches, read_entry, read_header, read_text
from ckptkit.pickles.policy import without

AGAIN = "download or copy it again"
UNVERIFIED = (
    f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` keeps the tensors inside the file, "
    "even if their bytes are shifted"
)
# If a file ends with at least this number of zeros, the save was probably interrupted.
_ZEROS = 512
_STEP = 1 << 20

Why = Callable[[Storage], str | None]  # returns why a storage is lost, or None if it is intact


def recovered(checkpoint: Checkpoint, why: Why, hint: str = AGAIN) -> Recovered:
    """Return the checkpoint without the nodes that refer to lost storages.

    If a dict contains a lost value, remove the key of this value. In other containers, replace a
    lost value by None. If a tensor of a pickled module is lost, the state_dict of the module
    replaces the module. Raises CorruptError with `hint` if no tensor is intact.
    """
    reasons: dict[int, str | None] = {}  # reasons of losses, by id of a node or storage
    keep: list[Any] = []  # examined nodes and storages, kept alive so that their ids stay unique

    def examined(part: Any, find: Callable[[Any], str | None]) -> str | None:
        if id(part) not in reasons:
            keep.append(part)
            reasons[id(part)] = find(part)
        return reasons[id(part)]

    def reason(root: Node) -> str | None:
        held = (
            Storage(node.extent) if isinstance(node, StoredBytes) else node.storage
            for node in nodes(root)
            if isinstance(node, (Tensor, TypedStorage, StoredBytes))
        )
        found = (examined(storage, why) for storage in held if storage is not None)
        return next((each for each in found if each is not None), None)

    def is_lost(node: Node) -> bool:
        return not isinstance(node, (str, bytes)) and examined(node, reason) is not None

    def losses(found: Iterable[tuple[Path, Node]]) -> tuple[Loss, ...]:
        return tuple(
            Loss(join(path), _what(node), examined(node, reason) or "") for path, node in found
        )

    root, found = without(checkpoint.root, is_lost)
    lost, notes = losses(found), checkpoint.notes
    if not lost:
        if not _has_tensors(root):
            raise CorruptError("it contains no tensors", hint="there is nothing to recover")
        return Recovered(checkpoint, ())
    try:
        weights = checkpoint.selection
    except AmbiguousError:
        weights = None
    if weights is not None and weights.is_module:
        root, found = without(plain_state_dict(weights.nodes), is_lost)
        lost = losses(found)
        notes = (*notes, "the module became a state_dict of its intact tensors")
    if not _has_tensors(root, 1):
        raise nothing(lost, hint)
    return Recovered(replace(checkpoint, root=root, notes=notes), lost)


def _has_tensors(root: Node, least: int = 0) -> bool:
    """Return whether a tree contains a tensor of at least `least` bytes."""
    tensors = (as_tensor(node) for _, node in walk(root))
    return any(tensor is not None and tensor.nbytes >= least for tensor in tensors)


def nothing(lost: Sequence[Loss] = (), hint: str = AGAIN) -> CorruptError:
    """Return the error for a file without intact tensors, with the reason of the first loss."""
    why = f": {lost[0].why}" if lost else ""
    return CorruptError(f"no tensor in it is intact{why}", hint=hint)


def unsummed() -> Notice:
    """Return the warning that ckptkit cannot detect all damage in a file without checksums."""
    text = (
        "it has no checksums: ckptkit cannot detect whether names, shapes and values contain "
        "changed bytes, or bytes of an older save"
    )
    return Notice(NO_CHECKSUM, text)


def zeros_from(source: ByteSource) -> int:
    """Return the offset at which the zeros at the end of a file begin.

    If the file ends with fewer than 512 zeros, return its size. Many zeros suggest that the save
    was interrupted.
    """
    stop, step = source.size, _ZEROS
    while stop > 0:
        start = max(0, stop - step)
        rest = source.read(start, stop - start).rstrip(b"\0")
        stop, step = start + len(rest), min(8 * step, _STEP)
        if rest:
            break
    return stop if source.size - stop >= _ZEROS else source.size


def _what(node: Node) -> str:
    tensor = as_tensor(node)
    if tensor is not None:
        return f"{tensor.dtype} {list(tensor.shape)}"
    return type_name(node)


# Damage that is found while an output is written


_NAMED = 4  # maximum number of tensor names in a message


def tensors(root: Node) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a tree once, with its first path."""
    seen: set[int] = set()
    for path, node in walk(root):
        tensor = as_tensor(node)
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield join(path), tensor


def located(tensor: Tensor) -> list[Range]:
    """Return where the bytes of a tensor are, as byte ranges of files."""
    try:
        return [] if tensor.storage is None else list(leaves(tensor.storage.record.locate()))
    except InputError:  # the reader reports this error
        return []


def overlap(a: Range, b: Range) -> bool:
    same = a.source.identity == b.source.identity
    return same and a.offset < b.offset + b.length and b.offset < a.offset + a.length


def damaged_in(checkpoint: Checkpoint, damaged: Sequence[Range]) -> str:
    """Return the names of at most four tensors that overlap the `damaged` byte ranges."""
    names = [
        name
        for name, tensor in tensors(checkpoint.root)
        if any(overlap(own, bad) for own in located(tensor) for bad in damaged)
    ]
    return some(names, _NAMED)


# Safetensors


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover the tensors of a safetensors file whose size matches its header.

    If the size does not match, bytes are missing or inserted at an unknown position, and all
    tensors may be shifted. If the file ends in many zeros, the save may have been interrupted, and
    tensors in the zeros are lost. If `unverified` is true, recover all tensors whose bytes are
    inside the file. Raises the errors of `read_header`.
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
    # Reason of each loss, by the empty source that replaces the lost bytes.
    reasons: dict[ByteSource | None, str] = {}
    for name, entry in header.items():
        try:
            kind, begin = read_entry(entry, Kinds())
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

    def reason(lost: Storage) -> str | None:
        extent = lost.record.locate()
        return reasons.get(extent.source if isinstance(extent, Range) else None)

    result = recovered(checkpoint, reason, hint)
    return replace(result, lost=(*invalid, *result.lost))


def recoverable(probe: Probe) -> str:
    """Return the command that may recover tensors, or "" if the header cannot be read."""
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
    """Describe missing or extra bytes after the header. Return "" if the size is right."""
    end = 0
    kinds = Kinds()
    for entry in header.values():
        try:
            kind, begin = read_entry(entry, kinds)
        except CkptkitError:
            continue
        end = max(end, begin + kind.nbytes)
    if end == size:
        return ""
    which = f"{end - size:,} bytes are missing" if end > size else f"{size - end:,} extra bytes"
    return f"its bytes may be shifted: {which} at an unknown position"


def _doubt(place: Range, shifted: str, zeros: int) -> str:
    """Return why the bytes of a tensor may be damaged, or "" if nothing suggests damage."""
    source, end = place.source, place.offset + place.length
    if end > source.size:
        return f"the file is truncated: {end - source.size:,} bytes are missing"
    if place.length and not shifted and end > zeros:
        return f"the file ends in {source.size - zeros:,} zeros; the save may be incomplete"
    return shifted if place.length else ""
