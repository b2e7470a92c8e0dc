"""The duties of every format, as a test class to inherit: a subclass writes files by a library.

The oracle is whoever made the file: names, shapes, strides, dtypes, bytes and sharing must be what
it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit import formats
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Folder, LocalFile, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CkptkitError
from ckptkit.core.options import Options
from ckptkit.core.tensor import Tensor
from ckptkit.formats.format import Format
from ckptkit.formats.table import FORMATS
from tests.torch_equality import storage_bits

State = dict[str, torch.Tensor]


class FormatConformance:
    """Inherit, and say what `name` the format has and how to `make` a file of it."""

    name: str  # in FORMATS
    suffix: str  # of a file that is written in it
    views = True  # whether it keeps strides and shared storages
    inside: str | None = None  # the format of what is read, where the file is but around it
    dtypes: Iterable[str] = ()  # the rows of dtypes.TABLE that it can hold
    options = Options()
    header_bytes = 2 << 20  # how much of a file of 16 MiB may be read to know what is in it

    def make(self, folder: Path, state: State) -> Path:
        """Write `state` as others do, without ckptkit."""
        raise NotImplementedError

    def oracle(self, path: Path) -> State:
        """Read what `make` wrote, without ckptkit."""
        loaded: State = torch.load(path, weights_only=True)
        return loaded

    def boundaries(self, data: bytes) -> Iterable[int]:
        """Yield the offsets at which parts of a file begin and end."""
        raise NotImplementedError

    @property
    def format(self) -> Format:
        return next(each for each in FORMATS if each.name == self.name)

    def state(self) -> State:
        """A small state_dict with whatever the format keeps."""
        torch.manual_seed(0)
        base = torch.randn(6, 4)
        state = {
            "layer.0.weight": base,
            "layer.0.bias": torch.arange(5, dtype=torch.float64),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "half": torch.tensor([1.0, -0.0, float("nan"), float("inf")], dtype=torch.float16),
            "ключ": torch.tensor([True, False, True]),
        }
        if self.views:
            state |= {
                "tied": base,
                "row": base[2],
                "transposed": base.t(),
                "expanded": base[0, :1].expand(3),
            }
        return state

    def test_equals_its_maker(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, self.state())
        with reading(path) as checkpoint:
            assert checkpoint.format == (self.inside or self.name)
            check_equal(checkpoint.weights, self.oracle(path))

    def test_holds_every_dtype(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, {name: sample(name) for name in self.dtypes})
        with reading(path) as checkpoint:
            assert {tensor.dtype.name for tensor in checkpoint.weights.values()} == set(self.dtypes)
            check_equal(checkpoint.weights, self.oracle(path))

    def test_reads_no_tensor_early(self, tmp_path: Path, lengths: list[int]) -> None:
        state = {f"layer.{i}.weight": torch.full((1 << 20,), float(i)) for i in range(4)}
        path = self.make(tmp_path, state)
        with reading(path) as checkpoint:
            assert list(checkpoint.weights) == list(state)
            assert 0 < sum(lengths) < self.header_bytes

    def test_input_is_unchanged(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, self.state())
        before = hashes(path)
        drain(path)
        assert hashes(path) == before

    def test_truncated_anywhere(self, tmp_path: Path) -> None:
        """Cut at every structural boundary, one byte to either side of it, and at 32 places
        between (6 in each file of a folder)."""
        path = self.make(tmp_path, self.state())
        steps = 6 if path.is_dir() else 32
        for file in files_of(path):
            data = file.read_bytes()
            even = {len(data) * step // steps for step in range(steps)}
            near = {edge + shift for edge in self.boundaries(data) for shift in (-1, 0, 1)}
            for cut in sorted(
                each for each in even | near if 0 <= each < len(data) and data[each:].strip()
            ):
                file.write_bytes(data[:cut])
                with pytest.raises(CkptkitError):
                    drain(path)
                    pytest.fail(f"{file.name} cut at {cut} of {len(data)} was read")
            file.write_bytes(data)
        drain(path)

    def test_writes_what_it_read(self, tmp_path: Path) -> None:
        """And the same bytes each time."""
        if self.format.layout is None:
            pytest.skip(f"{self.name} is only read")
        path = self.make(tmp_path, self.state())
        first, second = tmp_path / f"first{self.suffix}", tmp_path / f"second{self.suffix}"
        for out in (first, second):
            with reading(path) as checkpoint:
                ckptkit.save(checkpoint, out, options=self.options)
        assert [file.name for file in files_of(first)[1:]] == [
            file.name for file in files_of(second)[1:]
        ]
        assert hashes(first) == hashes(second)
        with reading(path) as checkpoint:
            check_equal(checkpoint.weights, self.oracle(first))

    def test_writes_every_dtype(self, tmp_path: Path) -> None:
        if self.format.layout is None:
            pytest.skip(f"{self.name} is only read")
        path = self.make(tmp_path, {name: sample(name) for name in self.dtypes})
        out = tmp_path / f"out{self.suffix}"
        with reading(path) as checkpoint:
            ckptkit.save(checkpoint, out, options=self.options)
            check_equal(checkpoint.weights, self.oracle(out))


@contextmanager
def reading(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint in a file or folder, closed at the end."""
    place = Folder(path) if path.is_dir() else LocalFile(path)
    try:
        yield formats.read(place)
    finally:
        place.close()


def drain(path: Path) -> None:
    """Read everything that there is to read."""
    with reading(path) as checkpoint:
        for tensor in checkpoint.weights.values():
            elements_of(tensor)


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def hashes(path: Path) -> list[str]:
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(path)]


def sample(name: str) -> torch.Tensor:
    """Three or more elements of a dtype, no two bytes of its storage equal where the type allows
    it."""
    dtype = getattr(torch, name)
    kind = BY_NAME[name].kind
    if kind == "quantized" and BY_NAME[name].bits < 8:
        ones = torch.ones(4)
        made: torch.Tensor = torch._empty_per_channel_affine_quantized(
            [4, 8], scales=ones, zero_points=ones, axis=0, dtype=dtype
        )
        return made
    if kind == "quantized":
        return torch.quantize_per_tensor(torch.tensor([1.0, 2.0, -3.0]), 0.5, 3, dtype)
    raw = torch.arange(64, dtype=torch.uint8)
    return (raw % 2 if kind == "bool" else raw).view(dtype)


def check_equal(got: Mapping[str, Tensor], want: State) -> None:
    """Tensors of ours against tensors of torch: names in order, geometry, bytes, sharing."""
    assert list(got) == list(want)
    for name, tensor in want.items():
        ours = got[name]
        assert ours.dtype.name == str(tensor.dtype).removeprefix("torch."), name
        assert ours.shape == tuple(tensor.shape), name
        if tensor.numel():
            assert ours.stride == tensor.stride(), name
        assert elements_of(ours) == elements(tensor), name
    assert sharing({name: id(each.storage) for name, each in got.items() if each.numel}) == sharing(
        {name: each.untyped_storage().data_ptr() for name, each in want.items() if each.numel()}
    )


def elements_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor of ours in row-major order; torch arranges them, so that we are not our
    own witness."""
    data = storage_bytes(tensor)
    if tensor.dtype.kind == "quantized":
        return data
    storage = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=getattr(torch, tensor.dtype.name))
    return elements(made.set_(storage, tensor.offset, tensor.shape, tensor.stride))


def storage_bytes(tensor: Tensor) -> bytes:
    """The bytes of its whole storage."""
    assert tensor.storage is not None
    extent = tensor.storage.record.locate()
    return extent.read() if isinstance(extent, Range) else b"".join(stream(extent))


def elements(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order; of a quantised one, its storage."""
    if tensor.is_quantized:
        start, length = 0, tensor.untyped_storage().nbytes()
    else:
        tensor = tensor.contiguous()
        start, length = int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes
    return storage_bits(tensor)[start : start + length]


def sharing(storages: dict[str, int]) -> list[list[str]]:
    """Names that share a storage."""
    groups: dict[int, list[str]] = {}
    for name, storage in storages.items():
        groups.setdefault(storage, []).append(name)
    return list(groups.values())
