"""Checksums of the parts of a checkpoint, and the tensors in those that are damaged.

Large parts are summed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ckptkit import compute
from ckptkit.compute.threads import ordered
from ckptkit.core.bytesource import Extent, Memory, Range, crc32, crc32_combine, leaves
from ckptkit.core.errors import AmbiguousError, FormatError, InputError, TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import mismatch
from ckptkit.formats.format import CheckedPart, Defect
from ckptkit.formats.recovering import located, overlap

PIECE = 64 << 20  # bytes of a part that one thread sums up
DAMAGE = (
    FormatError,
    AmbiguousError,
    TensorError,
)  # what is wrong with a file; other errors are about reading it
_NOTHING = Range(Memory(b""), 0, 0)


class _Piece(NamedTuple):
    """Bytes `start` to `stop` of part `number`, or the reason why they cannot be read."""

    number: int
    extent: Extent
    start: int
    stop: int
    error: InputError | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def summed(
    parts: list[CheckedPart], tell: Callable[[int], None]
) -> Iterator[tuple[CheckedPart, str | None]]:
    """Yield each part, and what is wrong with it."""
    number, total, wrong = 0, 0, None
    for piece, sum in ordered(_sum, _pieces(parts), lambda piece: piece.nbytes):
        if piece.number != number:
            yield parts[number], wrong or _mismatch(parts[number], total)
            number, wrong = piece.number, None
        if isinstance(sum, InputError):
            wrong = wrong or f"{parts[number].what}: {sum.message}"
        else:
            total = crc32_combine(total, sum, piece.nbytes) if piece.start else sum
        tell(piece.nbytes)
    if parts:
        yield parts[number], wrong or _mismatch(parts[number], total)


def _mismatch(part: CheckedPart, seen: int) -> str | None:
    if part.crc32 is None or seen == part.crc32:
        return None
    return mismatch(part.what, seen, part.crc32)


def _pieces(parts: Iterable[CheckedPart]) -> Iterator[_Piece]:
    for number, part in enumerate(parts):
        try:
            extent = part.record.locate()
        except InputError as error:
            yield _Piece(number, _NOTHING, 0, 0, error)
            continue
        if isinstance(extent, Range) and part.crc32 is None:
            extent = _NOTHING
        size = PIECE if isinstance(extent, Range) else max(1, extent.length)
        for start in range(0, max(1, extent.length), size):
            yield _Piece(number, extent, start, min(start + size, extent.length))


def _sum(piece: _Piece) -> tuple[_Piece, int | InputError]:
    """Return the CRC-32 of a piece, or what is wrong with it.

    Raises InputError where the bytes cannot be read: by the disk, the network or a limit.
    """
    if piece.error is not None:
        return piece, piece.error
    total = 0
    try:
        for data in compute.flow(piece.extent, piece.start, piece.stop):
            total = crc32(data, total)
    except DAMAGE as error:
        return piece, error
    return piece, total


def with_tensors(
    damaged: list[tuple[CheckedPart, str]], tensors: list[tuple[str, Tensor]]
) -> Iterator[Defect]:
    """Return findings about damaged parts, with the names of all tensors in them."""
    places = []
    for name, tensor in tensors if damaged else ():
        places += [(name, found) for found in located(tensor)]
    for part, why in damaged:
        try:
            bad = list(leaves(part.record.locate()))
        except InputError:
            bad = []
        hit = dict.fromkeys(
            name for name, found in places if any(overlap(found, each) for each in bad)
        )
        yield Defect(why, part.file, tuple(hit))
