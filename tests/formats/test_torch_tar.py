"""Checkpoints of torch 0.1.1 against torch, and such files by hand: odd and hostile ones."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import formats
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    TensorError,
    UnsupportedError,
)
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Global, Object
from ckptkit.formats import tar, torch_legacy
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TAR
from ckptkit.formats.table import TORCH_TAR as FORMAT
from tests.formats.catalogue import Row, read_as, refuses_all
from tests.formats.conformance import elements_of
from tests.formats.containers import tars
from tests.formats.containers.tars import (
    SYSTEM,
    archive,
    entry,
    header,
    ids,
    member,
    save,
    storage,
    tensor,
    torch_tar,
)
from tests.pickles.making import Written
from tests.pickles.test_writer import agree


@pytest.fixture(autouse=True)
def _torch_takes_it_from_the_warnings() -> Iterator[None]:
    """torch compares the sources of modules with today's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


read = partial(read_as, FORMAT)


def by_torch(data: bytes, folder: Path) -> Any:
    (folder / "made.tar").write_bytes(data)
    return torch.load(folder / "made.tar", weights_only=False)


def values_of(node: Tensor) -> list[float]:
    """The elements of a one-dimensional float32 tensor."""
    assert node.dtype.name == "float32"
    data = elements_of(node)
    return [*struct.unpack(f"<{len(data) // 4}f", data)]


DATA = struct.pack("<4f", 0, 1, 2, 3)
ONE = [storage(1, DATA)]
GOOD = torch_tar(ids("2"), [tensor(2, 1)], ONE)


def test_the_files_of_these_tests_are_good(tmp_path: Path) -> None:
    (node,) = read(GOOD).root
    assert values_of(node) == by_torch(GOOD, tmp_path)[0].tolist() == [0, 1, 2, 3]
    assert read(GOOD).warnings == ()
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "made.tar", weights_only=True)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 4), (2, 2)])
def test_views_of_storages(start: int, stop: int, tmp_path: Path) -> None:
    views = [(5, 1, start, stop - start), (6, 5, 0, stop - start)]
    made = [tensor(2, 1), tensor(3, 5, [stop - start]), tensor(4, 6, [stop - start])]
    data = torch_tar(ids(2, 3, 4), made, ONE, views)
    root = read(data).root
    expected = [each.tolist() for each in by_torch(data, tmp_path)]
    assert [values_of(each) for each in root] == expected
    assert root[0].storage is root[1].storage is root[2].storage
    written = Written(root, tmp_path / "new.pt").load()[1]
    assert written.tolist() == [float(i) for i in range(start, stop)]


@pytest.mark.parametrize("of", [None, 1])
def test_empty_tensors_had_no_dimensions(of: int | None, tmp_path: Path) -> None:
    """torch of today takes them for one element, and makes it up."""
    data = torch_tar(ids(2), [tensor(2, of, [], [])], [storage(1, b"")])
    (node,) = read(data).root
    assert (node.shape, node.nbytes, node.dtype.name) == ((0,), 0, "float32")
    assert Written([node], tmp_path / "new.pt").load()[0].shape == (0,)
    elements = torch_tar(ids(2), [tensor(2, of, [3])], [storage(1, b"")])
    with pytest.raises(TensorError):
        read(elements)


def test_a_big_endian_machine(tmp_path: Path) -> None:
    """Or a file that does not say which machine wrote it."""
    big = pickle.dumps({**SYSTEM, "little_endian": False}, 2)
    for said in (None, big):
        data = torch_tar(ids(2), [tensor(2, 1)], ONE, sys_info=said)
        assert values_of(read(data).root[0]) == by_torch(data, tmp_path)[0].tolist()
        assert any("big-endian" in each for each in read(data).warnings) == (said is big)


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.body[0].weight


@pytest.mark.parametrize("sources", [False, True])
def test_pickled_modules(sources: bool, tmp_path: Path) -> None:
    state = {"epoch": 3, "model": nn.DataParallel(Net())}
    path = save(state, tmp_path / "old.tar", sources=sources)
    checkpoint = read(path)
    expected = torch.load(path, weights_only=False)["model"].state_dict()
    assert list(checkpoint.weights) == list(expected)
    loaded = Written(dict(checkpoint.required.nodes), tmp_path / "new.pt").load()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    tied = [checkpoint.weights[f"module.{name}.weight"] for name in ("tied", "body.0")]
    assert tied[0].storage is tied[1].storage
    source = checkpoint.extras.get(f"module_source:{__name__}.Net", "")
    assert ("class Net(nn.Module)" in source) == sources
    assert any("source code of 5 classes" in warning for warning in checkpoint.warnings) == sources


def test_a_source_that_python_did_not_find() -> None:
    root = b"\x80\x02(cmine\nNet\nNNtQ."
    checkpoint = read(torch_tar(root, [], []))
    assert checkpoint.root == Global("mine", "Net")
    assert checkpoint.extras == {"module_source:mine.Net": ""}


VARIABLES = {
    "Parameter, 3": b"ctorch.nn.parameter\nParameter\n%b\x85R\x88\x89N\x87b",
    "Parameter without gradient, 3": b"ctorch.nn.parameter\nParameter\n%b\x85R\x89\x89}\x87b",
    "Parameter, 5": b"ctorch.nn.parameter\nParameter\n)\x81(%bNN\x88\x89tb",
    "Parameter without gradient, 5": b"ctorch.nn.parameter\nParameter\n)\x81(%bNN\x89\x88tb",
    "Variable, 3": b"ctorch.autograd.variable\nVariable\n%b\x85R\x88\x89N\x87b",
    "Variable without gradient, 5": b"ctorch.autograd.variable\nVariable\n)\x81(%bN}\x89\x88tb",
    "tensor by class": b"ctorch\nFloatTensor\n)\x81(K\x01QK\x00K\x04\x85K\x01\x85tb",
}  # fmt: skip


@pytest.mark.parametrize("case", VARIABLES)
def test_variables_and_parameters(case: str, tmp_path: Path) -> None:
    """Twice, by the memo: one object, not two."""
    code = VARIABLES[case]
    made = code % b"K\x02Q" if b"%b" in code else code
    at = made.index(b"R" if b"\x85R" in made else b"\x81") + 1
    twice = b"\x80\x02](" + made[:at] + b"q\x07" + made[at:] + b"h\x07e."
    data = torch_tar(twice, [tensor(2, 1)], ONE)
    root = read(data).root
    expected = by_torch(data, tmp_path)
    assert root[0] is root[1] and isinstance(root[0], Tensor)
    assert expected[0] is expected[1]
    assert values_of(root[0]) == expected[0].tolist()
    assert root[0].requires_grad == expected[0].requires_grad
    assert root[0].kind == ("parameter" if type(expected[0]) is nn.Parameter else "tensor")
    assert agree(Written(root, tmp_path / "new.pt").load(), expected)


def test_other_tar_files_are_told_apart() -> None:
    others = (member("data.csv", b"1,2"), member("./pickle", b"N."), member("pickle/", b"", b"5"))
    for each in others:
        assert formats.match(Probe(Memory(archive(each)))) is TAR


# Hostile ones


RECORDS = {
    "sys_info": pickle.dumps(SYSTEM, 2), "pickle": ids(2), "tensors": pickle.dumps(1, 2) + tensor(2, 1),
    "storages": pickle.dumps(1, 2) + ONE[0] + pickle.dumps([], 2),
}  # fmt: skip


def with_records(*more: bytes, **replaced: bytes) -> bytes:
    """A good file with other records, and more members."""
    return archive(*(member(*each) for each in {**RECORDS, **replaced}.items()), *more)


def made_of(*tensors: bytes, storages: Any = ONE, views: Any = (), root: bytes = ids(2)) -> bytes:
    return torch_tar(root, list(tensors) or [tensor(2, 1)], storages, views)


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    wrong = (CorruptError, FormatError)
    for name, type in product(RECORDS, (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"L")):
        kept = [member(*each) for each in RECORDS.items() if each[0] != name]
        odd = member(name, b"", type, link=b"/etc/passwd")
        yield "TR_01", archive(odd, *kept), (PathError, UnsupportedError, FormatError), ""
        if name != "sys_info":
            yield "TR_04", archive(*kept), CorruptError, f"lacks the record '{name}'"
    for name in ("pickle2", "data/pickle", "storages.bak", "README"):
        yield "TR_04", with_records(member(name, b"x")), AmbiguousError, "does not write"
    for name, whole in RECORDS.items():
        # torch takes the last one of the name, and passes over what follows
        yield "TR_04", with_records(member(name, whole)), AmbiguousError, "two members"
        longer, said = with_records(**{name: whole + b"more"}), f"4 bytes of the record '{name}'"
        yield "TR_04", longer, AmbiguousError, said
        for cut in range(len(whole)):
            yield "TR_05", with_records(**{name: whole[:cut]}), CkptkitError, ""
    counts: tuple[Any, ...] = (10**9, 2**62, 10**300, -1, 1.0, "1", None, True, [1])
    for name, count in product(("tensors", "storages"), counts):
        whole = pickle.dumps(count, 2) + RECORDS[name][len(pickle.dumps(1, 2)) :]
        yield "TR_05", with_records(**{name: whole}), wrong, "entries"
    for rank in (-1, 65, 2**31 - 1, -(2**31)):
        error = LimitError if rank > 0 else TensorError
        yield "TR_05", made_of(tensor(2, 1, rank=rank)), error, "dimensions"
    for size, stride, offset in (
        (5, 1, 0), (4, 1, 1), (4, 2, 0), (-1, 1, 0), (2, -1, 3), (4, 1, -1), (2, 2**63 - 1, 0),
        (1, 1, 2**62),
    ):  # fmt: skip
        yield "TR_05", made_of(tensor(2, 1, [size], [stride], offset)), TensorError, ""
    yield "TR_05", made_of(tensor(2, 1, (2**62, 4), (1, 1))), TensorError, ""
    for view in ((5, 1, 2, 4), (5, 1, -1, 2), (5, 1, 0, -1), (5, 1, 2**62, 1), (5, 1, 5, 0)):
        yield "TR_05", made_of(tensor(2, 5), views=[view]), TensorError, "a view of"
    beyond = made_of(tensor(2, 5, [3]), views=[(5, 1, 1, 2)])
    yield "TR_05", beyond, TensorError, "exceed the view"
    views: tuple[Any, ...] = ((5, 1, 0), (5, 1, 0, 1, 2), None, (5, 1, 0.0, 1), (5, 1, 0, "1"))
    for odd in (*views, [5, 1, 0, 1]):
        yield "TR_05", made_of(views=[odd]), FormatError, "not a tuple"
    for odd in ({}, None, ()):
        whole = pickle.dumps(1, 2) + ONE[0] + pickle.dumps(odd, 2)
        yield "TR_05", with_records(storages=whole), FormatError, "not a list"
    for of in (3, "1 ", 2, -1):
        yield "TR_05", made_of(tensor(2, of)), wrong, ""
        yield "TR_05", made_of(views=[(5, of, 0, 1)]), wrong, ""
    for pid in (
        b"K\x03", b"V3\n", b"V 2\n", b"V0x2\n", b"V2_\n", b"N", b"\x88", b"G" + bytes(8), b")", b"V\n",
    ):  # fmt: skip
        yield "TR_05", made_of(root=b"\x80\x02" + pid + b"Q."), wrong, ""
    for data in (
        made_of(storages=ONE * 2), made_of(tensor(2, 1), tensor(2, 1)), made_of(tensor(1, 1)),
        made_of(views=[(1, 1, 0, 1)]),
    ):  # fmt: skip
        yield "TR_05", data, AmbiguousError, "have the key"
    for numel in (-1, -(2**63), 5, 2**62, 2**63 - 1, 3):
        data = made_of(tensor(2, 1, [3]), storages=[storage(1, DATA, numel=numel)])
        yield "TR_05", data, CkptkitError, ""
    for made in (
        "FloatTensor", "UntypedStorage", "torch.storage.UntypedStorage", "os.system", "Storage",
    ):  # fmt: skip
        yield "TR_05", made_of(storages=[storage(1, DATA, made)]), FormatError, "storage"
    # torch goes by the storage alone
    classes = ("FloatStorage", "os.system", "Tensor", "torch.sparse.FloatTensor")
    for made, of in [*product(classes, (1, None)), ("IntTensor", 1), ("HalfTensor", 1)]:
        yield "D_05", made_of(tensor(2, of, made=made)), FormatError, "a tensor of class"
    for location in (None, 5, b"cpu"):
        data = made_of(storages=[storage(1, DATA, location=location)])
        yield "TR_05", data, FormatError, "no device"
    data = made_of(storages=[storage(1, DATA, location="d" * 70_000)])
    yield "TR_05", data, LimitError, "device's name"
    for key in (None, "x", 1.0, (1,), ""):
        yield "TR_05", made_of(storages=[storage(key, DATA)]), FormatError, "is not a number"
    short = b"\x80\x02K\x01K\x02\x86."
    for data in (made_of(short), made_of(storages=[short])):
        yield "TR_05", data, FormatError, "triple"
    for pid in (b"(NVf\nVs\nt", b"(cm\nC\nVf\nK\x01t", b"(Vm\nVf\nVs\nt"):
        yield "a source", torch_tar(b"\x80\x02" + pid + b"Q.", [], []), FormatError, ""


def test_TR_01_TR_04_TR_05_D_05() -> None:
    refuses_all(read, refused())


SYSTEM_CALL = b"cos\nsystem\n(Vtouch canary\ntR"


def test_LG_02_nothing_is_called_in_any_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = b"\x80\x02" + SYSTEM_CALL + b"."
    for name, record in RECORDS.items():
        with pytest.raises(CkptkitError):
            read(with_records(**{name: call + record}))
    root = read(torch_tar(call, [], [])).root
    assert isinstance(root, Object)
    assert root.global_ == Global("os", "system")
    for of in (entry(2, 1, "FloatTensor"), storage(1, DATA)):
        hidden = of.replace(b"ctorch", SYSTEM_CALL + b"ctorch", 1).replace(b"t.", b"\x87.", 1)
        with pytest.raises(CkptkitError):
            read(torch_tar(ids(2), [hidden], [hidden]))
    assert not (tmp_path / "canary").exists()


def test_TR_04_what_torch_takes_for_a_tar_is_one_to_us(tmp_path: Path) -> None:
    """A legacy stream whose beginning is the name of a member: torch loads the tar."""
    torch.save([torch.zeros(1)], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    name = (tmp_path / "legacy.pt").read_bytes()[:90]
    parts = [member(*each) for each in RECORDS.items()]
    for data in (archive(header(name), *parts), archive(header(name[:19]), *parts)):
        assert by_torch(data, tmp_path)[0].tolist() == [0, 1, 2, 3]
        probe = Probe(Memory(data, "both.pt"))
        assert torch_legacy.matches(probe)
        assert formats.identify(probe) is FORMAT
        with pytest.raises((FormatError, AmbiguousError)):
            read(data)
    assert formats.identify(Probe(Memory(archive(*parts, end=10240)))) is FORMAT


def test_D_34_keys_with_equal_hashes() -> None:
    keys = [k * (2**61 - 1) for k in range(1, 3_001)]
    storages = [storage(key, b"") for key in keys]
    assert read(torch_tar(b"\x80\x02N.", [], storages)).root is None


def test_a_tar_file_of_records_alone() -> None:
    data = b"".join(tars.records((b"mtime", b"1")) for _ in range(4)) + bytes(1024)
    assert tar.first_name(Memory(data)) == b""
    with pytest.raises(AmbiguousError, match="has two groups of records"):
        formats.read(Memory(data))
