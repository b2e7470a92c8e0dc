"""Arranged extents and tensors of torch as tests describe them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import torch
from hypothesis import strategies as st

from ckptkit.compute.operation import stream
from ckptkit.compute.strided import normal, of_box
from ckptkit.compute.strided_read import Arrange
from ckptkit.core.bytesource import Memory, Range, Record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from tests.torch_equality import storage_bits

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offsets and sizes


@st.composite
def grids(draw: st.DrawFn, rank: int | None = None) -> tuple[Shape, list[Box]]:
    """A shape, and the boxes that cutting each dimension somewhere leaves, in any order."""
    least, most = (1, 4) if rank is None else (rank, rank)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=least, max_size=most)))
    cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
    edges = [[(a, b - a) for a, b in pairwise(cut)] for cut in cuts]
    made = [(tuple(a for a, _ in each), tuple(n for _, n in each)) for each in product(*edges)]
    return shape, draw(st.permutations(made))


def within(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def record(data: bytes) -> Range:
    return Range(Memory(data), 0, len(data))


def read(what: Record, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join(map(bytes, stream(what.locate(), start, stop)))


def view(itemsize: int, shape: Shape, stride: Shape) -> Arrange:
    """The elements of a view that begins at the first byte of its input."""
    return boxes(itemsize, shape, [((0,) * len(shape), shape, stride, 0)])


def boxes(
    itemsize: int, shape: Shape, places: Sequence[tuple[Shape, Shape, Shape, int]]
) -> Arrange:
    """An array of which each input holds a box: offsets, sizes, strides, first element."""
    copies = []
    for number, (offsets, sizes, stride, start) in enumerate(places):
        copy = of_box(shape, offsets, sizes, stride, start, number)
        if copy.elements:
            copies.append(copy._replace(dims=normal(copy.dims)))
    return Arrange(itemsize, tuple(copies))


def described(tensor: torch.Tensor, *, big_endian: bool = False) -> Tensor:
    """Our description of a torch tensor, over a copy of the bytes of its storage."""
    data = storage_bits(tensor)
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    if big_endian:
        data = np.frombuffer(data, f"u{dtype.component}").byteswap().tobytes()
    shape = tuple(tensor.shape)
    stride = tensor.stride() if dtype.bits >= 8 else contiguous_stride(shape)
    return Tensor(
        Storage(record(data), big_endian=big_endian),
        dtype,
        shape,
        stride,
        int(tensor.storage_offset()),
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )
