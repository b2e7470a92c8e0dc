"""Q8_0 as ggml makes it: by its formula, one number at a time."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.quantize import q8_0_record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError
from tests.compute.arranging import read, record

F = np.float32


def made(values: np.ndarray[Any, Any], dtype: str = "float32") -> bytes:
    data = bytes(encode(values.astype("f4").reshape(-1), BY_NAME[dtype]))
    return read(q8_0_record(record(data), BY_NAME[dtype], "w"))


def expected(values: np.ndarray[Any, Any]) -> bytes:
    found = b""
    for block in values.astype("f4").reshape(-1, 32):
        scale = F(max(abs(x) for x in block)) / F(127)
        found += np.float16(scale).tobytes()
        for x in block:
            y = F(x) * (F(1) / scale) if scale else F(0)
            size = abs(float(y))
            code = int(size) + (size - int(size) >= 0.5)
            found += struct.pack("b", code if y >= 0 else -code)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_formula(dtype: str) -> None:
    values = np.random.default_rng(5).normal(size=(40, 32)) * 2.0 ** np.arange(-8, 0, 0.2)[:, None]
    wide = np.frombuffer(encode(values.astype("f4").reshape(-1), BY_NAME[dtype]), "u1")
    numbers = np.asarray(decode(wide.tobytes(), BY_NAME[dtype]))
    assert made(values, dtype) == expected(numbers)


def test_halves_go_away_from_zero() -> None:
    values = np.zeros(32)
    values[:6] = 127, 0.5, -0.5, 1.5, -2.5, 126.5
    assert struct.unpack("6b", made(values)[2:8]) == (127, 1, -1, 2, -3, 127)


def test_zeros_and_what_float16_cannot_scale() -> None:
    assert made(np.zeros(64)) == bytes(68)
    assert made(np.full(32, 1e-42)) == bytes(34)
    for odd in (np.nan, np.inf, 1e7 * 127):
        values = np.ones(32)
        values[3] = odd
        with pytest.raises(TensorError, match="'w' contains NaN, infinite or too large values"):
            made(values)
