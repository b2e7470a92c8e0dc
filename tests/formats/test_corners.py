"""Rare cases: branches for files and values that few people have."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import formats
from ckptkit.api import convert, open_checkpoint
from ckptkit.containers import tar
from ckptkit.containers.zip_reader import read_directory
from ckptkit.core.bytesource import Derived, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    FormatError,
    LimitError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Tensor
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.torch_zip import extra_records
from ckptkit.formats.torchscript.code import _text
from ckptkit.pickles.writer import write_pickle
from ckptkit.scan import find as hidden
from ckptkit.scan.trace import trace
from tests.containers import tars
from tests.containers.zips import Member, build
from tests.formats.torch_zip.archives import archive, pickle_of, storage, tensor, text
from tests.pickles.making import machine

F32 = BY_NAME["float32"]


def read(data: bytes) -> Checkpoint:
    return formats.read(Memory(data, "made"))


def emit(root: Any) -> bytes:
    made = write_pickle(root, lambda typed: ()).data
    assert isinstance(made, bytes)
    return made


# Values


def test_a_value_of_no_kind_is_not_written() -> None:
    with pytest.raises(FormatError, match="has no place"):
        emit({"a": object()})


def test_values_too_deep_to_be_written() -> None:
    root: list[Any] = []
    for _ in range(LIMITS.depth + 10):
        root = [root]
    with pytest.raises(LimitError, match="depth"):
        emit(root)


def test_a_tensor_of_another_layout_that_nobody_made() -> None:
    with pytest.raises(UnsupportedError, match="does not say what it is made of"):
        emit(Tensor(None, F32, (2,), (), layout="sparse_csr"))


def test_a_tensor_without_memory_is_written_as_torch_does(tmp_path: Path) -> None:
    checkpoint = Checkpoint({"a": Tensor(None, F32, (2, 3), (3, 1))}, "made", Memory(b""))
    convert(checkpoint, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["a"].is_meta
    assert not Tensor(None, F32, (2,), (), layout="nested").is_contiguous


@pytest.mark.parametrize("kind", ["bytes", "bytearray"])
def test_long_bytes_made_by_a_call(kind: str) -> None:
    """They stay in the file, whichever of the two they become."""
    data = b"B" + struct.pack("<I", 1 << 17) + bytes(1 << 17)
    made = machine(b"\x80\x03cbuiltins\n" + kind.encode() + b"\n" + data + b"\x85R.")
    assert made.kind == kind and made.extent.length == 1 << 17


@pytest.mark.parametrize("line", [b"g-1\n", b"p-1\n"])
def test_entries_of_the_memo_below_zero(line: bytes) -> None:
    with pytest.raises(FormatError, match="index"):
        machine(b"N" + line + b".")


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"V\\u12\n.", "malformed escape"), (b"S'\\x1'\n.", "malformed escape")],
)
def test_text_that_stops_the_tracer(data: bytes, why: str) -> None:
    assert why in str(trace(Memory(data), 0, len(data)).error)


def test_bytes_spelt_as_text() -> None:
    assert (
        machine(b"\x80\x02c__builtin__\nbytearray\n" + text("\xff\0") + text("latin-1") + b"\x86R.")
        == b"\xff\0"
    )


# Containers


def test_an_archive_of_nothing() -> None:
    """Its end record alone has no member to begin with: it is no zip file to torch, and none to
    us."""
    with pytest.raises(FormatError):
        read_directory(Memory(build()))


def test_a_tar_file_of_records_alone() -> None:
    data = b"".join(tars.records((b"mtime", b"1")) for _ in range(4)) + bytes(1024)
    assert tar.first_name(Memory(data)) == b""
    with pytest.raises(UnsupportedError, match="tar archive"):
        read(data)


@pytest.mark.parametrize(
    "said", [b"[]", b'{"version":1,"metadata":{"a":1}}', b'{"version":99,"metadata":{}}', b"{"]
)
def test_a_record_of_ours_that_is_none(said: bytes) -> None:
    with pytest.raises(FormatError):
        extra_records.read(said)


def test_a_package_of_code() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.package"):
        read(build(Member("a/.data/extern_modules", b""), Member("a/model.py", b"")))


def test_names_in_code_that_are_not_spelt() -> None:
    with pytest.raises(FormatError, match="spells a name"):
        _text("'a")


def test_a_storage_without_a_device() -> None:
    odd = storage().replace(text("cpu"), b"K\1")
    with pytest.raises(FormatError, match="no device"):
        read(archive(pickle_of(tensor(odd))))


def test_a_device_with_a_name_without_end() -> None:
    with pytest.raises(LimitError, match="name_bytes"):
        read(archive(pickle_of(tensor(storage(location="c" * 70_000)))))


def test_folders_in_an_archive_hold_no_pickles() -> None:
    made = build(
        Member("a/data.pkl", pickle_of(b"N")), Member("a/data/", b""), Member("a/version", b"3\n")
    )
    assert [each.where for each in hidden.pickles(Memory(made, "made.pth"))] == ["a/data.pkl"]  # type: ignore[union-attr]


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_text_of_numpy_that_is_none(order: str) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array("ab", dtype=f"{order}U2"))
    data = buffer.getvalue()[:-4] + b"\xff\xff\xff\xff"
    with pytest.raises(FormatError, match="UTF-32"):
        read(data)


def test_a_compressed_array_of_objects(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.array([None, "x"], dtype=object), b=np.ones(2))
    root = open_checkpoint(tmp_path / "a.npz").root
    assert list(root) == ["a", "b"]


# Plans and formats


def test_a_plan_says_what_it_is_made_of() -> None:
    source = Memory(bytes(100))
    derived = Derived("byteswap", (Range(source, 0, 8),), (4,), 8)
    plan = Plan((OutputFile("", (b"abc", Range(source, 0, 50), derived)),))
    assert str(plan) == "output: 61 bytes: 50 copied, 8 computed, 3 written in 3 segments"


def test_formats_that_are_none() -> None:
    with pytest.raises(UsageError, match="not a format"):
        formats.for_writing("a.pth", "odd")
    with pytest.raises(UsageError, match="cannot be written"):
        formats.for_writing("a.pth", "torch-tar")
    with pytest.raises(UsageError, match="suffix does not say"):
        formats.for_writing("a.odd")
    with pytest.raises(UsageError, match="cannot hold a whole checkpoint"):
        npz = formats.by_name("npz")
        assert npz is not None
        formats.layout(read(archive(pickle_of(b"N"))), npz, WriteOptions(everything=True))
    assert formats.for_writing("a.odd", keep="torch-legacy").name == "torch-zip"


def test_the_page_of_a_file_is_not_the_file() -> None:
    page = Memory(b"<!doctype html><html>", "https://huggingface.co/a/b/blob/main/model.bin")
    with pytest.raises(CkptkitError) as caught:
        formats.identify(Probe(page))
    assert "resolve/main" in str(caught.value.hint)


# safetensors with more beside the tensors


def whole(**change: Any) -> bytes:
    """A file that says it holds a whole tree, with something in what it says replaced."""
    said = {"version": 1, "root": [0], "tree": [["dict"]], "ties": [], "values": {}} | change
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "ckptkit": json.dumps(said)}}
    entries["a"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


@pytest.mark.parametrize(
    "change", [{"ties": [1]}, {"tree": [["dict"], ["fill", 0, "odd", 1, 2]]}], ids=["ties", "step"]
)
def test_a_tree_that_is_none(change: dict[str, Any]) -> None:
    checkpoint = read(whole(**change))
    assert list(checkpoint.root) == ["a"] and any(
        "is not understood" in each for each in checkpoint.warnings
    )


def test_names_of_ours_that_are_taken(tmp_path: Path) -> None:
    """A tensor that is called as ckptkit calls storages keeps its name."""
    base = torch.arange(6.0)
    torch.save({"a": base[1:3], "b": base[2:5], "ckptkit.storage.1": torch.ones(1), "ckptkit.storage.0": base},
               tmp_path / "a.pth")  # fmt: skip
    convert(tmp_path / "a.pth", tmp_path / "b.safetensors", options=WriteOptions(everything=True))
    convert(tmp_path / "b.safetensors", tmp_path / "c.pth")
    back = torch.load(tmp_path / "c.pth", weights_only=True)
    assert back["a"].tolist() == [1, 2] and back["ckptkit.storage.1"].tolist() == [1]


def test_a_repeated_key_is_in_no_output(tmp_path: Path) -> None:
    made = archive(b"\x80\x02}(" + text("a") + b"K\1" + text("a") + b"K\2u.", records={})
    for name in ("pth", "safetensors"):
        with pytest.raises(AmbiguousError):
            convert(read(made), tmp_path / f"out.{name}", options=WriteOptions(everything=True))


def test_storages_are_of_this_file_or_written_anew(tmp_path: Path) -> None:
    """An edit in place that brings in another file's tensors is no edit."""
    for name in ("a", "b"):
        torch.save({"w": torch.ones(3)}, tmp_path / f"{name}.pth")
    other = open_checkpoint(tmp_path / "b.pth")

    def swapped(checkpoint: Checkpoint) -> Checkpoint:
        return Checkpoint(
            {"w": other.root["w"], "x": None},
            checkpoint.format,
            checkpoint.source,
            origin=checkpoint.origin,
        )

    convert(tmp_path / "a.pth", None, swapped, in_place=True)
    assert list(torch.load(tmp_path / "a.pth", weights_only=True)) == ["w", "x"]
