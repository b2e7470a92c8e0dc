"""Codes of less than a byte as bytes, and the numbers that codes of 4, 6 and 8 bits stand for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptkit.compute.floats import decode
from ckptkit.core.dtypes import BY_NAME

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# bitsandbytes: functional.py, create_normal_map and the table of its CPU kernel
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: column of each nibble, from the low end


@lru_cache
def numbers(table: str) -> Array:
    """The float32 number of each code of a table. Shared: not to be written to."""
    import numpy as np

    if table in ("e2m1", "e2m1+0"):
        values = np.array((*E2M1, *(-each for each in E2M1)), "<f4")
        values[8] = 0.0 if table == "e2m1+0" else -0.0
    elif table in ("e2m3", "e3m2"):
        values = _small(*((1, 3) if table == "e2m3" else (3, 2)))
    elif table == "exponent":  # 2**128 is infinite
        with np.errstate(over="ignore"):
            values = np.ldexp(np.ones(256, "<f4"), np.arange(256) - 127).astype("<f4")
    else:
        values = decode(bytes(range(256)), BY_NAME[table])
    values.setflags(write=False)
    made: Array = values
    return made


def _small(bias: int, mantissa: int) -> Array:
    """The numbers of a format of 6 bits without infinities."""
    import numpy as np

    code = np.arange(32)
    exponent, fraction = code >> mantissa, code % (1 << mantissa)
    significand = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    positive = np.ldexp(significand.astype("<f4"), np.maximum(exponent, 1) - bias - mantissa)
    return np.concatenate([positive, -positive]).astype("<f4")


def unpack(data: Array, bits: int, count: int, *, high_first: bool = False) -> Array:
    """The first `count` codes of each row of bytes, as bytes; dense, from the low bits up."""
    import numpy as np

    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return _nibbles(data, high_first)[:, :count]
    groups = -(-count // 8)
    if data.shape[1] < groups * bits:
        data = np.pad(data, ((0, 0), (0, groups * bits - data.shape[1])))
    source = data[:, : groups * bits].reshape(len(data), groups, bits)
    made = np.empty((len(data), groups, 8), "u1")
    for number in range(8):
        first, shift = divmod(number * bits, 8)
        np.right_shift(source[..., first], shift, out=made[..., number])
        if shift + bits > 8:
            made[..., number] |= source[..., first + 1] << (8 - shift)
    made &= (1 << bits) - 1
    return made.reshape(len(data), -1)[:, :count]


def _nibbles(data: Array, high_first: bool) -> Array:
    """Two codes of each byte, which numpy moves as one number of 16 bits."""
    import numpy as np

    pairs = data.astype("<u2")
    if high_first:
        high = pairs >> 4
        pairs <<= 8
        pairs |= high
    else:
        pairs |= pairs << 4
    pairs &= np.uint16(0x0F0F)
    return pairs.view("u1").reshape(len(data), -1)


def unpack_words(data: Array, bits: int, count: int) -> Array:
    """The first `count` codes of each row of bytes, 32 // bits of them in a word."""
    import numpy as np

    words = np.ascontiguousarray(data).view("<u4")
    each = 32 // bits
    made = np.empty((*words.shape, each), "u1")
    for number in range(each):
        made[..., number] = (words >> (number * bits)) & ((1 << bits) - 1)
    return made.reshape(len(data), -1)[:, :count]


def untiled(data: Array, rows: int, columns: int) -> Array:
    """Scales that lie in tiles of 128 x 4, as [rows, columns]."""
    tall, wide = -(-rows // 128), -(-columns // 4)
    tiles = data.reshape(tall, wide, 32, 4, 4)
    made: Array = tiles.transpose(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)
    return made[:rows, :columns]
