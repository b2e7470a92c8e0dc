"""Recover a damaged checkpoint: return its tree without the lost tensors, and the list of losses.

A safetensors file has no checksums. `recover` checks each entry of the file's header separately. If
ckptkit finds damage while it writes an output, `damaged_in` returns the affected tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

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
from ckptkit.core.tree import Node, StoredBytes, join, nodes, type_name, walk
from ckptkit.core.weights import as_tensor, plain_state_dict
from ckptkit.formats.format import Loss, Probe, Recovered
from ckptkit.formats.record import WHOLE, restore
from ckptkit.formats.safetensors import (
    DtypeAndShape,
    Kinds,
    matches,
    read_entry,
    read_header,
    read_text,
)
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
    reasons: dict[int, str | None] = {}  # reasons of losses, by id of a node

    def reason(root: Node) -> str | None:
        if isinstance(root, (str, bytes)):
            return None
        if id(root) not in reasons:
            held = (
                Storage(node.extent) if isinstance(node, StoredBytes) else node.storage
                for node in nodes(root)
                if isinstance(node, (Tensor, TypedStorage, StoredBytes))
            )
            found = (why(storage) for storage in held if storage is not None)
            reasons[id(root)] = next((each for each in found if each is not None), None)
        return reasons[id(root)]

    def pruned(root: Node) -> tuple[Node, tuple[Loss, ...]]:
        """Return a tree without lost nodes, and the losses. The caller keeps `root` alive."""
        kept, found = without(root, lambda node: reason(node) is not None)
        losses = []
        for path, node in found:
            tensor = as_tensor(node)
            what = f"{tensor.dtype} {list(tensor.shape)}" if tensor else type_name(node)
            losses.append(Loss(join(path), what, reason(node) or ""))
        return kept, tuple(losses)

    root, lost = pruned(checkpoint.root)
    if not lost:
        if not _has_tensors(root):
            raise CorruptError("it contains no tensors", hint="there is nothing to recover")
        return Recovered(checkpoint, ())
    notes = checkpoint.notes
    try:
        weights = checkpoint.selection
    except AmbiguousError:
        weights = None
    if weights is not None and weights.is_module:
        plain = plain_state_dict(weights.nodes)
        root, lost = pruned(plain)
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


# Damage that is found while an output is written


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
    return some(names, 4)


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
    places, metadata, invalid, shifted = _entries(source)
    zeros = source.size if unverified else zeros_from(source)
    shifted = "" if unverified else shifted
    tensors: dict[str, Tensor] = {}
    # Reason of each loss, by the empty source that replaces the lost bytes.
    reasons: dict[ByteSource | None, str] = {}
    for name, (kind, place) in places.items():
        end, why = place.offset + place.length, shifted if place.length else ""
        if end > source.size:
            why = f"the file is truncated: {end - source.size:,} bytes are missing"
        elif place.length and not shifted and end > zeros:
            why = f"the file ends in {source.size - zeros:,} zeros; the save may be incomplete"
        if why:
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


def _entries(
    source: ByteSource,
) -> tuple[dict[str, tuple[DtypeAndShape, Range]], dict[str, str], list[Loss], str]:
    """Return the valid entries of a header, the metadata, and the invalid entries.

    The last item describes missing or extra bytes after the header. It is "" if the size is right.
    """
    text = read_text(source)
    header, metadata = read_header(text)
    places: dict[str, tuple[DtypeAndShape, Range]] = {}
    invalid: list[Loss] = []
    kinds = Kinds()
    end = start = 8 + len(text)
    for name, entry in header.items():
        try:
            kind, begin = read_entry(entry, kinds)
        except CkptkitError as error:
            invalid.append(Loss(name, "an entry", error.message))
            continue
        places[name] = kind, Range(source, start + begin, kind.nbytes)
        end = max(end, start + begin + kind.nbytes)
    lacking = end - source.size
    which = f"{lacking:,} bytes are missing" if lacking > 0 else f"{-lacking:,} extra bytes"
    shifted = f"its bytes may be shifted: {which} at an unknown position" if lacking else ""
    return places, metadata, invalid, shifted
