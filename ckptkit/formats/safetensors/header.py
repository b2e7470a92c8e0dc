"""The header of a safetensors file: JSON that locates the tensors.

The layout is in :mod:`safetensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import itemgetter, sub
from typing import Any, NamedTuple

from ckptkit.core.bytesource import ByteSource, Memory, Range
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
from ckptkit.core.text import flatten, shown
from ckptkit.formats.containers import strict_json
from ckptkit.formats.format import Probe

_WHITE = b" \t\r\n"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
METADATA = "__metadata__"
# What Range() calls, too, but from Python.
_NEW_RANGE: Callable[[type[Range], tuple[ByteSource, int, int]], Range] = tuple.__new__


def matches(probe: Probe) -> bool:
    """Recognize a length followed by an object.

    An impossible length is damage where the name ends in safetensors.
    """
    if probe.head[8:].lstrip(_WHITE)[:1] != b"{":
        return False
    length = int.from_bytes(probe.head[:8], "little")
    return length <= LIMITS.safetensors_header_bytes or probe.name.endswith(".safetensors")


def read_text(source: ByteSource) -> bytes:
    """Read the text of the header."""
    length = int.from_bytes(source.read(0, 8), "little")
    check("safetensors_header_bytes", length, "bytes of the header")
    return source.read(8, length)


def read_header(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the entries of the header, which are not checked, and its metadata."""
    return _apart(strict_json.parse(text, "the header"))


def _apart(header: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of a header and its metadata."""
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    metadata = header.pop(METADATA, None)
    if metadata is None:
        return header, {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(f"{METADATA} is not an object of texts")
    return header, metadata


class Kind(NamedTuple):
    """A dtype and shape that tensors of a file have in common, and the number of their bytes."""

    like: Tensor  # over no bytes of the file
    nbytes: int

    def tensor(self, source: ByteSource, offset: int) -> Tensor:
        """Return the tensor of this kind whose bytes begin at `offset`."""
        return self.like.over(Storage(_NEW_RANGE(Range, (source, offset, self.nbytes))))


Kinds = dict[tuple[str, Shape], Kind]


class _NewKinds(Kinds):
    """Kinds by code and shape, each made when it is first looked up."""

    def __missing__(self, key: tuple[str, Shape]) -> Kind:
        code, shape = key
        dtype = BY_SAFETENSORS[code]
        bits = _bits(dtype, _naturals([*shape], "shape"))
        return self.setdefault(key, _kind(dtype, shape, bits // 8))


class _Header:
    """The contents of a header: names of tensors, their kinds and places, and metadata."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.kinds: list[Kind] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.metadata: dict[str, str] = {}

    def check_names(self) -> None:
        check("name_bytes", max(map(len, self.names), default=0), "characters of a tensor's name")

    def tensors(self, source: ByteSource, start: int) -> dict[str, Tensor]:
        """Return the tensors, whose bytes follow each other from `start` to the end of `source`."""
        _check_tiles(self.begins, self.ends, self.names, source.size - start)
        return {
            name: kind.tensor(source, start + begin)
            for name, kind, begin in zip(self.names, self.kinds, self.begins, strict=True)
        }


def read_tensors(text: bytes, source: ByteSource) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse the tensors of the header, and its metadata."""
    try:
        header = _read_columns(text)
    except (CkptkitError, LookupError, TypeError):
        header = _read_entries(text)
    header.check_names()
    return header.tensors(source, 8 + len(text)), header.metadata


def _read_columns(text: bytes) -> _Header:
    """Parse the header in parts, and check the fields of all entries of a part at once.

    Raises any of several errors if something is wrong: `_read_entries` says what.
    """
    header, kinds = _Header(), _NewKinds()
    named = unknown = 0
    for part, strings in strict_json.parse_parts(text, "the header"):
        named += METADATA in part
        entries, metadata = _apart(part)
        _add_columns(header, entries, kinds)
        header.metadata.update(metadata)
        # Each entry has at least its name, those of its three fields, and its dtype. Where a part
        # has no string but these, no entry has another field, and no name occurs twice in it.
        unknown += strings - 5 * len(entries) - 2 * len(metadata)
    if unknown != named or named > 1 or len(header.names) != len(header.kinds):
        raise FormatError("a field is unknown, or a name occurs twice")
    return header


def _add_columns(header: _Header, entries: dict[str, Any], kinds: _NewKinds) -> None:
    codes = [*map(itemgetter("dtype"), entries.values())]
    shapes = [*map(itemgetter("shape"), entries.values())]
    spans = [*map(itemgetter("data_offsets"), entries.values())]
    places = [*flatten(spans)]
    if not (
        {*map(type, shapes)} <= {list}
        and {*map(type, places), *map(type, flatten(shapes))} <= {int}
        and {*map(len, spans)} <= {2}
        and min(places, default=0) >= 0
    ):
        raise FormatError("a field is not of its type")
    begins, ends = places[::2], places[1::2]
    found = [*map(kinds.__getitem__, zip(codes, map(tuple, shapes), strict=True))]
    if [kind.nbytes for kind in found] != [*map(sub, ends, begins)]:
        raise FormatError("a shape does not fill its bytes")
    header.names.update(dict.fromkeys(entries))
    header.kinds += found
    header.begins += begins
    header.ends += ends


def _read_entries(text: bytes) -> _Header:
    """Parse the header as a whole, entry by entry. Raises the error of the first wrong one."""
    header, kinds = _Header(), Kinds()
    entries, header.metadata = read_header(text)
    header.names = dict.fromkeys(entries)
    header.check_names()
    for name, entry in entries.items():
        try:
            kind, begin = read_entry(entry, kinds)
        except CkptkitError as error:
            error.message = f"tensor {shown(name)}: {error.message}"
            raise
        header.kinds.append(kind)
        header.begins.append(begin)
        header.ends.append(begin + kind.nbytes)
    return header


def read_entry(entry: Any, kinds: Kinds) -> tuple[Kind, int]:
    """Parse one tensor's kind and where its bytes begin.

    `kinds` are those met before: most tensors share a few, each checked once.
    """
    try:
        code, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        raise FormatError("its entry lacks one of dtype, shape and data_offsets") from error
    if len(entry) > len(_FIELDS):
        raise AmbiguousError(
            f"its entry has the unknown field {shown(min(entry.keys() - _FIELDS))}"
        )
    begin, end = _span(offsets)
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(f"unknown dtype {shown(code)}")
    shape = _naturals(sizes, "shape")
    kind = kinds.get((code, shape))
    if kind is None:
        kind = kinds[code, shape] = _kind(dtype, shape, end - begin)
    elif kind.nbytes != end - begin:
        raise _unfilled(dtype, shape, end - begin)
    return kind, begin


def _kind(dtype: DType, shape: Shape, nbytes: int) -> Kind:
    if _bits(dtype, shape) != nbytes * 8:
        raise _unfilled(dtype, shape, nbytes)
    if dtype.packed > 1:
        dtype, shape = _packed(dtype, shape)
    storage = Storage(Range(Memory(b""), 0, nbytes))
    return Kind(Tensor(storage, dtype, shape, contiguous_stride(shape)), nbytes)


def _bits(dtype: DType, shape: Shape) -> int:
    if len(shape) > LIMITS.rank:  # or the product could take long
        check("rank", len(shape), "dimensions of a tensor")
    return math.prod(shape) * (dtype.bits // dtype.packed)


def _unfilled(dtype: DType, shape: Shape, nbytes: int) -> FormatError:
    return FormatError(f"shape {shown(shape)} of {dtype} does not fill {nbytes:,} bytes")


def _span(offsets: Any) -> tuple[int, int]:
    """Return begin and end, two integers in order."""
    begin, end = offsets if offsets.__class__ is list and len(offsets) == 2 else (None, None)
    if begin.__class__ is int and end.__class__ is int and 0 <= begin <= end:
        return begin, end
    wrong = _naturals(offsets, "data_offsets")
    raise FormatError(f"data_offsets {shown(wrong)} are not a begin and an end")


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


def _check_tiles(begins: list[int], ends: list[int], names: Iterable[str], size: int) -> None:
    """Check that, sorted, each range begins where the last one ends, up to the end of the file."""
    if begins != [0, *ends[:-1]]:  # not in the order of the file, or not tiled
        _check_sorted(sorted(zip(begins, ends, names, strict=True)))
    reached = max(ends, default=0)
    if reached > size:
        raise TruncatedError(
            f"ends {reached - size:,} bytes too early: "
            f"the header lists {reached:,} bytes of tensors",
            hint="download or copy it again",
        )
    if reached < size:
        raise CorruptError(f"{size - reached:,} bytes follow the last tensor")


def _check_sorted(spans: list[tuple[int, int, str]]) -> None:
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            wrong = "a hole before it" if begin > reached else "it overlaps another tensor"
            raise FormatError(
                f"tensor {shown(name)}: begins at {begin:,}, not at {reached:,}: {wrong}"
            )
        reached = end
