"""Recover a damaged checkpoint: the tree without tensors whose bytes are lost, and their list.

A safetensors file, which has no checksums, is recovered here, each entry of its header by itself.
`damaged_in` names the tensors concerned by damage that is found while a checkpoint is written.
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
    f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` keeps what is inside the file, "
    "shifted or not"
)
_ZEROS = 512  # zeros at the end of a file that was perhaps not written to its end
_STEP = 1 << 20

Why = Callable[[Storage], str | None]  # why the bytes of a storage are lost; None: they are intact


def recovered(checkpoint: Checkpoint, why: Why, hint: str = AGAIN) -> Recovered:
    """Return the checkpoint without everything that refers to lost storages.

    An entry of a mapping is removed with its key; elsewhere None replaces it. A pickled module that
    has lost a part becomes the state_dict of the rest. Raises CorruptError if no tensor is left,
    with `hint`.
    """
    reasons: dict[int, str | None] = {}  # by id: each node and storage is examined once
    keep: list[Any] = []  # ids stay taken

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
            raise CorruptError("it holds no tensors", hint="there is nothing to recover")
        return Recovered(checkpoint, ())
    try:
        weights = checkpoint.selection
    except AmbiguousError:
        weights = None
    if weights is not None and weights.is_module:
        root, found = without(plain_state_dict(weights.nodes), is_lost)
        lost = losses(found)
        notes = (*notes, "the module became a state_dict of the parts that are left")
    if not _has_tensors(root, 1):
        raise nothing(lost, hint)
    return Recovered(replace(checkpoint, root=root, notes=notes), lost)


def _has_tensors(root: Node, least: int = 0) -> bool:
    """Return whether a tree has a tensor of `least` bytes."""
    tensors = (as_tensor(node) for _, node in walk(root))
    return any(tensor is not None and tensor.nbytes >= least for tensor in tensors)


def nothing(lost: Sequence[Loss] = (), hint: str = AGAIN) -> CorruptError:
    """Make the error for a file without an intact tensor, with the reason for the first loss."""
    why = f": {lost[0].why}" if lost else ""
    return CorruptError(f"no tensor in it is intact{why}", hint=hint)


def unsummed() -> Notice:
    """Return the warning about what a file without checksums cannot prove."""
    text = (
        "it has no checksums: ckptkit cannot see changed bytes, or bytes of an older save, in its "
        "names, shapes and values"
    )
    return Notice(NO_CHECKSUM, text)


def zeros_from(source: ByteSource) -> int:
    """Return where the zeros at the end of a file begin; its size if there are fewer than 512.

    So many zeros may mean that the file was not written to its end.
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


# Damage that is found while a checkpoint is written


_NAMED = 4  # tensors in a message


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once, with the place where it is met first."""
    seen: set[int] = set()
    for path, node in walk(checkpoint.root):
        tensor = as_tensor(node)
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield join(path), tensor


def located(tensor: Tensor) -> list[Range]:
    """Return the byte ranges of files that a tensor is made of."""
    try:
        return [] if tensor.storage is None else list(leaves(tensor.storage.record.locate()))
    except InputError:  # said elsewhere
        return []


def overlap(a: Range, b: Range) -> bool:
    same = a.source.identity == b.source.identity
    return same and a.offset < b.offset + b.length and b.offset < a.offset + a.length


def damaged_in(checkpoint: Checkpoint, damaged: Sequence[Range]) -> str:
    """Return the names of the tensors whose bytes are in these ranges, some of many."""
    names = [
        name
        for name, tensor in tensors(checkpoint)
        if any(overlap(own, bad) for own in located(tensor) for bad in damaged)
    ]
    return some(names, _NAMED)


# Safetensors


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

    def reason(lost: Storage) -> str | None:
        extent = lost.record.locate()
        return reasons.get(extent.source if isinstance(extent, Range) else None)

    result = recovered(checkpoint, reason, hint)
    return replace(result, lost=(*invalid, *result.lost))


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
