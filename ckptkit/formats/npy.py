"""Read numpy files of one array (.npy). Read and write numpy archives of named arrays (.npz).

    93 "NUMPY" | version: 1 0, 2 0 or 3 0 | u16 (version 1) or u32: N | N bytes of header | elements

This is an example of a header:

    {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }

The header is a Python dict literal, encoded in Latin-1 (in version 3 in UTF-8). ckptkit parses the
header and does not evaluate it. The header must contain these three entries once, in any order.
``descr`` contains byte order, kind and size of an element. For a structured array, ``descr`` is a
list of fields. An object array stores all its elements in one pickle. Source:
numpy/lib/_format_impl.py.

ckptkit reads an array of numbers or booleans as a tensor, an array of one string as a string, and
an object array as its unpickled value. ckptkit refuses all other arrays.

The archive is a zip file of members called ``<name>.npy``, stored or deflated. Source: numpy.savez,
numpy.savez_compressed. Unlike torch, numpy distinguishes names that differ only in case. ckptkit
writes uncompressed archives like numpy.savez, with elements aligned to 64 bytes. An archive stores
only arrays of numbers. Therefore ckptkit drops everything except the weights, and writes a tied
tensor once for each name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import Inflate, RecordSlice, concat, stream
from ckptkit.core.bytesource import Derived, Extent, Memory, Range, crc32, crc32_combine
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NUMPY, DType
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shown, some
from ckptkit.core.tree import Global, Node, OrderedMapping
from ckptkit.formats import table
from ckptkit.formats.format import Probe
from ckptkit.formats.record import (
    leftovers,
    refuse_objects,
    refuse_pieces,
    refuse_tensors,
    shared_bytes,
)
from ckptkit.formats.strict_json import is_utf8
from ckptkit.formats.zip_writer import ZipMember, lay_out
from ckptkit.pickles.streams import NUMPY, Found, PickleStream
from ckptkit.pickles.values import Unpickled, unpickle

MAGIC = b"\x93NUMPY"
ALIGNMENT = 64  # alignment of the elements, in bytes

_LENGTH_BYTES = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
_AGAIN = "the file is truncated: download or copy it again"
_FIRST = 256  # number of bytes in the first read, enough for most headers
_ITEM = re.compile(
    r"""\s*(['"])(?P<key>\w+)\1\s*:\s*
    (?:(['"])(?P<descr>[^'"\\]*)\3|(?P<fields>\[.*\])|(?P<flag>True|False)
      |\((?P<shape>[0-9L,\s]*)\))
    \s*(?:,\s*|$)""",
    re.DOTALL | re.VERBOSE,
)
_KINDS = {"descr": ("descr", "fields"), "fortran_order": ("flag",), "shape": ("shape",)}
# Python 2 writes a long integer as 3L.
_SIZES = re.compile(r"\s*|(\s*[0-9]{1,19}L?\s*,)+(\s*[0-9]{1,19}L?\s*)?")
# dtypes by numpy's code, such as f4 for float32.
_CODES = {f"{name[0]}{row.itemsize}": row for name, row in BY_NUMPY.items()}
_TEXT = re.compile(r"([<>|=]?)([US])([0-9]{1,9})")


class NpyHeader(NamedTuple):
    """The fields of a header, and the offset of the elements."""

    descr: str
    fortran: bool
    shape: Shape
    start: int  # offset of the elements in bytes


class Array(NamedTuple):
    """The value of an .npy file. ``pickled`` is the pickle of an object array, otherwise None."""

    root: Node
    pickled: Unpickled | None = None


def matches(probe: Probe) -> bool:
    return probe.head.startswith(MAGIC)


def read(probe: Probe) -> Checkpoint:
    """Read the array. The array is the root of the checkpoint and has no name."""
    source = probe.source
    root, pickled = read_array(Range(source, 0, source.size), None)
    checkpoint = Checkpoint(root, table.NPY.name, source)
    if pickled is None:
        return checkpoint
    return replace(checkpoint, globals=pickled.globals, warnings=pickled.warnings)


def read_array(extent: Extent, crc: int | None) -> Array:
    """Read the array in the byte range `extent`. The elements of a tensor are read later.

    `crc` is the CRC-32 of `extent`, or None. Raises an InputError if the array is damaged,
    ambiguous or unsupported.
    """
    header, text = _header(extent)
    nbytes = extent.length - header.start
    if _TEXT.fullmatch(header.descr) and not header.shape:
        return Array(_text(header, extent))
    if header.descr in ("O", "|O"):
        return _pickled(extent, header.start)
    order, dtype = _dtype(header.descr)
    check("rank", len(header.shape), "dimensions of an array")
    shape, expected = header.shape, dtype.nbytes(math.prod(header.shape))
    if nbytes < expected:
        raise TruncatedError(
            f"an array of shape {shape} and {dtype} has {expected:,} bytes, "
            f"but only {nbytes:,} are in the file",
            hint=_AGAIN,
        )
    if nbytes > expected:
        raise AmbiguousError(
            f"{nbytes - expected:,} bytes follow the array; other readers may read these bytes"
        )
    stride = contiguous_stride(shape[::-1])[::-1] if header.fortran else contiguous_stride(shape)
    own = None if crc is None else crc32_combine(crc32(text), crc, nbytes)  # CRC of the elements
    record = RecordSlice(extent, header.start, nbytes).locate()
    return Array(Tensor(Storage(record, crc32=own, big_endian=order == ">"), dtype, shape, stride))


def _header(extent: Extent) -> tuple[NpyHeader, bytes]:
    """Return the parsed header, and the bytes before the elements."""
    head = _head(extent, _FIRST)
    if not head.startswith(MAGIC):
        raise FormatError("does not begin with the signature of a numpy array")
    width = _LENGTH_BYTES.get(head[6:8], 0)
    if not width and len(head) >= 8:
        raise UnsupportedError(
            f"has version {head[6]}.{head[7]} of the npy format; ckptkit reads 1 to 3"
        )
    length = int.from_bytes(head[8 : 8 + width], "little")
    start = 8 + width + length
    check("npy_header_bytes", length, "bytes of an array's header")
    if not width or len(head) < 8 + width or start > extent.length:
        raise TruncatedError("ends inside the header of an array", hint=_AGAIN)
    data = head[:start] if start <= len(head) else _head(extent, start)
    try:
        text = data[8 + width :].decode("utf-8" if head[6] == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise FormatError("an array's header is not UTF-8") from error
    return NpyHeader(*_parse(text), start), data


def _head(extent: Extent, length: int) -> bytes:
    """Return the first `length` bytes, or all bytes if there are fewer."""
    length = min(length, extent.length)
    if isinstance(extent, Range):
        return extent.source.read(extent.offset, length)
    # Deflate lengthens bytes only slightly in the worst case. Therefore, read only the beginning of
    # the deflated bytes.
    (stored,) = extent.inputs
    assert isinstance(stored, Range)
    few = stored.part(0, min(stored.length, 2 * length + 1024))
    return b"".join(stream(Derived(Inflate(), (few,), extent.length), 0, length))


def _parse(text: str) -> tuple[str, bool, Shape]:
    """Parse the dict literal of a header. Return descr, fortran_order and shape."""
    inner = text.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        raise FormatError(f"an array's header is not a dict: {text[:60]!r}")
    inner = inner[1:-1].strip()
    found: dict[str, str] = {}
    at = 0
    while at < len(inner):
        item = _ITEM.match(inner, at)
        kinds = _KINDS.get(item["key"], ()) if item else ()
        value = next((item[kind] for kind in kinds if item and item[kind] is not None), None)
        if item is None or value is None:
            raise FormatError(f"an array's header has an unknown entry: {inner[at : at + 60]!r}")
        if item["key"] in found:
            raise AmbiguousError(f"an array's header has two entries {item['key']!r}")
        found[item["key"]] = value
        at = item.end()
    if found.keys() != _KINDS.keys():
        raise FormatError(
            f"an array's header lacks {', '.join(sorted(_KINDS.keys() - found.keys()))}"
        )
    sizes = found["shape"]
    if not _SIZES.fullmatch(sizes):
        raise FormatError(f"the shape ({sizes[:60]}) of an array is not a tuple of sizes")
    shape = tuple(map(int, re.findall("[0-9]+", sizes)))
    return found["descr"], found["fortran_order"] == "True", shape


def _dtype(descr: str) -> tuple[str, DType]:
    """Return the byte order and the dtype of a descr.

    Raises UnsupportedError if torch has no such dtype.
    """
    order, code = (descr[0], descr[1:]) if descr[:1] in tuple("<>|=") else ("", descr)
    dtype = _CODES.get("b1" if code == "?" else code)
    if dtype is not None and (order in ("<", ">") or dtype.component == 1):
        return order, dtype
    if re.fullmatch("V[0-9]+", code):
        raise UnsupportedError(
            f"contains elements of {code[1:]} bytes, whose type numpy did not record ({descr})",
            hint="numpy saves bfloat16 and float8 like this: save them as float32",
        )
    what = (
        "structured elements" if descr.startswith("[") else f"elements of the type {descr[:40]!r}"
    )
    raise UnsupportedError(
        f"contains {what}, for which torch has no dtype", hint="save it without this array"
    )


def _text(header: NpyHeader, extent: Extent) -> str | bytes:
    """Return the string in an array of one string, without numpy's zero padding."""
    order, kind, size = _TEXT.fullmatch(header.descr).groups()  # type: ignore[union-attr]
    nbytes = int(size) * (4 if kind == "U" else 1)
    check("string_bytes", nbytes, "bytes of a string")
    if extent.length - header.start != nbytes:
        raise CorruptError(
            f"a string has {extent.length - header.start:,} bytes, but its header lists {nbytes:,}"
        )
    data = b"".join(stream(extent, header.start, extent.length))
    if kind == "S":
        return data.rstrip(b"\0")
    try:
        return data.decode("utf-32-be" if order == ">" else "utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise FormatError("a string is not UTF-32") from error


def _pickled(extent: Extent, start: int) -> Array:
    """Read the pickle of an object array without executing it."""
    length = extent.length - start
    if isinstance(extent, Derived):
        check("record_bytes", length, "bytes of a compressed pickle")
        data = b"".join(stream(extent, start, extent.length))
        extent, start = Range(Memory(data, next(extent.sources()).name), 0, length), 0
    first = extent.offset + start
    pickled = unpickle(extent.source, first, first + length)
    if pickled.stop != first + length:
        raise AmbiguousError(
            f"{first + length - pickled.stop:,} bytes follow the pickle of an object array"
        )
    return Array(pickled.root, pickled)


def header(dtype: DType, shape: Shape) -> bytes:
    """Return the header of a row-major little-endian array, padded to `ALIGNMENT` bytes."""
    descr = ("|" if dtype.component == 1 else "<") + next(
        code for code, row in _CODES.items() if row is dtype
    )
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    version, width = (b"\1\0", 2) if len(text) < 0xFF00 else (b"\2\0", 4)
    text += " " * (-(len(MAGIC) + 2 + width + len(text) + 1) % ALIGNMENT) + "\n"
    return MAGIC + version + len(text).to_bytes(width, "little") + text.encode()


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickle of an object array."""
    if not matches(probe):
        return None
    source = probe.source
    width = _LENGTH_BYTES.get(probe.head[6:8], 2)
    start = 8 + width + int.from_bytes(probe.head[8 : 8 + width], "little")
    text = source.read(0, min(start, source.size, LIMITS.npy_header_bytes))
    if not re.search(rb"['\"][<>|=]?O[0-9]*['\"]", text):
        return iter(())
    return iter((PickleStream("", source, start, max(0, source.size - start), NUMPY),))


# Archives of arrays


SUFFIX = ".npy"
_NAME_BYTES = (1 << 16) - 1 - len(SUFFIX)
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def matches_npz(probe: Probe) -> bool:
    return probe.zip is not None and all(name.endswith(SUFFIX) for name in probe.zip.entries)


def read_npz(probe: Probe) -> Checkpoint:
    """Read the arrays by name, in the order of the archive.

    Raises the errors of `read_array`. Each error names the array.
    """
    archive = probe.zip
    assert archive is not None
    root: dict[Node, Node] = {}
    globals: dict[Global, None] = {}
    warnings: list[str] = []
    for member in archive.entries:
        name = member.removesuffix(SUFFIX)
        try:
            array = read_array(archive.locate(member), archive.crc(member))
        except CkptkitError as error:
            error.message = f"array {shown(name)}: {error.message}"
            raise
        root[name] = array.root
        if array.pickled is not None:
            globals.update(dict.fromkeys(array.pickled.globals))
            warnings.append(f"array {shown(name)} is a pickle of Python objects")
            warnings += array.pickled.warnings
    names = tuple(globals)
    return Checkpoint(root, table.NPZ.name, archive.source, {}, names, tuple(warnings))


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan an archive of the weights. The notes of the plan name the dropped values.

    Raises TensorError if numpy has no equivalent of a tensor's dtype.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    tensors = checkpoint.required.tensors
    refuse_pieces(checkpoint.required.nodes)

    def way_out(reasons: dict[str, str]) -> str:
        floats = (tensors[name].dtype.kind == "float" for name in reasons)
        if all(floats) and all(why == tensors[name].dtype.name for name, why in reasons.items()):
            return "`convert --cast float32` converts these tensors to float32"
        return "`convert --drop` drops them"

    refuse_tensors(tensors, "npz", _obstacle, way_out)
    others, notes = leftovers(checkpoint)
    # Other weights-only formats store these values as metadata.
    lost = [*others, *(f"{key} (metadata)" for key in checkpoint.extras)]
    node = checkpoint.required.node
    if isinstance(node, OrderedMapping) and node.state:
        lost += [f"{key} of the state_dict" for key in node.state]
    if lost:
        notes.insert(0, f"dropped: {some(lost, 6)}, which npz cannot store")
    members = (_member(name, tensor) for name, tensor in tensors.items())
    files = (OutputFile("", tuple(lay_out(members)), keeps_sums=True),)
    return Plan(files, (*notes, *shared_bytes(tensors)))


def _member(name: str, tensor: Tensor) -> ZipMember:
    before = header(tensor.dtype, tensor.shape)
    if not tensor.nbytes:
        return ZipMember(name + SUFFIX, before)
    assert tensor.storage is not None
    record = contiguous(tensor)
    extent, crc = record.locate(), None
    own = tensor.storage.crc32 if record is tensor.storage.record else None
    if own is not None and isinstance(extent, Range):
        crc = crc32_combine(crc32(before), own, extent.length)
    literal = Range(Memory(before, name), 0, len(before))
    return ZipMember(name + SUFFIX, concat((literal, extent)), crc)


def _obstacle(name: str, tensor: Tensor) -> str | None:
    """Return the reason why npz cannot store a tensor, or None."""
    # All zip readers must interpret the name as the same relative path.
    is_path = "\\" not in name and not name.startswith("/") and ".." not in name.split("/")
    fits = is_utf8(name) and len(name.encode()) <= _NAME_BYTES
    if not is_path or not fits or _CONTROL.search(name):
        return "a member of a zip file cannot have this name"
    if tensor.layout != "strided":
        return tensor.layout
    if tensor.storage is None:
        return "meta"
    return tensor.dtype.name if tensor.dtype.numpy is None else None
