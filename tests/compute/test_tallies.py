"""Statistics against torch and numpy on the same numbers, whatever the parts they are computed
in."""

from __future__ import annotations

import math
import sys
import threading
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.compute import tallies
from ckptkit.compute.tallies import BINS, Histogram, Tally, bin_exponent, parts, tally
from ckptkit.compute.workers import ordered
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Storage, Tensor
from tests.compute.arranging import described

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def tallied(tensor: torch.Tensor, big_endian: bool = False) -> Tally:
    whole = Tally()
    for part in parts(described(tensor, big_endian=big_endian)):
        whole.add(tally(part))
    return whole


def assert_is(found: Tally, tensor: torch.Tensor) -> None:
    """The tally is what torch says about the real numbers in `tensor`."""
    flat = tensor.reshape(-1)
    flat = flat.double() if flat.dtype in FLOATS else flat.long()
    finite = flat[flat.isfinite()]
    assert found.count == flat.numel()
    assert found.nan == int(flat.isnan().sum())
    assert found.infinite == int(flat.isinf().sum())
    assert found.zeros == int((flat == 0).sum())
    assert sum(found.histogram.counts) == found.finite == finite.numel()
    if not finite.numel():
        assert (found.low, found.high, found.std) == (None, None, None)
        return
    assert (found.low, found.high) == (finite.min().item(), finite.max().item())
    assert found.abs_max == finite.abs().max().item()
    wide = finite.double()
    size = float(wide.abs().max())
    assert found.mean == pytest.approx(wide.mean().item(), rel=1e-12, abs=1e-13 * size)
    assert found.norm == pytest.approx(wide.norm().item(), rel=1e-12)
    if finite.numel() > 1:
        assert found.std == pytest.approx(wide.std().item(), rel=1e-9, abs=1e-12 * size)
    else:
        assert found.std is None
    counts, edges = found.histogram.counts, found.histogram.edges
    assert counts == np.histogram(wide.numpy(), edges)[0].tolist() or wide.max() == edges[-1]
    assert len(found.histogram.counts) <= BINS


@pytest.fixture(params=[1 << 16, 7])
def any_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of many numbers and of few."""
    monkeypatch.setattr(tallies, "BLOCK", request.param)
    monkeypatch.setattr(tallies, "PART", 64 if request.param == 7 else tallies.PART)


@pytest.mark.usefixtures("any_block")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (30 * torch.randn(201)).to(dtype)
    assert_is(tallied(values), values)


@pytest.mark.usefixtures("any_block")
@pytest.mark.parametrize("dtype", [*FLOATS[2:], torch.int16, torch.int8, torch.uint8, torch.bool])
def test_small_types_are_counted_code_by_code(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number and how often it is there: the same statistics, NaN and infinities included."""
    torch.manual_seed(0)
    count = 200_000 if tallies.BLOCK > 7 else 10_000
    codes = torch.randint(0, 256, (count,), dtype=torch.uint8)
    noise = codes > 127 if dtype is torch.bool else codes.view(dtype)
    one_by_one = tallied(noise)
    monkeypatch.setattr(tallies, "COUNTED", 1)
    found = tallied(noise)
    if dtype is not torch.bool:
        assert_is(found, noise)
    assert found.histogram == one_by_one.histogram
    assert found.mean == pytest.approx(one_by_one.mean, rel=1e-12)
    assert found.squares == pytest.approx(one_by_one.squares, rel=1e-12)
    assert (found.zeros, found.nan, found.whole) == (
        one_by_one.zeros, one_by_one.nan, one_by_one.whole,
    )  # fmt: skip


@pytest.mark.parametrize(
    "numbers",
    [
        [1000.0, -1e-45, 1e-45, -0.0],  # the least numbers, in bins that are wide
        [2.0**-149, 2.0**-148, 0.0],
        [3e38, -3e38, 1.0],
        [16777216.0, 16777217.0 + 1, 16777215.0],
    ],
)
def test_bins_of_float32_are_those_of_float64(numbers: list[float]) -> None:
    single = torch.tensor(numbers * 50, dtype=torch.float32)
    assert tallied(single).histogram == tallied(single.double()).histogram


def test_nan_and_infinities_are_counted_and_left_out() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.5] * 9)
    assert_is(tallied(odd), odd)
    only = torch.tensor([math.nan] * 20 + [math.inf])
    assert_is(tallied(only), only)


def test_no_numbers_and_one() -> None:
    nothing = tallied(torch.empty(0, 3))
    facts = (nothing.count, nothing.low, nothing.std, nothing.norm, nothing.sparsity)
    assert facts == (0, None, None, 0.0, None)
    for one in (torch.tensor(2.5), torch.tensor(0)):
        assert_is(tallied(one), one)


def test_views_and_byte_order() -> None:
    values = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    for view in (values.t(), values[1:, ::3], values[2].expand(4, 10), values[:0]):
        assert_is(tallied(view), view)
    assert_is(tallied(values, big_endian=True), values)
    negative = torch._neg_view(values)
    assert_is(tallied(negative), -values)


def test_bools_are_0_and_1() -> None:
    values = torch.tensor([True, False, True, True])
    assert_is(tallied(values), values.long())


def test_the_largest_integers_are_exact() -> None:
    values = torch.tensor([2**63 - 1, -(2**63), 2**53 + 1])
    found = tallied(values)
    assert (found.low, found.high) == (-(2**63), 2**63 - 1)
    assert found.mean == pytest.approx(2**53 / 3, rel=1e-3)


@pytest.mark.usefixtures("any_block")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, dtype=dtype)
    values[3], values[4], values[5] = 0, complex(math.nan, 1), complex(1, -math.inf)
    finite = torch.cat([values[:4], values[6:]])
    for view, want in ((values, finite), (values.conj(), finite.conj())):
        found = tallied(view)
        assert (found.count, found.nan, found.infinite, found.zeros) == (50, 1, 1, 1)
        wide = want.to(torch.complex128)
        assert found.mean == pytest.approx(wide.mean().item(), rel=1e-10)
        assert found.std == pytest.approx(wide.std().item(), rel=1e-10)
        assert found.norm == pytest.approx(wide.norm().item(), rel=1e-12)
        assert found.high == pytest.approx(wide.abs().max().item(), rel=1e-12)
        assert sum(found.histogram.counts) == 48


def test_a_large_mean_costs_no_digits() -> None:
    values = 1e8 + torch.randn(100_000, dtype=torch.float64)
    assert tallied(values).std == pytest.approx(values.std().item(), rel=1e-9)


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "bits8", "float4_e2m1fn_x2", "int4"])
def test_what_is_no_number_by_itself_has_no_parts(name: str) -> None:
    packed = Tensor(Storage(Range(Memory(bytes(8)), 0, 8)), BY_NAME[name], (4,), (1,))
    with pytest.raises(TensorError, match=name):
        list(parts(packed))


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, 1.0, -1.0, 3e38]),
    st.integers(-100, 100).map(float),
)


@given(st.lists(NUMBERS, min_size=1, max_size=80), st.data())
def test_parts_and_their_order_make_no_difference(
    numbers: list[float], data: st.DataObject
) -> None:
    values = torch.tensor(numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=5)))
    pieces = [piece for piece in torch.tensor_split(values, cuts) if len(piece)]
    joined = Tally()
    for piece in data.draw(st.permutations(pieces)):
        joined.add(tallied(piece.clone()))
    assert_is(joined, values)
    assert joined.histogram == tallied(values).histogram


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_bins_of_integers_are_no_finer_than_they(numbers: list[int]) -> None:
    found = tallied(torch.tensor(numbers))
    assert found.histogram.exponent >= 0
    assert sum(found.histogram.counts) == len(numbers)
    assert len(found.histogram.counts) <= BINS


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_the_width_is_the_least_that_will_do(a: float, b: float) -> None:
    low, high = sorted((a, b))
    exponent = bin_exponent(low, high, False)

    def bins(exponent: int) -> int:
        return math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) + 1

    assert bins(exponent) <= BINS
    largest = max(abs(low), abs(high))
    if largest and exponent > math.frexp(largest)[1] - tallies.FINE:
        assert bins(exponent - 1) > BINS


def test_a_histogram_in_fewer_bins() -> None:
    histogram = Histogram(0, -3, [1, 2, 3, 4, 5, 6])  # -3, -2, -1, 0, 1, 2
    assert histogram.coarser(1) == Histogram(1, -2, [1, 5, 9, 6])
    assert histogram.at_most(4) == histogram.coarser(1)
    assert histogram.at_most(6) is histogram
    assert Histogram(0, 0, [1] * 6).edges == [0, 1, 2, 3, 4, 5, 6]


# threads


def test_results_come_in_order_and_few_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.compute.workers.BATCH", 10)
    monkeypatch.setattr("ckptkit.compute.workers.processors", lambda: 3)
    begun: list[int] = []
    asked = ordered(lambda n: begun.append(n) or n * n, iter(range(1000)), lambda n: 5)
    assert [next(asked) for _ in range(4)] == [0, 1, 4, 9]
    assert len(begun) <= 20
    assert list(asked) == [n * n for n in range(4, 1000)]


@pytest.mark.parametrize("processors", [1, 4])
def test_the_first_failure_is_raised_and_the_rest_left(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.compute.workers.BATCH", 1)
    monkeypatch.setattr("ckptkit.compute.workers.processors", lambda: processors)
    begun: list[int] = []

    def work(n: int) -> Any:
        begun.append(n)
        if n == 3:
            raise TensorError("the third")
        return n

    with pytest.raises(TensorError, match="the third"):
        list(ordered(work, range(1000), lambda n: 1))
    assert len(begun) < 30


def test_little_work_needs_no_thread() -> None:
    threads = ordered(lambda n: threading.current_thread(), range(9), lambda n: 1)
    assert set(threads) == {threading.main_thread()}
    assert list(ordered(str, [], len)) == []


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 64, 4097])
@pytest.mark.parametrize("bins", [1, 2, BINS])
def test_bins_are_counted_two_at_a_time(length: int, bins: int) -> None:
    codes = np.random.default_rng(length).integers(0, bins, length).astype("u1")
    assert np.array_equal(tallies._count(codes), np.bincount(codes))
    last = np.full(length, BINS - 1, "u1")
    assert np.array_equal(tallies._count(last), np.bincount(last))


@pytest.mark.parametrize("mean", [0.0, 0.2, 1.0, 1e6])
def test_squared_deviations_do_not_depend_on_where_the_mean_is(mean: float) -> None:
    numbers = np.random.default_rng(0).normal(mean, 1.0, 100_001)
    found = tally(next(parts(described(torch.from_numpy(numbers)))))
    assert math.isclose(found.squares, ((numbers - numbers.mean()) ** 2).sum(), rel_tol=1e-12)


def _exactly(numbers: list[float]) -> tuple[float, float, float]:
    """Mean, standard deviation and norm by decimal numbers of 60 digits."""
    with localcontext(prec=60):
        exact = list(map(Decimal, numbers))
        mean = sum(exact, Decimal()) / len(exact)
        deviations = sum(((each - mean) ** 2 for each in exact), Decimal())
        squares = sum((each * each for each in exact), Decimal())
        return float(mean), float((deviations / (len(exact) - 1)).sqrt()), float(squares.sqrt())


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-200, 1e154, 1e200, 1.7e308])
def test_squares_beyond_float64(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block and in several, of which some have other sizes or zeros alone."""
    numbers = [size, -size, 0, 0, size, 3.0, 2.5, -0.5, math.nan, math.inf, size, size]
    for values in (numbers, [n for n in numbers if n not in (3.0, 2.5, -0.5)], [size] * 5):
        finite = [n for n in values if math.isfinite(n)]
        mean, std, norm = _exactly(finite)
        for block in (2, 1 << 18):
            monkeypatch.setattr(tallies, "BLOCK", block)
            found = tallied(torch.tensor(values, dtype=torch.float64))
            assert found.mean == pytest.approx(mean, rel=1e-14, abs=5e-324)
            assert found.std == pytest.approx(std, rel=1e-14, abs=max(size * 1e-15, 5e-324))
            assert found.norm == pytest.approx(norm, rel=1e-14, abs=5e-324)
            assert Tally.from_json(found.to_json()) == found


def test_complex_numbers_whose_size_is_beyond_float64() -> None:
    found = tallied(torch.tensor([1.7e308 + 1.7e308j, -1.7e308 + 1.7e308j], dtype=torch.complex128))
    assert found.mean == 1.7e308j and found.infinite == 0 and found.high == sys.float_info.max
    assert found.std == found.norm == math.inf and sum(found.histogram.counts) == 2
