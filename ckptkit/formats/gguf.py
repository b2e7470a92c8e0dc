"""Read GGUF, the format of llama.cpp: metadata, and tensors that are mostly quantized in blocks.

    "GGUF" | u32 version | N tensors | N entries | the entries | the tensors | zeros | data

    entry:   string key | u32 type | value        string: N length | UTF-8
    array:   u32 type | N count | values          tensor: string name | u32 rank | N sizes[rank] |
                                                          u32 type | u64 offset

N is an unsigned integer: u32 in version 1, u64 in versions 2 and 3. A file of version 3 may be
big-endian. No flag marks a big-endian file. ckptkit recognizes such a file by the version: read as
a little-endian number, the version is divisible by 2**16. The sizes of a tensor are in reverse
order: the first size is the length of a row. The data begins at the next multiple of
``general.alignment`` (default 32). Tensor offsets count from the beginning of the data.

A large model is split into files called ``NAME-00001-of-00003.gguf``. The first file contains the
metadata. ``split.no`` and ``split.count`` must match the file name. ``split.tensors.count`` must be
the number of tensors in all files.

`read` returns a tree with an entry for each metadata key. The tensors are in the entry ``tensors``.
Each array is read when a caller accesses its items. ComfyUI-GGUF reshapes tensors to rows of 256
elements, so that each row consists of complete blocks. The metadata key
``comfy.gguf.orig_shape.NAME`` contains the original shape. Sources: ggml's docs/gguf.md and
gguf.cpp, candle (version 1), ComfyUI-GGUF.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from ckptkit.core.bytesource import ByteSource, Folder, Range
from ckptkit.core.checkpoint import Checkpoint, PartOf
from ckptkit.core.dtypes import BY_NAME, GGML, UNKNOWN, DType, unknown
from ckptkit.core.errors import (
    LLAMA_CPP,
    AmbiguousError,
    CorruptError,
    FormatError,
    Notice,
    TruncatedError,
    UnsupportedError,
    placed,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shown
from ckptkit.core.tree import Node, StoredList
from ckptkit.formats.format import Probe
from ckptkit.pickles.streams import Remark

MAGIC = b"GGUF"
TENSORS = "tensors"  # key of the entry that contains the tensors
ALIGNMENT = "general.alignment"
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
TYPES: dict[int, DType] = {
    0: BY_NAME["float32"], 1: BY_NAME["float16"], 24: BY_NAME["int8"], 25: BY_NAME["int16"],
    26: BY_NAME["int32"], 27: BY_NAME["int64"], 28: BY_NAME["float64"], 30: BY_NAME["bfloat16"],
    **GGML,
}  # fmt: skip

# Name and `struct` format code of each type of metadata values, by type number. Type 9 is an array.
_VALUES = {
    0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h"), 4: ("uint32", "I"),
    5: ("int32", "i"), 6: ("float32", "f"), 7: ("bool", "?"), 8: ("string", ""),
    10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d"),
}  # fmt: skip
_ARRAY, _UINT32 = 9, 4
_ROWS = 8  # maximum number of dimensions of a tensor; llama.cpp allows 4, ComfyUI-GGUF 5
_FIRST = 8  # number of values to keep in memory from the beginning of each array
_WINDOW = 1 << 20  # number of bytes to read at once
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.DOTALL | re.IGNORECASE)
_AGAIN = "the file is truncated: download or copy it again"
_ALONE = "--part-only reads this file alone"


class TensorInfo(NamedTuple):
    """The header entry of a tensor. `offset` counts from the beginning of the data."""

    name: str
    shape: Shape  # sizes in torch's order
    number: int  # number of the ggml type
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file: metadata by key, tensors, and the offset at which the header ends."""

    source: ByteSource
    version: int
    big_endian: bool
    values: dict[str, Node]
    types: dict[str, int]  # type number of each value
    infos: list[TensorInfo]
    end: int


def matches(probe: Probe) -> bool:
    return probe.head.startswith(MAGIC)


def read(probe: Probe) -> Checkpoint:
    """Read the header of the file. For a split model, read the headers of all its files."""
    first = read_header(probe.source)
    files, folder, part = [first], None, None
    place = probe.source.folder_and_name()
    found = _SPLIT.fullmatch(place[1]) if place is not None else None
    if "split.count" in first.values or found:
        if probe.options.part_only:
            part = PartOf("split", f"file {_of(first)} of a split GGUF model", "", None)
        else:
            files = _files(first, found, place)
            first, folder = files[0], place[0] if place and len(files) > 1 else None
    warnings: list[str] = []
    tensors: dict[Node, Node] = {}
    values = {key: value for each in reversed(files) for key, value in each.values.items()}
    aligned = first.values.get(ALIGNMENT, None if part else 32)
    for each in files:
        for name, tensor in _tensors(each, values, aligned, warnings):
            if name in tensors:
                what = f"the tensor {shown(name)} is also in an earlier file of the model"
                raise AmbiguousError(what, where=each.source.name)
            tensors[name] = tensor
    root = {key: values[key] for key in dict.fromkeys((*first.values, *values))}
    entry = TENSORS
    while entry in root:
        entry += "_"
    root[entry] = tensors
    return Checkpoint(
        root,
        "gguf",
        probe.source if folder is None else folder,
        warnings=tuple(warnings),
        about="" if len(files) == 1 else f"{len(files)} files",
        version=f"{first.version}, big-endian" if first.big_endian else f"{first.version}",
        model=model if isinstance(model := values.get("general.architecture"), str) else "",
        part=part,
    )


def templates(probe: Probe) -> Iterator[Remark] | None:
    """Yield a remark for each chat template. Return None for a file of another format.

    A program that renders a template without a sandbox executes code in the template
    (CVE-2024-34359, llama-cpp-python).
    """
    return _templates(probe.source) if matches(probe) else None


def _templates(source: ByteSource) -> Iterator[Remark]:
    for key, value in read_header(source).values.items():
        if isinstance(value, str) and key.split(".")[:2] == ["tokenizer", "chat_template"]:
            size = f"{len(value):,} characters"
            yield Remark(key, f"a chat template, {size} of Jinja: render it in a sandbox", True)


# Reading a header


def read_header(source: ByteSource) -> GgufHeader:
    """Read the header of one file. Errors name the file.

    If a count is too large, this function raises an error before it allocates memory.
    """
    with placed(source.name):
        return _header(source)


def _header(source: ByteSource) -> GgufHeader:
    head = source.read(0, min(source.size, 8))
    if len(head) < 8:
        raise TruncatedError("ends inside its header", hint=_AGAIN)
    version, order = int.from_bytes(head[4:], "little"), "<"
    if version and not version & 0xFFFF:
        version, order = int.from_bytes(head[4:], "big"), ">"
    if version not in (1, 2, 3) or (order == ">" and version != 3):
        named = f"{version}, big-endian" if order == ">" else version
        raise UnsupportedError(f"is GGUF of version {named}; ckptkit reads versions 1 to 3")
    cursor = GgufCursor(source, 8, order, "I" if version == 1 else "Q")
    wide = 4 if version == 1 else 8
    count = cursor.count("tensors", 16 + wide)
    entries = cursor.count("metadata entries", 5 + wide)
    values: dict[str, Node] = {}
    types: dict[str, int] = {}
    for _ in range(entries):
        key = cursor.name("a key of the metadata")
        if key in values:
            raise AmbiguousError(f"the metadata key {shown(key)} occurs twice")
        types[key] = cursor.number("I")
        values[key] = cursor.value(types[key], f"metadata: {shown(key)}")
    infos: dict[str, TensorInfo] = {}
    for _ in range(count):
        name, rank = cursor.name("the name of a tensor"), cursor.number("I")
        if rank > _ROWS:
            raise FormatError(f"tensor {shown(name)} has {rank:,} dimensions, more than {_ROWS}")
        shape = tuple([cursor.number(cursor.wide) for _ in range(rank)][::-1])
        info = TensorInfo(name, shape, cursor.number("I"), cursor.number("Q"))
        if name in infos:
            raise AmbiguousError(f"the tensor {shown(name)} occurs twice")
        infos[name] = info
    items = list(infos.values())
    return GgufHeader(source, version, order == ">", values, types, items, cursor.at)


class GgufCursor:
    """A reader of a header that begins at offset `at`.

    If a count or length exceeds the remaining bytes, the methods raise CorruptError or
    TruncatedError.
    """

    def __init__(self, source: ByteSource, at: int, order: str, wide: str) -> None:
        self.source, self.wide, self.order = source, wide, order
        codes = {code for _, code in _VALUES.values()}
        self._structs = {code: struct.Struct(order + code) for code in codes}
        # The buffered bytes, the position in the buffer, and the buffer's offset in the file.
        self._data, self._at, self._base = b"", 0, at

    @property
    def at(self) -> int:
        """The offset of the next byte in the file."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """The number of remaining bytes in the file."""
        return self.source.size - self.at

    def _fill(self, length: int) -> None:
        """Read at least the next `length` bytes into the buffer."""
        at, left = self.at, self.left
        if length > left:
            raise TruncatedError(f"is truncated: ends {length - left:,} bytes early", hint=_AGAIN)
        self._data = self.source.read(at, min(left, max(length, _WINDOW)))
        self._at, self._base = 0, at

    def number(self, code: str) -> Any:
        """Return the next number. `code` is the `struct` format code of the number."""
        form = self._structs[code]
        if self._at + form.size > len(self._data):
            self._fill(form.size)
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def count(self, what: str, least: int) -> int:
        """Return the next count. Each counted item takes at least `least` bytes."""
        count: int = self.number(self.wide)
        if count * least > self.left:
            raise CorruptError(
                f"the header lists {count:,} {what}, but only {self.left:,} bytes remain"
            )
        return count

    def text(self, errors: str = "backslashreplace") -> str:
        """Return the next string."""
        length: int = self.number(self.wide)
        check("string_bytes", min(length, self.left), "bytes of a string")
        if self._at + length > len(self._data):
            self._fill(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", errors)

    def name(self, what: str) -> str:
        """Return the next string as a name. Raises FormatError if the name is not UTF-8."""
        try:
            name = self.text("strict")
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not UTF-8") from error
        check("name_bytes", len(name), f"characters of {what}")
        return name

    def value(self, number: int, what: str) -> Node:
        """Return the next value. `number` is the type number of the value.

        For an array, return a list that is read from the file on access.
        """
        is_array = number == _ARRAY
        if is_array:
            number = self.number("I")
            if number == _ARRAY:
                raise UnsupportedError(f"{what} is an array of arrays")
        if number not in _VALUES:
            raise FormatError(f"{what} has the type {number}, which GGUF does not define")
        kind, code = _VALUES[number]
        if not is_array:
            return self.number(code) if code else self.text()
        size = self._structs[code or self.wide].size
        count: int = self.number(self.wide)
        if count * size > self.left:
            raise CorruptError(
                f"{what} has {count:,} elements, but only {self.left:,} bytes remain"
            )
        start = self.at
        first = tuple(self.value(number, what) for _ in range(min(count, _FIRST)))
        self._skip(number, count - len(first))
        read = partial(_values, self.source, start, self.order, self.wide, number, count)
        return StoredList(kind, count, first, read)

    def _skip(self, number: int, count: int) -> None:
        """Skip `count` values of an array."""
        _, code = _VALUES[number]
        if code:
            self._at += count * self._structs[code].size
            return
        form, data, at = self._structs[self.wide], self._data, self._at
        for _ in range(count):
            if at + form.size > len(data):
                self._at = at
                self._fill(form.size)
                data, at = self._data, 0
            at += form.size + form.unpack_from(data, at)[0]
        self._at = at
        if self.left < 0:
            raise TruncatedError(f"is truncated: ends {-self.left:,} bytes early", hint=_AGAIN)


def _values(
    source: ByteSource, start: int, order: str, wide: str, number: int, count: int
) -> list[Node]:
    """Return all values of an array. The first value is at offset `start`."""
    cursor = GgufCursor(source, start, order, wide)
    return [cursor.value(number, "") for _ in range(count)]


# Tensors


def _tensors(
    header: GgufHeader, values: dict[str, Node], aligned: Node, warnings: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name.

    `values` is the metadata of all files. `aligned` is the alignment of the model's first file, or
    None if that file is not read.
    """
    source, name = header.source, header.source.name
    sizes: dict[TensorInfo, int | None] = {}
    for info in header.infos:
        dtype, count = TYPES.get(info.number), prod(info.shape)
        row = info.shape[-1] if info.shape else 1
        if dtype is None:
            sizes[info] = None if count else 0
        elif row % dtype.block:
            raise FormatError(
                f"tensor {shown(info.name)}: rows of {row:,} elements are not divisible by "
                f"{dtype.block}, the block size of {dtype}", where=name,
            )  # fmt: skip
        else:
            sizes[info] = dtype.nbytes(count)
    start, alignment = _data_start(header, aligned, sizes, warnings)
    held = sorted((info for info in sizes if sizes[info] != 0), key=lambda info: info.offset)
    limits = [*(info.offset for info in held[1:]), source.size - start]
    for info, limit in zip(held, limits, strict=False):  # `limit`: offset of the next tensor
        if sizes[info] is None:
            sizes[info] = max(1, limit - info.offset)
    lengths = {info: size or 0 for info, size in sizes.items()}
    for info, size in lengths.items():
        beyond = start + info.offset + size - source.size
        if info.offset % alignment:
            raise FormatError(
                f"tensor {shown(info.name)}: its offset {info.offset:,} is not aligned to "
                f"{alignment} bytes", where=name,
            )  # fmt: skip
        if beyond > 0 and (size or beyond >= alignment):
            what = (
                f"is truncated: {shown(info.name)} ends {beyond:,} bytes after the end of the file"
            )
            raise TruncatedError(what, where=name, hint=_AGAIN)
    for one, other in pairwise(held):
        if one.offset + lengths[one] > other.offset:
            both = f"{shown(one.name)}, {shown(other.name)}"
            raise CorruptError(f"2 tensors overlap: {both}", where=name)
    padded = [-(-size // alignment) * alignment for size in lengths.values()]
    if [info.offset for info in sizes] != [0, *accumulate(padded)][: len(sizes)]:
        text = "tensors are not contiguous in the order of the header: llama.cpp refuses the file"
        warnings.append(Notice(LLAMA_CPP, text))
    for info, size in lengths.items():
        record = Range(source, min(start + info.offset, source.size - size), size)
        storage = Storage(record, big_endian=header.big_endian)
        dtype, shape = TYPES.get(info.number), _shape(info, values)
        if dtype is None:
            made = unknown(f"ggml type {info.number}")
            yield info.name, Tensor(storage, made, shape, (), layout=UNKNOWN)
        else:
            yield info.name, Tensor(storage, dtype, shape, contiguous_stride(shape))


def _shape(info: TensorInfo, values: dict[str, Node]) -> Shape:
    """Return the shape of a tensor.

    If ComfyUI-GGUF reshaped the tensor, return the original shape.
    """
    if prod(size or 1 for size in info.shape) >= 1 << 63:
        what = f"tensor {shown(info.name)}: the sizes {list(info.shape)} exceed 64 bits"
        raise FormatError(what)
    given = values.get(ORIGINAL_SHAPE + info.name)
    if given is None:
        return info.shape
    if not isinstance(given, StoredList) or given.count > _ROWS or given.of != "int32":
        raise FormatError(f"{ORIGINAL_SHAPE}{shown(info.name)} is not a shape of type int32")
    shape = tuple(map(int, given.first))
    if prod(shape) != prod(info.shape) or any(size < 0 for size in shape):
        raise CorruptError(
            f"tensor {shown(info.name)} has the shape {list(info.shape)}, but {ORIGINAL_SHAPE}* is "
            f"{list(shape)}, which has a different number of elements"
        )
    return shape


def _data_start(
    header: GgufHeader, first: Node, sizes: dict[TensorInfo, int | None], warnings: list[str]
) -> tuple[int, int]:
    """Return the offset and the alignment of the data.

    gguf-py uses the same alignment in all files of a split model, but writes ``general.alignment``
    only into the first file.
    """
    values, name = header.values, header.source.name
    alignment = values.get(ALIGNMENT, 32)
    whole = header.types.get(ALIGNMENT, _UINT32) == _UINT32 and alignment > 0
    if not whole or alignment & (alignment - 1):
        what = f"{ALIGNMENT} is {alignment!r}, not a power of two of type uint32"
        raise FormatError(what, where=name)
    if header.infos and ALIGNMENT not in values and first != alignment:
        last = max(sizes, key=lambda info: info.offset)
        end = max(info.offset + (size or 0) for info, size in sizes.items())
        others = [first] if isinstance(first, int) else [1 << bits for bits in range(17)]
        starts = {each: -(-header.end // each) * each for each in (alignment, *others)}
        fit = [
            each for each, start in starts.items()
            if header.source.size - start - end in (0, -end % each) or sizes[last] is None
        ]  # fmt: skip
        if not fit:
            raise CorruptError(
                f"{ALIGNMENT} is missing, and the size of the file does not fit {alignment} or "
                f"{first or 'another alignment'}: {shown(last.name)} may be cut",
                where=name, hint="download or copy all files of the model again",
            )  # fmt: skip
        if first is not None or fit[0] != alignment:
            text = "the size of the file fits" if first is None else "the first file has"
            wrong = f": llama.cpp uses {alignment} and reads wrong values"
            is_misread = fit[0] != alignment
            warning = (
                f"{name}: {ALIGNMENT} is missing; {text} {first or fit[0]}. "
                f"ckptkit uses {fit[0]}{wrong if is_misread else ''}"
            )
            warnings.append(Notice(LLAMA_CPP, warning, misread=True) if is_misread else warning)
        alignment = fit[0]
    return -(-header.end // alignment) * alignment, alignment


# Files of a split model


def _of(header: GgufHeader) -> str:
    """Return the number of a file and the number of files, such as ``2 of 3``."""
    found = ((header.values.get(key), add) for key, add in (("split.no", 1), ("split.count", 0)))
    return " of ".join(str(value + add) if type(value) is int else "?" for value, add in found)


def _files(
    first: GgufHeader, found: re.Match[str] | None, place: tuple[Folder, str] | None
) -> list[GgufHeader]:
    """Return the headers of all files of a split model. One of these headers is `first`."""
    count = first.values.get("split.count")
    files = []
    if found is None and type(count) is int and count == 1:
        files = [first]
    elif found is None or place is None or not 0 < int(found[2]) <= int(found[3]):
        raise UnsupportedError(
            f"is file {_of(first)} of a split model, but not named NAME-00001-of-00003.gguf",
            where=first.source.name, hint=f"restore the original file names; {_ALONE}",
        )  # fmt: skip
    elif type(count) is not int or count != int(found[3]):
        raise CorruptError(
            f"split.count is {_said(count)}, but the file name ends in of-{found[3]}",
            where=first.source.name, hint=f"fetch all files of the model again; {_ALONE}",
        )  # fmt: skip
    else:
        folder, name = place
        for number in range(1, count + 1):
            other = f"{found[1]}-{number:05}-of-{found[3]}{found[4]}"
            if other != name and other not in folder:
                raise CorruptError(
                    f"the model has {count} files, but {other} is missing",
                    where=first.source.name, hint=f"copy the missing file; {_ALONE}",
                )  # fmt: skip
            files.append(first if other == name else read_header(folder.open(other)))
    total = sum(len(each.infos) for each in files)
    for index, header in enumerate(files):
        expected = {"split.no": index, "split.count": count, "split.tensors.count": total}
        for key, right in expected.items():
            value = header.values.get(key)
            if type(value) is not int or value != right:
                what = f"{key} is {_said(value)}, not {right}"
                raise CorruptError(what, where=header.source.name, hint=_ALONE)
    return files


def _said(value: Node) -> Node:
    if isinstance(value, str):
        return shown(value)
    return "missing" if value is None else value
