"""Parameters filled straight from a file: as `load_state_dict` of torch fills them."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptkit
from ckptkit.compute import torch_bridge, workers
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.errors import InputError, ModelError
from tests.torch_equality import same

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own way fail."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("load_state_dict is called")

    monkeypatch.setattr(nn.Module, "load_state_dict", refuse)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut tensors of few elements, for several workers."""
    monkeypatch.setattr(torch_bridge, "BATCH", 64)
    monkeypatch.setattr(workers, "BATCH", 64)
    monkeypatch.setattr(torch_bridge, "PIECE", 32)
    monkeypatch.setattr(workers, "processors", lambda: 4)
    yield


class Holder(nn.Module):
    """A module of one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", value)


def numbers(dtype: torch.dtype, shape: tuple[int, ...] = (7, 11)) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder(50).view(shape).to(dtype)


SHAPES = [(7, 11), (), (0, 3), (1,)]
PAIRS = [(a, b) for a in DTYPES for b in DTYPES if a == b or not (a.is_complex or b.is_complex)]


@pytest.mark.usefixtures("straight", "small_parts")
@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=str)
def test_cast_as_torch_casts(tmp_path: Path, ours: torch.dtype, theirs: torch.dtype) -> None:
    state = {f"{number}.w": numbers(ours, shape) for number, shape in enumerate(SHAPES)}
    save_file(state, tmp_path / "a.safetensors")
    model = nn.ModuleList(Holder(torch.zeros(shape, dtype=theirs)) for shape in SHAPES)
    report = ckptkit.load_into(model, tmp_path / "a.safetensors", strict=ours == theirs)
    assert report.complete
    for name, value in model.state_dict().items():
        same(value, torch.zeros_like(value).copy_(state[name]))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base.t(),
    "every second": lambda base: base[::2, 1:],
    "expanded": lambda base: base[:1].expand(4, -1),
    "part": lambda base: base[2:5],
}


@pytest.mark.usefixtures("straight", "small_parts")
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_of_a_storage(tmp_path: Path, name: str, legacy: bool, dtype: torch.dtype) -> None:
    view = VIEWS[name](numbers(torch.float32))
    path = tmp_path / "a.pth"
    torch.save({"w": view}, path, _use_new_zipfile_serialization=not legacy)
    model = Holder(torch.zeros(view.shape, dtype=dtype))
    ckptkit.load_into(model, path)
    same(model.w, view.to(dtype).clone(memory_format=torch.contiguous_format))


@pytest.mark.usefixtures("straight")
def test_conjugates(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1 + 2j, 3 - 4j]).conj()}, tmp_path / "a.pth")
    model = Holder(torch.zeros(2, dtype=torch.complex64))
    ckptkit.load_into(model, tmp_path / "a.pth")
    assert model.w.tolist() == [1 - 2j, 3 + 4j]


def test_what_is_not_contiguous_is_left_to_torch(tmp_path: Path) -> None:
    source = numbers(torch.float32, (2, 3, 4, 5))
    torch.save({"w": source}, tmp_path / "a.pth")
    model = Holder(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    ckptkit.load_into(model, tmp_path / "a.pth")
    assert model.w.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.w, source)


class Overlapping(nn.Module):
    """Two parameters of one memory, one a part of the other."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.whole, self.part = nn.Parameter(memory), nn.Parameter(memory[2:4])


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(2, 2, bias=False)


ORDERED: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "overlapping": (Overlapping, {"part": torch.ones(2), "whole": torch.arange(8.0)}),
    "twice": (Twice, {"second.weight": torch.ones(2, 2), "first.weight": torch.zeros(2, 2)}),
}


@pytest.mark.parametrize("name", ORDERED)
def test_the_last_one_counts_as_for_torch(tmp_path: Path, name: str) -> None:
    make, state = ORDERED[name]
    torch.save(state, tmp_path / "a.pth")
    ours, theirs = make(), make()
    ckptkit.load_into(ours, tmp_path / "a.pth")
    theirs.load_state_dict(state)
    same(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.usefixtures("straight")
def test_garbage_is_collected_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first collection, of all that torch has made, takes as long as half a GiB."""
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    seen: list[bool] = []
    fill = torch_bridge.fill

    def noted(pairs: Any) -> None:
        fill(pairs)
        seen.append(gc.isenabled())

    monkeypatch.setattr("ckptkit.loading.model.fill_tensors", noted)
    assert gc.isenabled()
    assert ckptkit.load_into(Holder(torch.zeros(3)), tmp_path / "a.safetensors").complete
    assert seen == [False] and gc.isenabled()


@pytest.mark.usefixtures("straight")
def test_buffers_that_are_not_saved_stay(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "cache": torch.ones(2)}, tmp_path / "a.pth")
    model = Holder(torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    assert ckptkit.load_into(model, tmp_path / "a.pth", strict=False).unexpected == ("cache",)
    assert (model.w.tolist(), model.cache.tolist()) == ([1.0, 1.0], [0.0, 0.0])


@pytest.mark.usefixtures("straight")
def test_autograd_knows_that_a_parameter_changed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")
    loss = model(model(torch.ones(1, 2))).sum()
    ckptkit.load_into(model, tmp_path / "a.pth")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_misfit_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(2, 2), "more": torch.ones(2)}, tmp_path / "a.pth")
    model = nn.Linear(2, 2)
    before = deepcopy(model.state_dict())
    monkeypatch.setattr(LocalFile, "read_into", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ModelError, match="missing"):
        ckptkit.load_into(model, tmp_path / "a.pth")
    same(dict(model.state_dict()), dict(before))


def test_a_file_that_fails_in_the_middle(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.pth"
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    read_into = LocalFile.read_into
    calls: list[int] = []

    def fail_later(file: LocalFile, offset: int, buffer: memoryview) -> None:
        calls.append(offset)
        if len(calls) > 1:
            raise InputError("cannot be read: Input/output error", where=file.name)
        read_into(file, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", fail_later)
    with pytest.raises(InputError) as caught:
        ckptkit.load_into(nn.Linear(2, 2), path)
    assert caught.value.where == str(path)


def test_another_device_gets_it_through_a_small_buffer(tmp_path: Path, monkeypatch: Any) -> None:
    """The meta device takes what it is given; no larger part is in memory at once."""
    torch.save({"w": torch.ones(100)}, tmp_path / "a.pth")
    read: list[tuple[int, int]] = []
    read_into = LocalFile.read_into

    def watched(file: LocalFile, offset: int, buffer: memoryview) -> None:
        read.append((offset, len(buffer)))
        read_into(file, offset, buffer)

    monkeypatch.setattr(torch_bridge, "PIECE", 64)
    monkeypatch.setattr(LocalFile, "read_into", watched)
    node = ckptkit.open(tmp_path / "a.pth").weights["w"]
    torch_bridge.fill([(node, torch.empty(100, device="meta"))])
    start = read[0][0]
    assert read == [(start + at, min(64, 400 - at)) for at in range(0, 400, 64)]


PEAK = """
import re, sys, torch, ckptkit, ckptkit.loading
from torch import nn
model = nn.Sequential(*(nn.Linear(1024, 4096, bias=False) for _ in range(16)))
ckptkit.load_into(nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
memory = lambda key: int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
ckptkit.load_into(model, sys.argv[1])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_memory_beside_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.ones(4096, 1024, dtype=dtype)
    save_file({f"{n}.weight": weight.clone() for n in range(16)}, tmp_path / "a.safetensors")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "a.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 64
