"""Archives of numpy: numpy writes and reads them, we read and write them."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.api import Conversion
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.options import Options
from ckptkit.core.tree import Object
from tests.formats.containers.zips import Member, build

savers = pytest.mark.parametrize("save", [np.savez, np.savez_compressed])


def write(path: Path, out: Path, **options: Any) -> Conversion:
    return ckptkit.save(ckptkit.open(path), out, options=Options(**options), verify=True)


def start_of(member: zipfile.ZipInfo, data: bytes) -> int:
    """The offset of the bytes of a member."""
    at = member.header_offset
    lengths: tuple[int, int] = struct.unpack_from("<2H", data, at + 26)
    return at + 30 + sum(lengths)


def saved(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "x.pth")
    return folder / "x.pth"


def test_what_we_write_is_a_plain_zip_file(tmp_path: Path) -> None:
    state = {"a": torch.arange(100.0), "b": torch.zeros(0), "c": torch.tensor(3)}
    write(saved(tmp_path, state), tmp_path / "y.npz")
    with zipfile.ZipFile(tmp_path / "y.npz") as file:
        assert file.testzip() is None
        assert file.namelist() == ["a.npy", "b.npy", "c.npy"]
        assert {member.compress_type for member in file.infolist()} == {zipfile.ZIP_STORED}
        data = (tmp_path / "y.npz").read_bytes()
        assert all(start_of(member, data) % 64 == 0 for member in file.infolist())


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    moments = {"m": torch.ones(10)}
    path = saved(tmp_path, {"model": state, "epoch": 3, "note": "x", "optimizer": moments})
    checkpoint = replace(ckptkit.open(path), extras={"author": "me"})
    lost = "epoch, note, author (metadata), _metadata of the state_dict, which npz cannot store"
    assert ckptkit.save(checkpoint, tmp_path / "y.npz").plan.notes == (
        f"dropped: {lost}",
        "dropped: optimizer (1 tensor, 40 bytes)",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_floats_that_numpy_has_not(tmp_path: Path, dtype: str) -> None:
    path = saved(tmp_path, {"a": torch.ones(3), "layer.w": torch.ones(3).to(getattr(torch, dtype))})
    with pytest.raises(TensorError, match=rf"npz cannot store 'layer\.w' \({dtype}\)") as caught:
        write(path, tmp_path / "y.npz")
    assert "--cast float32" in str(caught.value.hint)
    ckptkit.save(ckptkit.cast(ckptkit.open(path), {"*": "float32"}), tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as got:
        assert got["layer.w"].dtype == np.float32 and got["layer.w"].tolist() == [1, 1, 1]


def test_what_else_numpy_has_not(tmp_path: Path) -> None:
    state = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "half": torch.ones(2, dtype=torch.complex32),
        "more": torch.ones(2, dtype=torch.bfloat16),
    }
    with pytest.raises(TensorError) as caught:
        write(saved(tmp_path, state), tmp_path / "y.npz")
    said = "'sparse' (sparse_coo), 'meta' (meta), 'half' (complex32) and 1 more"
    assert said in str(caught.value)
    assert "--drop" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name", ["../a", "/a", "a/../b", "a\\b", "a\0b", "a\nb", "\ud800", "é" * 40_000]
)
def test_NP_10_names_that_no_archive_can_have(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, {"a": torch.ones(1)})
    checkpoint = ckptkit.open(path)
    renamed = checkpoint.with_root({name: checkpoint.root["a"]})
    with pytest.raises(TensorError, match="cannot have this name"):
        ckptkit.save(renamed, tmp_path / "y.npz")


@savers
def test_objects(tmp_path: Path, save: Any) -> None:
    """Shown with their globals; never made, never written."""
    config = np.array({"a": {1, 2}}, dtype=object)
    save(tmp_path / "x.npz", w=np.ones(2), config=config, name=np.array("net"))
    checkpoint = ckptkit.open(tmp_path / "x.npz")
    assert isinstance(checkpoint.root["config"], Object) and checkpoint.root["name"] == "net"
    assert list(checkpoint.weights) == ["w"]
    assert "numpy.ndarray" in map(str, checkpoint.globals)
    assert checkpoint.warnings[0] == "array 'config' is a pickle of Python objects"
    notes = write(tmp_path / "x.npz", tmp_path / "y.npz").plan.notes
    assert notes[0] == "dropped: name, which npz cannot store" and "config" in notes[1]
    with np.load(tmp_path / "y.npz") as got:
        assert list(got) == ["w"]
    with pytest.raises(UnsafeGlobalError):
        write(tmp_path / "x.npz", tmp_path / "no.npz", objects="error")


@savers
def test_NP_05_arrays_are_refused_by_name(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.npz", w=np.ones(2), table=np.zeros(3, dtype=[("a", "<f4")]))
    said = "array 'table': contains structured elements"
    with pytest.raises(UnsupportedError, match=said) as caught:
        ckptkit.open(tmp_path / "x.npz")
    assert caught.value.where == str(tmp_path / "x.npz")


@pytest.mark.parametrize("names", [("a/data.pkl", "a/W.npy", "a/w.npy"), ("a.npy", "a.npy")])
def test_NP_11_the_same_name_twice(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Names of arrays differ by case, those of other files do not."""
    (tmp_path / "x").write_bytes(build(*(Member(name, b"") for name in names)))
    with pytest.raises(AmbiguousError, match="same name"):
        ckptkit.open(tmp_path / "x")


def test_NP_12_a_member_that_is_no_array(tmp_path: Path) -> None:
    for content in (b"", b"3\n", b"\x93NUMPY", b"PK\3\4"):
        (tmp_path / "x.npz").write_bytes(build(Member("a.npy", content)))
        with pytest.raises(FormatError, match="array 'a'"):
            ckptkit.open(tmp_path / "x.npz")


def test_NP_13_compressed_bytes_that_lie(tmp_path: Path) -> None:
    """A size that is not that of what inflates is found out where the elements are read."""
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1 << 16))
    data = (tmp_path / "x.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        (member,) = file.infolist()
    start = start_of(member, data)
    for at in (start, start + member.compress_size // 2, start + member.compress_size - 1):
        changed = bytearray(data)
        changed[at] ^= 0x55
        (tmp_path / "y.npz").write_bytes(changed)
        with pytest.raises(CkptkitError):
            ckptkit.save(ckptkit.open(tmp_path / "y.npz"), tmp_path / "out.npz")
        assert not (tmp_path / "out.npz").exists()


def test_NP_14_compression_beyond_what_is_possible(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(10))
    data = (tmp_path / "x.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.npz") as file:
        (member,) = file.infolist()
    for code in ("<L", "<Q"):
        data = data.replace(struct.pack(code, member.file_size), struct.pack(code, 1 << 30))
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises((LimitError, CorruptError, AmbiguousError)):
        ckptkit.open(tmp_path / "x.npz")


def test_a_long_header_in_a_compressed_member(tmp_path: Path) -> None:
    """Noise in a header compresses badly: all of it must be looked at all the same."""
    rng = np.random.default_rng(0)
    noise = "".join(chr(c) for c in rng.integers(33, 127, 40_000) if chr(c) not in "'\"\\[]")
    text = f"{{'descr': [('{noise}', '<f4')], 'fortran_order': False, 'shape': (1,), }}".encode()
    array = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + bytes(4)
    (tmp_path / "x.npz").write_bytes(build(Member("a.npy", array, deflated=True)))
    with pytest.raises(UnsupportedError, match="structured"):
        ckptkit.open(tmp_path / "x.npz")


def test_checksums_are_taken_over(tmp_path: Path) -> None:
    """From the archive to a .pth, and back: damage stays visible, and nothing is read for it."""
    np.savez(tmp_path / "x.npz", a=np.arange(1000.0))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    at = data.index(np.arange(1000.0).tobytes()) + 4000
    data[at] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    ckptkit.save(ckptkit.open(tmp_path / "x.npz"), tmp_path / "x.pth")
    ckptkit.save(ckptkit.open(tmp_path / "x.pth"), tmp_path / "y.npz")
    for name, member in (("x.pth", "archive/data/0"), ("y.npz", "a.npy")):
        with (
            zipfile.ZipFile(tmp_path / name) as file,
            pytest.raises(zipfile.BadZipFile, match="CRC"),
        ):
            file.read(member)
