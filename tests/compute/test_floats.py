"""Floating-point types without torch, against torch: every code of the small ones, and what lies
between."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ckptkit.compute.numbers import FLOATS, Cast, decode, encode, is_decoded
from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.core.errors import UnsupportedError

SMALL = [name for name in sorted(FLOATS) if name.startswith("float8")]
CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALVES = np.arange(1 << 16, dtype="<u4") << 16
# Each upper half of a float32 by itself, and a little, half, and almost one of its last place
# above.
LOWS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
SINGLES = np.concatenate([HALVES + low for low in LOWS]).view("<f4")


def in_torch(data: bytes | memoryview, name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))


def assert_same(made: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for those of a NaN."""
    numbers = ~want.isnan()
    assert torch.equal(~made.isnan(), numbers)
    code = CODES[want.itemsize]
    assert torch.equal(made.view(code)[numbers], want.view(code)[numbers])


def overflow_as_here(values: torch.Tensor, target: str) -> torch.Tensor:
    """Without what is too large for e4m3fn, of which older versions of torch make NaN."""
    saturates = not bool(torch.tensor([1e9]).to(torch.float8_e4m3fn).isnan().any())
    return values if target != "float8_e4m3fn" or saturates else values[~(values.abs() > 464)]


@pytest.mark.parametrize("name", [*SMALL, "bfloat16", "float16"])
def test_every_code_has_the_value_that_torch_gives_it(name: str) -> None:
    dtype = BY_NAME[name]
    data = np.arange(1 << dtype.bits, dtype=f"<u{dtype.itemsize}").tobytes()
    assert_same(torch.from_numpy(decode(data, dtype).copy()), in_torch(data, name).float())


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu")
def test_every_exponent_alone() -> None:
    data = bytes(range(256))
    made = decode(data, BY_NAME["float8_e8m0fnu"])
    assert_same(torch.from_numpy(made.copy()), in_torch(data, "float8_e8m0fnu").float())


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_float32_is_rounded_as_torch_rounds_it(name: str) -> None:
    values = overflow_as_here(torch.from_numpy(SINGLES.copy()), name)
    made = encode(values.numpy(), BY_NAME[name])
    assert_same(in_torch(made, name), values.to(getattr(torch, name)))


def test_float16_that_numpy_converts_only_where_it_must() -> None:
    """Every finite number, what lies between it and the next, and just beside that."""
    codes = np.arange(0x7C00, dtype="<u2")
    exact = torch.from_numpy(codes).view(torch.float16).float()
    assert_same(torch.from_numpy(decode(codes.tobytes(), BY_NAME["float16"])), exact)
    middle = (exact[:-1] + exact[1:]) / 2
    beside = [torch.nextafter(middle, end * torch.ones(())) for end in (0.0, 1e6)]
    values = torch.cat([exact, middle, *beside])
    odd = torch.tensor([65519.0, 65520.0, 1e-9, torch.nan, torch.inf])
    values = torch.cat([values, -values, odd])
    assert_same(in_torch(encode(values.numpy(), BY_NAME["float16"]), "float16"), values.half())
    negative = (codes | 0x8000).tobytes()
    assert_same(torch.from_numpy(decode(negative, BY_NAME["float16"])), -exact)


@pytest.mark.parametrize(
    ("source", "target"),
    [("float16", "float32"), ("float16", "bfloat16"), ("bfloat16", "float16")],
)
@pytest.mark.parametrize("most", [0.0, 1.0], ids=["looked up", "computed"])
def test_every_code_of_two_bytes(source: str, target: str, most: float) -> None:
    """If most codes are normal numbers, these are computed, and the others are looked up."""
    most_code = {0.0: 0, 1.0: {"float16": 0x3C00, "bfloat16": 0x3F80}[source]}[most]
    codes = np.concatenate([np.full(1 << 18, most_code), np.arange(1 << 16)]).astype("<u2")
    numbers = torch.from_numpy(codes.view("<i2")).view(getattr(torch, source))
    found = Cast(source, target).of(codes.data.cast("B"))
    assert_same(in_torch(found, target), numbers.to(getattr(torch, target)))


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_float64_is_rounded_twice_as_torch_does(name: str) -> None:
    rng = np.random.default_rng(0)
    some = rng.standard_normal(10_000) * 10.0 ** rng.integers(-50, 50, 10_000)
    almost_ties = [1 + 2.0**-n + 2.0**-40 for n in range(1, 30)]  # ties, once they are float32
    values = torch.tensor([*some, *almost_ties, 1e300, -0.0], dtype=torch.float64)
    values = overflow_as_here(values, name)
    made = encode(values.numpy(), BY_NAME[name])
    assert_same(in_torch(made, name), values.to(getattr(torch, name)))


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product([*SMALL, "bfloat16", "float16"], sorted(FLOATS)))
)
def test_every_code_cast_to_every_type(source: str, target: str) -> None:
    dtype = BY_NAME[source]
    data = np.arange(1 << dtype.bits, dtype=f"<u{dtype.itemsize}").tobytes()
    theirs, made = in_torch(data, source), encode(decode(data, dtype), BY_NAME[target])
    small = torch.isin(theirs.float(), overflow_as_here(theirs.float(), target))
    assert_same(in_torch(made, target)[small], theirs.to(getattr(torch, target))[small])


def test_complex32_and_bools_and_integers() -> None:
    halves = torch.tensor([1.5, -2.0, 0.0, 65504.0], dtype=torch.float16)
    made = decode(halves.numpy().tobytes(), BY_NAME["complex32"])
    assert made.tolist() == [1.5 - 2j, 65504j]
    halves = torch.tensor([1.5, -2.0, float("inf"), 0.25], dtype=torch.bfloat16)
    made = decode(halves.view(torch.uint8).numpy().tobytes(), BY_NAME["bcomplex32"])
    assert made.tolist() == [1.5 - 2j, complex(float("inf"), 0.25)]
    assert decode(bytes([0, 1, 2, 255]), BY_NAME["bool"]).tolist() == [0, 1, 1, 1]
    assert decode(b"\xff" * 8, BY_NAME["uint64"]).tolist() == [2**64 - 1]


def test_what_is_no_number_by_itself_is_refused() -> None:
    refused = [dtype for dtype in TABLE if not is_decoded(dtype)]
    assert {"qint8", "quint4x2", "bits8", "float4_e2m1fn_x2", "float6_e2m3", "int4"} <= {
        each.name for each in refused
    }
    for dtype in refused:
        with pytest.raises(UnsupportedError, match=dtype.name):
            decode(bytes(8), dtype)
    for dtype in TABLE:
        if is_decoded(dtype):
            assert len(decode(bytes(16), dtype)) == 16 // dtype.itemsize
