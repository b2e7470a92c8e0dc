"""Plan safetensors files: the tensors, their order, the header.

The layout is in :mod:`safetensors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptkit import compute
from ckptkit.core.bytesource import Extent, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError, UnsafeGlobalError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import owners, shown, some, typed, typed_value, without
from ckptkit.formats.common.dropped import leftovers, refuse_objects, refuse_pieces, shared_bytes
from ckptkit.formats.common.plain_json import dump, is_utf8
from ckptkit.formats.common.saved_record import (
    FRAMEWORK,
    RESERVED,
    VERSION,
    WHOLE,
    lost_attributes,
    record,
    values,
)
from ckptkit.formats.format import WriteOptions
from ckptkit.formats.safetensors.header import METADATA

# High ranks first in a file (`Dtype` in safetensors/src/tensor.rs): larger types are aligned
# without padding.
_CODES = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip
_RANK = {code: rank for rank, code in enumerate(_CODES)}


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """Plan a file of the weights and of what `__metadata__` can hold; the notes name the rest.

    Raises TensorError for tensors that the format does not know, LimitError for a header that no
    reader accepts, UnsafeGlobalError for objects if these are to be an error.
    """
    tensors, metadata, notes = contents(checkpoint, options)
    whole = len(tensors) if options.everything or checkpoint.origin is WHOLE else None
    file = file_of(tensors, metadata)
    return Plan((file,), tuple(notes), whole)


class Contents(NamedTuple):
    """The tensors of a file, in order; values for its `__metadata__`; notes on what is left out."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str | None]
    notes: Sequence[str]


def contents(checkpoint: Checkpoint, options: WriteOptions) -> Contents:
    """Choose what is written of a checkpoint. Raises like `layout`."""
    if options.everything or checkpoint.origin is WHOLE:  # an edit keeps a whole checkpoint whole
        return _whole(checkpoint, options)
    if options.objects == "error":
        refuse_objects(checkpoint)
    return prepared(checkpoint, options)


def prepared(checkpoint: Checkpoint, options: WriteOptions) -> Contents:
    """Choose the weights and the values that the metadata can hold. Raises like `layout`."""
    weights = checkpoint.required
    tensors = weights.tensors
    refuse_pieces(weights.nodes)
    _check_holdable(checkpoint, tensors)
    ties = _ties(tensors, checkpoint.extras) if options.ties == "alias" else {}
    stored = without(tensors, ties)
    extra, notes = leftovers(checkpoint)
    text = record(weights, ties, {**values(checkpoint.extras), **extra})
    metadata: dict[str, str | None] = {
        FRAMEWORK: "pt",
        **checkpoint.extras,
        **ties,
        RESERVED: text if options.record else None,
    }
    notes += [f"left out: {name} of the state_dict" for name in lost_attributes(weights.node)]
    notes += shared_bytes(stored)
    return Contents(stored, metadata, notes)


def _whole(checkpoint: Checkpoint, options: WriteOptions) -> Contents:
    """Choose the whole tree: see :mod:`whole`.

    Raises what the writer of .pth files raises: all of it must be restorable.
    """
    from ckptkit.formats.safetensors.whole import Whole, record_of
    from ckptkit.formats.torch_zip.writer import Numbering
    from ckptkit.pickles.objects import without_objects
    from ckptkit.pickles.writer import write_pickle

    root, strict = checkpoint.root, options.objects == "error"
    notes: tuple[str, ...] = ()
    if options.objects != "keep":
        root, notes = without_objects(root, may_be_empty=strict)
    if notes and strict:
        raise UnsafeGlobalError(
            f"would not be whole: {notes[0]}",
            hint=f"{typed_value('objects', 'keep')} keeps them, "
            f"{typed_value('objects', 'drop')} leaves them out",
        )
    write_pickle(root, Numbering())
    whole = Whole(root, _obstacle)
    text = dump({"version": VERSION, **record_of(whole), "values": values(checkpoint.extras)})
    metadata: dict[str, str | None] = {
        FRAMEWORK: "pt",
        **whole.ties,
        **checkpoint.extras,
        RESERVED: text,
    }
    return Contents(whole.tensors, metadata, notes)


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str | None]) -> OutputFile:
    """Plan one file of these tensors, none of them tied, and these metadata (None: nothing)."""
    order = sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype.safetensors or ""], name))
    extents = _joined(
        compute.contiguous(tensors[name]).locate() for name in order if tensors[name].nbytes
    )
    header = _header_bytes(tensors, order, metadata)
    return OutputFile("", (header, *extents))


def _check_holdable(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    refused = [(name, why) for name, tensor in tensors.items() if (why := _obstacle(name, tensor))]
    if refused:
        named = some((f"{shown(name)} ({why})" for name, why in refused), 3)
        raise TensorError(
            f"safetensors cannot hold {named}",
            hint=_way_out({why for _, why in refused}, checkpoint),
        )


def _way_out(obstacles: set[str], checkpoint: Checkpoint) -> str:
    if obstacles == {"complex128"}:
        return f"{typed('--cast complex64', 'cast to complex64')} halves their precision"
    if all(why in BY_NAME and BY_NAME[why].kind == "quantized" for why in obstacles):
        return f"{typed('--dequantize', 'dequantize')} makes float32 of them"
    if "subclass" in obstacles:
        from ckptkit import quantized

        kept = f"a .pth keeps them, and {typed('--all', 'everything=True')} does"
        floats = f"{typed('--dequantize', 'dequantize')} converts quantized ones to floats; "
        return floats + kept if quantized.find(checkpoint) else kept
    return f"{typed('--drop', 'select(drop=...)')} leaves them out"


def _obstacle(name: str, tensor: Tensor) -> str | None:
    """Return why the format cannot hold a tensor, None if it can."""
    if name == METADATA or len(name) > LIMITS.name_bytes or not is_utf8(name):
        return "a name that the header cannot have"
    if tensor.layout != "strided":
        return tensor.layout
    if tensor.storage is None:
        return "meta"
    if tensor.dtype.safetensors is None:
        return tensor.dtype.name
    if tensor.dtype.packed > 1 and not tensor.shape:
        return f"{tensor.dtype} without dimensions"
    return None


def _ties(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Map names of the same elements of the same storage to the first of them in the alphabet.

    A name that is a key of the metadata cannot be recorded as tied: it is written on its own.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if 0 not in tensor.shape:
            same = tensor.elements_key
            groups.setdefault(same, []).append(name)
    taken = {FRAMEWORK, RESERVED, *metadata}
    kept = owners((min(names), names) for names in groups.values() if len(names) > 1)
    return {name: first for name, first in kept.items() if name != first and name not in taken}


def _header_bytes(
    tensors: Mapping[str, Tensor],
    order: Iterable[str],
    metadata: Mapping[str, str | None],
) -> bytes:
    """Return length and header, padded so that the buffer begins at a multiple of 8."""
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        offsets[name] = end
        end += tensors[name].nbytes
    text = header_text(tensors, offsets, metadata)
    text += b" " * (-len(text) % 8)
    check("safetensors_header_bytes", len(text), "bytes of the header")
    return len(text).to_bytes(8, "little") + text


def header_text(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, int], metadata: Mapping[str, str | None]
) -> bytes:
    """Return the JSON of a header; `offsets` gives the begin of each tensor in the buffer."""
    header: dict[str, Any] = {
        METADATA: {key: text for key, text in metadata.items() if text is not None}
    }
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, list(tensor.shape)
        if dtype.packed > 1:
            shape[-1] *= dtype.packed
        span = [offsets[name], offsets[name] + tensor.nbytes]
        header[name] = {"dtype": dtype.safetensors, "shape": shape, "data_offsets": span}
    return dump(header).encode()


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Merge ranges that follow each other in their source."""
    row: list[Extent] = []
    for extent in extents:
        last = row[-1] if row else None
        if isinstance(last, Range) and isinstance(extent, Range) and _follows(last, extent):
            row[-1] = last._replace(length=last.length + extent.length)
        else:
            row.append(extent)
    return row


def _follows(last: Range, extent: Range) -> bool:
    return last.source is extent.source and last.offset + last.length == extent.offset
