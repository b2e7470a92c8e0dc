"""Dequantised bytes against torch's own ``dequantize``, bit for bit, whatever part of them is asked
for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.compute import dequantize as quantized
from ckptkit.compute.dequantize import dequantized_record
from ckptkit.core.bytesource import Pending, Record
from ckptkit.core.errors import TensorError
from tests.compute.arranging import described, read

SCHEMES = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}


def record_of(tensor: torch.Tensor, **how: Any) -> Record:
    ours = described(tensor, **how)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return dequantized_record(ours, tensor.q_scale(), tensor.q_zero_point())
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return dequantized_record(
        ours, described(scales), described(zeros), tensor.q_per_channel_axis()
    )


def want(tensor: torch.Tensor) -> bytes:
    return tensor.dequantize().contiguous().numpy().tobytes()


def check(tensor: torch.Tensor, **how: Any) -> None:
    record = record_of(tensor, **how)
    assert record.length == 4 * tensor.numel()
    assert read(record) == want(tensor)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("scale", "zero_point"), [(0.1, 3), (1 / 3, 100), (1e-6, 0), (7.0, 127)])
def test_per_tensor(name: str, scale: float, zero_point: int) -> None:
    numbers = torch.randn(3, 1001, generator=torch.Generator().manual_seed(1)) * 100
    check(torch.quantize_per_tensor(numbers, scale, zero_point, getattr(torch, name)))


@pytest.mark.parametrize("scale", [1e-300, 1e300, 3e38])
def test_scales_beyond_float32(scale: float) -> None:
    values = torch.tensor([-(2**31), -1, 0, 1, 2**31 - 1], dtype=torch.int32)
    check(torch._make_per_tensor_quantized_tensor(values, scale, 100))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_per_channel(name: str, axis: int) -> None:
    random = torch.Generator().manual_seed(axis)
    numbers = torch.randn(5, 33, 3, generator=random) * 10
    scales = torch.rand(numbers.shape[axis], generator=random, dtype=torch.float64) + 0.01
    zeros = torch.randint(0, 50, scales.shape, generator=random)
    check(torch.quantize_per_channel(numbers, scales, zeros, axis, getattr(torch, name)))


@pytest.mark.parametrize("name", ["quint8", "quint4x2", "quint2x4"])
@pytest.mark.parametrize("columns", [8, 12])
def test_per_channel_with_float_zero_points(name: str, columns: int) -> None:
    """As embeddings are quantised, those smaller than a byte included."""
    random = torch.Generator().manual_seed(2)
    numbers = torch.randn(7, columns, generator=random)
    scales, zeros = torch.rand(7, generator=random) + 0.01, torch.rand(7, generator=random) * 3
    made = torch.quantize_per_channel(numbers, scales, zeros, 0, getattr(torch, name))
    assert made.qscheme() == torch.per_channel_affine_float_qparams
    check(made)


def test_views_and_byte_order() -> None:
    numbers = torch.arange(48.0).reshape(1, 3, 4, 4)
    for name in SCHEMES:
        made = torch.quantize_per_tensor(numbers, 0.5, 2, getattr(torch, name))
        check(made.contiguous(memory_format=torch.channels_last))
        check(made[:, 1:, ::2].transpose(2, 3))
        check(made, big_endian=True)


def test_empty_and_single() -> None:
    for shape in ((), (0,), (3, 0)):
        check(torch.quantize_per_tensor(torch.ones(shape), 0.5, 2, torch.qint8))


def test_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels go on where the piece before ended."""
    monkeypatch.setattr("ckptkit.compute.operation.PIECE", 64)
    monkeypatch.setattr(quantized, "_BLOCK", 24)
    random = torch.Generator().manual_seed(3)
    for dtype, columns in ((torch.qint8, 50), (torch.quint4x2, 64)):
        scales, zeros = torch.rand(9, generator=random) + 0.1, torch.zeros(9)
        numbers = torch.randn(9, columns, generator=random)
        check(torch.quantize_per_channel(numbers, scales, zeros, 0, dtype))


MADE = torch.quantize_per_channel(
    torch.randn(6, 10, generator=torch.Generator().manual_seed(4)),
    torch.rand(6) + 0.1, torch.zeros(6), 0, torch.quint4x2,
)  # fmt: skip


@settings(max_examples=60)
@given(st.integers(0, 240), st.integers(0, 240))
def test_any_part(start: int, stop: int) -> None:
    start, stop = min(start, stop), max(start, stop)
    assert read(record_of(MADE), start, stop) == want(MADE)[start:stop]


def test_pickles() -> None:
    record = record_of(torch.quantize_per_tensor(torch.ones(3), 0.5, 2, torch.qint8))
    assert isinstance(record, Pending)
    assert read(pickle.loads(pickle.dumps(record.locate()))) == read(record)


def test_refused() -> None:
    tensor = described(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 2, torch.qint8))
    two, three, truths = map(described, (torch.ones(2), torch.ones(3), torch.ones(2).bool()))
    for scale, zero, axis in (
        (0.5, 2**31, 0), (1, 0, 0), ("x", 0, 0), (0.5, None, 0), (two, 0, 0), (three, three, 0), (two, two, 1),
        (two, two, 2), (two, two, -1), (two, truths, 0), (truths, two, 0),
    ):  # fmt: skip
        with pytest.raises(TensorError):
            dequantized_record(tensor, scale, zero, axis)  # type: ignore[arg-type]
