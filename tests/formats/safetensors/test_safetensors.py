"""safetensors: the library and torch are the oracle, for what is read and for what is written."""

from __future__ import annotations

import argparse
import json
import math
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptkit
from ckptkit.api import open_checkpoint
from ckptkit.core import tree
from ckptkit.core.bytesource import LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    InputError,
    LimitError,
    TensorError,
    TruncatedError,
    UnsafeGlobalError,
    UsageError,
)
from ckptkit.core.limits import Limits
from ckptkit.core.options import Options
from ckptkit.core.plan import Plan
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import on_command_line
from ckptkit.formats import safetensors as ours
from ckptkit.formats import strict_json
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_ZIP
from tests.formats.catalogue import Row, refuses_all
from tests.formats.conformance import storage_bytes
from tests.formats.containers.zips import execute
from tests.formats.safetensors.files import Pairs, entry, file_of, json_of
from tests.torch_equality import bits

State = dict[str, torch.Tensor]


def read(data: bytes | Path) -> Checkpoint:
    source = LocalFile(data) if isinstance(data, Path) else Memory(data, "x.safetensors")
    return ours.read(Probe(source))


def saved(state: object, folder: Path) -> Checkpoint:
    """Return what ckptkit reads of what torch saves."""
    torch.save(state, folder / "saved.pth")
    return TORCH_ZIP.read(Probe(LocalFile(folder / "saved.pth")))


def written(checkpoint: Checkpoint, path: Path, **options: Any) -> Plan:
    plan = ours.layout(checkpoint, Options(**options))
    execute(plan.files[0].segments, path)
    assert path.stat().st_size == plan.size
    return plan


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def record_of(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(header_of(path)["__metadata__"]["ckptkit"])
    return record


# Reading


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (file_of({}), True),
        (file_of({"a": entry(0, 1)}, b"x"), True),
        (file_of(" \n\t{}"), True),
        (file_of({})[:9], True),
        (bytes(8) + b"{", True),
        (b"", False),
        (file_of({})[:8], False),
        (file_of("[]"), False),
        (b"version {https://git-lfs.github.com/spec/v1}", False),
        (b'let x = {"a": 1}', False),
        (b"PK\x03\x04" + bytes(4) + b"{}", True),
        (b"PK\x03\x04\x14\x00\x08\x08{}", False),
        (b"\x80\x02}q\x00.\x00\x00{}", False),
    ],
)
def test_matches(data: bytes, expected: bool) -> None:
    assert ours.matches(Probe(Memory(data, "x.bin"))) is expected


def test_matches_an_impossible_length_by_name() -> None:
    data = (2**63).to_bytes(8, "little") + b"{}"
    assert ours.matches(Probe(Memory(data, "x.safetensors")))
    assert not ours.matches(Probe(Memory(data, "x.bin")))


# Reading: hostile and damaged files


def one(**fields: object) -> dict[str, Any]:
    """A header of one tensor of one byte, with other fields."""
    return {"a": {**entry(0, 1), **fields}}


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error, and what it says."""
    for size in (0, 7, 8, 9, 12):
        yield "ST_01", file_of(one(), b"x")[:size], TruncatedError, ""
    for length in (100_000_001, 2**63, 2**64 - 1):
        data = length.to_bytes(8, "little") + b"{}"
        yield "ST_01", data, LimitError, "safetensors_header_bytes"
    yield "ST_01", (3).to_bytes(8, "little") + b"{}", TruncatedError, ""
    right = json.dumps(entry(0, 1))
    for text in (
        '{"a":%s,"a":%s}',
        '{"a":%s,"\\u0061":%s}',
        '{"__metadata__":{"x":"1","x":"2"},"a":%s}',
        '{"__metadata__":{},"__metadata__":{},"a":%s}',
        '{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}',
    ):
        yield "ST_03", file_of(text.replace("%s", right), b"x"), AmbiguousError, ""
    for place, number in product(
        ("shape", "data_offsets"),
        ("2.0", "4e0", "-0", "1e400", "true", '"2"', "NaN", "null", "02", "-1", "[1]"),
    ):
        text = right.replace(f'"{place}": [', f'"{place}": [{number}, ', 1)
        yield "ST_04", file_of('{"a":' + text + "}", b"x"), FormatError, ""
    dialects = ("{}{}", "{}\0", "[]", "null", '"a"', "{'a':1}", "{} // no", '{"a":1,}', "\ufeff{}")
    for text in dialects:
        yield "ST_04", file_of(text), FormatError, ""
    yield "ST_04", (4).to_bytes(8, "little") + "{}".encode("utf-16-le"), FormatError, ""
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"a":' + "[" * 200 + "]" * 200 + "}"):
        yield "ST_05", file_of(text), InputError, ""
    huge = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,' + "9" * 5000 + "]}}"
    yield "ST_06", file_of(huge, b"x"), FormatError, ""
    for dtype in ("f32", "F128", "", "U7", None, 1, ["F32"], {"F32": 1}):
        yield "ST_07", file_of(one(dtype=dtype), b"x"), FormatError, "tensor 'a'.*dtype"
    for missing in ("dtype", "shape", "data_offsets"):
        fields = {key: value for key, value in entry(0, 1).items() if key != missing}
        yield "ST_07", file_of({"a": fields}, b"x"), FormatError, "lacks"
    yield "ST_07", file_of(one(strides=[1]), b"x"), AmbiguousError, "strides"
    for bad in (None, [], "F32", 3, {}):
        yield "ST_07", file_of({"a": bad}), FormatError, ""
    for bad in ([], "pt", 0, False, "", {"a": 1}, {"a": None}, {"a": {}}, {"format": ["pt"]}):
        yield "ST_07", file_of({"__metadata__": bad}), FormatError, "__metadata__"
    for header in (
        {**one(), "__metadata__": entry(0, 1)},
        {**one(), "__metadata__": {"b": entry(0, 1)}},
        one(inside=entry(0, 1)),
        entry(0, 1),
    ):
        yield "an entry where there is none", file_of(header, b"x"), CkptkitError, ""
    for spans in (
        [(1, 4)], [(0, 1), (2, 4)], [(0, 3), (2, 4)], [(0, 4), (0, 4)], [(0, 4), (1, 3)],
        [(0, 4), (2, 2)], [(0, 4), (5, 5)], [(0, 2), (0, 2), (2, 4)],
    ):  # fmt: skip
        tiles = {str(number): entry(*span) for number, span in enumerate(spans)}
        yield "ST_08", file_of(tiles, b"abcd"), FormatError, "begins at"
    for bad in ([1, 0], [0], [], [0, 1, 2], [0, -1], [-1, 0], 1, None, {"0": 1}):
        yield "ST_08", file_of(one(data_offsets=bad), b"x"), FormatError, "data_offsets"
    # A shape that was checked before stands for itself alone.
    no_list = "tensor 'b': shape is not a list"
    for bad in ([True], [1.0], ["1"], [[1]], "1", "[1]", 1, None, {"1": 1}):
        both = {"a": entry(0, 4, "F32", [1]), "b": {**entry(4, 8, "F32", [1]), "shape": bad}}
        yield "ST_09", file_of(both, bytes(8)), FormatError, no_list
    for bad in ({}, "", None):
        both = {"a": entry(0, 1, "U8", []), "b": {**entry(1, 2), "shape": bad}}
        yield "ST_09", file_of(both, b"xy"), FormatError, no_list
    both = {"a": entry(0, 4, "F32", [1]), "b": entry(4, 7, "F32", [1])}
    said = r"tensor 'b': shape \(1,\) of float32 does not fill 3"
    yield "ST_09", file_of(both, bytes(7)), FormatError, said
    for shape in ([2**63, 2, 0], [0, 2**63], [2**64, 0]):
        yield "ST_09", file_of({"a": entry(0, 0, "F32", shape)}), TensorError, "64 bits"
    for shape, nbytes in (
        ([2], 4), ([2**62, 4], 0), ([3, 3], 35), ([], 0), ([], 8), ([1, 1, 1], 5), ([2**64] * 64, 4),
    ):  # fmt: skip
        data = file_of({"a": entry(0, nbytes, "F32", shape)}, bytes(nbytes))
        yield "ST_09", data, FormatError, "does not fill"
    for shape, nbytes in (([3], 1), ([3], 2), ([], 0), ([], 1)):
        yield "ST_10", file_of({"a": entry(0, nbytes, "F4", shape)}, bytes(nbytes)), FormatError, ""
    yield "ST_10", file_of({"a": entry(0, 1, "F6_E2M3", [1])}, b"x"), FormatError, ""
    for header, data in ((one(), b"xy"), ({}, b"x"), (one(), b"xPK\x05\x06" + bytes(18))):
        yield "ST_11_ST_12", file_of(header, data), CorruptError, "follow the last tensor"
    cut = file_of({"a": entry(0, 1), "b": entry(1, 3)}, b"xy")
    yield "ST_11", cut, TruncatedError, "1 bytes are missing"
    yield "ST_12", b"PK\x03\x04" + file_of({}), CkptkitError, ""
    no_text = '{"\\ud800":' + json.dumps(entry(0, 1)) + "}"
    yield "ST_13", file_of(no_text, b"x"), FormatError, ""
    yield "ST_13", file_of({"n" * (1 << 20): entry(0, 1)}, b"x"), LimitError, "name_bytes"
    for rank, size in ((65, 1), (100_000, 2**63)):
        said = f"tensor 'a': dimensions of a tensor: {rank:,} .*rank"
        yield "ST_09", file_of(one(shape=[size] * rank), b"x"), LimitError, said


def test_ST_01_ST_03_ST_04_ST_05_ST_06_ST_07_ST_08_ST_09_ST_10_ST_11_ST_12_ST_13() -> None:
    refuses_all(read, refused())


def test_ST_02_header_of_spaces() -> None:
    assert read(file_of("{}", pad=" " * 9_000_000)).root == {}


def test_a_tensor_takes_less_than_a_kibibyte() -> None:
    count = 5000
    tensors = {f"layers.{n}.mlp.experts.{n}.weight": entry(n, n + 1) for n in range(count)}
    data = file_of(tensors, bytes(count))
    del tensors
    tracemalloc.start()
    checkpoint = read(data)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(checkpoint.weights) == count
    assert held < 600 * count
    assert peak < 1024 * count


def test_names_that_look_like_odd_numbers() -> None:
    names = ["block-0", ",-0", "1" * 30]
    tensors = {name: entry(n, n + 1, "U8", [1]) for n, name in enumerate(names)}
    assert list(read(file_of(tensors, bytes(3))).weights) == names


@pytest.mark.parametrize("shape", [[0, 2**63 - 1], [2**63 - 1, 2, 0], [0] * 64])
def test_ST_09_huge_sizes_beside_a_zero(shape: list[int]) -> None:
    assert read(file_of({"a": entry(0, 0, "F32", shape)})).weights["a"].shape == tuple(shape)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "expected"),
    [
        ("F4", [8], 4, (4,)),
        ("F4", [3, 2], 3, (3, 1)),
        ("F4", [0], 0, (0,)),
        ("F6_E2M3", [4], 3, (4,)),
        ("F6_E3M2", [2, 4], 6, (2, 4)),
    ],
)
def test_ST_10_small_elements(
    dtype: str, shape: list[int], nbytes: int, expected: tuple[int, ...]
) -> None:
    found = read(file_of({"a": entry(0, nbytes, dtype, shape)}, bytes(range(nbytes)))).weights["a"]
    assert (found.shape, storage_bytes(found)) == (expected, bytes(range(nbytes)))


@pytest.mark.parametrize(("shape", "nbytes"), [([2, 3], 3), ([8, 1], 4), ([0, 3], 0)])
def test_elements_of_four_bits_with_an_odd_last_dimension(
    tmp_path: Path, shape: list[int], nbytes: int
) -> None:
    """The library reads these, torch cannot have them: they are kept, and not written to a .pth."""
    data = bytes(range(nbytes)) + b"x"
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        file_of({"t": entry(0, nbytes, "F4", shape), "u": entry(nbytes, nbytes + 1)}, data)
    )
    assert dict(safetensors.deserialize(path.read_bytes()))["t"]["shape"] == shape
    found = open_checkpoint(path)
    assert (found.weights["t"].shape, found.weights["t"].nbytes) == (tuple(shape), nbytes)
    ckptkit.save(found, tmp_path / "b.safetensors")
    again = dict(safetensors.deserialize((tmp_path / "b.safetensors").read_bytes()))
    assert (again["t"]["shape"], bytes(again["t"]["data"])) == (shape, data[:nbytes])
    with pytest.raises(TensorError, match="float4_e2m1fn"):
        ckptkit.save(found, tmp_path / "b.pth")


def test_types_that_torch_does_not_have_are_not_written_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of({"t": entry(0, 3, "F6_E2M3", [4]), "u": entry(3, 4)}, b"abcd"))
    found = open_checkpoint(path)
    for suffix in (".pth", ".bin"):
        with pytest.raises(TensorError, match="float6_e2m3"):
            ckptkit.save(found, tmp_path / f"b{suffix}")
    with pytest.raises(TensorError, match="float6_e2m3"):
        ckptkit.save(found, tmp_path / "dcp", format="dcp")


@pytest.mark.parametrize(
    "name", ["", "\0", "\x1b[2J", "../../etc/passwd", "\u202eabc", "n" * 60_000, "a.b\n[OK]"]
)
def test_ST_13_names_are_data(name: str) -> None:
    assert list(read(file_of({name: entry(0, 1)}, b"x")).weights) == [name]


def test_ST_14_metadata_are_inert() -> None:
    texts = {
        "chat_template": "{{ x.__class__ }}",
        "url": "file:///etc/passwd",
        "pickle": "gASVIQAAAAAAAACMBXBvc2l4lIw=",
    }
    assert read(file_of({"__metadata__": texts})).extras == texts


def test_ST_15_payloads_survive(tmp_path: Path) -> None:
    payload = bytes([2, 3, 255]) + bytes.fromhex("0100807fffffffff010080ff000000800000c07f")
    header = {"f": entry(0, 20, "F32", [5]), "odd": entry(20, 23, "BOOL")}
    checkpoint = read(file_of(header, payload[3:] + payload[:3]))
    written(checkpoint, tmp_path / "y.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes().endswith(payload[3:] + payload[:3])


@pytest.mark.parametrize("pad", ["", " ", "  \n", " " * 7])
def test_ST_16_any_alignment(tmp_path: Path, pad: str) -> None:
    data = file_of({"a": entry(0, 8, "F32", [2])}, b"abcdefgh", pad=pad)
    (tmp_path / "x.safetensors").write_bytes(data)
    loaded = load_file(tmp_path / "x.safetensors")["a"]
    assert storage_bytes(read(data).weights["a"]) == bits(loaded) == b"abcdefgh"


@pytest.mark.parametrize("metadata", ["{}", '{"__metadata__":null}', '{"__metadata__":{}}'])
def test_control_14_nothing_in_it(metadata: str) -> None:
    checkpoint = read(file_of(metadata))
    assert (checkpoint.root, checkpoint.extras) == ({}, {})


def test_control_14_white_space_is_noted() -> None:
    checkpoint = read(file_of(" \n\t" + json.dumps({"a": entry(0, 1)}) + " \n", b"x"))
    assert list(checkpoint.weights) == ["a"] and "white space" in checkpoint.warnings[0]


ODD: dict[str, list[object]] = {
    "dtype": ["U8", "F4", "F6_E2M3", "u8", "", None, 8, ["U8"], {"U8": 1}],
    "shape": [
        *([1], [], [0], [2], [True], [1.0], [-1], [-1, -1], ["1"], [[1]], "1", "", {}, {"1": 1}),
        *(None, [2**63, 0], [1] * 65, [10**21]),
    ],
    "data_offsets": [
        *([0, 1], [1, 0], [1, 2], [-1, 0], [0], [], [0, 1, 2], [True, 1], ["0", "1"], "01", {}),
        *(None, {"0": 0, "1": 1}, [0, 10**21]),
    ],
    "strides": [[1], [], None],
    "__metadata__": [{}, None, {"a": "1"}, {"a": 1}, [], "a"],
}
ODD_FIELD = st.sampled_from([(name, value) for name, values in ODD.items() for value in values])
NAMES = st.sampled_from(["a", "b", "c", "", "\u00e9", '"', "\\", 'a":{},"b', "},", "__metadata__"])


@st.composite
def headers(draw: st.DrawFn) -> str:
    """The text of a header with a wrong field or two, or none."""
    entries = Pairs()
    for place, name in enumerate(draw(st.lists(NAMES, max_size=5, unique=draw(st.booleans())))):
        fields = Pairs(entry(place, place + 1).items())
        for field in draw(st.lists(ODD_FIELD, max_size=draw(st.sampled_from([0, 0, 0, 1])))):
            at = [name for name, _ in fields].index(field[0]) if field[0] in entry(0, 1) else 0
            fields[at : at + draw(st.integers(0, 1))] = [field]
        entries.append((name, fields))
    for _ in range(draw(st.integers(0, 2))):
        texts = Pairs((name, "},") for name in draw(st.lists(NAMES, max_size=2)))
        entries.insert(draw(st.integers(0, len(entries))), ("__metadata__", texts))
    return json_of(entries, draw(st.sampled_from(["", " ", "\n"])))


def outcome(read: Callable[[bytes], Any], text: str) -> object:
    """What is read of a header; None if it is refused."""
    try:
        names, kinds, begins, ends, metadata = read(text.encode())
    except (CkptkitError, LookupError, TypeError):
        return None
    found = [(kind.like.dtype, kind.like.shape, kind.nbytes) for kind in kinds]
    return [*names], found, begins, ends, metadata


@settings(max_examples=200)
@given(headers(), st.sampled_from([0, 100, 1 << 18]))
def test_columns_are_taken_only_where_each_entry_is_right(text: str, size: int) -> None:
    one_by_one = outcome(ours._read_entries, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_PART", size)
        columns = outcome(ours._read_columns, text)
    if columns is None:
        assert one_by_one is None or size < len(text)  # a cut inside of a name
    else:
        assert columns == one_by_one


def test_a_name_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_PART", 0)
    for name in ("a", "__metadata__"):
        right: dict[str, Any] = entry(0, 1) if name == "a" else {}
        pairs = Pairs([(name, right), ("b", entry(0, 1)), (name, right)])
        with pytest.raises(AmbiguousError, match=f"{name}' occurs twice"):
            read(file_of(json_of(pairs), b"x"))


# Writing


def test_the_buffer_is_aligned(tmp_path: Path) -> None:
    for length in range(1, 10):
        written(saved({"n" * length: torch.ones(2)}, tmp_path), tmp_path / "x.safetensors")
        assert int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little") % 8 == 0
    # a plain dict needs no record
    assert header_of(tmp_path / "x.safetensors")["__metadata__"] == {"format": "pt"}


# Writing: what has no place


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, dtype=torch.complex32), "complex32"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
    ],
)
def test_tensors_that_safetensors_does_not_know(
    tmp_path: Path, tensor: torch.Tensor, why: str
) -> None:
    odd = {f"odd.{i}": tensor for i in range(5)}
    checkpoint = saved({"fine": torch.ones(1), **odd}, tmp_path)
    with pytest.raises(TensorError, match=rf"'odd\.2' \({why}\) and 2 more") as caught:
        ours.layout(checkpoint, Options())
    way_out = {"complex128": "cast to complex64", "qint8": "dequantize"}.get(why, "select(drop=")
    assert way_out in str(caught.value.hint)
    with on_command_line(), pytest.raises(TensorError) as caught:
        ours.layout(checkpoint, Options())
    option = {"complex128": "--cast complex64", "qint8": "--dequantize"}.get(why, "--drop")
    assert option in str(caught.value.hint)


def byte(dtype: str = "uint8", shape: tuple[int, ...] = (1,)) -> Tensor:
    storage = Storage(Range(Memory(b"x"), 0, 1))
    return Tensor(storage, BY_NAME[dtype], shape, contiguous_stride(shape))


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        *((name, byte(), "name") for name in ("__metadata__", "\ud800", "n" * (1 << 17))),
        ("a", byte("float4_e2m1fn_x2", ()), "without dimensions"),
    ],
)
def test_entries_that_a_header_cannot_have(name: str, tensor: Tensor, why: str) -> None:
    with pytest.raises(TensorError, match=why):
        ours.layout(Checkpoint({name: tensor}), Options())


def test_a_header_that_no_reader_accepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = saved({"n" * 60_000 + str(i): torch.ones(1) for i in range(3)}, tmp_path)
    limits = Limits(safetensors_header_bytes=150_000)
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", limits)
    with pytest.raises(LimitError, match="safetensors_header_bytes"):
        ours.layout(checkpoint, Options())


def test_objects_are_an_error_on_request(tmp_path: Path) -> None:
    torch.save(
        {"model": {"a": torch.ones(1)}, "args": argparse.Namespace(lr=1)}, tmp_path / "x.pth"
    )
    with closing(open_checkpoint(tmp_path / "x.pth")) as checkpoint:
        assert ours.layout(checkpoint, Options()).notes == ("dropped: args (argparse.Namespace)",)
        with pytest.raises(UnsafeGlobalError, match=r"args is an object \(argparse.Namespace\)"):
            ours.layout(checkpoint, Options(objects="error"))


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ours.layout(saved({"epoch": 3}, tmp_path), Options())


def test_arrays_are_written(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    storage = Storage(Range(Memory(array.tobytes()), 0, 24), big_endian=True)
    big = Tensor(storage, BY_NAME["int32"], (2, 3), (3, 1), kind="ndarray")
    written(Checkpoint({"a": big}), tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == array.tolist()


# Ties, and the way back


def test_ties_are_stored_once_and_come_back(tmp_path: Path) -> None:
    shared, views = torch.ones(2, 3), torch.arange(4.0)
    state = OrderedDict(head=shared, body=torch.zeros(1), embed=shared, part=views[:2])
    state |= {"same_part": views[:2], "rest": views[2:]}
    plan = written(saved(state, tmp_path), tmp_path / "x.safetensors")
    metadata = header_of(tmp_path / "x.safetensors")["__metadata__"]
    assert (metadata["head"], metadata["same_part"]) == ("embed", "part")
    assert set(load_file(tmp_path / "x.safetensors")) == {"body", "embed", "part", "rest"}
    assert record_of(tmp_path / "x.safetensors")["ties"] == {"head": 0, "same_part": 4}
    assert plan.notes == ()
    again = read(tmp_path / "x.safetensors")
    assert isinstance(again.root, tree.OrderedMapping) and again.root.state is None
    assert list(again.weights) == list(state)
    assert again.weights["head"].storage is again.weights["embed"].storage
    assert again.weights["head"] is not again.weights["embed"]
    assert again.extras == {"format": "pt"} and again.warnings == ()


def test_other_overlaps_are_written_for_each(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = {"whole": base, "row": base[0], "flat": base.reshape(-1), "transposed": base.t()}
    state["own"] = torch.ones(2)
    plan = written(saved(state, tmp_path), tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in state.items()
    }
    assert plan.notes == (
        "tensors that share memory with other tensors: 3; each is written in full",
    )


def test_empty_tensors_are_not_ties(tmp_path: Path) -> None:
    empty = torch.empty(0, 2)
    written(saved({"a": empty, "b": empty}, tmp_path), tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == {"a", "b"}


@pytest.mark.parametrize("name", ["format", "ckptkit", "author"])
def test_names_that_the_metadata_have_already_are_not_ties(tmp_path: Path, name: str) -> None:
    state = dict.fromkeys(("a", name), byte())
    written(Checkpoint(state, extras={"author": "me"}), tmp_path / "x.safetensors")
    again = read(tmp_path / "x.safetensors")
    assert again.extras == {"format": "pt", "author": "me"} and set(again.weights) == {"a", name}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["quantized_layer", "best.epoch", ".weight", "weight."])
def test_a_text_that_equals_a_name_is_no_tie(name: str) -> None:
    """The library reads one tensor, and so does ckptkit; a tie would be a tensor that is in no
    file."""
    texts = {name: "fc.weight", "format": "pt"}
    data = file_of({"__metadata__": texts, "fc.weight": entry(0, 1)}, b"x")
    checkpoint = read(data)
    assert list(checkpoint.weights) == [name for name, _ in safetensors.deserialize(data)]
    assert checkpoint.extras == texts
    assert repr(name) in checkpoint.warnings[0]


def test_attributes_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    state = Tied().state_dict()
    state._metadata["odd"] = {"version": {1, 2}}  # type: ignore[attr-defined]
    state.colour = "red"  # type: ignore[attr-defined]
    plan = written(saved(state, tmp_path), tmp_path / "x.safetensors")
    names = ("_metadata", "colour")
    assert plan.notes == tuple(f"dropped: {name} of the state_dict" for name in names)
    assert read(tmp_path / "x.safetensors").root.state is None


def test_parameters_come_back(tmp_path: Path) -> None:
    one = torch.nn.Parameter(torch.ones(2))
    some = {"one": one, "two": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    all_kinds = {"leaf": torch.ones(2, requires_grad=True), "plain": torch.ones(1), **some}
    for state in (all_kinds, some, {"one": one}):
        written(saved(state, tmp_path), tmp_path / "x.safetensors")
        again = read(tmp_path / "x.safetensors").weights
        for name, each in state.items():
            is_parameter = isinstance(each, torch.nn.Parameter)
            assert (again[name].kind == "parameter") == is_parameter
            assert again[name].requires_grad == each.requires_grad
    record = {"version": 1, "parameters": True, "requires_grad": True}
    assert record_of(tmp_path / "x.safetensors") == record


# What stands beside the weights


def test_values_are_kept_and_the_rest_is_named(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    values = {"epoch": 3, "name": "résumé\n", "done": False, "nothing": None, "tiny": 5e-324}
    args = {"lr": 0.1, "betas": (0.9, 0.999), "by_step": {30: "drop"}, "$odd": 1}
    root = {**values, "best": math.inf, "args": args, "tags": {"a"}, "\ud800": 3}
    root |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    plan = written(saved(root, tmp_path), tmp_path / "x.safetensors")
    moments = [each for state in optimizer.state.values() for each in state.values()]
    size = sum(each.nbytes for each in moments)
    assert plan.notes == (
        "dropped: tags (set)",
        "dropped: \ud800 (int)",
        f"dropped: optimizer ({len(moments)} tensors, {size:,} bytes)",
    )
    pairs = [["lr", 0.1], ["betas", {"$tuple": [0.9, 0.999]}]]
    pairs += [["by_step", {"$dict": [[30, "drop"]]}], ["$odd", 1]]
    kept = {**values, "best": {"$float": "inf"}, "args": {"$dict": pairs}}
    assert record_of(tmp_path / "x.safetensors")["values"] == kept


@pytest.mark.parametrize(
    "value",
    [10**19, b"bytes", 1j, "\ud800", OrderedDict(a=1), {"k": [torch.ones(1)]}, ["x" * 300_000]],
)
def test_values_that_are_not_plain_are_named(tmp_path: Path, value: object) -> None:
    plan = written(
        saved({"odd": value, "model": {"a": torch.ones(1)}}, tmp_path), tmp_path / "x.safetensors"
    )
    assert len(plan.notes) == 1 and plan.notes[0].startswith("dropped: odd (")
    assert "ckptkit" not in header_of(tmp_path / "x.safetensors")["__metadata__"]


def test_extra_states_are_counted(tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "l._extra_state": None, "m._extra_state": {"x": 1}}
    plan = written(saved(state, tmp_path), tmp_path / "x.safetensors")
    assert plan.notes == ("dropped: 2 entries called _extra_state in the weights",)


def test_a_pickled_module_is_written_as_its_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    plan = written(saved(model, tmp_path), tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == {"weight", "bias"}
    assert plan.notes == (
        "dropped: the module itself (torch.nn.modules.linear.Linear); written as its state_dict",
    )
    assert "ckptkit" not in header_of(tmp_path / "x.safetensors")["__metadata__"]


# Records that ckptkit did not write


NO_KINDS = (("tuple", []), ("call", ["os.system"]), ("dict", [[[], 1]]), ("float", "1"))


def with_record(record: object, **metadata: str) -> Checkpoint:
    text = record if isinstance(record, str) else json.dumps(record)
    texts = {"ckptkit": text, **metadata}
    return read(file_of({"__metadata__": texts, "a": entry(0, 1), "b": entry(1, 2)}, b"xy"))


@pytest.mark.parametrize(
    "record",
    [
        *("", "hello", "[]", "[" * 100_000, '{"version":1,"version":1}', {}),
        {"version": 2, "ordered": True},
        *({"version": 1, "ties": {"c": place}} for place in (-1, 3, True, [0])),
        *({"version": 1, "ties": ties} for ties in (["c"], {"a": 0}, {"d": 0}, {"c": 0, "e": 0})),
        *(
            {"version": 1, "state_dict_metadata": said}
            for said in ([1], *({f"${key}": value} for key, value in NO_KINDS))
        ),
        *({"version": 1, "parameters": names} for names in ("a", [["a"]])),
        {"version": 1, "requires_grad": {"a": 1}},
        {"version": 1, "values": [1]},
    ],
)
def test_a_record_that_is_not_understood_is_left_alone(record: object) -> None:
    checkpoint = with_record(record, c="a", e="b", **{"l.a": "a"})
    assert isinstance(checkpoint.root, dict) and not isinstance(
        checkpoint.root, tree.OrderedMapping
    )
    assert "cannot be read" in checkpoint.warnings[0] and "ckptkit" in checkpoint.extras
    assert set(checkpoint.weights) == {"a", "b", "l.a"}  # the hub's convention still holds


def test_a_record_is_the_authority_on_ties() -> None:
    checkpoint = with_record({"version": 1, "ties": {"c": 1}}, c="a", author="b")
    assert list(checkpoint.weights) == ["a", "c", "b"]
    assert checkpoint.extras == {"author": "b"} and checkpoint.warnings == ()


def test_records_are_not_inherited(tmp_path: Path) -> None:
    """A record that was not understood is not copied as if it described the new file."""
    written(with_record({"version": 9}), tmp_path / "x.safetensors")
    assert header_of(tmp_path / "x.safetensors")["__metadata__"] == {"format": "pt"}
