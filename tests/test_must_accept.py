"""Honest files that look odd, which a strict reader must accept."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.serialization import skip_data

import ckptkit
from ckptkit.api import convert
from ckptkit.core.errors import AmbiguousError, CollisionError
from ckptkit.core.options import Options
from tests.conftest import Corpus
from tests.formats.conformance import elements_of
from tests.formats.containers import tars
from tests.formats.containers.zips import Member, build
from tests.formats.dcp import making as dcp
from tests.formats.torch_zip.archives import FLOATS, pickle_of, storage, tensor
from tests.pickles import making
from tests.random_checkpoints import NUMBERS
from tests.torch_equality import bits, same


def accepted(path: Path, *, weights_only: bool = True) -> Any:
    """Torch reads the copy as it reads the file; what it reads."""
    want = torch.load(path, map_location="cpu", weights_only=weights_only)
    out = path.with_name("copy.pth")
    convert(path, out, keep_format=False, force=True)
    same(want, torch.load(out, map_location="cpu", weights_only=weights_only))
    return want


def saved(value: Any, path: Path, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def ordered() -> OrderedDict[str, torch.Tensor]:
    made = OrderedDict(a=torch.ones(1))
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(10.0)
    return {"a": base, "b": base[2:5]}


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(3.5), "empty": lambda: torch.empty(0, 3),
    "odd-strides-of-nothing": lambda: torch.empty(4, 0, 3).transpose(0, 2),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda: torch.ones(1, 2).expand(3, 2), "slice": lambda: torch.arange(10.0)[3:7:2],
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
}  # fmt: skip
NAMES = ("a.b.c", "ключ", "x" * 10_000, "", " ", "new\nline", "\U0001f600", "a/b", "../a")
RAW = torch.arange(48, dtype=torch.uint8)
VALUES: dict[str, Callable[[], Any]] = {
    "protocol": lambda: {"a": torch.ones(3), "b": [b"bytes", {1, 2}, 1 << 80]},
    **{kind: lambda make=make: dict.fromkeys("ab", make()) for kind, make in SHAPES.items()},  # type: ignore[misc]
    "values": lambda: {"size": torch.Size([2]), "state_dict": {
        "a": ordered(), "b": Counter("aab"), "c": 1 - 2j, "d": bytearray(b"\0\xff"), "e": b"\0\xff", "f": {1}}},
    **{name: lambda name=name: {"a": (RAW % 2 if name == "bool" else RAW).view(getattr(torch, name))}
       for name in NUMBERS},  # type: ignore[misc]
    "views of one storage": views,
    "names": lambda: dict.fromkeys(NAMES, torch.ones(1)),
}  # fmt: skip
LEGACY = {"_use_new_zipfile_serialization": False}
OLD = ("protocol", *SHAPES, "views of one storage")  # and keys that look like addresses
SAVES: dict[str, dict[str, Any]] = {
    **{name: {} for name in VALUES if name not in ("protocol", "views of one storage")},
    **{f"{name}, legacy": LEGACY for name in OLD},
    **{f"protocol, {n}": {"pickle_protocol": n} for n in (2, 3, 4, 5)},
    **{f"protocol, legacy, {n}": {"pickle_protocol": n, **LEGACY} for n in (3, 4, 5)},
}


@pytest.mark.parametrize("name", SAVES)
def test_Z_05_Z_08_Z_09_Z_10_Z_11_Z_12_Z_18_what_torch_saves(name: str, tmp_path: Path) -> None:
    path = saved(VALUES[name.partition(",")[0]](), tmp_path / "a.pth", **SAVES[name])
    accepted(path, weights_only=not name.startswith("protocol"))


def test_Z_01_torchs_own_layout(tmp_path: Path) -> None:
    """Local headers without sizes, descriptors, padding in extra fields, a zip64 end record."""
    data = saved({"a": torch.ones(3)}, tmp_path / "run.pth").read_bytes()
    assert all(each in data for each in (b"PK\7\x08", b"FB", b"PK\6\6"))
    accepted(tmp_path / "run.pth")


def test_Z_02_without_checksums(tmp_path: Path) -> None:
    (tmp_path / "run.pth").write_bytes(making.saved({"a": torch.ones(3)}, crc=False))
    accepted(tmp_path / "run.pth")


def test_Z_03_packed_again(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(300.0)}, tmp_path / "run.pth")
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(tmp_path / "again.pth", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            if not info.filename.endswith(".format_version"):
                new.writestr(info.filename, old.read(info))
    accepted(tmp_path / "again.pth")


@pytest.mark.parametrize("name", ["lstm.save", "ünï", "with spaces", "_", "a" * 200])
def test_Z_04_any_top_folder(name: str, tmp_path: Path) -> None:
    accepted(saved({"a": torch.ones(3)}, tmp_path / f"{name}.pth"))


@pytest.mark.parametrize("records", [{"byteorder": b"big"}, {}])
def test_Z_06_Z_07_byte_orders(records: dict[str, bytes], tmp_path: Path) -> None:
    """Big, or the record is missing, as torch 1.6 to 2.0 had it."""
    data = struct.pack(">4f", 0, 1, 2, 3) if records else FLOATS
    files = {"data.pkl": pickle_of(tensor(storage())), "data/0": data, "version": b"3\n", **records}
    path = tmp_path / "run.pth"
    path.write_bytes(build(*(Member(f"a/{name}", each) for name, each in files.items())))
    assert accepted(path)["a"].tolist() == [0, 1, 2, 3]


def test_Z_12_Z_13_real_ones(corpus: Corpus) -> None:
    """Of Python 2 and of torch 0.1."""
    for name in ("allennlp__2017-08_srl_best_gpu.th", "PerceptualSimilarity__v0.1_alex.pth"):
        assert ckptkit.open(corpus / name).weights


def test_Z_13_tar(tmp_path: Path) -> None:
    path = tars.save(OrderedDict(a=torch.arange(4.0), b=torch.arange(4.0)[1:]), tmp_path / "a.pth")
    assert {name: tensor.shape for name, tensor in ckptkit.open(path).weights.items()} == {
        "a": (4,),
        "b": (3,),
    }


EMPTY = {"dtype": "F32", "shape": [0, 2], "data_offsets": [4, 4]}


@pytest.mark.parametrize("text", [
    "{}", ' {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   ',
    json.dumps({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "b": EMPTY}),
    '{"__metadata__":{},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    '{"__metadata__":null,"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
], ids=["nothing", "space-before", "space-after", "empty-tensor", "no-metadata", "null-metadata"])  # fmt: skip
def test_Z_14_safetensors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(4 if "a" in text else 0))
    with safe_open(path, "pt") as file:
        want = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert {name: tensor.shape for name, tensor in ckptkit.open(path).weights.items()} == want


def test_Z_15_the_hubs_cache(tmp_path: Path) -> None:
    """No option is needed for its links, which lead to its own blobs."""
    blob = tmp_path / "models--a--b/blobs/0123"
    blob.parent.mkdir(parents=True)
    saved({"a": torch.ones(2)}, blob)
    place = tmp_path / "models--a--b/snapshots/main"
    place.mkdir(parents=True)
    (place / "pytorch_model.bin").symlink_to("../../blobs/0123")
    assert (
        list(ckptkit.open(place).weights)
        == list(ckptkit.open(place / "pytorch_model.bin").weights)
        == ["a"]
    )


def test_Z_16_dcp(tmp_path: Path) -> None:
    folder = dcp.save(tmp_path / "made", {"model": {"a": torch.arange(6.0)}, "epoch": 3})
    assert elements_of(ckptkit.open(folder).weights["a"]) == bits(torch.arange(6.0))


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors"])
def test_Z_17_bits_that_are_no_numbers(name: str, tmp_path: Path) -> None:
    words = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF]
    raw = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).view(
        torch.float32
    )
    path = saved({"a": raw}, tmp_path / "a.pth")
    convert(path, tmp_path / name)
    assert elements_of(ckptkit.open(tmp_path / name).weights["a"]) == bits(raw)


def test_Z_19_more_than_four_gigabytes(tmp_path: Path) -> None:
    with skip_data():
        path = saved(
            {"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.ones(3)}, tmp_path / "a.pth"
        )
    weights = ckptkit.open(path).weights
    assert (weights["a"].nbytes, weights["b"].nbytes) == (5 << 30, 12)


def test_Z_20_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    path = saved({f"layers.{n}.w": base for n in range(100_000)}, tmp_path / "a.pth")
    weights = ckptkit.open(path).weights
    assert len(weights) == 100_000 and len({id(each.storage) for each in weights.values()}) == 1


# What is flattened


def test_TM_09_ties_survive_a_format_without_them(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    state = {"a": base, "tied": base, "view": base[2:4]}
    path = saved(state, tmp_path / "a.pth")
    convert(path, tmp_path / "b.safetensors")
    done = convert(tmp_path / "b.safetensors", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert {name: each.tolist() for name, each in back.items()} == {
        name: each.tolist() for name, each in state.items()
    }
    assert back["a"].data_ptr() == back["tied"].data_ptr() and not done.plan.notes
    accepted(path)


@pytest.mark.parametrize("tree", [
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, {1: torch.ones(1), "1": torch.zeros(1)},
    {"": torch.ones(1), "x": {"": {"": torch.zeros(1)}}, "x.": {"": torch.zeros(1)}},
    {"a": [torch.ones(1)], "a.0": torch.zeros(1)},
], ids=["dots", "numbers", "nothing", "places"])  # fmt: skip
def test_TM_10_two_paths_that_are_one_text(tree: Any, tmp_path: Path) -> None:
    """Formats with a tree keep both; formats with one name for each refuse."""
    path = saved(tree, tmp_path / "a.pth")
    accepted(path)
    try:
        convert(path, tmp_path / "b.safetensors", options=Options(all=True))
    except (AmbiguousError, CollisionError):
        assert not (tmp_path / "b.safetensors").exists()
    else:
        convert(tmp_path / "b.safetensors", tmp_path / "back.pth")
        same(
            torch.load(path, weights_only=True),
            torch.load(tmp_path / "back.pth", weights_only=True),
            storages=False,
        )
