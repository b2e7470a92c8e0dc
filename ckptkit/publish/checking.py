"""Compare what a plan reads with the checksums that its sources hold.

New bytes, and checksums of new bytes, must not hide that a tensor is damaged. A member of a zip
file that a plan reads as a whole is summed up while it is read (`ReadSums`). Only what was read in
pieces that do not follow each other, as transposes do, is read once more. Bytes that are copied
together with their checksum stay as they are, damaged or not: nobody looks at them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Derived, Extent, Identity, Range, in_file
from ckptkit.core.checksum import crc32, crc32_combine
from ckptkit.core.errors import CorruptError, InputError
from ckptkit.core.plan import OutputFile, Segment, Summed
from ckptkit.core.text import mismatch, shown
from ckptkit.publish.copying import pieces

Run = Sequence[int]  # number of the source, offset, length, CRC-32

_PIECE = 64 << 20  # bytes that one thread reads again
_ROUNDING = 1e-9  # of shares of an input
_HEADER = 4 << 10  # bytes of a header of an array at most


class Check(NamedTuple):
    """A member that is read as a whole: `length` bytes of a file from `offset`, their CRC-32."""

    source: ByteSource
    offset: int
    length: int
    crc32: int
    name: str

    @property
    def range(self) -> Range:
        return Range(self.source, self.offset, self.length)


class DamageError(CorruptError):
    """Bytes that were read do not have their checksum."""

    def __init__(self, message: str, damaged: Sequence[Range]) -> None:
        super().__init__(message, where=damaged[0].source.name)
        self.damaged = damaged


def checks(files: Iterable[OutputFile], *, kept: bool = False) -> list[Check]:
    """Return the members that new bytes are made of; with `kept`, those copied with their sums."""
    read: dict[int, tuple[ByteSource, list[tuple[int, int, float]]]] = {}
    for file in files:
        for segment in file.segments:
            if kept is (file.keeps_sums and not isinstance(segment, Summed)):
                for source, offset, length, share in _read(_extent(segment), 1):
                    if source.members is not None:
                        row = read.setdefault(id(source), (source, []))
                        row[1].append((offset, length, length * share))
    try:
        return [check for row in read.values() for check in _whole(*row)]
    except InputError:
        for source, _ in read.values():
            source.check_unchanged()
        raise


def identities(found: Iterable[Check]) -> tuple[Identity, ...]:
    """Return the sources to be summed up, in the order of their numbers."""
    return tuple(dict.fromkeys(check.source.identity for check in found))


def _extent(segment: Segment) -> Extent | None:
    if isinstance(segment, Summed):
        return segment.extent
    return segment if isinstance(segment, (Range, Derived)) else None


def _read(extent: Extent | None, share: float) -> Iterator[tuple[ByteSource, int, int, float]]:
    """Yield the ranges that an extent reads, each with the share of its bytes that is needed.

    What is inflated compares its checksum itself.
    """
    if isinstance(extent, Range):
        yield (*extent, share)
    elif isinstance(extent, Derived) and extent.operation != "inflate":
        for number, each in enumerate(extent.inputs):
            yield from _read(each, share * min(1, _needed(extent, number) / max(1, each.length)))


def _needed(derived: Derived, number: int) -> int:
    """Return how many bytes of an input an operation needs."""
    if derived.operation in ("gather", "slice"):
        return derived.length
    if derived.operation == "chunks":
        itemsize, _, boxes = derived.parameters
        assert isinstance(itemsize, int) and isinstance(boxes, tuple)
        sizes: Sequence[int] = boxes[number][1]
        return itemsize * prod(sizes)
    return derived.inputs[number].length


def _whole(source: ByteSource, read: list[tuple[int, int, float]]) -> Iterator[Check]:
    """Yield the members of a source of which all bytes are read."""
    assert source.members is not None
    file, base = in_file(source, 0)
    read.sort()
    starts = [start for start, _, _ in read]
    for name, offset, stop, size, crc in source.members(source):
        number = bisect_left(starts, offset)
        if number == len(read) or starts[number] >= stop:
            continue
        # Elements of an array begin after a header, which was read before.
        at = first = starts[number]
        header = first - offset if offset + size == stop else 0
        end, amount = first + size - header, float(header)
        while number < len(read) and starts[number] <= at < end:
            start, length, needed = read[number]
            at, amount, number = max(at, start + length), amount + needed, number + 1
        if at == end <= stop and header <= _HEADER and amount * (1 + _ROUNDING) >= size > 0:
            yield Check(file, base + first - header, size, crc, name)


def compare(found: Sequence[Check], runs: Iterable[Run]) -> list[tuple[Check, int]]:
    """Return the members whose bytes do not have their CRC-32, each with the one that they have.

    `runs` are the sums of what was read. Gaps between them are read now, except in remote files.
    """
    numbers = {identity: number for number, identity in enumerate(identities(found))}
    known = _by_place(runs)
    parts = []
    for number, check in enumerate(found):
        starts, row = known.get(numbers[check.source.identity], _NOTHING)
        if row.get(check.offset) != (check.length, check.crc32):
            parts += [(number, *part) for part in _parts(check, starts, row)]
    sums: dict[int, int] = {}
    for number, length, crc in _summed(parts):
        sums[number] = crc32_combine(sums[number], crc, length) if number in sums else crc
    return [(found[n], crc) for n, crc in sums.items() if crc != found[n].crc32]


def _summed(parts: list[tuple[int, Range, int | None]]) -> Iterator[tuple[int, int, int]]:
    """Yield number, length and CRC-32 of each part, of which some have to be read."""
    if not parts:
        return
    from ckptkit.compute.threads import ordered

    yield from ordered(
        lambda part: (part[0], part[1].length, _sum(part[1]) if part[2] is None else part[2]),
        parts,
        lambda part: part[1].length if part[2] is None else 0,
    )


Known = tuple[list[int], dict[int, tuple[int, int]]]  # offsets; length and CRC-32 by offset
_NOTHING: Known = ([], {})


def _by_place(runs: Iterable[Run]) -> dict[int, Known]:
    """Return the longest run from each offset of each source, and the offsets, sorted."""
    longest: dict[int, dict[int, tuple[int, int]]] = {}
    for number, offset, length, crc in runs:
        row = longest.setdefault(number, {})
        row[offset] = max(row.get(offset, (0, 0)), (length, crc))
    return {number: (sorted(row), row) for number, row in longest.items()}


def _parts(
    check: Check, starts: list[int], known: dict[int, tuple[int, int]]
) -> list[tuple[Range, int | None]]:
    """Return consecutive parts of a member, each with its CRC-32, None for one to be read.

    None at all where much of a remote file would be read again.
    """
    found: list[tuple[Range, int | None]] = []
    again = 0
    at, stop = check.offset, check.offset + check.length
    while at < stop:
        length, crc = known.get(at, (0, 0))
        if 0 < length <= stop - at:
            found.append((Range(check.source, at, length), crc))
        else:
            number = bisect_left(starts, at + 1)
            end = min(stop, at + _PIECE, *starts[number : number + 1])
            length = end - at
            found.append((Range(check.source, at, length), None))
            again += length
        at += length
    return [] if check.source.remote and again > _PIECE >> 6 else found


def _sum(part: Range) -> int:
    total = 0
    for piece in pieces(part):
        total = crc32(piece, total)
    return total


def raise_damage(damaged: Sequence[tuple[Check, int]]) -> None:
    """Raise DamageError if there is any, InputChangedError if that is the cause."""
    for check, _ in damaged:
        check.source.check_unchanged()
    if damaged:
        (check, seen), *others = damaged
        more = f", and {len(others):,} more" if others else ""
        what = mismatch(f"record {shown(check.name)}", seen, check.crc32)
        raise DamageError(what + more, [each.range for each, _ in damaged])
