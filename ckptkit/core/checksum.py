"""CRC-32, by the fastest library that is installed, and the sum of two runs from those of each.

Python's own zlib sums up 1 to 4 GB/s, which is no faster than copying; ISA-L (the extra `speed`)
more than 20 GB/s, which hides behind it. While a thread is `reading`, every source adds the bytes
that it reads to the sums of that thread: checksums of the input cost no second pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from ckptkit.core.bytesource import READING

LARGE = 64 << 10  # bytes, from which on another library than Python's own is looked for

Data = bytes | bytearray | memoryview


def crc32(data: Data, start: int = 0) -> int:
    """Return the CRC-32 of `data` after bytes whose CRC-32 is `start`."""
    return (_fastest() if len(data) >= LARGE else zlib.crc32)(data, start)


@lru_cache
def _fastest() -> Callable[[Data, int], int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    found: Callable[[Data, int], int] = isal_zlib.crc32
    return found


def crc32_combine(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two runs of bytes, from those of each and the size of the second.

    A CRC is a polynomial over GF(2) modulo P, bit 31 the constant term; `size` more bytes multiply
    it by x**(8 size). The CRC-32 of the second run follows from those of the first and of both in
    the same way.
    """
    return _multiply(_power(8 * size), first) ^ second


@lru_cache
def _power(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30  # x**0, x**1
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ 0xEDB88320 if b & 1 else b >> 1
    return product


class ReadSums:
    """CRC-32s of the bytes that a thread reads of some sources, run by run.

    A run is [number of the source, offset, length, CRC-32]. It grows while reads follow each other.
    """

    def __init__(self, identities: Sequence[object]) -> None:
        self.runs: list[list[int]] = []
        self._numbers = {identity: number for number, identity in enumerate(identities)}
        self._ends: dict[tuple[int, int], list[int]] = {}  # runs by source and end

    def add(self, identity: object, offset: int, data: Data) -> None:
        number = self._numbers.get(identity)
        if number is None or not data:
            return
        run = self._ends.pop((number, offset), None)
        if run is None:
            run = [number, offset, 0, 0]
            self.runs.append(run)
        run[2] += len(data)
        run[3] = crc32(data, run[3])
        self._ends[number, offset + len(data)] = run


@contextmanager
def reading(sums: ReadSums | None) -> Iterator[None]:
    """Sum up what this thread reads meanwhile."""
    before, READING.sums = READING.sums, sums
    try:
        yield
    finally:
        READING.sums = before
