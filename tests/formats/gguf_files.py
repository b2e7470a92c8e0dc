"""GGUF files written by hand: a header of structs, and the data of the tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KINDS = {bool: 7, int: 4, float: 6, str: 8}


class Typed(NamedTuple):
    """A value of a type that Python's does not tell."""

    number: int
    value: Any


class Entry(NamedTuple):
    """A tensor: its sizes in the order of torch, the number of its type, and its bytes."""

    name: str | bytes
    shape: Sequence[int]
    number: int
    data: bytes
    offset: int | None = None


class Writer:
    """Numbers of one byte order and one width of counts."""

    def __init__(self, version: int = 3, order: str = "<") -> None:
        self.version, self.order = version, order
        self.wide = "I" if version == 1 else "Q"

    def number(self, code: str, value: Any) -> bytes:
        return struct.pack(self.order + code, value)

    def text(self, text: str | bytes) -> bytes:
        data = text.encode() if isinstance(text, str) else text
        return self.number(self.wide, len(data)) + data

    def value(self, value: Any) -> tuple[int, bytes]:
        """The number of the type of a value, and its bytes."""
        number = None
        if isinstance(value, Typed):
            number, value = value
        if isinstance(value, (list, tuple)):
            inner = [self.value(each if number is None else Typed(number, each)) for each in value]
            kind = inner[0][0] if inner else (8 if number is None else number)
            counted = self.number("I", kind) + self.number(self.wide, len(inner))
            return 9, counted + b"".join(data for _, data in inner)
        number = KINDS.get(type(value), 8) if number is None else number
        if number == 8:
            return 8, self.text(value)
        return number, self.number(CODES[number], value)

    def entry(self, key: str | bytes, value: Any) -> bytes:
        number, data = self.value(value)
        return self.text(key) + self.number("I", number) + data

    def info(self, entry: Entry, offset: int) -> bytes:
        sizes = b"".join(self.number(self.wide, size) for size in reversed(entry.shape))
        head = self.text(entry.name) + self.number("I", len(entry.shape)) + sizes
        return head + self.number("I", entry.number) + self.number("Q", offset)


def made(
    values: Iterable[tuple[str | bytes, Any]] = (("general.architecture", "llama"),),
    tensors: Iterable[Entry] = (),
    *,
    version: int = 3,
    order: str = "<",
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    padded: bool = True,
) -> bytes:
    """A file with these metadata and tensors; `counts` are those that it claims.

    `padded`: so is the last tensor, as by llama.cpp.
    """
    writer, values, tensors = Writer(version, order), list(values), list(tensors)
    head = b"GGUF" + writer.number("I", version)
    for count in counts or (len(tensors), len(values)):
        head += writer.number(writer.wide, count)
    head += b"".join(writer.entry(key, value) for key, value in values)
    data = b""
    for each in tensors:
        offset = len(data) if each.offset is None else each.offset
        head += writer.info(each, offset)
        data = data.ljust(offset, b"\0") + each.data
        if padded or each is not tensors[-1]:
            data += bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + data if tensors else head


def infos(data: bytes) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Name, shape, number of the type and offset of each tensor of a file of version 3."""
    found, (tensors,) = [], struct.unpack_from("<Q", data, 8)
    at = ends(data)[-1 - tensors] if tensors else 0
    for _ in range(tensors):
        (length,) = struct.unpack_from("<Q", data, at)
        name, at = data[at + 8 : at + 8 + length].decode(), at + 8 + length
        (rank,) = struct.unpack_from("<I", data, at)
        sizes = struct.unpack_from(f"<{rank}Q", data, at + 4)
        number, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * rank)
        found.append((name, sizes[::-1], number, offset))
        at += 4 + 8 * rank + 12
    return found


def ends(data: bytes) -> list[int]:
    """The offsets where the parts of a little-endian file of version 3 end, up to the data."""
    (tensors, entries), at = struct.unpack_from("<QQ", data, 8), 24
    found = [4, 8, 16, at]

    def text(at: int) -> int:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]

    def value(number: int, at: int) -> int:
        if number == 8:
            return text(at)
        if number != 9:
            return at + struct.calcsize(CODES[number])
        (inner, count), at = struct.unpack_from("<IQ", data, at), at + 12
        for _ in range(count):
            at = value(inner, at)
        return at

    for _ in range(entries):
        at = text(at)
        found += [at, at + 4]
        at = value(struct.unpack_from("<I", data, at)[0], at + 4)
        found.append(at)
    for _ in range(tensors):
        at = text(at)
        (rank,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * rank + 12
        found.append(at)
    return found
