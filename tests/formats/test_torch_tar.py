"""Checkpoints of torch 0.1.1 against torch, and such files by hand: odd and hostile ones."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import formats
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.checkpoint import Checkpoint
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
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import Global, Object
from ckptkit.formats import tar, torch_legacy
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TAR
from ckptkit.formats.table import TORCH_TAR as FORMAT
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


def read(data: bytes) -> Checkpoint:
    probe = Probe(Memory(data, "old.tar"))
    assert FORMAT.matches(probe)
    return FORMAT.read(probe)


def read_file(path: Path) -> Checkpoint:
    probe = Probe(LocalFile(path))
    assert FORMAT.matches(probe)
    return FORMAT.read(probe)


def by_torch(data: bytes, folder: Path) -> Any:
    (folder / "made.tar").write_bytes(data)
    return torch.load(folder / "made.tar", weights_only=False)


def values_of(node: Tensor) -> list[float]:
    """The elements of a one-dimensional float32 tensor."""
    assert node.storage is not None
    assert node.dtype.name == "float32"
    data = b"".join(stream(node.storage.record.locate()))
    floats = struct.unpack(f"<{len(data) // 4}f", data)
    return [floats[node.offset + i * node.stride[0]] for i in range(node.shape[0])]


DATA = struct.pack("<4f", 0, 1, 2, 3)
ONE = [storage(1, DATA)]
GOOD = torch_tar(ids("2"), [tensor(2, 1)], ONE)


def test_the_files_of_these_tests_are_good(tmp_path: Path) -> None:
    (node,) = read(GOOD).root
    assert values_of(node) == by_torch(GOOD, tmp_path)[0].tolist() == [0, 1, 2, 3]
    assert read(GOOD).warnings == ()
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "made.tar", weights_only=True)


def test_what_torch_loads_is_what_we_write(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    value = {
        "state_dict": OrderedDict(
            a=base, b=base[4:10], c=base.reshape(4, 6).t(), d=base[:1].expand(5), e=base
        ),
        "half": torch.tensor([1.5, -0.0], dtype=torch.float16),
        "long": torch.tensor([[1], [2]]),
        "epoch": 3,
        "nested": ["text", (1, 2.5, None), {"deep": torch.ones(2, dtype=torch.uint8)}],
    }
    path = save(value, tmp_path / "old.tar")
    checkpoint = read_file(path)
    assert checkpoint.weights.keys() == {"a", "b", "c", "d", "e"}
    expected = torch.load(path, weights_only=False)
    assert agree(Written(checkpoint.root, tmp_path / "new.pt").load(), expected)


def test_keys_as_text_and_as_integers(tmp_path: Path) -> None:
    data = torch_tar(ids("2", 2, 1, "1", "2"), [tensor(2, 1)], ONE)
    a, b, c, d, e = read(data).root
    assert a is b is e and c is d
    assert isinstance(c, TypedStorage)
    expected = by_torch(data, tmp_path)
    assert expected[0] is expected[1] is expected[4] and expected[2] is expected[3]
    large = 2**63 + 5
    assert values_of(
        read(torch_tar(ids(large), [tensor(large, -7)], [storage(-7, DATA)])).root[0]
    ) == [0, 1, 2, 3]


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 4), (2, 2)])
def test_views_of_storages(start: int, stop: int, tmp_path: Path) -> None:
    views = [(5, 1, start, stop - start), (6, 5, 0, stop - start)]
    made = [tensor(2, 1), tensor(3, 5, [stop - start]), tensor(4, 6, [stop - start])]
    data = torch_tar(ids(2, 3, 4), made, ONE, views)
    root = read(data).root
    assert [values_of(each) for each in root] == [
        each.tolist() for each in by_torch(data, tmp_path)
    ]
    assert root[0].storage is root[1].storage is root[2].storage
    assert Written(root, tmp_path / "new.pt").load()[1].tolist() == [
        float(i) for i in range(start, stop)
    ]


@pytest.mark.parametrize("location", ["cpu", "cuda:1"])
def test_devices(location: str, tmp_path: Path) -> None:
    path = save({"a": torch.ones(3)}, tmp_path / "old.tar", location)
    assert read_file(path).weights["a"].device == location
    loaded = torch.load(path, weights_only=False, map_location="cpu")
    assert loaded["a"].tolist() == [1, 1, 1]


def test_classes_of_a_gpu() -> None:
    data = torch_tar(
        ids(2),
        [tensor(2, 1, made="torch.cuda.FloatTensor")],
        [storage(1, DATA, "torch.cuda.FloatStorage", "cuda:0")],
    )
    assert (read(data).root[0].device, values_of(read(data).root[0])) == ("cuda:0", [0, 1, 2, 3])


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


def test_no_sys_info(tmp_path: Path) -> None:
    data = torch_tar(ids(2), [tensor(2, 1)], ONE, sys_info=None)
    assert values_of(read(data).root[0]) == by_torch(data, tmp_path)[0].tolist()


def test_a_big_endian_machine(tmp_path: Path) -> None:
    data = torch_tar(
        ids(2), [tensor(2, 1)], ONE, sys_info=pickle.dumps({**SYSTEM, "little_endian": False}, 2)
    )
    assert values_of(read(data).root[0]) == by_torch(data, tmp_path)[0].tolist()
    assert any("big-endian" in warning for warning in read(data).warnings)


def test_what_the_object_does_not_use() -> None:
    checkpoint = read(torch_tar(ids(2), [tensor(2, 1), tensor(3, 1)], ONE))
    assert checkpoint.warnings == (
        "nothing refers to 1 of its tensors, which are not carried over",
    )


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.body[0].weight


@pytest.mark.parametrize("sources", [False, True])
def test_pickled_modules(sources: bool, tmp_path: Path) -> None:
    path = save(
        {"epoch": 3, "model": nn.DataParallel(Net())}, tmp_path / "old.tar", sources=sources
    )
    checkpoint = read_file(path)
    expected = torch.load(path, weights_only=False)["model"].state_dict()
    assert list(checkpoint.weights) == list(expected)
    loaded = Written(dict(checkpoint.required.nodes), tmp_path / "new.pt").load()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert (
        checkpoint.weights["module.tied.weight"].storage
        is checkpoint.weights["module.body.0.weight"].storage
    )
    source = checkpoint.extras.get(f"module_source:{__name__}.Net", "")
    assert ("class Net(nn.Module)" in source) == sources
    assert any("source code of 5 classes" in warning for warning in checkpoint.warnings) == sources


def test_a_source_that_python_did_not_find() -> None:
    root = b"\x80\x02(cmine\nNet\nNNtQ."
    checkpoint = read(torch_tar(root, [], []))
    assert checkpoint.root == Global("mine", "Net")
    assert checkpoint.extras == {"module_source:mine.Net": ""}


@pytest.mark.parametrize("pid", [b"(NVf\nVs\nt", b"(cm\nC\nVf\nK\x01t", b"(Vm\nVf\nVs\nt"])
def test_sources_of_something_else(pid: bytes) -> None:
    with pytest.raises(FormatError):
        read(torch_tar(b"\x80\x02" + pid + b"Q.", [], []))


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
    data = torch_tar(
        b"\x80\x02](" + made[:at] + b"q\x07" + made[at:] + b"h\x07e.", [tensor(2, 1)], ONE
    )
    root = read(data).root
    expected = by_torch(data, tmp_path)
    assert root[0] is root[1] and isinstance(root[0], Tensor)
    assert expected[0] is expected[1]
    assert values_of(root[0]) == expected[0].tolist()
    assert root[0].requires_grad == expected[0].requires_grad
    assert root[0].kind == ("parameter" if type(expected[0]) is nn.Parameter else "tensor")
    assert agree(Written(root, tmp_path / "new.pt").load(), expected)


def test_other_tar_files_are_told_apart() -> None:
    for data in (
        archive(member("data.csv", b"1,2")),
        archive(member("./pickle", b"N.")),
        archive(member("pickle/", b"", b"5")),
    ):
        assert formats.match(Probe(Memory(data))) is TAR


# Hostile ones


def refused(
    error: type[CkptkitError] | tuple[type[CkptkitError], ...],
    data: bytes,
    match: str | None = None,
) -> None:
    with pytest.raises(error, match=match) as caught:
        read(data)
    assert str(caught.value).isprintable()


def records(**replaced: bytes) -> dict[str, bytes]:
    parts = {
        "sys_info": pickle.dumps(SYSTEM, 2), "pickle": ids(2), "tensors": pickle.dumps(1, 2) + tensor(2, 1),
        "storages": pickle.dumps(1, 2) + ONE[0] + pickle.dumps([], 2),
    }  # fmt: skip
    return {**parts, **replaced}


@pytest.mark.parametrize("name", ["pickle", "tensors", "storages", "sys_info"])
@pytest.mark.parametrize("type", [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"L"])
def test_TR_01_records_that_are_no_files(name: str, type: bytes) -> None:
    members = [
        member(each, b"", type, link=b"/etc/passwd") if each == name else member(each, data)
        for each, data in records().items()
    ]
    refused((PathError, UnsupportedError, FormatError), archive(*members))


@pytest.mark.parametrize("name", ["pickle", "tensors", "storages"])
def test_TR_04_records_that_are_missing(name: str) -> None:
    parts = records()
    del parts[name]
    refused(
        CorruptError, archive(*(member(*each) for each in parts.items())), f"no record '{name}'"
    )


@pytest.mark.parametrize("name", ["pickle2", "data/pickle", "storages.bak", "README"])
def test_TR_04_other_members(name: str) -> None:
    members = [member(*each) for each in records().items()]
    refused(AmbiguousError, archive(*members, member(name, b"x")), "does not write")


@pytest.mark.parametrize("name", ["sys_info", "pickle", "tensors", "storages"])
def test_TR_04_records_that_are_there_twice(name: str, tmp_path: Path) -> None:
    """torch takes the last one."""
    members = [member(*each) for each in records().items()]
    data = archive(*members, member(name, records()[name]))
    assert by_torch(data, tmp_path)[0].tolist() == [0, 1, 2, 3]
    refused(AmbiguousError, data, "two members")


@pytest.mark.parametrize("name", ["sys_info", "pickle", "tensors", "storages"])
def test_TR_04_bytes_after_the_end_of_a_record(name: str, tmp_path: Path) -> None:
    parts = records()
    data = archive(
        *(member(each, parts[each] + (b"more" if each == name else b"")) for each in parts)
    )
    assert by_torch(data, tmp_path)[0].tolist() == [0, 1, 2, 3]
    refused(AmbiguousError, data, f"4 bytes of the record '{name}'")


@pytest.mark.parametrize("name", ["sys_info", "pickle", "tensors", "storages"])
def test_TR_05_records_that_end_early(name: str) -> None:
    parts = records()
    whole = parts[name]
    for cut in range(len(whole)):
        refused(
            CkptkitError, archive(*(member(*each) for each in {**parts, name: whole[:cut]}.items()))
        )


@pytest.mark.parametrize("count", [10**9, 2**62, 10**300, -1, 1.0, "1", None, True, [1]])
@pytest.mark.parametrize("name", ["tensors", "storages"])
def test_TR_05_counts(name: str, count: Any) -> None:
    parts = records()
    whole = pickle.dumps(count, 2) + parts[name][len(pickle.dumps(1, 2)) :]
    refused(
        (CorruptError, FormatError),
        archive(*(member(*each) for each in {**parts, name: whole}.items())),
        "entries",
    )


@pytest.mark.parametrize("rank", [-1, 65, 2**31 - 1, -(2**31)])
def test_TR_05_dimensions(rank: int) -> None:
    expected = LimitError if rank > 0 else TensorError
    refused(expected, torch_tar(ids(2), [tensor(2, 1, rank=rank)], ONE), "dimensions")


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((5,), (1,), 0), ((4,), (1,), 1), ((4,), (2,), 0), ((-1,), (1,), 0), ((2,), (-1,), 3), ((4,), (1,), -1),
        ((2**62, 4), (1, 1), 0), ((2,), (2**63 - 1,), 0), ((1,), (1,), 2**62),
    ],
)  # fmt: skip
def test_TR_05_geometry(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
    refused(TensorError, torch_tar(ids(2), [tensor(2, 1, shape, stride, offset)], ONE))


@pytest.mark.parametrize(
    "view", [(5, 1, 2, 4), (5, 1, -1, 2), (5, 1, 0, -1), (5, 1, 2**62, 1), (5, 1, 5, 0)]
)
def test_TR_05_views_beyond_their_storage(view: tuple[int, ...]) -> None:
    refused(TensorError, torch_tar(ids(2), [tensor(2, 5)], ONE, [view]), "a view of")
    refused(
        TensorError, torch_tar(ids(2), [tensor(2, 5, [3])], ONE, [(5, 1, 1, 2)]), "beyond a view"
    )


@pytest.mark.parametrize(
    "view", [(5, 1, 0), (5, 1, 0, 1, 2), None, (5, 1, 0.0, 1), (5, 1, 0, "1"), [5, 1, 0, 1]]
)
def test_TR_05_views_that_are_no_views(view: Any) -> None:
    refused(FormatError, torch_tar(ids(2), [tensor(2, 1)], ONE, [view]), "not a tuple")


def test_TR_05_the_list_of_views() -> None:
    for views in ({}, None, ()):
        whole = pickle.dumps(1, 2) + ONE[0] + pickle.dumps(views, 2)
        refused(
            FormatError,
            archive(*(member(*each) for each in records(storages=whole).items())),
            "not a list",
        )


@pytest.mark.parametrize("of", [3, "1 ", 2, -1])
def test_TR_05_storages_that_are_not_there(of: Any) -> None:
    refused((CorruptError, FormatError), torch_tar(ids(2), [tensor(2, of)], ONE))
    refused((CorruptError, FormatError), torch_tar(ids(2), [tensor(2, 1)], ONE, [(5, of, 0, 1)]))


@pytest.mark.parametrize(
    "pid",
    [
        b"K\x03",
        b"V3\n",
        b"V 2\n",
        b"V0x2\n",
        b"V2_\n",
        b"N",
        b"\x88",
        b"G" + bytes(8),
        b")",
        b"V\n",
    ],
)
def test_TR_05_persistent_ids(pid: bytes) -> None:
    refused((CorruptError, FormatError), torch_tar(b"\x80\x02" + pid + b"Q.", [tensor(2, 1)], ONE))


def test_TR_05_keys_that_are_described_twice() -> None:
    twice = "described twice"
    refused(AmbiguousError, torch_tar(ids(2), [tensor(2, 1)], ONE * 2), twice)
    refused(AmbiguousError, torch_tar(ids(2), [tensor(2, 1)] * 2, ONE), twice)
    refused(AmbiguousError, torch_tar(ids(2), [tensor(1, 1)], ONE), twice)
    refused(AmbiguousError, torch_tar(ids(2), [tensor(2, 1)], ONE, [(1, 1, 0, 1)]), twice)


@pytest.mark.parametrize("numel", [-1, -(2**63), 5, 2**62, 2**63 - 1, 3])
def test_TR_05_elements_of_a_storage(numel: int) -> None:
    refused(CkptkitError, torch_tar(ids(2), [tensor(2, 1, [3])], [storage(1, DATA, numel=numel)]))


@pytest.mark.parametrize(
    "made",
    ["FloatTensor", "UntypedStorage", "torch.storage.UntypedStorage", "os.system", "Storage"],
)
def test_TR_05_storage_classes(made: str) -> None:
    refused(FormatError, torch_tar(ids(2), [tensor(2, 1)], [storage(1, DATA, made)]), "storage")


@pytest.mark.parametrize(
    "made",
    ["IntTensor", "HalfTensor", "FloatStorage", "os.system", "Tensor", "torch.sparse.FloatTensor"],
)
@pytest.mark.parametrize("of", [1, None])
def test_D_05_tensor_classes(made: str, of: int | None) -> None:
    """torch goes by the storage alone."""
    if of is None and made in ("IntTensor", "HalfTensor"):
        assert read(torch_tar(ids(2), [tensor(2, of, [], [], made=made)], ONE)).root[0].nbytes == 0
    else:
        refused(
            FormatError, torch_tar(ids(2), [tensor(2, of, made=made)], ONE), "a tensor of class"
        )


@pytest.mark.parametrize("location", [None, 5, b"cpu"])
def test_TR_05_locations(location: Any) -> None:
    refused(
        FormatError,
        torch_tar(ids(2), [tensor(2, 1)], [storage(1, DATA, location=location)]),
        "no device",
    )


def test_TR_05_a_location_that_is_too_long() -> None:
    data = torch_tar(ids(2), [tensor(2, 1)], [storage(1, DATA, location="d" * 70_000)])
    refused(LimitError, data, "device's name")


@pytest.mark.parametrize("key", [None, "x", 1.0, (1,), ""])
def test_TR_05_keys(key: Any) -> None:
    refused(
        FormatError,
        torch_tar(ids(2), [tensor(2, 1)], [storage(key, DATA)]),
        "is not a number",
    )


def test_TR_05_entries_that_are_no_triples() -> None:
    short = b"\x80\x02K\x01K\x02\x86."
    refused(FormatError, torch_tar(ids(2), [short], ONE), "triple")
    refused(FormatError, torch_tar(ids(2), [], [short]), "triple")


SYSTEM_CALL = b"cos\nsystem\n(Vtouch canary\ntR"


def test_LG_02_nothing_is_called_in_any_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = b"\x80\x02" + SYSTEM_CALL + b"."
    parts = records()
    for name in parts:
        data = archive(*(member(*each) for each in {**parts, name: call + parts[name]}.items()))
        refused(CkptkitError, data)
    root = read(torch_tar(call, [], [])).root
    assert isinstance(root, Object)
    assert root.global_ == Global("os", "system")
    for of in (entry(2, 1, "FloatTensor"), storage(1, DATA)):
        hidden = of.replace(b"ctorch", SYSTEM_CALL + b"ctorch", 1).replace(b"t.", b"\x87.", 1)
        refused(CkptkitError, torch_tar(ids(2), [hidden], [hidden]))
    assert not (tmp_path / "canary").exists()


def test_TR_04_what_torch_takes_for_a_tar_is_one_to_us(tmp_path: Path) -> None:
    """A legacy stream whose beginning is the name of a member: torch loads the tar."""
    torch.save([torch.zeros(1)], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    name = (tmp_path / "legacy.pt").read_bytes()[:90]
    parts = [member(*each) for each in records().items()]
    for data in (archive(header(name), *parts), archive(header(name[:19]), *parts)):
        assert by_torch(data, tmp_path)[0].tolist() == [0, 1, 2, 3]
        probe = Probe(Memory(data, "both.pt"))
        assert torch_legacy.matches(probe)
        assert formats.identify(probe) is FORMAT
        refused((FormatError, AmbiguousError), data)
    assert formats.identify(Probe(Memory(archive(*parts, end=10240)))) is FORMAT


def test_D_34_keys_with_equal_hashes() -> None:
    keys = [k * (2**61 - 1) for k in range(1, 3_001)]
    storages = [storage(key, b"") for key in keys]
    assert read(torch_tar(b"\x80\x02N.", [], storages)).root is None


def read_made(data: bytes) -> Checkpoint:
    return formats.read(Memory(data, "made"))


def test_a_tar_file_of_records_alone() -> None:
    data = b"".join(tars.records((b"mtime", b"1")) for _ in range(4)) + bytes(1024)
    assert tar.first_name(Memory(data)) == b""
    with pytest.raises(AmbiguousError, match="records about records"):
        read_made(data)
