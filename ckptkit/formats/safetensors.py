"""Read, write and edit safetensors files: named contiguous little-endian tensors, without views.

    u64 N | N bytes of JSON | buffer

    {"__metadata__": {string: string},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Offsets count from 8 + N. The byte ranges of the tensors cover the buffer, from its first byte to
the end of the file, without holes or overlaps. N is at most 100,000,000. The header begins with
``{``. Spaces may follow the header as padding. An element of torch's float4_e2m1fn_x2 contains two
elements of F4. Therefore the last dimension of the torch tensor is half as long. Source:
https://github.com/huggingface/safetensors (safetensors/src/tensor.rs).

Unlike the library, ckptkit refuses:

* Repeated names and unknown fields.
* More than 64 dimensions.
* A size of 2**63 or more, even if another size of the shape is 0.
* The JSON that :mod:`strict_json` refuses.

Like the library, ckptkit stores the tensors in the order of their dtypes, larger dtypes first, and
tensors of the same dtype in the order of their names. Like the library, ckptkit aligns the buffer
to 8 bytes. Unlike the library, ckptkit lists the tensors in the header in the order of the
state_dict. :mod:`ckptkit.formats.record` describes the entries of ``__metadata__``.

If the new header of an in-place edit is not longer than the old header, spaces pad the new header
to the old length, and nothing else changes. A longer header overwrites the first tensors of the
buffer. The overwritten tensors (``a`` and ``b`` in this example) move to the end of the file:

    N | old header     | a | b | c | d            N' = N + bytes of a and b
    N'| new header, spaces     | c | d | a | b
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter, sub
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.core.bytesource import ByteSource, Extent, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, BY_SAFETENSORS, FLOAT4
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TruncatedError,
    UnsafeGlobalError,
    placed,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.options import Options
from ckptkit.core.plan import Edit, OutputFile, Patch, Plan
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, owners, shown, typed, typed_value, without
from ckptkit.formats import record, strict_json, table
from ckptkit.formats.format import Probe
from ckptkit.formats.strict_json import dump, is_utf8

_WHITE = b" \t\r\n"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
METADATA = "__metadata__"
# Creates a Range without the slow Python constructor.
_NEW_RANGE: Callable[[type[Range], tuple[ByteSource, int, int]], Range] = tuple.__new__


def matches(probe: Probe) -> bool:
    """Return whether a file begins with a length and a JSON object.

    If the length is impossible, a file whose name ends in .safetensors still matches. `read` then
    reports the damage.
    """
    if probe.head[8:].lstrip(_WHITE)[:1] != b"{":
        return False
    length = int.from_bytes(probe.head[:8], "little")
    return length <= LIMITS.safetensors_header_bytes or probe.name.endswith(".safetensors")


def read(probe: Probe) -> Checkpoint:
    """Read the tensors in header order. Restore the state_dict or tree from the metadata."""
    source = probe.source
    text = read_text(source)
    restored = record.restore(*read_tensors(text, source))
    warnings = restored.warnings
    if not text.startswith(b"{"):
        warnings = ("the header begins with white space instead of {", *warnings)
    return Checkpoint(
        restored.root, table.SAFETENSORS.name, source, restored.metadata, restored.globals,
        warnings, origin=record.WHOLE if restored.is_whole else None,
    )  # fmt: skip


def read_text(source: ByteSource) -> bytes:
    """Read the JSON of the header."""
    length = int.from_bytes(source.read(0, 8), "little")
    check("safetensors_header_bytes", length, "bytes of the header")
    return source.read(8, length)


def read_header(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the header. Return the unchecked entries and the metadata."""
    return _apart(strict_json.parse(text, "the header"))


def _apart(header: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Split a header into its entries and its metadata."""
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    metadata = header.pop(METADATA, None)
    if metadata is None:
        return header, {}
    if not isinstance(metadata, dict) or not {*map(type, metadata.values())} <= {str}:
        raise FormatError(f"{METADATA} is not an object of strings")
    return header, metadata


class DtypeAndShape(NamedTuple):
    """A dtype and shape that several tensors may have, and the size of such a tensor in bytes."""

    like: Tensor  # a tensor of this dtype and shape that refers to no bytes of the file
    nbytes: int

    def tensor(self, source: ByteSource, offset: int) -> Tensor:
        """Return the tensor of this dtype and shape whose bytes begin at `offset`."""
        return self.like.over(Storage(_NEW_RANGE(Range, (source, offset, self.nbytes))))


class Kinds(dict[tuple[str, Shape], DtypeAndShape]):
    """A cache of DtypeAndShape by (dtype code, shape). A lookup checks and adds a missing pair.

    A model has few such pairs.
    """

    def __missing__(self, key: tuple[str, Shape]) -> DtypeAndShape:
        dtype, shape = BY_SAFETENSORS[key[0]], _naturals([*key[1]], "shape")
        if len(shape) > LIMITS.rank:  # checked first, because the product of many sizes is slow
            check("rank", len(shape), "dimensions of a tensor")
        nbytes, rest = divmod(math.prod(shape) * (dtype.bits // dtype.packed), 8)
        if rest or nbytes >> 63:
            raise FormatError(f"shape {shown(shape)} of {dtype} does not fill bytes of the file")
        if dtype.packed > 1 and shape[-1] % dtype.packed:  # the last dimension is odd
            dtype = FLOAT4
        elif dtype.packed > 1:
            shape = (*shape[:-1], shape[-1] // dtype.packed)
        storage = Storage(Range(Memory(b""), 0, nbytes))
        like = Tensor(storage, dtype, shape, contiguous_stride(shape))
        return self.setdefault(key, DtypeAndShape(like, nbytes))


# Names, dtypes with shapes, begins and ends of the byte ranges, and metadata of a header.
_Header = tuple[dict[str, None], list[DtypeAndShape], list[int], list[int], dict[str, str]]


def read_tensors(text: bytes, source: ByteSource) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse the header. Return the tensors and the metadata."""
    try:
        names, kinds, begins, ends, metadata = _read_columns(text)
    except (CkptkitError, LookupError, TypeError):
        names, kinds, begins, ends, metadata = _read_entries(text)
    check("name_bytes", max(map(len, names), default=0), "characters of a tensor's name")
    start = 8 + len(text)
    _check_tiles(begins, ends, names, source.size - start)
    tensors = {
        name: kind.tensor(source, start + begin)
        for name, kind, begin in zip(names, kinds, begins, strict=True)
    }
    return tensors, metadata


def _read_columns(text: bytes) -> _Header:
    """Parse the header in parts. Check each field for all entries of a part at once.

    If any entry is invalid, raise an error without details. `_read_entries` then raises the exact
    error.
    """
    names, found, begins, ends, metadata = header = ({}, [], [], [], {})  # type: _Header
    kinds = Kinds()
    named = unknown = 0
    for part, strings in strict_json.parse_parts(text, "the header"):
        named += METADATA in part
        entries, strings_of_part = _apart(part)
        metadata.update(strings_of_part)
        codes, shapes, spans = (
            [*map(itemgetter(field), entries.values())]
            for field in ("dtype", "shape", "data_offsets")
        )
        places = [*flatten(spans)]
        if not (
            {*map(type, shapes)} <= {list}
            and {*map(type, places), *map(type, flatten(shapes))} <= {int}
            and {*map(len, spans)} <= {2}
            and min(places, default=0) >= 0
        ):
            raise FormatError("a field has the wrong type")
        of_part = [*map(kinds.__getitem__, zip(codes, map(tuple, shapes), strict=True))]
        if [kind.nbytes for kind in of_part] != [*map(sub, places[1::2], places[::2])]:
            raise FormatError("a shape does not match its bytes")
        found += of_part
        begins += places[::2]
        ends += places[1::2]
        names.update(dict.fromkeys(entries))
        # An entry contains at least five strings: its name, three field names, and its dtype. If a
        # part contains exactly five strings for each entry, no entry has an unknown field, and no
        # name occurs twice.
        unknown += strings - 5 * len(entries) - 2 * len(strings_of_part)
    if unknown != named or named > 1 or len(names) != len(found):
        raise FormatError("a field is unknown, or a name occurs twice")
    return header


def _read_entries(text: bytes) -> _Header:
    """Parse the header entry by entry. Raises the error of the first invalid entry."""
    entries, metadata = read_header(text)
    kinds, found, begins = Kinds(), [], []
    for name, entry in entries.items():
        with placed(None, f"tensor {shown(name)}: "):
            kind, begin = read_entry(entry, kinds)
        found.append(kind)
        begins.append(begin)
    ends = [begin + kind.nbytes for begin, kind in zip(begins, found, strict=True)]
    return dict.fromkeys(entries), found, begins, ends, metadata


def read_entry(entry: Any, kinds: Kinds) -> tuple[DtypeAndShape, int]:
    """Parse an entry. Return the tensor's dtype and shape, and the offset of its bytes."""
    try:
        code, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        raise FormatError("its entry lacks one of dtype, shape and data_offsets") from error
    if len(entry) > len(_FIELDS):
        raise AmbiguousError(
            f"its entry has the unknown field {shown(min(entry.keys() - _FIELDS))}"
        )
    span = _naturals(offsets, "data_offsets")
    if len(span) != 2 or span[0] > span[1]:
        raise FormatError(f"data_offsets {shown(span)} is not a begin and an end")
    if not isinstance(code, str) or code not in BY_SAFETENSORS:
        raise FormatError(f"unknown dtype {shown(code)}")
    shape = _naturals(sizes, "shape")
    kind = kinds[code, shape]
    if kind.nbytes != span[1] - span[0]:
        what = f"shape {shown(shape)} of {BY_SAFETENSORS[code]} does not fill"
        raise FormatError(f"{what} {span[1] - span[0]:,} bytes")
    return kind, span[0]


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{what} is not a list")
    if any(type(n) is not int or n < 0 for n in value):
        raise FormatError(f"{what} is not a list of non-negative integers")
    return tuple(value)


def _check_tiles(begins: list[int], ends: list[int], names: Iterable[str], size: int) -> None:
    """Check that the byte ranges cover the buffer without holes up to the end of the file."""
    reached = max(ends, default=0)
    if begins != [0, *ends[:-1]]:  # the ranges are unsorted, overlap or leave a hole
        before = 0
        for begin, end, name in sorted(zip(begins, ends, names, strict=True)):
            if begin != before:
                wrong = "a hole before it" if begin > before else "it overlaps another tensor"
                what = f"begins at {begin:,}, not at {before:,}: {wrong}"
                raise FormatError(f"tensor {shown(name)}: {what}")
            before = end
    if reached > size:
        raise TruncatedError(
            f"is truncated: {reached - size:,} bytes are missing of the {reached:,} bytes of "
            "tensors that the header lists",
            hint="download or copy it again",
        )
    if reached < size:
        raise CorruptError(f"{size - reached:,} bytes follow the last tensor")


# Writing


# dtypes in the order in which a file stores them (`Dtype` in safetensors/src/tensor.rs). Larger
# types come first. Therefore every tensor is aligned without padding.
_CODES = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip
_RANK = {code: rank for rank, code in enumerate(_CODES)}


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a file of the weights.

    If possible, `__metadata__` stores the values outside the weights. The notes of the plan name
    the values that are dropped. Raises TensorError if safetensors cannot store a tensor. Raises
    LimitError if the header is too large for readers. If ``options.objects`` is "error", raises
    UnsafeGlobalError for objects.
    """
    tensors, metadata, notes = contents(checkpoint, options)
    whole = len(tensors) if options.all or checkpoint.origin is record.WHOLE else None
    return Plan((file_of(tensors, metadata),), tuple(notes), whole)


# The tensors of a file in order, its `__metadata__`, and notes on dropped values.
Contents = tuple[dict[str, Tensor], dict[str, str | None], Sequence[str]]


def contents(checkpoint: Checkpoint, options: Options) -> Contents:
    """Return the tensors and metadata to write for a checkpoint. Raises the errors of `layout`."""
    # If the input file contained the complete tree, write the complete tree again.
    is_whole = options.all or checkpoint.origin is record.WHOLE
    return _whole(checkpoint, options) if is_whole else prepared(checkpoint, options)


def prepared(checkpoint: Checkpoint, options: Options) -> Contents:
    """Return the weights, and other values as metadata. Raises the errors of `layout`."""
    if options.objects == "error":
        record.refuse_objects(checkpoint)
    weights = checkpoint.required
    tensors = weights.tensors
    record.refuse_pieces(weights.nodes)
    record.refuse_tensors(tensors, "safetensors", _obstacle, partial(_way_out, checkpoint))
    ties = _ties(tensors, checkpoint.extras) if options.ties == "alias" else {}
    stored = without(tensors, ties)
    extra, notes = record.leftovers(checkpoint)
    text = record.of_weights(weights, ties, {**record.values(checkpoint.extras), **extra})
    metadata: dict[str, str | None] = {
        record.FRAMEWORK: "pt",
        **checkpoint.extras,
        **ties,
        record.RESERVED: text if options.extras else None,
    }
    notes += [f"dropped: {name} of the state_dict" for name in record.lost_attributes(weights.node)]
    notes += record.shared_bytes(stored)
    return stored, metadata, notes


def _whole(checkpoint: Checkpoint, options: Options) -> Contents:
    """Return the entries for the complete tree, as :mod:`safetensors_tree` describes.

    Raises the errors of the .pth writer, because ckptkit must be able to convert the output to a
    .pth.
    """
    from ckptkit.formats.safetensors_tree import StoredTree
    from ckptkit.formats.torch_zip import Numbering
    from ckptkit.pickles.policy import without_objects
    from ckptkit.pickles.writer import write_pickle

    root, strict = checkpoint.root, options.objects == "error"
    notes: tuple[str, ...] = ()
    if options.objects != "keep":
        root, notes = without_objects(root, may_be_empty=strict)
    if notes and strict:
        raise UnsafeGlobalError(
            f"would lose objects: {notes[0]}",
            hint=f"{typed_value('objects', 'keep')} keeps them, "
            f"{typed_value('objects', 'drop')} drops them",
        )
    write_pickle(root, Numbering())
    whole = StoredTree(root, _obstacle)
    text = dump(
        {"version": record.VERSION, **whole.record(), "values": record.values(checkpoint.extras)}
    )
    metadata: dict[str, str | None] = {
        record.FRAMEWORK: "pt",
        **whole.ties,
        **checkpoint.extras,
        record.RESERVED: text,
    }
    return whole.tensors, metadata, notes


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str | None]) -> OutputFile:
    """Plan a file of the tensors. Metadata entries whose value is None are omitted.

    Spaces pad the header, so that the buffer is 8-byte aligned.
    """
    order = sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype.safetensors or ""], name))
    extents: list[Extent] = []
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        offsets[name] = end
        end += tensors[name].nbytes
        extent = contiguous(tensors[name]).locate() if tensors[name].nbytes else None
        last = extents[-1] if extents else None
        if (
            isinstance(last, Range)
            and isinstance(extent, Range)
            and last.source is extent.source
            and last.offset + last.length == extent.offset
        ):
            extents[-1] = last._replace(length=last.length + extent.length)
        elif extent is not None:
            extents.append(extent)
    text = header_text(tensors, offsets, metadata)
    text += b" " * (-len(text) % 8)
    check("safetensors_header_bytes", len(text), "bytes of the header")
    return OutputFile("", (len(text).to_bytes(8, "little") + text, *extents))


def _way_out(checkpoint: Checkpoint, reasons: Mapping[str, str]) -> str:
    """Return the hint for tensors that safetensors cannot store.

    `reasons` maps the name of each such tensor to the reason.
    """
    obstacles = {*reasons.values()}
    if obstacles == {"complex128"}:
        return (
            f"{typed('--cast complex64', 'cast to complex64')} stores them with half the precision"
        )
    if all(why in BY_NAME and BY_NAME[why].kind == "quantized" for why in obstacles):
        return f"{typed('--dequantize', 'dequantize')} converts them to float32"
    if "subclass" in obstacles:
        from ckptkit import quantized

        kept = f"a .pth file or {typed('--all', 'all=True')} keeps them"
        floats = f"{typed('--dequantize', 'dequantize')} converts quantized tensors to floats; "
        return floats + kept if quantized.find(checkpoint) else kept
    return f"{typed('--drop', 'select(drop=...)')} drops them"


def _obstacle(name: str, tensor: Tensor) -> str | None:
    """Return the reason why safetensors cannot store a tensor, or None."""
    if name == METADATA or len(name) > LIMITS.name_bytes or not is_utf8(name):
        return "the header cannot contain this name"
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
    """Map each tied name to the alphabetically first name of its tensor.

    If a tied name is already a metadata key, the metadata cannot record the tie. ckptkit then
    writes the tensor a second time, under that name.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if 0 not in tensor.shape:
            same = tensor.elements_key
            groups.setdefault(same, []).append(name)
    taken = {record.FRAMEWORK, record.RESERVED, *metadata}
    kept = owners((min(names), names) for names in groups.values() if len(names) > 1)
    return {name: first for name, first in kept.items() if name != first and name not in taken}


def header_text(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, int], metadata: Mapping[str, str | None]
) -> bytes:
    """Return the JSON of a header. `offsets` maps each tensor name to the offset of its bytes."""
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


# Editing in place


# Maximum number of bytes that an in-place edit may move. If more bytes would move, ckptkit writes a
# copy, because a copy is faster.
_MOVED = 16 << 20
_ALIGNMENT = 8  # bytes
_BREAKS = Edit(0, b"\xff" * 8)  # an impossible length, so that readers refuse a half-edited file


def patch(before: Checkpoint, after: Checkpoint, options: Options) -> Patch | None:
    """Plan an in-place edit that turns the file of `before` into `after`.

    Return None if the bytes of tensors differ, or if the edit moves too many bytes. Raises the
    errors of `layout`.
    """
    source, (tensors, metadata, notes) = before.source, contents(after, options)
    if not isinstance(source, LocalFile):
        return None
    start, stop = 8 + int.from_bytes(source.read(0, 8), "little"), source.size
    places = _places(source, tensors, start)
    if places is None:
        return None
    moved: list[Edit] = []
    while True:
        offsets = {name: place - start for name, place in places.items()}
        text = header_text(tensors, offsets, metadata)
        need = len(text) - (start - 8)
        if need <= 0:
            break
        # Move the first tensors to the end of the file: as few as the header needs. Move a number
        # of bytes that is divisible by _ALIGNMENT, so that all tensors stay aligned.
        taken = 0
        for name in sorted(places, key=lambda name: (places[name], tensors[name].nbytes)):
            if taken >= need and taken % _ALIGNMENT == 0:
                break
            places[name] = stop + taken
            taken += tensors[name].nbytes
        if taken < need or taken > _MOVED or taken % _ALIGNMENT or stop % _ALIGNMENT:
            return None
        moved.append(Edit(stop, source.read(start, taken)))
        start, stop = start + taken, stop + taken
    length = start - 8
    if length > LIMITS.safetensors_header_bytes or sum(len(edit.data) for edit in moved) > _MOVED:
        return None
    edits = (Edit(8, text.ljust(length)), *moved)
    return Patch(source, _BREAKS, edits, Edit(0, length.to_bytes(8, "little")), stop, tuple(notes))


def _places(source: LocalFile, tensors: Mapping[str, Tensor], start: int) -> dict[str, int] | None:
    """Return the offset of each tensor in `source`.

    Return None if a tensor is computed or in another file. Also return None if the tensors do not
    cover the file from `start` to the end.
    """
    places = {}
    for name, tensor in tensors.items():
        extent = contiguous(tensor).locate()
        if not isinstance(extent, Range) or extent.source is not source:
            return None
        places[name] = extent.offset
    for place, length in sorted((places[name], each.nbytes) for name, each in tensors.items()):
        if place != start:
            return None
        start += length
    return places if start == source.size else None
