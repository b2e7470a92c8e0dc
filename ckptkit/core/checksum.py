"""CRC-32, by the fastest library that is installed, and the sum of two runs from those of each.

Python's own zlib sums up 1 to 4 GB/s, which is no faster than copying; ISA-L (the extra `speed`)
more than 20 GB/s, which hides behind it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

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
