"""Every pickle in a file: those of its format, and those in places that no format reads.

A file may be several things at once, depending on who reads it: all of them are looked at. What is
found inside is looked at in turn, down to a limit: members of archives, compressed streams, byte
strings of pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckptkit.core.bytesource import ByteSource, Memory, Section
from ckptkit.core.errors import CkptkitError, CorruptError, LimitError
from ckptkit.core.limits import LIMITS, UNPACKED, check
from ckptkit.formats.compressed import CLOSED, WEAK_HEADS, Spool, method_of, spool, unpack
from ckptkit.formats.format import Probe
from ckptkit.formats.table import FORMATS
from ckptkit.formats.tar import is_tar
from ckptkit.formats.whats_inside import PICKLES
from ckptkit.formats.zip_reader import MAGIC
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
from ckptkit.scanning import find_tar as hidden_tar
from ckptkit.scanning import find_zip as hidden_zip
from ckptkit.scanning.trace import trace

Seen = Traced | Remark | Program
_PROTO = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_STEP = 1 << 20
_POINTER = b"version https://git-lfs"  # stands for a file; begins with no opcode


def pickles(source: ByteSource) -> Iterator[Seen]:
    """Yield every pickle of a file, traced, and what could not be read.

    Never raises for what is in the bytes.
    """
    search = _Search(source)
    try:
        yield from search.file(source, "", 0, sure=True)
    except LimitError as error:
        yield Remark("", error.message)


def inside(source: ByteSource) -> Iterator[Seen]:
    """Yield what `pickles` would for a byte string in a pickle, if that were `source`."""
    try:
        yield from _Search(source).file(source, "", 1, sure=False)
    except LimitError as error:
        yield Remark("", error.message)


def refused_by_weights_only(source: ByteSource) -> str | None:
    """Return the first step of a file of torch.save that weights_only=True refuses, None if none.

    Names are no steps. Never raises for what is in the bytes.
    """
    search = _Search(source)
    try:
        for each in _claimed(Probe(source))[0] or ():
            if isinstance(each, PickleStream) and each.loader == TORCH_LOAD:
                return search.refused(each)
    except CkptkitError:
        pass
    return None


_TWO_FILES = "ends as a zip archive does, and begins as something else: two readers, two files"


class _Search:
    """The search of one file, and how much of its limits is used up."""

    def __init__(self, source: ByteSource) -> None:
        self.most = LIMITS.scan_inflated_bytes + UNPACKED * source.size
        self.inflated = 0
        self.parts = 0
        self.traced = 0

    def file(self, source: ByteSource, where: str, depth: int, sure: bool) -> Iterator[Seen]:
        """Yield everything that any reader sees in a source.

        `sure`: it is a file of its own, and not only bytes that look like one.
        """
        self._count()
        if depth > LIMITS.scan_depth:
            yield Remark(
                where,
                f"files inside files, more than {LIMITS.scan_depth} deep, are not looked into",
            )
            return
        probe = Probe(source)
        found, refusal = _claimed(probe)
        if refusal is not None:
            yield Remark(where, refusal)
        if found is not None:
            yield from self._all(found, where, depth, sure)
        yield from self._otherwise(probe, where, depth, found is not None, sure)

    def _trace(self, source: ByteSource, start: int, stop: int) -> Trace:
        check("trace_bytes", self.traced, "bytes of the pickles of a file")
        found = trace(source, start, stop)
        self.traced += found.size
        return found

    def _count(self) -> None:
        self.parts += 1
        check("scan_parts", self.parts, "places in a file")

    def _otherwise(
        self, probe: Probe, where: str, depth: int, claimed: bool, sure: bool
    ) -> Iterator[Seen]:
        """Yield what no format claims, or other readers see."""
        source, head = probe.source, probe.head
        is_zip = head.startswith(MAGIC)
        two_files = not is_zip and depth == 0 and _ends_as_zip(source, head)
        if two_files:
            yield Remark(where, _TWO_FILES)
        if two_files or (is_zip and not claimed):
            yield from self._all(hidden_zip.pickles(source), where, depth, sure)
        if is_tar(head) and (is_zip or not claimed):
            yield from self._all(hidden_tar.pickles(source), where, depth, sure)
        if packed := _packed(head, weak=sure):
            yield from self._unpacked(Inner(packed, source, sure, packed), where, depth)
        elif not claimed and not is_zip:
            yield from self._bare(source, head, where, depth, sure)
        if closed := _starting(CLOSED, head):
            yield Remark(where, f"is compressed ({closed}), which is not looked into")

    def _bare(
        self, source: ByteSource, head: bytes, where: str, depth: int, sure: bool
    ) -> Iterator[Seen]:
        """Yield the pickle that a file is by its name, or may be by its beginning."""
        if head.startswith(_POINTER):
            return
        named = depth == 0 and source.name.lower().endswith(PICKLES)
        if head and (named or looks_like_a_pickle(head)):
            stream = PickleStream("", source, 0, source.size)
            yield from self._stream(stream, where, depth, maybe=not named, alone=sure)

    def _all(self, found: Iterator[Found], where: str, depth: int, sure: bool) -> Iterator[Seen]:
        """Yield what a container holds, up to where it is damaged."""
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
            head, _ = unpack(source, part.packed, 512)
        else:
            head = source.read(0, min(512, source.size))
        if part.open_end and part.packed is None:
            if looks_like_a_pickle(head):
                yield from self._stream(
                    PickleStream(part.where, source, 0, source.size), where, depth, maybe=True
                )
        elif part.likely or _is_interesting(head):
            if part.packed is None:
                yield from self.file(source, joined(where, part.where), depth + 1, part.likely)
            else:
                yield from self._unpacked(part, where, depth)

    def _unpacked(self, part: Inner, where: str, depth: int) -> Iterator[Seen]:
        source, failure = self._unpack(part)
        inside = joined(where, part.where)
        if failure is not None and not _is_noise(part, source, failure):
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

    def _stream(
        self,
        stream: PickleStream,
        where: str,
        depth: int,
        maybe: bool = False,
        alone: bool = False,
    ) -> Iterator[Seen]:
        """The pickles of a stream, and what they hold in turn.

        With `maybe`, bytes that only happen to begin like a pickle are passed over. `alone`: the
        stream is a file, which torch.load may take for a legacy stream.
        """
        if stream.packed is not None:
            source, failure = self._unpack(stream)
            if failure is not None:
                yield Remark(joined(where, stream.where), failure.message)
            stream = replace(stream, source=source, offset=0, length=source.size, packed=None)
        if stream.count is None:
            yield from self._scattered(stream, where, depth)
        else:
            yield from self._in_a_row(stream, where, depth, maybe, alone)

    def _in_a_row(
        self, stream: PickleStream, where: str, depth: int, maybe: bool, alone: bool
    ) -> Iterator[Seen]:
        """Yield one pickle, or several; after one, also those that no reader should load."""
        assert stream.count is not None
        inside, at, end = joined(where, stream.where), stream.offset, stream.offset + stream.length
        least = stream.count  # pickles that some reader loads
        for number in range(1, LIMITS.scan_parts):
            found = self._trace(stream.source, at, end)
            if number == 1 and alone and found.may_be_legacy and found.error is None:
                least, maybe = max(least, 5), False
            follows = number > least
            if (maybe or follows) and not (_convinces(found) or (follows and _is_whole(found))):
                if number > 1 and not maybe:
                    yield Remark(
                        inside,
                        f"{end - at:,} bytes follow the pickle: other readers may see something "
                        "there",
                    )
                return
            place = inside if number == stream.count == 1 else f"{inside} pickle {number}".strip()
            yield from self._traced(stream, found, at, place, depth)
            at = found.stop
            done = number >= stream.count and (stream.count > 1 or stream.open_end)
            if found.error is not None or at >= end or done:
                return

    def refused(self, stream: PickleStream) -> str | None:
        """Return the first step in a stream that weights_only=True refuses, None if none."""
        source, at, end = stream.source, stream.offset, stream.offset + stream.length
        if stream.packed is not None:
            source, _ = self._unpack(stream)
            at, end = 0, source.size
        for _ in range(stream.count or 1):
            found = self._trace(source, at, end)
            if found.refused is not None:
                return found.refused
            at = found.stop
        return None

    def _scattered(self, stream: PickleStream, where: str, depth: int) -> Iterator[Seen]:
        """Pickles with other bytes between them."""
        at, end, number = stream.offset, stream.offset + stream.length, 0
        while at < end:
            found = self._trace(stream.source, at, end)
            if number == 0 or found.error is None or found.calls:
                number += 1
                yield from self._traced(
                    stream, found, at, f"{joined(where, stream.where)} pickle {number}", depth
                )
            at = _next(stream.source, max(at + 1, found.stop), end)

    def _traced(
        self, stream: PickleStream, found: Trace, at: int, place: str, depth: int
    ) -> Iterator[Seen]:
        self._count()
        yield Traced(place, at, _base(stream.source), stream.loader, stream.no_weights_only, found)
        yield from self._nested(found, place, depth)

    def _nested(self, found: Trace, where: str, depth: int) -> Iterator[Seen]:
        for each in found.nested:
            inside = joined(where, f"byte string at {each.offset:,}")
            for seen in self.file(each.source, inside, depth + 1, each.loaded):
                if isinstance(seen, Traced) and not each.loaded:
                    yield replace(seen, nested=True)
                elif not isinstance(seen, Remark) or each.loaded:
                    yield seen


def _claimed(probe: Probe) -> tuple[Iterator[Found] | None, str | None]:
    """Return the pickles that the first matching format finds, and why its reader would refuse."""
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
    """Return whether readers of zip archives see one that is not a whole member of a tar file."""
    archive = hidden_zip.extent(source)
    if archive is None or not is_tar(head):
        return archive is not None
    start, stop = archive
    members = (each.source for each in hidden_tar.pickles(source) if isinstance(each, Inner))
    return not any(
        isinstance(each, Section) and each.offset <= start and stop <= each.offset + each.size
        for each in members
    )


def _base(source: ByteSource) -> int | None:
    """Return where a source begins in its file, None for one that was decompressed."""
    at = 0
    while isinstance(source, Section):
        at, source = at + source.offset, source.whole
    return None if isinstance(source, (Memory, Spool)) else at


def _is_interesting(head: bytes) -> bool:
    """Return whether bytes that begin so may be a file, though nothing names them one."""
    return looks_like_a_file(head) or is_tar(head) or bool(_packed(head, weak=False))


def _packed(head: bytes, weak: bool) -> str | None:
    return method_of(head) or (_starting(WEAK_HEADS, head) if weak else None)


def _is_noise(part: Inner, inner: ByteSource, failure: CkptkitError) -> bool:
    """Return whether bytes are not compressed, though they begin as if: few become anything."""
    if part.packed not in WEAK_HEADS.values():
        return False
    return not inner.size or (isinstance(failure, CorruptError) and inner.size < _STEP)


def _starting(heads: Mapping[bytes, str], head: bytes) -> str | None:
    return next((name for start, name in heads.items() if head.startswith(start)), None)


def _convinces(found: Trace) -> bool:
    """Return whether tried bytes are a pickle that matters: it ends, or calls, with possible names.

    Every few thousand random bytes something is called. Where ckptkit stops and CPython may go on,
    nobody knows what follows.
    """
    if found.goes_on or any(_could_be(call.name) for call in found.calls):
        return True
    if any(is_guarded(str(name)) and _could_be(str(name)) for name in found.globals):
        return True  # a module of Python or torch is imported, whatever follows
    held = found.globals or (found.nested and found.protocol)
    whole = found.error is None and all(_could_be(str(name)) for name in found.globals)
    return bool(held) and whole


def _is_whole(found: Trace) -> bool:
    """Return whether bytes after a pickle are another, as `pickle.dump` appends it to a file."""
    return found.error is None and found.protocol >= 2


def _could_be(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _next(source: ByteSource, at: int, end: int) -> int:
    """Return where the next pickle may begin."""
    for base in range(at, end, _STEP):
        piece = source.read(base, min(_STEP + 1, end - base))
        found = [place for start in _PROTO if (place := piece.find(start)) >= 0]
        if found:
            return base + min(found)
    return end


def joined(outer: str, inner: str) -> str:
    """The place of something inside something."""
    return f"{outer} > {inner}" if outer and inner else outer or inner
