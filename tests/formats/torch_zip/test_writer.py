"""torch.save's zip archives as they are written: read by torch, by zipfile, and by our own
reader."""

from __future__ import annotations

import struct
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from ckptkit.compute.operation import Slice
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError, UnsupportedError
from ckptkit.core.plan import Checksummed
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from tests.formats.conformance import check_equal
from tests.formats.containers.zips import Member, execute
from tests.formats.torch_zip.archives import (
    archive,
    by_torch,
    laid_out,
    pickle_of,
    read,
    saved,
    storage,
    tensor,
    untyped,
    write,
)


def test_sources_without_checksums_are_summed(tmp_path: Path) -> None:
    """Ranges of another format, or computed bytes (whatever their storage says): one pass, and
    headers that wait."""
    data = Memory(bytes(range(64)))
    record = Derived(Slice(4), (Range(data, 0, 64),), 16)
    root = {
        "a": leaf(Storage(Range(data, 4, 16))),
        "b": leaf(Storage(record, crc32=1)),
        "c": leaf(Storage(Range(data, 9, 0)), 0),
    }
    plan = laid_out(Checkpoint(root))
    assert sum(isinstance(each, Checksummed) for each in plan.files[0].segments) == 2
    copy = execute(plan.files[0].segments, tmp_path / "copy.pth")
    with zipfile.ZipFile(copy) as made:
        assert made.testzip() is None
    assert torch.load(copy, mmap=True)["a"].view(torch.uint8).tolist() == list(range(4, 20))
    check_equal(root, torch.load(copy))


def leaf(storage: Storage, numel: int = 4, dtype: str = "float32") -> Tensor:
    return Tensor(storage, BY_NAME[dtype], (numel,), contiguous_stride((numel,)))


def test_storages_that_cannot_be_saved() -> None:
    """Of two types, of broken elements, and a part of one."""
    shared, odd = (Storage(Range(Memory(bytes(size)), 0, size)) for size in (16, 17))
    with pytest.raises(TensorError, match="float32 and as int32"):
        laid_out(Checkpoint({"a": leaf(shared), "b": leaf(shared, dtype="int32")}))
    with pytest.raises(TensorError, match="whole number"):
        laid_out(Checkpoint({"a": leaf(odd)}))
    typed = partial(TypedStorage, shared, BY_NAME["float32"])
    assert laid_out(Checkpoint([typed(0, 4)])).size
    with pytest.raises(UnsupportedError, match="view of a storage"):
        laid_out(Checkpoint([typed(), typed(1, 3)]))


def test_metadata_that_torch_has_no_place_for_are_kept_beside(tmp_path: Path) -> None:
    checkpoint = Checkpoint({}, extras={"format": "pt", "licence": "MIT", "author": "me"})
    assert laid_out(checkpoint).notes == ()
    write(checkpoint, tmp_path / "x.pth")
    assert torch.load(tmp_path / "x.pth", weights_only=True) == {}
    again = read(tmp_path / "x.pth")
    assert again.extras == {"licence": "MIT", "author": "me"} and again.warnings == ()


def test_ZP_16_more_storages_than_16_bits_count(tmp_path: Path) -> None:
    data = Memory(struct.pack("<70000f", *range(70_000)))
    root = {str(n): leaf(Storage(Range(data, 4 * n, 4), crc32=0), 1) for n in range(70_000)}
    state = torch.load(write(Checkpoint(root), tmp_path / "a.pth"), weights_only=True, mmap=True)
    assert len(state) == 70_000 and state["69999"].item() == 69_999
    assert len(read(tmp_path / "a.pth").root) == 70_000


def test_ZP_24_what_is_written_beyond_4_GiB(tmp_path: Path) -> None:
    with open(tmp_path / "zeros", "wb") as file:
        file.truncate(5 << 30)
    zeros = Storage(Range(LocalFile(tmp_path / "zeros"), 0, 5 << 30), crc32=0)
    ones = Storage(Range(Memory(struct.pack("<4f", *[1.0] * 4)), 0, 16))
    both = Checkpoint({"a": leaf(zeros, 5 << 30, "uint8"), "b": leaf(ones)})
    path = write(both, tmp_path / "a.pth")
    state = torch.load(path, mmap=True)
    assert state["b"].tolist() == [1, 1, 1, 1] and state["a"][-1].item() == 0
    assert read(path).root["b"].storage.record.locate().offset > 5 << 30


# Big-endian files


def big_endian(dtype: str, values: list[float]) -> tuple[bytes, bytes]:
    made = BY_NAME[dtype]
    plain = torch.tensor(values, dtype=getattr(torch, dtype)).view(torch.uint8)
    raw = plain.reshape(-1, made.component).flip(1)
    pickle = pickle_of(tensor(storage(f"torch\n{made.storage}", numel=len(values)), (len(values),)))
    return pickle, raw.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "complex64", "uint8", "bfloat16"])
def test_D_27_big_endian(dtype: str, tmp_path: Path) -> None:
    assert sys.byteorder == "little"
    pickle, data = big_endian(dtype, [1, 2, 3])
    made = archive(pickle, Member("a/byteorder", b"big"), records={"data/0": data})
    checkpoint = read(made)
    assert checkpoint.root["a"].storage.big_endian
    want = torch.tensor([1, 2, 3], dtype=getattr(torch, dtype))
    assert torch.equal(by_torch(made, tmp_path)["a"], want)
    copy = write(checkpoint, tmp_path / "copy.pth")
    assert torch.equal(torch.load(copy)["a"], want)
    with zipfile.ZipFile(copy) as names:
        assert names.read("archive/byteorder") == (b"little" if dtype == "uint8" else b"big")
        assert names.read("archive/data/0") == data and names.testzip() is None


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex128", "bool"])
def test_one_output_has_one_byte_order(dtype: str, tmp_path: Path) -> None:
    pickle, data = big_endian(dtype, [1, 0, 1])
    made = read(archive(pickle, Member("a/byteorder", b"big"), records={"data/0": data}))
    other = read(saved(torch.arange(4.0), tmp_path / "a.pth"))
    both = Checkpoint({"big": made.root["a"], "little": other.root})
    state = torch.load(write(both, tmp_path / "copy.pth"), mmap=True)
    assert torch.equal(state["big"], torch.tensor([1, 0, 1], dtype=getattr(torch, dtype)))
    assert torch.equal(state["little"], torch.arange(4.0))


def test_untyped_bytes_of_two_orders_are_refused(tmp_path: Path) -> None:
    other = read(saved(torch.arange(4.0), tmp_path / "a.pth"))
    bytewise = tensor(storage("torch\nByteStorage", numel=16), (16,))
    for values in ((untyped(),), (bytewise, untyped())):
        made = read(archive(pickle_of(*values), Member("a/byteorder", b"big")))
        with pytest.raises(UnsupportedError, match="big-endian"):
            laid_out(Checkpoint([made.root, other.root]))


def test_empty_storages_have_no_byte_order(tmp_path: Path) -> None:
    other = read(saved(torch.arange(4.0), tmp_path / "a.pth"))
    nothing = leaf(Storage(Range(Memory(b""), 0, 0), big_endian=True), 0, "uint16")
    state = torch.load(write(Checkpoint([nothing, other.root]), tmp_path / "copy.pth"))
    assert state[0].shape == (0,) and torch.equal(state[1], torch.arange(4.0))
