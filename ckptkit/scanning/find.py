"""Find every pickle in a file, including places that readers of the file ignore.

Programs may disagree about the format of a file. ckptkit therefore searches for pickles in all
formats that the file can have. ckptkit also searches members of archives, compressed streams, and
byte strings in pickles. `LIMITS.scan_depth` limits how deep files may be nested in files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from struct import Struct

from ckptkit.core.bytesource import ByteSource, Memory, Section, in_file
from ckptkit.core.errors import CkptkitError, CorruptError, LimitError
from ckptkit.core.limits import LIMITS, UNPACKED, check
from ckptkit.formats.compressed import CLOSED, WEAK_HEADS, Spool, method_of, spool
from ckptkit.formats.format import Probe
from ckptkit.formats.table import FORMATS
from ckptkit.formats.tar import BLOCK, is_tar, lenient_number
from ckptkit.formats.whats_inside import METHODS, PICKLES, member
from ckptkit.formats.zip_reader import CENTRAL_MAGIC, END, END64, END_MAGIC, LOCAL, MAGIC, U32
from ckptkit.pickles.judge import is_guarded
from ckptkit.pickles.streams import (
    TORCH_LOAD,
    Found,
    Inner,
    PickleStream,
    Program,
    Remark,
    Trace,
    Traced,
    looks_like_a_file,
    looks_like_a_pickle,
)
from ckptkit.scanning.trace import trace

Seen = Traced | Remark | Program
_PROTO = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_STEP = 1 << 20
# A Git LFS pointer cannot be a pickle, because "v" is not an opcode.
_POINTER = b"version https://git-lfs"
_TWO_FILES = "begins like one file and ends like a zip archive: programs may read either file"


def pickles(source: ByteSource, *, inside: bool = False) -> Iterator[Seen]:
    """Yield a trace for every pickle of a file, and a remark for each part that cannot be read.

    If `inside` is True, the source is a byte string in a pickle. Malformed content never raises an
    error.
    """
    try:
        yield from _Search(source).file(source, "", int(inside), sure=not inside)
    except LimitError as error:
        yield Remark("", error.message)


def refused_by_weights_only(source: ByteSource) -> str | None:
    """Return the first opcode or call that weights_only=True rejects in a torch.save file.

    Return None if weights_only=True accepts all opcodes and calls. This function does not check
    names. Malformed content never raises an error.
    """
    for seen in pickles(source):
        if isinstance(seen, Traced) and seen.loader == TORCH_LOAD and seen.trace.refused:
            return seen.trace.refused
    return None


class _Search:
    """Searches one file, counts the parts and bytes of the file, and checks the limits."""

    def __init__(self, source: ByteSource) -> None:
        self.most = LIMITS.scan_inflated_bytes + UNPACKED * source.size
        self.inflated = 0
        self.parts = 0
        self.traced = 0

    def _count(self) -> None:
        self.parts += 1
        check("scan_parts", self.parts, "parts of a file")

    def file(self, source: ByteSource, where: str, depth: int, sure: bool) -> Iterator[Seen]:
        """Yield traces and remarks for all content of a source that at least one reader can find.

        If `sure` is False, the source is a byte string that perhaps only looks like a file.
        """
        self._count()
        if depth > LIMITS.scan_depth:
            reason = (
                f"contains files nested more than {LIMITS.scan_depth} deep: ckptkit does not "
                "search them"
            )
            yield Remark(where, reason)
            return
        probe = Probe(source)
        found, refusal = _claimed(probe)
        if refusal is not None:
            yield Remark(where, refusal)
        if found is not None:
            yield from self._all(found, where, depth, sure)
        # Search for content that no format recognizes, or that only other programs find.
        head, claimed = probe.head, found is not None
        is_zip = head.startswith(MAGIC)
        two_files = not is_zip and depth == 0 and _ends_as_zip(source, head)
        if two_files:
            yield Remark(where, _TWO_FILES)
        if two_files or (is_zip and not claimed):
            yield from self._all(zip_members(source), where, depth, sure)
        if is_tar(head) and (is_zip or not claimed):
            yield from self._all(tar_members(source), where, depth, sure)
        if packed := method_of(head) or (_starting(WEAK_HEADS, head) if sure else None):
            yield from self._unpacked(Inner(packed, source, sure, packed), where, depth)
        elif head and not claimed and not is_zip and not head.startswith(_POINTER):
            # Search for a pickle if the file name has the suffix of a pickle, or if the bytes begin
            # like a pickle.
            named = depth == 0 and source.name.lower().endswith(PICKLES)
            if named or looks_like_a_pickle(head):
                stream = PickleStream("", source, 0, source.size)
                yield from self._stream(stream, where, depth, maybe=not named, alone=sure)
        if closed := _starting(CLOSED, head):
            yield Remark(where, f"is compressed ({closed}): ckptkit does not search it")

    def _all(self, found: Iterator[Found], where: str, depth: int, sure: bool) -> Iterator[Seen]:
        """Yield the content of a container, up to the first damaged byte."""
        try:
            for each in found:
                if isinstance(each, PickleStream):
                    alone = sure and not each.where
                    yield from self._stream(each, where, depth, each.weak and not sure, alone)
                elif isinstance(each, Inner):
                    yield from self._part(each, where, depth)
                else:
                    yield replace(each, where=joined(where, each.where))
        except LimitError:
            raise
        except CkptkitError as error:
            yield Remark(where, error.message)

    def _part(self, part: Inner, where: str, depth: int) -> Iterator[Seen]:
        self._count()
        source = part.source
        if part.packed is not None:
            source, _ = spool(source, part.packed, 512)
        head = source.read(0, min(512, source.size))
        if part.open_end and part.packed is None:
            if looks_like_a_pickle(head):
                stream = PickleStream(part.where, source, 0, source.size)
                yield from self._stream(stream, where, depth, maybe=True)
        elif part.likely or looks_like_a_file(head) or is_tar(head) or method_of(head):
            if part.packed is None:
                yield from self.file(source, joined(where, part.where), depth + 1, part.likely)
            else:
                yield from self._unpacked(part, where, depth)

    def _unpacked(self, part: Inner, where: str, depth: int) -> Iterator[Seen]:
        source, failure = self._unpack(part)
        inside = joined(where, part.where)
        # If bytes look like compressed data only by chance, they decompress to a few bytes or to
        # none.
        is_noise = part.packed in WEAK_HEADS.values() and (
            not source.size or (isinstance(failure, CorruptError) and source.size < _STEP)
        )
        if failure is not None and not is_noise:
            yield Remark(inside, failure.message)
        if source.size:
            yield from self.file(source, inside, depth + 1, part.likely)

    def _unpack(self, part: Inner | PickleStream) -> tuple[ByteSource, CkptkitError | None]:
        assert part.packed is not None
        most = max(0, self.most - self.inflated)
        unpacked, failure = spool(part.source, part.packed, most)
        self.inflated += unpacked.size
        if failure is None or (part.open_end and unpacked.size < most):
            return unpacked, None
        return unpacked, failure

    def _trace(self, source: ByteSource, start: int, stop: int) -> Trace:
        check("trace_bytes", self.traced, "bytes of the pickles of a file")
        found = trace(source, start, stop)
        self.traced += found.size
        return found

    def _stream(
        self, stream: PickleStream, where: str, depth: int, maybe: bool = False,
        alone: bool = False,
    ) -> Iterator[Seen]:  # fmt: skip
        """Yield the pickles of a stream, including pickles that no reader loads.

        If `maybe` is set, skip bytes that begin like a pickle but probably are no pickle. If
        `alone` is set, the stream is a complete file, and torch.load may read it as a legacy file.
        """
        inside = joined(where, stream.where)
        if stream.packed is not None:
            source, failure = self._unpack(stream)
            if failure is not None:
                yield Remark(inside, failure.message)
            stream = replace(stream, source=source, offset=0, length=source.size, packed=None)
        at, end = stream.offset, stream.offset + stream.length
        least = stream.count  # number of pickles that a reader loads
        if least is None:
            yield from self._scattered(stream, inside, depth)
            return
        for number in range(1, LIMITS.scan_parts):
            found = self._trace(stream.source, at, end)
            if number == 1 and alone and found.may_be_legacy and found.error is None:
                least, maybe = max(least, 5), False
            follows = number > least
            # Accept a complete pickle after the last expected pickle. A program may have appended
            # this pickle with `pickle.dump`.
            is_whole = follows and found.error is None and found.protocol >= 2
            if (maybe or follows) and not (is_whole or _convinces(found)):
                if number > 1 and not maybe:
                    left = f"{end - at:,} bytes follow the pickle"
                    yield Remark(inside, f"{left}: other programs may read these bytes")
                return
            place = inside if number == stream.count == 1 else f"{inside} pickle {number}".strip()
            yield from self._traced(stream, found, at, place, depth)
            at = found.stop
            done = number >= (stream.count or 1) and (stream.count != 1 or stream.open_end)
            if found.error is not None or at >= end or done:
                return

    def _scattered(self, stream: PickleStream, inside: str, depth: int) -> Iterator[Seen]:
        """Yield the pickles of a stream that contains other bytes between the pickles."""
        at, end, number = stream.offset, stream.offset + stream.length, 0
        while at < end:
            found = self._trace(stream.source, at, end)
            if number == 0 or found.error is None or found.calls:
                number += 1
                yield from self._traced(stream, found, at, f"{inside} pickle {number}", depth)
            at = _next(stream.source, max(at + 1, found.stop), end)

    def _traced(
        self, stream: PickleStream, found: Trace, at: int, place: str, depth: int
    ) -> Iterator[Seen]:
        """Yield the trace of a pickle, and the traces of pickles in its byte strings."""
        self._count()
        file, start = in_file(stream.source, 0)
        base = None if isinstance(file, (Memory, Spool)) else start  # None: decompressed
        yield Traced(place, at, base, stream.loader, stream.no_weights_only, found)
        for each in found.nested:
            inside = joined(place, f"byte string at {each.offset:,}")
            for seen in self.file(each.source, inside, depth + 1, each.loaded):
                if isinstance(seen, Traced) and not each.loaded:
                    yield replace(seen, nested=True)
                elif not isinstance(seen, Remark) or each.loaded:
                    yield seen


def _claimed(probe: Probe) -> tuple[Iterator[Found] | None, str | None]:
    """Return (pickles, None) for the first format that recognizes the file.

    If no format recognizes the file, return (None, message). The message is the first error message
    of a reader, or None without an error.
    """
    refusal = None
    for format in FORMATS:
        try:
            found = None if format.pickles is None else format.pickles(probe)
        except CkptkitError as error:
            refusal = refusal or error.message
            continue
        if found is not None:
            return found, None
    return None, refusal


def _ends_as_zip(source: ByteSource, head: bytes) -> bool:
    """Return True if a zip reader finds an archive at the end of the file.

    Return False if this archive is a member of a tar file.
    """
    archive = _zip_end(source)
    if archive is None or not is_tar(head):
        return archive is not None
    begin, size, start = archive
    stop = begin + size + END.size
    members = (each.source for each in tar_members(source) if isinstance(each, Inner))
    return not any(
        isinstance(each, Section) and each.offset <= start and stop <= each.offset + each.size
        for each in members
    )


def _starting(heads: Mapping[bytes, str], head: bytes) -> str | None:
    return next((name for start, name in heads.items() if head.startswith(start)), None)


def _convinces(found: Trace) -> bool:
    """Return True if bytes that begin like a pickle are probably a pickle.

    Return True if the bytes call a function whose name is a valid identifier. Also return True for
    a complete pickle with valid names. Random bytes contain a call opcode about once in a few
    thousand bytes, but the name of the called function is rarely valid.

    If ckptkit stops at a byte where CPython might continue, return True, because the remaining
    bytes could run code.
    """
    if found.goes_on or any(_could_be(call.name) for call in found.calls):
        return True
    if any(is_guarded(str(name)) and _could_be(str(name)) for name in found.globals):
        return True  # the bytes import a module of Python or torch
    held = found.globals or (found.nested and found.protocol)
    whole = found.error is None and all(_could_be(str(name)) for name in found.globals)
    return bool(held) and whole


def _could_be(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _next(source: ByteSource, at: int, end: int) -> int:
    """Return the next offset at which a pickle may begin, or `end`."""
    for base in range(at, end, _STEP):
        piece = source.read(base, min(_STEP + 1, end - base))
        found = [place for start in _PROTO if (place := piece.find(start)) >= 0]
        if found:
            return base + min(found)
    return end


def joined(outer: str, inner: str) -> str:
    """Return the description of a place: ``outer > inner``."""
    return f"{outer} > {inner}" if outer and inner else outer or inner


# Members of archives, including damaged members that only lenient readers find


def tar_members(source: ByteSource) -> Iterator[Found]:
    """Yield every member of a tar file, except empty members. Names and types do not matter.

    Some readers stop at an invalid header. This function skips an invalid header.
    """
    at = count = 0
    while at + BLOCK <= source.size and count < LIMITS.tar_members:
        block = source.read(at, BLOCK)
        at += BLOCK
        if not is_tar(block):
            continue
        count += 1
        size = lenient_number(block[124:136]) or 0
        name = block[:100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
        if 0 < size <= source.size - at:
            yield Inner(name, Section(source, at, size), name.lower().endswith(PICKLES))
            at += -(-size // BLOCK) * BLOCK
        elif size > 0:
            yield Remark(name, "the tar file is truncated in this member")
            if at < source.size:
                yield Inner(name, Section(source, at, source.size - at), open_end=True)


_CENTRAL = Struct("<4s4xHH4xLLLHHHH6xL")
_TAIL = END.size + 0xFFFF
_SCRIPT = re.compile(r"[^/]*/(constants|bytecode)\.pkl")
# A member: its name, compression method, offset and number of bytes. The number of bytes is None if
# the header does not contain this number.
_Member = tuple[str, int, int, int | None]


def zip_members(source: ByteSource) -> Iterator[Found]:
    """Yield every zip member that at least one zip reader can find in a file.

    This function finds two kinds of members:

    * Members in the last directory of the file, which zipfile, miniz and torch read. The archive
      may begin anywhere in the file.
    * Members with a local header. Readers that start at the front of the file, or that repair a
      file, find members by their local headers.

    The bytes of a member start after its local header. Wrong checksums, flags, sizes and names do
    not matter.
    """
    members = {each[2]: each for each in (*_headers(source), *_listed(source))}
    script = any(_SCRIPT.fullmatch(name) for name, *_ in members.values())
    for name, method, start, stored in members.values():
        end = source.size if stored is None else min(source.size, start + stored)
        if start >= end:
            continue
        where = f"{name} at byte {start:,}"
        if method not in METHODS:
            yield Remark(where, f"is compressed by method {method}: ckptkit does not search it")
            continue
        section, top = Section(source, start, end - start), name.partition("/")[0]
        found = member(name, section, top, script, METHODS[method], stored is None)
        yield replace(found, where=where)


def _zip_end(source: ByteSource) -> tuple[int, int, int] | None:
    """Return the offset and size of the last directory, and the start of the archive.

    Return None if the file contains no directory.
    """
    length = min(source.size, _TAIL)
    tail = source.read(source.size - length, length)
    at = tail.rfind(END_MAGIC, 0, max(0, length - 18))
    if at < 0:
        return None
    *_, size, start, _ = END.unpack_from(tail, at)
    stop = source.size - length + at
    if stop >= 76 and U32 in (size, start):
        wide, locator = END64.unpack(source.read(stop - 76, 56)), source.read(stop - 20, 4)
        if locator == b"PK\6\7" and wide[0] == b"PK\6\6":
            size, start, stop = wide[-2], wide[-1], stop - 76
    begin = stop - size
    if begin < 0 or size > LIMITS.zip_directory_bytes:
        return None
    return begin, size, begin - start


def _listed(source: ByteSource) -> Iterator[_Member]:
    end = _zip_end(source)
    if end is None:
        return
    begin, size, shift = end
    data = source.read(begin, size)
    at = 0
    while at + 46 <= len(data):
        magic, _, method, _, stored, _, n, x, comment, _, offset = _CENTRAL.unpack_from(data, at)
        if magic != CENTRAL_MAGIC:
            return
        name = data[at + 46 : at + 46 + n].decode("utf-8", "backslashreplace")
        at += 46 + n + x + comment
        header = _header(source, offset + shift) or _header(source, offset)
        if header is not None:
            yield name, method, header[2], None if stored == U32 else stored


def _header(source: ByteSource, at: int) -> _Member | None:
    """Return the fields of the local header at `at`. Return None if `at` is not a header."""
    if not 0 <= at <= source.size - LOCAL.size:
        return None
    magic, flags, method, _, stored, size, n, x = LOCAL.unpack(source.read(at, LOCAL.size))
    if magic != MAGIC or at + 30 + n + x > source.size:
        return None
    name = source.read(at + 30, min(n, LIMITS.name_bytes)).decode("utf-8", "backslashreplace")
    known = (
        stored if stored not in (0, U32) and not flags & 8 and (method or size == stored) else None
    )
    return name, method, at + 30 + n + x, known


def _headers(source: ByteSource) -> Iterator[_Member]:
    """Yield all local headers in the file. Read the complete file in blocks."""
    count = 0
    for base in range(0, source.size, _STEP):
        piece = source.read(base, min(_STEP + 3, source.size - base))
        at = piece.find(MAGIC)
        while 0 <= at < _STEP:
            found = _header(source, base + at)
            if found is not None and (count := count + 1) <= LIMITS.zip_entries:
                yield found
            at = piece.find(MAGIC, at + 1)
