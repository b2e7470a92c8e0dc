"""Types of ggml against their formulas, an element at a time, and parts against the whole.

The vectors compare all types with gguf-py and ggml; these need neither.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptkit.compute import ggml
from ckptkit.compute.ggml import DECODERS, ELEMENTS, FIELDS, TYPES, GgmlDequantize
from ckptkit.core.bytesource import Derived
from ckptkit.core.dtypes import BY_NAME
from tests.compute.arranging import read, record

F = np.float32
Array = np.ndarray[Any, Any]
Block = bytes


def h(b: Block, at: int) -> F:
    return F(struct.unpack_from("<e", b, at)[0])


def nibble(b: Block, i: int) -> int:
    """Of 16 bytes: the low nibbles, then the high ones."""
    return b[i % 16] >> 4 * (i // 16) & 15


def pair(b: Block, i: int) -> int:
    n, r = divmod(i, 128)
    return b[32 * n + r % 32] >> 2 * (r // 32) & 3


def q2_k(b: Block, i: int) -> F:
    s = b[i // 16]
    return (h(b, 80) * F(s & 15)) * F(pair(b[16:80], i)) - h(b, 82) * F(s >> 4)


def q3_k(b: Block, i: int) -> F:
    q = pair(b[32:96], i) - (0 if b[i % 32] >> i // 32 & 1 else 4)
    s, g = b[96:108], i // 16
    scale = (s[g % 8] >> 4 * (g // 8) & 15 | (s[8 + g % 4] >> 2 * (g // 4) & 3) << 4) - 32
    return (h(b, 108) * F(scale)) * F(q)


def scales(b: Block, k: int) -> tuple[int, int]:
    s = b[4:16]
    if k < 4:
        return s[k] & 63, s[k + 4] & 63
    return s[k + 4] & 15 | s[k - 4] >> 6 << 4, s[k + 4] >> 4 | s[k] >> 6 << 4


def q4_k(b: Block, i: int) -> F:
    k = i // 32
    s, m = scales(b, k)
    q = b[16 + 32 * (k // 2) + i % 32] >> 4 * (k % 2) & 15
    return (h(b, 0) * F(s)) * F(q) - h(b, 2) * F(m)


def q5_k(b: Block, i: int) -> F:
    k = i // 32
    s, m = scales(b, k)
    q = b[48 + 32 * (k // 2) + i % 32] >> 4 * (k % 2) & 15 | (b[16 + i % 32] >> k & 1) << 4
    return (h(b, 0) * F(s)) * F(q) - h(b, 2) * F(m)


def q6_k(b: Block, i: int) -> F:
    n, r = divmod(i, 128)
    low = b[64 * n + r % 64] >> 4 * (r // 64) & 15
    q = (low | (b[128 + 32 * n + r % 32] >> 2 * (r // 32) & 3) << 4) - 32
    return (h(b, 208) * F(struct.unpack_from("b", b, 192 + i // 16)[0])) * F(q)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def iq4_xs(b: Block, i: int) -> F:
    k = i // 32
    (high,) = struct.unpack_from("<H", b, 2)
    s = (b[4 + k // 2] >> 4 * (k % 2) & 15 | (high >> 2 * k & 3) << 4) - 32
    return (h(b, 0) * F(s)) * F(IQ4[b[8 + 16 * k + i % 16] >> 4 * (i % 32 // 16) & 15])


def tq1_0(b: Block, i: int) -> F:
    if i < 160:
        byte, power = b[i % 32], 3 ** (i // 32)
    elif i < 240:
        byte, power = b[32 + (i - 160) % 16], 3 ** ((i - 160) // 16)
    else:
        byte, power = b[48 + (i - 240) % 4], 3 ** ((i - 240) // 4)
    return h(b, 52) * F(((byte * power & 255) * 3 >> 8) - 1)


def nvfp4(b: Block, i: int) -> F:
    k, s = i // 16, b[i // 16]
    exponent, mantissa = s >> 3 & 15, s & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
    scale = {0x7F: 0.0, 0xFF: 240.0}.get(s, value / 2)
    return F(scale) * F(FP4[b[4 + 8 * k + i % 8] >> 4 * (i % 16 // 8) & 15])


FORMULAS: dict[str, Callable[[Block, int], F]] = {
    "Q4_0": lambda b, i: h(b, 0) * F(nibble(b[2:], i) - 8),
    "Q4_1": lambda b, i: h(b, 0) * F(nibble(b[4:], i)) + h(b, 2),
    "Q5_0": lambda b, i: (
        h(b, 0) * F((nibble(b[6:], i) | (b[2 + i // 8] >> i % 8 & 1) << 4) - 16)
    ),
    "Q5_1": lambda b, i: (
        h(b, 0) * F(nibble(b[8:], i) | (b[4 + i // 8] >> i % 8 & 1) << 4) + h(b, 2)
    ),
    "Q8_0": lambda b, i: h(b, 0) * F(struct.unpack_from("b", b, 2 + i)[0]),
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": lambda b, i: h(b, 0) * F(IQ4[nibble(b[2:], i)]),
    "IQ4_XS": iq4_xs, "TQ1_0": tq1_0,
    "TQ2_0": lambda b, i: h(b, 64) * F(pair(b, i) - 1),
    "MXFP4": lambda b, i: F(2.0 ** (b[0] - 128)) * F(FP4[nibble(b[1:], i)]),
    "NVFP4": nvfp4,
    "Q1_0": lambda b, i: h(b, 0) * F(1 if b[2 + i // 8] >> i % 8 & 1 else -1),
    "Q2_0": lambda b, i: h(b, 0) * F((b[2 + i // 4] >> 2 * (i % 4) & 3) - 1),
}  # fmt: skip


def blocks(name: str, count: int) -> bytes:
    """Random bits: scales of all kinds, infinite ones and NaN too."""
    size = TYPES[name].itemsize
    return np.random.default_rng(count).integers(0, 256, count * size, dtype="u1").tobytes()


def made(name: str, data: bytes, target: str = "float32", big_endian: bool = False) -> Derived:
    dtype = TYPES[name]
    count = len(data) // dtype.itemsize * dtype.block
    operation = GgmlDequantize(name, target, big_endian)
    return Derived(operation, (record(data),), BY_NAME[target].nbytes(count))


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str) -> None:
    data, dtype = blocks(name, 12), TYPES[name]
    found = np.frombuffer(read(made(name, data)), "<f4").reshape(12, dtype.block)
    with np.errstate(all="ignore"):
        for number, row in enumerate(found):
            block = data[number * dtype.itemsize :][: dtype.itemsize]
            expected = np.array([FORMULAS[name](block, i) for i in range(dtype.block)], "f4")
            assert_same(row.view("u4"), expected.view("u4"), np.isnan(row) & np.isnan(expected))


def assert_same(one: Array, other: Array, are_nan: Array) -> None:
    assert ((one == other) | are_nan).all()


@pytest.mark.parametrize("name", DECODERS)
def test_any_part_is_that_of_the_whole(name: str) -> None:
    """Ranges that begin and end inside of blocks, and more than are made at once."""
    dtype = TYPES[name]
    data = blocks(name, ELEMENTS // dtype.block + 3)
    for target in ("float32", "bfloat16"):
        extent = made(name, data, target)
        whole = read(extent)
        assert len(whole) == extent.length
        for start, stop in ((0, 1), (5, 4099), (len(whole) // 2 + 1, len(whole)), (7, 7)):
            assert read(extent, start, stop) == whole[start:stop]
        *parts, last = extent.operation.ends(extent, 100_000)
        assert last == extent.length
        assert all(part % (dtype.block * BY_NAME[target].itemsize) == 0 for part in parts)


@pytest.mark.parametrize("name", FIELDS)
def test_big_endian(name: str) -> None:
    data, size = blocks(name, 9), TYPES[name].itemsize
    swapped = bytearray(data)
    for at in FIELDS[name]:
        for start in range(at, len(data), size):
            swapped[start : start + 2] = data[start : start + 2][::-1]
    assert read(made(name, bytes(swapped), big_endian=True)) == read(made(name, data))


def test_rounds_once() -> None:
    """float32 to the others: to nearest even, infinite beyond the largest float16."""
    data = struct.pack("<e", 60000.0) + bytes([2]) + bytes(31) + blocks("Q8_0", 99)
    single = np.frombuffer(read(made("Q8_0", data)), "<f4")
    with np.errstate(all="ignore"):
        half = np.frombuffer(read(made("Q8_0", data, "float16")), "<f2")
        expected = single.astype("<f2")
    assert np.isinf(half[0])
    assert_same(half.view("u2"), expected.view("u2"), np.isnan(half) & np.isnan(expected))


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
def test_parts_end_where_the_tensor_ends(size: int) -> None:
    """Parts that several threads compute: whole blocks, and nothing behind the last one."""
    extent = made("Q8_0", bytes(34 * 10), "bfloat16")
    ends = list(extent.operation.ends(extent, size))
    assert ends == sorted(set(ends))
    assert ends[-1] == extent.length
    assert all(end % 64 == 0 for end in ends)


# SHA-256 of the grids as int8, by those who extracted them from both libraries.
GRIDS = {
    "iq2_xxs": "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54",
    "iq2_xs": "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de",
    "iq2_s": "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88",
    "iq3_xxs": "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d",
    "iq3_s": "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f",
    "iq1": "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a",
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name: str) -> None:
    assert hashlib.sha256(ggml._grid(name).tobytes()).hexdigest() == GRIDS[name]
