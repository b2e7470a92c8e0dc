"""Read tar files strictly: refuse an archive that two readers could read differently.

    member           a header of 512 bytes, then data, then zeros that fill the last block of 512
    end of archive   1,024 zeros or more
    header           name[100] mode[8] uid[8] gid[8] size[12] mtime[12] checksum[8] type[1]
                     link[100] magic[8] owner[32] group[32] device[16] prefix[155]
    magic            "ustar\\0" "00" (POSIX) or "ustar  \\0" (GNU)
    number           octal digits, or (GNU) 0x80 and a big-endian number
    type x           a member that contains records "length key=value\\n" about the next member
    type g           a member that contains records about all later members
    type L (GNU)     a member that contains the full name of the next member
    type K (GNU)     a member that contains the full link target of the next member

After a member of type L or K, the header of the next member contains only the first 100 bytes of
the name or link target.

torch uses Python's tarfile. In tarfile, a later member replaces an earlier member of the same name,
and a number ends at its first invalid digit. tarfile skips unknown fields and stops at the first
block of zeros. Other programs read the same archive differently. ckptkit never unpacks an archive.
ckptkit ignores times, owners and modes, and does not follow links.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.errors import (
    AmbiguousError,
    CorruptError,
    FormatError,
    PathError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import check
from ckptkit.core.text import shown

BLOCK = 512
_MAGICS = (b"ustar\x0000", b"ustar  \0")
_KINDS = {b"0": "file", b"\0": "file", b"2": "link", b"5": "folder"}
_RECORDS = (b"x", b"g")
_LONG = {b"L": b"path", b"K": b"linkpath"}  # maps each GNU type to the equivalent record key
_LARGE = 8**11  # smallest size that the octal digits of a header cannot express
_NAME = 100  # number of bytes of a name in a header
_TAIL = 1 << 20  # maximum number of zeros at the end of an archive; tar writes up to 10 KiB
# Record keys that change neither the name nor the data of a member.
_GLOBAL_KEYS = frozenset(
    {b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"comment"}
)
_LOCAL_KEYS = _GLOBAL_KEYS | {b"path", b"size"}


class TarMember(NamedTuple):
    """One member. ``kind`` is file, folder or link. Only a file has data."""

    name: str
    kind: str
    data: Range


class _TarHeader(NamedTuple):
    """The fields of a header. ``name`` is the name in the fixed fields.

    If the member contains a long name (GNU type L), ``long`` is "path". If the member contains a
    long link target (type K), ``long`` is "linkpath". Otherwise, ``long`` is None.
    """

    name: bytes
    type: bytes
    size: int
    link: bytes
    long: bytes | None


def is_tar(head: bytes) -> bool:
    """Return whether Python's tarfile accepts `head` as the header of a tar file.

    torch uses tarfile. tarfile compares only the checksum.
    """
    if len(head) < BLOCK or not head[:BLOCK].strip(b"\0"):
        return False
    rest = head[:148] + b" " * 8 + head[156:BLOCK]
    signed = sum(byte - 256 if byte > 127 else byte for byte in rest)
    return lenient_number(head[148:156]) in (sum(rest), signed)


def lenient_number(field: bytes) -> int | None:
    """Parse a number as tarfile does. Return None for an invalid number."""
    if field[0] in (0x80, 0xFF):
        negative = 256 ** (len(field) - 1) if field[0] == 0xFF else 0
        return int.from_bytes(field[1:], "big") - negative
    try:
        return int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def first_name(source: ByteSource) -> bytes:
    """Return the name in the header of the first file, folder or link.

    Skip members that describe other members (types x, g, L and K).
    """
    at = 0
    for _ in range(3):
        header = _header(source.read(at, BLOCK), at)
        if header.type not in _RECORDS and header.long is None:
            return header.name
        at += BLOCK + _padded(header.size)
    return b""


def read_members(source: ByteSource, *, here: bool = False) -> dict[str, TarMember]:
    """Return every member by name, in file order.

    If `here` is true, remove a leading ``./`` from names. ``tar -C FOLDER .`` writes such names.
    Raises an InputError if the archive is damaged, ambiguous or unsupported.
    """
    members: dict[str, TarMember] = {}
    folded: set[str] = set()
    links: set[str] = set()
    records: dict[bytes, bytes] = {}  # records (type x) about the next member
    long: dict[bytes, bytes] = {}  # long names of GNU for the next member
    at = 0
    while (block := source.read(at, BLOCK)).strip(b"\0"):
        header = _header(block, at)
        data = Range(source, at + BLOCK, _size(header, records))
        at += BLOCK + _padded(data.length)
        if at > source.size:
            raise TruncatedError(
                f"ends inside the member {shown(header.name)}",
                hint="the file is truncated: download or copy it again",
            )
        if header.long is not None:
            if header.long in long:
                raise AmbiguousError("a tar member has two long names")
            long[header.long] = _long(data)
        elif header.type in _RECORDS:
            if records or long:
                raise AmbiguousError("a tar member has two groups of records")
            found = _records(data, _LOCAL_KEYS if header.type == b"x" else _GLOBAL_KEYS)
            records = found if header.type == b"x" else {}
        else:
            short = {b"path": header.name, b"linkpath": header.link}
            differ = any(text[:_NAME] != short[key] for key, text in long.items())
            if long and (records or differ):
                raise AmbiguousError(f"the tar member {shown(header.name)} has two names")
            named = short | records | long
            member = _member(header, named[b"path"], data, here)
            if member.name.lower() in folded:
                raise AmbiguousError(f"two members have the name {shown(member.name)}")
            folded.add(member.name.lower())
            members[member.name] = member
            if member.kind == "link":
                links.add(named[b"linkpath"].decode("latin-1"))
            check("tar_members", len(members), "members of a tar file")
            records, long = {}, {}
    if records or long:
        raise FormatError("a tar file ends with a record about a missing member")
    tail = source.size - at
    if tail < 2 * BLOCK or tail % BLOCK:
        raise TruncatedError(
            "ends inside the zeros after its last member",
            hint="the file is truncated: copy it again",
        )
    if tail > _TAIL or source.read(at, tail).strip(b"\0"):
        raise AmbiguousError(f"{tail:,} bytes follow the end of the tar file")
    if alias := min(links & members.keys(), default=""):
        raise AmbiguousError(f"a link is a second name for the member {shown(alias)}")
    return members


def _header(block: bytes, at: int) -> _TarHeader:
    if not is_tar(block):
        raise CorruptError(f"the checksum of the tar header at byte {at:,} is wrong")
    magic, type = block[257:265], block[156:157]
    if magic not in _MAGICS:
        raise UnsupportedError(f"the tar header at byte {at:,} is neither POSIX nor GNU")
    if magic == _MAGICS[1] and block[345:500].strip(b"\0"):
        raise AmbiguousError(
            "a GNU tar header contains times at the bytes where POSIX continues the name"
        )
    fields = (block[:100], block[157:257], block[345:500])
    for field in fields:
        text, _, rest = field.partition(b"\0")
        if rest.strip(b"\0"):
            raise AmbiguousError(f"a tar header has bytes after the end of the name {shown(text)}")
    name, link, start = (field.rstrip(b"\0") for field in fields)
    if start:
        name = start + b"/" + name
    if not _is_printable(name) or (start and name.endswith(b"/")):
        raise FormatError(f"a tar header has the invalid name {shown(name)}")
    digits = block[124:136]
    if digits[0] == 0x80:
        size = int.from_bytes(digits[1:], "big")
    elif re.fullmatch(rb" *[0-7]+[ \0]*", digits):
        size = int(digits.strip(b" \0"), 8)
    else:
        raise FormatError(f"a tar header has the size {digits!r}, which is not an octal number")
    return _TarHeader(name, type, size, link, _LONG.get(type) if magic == _MAGICS[1] else None)


def _is_printable(name: bytes) -> bool:
    return name.isascii() and name.decode("ascii").isprintable()


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _size(header: _TarHeader, records: dict[bytes, bytes]) -> int:
    """Return the size of the data.

    A record may contain the size only if the size is too large for the header.
    """
    if (text := records.get(b"size")) is None:
        return header.size
    size = int(text) if re.fullmatch(rb"[1-9][0-9]{0,18}", text) else 0
    if header.size or size < _LARGE or header.type not in (b"0", b"\0"):
        raise AmbiguousError(f"the tar member {shown(header.name)} has two sizes")
    return size


def _records(data: Range, known: frozenset[bytes]) -> dict[bytes, bytes]:
    """Parse records ``length key=value\\n``. ``length`` is the size of the record in bytes."""
    check("tar_records_bytes", data.length, "bytes of records about a tar member")
    text = data.read()
    found: dict[bytes, bytes] = {}
    while text:
        match = re.match(rb"([1-9][0-9]{0,3}) ([^=\0\n]+)=", text)
        length = int(match[1]) if match else 0
        is_whole = length <= len(text) and text[length - 1 : length] == b"\n"
        if match is None or match.end() >= length or not is_whole:
            raise FormatError("a record about a tar member is malformed")
        key, value = match[2], text[match.end() : length - 1]
        if key not in known:
            raise UnsupportedError(
                f"a record about a tar member sets {shown(key)}, which ckptkit does not support"
            )
        if key in found or b"\0" in value:
            raise AmbiguousError(
                f"a record about a tar member sets {shown(key)} twice, or to a value with a zero "
                "byte"
            )
        found[key] = value
        text = text[length:]
    return found


def _long(data: Range) -> bytes:
    """Return the long name or link target in the data of a member of type L or K."""
    check("tar_records_bytes", data.length, "bytes of a long name in a tar file")
    text, end, rest = data.read().partition(b"\0")
    if len(text) < _NAME or not end or rest:
        raise FormatError("a long name in a tar file is malformed")
    return text


def _member(header: _TarHeader, path: bytes, data: Range, here: bool) -> TarMember:
    kind = _KINDS.get(header.type)
    if kind is None:
        raise UnsupportedError(
            f"the tar member {shown(header.name)} is not a file: "
            f"its type is {header.type.decode('latin-1')!r}"
        )
    if kind != "file" and data.length:
        raise AmbiguousError(f"the tar member {shown(header.name)} is a {kind} with data")
    if header.name not in (b"", path[:_NAME]):  # readers that ignore records use the header's name
        _name(header.name, kind, here)
    return TarMember(_name(path, kind, here), kind, data)


def _name(name: bytes, kind: str, here: bool) -> str:
    """Return the name of a member as a string.

    Raises PathError if the name leads out of the archive.

    A leading ``./`` is removed only if `here` is true, because torch keeps a leading ``./``.
    """
    check("name_bytes", len(name), "bytes of a tar member's name")
    if not name or not _is_printable(name):
        raise FormatError(f"a tar member has the invalid name {shown(name)}")
    text = name.decode("ascii")
    if here and kind == "folder" and text in (".", "./"):
        return text
    text = text.removeprefix("./") if here else text
    parts = (text[:-1] if kind == "folder" and text.endswith("/") else text).split("/")
    if "\\" in text or any(part in ("", ".", "..") for part in parts):
        raise PathError(
            f"the name {shown(name)} of a tar member leads out of the archive, or does not name "
            f"a {kind}"
        )
    return text
