"""Legacy streams against torch, and streams written by hand: old, odd and hostile ones."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import TABLE
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TensorError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.tree import Global, Object, OrderedMapping
from ckptkit.formats import torch_legacy
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_LEGACY as FORMAT
from ckptkit.formats.torch_legacy import MAGIC_NUMBER
from ckptkit.pickles.writer import write_pickle
from tests.formats.catalogue import Row, read_as, refuses_all
from tests.formats.conformance import storage_bytes
from tests.pickles.making import Written, saved
from tests.pickles.test_writer import MULTIPLE, TENSORS, agree


def read(path: Path) -> Checkpoint:
    return read_as(FORMAT, path)


def read_bytes(data: bytes, folder: Path) -> Checkpoint:
    """The checkpoint in these bytes, which are the file `legacy.pt`, too."""
    (folder / "legacy.pt").write_bytes(data)
    return read(folder / "legacy.pt")


WIDE = ("uint16", "uint32", "uint64")
UNTYPED = [
    row.name
    for row in TABLE
    if not row.storage and row.bits >= 8 and hasattr(torch, row.name)
    if not row.name.startswith(("int", "uint")) or row.name in WIDE
]
TYPED = [case for case in (*TENSORS, *MULTIPLE) if case not in UNTYPED and "float8" not in case]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("case", TYPED)
def test_what_torch_saved_is_what_torch_loads(case: str, protocol: int, tmp_path: Path) -> None:
    value, options = {**TENSORS, **MULTIPLE}[case](), {"pickle_protocol": protocol}
    data = saved(value, _use_new_zipfile_serialization=False, **options)
    checkpoint = read_bytes(data, tmp_path)
    expected = torch.load(tmp_path / "legacy.pt", weights_only=False)
    assert checkpoint.warnings == ()
    assert agree(Written(checkpoint.root, tmp_path / "written.pt").load(), expected)


# By hand


SYSTEM = {
    "protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4},
}  # fmt: skip
MAGIC = pickle.dumps(MAGIC_NUMBER, 2)


def pid(
    key: bytes = b"7", numel: int = 4, view: bytes = b"N", kind: bytes = b"Float", location: bytes = b"cpu",
) -> bytes:  # fmt: skip
    head = b"(Vstorage\nctorch\n%bStorage\nV%b\nV%b\n" % (kind, key, location)
    return head + b"L%dL\n%btQ" % (numel, view)


def tensor(storage: bytes, offset: int = 0, size: int = 4, stride: int = 1) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(%bI%d\n(I%d\nt(I%d\ntI00\nccollections\nOrderedDict\n)RtR" % (
        storage, offset, size, stride,
    )  # fmt: skip


DATA = struct.pack("<4f", 0, 1, 2, 3)


def legacy(
    tree: bytes, keys: Any = ("7",), storages: list[tuple[int, bytes]] | None = None, system: Any = SYSTEM,
    version: Any = 1001, magic: bytes = MAGIC, tail: bytes = b"",
) -> bytes:  # fmt: skip
    parts = [magic, pickle.dumps(version, 2), pickle.dumps(system, 2), b"\x80\x02" + tree + b"."]
    parts.append(keys if isinstance(keys, bytes) else pickle.dumps(list(keys), 2))
    held = [(4, DATA)] if storages is None else storages
    parts += [struct.pack("<q", numel) + data for numel, data in held]
    return b"".join(parts) + tail


GOOD = legacy(tensor(pid()))


def test_the_streams_of_these_tests_are_good(tmp_path: Path) -> None:
    root = read_bytes(GOOD, tmp_path).root
    assert storage_bytes(root) == DATA
    assert torch.load(tmp_path / "legacy.pt", weights_only=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", range(6))
def test_the_magic_number_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    read_bytes(legacy(tensor(pid()), magic=pickle.dumps(MAGIC_NUMBER, protocol)), tmp_path)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 4), (2, 2)])
def test_views_of_storages(start: int, stop: int, tmp_path: Path) -> None:
    """Of torch 0.1 to 0.3: the offset of the tensor counts from where the view begins."""
    view = b"(V99\nI%d\nI%d\nt" % (start, stop - start)
    data = legacy(b"(" + tensor(pid(view=view), 0, stop - start) + tensor(pid()) + b"t")
    root = read_bytes(data, tmp_path).root
    expected = torch.load(tmp_path / "legacy.pt", weights_only=False)
    assert expected[0].tolist() == [float(i) for i in range(start, stop)]
    assert (root[0].offset, root[0].shape) == (start, (stop - start,))
    assert root[0].storage is root[1].storage
    loaded = Written(root, tmp_path / "new.pt").load()
    assert [each.tolist() for each in loaded] == [each.tolist() for each in expected]


def test_python_2(tmp_path: Path) -> None:
    """Strings are byte strings, sizes are longs, an OrderedDict has a list of pairs."""
    words = (b"storage", b"7", b"cpu", b"a.b", b"\xe9", b"x")
    text = {each: b"U%c" % len(each) + each for each in words}
    head = b"(" + text[b"storage"] + b"ctorch\nFloatStorage\n"
    storage = head + text[b"7"] + text[b"cpu"] + b"\x8a\x01\x04NtQ"
    geometry = b"K\x00\x8a\x01\x04\x85\x8a\x01\x01\x85\x89ccollections\nOrderedDict\n]\x85RtR"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + geometry
    pairs = b"](" + text[b"a.b"] + made + b"e](" + text[b"x"] + text[b"\xe9"] + b"e"
    tree = b"ccollections\nOrderedDict\n](" + pairs + b"e\x85R"
    keys = b"\x80\x02](" + text[b"7"] + b"e."
    data = legacy(tree, keys, magic=b"\x80\x02" + MAGIC[2:])
    root = read_bytes(data, tmp_path).root
    assert isinstance(root, OrderedMapping)
    assert list(root) == ["a.b", "x"]
    assert (root["a.b"].shape, str(root["x"])) == ((4,), "é")
    expected = torch.load(tmp_path / "legacy.pt", weights_only=False, encoding="latin1")
    assert expected["a.b"].tolist() == [0, 1, 2, 3]
    loaded = Written(root, tmp_path / "new.pt").load(weights_only=False, encoding="latin1")
    assert (loaded["a.b"].tolist(), loaded["x"]) == ([0, 1, 2, 3], expected["x"])


@pytest.mark.parametrize(
    "text", [b"Vclass A: pass\n", b"U\x03\xe9 a", b"T" + struct.pack("<i", 70_000) + b"#" * 70_000, b"N"],
    ids=["text", "python2", "long", "none"],
)  # fmt: skip
def test_module_source_ids(text: bytes, tmp_path: Path) -> None:
    module = b"(Vmodule\ncmine\nNet\nV/home/net.py\n" + text + b"tQ"
    tree = module + b")\x81}Vweight\n" + tensor(pid()) + b"sb"
    checkpoint = read_bytes(legacy(tree), tmp_path)
    assert isinstance(checkpoint.root, Object)
    assert checkpoint.root.callable == Global("mine", "Net")
    source = checkpoint.extras["module_source:mine.Net"]
    assert {b"V": "class A: pass", b"U": "é a", b"T": "#" * 70_000, b"N": ""}[text[:1]] == source


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    for source in (b"N" + b"NNtQ", b"cm\nf\nNN" + b"\x85" * 50_000 + b"tQ", b"cm\nf\nN]tQ"):
        yield "a source", legacy(b"(Vmodule\n" + source), FormatError, ""
    lists: list[tuple[Any, type[CkptkitError]]] = [
        ([], CorruptError), (["7", "7"], AmbiguousError), (["7", "8"], CorruptError), (["8"], CorruptError),
        (pickle.dumps({"7": 1}, 2), FormatError), (pickle.dumps(("7",), 2), FormatError),
        (pickle.dumps([7], 2), FormatError), (pickle.dumps("7", 2), FormatError),
        (pickle.dumps([["7"]], 2), FormatError), (b"\x80\x02]Vx\na", FormatError),
    ]  # fmt: skip
    for keys, error in lists:
        yield "LG_03_D_36_D_37_D_38_D_42", legacy(tensor(pid()), keys), error, ""
    for numel in (-1, 0, 3, 5, 2**62, -(2**63)):
        data = legacy(tensor(pid()), storages=[(numel, DATA)])
        yield "LG_04_D_39", data, CorruptError, ""
    yield "LG_05", GOOD[:-1], TruncatedError, "ends inside storage '7': 1 bytes are missing"
    for numel in (2**40, 2**63, 10**300):
        data = legacy(tensor(pid(numel=numel)), storages=[(min(numel, 2**62), DATA)])
        yield "LG_06", data, TruncatedError, ""
    for view in (b"I2\nI4\nt", b"I-1\nI2\nt", b"I0\nI-1\nt", b"I5\nI0\nt", b"L%dL\nI1\nt" % 2**70):
        yield "LG_07_D_41", legacy(tensor(pid(view=b"(V99\n" + view), 0, 1)), TensorError, ""
    data = legacy(tensor(pid(view=b"(V99\nI1\nI2\nt"), 0, 3))
    yield "LG_07", data, TensorError, "view"
    none = (b"K\x01", b"(V99\nI1\nt", b"(I9\nI0\nI1\nt", b"(V99\nI0\nI1\nI1\nt", b"(V99\nNNt", b"]")
    for view in none:
        yield "LG_07", legacy(tensor(pid(view=view))), (FormatError, TensorError), ""
    nine = [tensor(pid(view=b"(V9\nI%d\nI1\nt" % at), 0, 1) for at in (0, 1)]
    for tree in (
        tensor(pid(view=b"(V7\nI1\nI2\nt"), 0, 1),  # its own root: torch gives the whole
        b"(" + b"".join(nine) + b"t",
        b"(" + tensor(pid(view=b"(V8\nI0\nI4\nt")) + tensor(pid(key=b"8")) + b"t",
    ):
        yield "LG_07", legacy(tree), AmbiguousError, ""
    for other in (
        pid(numel=2), pid(kind=b"Int"), pid(kind=b"Double", numel=2), pid(location=b"cuda:0"),
        pid(kind=b"Int", numel=2),
    ):  # fmt: skip
        tree = b"(" + tensor(pid()) + tensor(other, 0, 1) + b"t"
        yield "D_05_D_06", legacy(tree), AmbiguousError, ""
    for version in (1002, 0, -1, "1001", None, 1001.0, True, [1001]):
        yield "LG_09", legacy(tensor(pid()), version=version), UnsupportedError, "1001"
    for system in (None, 5, [], "x"):
        yield "LG_09", legacy(tensor(pid()), system=system), FormatError, "third pickle"
    for sizes in ((-1,), (0, -1), (0, 2, -1), (1, 4), (0, 5)):
        yield "D_08", legacy(tensor(pid(), *sizes)), TensorError, ""


def test_LG_03_LG_04_LG_05_LG_06_LG_07_LG_09_D_05_D_06_D_08_D_36_D_37_D_38_D_39_D_41_D_42() -> None:
    refuses_all(lambda data: FORMAT.read(Probe(Memory(data, "legacy.pt"))), refused())


def test_LG_01_a_magic_number_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for made in (
        b"\x80\x02c__builtin__\neval\nV" + str(MAGIC_NUMBER).encode() + b"\n\x85R.",
        pickle.dumps(MAGIC_NUMBER + 1, 2),
    ):
        path.write_bytes(GOOD.replace(MAGIC, made))
        assert not FORMAT.matches(Probe(LocalFile(path)))


PAYLOAD = b"\x80\x02cos\nsystem\n(Vtouch canary\ntR."


@pytest.mark.parametrize("slot", range(5))
def test_LG_02_each_pickle_may_be_hostile(
    slot: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [MAGIC, pickle.dumps(1001, 2), pickle.dumps(SYSTEM, 2)]
    parts += [b"\x80\x02" + tensor(pid()) + b".", pickle.dumps(["7"], 2)]
    parts[slot] = PAYLOAD
    path = tmp_path / "x.pt"
    path.write_bytes(b"".join(parts) + struct.pack("<q", 4) + DATA)
    probe = Probe(LocalFile(path))
    assert FORMAT.matches(probe) == (slot != 0)
    if slot:
        with pytest.raises((FormatError, UnsupportedError, UnsafeGlobalError, CorruptError)):
            write_pickle(FORMAT.read(probe).root, lambda typed: ())
    assert not (tmp_path / "canary").exists()


def test_LG_02_names_in_all_pickles_are_listed(tmp_path: Path) -> None:
    tree = b"\x80\x02}V\x78\ncos\nsystem\ns."
    data = legacy(tensor(pid())).replace(pickle.dumps(SYSTEM, 2), tree)
    assert Global("os", "system") in read_bytes(data, tmp_path).globals


def test_LG_08_D_40_bytes_after_the_end(tmp_path: Path) -> None:
    checkpoint = read_bytes(GOOD + b"\0" * 80, tmp_path)
    assert any("80 bytes after" in warning for warning in checkpoint.warnings)


def test_D_43_a_big_endian_machine_wrote_little_endian_data(tmp_path: Path) -> None:
    data = legacy(tensor(pid()), system={**SYSTEM, "little_endian": False})
    checkpoint = read_bytes(data, tmp_path)
    assert storage_bytes(checkpoint.root) == DATA
    assert torch.load(tmp_path / "legacy.pt", weights_only=False).tolist() == [0, 1, 2, 3]
    assert any("big-endian" in warning for warning in checkpoint.warnings)


def test_D_09_D_10_expanded_and_empty_tensors(tmp_path: Path) -> None:
    root = read_bytes(legacy(tensor(pid(), 0, 2**40, 0)), tmp_path).root
    assert (root.numel, root.storage.nbytes) == (2**40, 16)
    assert read_bytes(legacy(tensor(pid(), 2**40, 0, 1)), tmp_path).root.nbytes == 0


def test_LG_10_other_files_are_not_mine() -> None:
    heads = (b"PK\x03\x04", b"<html>", b"version https://git-lfs", b"\x1f\x8b", b"", b"\x80\x02")
    for head in heads:
        assert not torch_legacy.matches(Probe(Memory(head + bytes(100), "x.pt")))
