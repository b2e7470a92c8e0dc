"""safetensors: named tensors, contiguous, little-endian, without views.

    u64 N | N bytes of JSON | buffer

    {"__metadata__": {text: text},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Offsets count from 8 + N. The ranges of all tensors tile the buffer from its first byte to the end of the file: no hole,
no overlap, no range with two names. N is at most 100,000,000; the header begins with ``{`` and may be padded with
white space. Two elements of F4 are one of torch's float4_e2m1fn_x2: the last dimension is half as long there.
Source: https://github.com/huggingface/safetensors (safetensors/src/tensor.rs).

Read more strictly than there: a repeated name, a field that the format does not have, more than 64 dimensions and
the dialects of :mod:`strict_json` are refused. A size of 2**63 or more is refused, also beside a size of 0.

Written as the library writes it, larger types first and then by name, the buffer 8-byte aligned; but the header lists
the tensors in the order of the state_dict. What else a header cannot say stands in ``__metadata__``: see
:mod:`safetensors_record`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit import bridge
from ckptkit.bytesource import ByteSource, Extent, Range
from ckptkit.checkpoint import Checkpoint
from ckptkit.dtypes import BY_SAFETENSORS, DType
from ckptkit.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TensorError,
    TruncatedError,
)
from ckptkit.formats import strict_json
from ckptkit.formats.format import Format, Probe, WriteOptions
from ckptkit.formats.leftovers import leftovers, refuse_objects
from ckptkit.formats.plain_json import dump, is_utf8
from ckptkit.formats.safetensors_record import FRAMEWORK, RESERVED, lost_attributes, record, restore, values
from ckptkit.limits import LIMITS, check
from ckptkit.plan import OutputFile, Plan
from ckptkit.tensor import Shape, Storage, Tensor, contiguous_stride

_WHITE = b" \t\r\n"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_METADATA = "__metadata__"


def matches(probe: Probe) -> bool:
    """A length, then an object. A length that cannot be is damage where the name says safetensors."""
    if probe.head[8:].lstrip(_WHITE)[:1] != b"{":
        return False
    length = int.from_bytes(probe.head[:8], "little")
    return length <= LIMITS.safetensors_header_bytes or probe.name.endswith(".safetensors")


def read(probe: Probe) -> Checkpoint:
    """The tensors in the order of the header; then what ckptkit or the hub's convention left in the metadata."""
    source = probe.source
    text, header, metadata = _header(source)
    root, metadata, warnings = restore(_tensors(header, source, 8 + len(text)), metadata)
    if not text.startswith(b"{"):
        warnings = ("the header begins with white space", *warnings)
    return Checkpoint(root, FORMAT.name, source, metadata, warnings=warnings)


def _header(source: ByteSource) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    length = int.from_bytes(source.read(0, 8), "little")
    check("safetensors_header_bytes", length, "bytes of the header")
    text = source.read(8, length)
    header = strict_json.parse(text, "the header")
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    metadata = header.pop(_METADATA, None)
    if metadata is None:
        return text, header, {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{_METADATA} is not an object of texts")
    return text, header, metadata


def _tensors(header: dict[str, Any], source: ByteSource, start: int) -> dict[str, Tensor]:
    """The header with each entry replaced by its tensor: a copy of a large one would be a second hundred megabytes."""
    check("name_bytes", max(map(len, header), default=0), "characters of a tensor's name")
    spans: list[tuple[int, int, str]] = []
    strides: dict[Shape, Shape] = {}  # most tensors share a few shapes
    for name, entry in header.items():
        try:
            dtype, shape, begin, end = _entry(entry)
            if shape not in strides:
                strides[shape] = contiguous_stride(shape)
            header[name] = Tensor(Storage(Range(source, start + begin, end - begin)), dtype, shape, strides[shape])
        except CkptkitError as error:
            error.message = f"tensor {_shown(name)}: {error.message}"
            raise
        spans.append((begin, end, name))
    _check_tiles(spans, source.size - start)
    return header


def _entry(entry: Any) -> tuple[DType, Shape, int, int]:
    """One tensor's dtype, shape as torch has it, begin and end."""
    try:
        code, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        raise FormatError("its entry lacks one of dtype, shape and data_offsets") from error
    if len(entry) > len(_FIELDS):
        raise AmbiguousError(f"its entry has the unknown field {_shown(min(entry.keys() - _FIELDS))}")
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(f"unknown dtype {_shown(code)}")
    shape, offsets = _naturals(sizes, "shape"), _naturals(offsets, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"data_offsets {_shown(offsets)} are not a begin and an end")
    if len(shape) > LIMITS.rank:
        raise TensorError(f"{len(shape):,} dimensions, more than {LIMITS.rank}")
    elements = math.prod(shape)
    bits = dtype.bits // dtype.packed
    if elements * bits != (offsets[1] - offsets[0]) * 8:
        raise FormatError(f"shape {_shown(shape)} of {dtype} does not fill {offsets[1] - offsets[0]:,} bytes")
    return dtype, shape if dtype.packed == 1 else _packed(shape, dtype), offsets[0], offsets[1]


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{what} is not a list")
    for n in value:
        if type(n) is not int or n < 0:
            raise FormatError(f"{what} is not a list of non-negative integers")
    return tuple(value)


def _packed(shape: Shape, dtype: DType) -> Shape:
    if shape[-1] % dtype.packed:
        raise FormatError(f"the last dimension of shape {_shown(shape)} is odd: {dtype} holds pairs")
    return (*shape[:-1], shape[-1] // dtype.packed)


def _check_tiles(spans: list[tuple[int, int, str]], size: int) -> None:
    """Sorted, each range begins where the one before ends, and the last ends with the file."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            wrong = "a hole before it" if begin > reached else "it overlaps another tensor"
            raise FormatError(f"tensor {_shown(name)}: begins at {begin:,}, not at {reached:,}: {wrong}")
        reached = end
    if reached > size:
        raise TruncatedError(
            f"ends {reached - size:,} bytes too early: the header tells of {reached:,} bytes of tensors",
            hint="the file is cut: download or copy it again",
        )
    if reached < size:
        raise CorruptError(f"{size - reached:,} bytes follow the last tensor")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


# High ranks first in a file (`Dtype` in safetensors/src/tensor.rs): larger types lie aligned without padding.
_CODES = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip
_RANK = {BY_SAFETENSORS[code]: rank for rank, code in enumerate(_CODES)}


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """The weights, and beside them what `__metadata__` can hold; the notes name the rest.

    Raises TensorError for tensors that the format does not know, LimitError for a header that no reader accepts,
    UnsafeGlobalError for objects if these are to be an error.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    weights = checkpoint.required
    tensors = weights.tensors
    _check_holdable(tensors)
    ties = _ties(tensors, checkpoint.metadata) if options.ties == "alias" else {}
    stored = {name: tensor for name, tensor in tensors.items() if name not in ties}
    beside, notes = leftovers(checkpoint)
    said = record(weights, ties, {**values(checkpoint.metadata), **beside})
    metadata = {FRAMEWORK: "pt", **checkpoint.metadata, **ties, RESERVED: said}
    order = sorted(stored, key=lambda name: (_RANK[stored[name].dtype], name))
    notes += [f"left out: {name} of the state_dict" for name in lost_attributes(weights.node)]
    notes += _overlaps(stored)
    segments = (
        _header_bytes(stored, order, metadata),
        *_joined(bridge.contiguous(stored[name]).locate() for name in order if stored[name].nbytes),
    )
    return Plan((OutputFile("", segments),), tuple(notes))


def _check_holdable(tensors: Mapping[str, Tensor]) -> None:
    refused = [(name, why) for name, tensor in tensors.items() if (why := _obstacle(name, tensor))]
    if refused:
        shown = ", ".join(f"{_shown(name)} ({why})" for name, why in refused[:3])
        more = f" and {len(refused) - 3:,} more" if len(refused) > 3 else ""
        cast = all(why == "complex128" for _, why in refused)
        raise TensorError(
            f"safetensors cannot hold {shown}{more}",
            hint="`--cast complex64` halves their precision" if cast else "leave them out with `--drop NAME`",
        )


def _obstacle(name: str, tensor: Tensor) -> str | None:
    """Why the format has no place for a tensor."""
    if name == _METADATA or len(name) > LIMITS.name_bytes or not is_utf8(name):
        return "a name that the header cannot have"
    if tensor.storage is None or tensor.layout != "strided":
        return "meta" if tensor.storage is None else tensor.layout
    if tensor.dtype.safetensors is None:
        return tensor.dtype.name
    if tensor.dtype.packed > 1 and not tensor.shape:
        return f"{tensor.dtype} without dimensions"
    return None


def _ties(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Names of the same elements of the same storage, each with the first of them in the alphabet.

    A name that is a key of the metadata cannot be recorded as tied: it is written on its own.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if 0 not in tensor.shape:
            same = (
                id(tensor.storage),
                tensor.dtype,
                tensor.shape,
                tensor.stride,
                tensor.offset,
                tensor.conj,
                tensor.neg,
            )
            groups.setdefault(same, []).append(name)
    taken = {FRAMEWORK, RESERVED, *metadata}
    kept = {name: min(names) for names in groups.values() if len(names) > 1 for name in names}
    return {name: first for name, first in kept.items() if name != first and name not in taken}


def _overlaps(tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that share bytes, which will be written for each."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault(id(tensor.storage), []).append(tensor)
    count = 0
    for sharing in by_storage.values():
        reached = 0
        for start, length in sorted(tensor.extent for tensor in sharing) if len(sharing) > 1 else ():
            count += start < reached
            reached = max(reached, start + length)
    return [f"tensors that share memory with others: {count:,}; their bytes are written for each"] if count else []


def _header_bytes(tensors: Mapping[str, Tensor], order: Iterable[str], metadata: Mapping[str, str | None]) -> bytes:
    """Length and header, padded so that the buffer begins at a multiple of 8."""
    offsets: dict[str, list[int]] = {}
    end = 0
    for name in order:
        offsets[name] = [end, end + tensors[name].nbytes]
        end = offsets[name][1]
    header: dict[str, Any] = {_METADATA: {key: text for key, text in metadata.items() if text is not None}}
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, list(tensor.shape)
        if dtype.packed > 1:
            shape[-1] *= dtype.packed
        header[name] = {"dtype": dtype.safetensors, "shape": shape, "data_offsets": offsets[name]}
    text = dump(header).encode()
    text += b" " * (-len(text) % 8)
    check("safetensors_header_bytes", len(text), "bytes of the header")
    return len(text).to_bytes(8, "little") + text


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes in fewer pieces: ranges that follow each other in their source are one."""
    row: list[Extent] = []
    for extent in extents:
        last = row[-1] if row else None
        if isinstance(last, Range) and isinstance(extent, Range) and _follows(last, extent):
            row[-1] = last._replace(length=last.length + extent.length)
        elif extent.length:
            row.append(extent)
    return row


def _follows(last: Range, extent: Range) -> bool:
    return last.source is extent.source and last.offset + last.length == extent.offset


FORMAT = Format("safetensors", "safetensors", matches, read, (".safetensors",), layout)
