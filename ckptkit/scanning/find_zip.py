"""Members that lenient readers find in a zip file that the strict reader refuses.

Members as the last directory of the file lists them, wherever in the file the archive begins
(zipfile, miniz, torch); and whatever has a local header, listed or not (who reads from the front,
or repairs). Checksums, flags, sizes and names that contradict each other are not looked at: the
bytes of a member are where its local header ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from struct import Struct
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Section
from ckptkit.core.limits import LIMITS
from ckptkit.formats.whats_inside import METHODS, member
from ckptkit.formats.zip_reader import MAGIC
from ckptkit.pickles.streams import Found, Remark

_END, _END_MAGIC = Struct("<4s4H2LH"), b"PK\5\6"
_END64, _LOCATOR = Struct("<4sQ2H2L4Q"), Struct("<4sLQL")
_CENTRAL, _CENTRAL_MAGIC = Struct("<4s4xHH4xLLLHHHH6xL"), b"PK\1\2"
_LOCAL = Struct("<4s2xHH4xLLLHH")
_TAIL = 22 + 0xFFFF
_U32 = 0xFFFFFFFF
_STEP = 1 << 20
_SCRIPT = re.compile(r"[^/]*/(constants|bytecode)\.pkl")


class FoundMember(NamedTuple):
    name: str
    method: int
    data: int  # offset of its bytes
    stored: int | None  # None: until something else begins


def extent(source: ByteSource) -> tuple[int, int] | None:
    """Return where the archive begins and ends for readers that search from the end of a file."""
    end = _end(source)
    if end is None:
        return None
    begin, size, shift = end
    return shift, begin + size + _END.size


def pickles(source: ByteSource) -> Iterator[Found]:
    """Yield every member that some reader would find."""
    members = {each.data: each for each in _headers(source)}
    members |= {each.data: each for each in _listed(source)}
    script = any(_SCRIPT.fullmatch(each.name) for each in members.values())
    for each in members.values():
        end = source.size if each.stored is None else min(source.size, each.data + each.stored)
        if each.data >= end:
            continue
        where = f"{each.name} at byte {each.data:,}"
        if each.method not in METHODS:
            yield Remark(where, f"compressed by method {each.method}, which is not looked into")
            continue
        section = Section(source, each.data, end - each.data)
        top = each.name.partition("/")[0]
        found = member(each.name, section, top, script, METHODS[each.method], each.stored is None)
        yield replace(found, where=where)


def _end(source: ByteSource) -> tuple[int, int, int] | None:
    """Return place and size of the last directory, and the shift of offsets; None without."""
    length = min(source.size, _TAIL)
    tail = source.read(source.size - length, length)
    at = tail.rfind(_END_MAGIC, 0, max(0, length - 18))
    if at < 0:
        return None
    *_, size, start, _ = _END.unpack_from(tail, at)
    stop = source.size - length + at
    if stop >= 76 and _U32 in (size, start):
        wide, locator = _END64.unpack(source.read(stop - 76, 56)), source.read(stop - 20, 4)
        if locator == b"PK\6\7" and wide[0] == b"PK\6\6":
            size, start, stop = wide[-2], wide[-1], stop - 76
    begin = stop - size
    if begin < 0 or size > LIMITS.zip_directory_bytes:
        return None
    return begin, size, begin - start


def _listed(source: ByteSource) -> Iterator[FoundMember]:
    end = _end(source)
    if end is None:
        return
    begin, size, shift = end
    data = source.read(begin, size)
    at = 0
    while at + 46 <= len(data):
        magic, _, method, _, stored, _, n, x, comment, _, offset = _CENTRAL.unpack_from(data, at)
        if magic != _CENTRAL_MAGIC:
            return
        name = data[at + 46 : at + 46 + n].decode("utf-8", "backslashreplace")
        at += 46 + n + x + comment
        header = _header(source, offset + shift) or _header(source, offset)
        if header is not None:
            yield FoundMember(name, method, header.data, None if stored == _U32 else stored)


def _header(source: ByteSource, at: int) -> FoundMember | None:
    """Return the fields of the local header at `at`, None if there is none."""
    if not 0 <= at <= source.size - _LOCAL.size:
        return None
    magic, flags, method, _, stored, size, n, x = _LOCAL.unpack(source.read(at, _LOCAL.size))
    if magic != MAGIC or at + 30 + n + x > source.size:
        return None
    name = source.read(at + 30, min(n, LIMITS.name_bytes)).decode("utf-8", "backslashreplace")
    known = (
        stored if stored not in (0, _U32) and not flags & 8 and (method or size == stored) else None
    )
    return FoundMember(name, method, at + 30 + n + x, known)


def _headers(source: ByteSource) -> Iterator[FoundMember]:
    """Local headers, wherever they are: reads the whole file, in pieces."""
    count = 0
    for base in range(0, source.size, _STEP):
        piece = source.read(base, min(_STEP + 3, source.size - base))
        at = piece.find(MAGIC)
        while 0 <= at < _STEP:
            found = _header(source, base + at)
            if found is not None and (count := count + 1) <= LIMITS.zip_entries:
                yield found
            at = piece.find(MAGIC, at + 1)
