"""`load` maps files: the same values as torch's, nothing written back, nothing read early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.errors import InputChangedError
from tests.torch_equality import same

Save = Callable[[dict[str, torch.Tensor], Path], Any]

WRITERS: dict[str, Save] = {
    "zip.pth": torch.save,
    "legacy.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "a.safetensors": save_file,
}


def saved(folder: Path, name: str = "zip.pth") -> Path:
    WRITERS[name](state(), folder / name)
    return folder / name


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether the system says that the bytes of a tensor are in a map of the file."""
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < stop:
            return line.endswith(str(path))
    return False


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int32)}


needs_maps = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("mmap", [True, False])
def test_values_are_those_of_torch(tmp_path: Path, name: str, mmap: bool) -> None:
    path = saved(tmp_path, name)
    theirs = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    same(ckptkit.load(path, mmap=mmap), theirs)


@needs_maps
@pytest.mark.parametrize("name", ["zip.pth", "a.safetensors"])
def test_only_with_mmap_are_tensors_in_the_file(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    assert all(is_mapped(tensor, path) for tensor in ckptkit.load(path).values())
    assert not any(is_mapped(tensor, path) for tensor in ckptkit.load(path, mmap=False).values())


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_open", [True, False])
def test_what_is_written_to_a_tensor_stays_in_memory(
    tmp_path: Path, name: str, is_open: bool
) -> None:
    """Two loads are apart, of one open checkpoint too."""
    path = saved(tmp_path, name)
    before = path.read_bytes()
    source: Any = ckptkit.open(path) if is_open else path
    changed, other = ckptkit.load(source), ckptkit.load(source)
    for tensor in changed.values():
        tensor.fill_(7)
    assert path.read_bytes() == before
    same(other, state())
    assert changed["a"].tolist() == [[7.0] * 3] * 2


def test_shared_memory_is_shared(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    torch.save({"whole": base, "part": base[2:4]}, tmp_path / "a.pth")
    loaded = ckptkit.load(tmp_path / "a.pth")
    loaded["whole"][3] = 70
    assert loaded["part"].tolist() == [2.0, 70.0]


@needs_maps
def test_numbers_at_odd_places_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x03" + data)
    loaded = ckptkit.load(path)
    assert loaded["w"].data_ptr() % 4 == 0
    assert [is_mapped(loaded[name], path) for name in "bw"] == [True, False]
    same(loaded, load_file(path))


@needs_maps
def test_numbers_of_the_other_byte_order_are_computed(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "a.npy"
    np.save(path, np.arange(4, dtype=">f4"))
    loaded = ckptkit.load(path, whole=True)
    assert np.array_equal(loaded, np.arange(4, dtype="f4"))


def test_a_file_that_is_replaced_keeps_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"w": torch.ones(100_000)}, path)
    loaded = ckptkit.load(path)
    loaded["w"][0] = 5
    ckptkit.save(loaded, path, force=True)
    again = ckptkit.load(path)
    assert again["w"].sum() == loaded["w"].sum() == 100_004


def test_a_file_that_was_cut_before_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"w": torch.ones(100_000)}, path)
    ck = ckptkit.open(path)
    os.truncate(path, 200_000)
    with pytest.raises(InputChangedError):
        ckptkit.load(ck)


def test_what_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(LocalFile, "map", lambda file: None)
    same(ckptkit.load(saved(tmp_path)), state())


@needs_maps
def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """A sparse file: torch.load(mmap=True) cannot map as much (Cannot allocate memory)."""
    size = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path = tmp_path / "a.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    start = 8 + len(header)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, start + size)
    with path.open("r+b") as file:
        file.seek(start + size - 1)
        file.write(b"\x07")
    assert ckptkit.load(path)["w"][-3:].tolist() == [0, 0, 7]


def test_a_function_as_map_location_gets_mapped_storages(tmp_path: Path) -> None:
    seen: list[str] = []

    def place(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        seen.append(tag)
        return storage

    same(ckptkit.load(saved(tmp_path), place), state())
    assert seen == ["cpu", "cpu"]
