"""The header of a safetensors file: JSON that locates the tensors.

The layout is in :mod:`safetensors`.
"""

from __future__ import annotations

import math
from typing import Any

from ckptkit.containers import strict_json
from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.dtypes import BY_SAFETENSORS, FLOAT4, DType
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TruncatedError,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shown
from ckptkit.formats.format import Probe

_WHITE = b" \t\r\n"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
METADATA = "__metadata__"


def matches(probe: Probe) -> bool:
    """Recognize a length followed by an object.

    An impossible length is damage where the name ends in safetensors.
    """
    if probe.head[8:].lstrip(_WHITE)[:1] != b"{":
        return False
    length = int.from_bytes(probe.head[:8], "little")
    return length <= LIMITS.safetensors_header_bytes or probe.name.endswith(".safetensors")


def read_header(source: ByteSource) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """Read the text of the header, its entries, and its metadata."""
    length = int.from_bytes(source.read(0, 8), "little")
    check("safetensors_header_bytes", length, "bytes of the header")
    text = source.read(8, length)
    header = strict_json.parse(text, "the header")
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    metadata = header.pop(METADATA, None)
    if metadata is None:
        return text, header, {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(f"{METADATA} is not an object of texts")
    return text, header, metadata


def read_tensors(header: dict[str, Any], source: ByteSource, start: int) -> dict[str, Tensor]:
    """Replace each entry of the header by its tensor.

    A copy of a large header would take a second hundred megabytes.
    """
    check("name_bytes", max(map(len, header), default=0), "characters of a tensor's name")
    spans: list[tuple[int, int, str]] = []
    strides: dict[Shape, Shape] = {}  # most tensors share a few shapes
    for name, entry in header.items():
        try:
            dtype, shape, begin, end = read_entry(entry)
            if shape not in strides:
                strides[shape] = contiguous_stride(shape)
            header[name] = Tensor(
                Storage(Range(source, start + begin, end - begin)), dtype, shape, strides[shape]
            )
        except CkptkitError as error:
            error.message = f"tensor {shown(name)}: {error.message}"
            raise
        spans.append((begin, end, name))
    _check_tiles(spans, source.size - start)
    return header


def read_entry(entry: Any) -> tuple[DType, Shape, int, int]:
    """Parse one tensor's dtype, its shape in torch, begin and end."""
    try:
        code, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        raise FormatError("its entry lacks one of dtype, shape and data_offsets") from error
    if len(entry) > len(_FIELDS):
        raise AmbiguousError(
            f"its entry has the unknown field {shown(min(entry.keys() - _FIELDS))}"
        )
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(f"unknown dtype {shown(code)}")
    shape, offsets = _naturals(sizes, "shape"), _naturals(offsets, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"data_offsets {shown(offsets)} are not a begin and an end")
    if len(shape) > LIMITS.rank:
        check("rank", len(shape), "dimensions of a tensor")
    elements = math.prod(shape)
    bits = dtype.bits // dtype.packed
    if elements * bits != (offsets[1] - offsets[0]) * 8:
        raise FormatError(
            f"shape {shown(shape)} of {dtype} does not fill {offsets[1] - offsets[0]:,} bytes"
        )
    if dtype.packed > 1:
        dtype, shape = _packed(dtype, shape)
    return dtype, shape, offsets[0], offsets[1]


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{what} is not a list")
    for n in value:
        if type(n) is not int or n < 0:
            raise FormatError(f"{what} is not a list of non-negative integers")
    return tuple(value)


def _packed(dtype: DType, shape: Shape) -> tuple[DType, Shape]:
    """Return dtype and shape of packed pairs in torch; of elements if the last dimension is odd."""
    if shape[-1] % dtype.packed:
        return FLOAT4, shape
    return dtype, (*shape[:-1], shape[-1] // dtype.packed)


def _check_tiles(spans: list[tuple[int, int, str]], size: int) -> None:
    """Check that, sorted, each range begins where the last one ends, up to the end of the file."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            wrong = "a hole before it" if begin > reached else "it overlaps another tensor"
            raise FormatError(
                f"tensor {shown(name)}: begins at {begin:,}, not at {reached:,}: {wrong}"
            )
        reached = end
    if reached > size:
        raise TruncatedError(
            f"ends {reached - size:,} bytes too early: "
            f"the header lists {reached:,} bytes of tensors",
            hint="download or copy it again",
        )
    if reached < size:
        raise CorruptError(f"{size - reached:,} bytes follow the last tensor")
