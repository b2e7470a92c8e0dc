"""``--all``: a .pth, through safetensors and back, is byte for byte what it becomes without the
detour."""

from __future__ import annotations

import argparse
import collections
import pickle
import struct
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from ckptkit.api import convert, open_checkpoint
from ckptkit.cli import main
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    FormatError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.options import Options
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Global, Object, walk
from ckptkit.formats.record import RESERVED
from ckptkit.formats.safetensors_tree import StoredTree, restore
from ckptkit.formats.strict_json import dump
from ckptkit.formats.table import SAFETENSORS as FORMAT
from tests.formats.safetensors.files import entry, file_of
from tests.formats.torchscript.scripts import QUIET
from tests.matrix import NAMES, Fixture
from tests.pickles.making import isomorphic
from tests.random_checkpoints import make
from tests.torch_equality import same

pytestmark = QUIET
ALL = Options(all=True)


def detour(source: Path, folder: Path, options: Options = ALL) -> tuple[bytes, bytes, Path]:
    """The .pth that `source` becomes straight away and by way of safetensors, and that file."""
    names = ("straight.pth", "all.safetensors", "back.pth")
    straight, between, back = map(folder.joinpath, names)
    convert(source, straight, options=options, force=True)
    convert(source, between, options=options, force=True)
    convert(between, back, force=True)
    return straight.read_bytes(), back.read_bytes(), between


def test_a_device_whose_name_is_not_text() -> None:
    storage = Storage(Range(Memory(b"x"), 0, 1), "\ud800")
    checkpoint = Checkpoint({"a": Tensor(storage, BY_NAME["uint8"], (1,), (1,))})
    with pytest.raises(UnsupportedError, match="device"):
        FORMAT.layout(checkpoint, ALL)  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(60))
def test_random_checkpoints(seed: int, tmp_path: Path) -> None:
    made = make(seed)
    made.save(tmp_path / "in.pth")
    straight, back, between = detour(tmp_path / "in.pth", tmp_path)
    if made.big_endian:  # entries are little-endian
        names = ("straight.pth", "back.pth")
        same(*(torch.load(tmp_path / name, "cpu", weights_only=False) for name in names), True)
    else:
        assert back == straight
    again = tmp_path / "again.safetensors"
    convert(tmp_path / "in.pth", again, options=ALL)
    assert again.read_bytes() == between.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_fixtures(name: str, tmp_path: Path) -> None:
    straight, back, _ = detour(Fixture(name).needs_reader().path, tmp_path)
    assert back == straight


class Other:
    def __init__(self, value: object) -> None:
        self.value = value


def odd() -> dict[str, Any]:
    """Return values that JSON and safetensors cannot express."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    shared = ["once"]
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    loop = Other(None)
    loop.value = {"back": loop}
    inside: list[Any] = []
    inside.append((inside, 1))
    return {
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "wide": torch.ones(3, dtype=torch.complex128),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "number": np.float32(1.5),
        "floats": [float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324],
        "ints": [2**70, -(2**70), 10**18, 10**19, True],
        "texts": ["", "\ud800", "$x", "é", "\0"],
        "bytes": [b"", b"\xff\0", bytearray(b"abc")],
        "complex": complex(-0.0, float("nan")),
        "keys": {1: "a", (2, "b"): "c", None: "d", 1.5: "e", b"f": "g", True.__class__: "h"},
        "sets": [{"one"}, frozenset({2})],
        "twice": [shared, shared],
        "cycle": cycle,
        "loop": loop,
        "inside": inside,
        "tuple": ((), (1, (2,))),
        "namespace": argparse.Namespace(lr=0.1, path=Path("/x/y")),
        "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, {"a": [1]}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "device": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "float": base[0],
    }


def test_odd_values(tmp_path: Path) -> None:
    torch.save(odd(), tmp_path / "in.pth")
    straight, back, _ = detour(tmp_path / "in.pth", tmp_path)
    assert back == straight
    loaded = torch.load(tmp_path / "back.pth", weights_only=False)
    assert loaded["cycle"]["self"] is loaded["cycle"]
    assert loaded["loop"].value["back"] is loaded["loop"]
    assert loaded["inside"][0][0] is loaded["inside"]
    assert loaded["twice"][0] is loaded["twice"][1]


def test_a_blob_lies_once_and_outside_the_header(tmp_path: Path) -> None:
    with (tmp_path / "in.pkl").open("wb") as file:
        pickle.dump({"array": np.arange(1 << 18), "raw": bytes(1 << 21)}, file, protocol=4)
    straight, back, between = detour(tmp_path / "in.pkl", tmp_path)
    assert back == straight
    assert int.from_bytes(between.read_bytes()[:8], "little") < 4096


def test_an_edit_of_a_file_that_holds_everything_keeps_everything(tmp_path: Path) -> None:
    args = argparse.Namespace(x=1)
    saved = {"model": {"module.w": torch.ones(2)}, "m": torch.zeros(3), "args": args}
    torch.save(saved, tmp_path / "in.pth")
    _, _, between = detour(tmp_path / "in.pth", tmp_path)
    assert CliRunner().invoke(main, ["strip-module", "--in-place", str(between)]).exit_code == 0
    convert(between, tmp_path / "again.safetensors")
    convert(tmp_path / "again.safetensors", tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=False)
    same({**saved, "model": {"w": torch.ones(2)}, "args": None}, {**loaded, "args": None}, True)
    assert loaded["args"].x == 1


def test_objects_that_are_dropped_on_the_way(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(x=1)}, tmp_path / "in.pth")
    straight, back, _ = detour(tmp_path / "in.pth", tmp_path, Options(objects="drop", all=True))
    assert back == straight
    same({"w": torch.ones(2)}, torch.load(tmp_path / "back.pth", weights_only=True), True)


class Marked(torch.Tensor):
    """A class that weights_only does not know."""


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (argparse.Namespace(x=1), "argparse.Namespace"),
        (torch.ones(2).as_subclass(Marked), "_rebuild_from_type_v2"),
    ],
)
def test_objects_that_are_refused(odd: Any, said: str, tmp_path: Path) -> None:
    """A tensor of a class of its own is an object too."""
    torch.save({"w": torch.ones(2), "odd": odd}, tmp_path / "in.pth")
    options, out = Options(objects="error", all=True), tmp_path / "no.safetensors"
    with pytest.raises(UnsafeGlobalError, match=said):
        convert(tmp_path / "in.pth", out, options=options)
    assert not out.exists()


def test_PK_a_harmful_call_is_not_written_back(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            import os

            return os.system, ("true",)

    torch.save({"w": torch.ones(2), "harm": Harm()}, tmp_path / "in.pth")
    with pytest.raises(UnsafeGlobalError, match=r"posix\.system"):
        convert(tmp_path / "in.pth", tmp_path / "all.safetensors", options=ALL)


def test_PK_a_call_that_somebody_wrote_into_a_skeleton_is_not_written_back(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "harm": PurePosixPath("true")}, tmp_path / "in.pth")
    between = tmp_path / "all.safetensors"
    convert(tmp_path / "in.pth", between, options=ALL)
    data = between.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    for old, new in (("PurePosixPath", "system"), ("pathlib", "posix")):
        assert header.count(old) == 1
        header = header.replace(old, new)
    between.write_bytes(data[:8] + header.ljust(size).encode() + data[8 + size :])
    with pytest.raises(UnsafeGlobalError, match=r"posix(\._local)?\.system"):
        convert(between, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
    harm = [["global", "posix", "system"], ["tuple", "true"], ["object", [0], [1], None, False]]
    rest = [["storage", "w", "cpu"], ["tensor", [3], {}], ["list"], ["fill", 5, "append", [2], [4]]]
    with pytest.raises(UnsafeGlobalError, match=r"posix\.system"):
        convert(written(tmp_path, [5], [*harm, *rest]), tmp_path / "out.pth")


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.pkl").write_bytes(b"\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.")
    with pytest.raises(AmbiguousError):
        convert(tmp_path / "in.pkl", tmp_path / "out.safetensors", options=ALL)


# Statements that somebody else wrote


def written(folder: Path, root: Any, tree: Any, **said: Any) -> Checkpoint:
    """A file of one entry, ``w``: six bytes of uint8, with such a record."""
    record = dump({"version": 1, "root": root, "tree": tree, **said})
    path = folder / "x.safetensors"
    header = {"__metadata__": {RESERVED: record}, "w": entry(0, 6)}
    path.write_bytes(file_of(header, bytes(range(6))))
    return open_checkpoint(path)


BLOB, STORAGE = [["blob", "w", "bytes"]], ["storage", "w", "cpu"]
ODD_FIELDS: list[list[Any]] = [
    ["shape", [7], [-1], [1.5], ["a"], 3], ["offset", 1, -1], ["dtype", "float64", "int7"],
    ["stride", [9]], ["kind", "x"], ["conj", 1], ["grad", True],
]  # fmt: skip
OBJECT = [["global", "m", "C"], ["tuple"], ["object", [0], [1], None, True]]


def test_statements_by_hand(tmp_path: Path) -> None:
    tree = [["dict"], STORAGE, ["tensor", [1], {"dtype": "int16", "shape": [2], "offset": 1}]]
    read = written(tmp_path, [0], [*tree, ["fill", 0, "set", "x", [2]]])
    assert read.warnings == ()
    assert read.weights["x"].dtype.name == "int16"
    assert read.weights["x"].extent == (2, 4)


@pytest.mark.parametrize(
    "tree",
    [
        *({}, [[]], [["no"]], ["dict"], [["dict", 1]], [["global", "os"]], [["global", 1, 2]]),
        *([["bytes", "?"]], [["bytes", "a"]], [["int", "zz"]], [["int", "00" * 2000]]),
        *([["float", "00"]], [["complex", "00"]], [["text", "//8="]]),
        *([["tuple", odd]] for odd in ([0], [-1], [0, 0], [True], {"a": 1})),
        [["tuple", [1]], ["list"]],
        [["fill", 0, "set", "a", 1]],
        [["dict"], ["fill", 0, "set", "a"]],
        [["dict"], ["fill", 0, "set", "a", 1, "a", 2]],
        [["dict"], ["list"], ["fill", 0, "set", [1], 2]],
        [["dict"], ["fill", 0, "append", 1]],
        [["dict"], ["fill", 0, "build", 1]],
        [["ordered"], ["fill", 0, "build", 1], ["fill", 0, "build", 1]],
        [["tuple"], ["fill", 0, "append", 1]],
        [["object", None, None, None, False]],
        [["tuple"], ["object", None, [0], 1, False]],
        [["tuple"], ["object", None, [0], None, 0]],
        [*OBJECT, ["fill", 2, "odd", 1]],
        [["dict"], ["fill", 0, "odd", 1, 2]],
        [STORAGE, STORAGE],
        *([["storage", *odd]] for odd in (["v", "cpu"], ["w", 1], ["w", "cpu", 1])),
        [STORAGE, ["tuple", [0]]],
        [["list"], ["tensor", [0], {}]],
        *([STORAGE, ["tensor", [0], {field: odd}]] for field, *odds in ODD_FIELDS for odd in odds),
        [["tensor", None, {"dtype": "int8"}]],
        *([STORAGE, ["typed", [0], "int16", *view]] for view in ((2, 1), (0, 4))),
        *([["blob", name, kind]] for name, kind in (("w", "str"), ("v", "bytes"))),
    ],
    ids=str,
)
def test_statements_that_make_no_sense(tree: Any) -> None:
    used = {"w": Tensor(Storage(Range(Memory(bytes(6)), 0, 6)), BY_NAME["uint8"], (6,), (1,))}
    with pytest.raises(CkptkitError):
        restore({"tree": tree, "root": [0]}, used if "'w'" in str(tree) else {})


@pytest.mark.parametrize(
    ("root", "tree", "said"), [([1], BLOB, {}), ([0], BLOB, {"ties": [1]}), ([0], [["list"]], {})]
)
def test_a_record_that_makes_no_sense_is_left_alone(
    root: Any, tree: Any, said: dict[str, Any], tmp_path: Path
) -> None:
    """No such root, ties that are no names, and an entry that is not used."""
    read = written(tmp_path, root, tree, **said)
    assert "cannot be read" in read.warnings[0]
    assert list(read.root) == ["w"]
    assert RESERVED in read.extras


def test_an_object_is_what_the_pickle_machine_makes_of_it(tmp_path: Path) -> None:
    """A call must not read as another tensor than torch would make of it."""
    hooks = [["global", "collections", "OrderedDict"], ["tuple"], ["object", [2], [3], None, False]]
    call = [
        ["global", "torch._utils", "_rebuild_parameter"],
        ["tuple", [1], True, [4]],
        ["object", [5], [6], None, False],
    ]
    read = written(tmp_path, [7], [STORAGE, ["tensor", [0], {}], *hooks, *call])
    assert isinstance(read.root, Tensor)
    assert (read.root.kind, read.root.requires_grad) == ("parameter", True)
    assert [node for _, node in walk(read.root)] == [read.root]


F32 = BY_NAME["float32"]


def stored(root: Any) -> dict[str, Any]:
    """The record of a tree without bytes."""
    return StoredTree(root, lambda *_: pytest.fail("nothing has bytes")).record()


def again(root: Any) -> Any:
    return restore(stored(root), {})[0]


def test_an_object_that_is_an_argument_of_itself() -> None:
    made = Object(Global("m", "C"), new=True)
    made.args = (made,)
    with pytest.raises(UnsupportedError, match="an argument of its own construction"):
        stored(made)
    made.new = False  # a call of what may be a function
    with pytest.raises(UnsafeGlobalError, match="allowlist"):
        stored(made)


def test_a_value_that_is_none_of_a_checkpoint() -> None:
    with pytest.raises(FormatError, match="cannot store a value of type object"):
        stored({"a": object()})


def test_a_sparse_tensor_without_bytes() -> None:
    tensor = Tensor(None, F32, (2, 3), (), layout="sparse_csr")
    assert stored(tensor)["tree"] == [
        ["tensor", None, {"dtype": "float32", "shape": [2, 3], "layout": "sparse_csr"}]
    ]
    assert isomorphic(again(tensor), tensor)


@pytest.mark.parametrize("step", ["append", "add"])
def test_what_is_put_into_an_object(step: str) -> None:
    made = Object(Global("m", "C"), new=True)
    made.steps.append((step, [1, "x", made]))
    found = again(made)
    assert found.steps[0][0] == step and found.steps[0][1][:2] == [1, "x"]
    assert found.steps[0][1][2] is found
    made.new = False  # a call of what may be a function: what it gives decides what that does
    with pytest.raises(UnsafeGlobalError, match="allowlist"):
        again(made)


def test_a_name_that_we_would_have_given(tmp_path: Path) -> None:
    """A storage that no tensor fills gets a name of ours; a tensor of that name keeps it."""
    kept = torch.arange(3.0)
    state = {"view": torch.arange(8.0)[2:5], "ckptkit": {"storage": {"0": kept}}}
    torch.save(state, tmp_path / "in.pth")
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors", options=ALL)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("ckptkit.storage.0"), kept)
        assert sorted(file.keys()) == ["ckptkit.storage.0", "ckptkit.storage.1"]
        assert bytes(file.get_tensor("ckptkit.storage.1").tolist()) == struct.pack("<8f", *range(8))
    with closing(open_checkpoint(tmp_path / "out.safetensors")) as back:
        assert (back.root["view"].shape, back.root["view"].offset) == ((3,), 2)


def test_others_find_each_tensor_under_its_path(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    row = torch.arange(6.0).reshape(2, 3)[1]
    torch.save({"model": {"a.weight": weight, "tied": weight, "row": row}}, tmp_path / "in.pth")
    _, _, between = detour(tmp_path / "in.pth", tmp_path)
    with safe_open(between, "pt") as file:
        assert set(file.keys()) == {"model.a.weight", "ckptkit.storage.1"}
        assert torch.equal(file.get_tensor("model.a.weight"), weight)
        assert file.metadata()["model.tied"] == "model.a.weight"
        assert file.metadata()["format"] == "pt"
