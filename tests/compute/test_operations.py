"""The bridge: computed byte ranges against torch and numpy, and torch's own tensors made of
records."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.compute import arranged, compare, operation, strided_read, torch_bridge
from ckptkit.compute.compare import Difference
from ckptkit.compute.numbers import cast_record, torch_dtype
from ckptkit.compute.operation import Concat, Flip, Inflate, Slice, Swap, stream_reusing_buffer
from ckptkit.compute.torch_bridge import rebuild, to_torch_storage
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Pending, Range, Record, runs
from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.core.errors import (
    CorruptError,
    DeviceError,
    ModelError,
    TensorError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.text import on_command_line
from ckptkit.loading import building
from tests.compute.arranging import boxes as array_of
from tests.compute.arranging import described, grids, read, record, within
from tests.torch_equality import bits, storage_bits


def strided(
    where: Record, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> Tensor:
    return Tensor(Storage(where), BY_NAME[dtype], shape, stride, offset)


def contiguous(*tensor: Any) -> Record:
    return arranged.contiguous(strided(*tensor))


def assert_is(what: Record, want: bytes, ends: Sequence[int] = ()) -> None:
    """The bytes are those that are wanted, and so is each part between two of the ends."""
    assert (what.locate().length, read(what)) == (len(want), want)
    for start, stop in itertools.product(ends, repeat=2):
        assert read(what, start, stop) == want[start:stop]


class Counting(Memory):
    """Memory that counts its reads."""

    calls = 0

    def read(self, offset: int, length: int) -> bytes:
        self.calls += 1
        return super().read(offset, length)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that a few bytes take many of them."""
    for module, name, size in (
        (operation, "PIECE", 32),
        (strided_read, "TILE", 96),
        (strided_read, "JOINED", 96),
        (strided_read, "BOX", 48),
        (strided_read, "CALL", 16),
        (operation, "BUFFER", 32),
        (compare, "BUFFER", 32),
        (torch_bridge, "PIECE", 32),
        (compare, "WIDE", 3),
    ):
        monkeypatch.setattr(module, name, size)


# stream


def test_stream_gives_a_range_in_bounded_pieces() -> None:
    data = bytes(range(256)) * (10 << 12)
    pieces = [bytes(piece) for piece in operation.stream(Range(Memory(data), 5, len(data) - 9))]
    assert b"".join(pieces) == data[5:-4]
    assert max(map(len, pieces)) == operation.PIECE
    assert read(Range(Memory(data), 5, 100), 10, 20) == data[15:25]


def test_stream_of_a_source_that_is_too_short() -> None:
    with pytest.raises(TruncatedError):
        read(Range(Memory(b"abc"), 1, 3))


def test_derived_extents_pickle_by_value(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(64)))
    extent = contiguous(
        Range(LocalFile(tmp_path / "bytes"), 0, 64), "int16", (4, 8), (1, 4)
    ).locate()
    assert read(pickle.loads(pickle.dumps(extent))) == read(extent)


@pytest.mark.usefixtures("small_pieces")
def test_flow_gives_the_same_bytes_through_one_buffer(tmp_path: Path) -> None:
    data = bytes(range(200))
    (tmp_path / "bytes").write_bytes(data)
    extent = Range(LocalFile(tmp_path / "bytes"), 10, 150)
    assert b"".join(map(bytes, stream_reusing_buffer(extent))) == data[10:160]
    assert b"".join(map(bytes, stream_reusing_buffer(extent, 3, 70))) == data[13:80]
    first, *_ = pieces = list(stream_reusing_buffer(extent))
    assert [len(piece) for piece in pieces] == [32] * 4 + [22]
    assert bytes(first[:22]) == data[10 + 4 * 32 : 160]  # overwritten by the last
    computed = Derived(Swap(2), (Range(extent.source, 0, 100),), 100)
    assert b"".join(map(bytes, stream_reusing_buffer(computed))) == read(computed)


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 5), st.integers(1, 4))
def test_aligned_cuts_between_units(pieces: list[bytes], unit: int, units: int) -> None:
    made = [bytes(piece) for piece in operation.aligned(iter(pieces), unit, unit * units)]
    whole = b"".join(pieces)
    assert b"".join(made) == whole[: len(whole) // unit * unit]
    assert all(0 < len(piece) <= unit * units and len(piece) % unit == 0 for piece in made)


# slice, inflate


def test_slice_of_a_computed_extent() -> None:
    swapped = Derived(Swap(4), (record(bytes(range(32))),), 32)
    assert_is(Derived(Slice(6), (swapped,), 10), read(swapped)[6:16], (0, 3, 5, 10))


def deflated(data: bytes) -> bytes:
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    return machine.compress(data) + machine.flush()


def inflated(data: bytes) -> Derived:
    return Derived(Inflate(), (record(deflated(data)),), len(data))


@pytest.mark.usefixtures("small_pieces")
def test_concat_of_ranges_and_computed_extents() -> None:
    first, second = Range(Memory(b"0123456789"), 2, 5), Range(Memory(b"abcdef"), 0, 6)
    swapped = Derived(Swap(2), (second,), 6)
    empty = Range(Memory(b""), 0, 0)
    whole = b"23456badcfeabcdef"
    joined = Derived(Concat(), (Derived(Concat(), (first, empty, swapped), 11), second), 17)
    assert_is(joined, whole, range(len(whole) + 1))
    assert list(runs(joined)) == [first, empty, swapped, second]


def test_inflate_any_part() -> None:
    data = b"checkpoint " * 100
    assert_is(inflated(data), data, (0, 1, 31, 32, 33, 1000, 1100))


def test_inflate_is_bounded() -> None:
    pieces = [len(piece) for piece in operation.stream(inflated(bytes(64 << 20)))]
    assert (sum(pieces), max(pieces)) == (64 << 20, operation.PIECE)


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [
        (deflated(b"x" * 100), 99, "more than 99"),
        (deflated(b"x" * 100), 101, "100 of 101"),
        (deflated(b"x" * 100)[:-1], 100, "is truncated"),
        (deflated(b"x" * 100) + b"junk", 100, "other bytes"),
        (b"\xff" * 10, 10, "damaged"),
        (b"", 0, "is truncated"),
    ],
)
def test_inflate_refuses_what_does_not_fit(data: bytes, length: int, said: str) -> None:
    with pytest.raises(CorruptError, match=said):
        read(Derived(Inflate(), (record(data),), length))


# byteswap, conj, neg, cast


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("component", [2, 4, 8])
def test_byteswap_any_part(component: int) -> None:
    data = bytes(range(160))
    want = np.frombuffer(data, f"u{component}").byteswap().tobytes()
    assert_is(Derived(Swap(component), (record(data),), len(data)), want, range(0, 161, 7))


AWKWARD = [0.0, -0.0, 1.5, -2.25, math.inf, -math.inf, math.nan]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conj_and_neg_bits_are_carried_out(dtype: torch.dtype) -> None:
    values = torch.tensor([complex(x, y) for x in AWKWARD for y in AWKWARD], dtype=dtype)
    values = values.reshape(7, 7)
    for view in (values.conj(), values.conj().t(), values.conj()[1:, ::2], values.conj().imag):
        assert view.is_conj() or view.is_neg()
        assert_is(arranged.contiguous(described(view)), bits(view))


def test_negation_flips_the_sign_of_zero_in_both_parts() -> None:
    view = torch._neg_view(torch.tensor([complex(0.0, -0.0), complex(1.0, -2.0)]))
    # torch gives +0 for some lengths.
    want = np.array([complex(-0.0, 0.0), complex(-1.0, 2.0)], np.complex64)
    assert_is(arranged.contiguous(described(view)), want.tobytes())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64]
)
def test_neg_of_other_dtypes(dtype: torch.dtype) -> None:
    view = torch._neg_view(torch.tensor([0, 1, -2, 100], dtype=dtype))
    assert_is(arranged.contiguous(described(view)), bits(view))


@pytest.mark.parametrize(
    "flip", [Flip("bool"), Flip("float8_e4m3fnuz"), Flip("float32", conj=True)]
)
def test_neg_and_conj_refuse_what_has_none(flip: Flip) -> None:
    with pytest.raises(TensorError):
        read(Derived(flip, (record(bytes(8)),), 8))


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
NUMBERS = [*FLOATS, "bool", "uint8", "int16", "int32", "int64"]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(NUMBERS, [*FLOATS, "int32", "complex64"]))
)
def test_cast_is_what_torch_makes_of_it(source: str, target: str) -> None:
    values = torch.linspace(-200, 200, 101).to(getattr(torch, source))
    if source in ("int32", "int64"):  # which no float32 holds exactly
        values[:9] = torch.tensor(
            [2**24 + 1, 2**24 + 3, 2**30 + 65, 65_519, 65_520, 2**31 - 1, 257, 463, 465]
        )
    cast = cast_record(record(bits(values)), BY_NAME[source], BY_NAME[target], big_endian=False)
    assert cast.length == cast.locate().length
    assert_is(cast, bits(values.to(getattr(torch, target))), (7, 50))


def test_cast_of_a_big_endian_record() -> None:
    values = torch.arange(10, dtype=torch.float32)
    swapped = np.frombuffer(bits(values), "u4").byteswap().tobytes()
    for name in ("float32", "float16"):
        cast = cast_record(record(swapped), BY_NAME["float32"], BY_NAME[name], big_endian=True)
        assert_is(cast, bits(values.to(getattr(torch, name))))


@pytest.mark.parametrize(
    ("source", "target", "length"),
    [
        ("complex64", "float32", 16),
        ("quint8", "float32", 16),
        ("float32", "quint4x2", 16),
        ("float4_e2m1fn_x2", "float32", 16),
        ("float32", "float16", 6),  # a fraction of an element
    ],
)
def test_cast_refuses_what_has_no_plain_meaning(source: str, target: str, length: int) -> None:
    with pytest.raises(TensorError):
        cast_record(record(bytes(length)), BY_NAME[source], BY_NAME[target], big_endian=False)


def test_what_torch_does_not_have() -> None:
    with pytest.raises(UnsupportedError):
        torch_dtype(BY_NAME["float6_e2m3"])
    if hasattr(torch, "int4"):
        cast = cast_record(record(bytes(4)), BY_NAME["int4"], BY_NAME["float32"], big_endian=False)
        with pytest.raises(UnsupportedError):
            read(cast)


# contiguous


def test_contiguous_costs_nothing_where_nothing_is_to_be_done() -> None:
    source = record(bytes(64))
    assert contiguous(source, "float32", (4, 4), (4, 1)) is source
    part = contiguous(source, "float32", (2, 4), (4, 1), 4).locate()
    assert part == Range(source.source, 16, 32)
    assert contiguous(source, "float32", (0, 4), (1, 9), 4).locate().length == 0


@pytest.mark.parametrize(
    "dtype", [row for row in TABLE if row.storage and row.bits >= 8 and row.kind != "quantized"]
)
def test_every_dtype_transposed_and_big_endian(dtype: object) -> None:
    numbers = torch.arange(768, dtype=torch.uint8)
    values = (numbers % 2 if str(dtype) == "bool" else numbers).view(getattr(torch, str(dtype)))
    matrix = values[: len(values) // 6 * 6].reshape(6, -1)
    for view in (matrix, matrix.t(), matrix[1:4], matrix[:, 1:3], matrix[::2, ::2]):
        for big_endian in (False, True):
            made = arranged.contiguous(described(view, big_endian=big_endian))
            assert_is(made, bits(view))


def test_elements_smaller_than_a_byte() -> None:
    where = record(b"\x12\x34\x56")
    assert_is(contiguous(where, "quint4x2", (4,), (1,), 2), b"\x34\x56")
    for shape, stride, offset in (((2,), (2,), 0), ((4,), (1,), 1)):
        with pytest.raises(TensorError):
            contiguous(where, "quint4x2", shape, stride, offset)


@pytest.mark.parametrize(("layout", "stride"), [("strided", (2, 1)), ("sparse_coo", ())])
def test_a_tensor_without_bytes_of_its_own(layout: str, stride: tuple[int, ...]) -> None:
    with pytest.raises(TensorError):
        arranged.contiguous(Tensor(None, BY_NAME["float32"], (2, 2), stride, layout=layout))


DIMS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), max_size=5)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=120)
@given(
    dims=DIMS,
    offset=st.integers(0, 50),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    is_inflated=st.booleans(),
    cut=st.tuples(st.integers(0, 4000), st.integers(0, 4000)),
)
def test_TM_05_any_strides(
    dims: list[tuple[int, int]], offset: int, itemsize: int, is_inflated: bool, cut: tuple[int, int]
) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    elements = offset + 1 + sum((n - 1) * s for n, s in dims)
    data = np.random.default_rng(elements).integers(0, 256, elements * itemsize, np.uint8).tobytes()
    name = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}[itemsize]
    where = (
        Pending(Inflate(), (record(deflated(data)),), len(data)) if is_inflated else record(data)
    )
    strides = tuple(s * itemsize for s in stride)
    want = np.ndarray(shape, f"V{itemsize}", data, offset * itemsize, strides).tobytes()
    ends = [min(each, len(want)) for each in cut]
    assert_is(contiguous(where, name, shape, stride, offset), want, sorted(ends))


def test_an_expanded_tensor_is_read_once_for_each_tile() -> None:
    extent = contiguous(record(b"ab"), "int16", (1 << 40,), (0,)).locate()
    assert extent.length == 2 << 40
    first = next(iter(operation.stream(extent)))
    assert bytes(first[:4]) == b"abab"
    assert len(first) <= strided_read.TILE
    assert read(extent, (2 << 40) - 3) == b"bab"


@pytest.mark.parametrize("shape", [(64, 100_000), (100_000, 64), (3000, 2000)])
def test_a_transposed_matrix_takes_few_reads(shape: tuple[int, int]) -> None:
    values = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    source = Counting(values.tobytes())
    where = Range(source, 0, source.size)
    assert_is(contiguous(where, "float32", shape[::-1], (1, shape[1])), values.T.tobytes())
    assert source.calls < 200


# chunks


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=80)
@given(
    drawn=grids(),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    data=st.data(),
    cut=st.tuples(st.integers(0, 4000), st.integers(0, 4000)),
)
def test_chunks_of_any_boxes(
    drawn: Any, itemsize: int, data: st.DataObject, cut: tuple[int, int]
) -> None:
    """Each box as it lies in memory of its own: its axes in any order, something before it, plain
    or deflated."""
    shape, parts = drawn
    rng = np.random.default_rng(itemsize)
    whole = rng.integers(0, 256, (*shape, itemsize), np.uint8).view(f"V{itemsize}").reshape(shape)
    inputs: list[Range | Derived] = []
    described = []
    for offsets, sizes in parts:
        axes = data.draw(st.permutations(range(len(shape))))
        box = whole[within(offsets, sizes)]
        held = np.ascontiguousarray(box.transpose(axes))
        stride = held.transpose(np.argsort(axes)).strides
        content = bytes(3 * itemsize) + held.tobytes()
        inputs.append(inflated(content) if data.draw(st.booleans()) else record(content))
        described.append((offsets, sizes, tuple(s // itemsize for s in stride), 3))
    want = whole.tobytes()
    made = Derived(array_of(itemsize, shape, described), tuple(inputs), len(want))
    assert_is(made, want, sorted(min(each, len(want)) for each in cut))


def test_chunks_are_read_in_few_and_bounded_pieces() -> None:
    values = np.arange(8_000_000, dtype=np.float32).reshape(4000, 2000)
    parts = (np.ascontiguousarray(values[:, at : at + 500]) for at in range(0, 2000, 500))
    sources = [Counting(part.tobytes()) for part in parts]
    described = tuple(((0, at), (4000, 500), (500, 1), 0) for at in range(0, 2000, 500))
    inputs = tuple(Range(source, 0, source.size) for source in sources)
    made = Derived(array_of(4, (4000, 2000), described), inputs, values.nbytes)
    pieces = [bytes(piece) for piece in operation.stream(made)]
    assert b"".join(pieces) == values.tobytes()
    assert max(map(len, pieces)) <= strided_read.TILE
    assert sum(source.calls for source in sources) < 100


# compare

ODD = st.one_of(
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e300]), st.floats(-2, 2)
)


def compared(a: torch.Tensor, b: torch.Tensor, **how: Any) -> Difference | None:
    return compare.compare(described(a), described(b), **how)


@pytest.mark.usefixtures("small_pieces")
def test_compare_by_bytes() -> None:
    a = torch.arange(100, dtype=torch.float32)
    b = a.clone()
    assert compared(a, b) is None
    b[[17, 60, 99]] += 1
    assert compared(a, b) == Difference(3, 17)
    assert compared(a.reshape(10, 10).t(), a.reshape(10, 10).t().contiguous()) is None


def test_DS_27_equality_is_of_bytes() -> None:
    nan = torch.tensor([math.nan])
    odd = (nan.view(torch.int32) + 1).view(torch.float32)
    assert compared(nan, nan.clone()) is None
    assert compared(nan, odd) == Difference(1, 0)
    assert compared(torch.tensor([0.0]), torch.tensor([-0.0])) == Difference(1, 0)
    one = torch.tensor([1.0])
    assert compared(one, one.nextafter(torch.tensor([2.0]))) is not None


@pytest.mark.usefixtures("small_pieces")
def test_compare_within_a_tolerance() -> None:
    a = torch.linspace(0, 1, 50)
    b = a.clone().double()
    b[[7, 30]] += torch.tensor([0.5, 0.01], dtype=torch.float64)
    assert compared(a, b, atol=1.0) is None
    found = compared(a, b, atol=0.1)
    assert found is not None
    assert (found.count, found.first) == (1, 7)
    assert found.largest == pytest.approx(0.5)
    odd = torch.tensor(AWKWARD)
    assert compared(odd, odd.to(torch.bfloat16), rtol=1e-2) is None


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "expected"),
    [
        ([1.0, math.nan], [1.0, 2.0], {"atol": 1.0}, Difference(1, 1, math.inf)),
        ([math.inf], [-math.inf], {"rtol": 1.0}, Difference(1, 0, math.inf)),
        ([1j], [1], {"atol": 0.5}, Difference(1, 0, math.sqrt(2))),
    ],
)
def test_compare_within_a_tolerance_meets_nan_and_infinity(
    a: list[complex], b: list[complex], tolerance: dict[str, float], expected: Difference
) -> None:
    assert compared(torch.tensor(a), torch.tensor(b), **tolerance) == expected


@given(
    st.lists(st.tuples(ODD, ODD), min_size=1, max_size=20),
    st.sampled_from([0.0, 1e-3, 0.5, math.inf]),
    st.sampled_from([0.0, 1e-3, 0.5]),
)
def test_a_tolerance_is_that_of_torch(
    pairs: list[tuple[float, float]], atol: float, rtol: float
) -> None:
    a, b = (torch.tensor(each, dtype=torch.float64) for each in zip(*pairs, strict=True))
    found = compared(a, b, atol=atol, rtol=rtol)
    differs = ~torch.isclose(a, b, atol=atol, rtol=rtol, equal_nan=True)
    assert (found.count if found else 0) == int(differs.sum())
    if found is not None:
        assert found.first == int(differs.int().argmax())
    complex_a, complex_b = torch.complex(a, b), torch.complex(b, a)
    differs = ~torch.isclose(complex_a, complex_b, atol=atol, rtol=rtol, equal_nan=True)
    found = compared(complex_a, complex_b, atol=atol, rtol=rtol)
    assert (found.count if found else 0) == int(differs.sum())


SCALES = {"usual": 0.02, "squares below float32": 1e-27, "squares above float32": 1e27, "zero": 0.0}


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float16, "usual"),
        *itertools.product([torch.float32, torch.bfloat16, torch.float64], SCALES),
    ],
)
@pytest.mark.parametrize("odd", [(), (math.nan, math.inf)])
@pytest.mark.usefixtures("small_pieces")
def test_measures_are_those_of_float64(
    dtype: torch.dtype, scale: str, odd: tuple[float, ...]
) -> None:
    torch.manual_seed(3)
    a = (torch.randn(3_000) * SCALES[scale]).to(dtype)
    b = (a.double() * 1.01).to(dtype)
    b[:700] = a[:700]  # pieces that are equal, before and behind what differs
    b[2_500:] = a[2_500:]
    b[1_000] = 1.0 if scale != "squares above float32" else 0.0
    for place, value in enumerate(odd):
        a[1_500 + place] = value
    found = compared(a, b, measured=True)
    x, y = a.double(), b.double()
    finite = x.isfinite() & y.isfinite()
    x, y = x[finite], y[finite]
    assert found is not None and found.largest == float((x - y).abs().max())
    relative, cosine = float((x - y).norm() / x.norm()), float(x @ y / x.norm() / y.norm())
    if x.any():
        assert (found.relative, found.cosine) == pytest.approx((relative, cosine), 1e-6, 1e-7)
    else:
        assert (found.relative, found.cosine) == (None, None)


def test_measures_of_complex_and_whole_numbers() -> None:
    a, b = torch.tensor([1 + 1j, 3j]), torch.tensor([1 - 1j, 3j])
    found = compared(a, b, measured=True)
    shares = pytest.approx((4 / 11) ** 0.5), pytest.approx(9 / 11)
    assert found == Difference(1, 0, 2.0, *shares, 2.0)
    large = torch.tensor([2**40, 3])
    found = compared(large, large + 1, measured=True)
    assert found is not None and (found.count, found.largest) == (2, 1.0)


def test_compare_refuses_other_shapes_and_dtypes() -> None:
    for other, how in ((torch.zeros(3), {"atol": 1.0}), (torch.zeros(2).half(), {})):
        with pytest.raises(TensorError):
            compared(torch.zeros(2), other, **how)


# torch's own tensors


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t.t(),
    lambda t: t[1:, ::2],
    lambda t: t[0, 0],
    lambda t: t[:0],
    lambda t: t.expand(3, *t.shape),
    lambda t: t.conj(),
    lambda t: t.conj().imag,
]


@pytest.mark.parametrize("view", VIEWS)
def test_rebuild(view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    base = torch.arange(24).reshape(4, 6) * (1 + 2j)
    want = view(base)
    (tmp_path / "storage").write_bytes(storage_bits(want))
    source = LocalFile(tmp_path / "storage")
    made = rebuild(described(want), to_torch_storage(Storage(Range(source, 0, source.size))))
    assert torch.equal(made, want)
    assert (made.stride(), made.storage_offset()) == (want.stride(), want.storage_offset())
    assert (made.is_conj(), made.is_neg()) == (want.is_conj(), want.is_neg())


def test_rebuild_keeps_parameters_and_gradients_apart() -> None:
    storage = Storage(record(bytes(8)))
    untyped = to_torch_storage(storage)
    for kind, grad in itertools.product(("tensor", "parameter"), (True, False)):
        ours = Tensor(storage, BY_NAME["float32"], (2,), (1,), requires_grad=grad, kind=kind)
        made = rebuild(ours, untyped)
        is_parameter = isinstance(made, torch.nn.Parameter)
        assert (is_parameter, made.requires_grad) == (kind == "parameter", grad)
        assert made.untyped_storage().data_ptr() == untyped.data_ptr()


def test_rebuild_refuses_quantized_tensors() -> None:
    tensor = strided(record(bytes(8)), "quint8", (8,), (1,))
    assert tensor.storage is not None
    with pytest.raises(UnsupportedError):
        rebuild(tensor, to_torch_storage(tensor.storage))


def test_a_big_endian_storage_is_swapped() -> None:
    values = torch.arange(6, dtype=torch.int32)
    tensor = described(values, big_endian=True)
    assert tensor.storage is not None
    made = rebuild(tensor, to_torch_storage(tensor.storage, component=tensor.dtype.component))
    assert torch.equal(made, values)


def test_a_computed_storage_is_filled() -> None:
    data = bytes(range(256)) * 100
    storage = Storage(Pending(Inflate(), (record(deflated(data)),), len(data)))
    assert bytes(to_torch_storage(storage)) == data


def test_the_meta_device_reads_nothing() -> None:
    made = to_torch_storage(Storage(Range(Memory(b""), 0, 1 << 50)), "meta")
    assert (made.device.type, made.nbytes()) == ("meta", 1 << 50)


def test_a_device_that_is_not_there() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(DeviceError) as caught:
        to_torch_storage(Storage(record(bytes(8))), absent)
    assert "map_location='cpu'" in (caught.value.hint or "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_is_filled_piece_by_piece() -> None:
    data = np.random.default_rng(0).integers(0, 256, (80 << 20) + 5, np.uint8).tobytes()
    made = to_torch_storage(Storage(record(data)), "cuda:0")
    assert made.device.type == "cuda"
    assert bytes(made.to(device=torch.device("cpu"))) == data


# the user's models


CODE = """
import sibling_of_the_model
import torch

class Net(torch.nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

class Stubborn(Net):
    def __init__(self):
        super().__init__(3)
        self.scale = self.layers[0].weight.sum().item()

class Broken(Net):
    def __init__(self):
        raise RuntimeError("no such config")

number = 5
plain = dict
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "model_of_the_user.py"
    path.write_text(CODE)
    (tmp_path / "sibling_of_the_model.py").write_text("")
    before = set(sys.modules)
    yield path
    for name in {"model_of_the_user", "sibling_of_the_model"} & (set(sys.modules) - before):
        del sys.modules[name]


def test_a_model_from_a_file_is_built_on_the_meta_device(model_file: Path) -> None:
    path = list(sys.path)
    model = building.model_from(f"{model_file}:Net", {"width": 1 << 20})
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert building.model_shapes(model)["layers.1.weight"] == ("float32", (1 << 20, 1 << 20))
    assert list(building.model_shapes(model)) == list(model.state_dict())
    assert sys.path == path


def test_a_model_that_needs_numbers_is_built_on_the_cpu(model_file: Path) -> None:
    model = building.model_from(f"{model_file}:Stubborn")
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_a_model_from_a_module() -> None:
    sizes = {"in_features": 2, "out_features": 3}
    shapes = building.model_shapes(building.model_from("torch.nn:Linear", sizes))
    assert shapes == {"weight": ("float32", (3, 2)), "bias": ("float32", (3,))}


def test_a_model_from_the_working_directory(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_file.parent)
    model = building.model_from("model_of_the_user:Net", {"width": 1, "depth": 0})
    assert building.model_shapes(model) == {}


@pytest.mark.parametrize(
    ("spec", "args", "said", "hint"),
    [
        ("{file}", {}, "is not a model class", "Class"),
        ("{file}:", {}, "is not a model class", "Class"),
        ("no_such_module_here:Net", {}, "cannot import", "path"),
        ("{file}x.py:Net", {}, "cannot import", ""),
        ("{file}:Missing", {}, "has no class 'Missing'", "Net, Stubborn, Broken"),
        ("{file}:number", {}, "has no class 'number'", "Net"),
        ("{file}:plain", {}, "returns a dict", ""),
        ("{file}:Net", {}, "missing a required argument: 'width'", "signature is (width, depth=2)"),
        ("{file}:Net", {"width": 2, "wide": 2}, "unexpected keyword argument 'wide'", "width"),
        ("{file}:Broken", {}, "RuntimeError: no such config", "its signature is ()"),
    ],
)
def test_models_that_cannot_be_had(
    spec: str, args: dict[str, object], said: str, hint: str, model_file: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        building.model_from(spec.format(file=model_file), args)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_the_command_line_gives_arguments_as_options(model_file: Path) -> None:
    with on_command_line(), pytest.raises(ModelError) as caught:
        building.model_from(f"{model_file}:Net")
    assert "--arg width=64" in str(caught.value.hint)


def test_a_module_that_ends_the_process_does_not(tmp_path: Path) -> None:
    (tmp_path / "script_of_the_user.py").write_text("raise SystemExit(3)")
    with pytest.raises(ModelError, match="SystemExit"):
        building.model_from(f"{tmp_path}/script_of_the_user.py:Net")
    sys.modules.pop("script_of_the_user", None)


def test_the_environment_is_plain_data() -> None:
    found = building.environment()
    assert (found["torch"], found["numpy"]) == (torch.__version__, np.__version__)
    devices = found["devices"]
    assert isinstance(devices, dict)
    assert len(devices) >= 1 + torch.cuda.device_count()
    assert devices["cpu"]["memory"] > 0


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 9),
)
def test_streams_in_step(first: list[int], second: list[int], most: int) -> None:
    """Whatever the pieces of two streams, elements come out together, and all of them."""
    count = min(sum(first) // 2, sum(second) // 4)
    data = [bytes(range(80)) * 4, bytes(range(80, 160)) * 4]
    units = (2, 4)

    def cut(number: int, sizes: list[int]) -> list[bytes]:
        ends = [min(sum(sizes[:at]), count * units[number]) for at in range(len(sizes) + 1)]
        return [data[number][a:b] for a, b in itertools.pairwise(ends)]

    made = list(operation.in_step([cut(0, first), cut(1, second)], units, most))
    for number, unit in enumerate(units):
        assert b"".join(pieces[number] for pieces in made) == data[number][: count * unit]
    assert all(len(a) // 2 == len(b) // 4 <= most for a, b in made)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the pages of glibc's memory")
def test_memory_is_used_again(tmp_path: Path) -> None:
    """Blocks are computed in the pages of those before them, not in new ones."""
    path = tmp_path / "noise"
    path.write_bytes(np.random.default_rng(0).standard_normal(8 << 20, "f4").tobytes())
    program = f"""
import resource
from ckptkit.compute.tallies import ElementRange, tally
from ckptkit.core.bytesource import LocalFile, Range
from ckptkit.core.dtypes import BY_NAME
file = LocalFile({str(path)!r})
def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tally(ElementRange(Range(file, 0, file.size), BY_NAME["float32"], 0, size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(1 << 20)
print(faults(32 << 20))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2_000  # of 4 KiB: less than a page in four of what is read


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_commands_import_numpy_without_threads_that_wait_for_work() -> None:
    program = """
import os
import ckptkit.cli
from ckptkit.compute.lazy import np
np.zeros(1)
assert "OPENBLAS_NUM_THREADS" not in os.environ
assert len(os.listdir("/proc/self/task")) == 1
"""
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
