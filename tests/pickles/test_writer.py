"""The pickle writer: torch and the machine read its output as they read the original."""

from __future__ import annotations

import _compat_pickle
import argparse
import collections
import datetime
import itertools
import pathlib
import pickle
import pickletools
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ckptkit.api import convert
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.core.errors import (
    AmbiguousError,
    FormatError,
    LimitError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    rebuild,
)
from ckptkit.core.weights import as_tensor
from ckptkit.pickles.machine import LARGE
from ckptkit.pickles.policy import Policy
from ckptkit.pickles.values import unpickle
from ckptkit.pickles.writer import write_pickle
from ckptkit.scanning.trace import WEIGHTS_ONLY_OPCODES
from tests.pickles.making import Written, emit, isomorphic, machine, read_file, read_saved, same
from tests.pickles.test_machine import (
    Outer,
    recursive_deep,
    recursive_dict,
    recursive_list,
    recursive_tuple,
    values,
)
from tests.random_checkpoints import parameter_with_attributes, with_attributes
from tests.torch_equality import same as equal

F32 = BY_NAME["float32"]


def names(data: bytes) -> set[str]:
    return {opcode.name for opcode, _, _ in pickletools.genops(data)}


def agree(a: Any, b: Any) -> bool:
    """Return whether torch loaded the same twice; raise AssertionError at the first difference."""
    equal(a, b)
    return True


# Tensors


def tensor_cases() -> dict[str, Callable[[], Any]]:
    def plain(name: str) -> torch.Tensor:
        return torch.arange(48, dtype=torch.uint8).view(getattr(torch, name))

    base = torch.arange(24.0).reshape(4, 6)
    cases: dict[str, Callable[[], Any]] = {
        "0-d": lambda: torch.tensor(3.5),
        "empty": lambda: torch.empty(0, 3),
        "empty odd": lambda: torch.empty(3, 0, 2)[:, :, :1],
        "transposed": lambda: base.t(),
        "slice": lambda: base[1:3, 2:5],
        "step": lambda: base[::2, ::3],
        "expand": lambda: torch.ones(1, 3).expand(5, 3),
        "permuted": lambda: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "requires grad": lambda: torch.randn(3, requires_grad=True),
        "parameter": lambda: torch.nn.Parameter(torch.randn(2, 3)),
        "frozen parameter": lambda: torch.nn.Parameter(torch.randn(2, 3), requires_grad=False),
        "parameter with state": parameter_with_attributes,
        "attributes": with_attributes,
        "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
        "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        "quantised": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.quint8),
        "quantised per channel": lambda: torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.qint8
        ),
        "quantised 32": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint32),
        "sparse": lambda: torch.eye(4).to_sparse().coalesce(),
        "meta": lambda: torch.empty(2, 3, device="meta"),
        "NaN": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    for row in TABLE:
        is_held = row.kind in ("float", "int", "bool", "complex", "bits") and row.bits >= 8
        if is_held and hasattr(torch, row.name) and not re.fullmatch("u?int[1-7]", row.name):
            cases[row.name] = lambda row=row: plain(row.name)  # type: ignore[misc]
    return cases


TENSORS = tensor_cases()
MULTIPLE = {
    "tied": lambda: (lambda a: {"a": a, "b": a, "c": a.view(-1), "d": a[1]})(torch.randn(2, 3)),
    "float8 beside uint8": lambda: (lambda a: [a, a.view(torch.float8_e4m3fn)])(torch.arange(8, dtype=torch.uint8)),
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
    "optimizer": lambda: (lambda m: {"model": m.state_dict(), "optimizer": stepped(m).state_dict(), "epoch": 4})(
        torch.nn.Linear(3, 2)
    ),
    "rng": lambda: {"torch": torch.get_rng_state(), "python": random.getstate()},
    "tensor as key": lambda: {"x": 1, 7: torch.ones(2), (1, "a"): 2, None: 3, 1.5: 4, b"b": 5},
    "values": lambda: {
        "size": torch.Size([2, 3]), "dtype": torch.float16, "device": torch.device("cuda:1"), "c": 1 - 2j,
        "set": {1, "a"},
        "bytes": b"\x00\xff" * 200, "bytearray": bytearray(b"\xff"), "counter": collections.Counter("abca"),
        "big": [2**31, -(2**31), 2**63, -(2**63), 2**1000], "none": None, "bools": [True, False], "text": "é\ud800",
    },
}  # fmt: skip


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("case", [*TENSORS, *MULTIPLE])
def test_what_torch_saved_loads_as_before(case: str, tmp_path: Path) -> None:
    value = {**TENSORS, **MULTIPLE}[case]()
    root = read_saved(value, tmp_path).root
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    written = Written(root, tmp_path / "written.pt")
    assert written.pickled.notes == ()
    assert names(written.pickled.data) <= WEIGHTS_ONLY_OPCODES
    assert written.pickled.data[:2] == b"\x80\x02"
    assert agree(written.load(), expected)
    assert isomorphic(read_file(written.path).root, root)
    assert Written(root, tmp_path / "again.pt").pickled == written.pickled


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("case", ["module", "optimizer", "values", "float8_e4m3fn", "parameter"])
def test_every_protocol_becomes_one_that_weights_only_reads(
    case: str, protocol: int, tmp_path: Path
) -> None:
    value = {**TENSORS, **MULTIPLE}[case]()
    root = read_saved(value, tmp_path, pickle_protocol=protocol).root
    assert agree(
        Written(root, tmp_path / "written.pt").load(),
        torch.load(tmp_path / "saved.pt", weights_only=False),
    )


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_read_as_torch_reads_them(case: str, tmp_path: Path) -> None:
    read = read_saved(TENSORS[case](), tmp_path)
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    tensor = as_tensor(read.root)
    assert tensor is not None
    assert (f"torch.{tensor.dtype}", tensor.requires_grad) == (
        str(expected.dtype),
        expected.requires_grad,
    )
    assert tensor.shape == tuple(expected.shape)
    assert f"torch.{tensor.layout}" == str(expected.layout)
    assert (tensor.conj, tensor.neg) == (expected.is_conj(), expected.is_neg())
    assert (tensor.kind == "parameter") == isinstance(expected, torch.nn.Parameter)
    if expected.layout is torch.strided and not expected.is_meta:
        assert (tensor.stride, tensor.offset) == (expected.stride(), expected.storage_offset())
        assert tensor.storage is not None
        assert tensor.storage.nbytes == expected.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ["csr", "csc", "bsr", "nested"])
def test_layouts_made_of_other_tensors(make: str, tmp_path: Path) -> None:
    if make == "nested":
        value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    else:
        dense = torch.eye(4)
        value = (
            dense.to_sparse_bsr((2, 2)) if make == "bsr" else getattr(dense, f"to_sparse_{make}")()
        )
    root = read_saved(value, tmp_path).root
    tensor = as_tensor(root)
    assert tensor is not None
    assert tensor.layout == {"nested": "nested"}.get(make, f"sparse_{make}")
    assert tensor.shape == (() if make == "nested" else (4, 4))
    again = Written(root, tmp_path / "written.pt").load()
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert again.layout == expected.layout
    assert repr(again) == repr(expected)


def test_ties_and_views_hold_one_storage(tmp_path: Path) -> None:
    root = read_saved(MULTIPLE["tied"](), tmp_path).root
    assert len({id(tensor.storage) for tensor in root.values()}) == 1
    assert root["a"] is root["b"]
    loaded = Written(root, tmp_path / "written.pt").load()
    assert loaded["a"] is loaded["b"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1


def test_other_spellings_become_the_usual_ones() -> None:
    typed = TypedStorage(Storage(Range(Memory(bytes(16)), 0, 16)), F32)
    old = b"ctorch._utils\n_rebuild_tensor\n(NQK\x01K\x02\x85K\x01\x85tR."
    hooks = b"ctorch._utils\n_rebuild_tensor_v2\n(NQK\x01K\x02\x85K\x01\x85I01\nNtR."
    for data, grad in ((old, False), (hooks, True)):
        tensor = unpickle(Memory(data), persistent_load=lambda pid: typed).root
        assert isinstance(tensor, Tensor)
        assert (tensor.offset, tensor.shape, tensor.stride, tensor.requires_grad) == (
            1,
            (2,),
            (1,),
            grad,
        )


# Plain values


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values())
def test_generated_values_come_back(value: Any) -> None:
    tree = machine(pickle.dumps(value, 4))
    data = emit(tree).data
    assert same(pickle.loads(data), value)
    assert isomorphic(machine(data), tree)
    assert emit(tree).data == data


POWERS = 8, 15, 16, 31, 32, 63, 64, 2030, 2050


@pytest.mark.parametrize("size", [1, *(2**power for power in POWERS)])
def test_integers(size: int) -> None:
    for number in (size - 1, size, size + 1, -size - 1, -size, -size + 1):
        data = emit(number).data
        assert pickle.loads(data) == number
        assert number.bit_length() > 2000 or names(data) <= WEIGHTS_ONLY_OPCODES


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001])
def test_batches(count: int) -> None:
    tree: Node = [
        list(range(count)),
        {i: i for i in range(count)},
        OrderedMapping({str(i): i for i in range(count)}),
    ]
    data = emit(tree).data
    assert isomorphic(machine(data), tree)
    assert pickle.loads(data) == [tree[0], tree[1], collections.OrderedDict(tree[2])]
    assert set(pickle.loads(emit(SetNode(list(range(count)))).data)) == set(range(count))


def test_what_is_shared_stays_shared_and_what_is_not_does_not() -> None:
    shared: list[Any] = [
        {}, [], (1, 2), (1, [2]), OrderedMapping(), SetNode([1]),
        Object(Global("m", "F"), new=True), bytearray(b"x"),
    ]  # fmt: skip
    tree = [shared, *shared, [], (1, 2, 3), {(1, 2): shared[2], shared[2]: 1}]
    assert isomorphic(machine(emit(tree).data), tree)
    inner = shared[2]
    loaded = pickle.loads(emit([inner, [inner, shared[0]], shared[0]]).data)
    assert loaded[0] is loaded[1][0]
    assert loaded[2] is loaded[1][1]


def test_equal_objects_are_not_merged() -> None:
    a, b = Object(Global("m", "F"), (1,), new=True), Object(Global("m", "F"), (1,), new=True)
    again = machine(emit([a, b, a]).data)
    assert again[0] is again[2] is not again[1]


@pytest.mark.parametrize("make", [
    recursive_list, recursive_dict, recursive_tuple, lambda: recursive_tuple(7000, 1.5, "x", ()),
    recursive_deep,
])  # fmt: skip
def test_what_contains_itself(make: Callable[[], Any]) -> None:
    tree = machine(pickle.dumps(make(), 2))
    data = emit(tree).data
    assert isomorphic(machine(data), tree)
    assert isomorphic(machine(pickle.dumps(pickle.loads(data), 4)), tree)


def test_a_tuple_shared_many_times_is_written_once() -> None:
    value: Node = (1,)
    for _ in range(60):
        value = (value, value)
    assert len(emit(value).data) < 1000


def test_a_set_keeps_the_order_of_the_file() -> None:
    items = [f"item {i}" for i in range(50)]
    for make, frozen in ((b"c__builtin__\nset\n", False), (b"c__builtin__\nfrozenset\n", True)):
        tree = machine(make + emit(items).data[2:-1] + b"\x85R.")
        assert (tree.items, tree.frozen) == (items, frozen)
        assert machine(emit(tree).data).items == items
    assert emit(SetNode([1])).notes == ()
    assert "frozenset" in emit(SetNode([1], frozen=True)).notes[0]


def test_an_ordered_dict_with_attributes_and_a_key_called_items(tmp_path: Path) -> None:
    value = collections.OrderedDict(items=torch.ones(1), keys=2)
    value._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    root = read_saved(value, tmp_path).root
    loaded = Written(root, tmp_path / "written.pt").load()
    assert list(dict.items(loaded)) == [("items", torch.ones(1)), ("keys", 2)]
    assert loaded._metadata == value._metadata  # type: ignore[attr-defined]
    evil = machine(b"ccollections\nOrderedDict\n)RX\x01\0\0\0aK\x01s}X\x05\0\0\0itemsK\x05sb.")
    assert dict(evil.items()) == {"a": 1}
    assert isomorphic(machine(emit(evil).data), evil)


def test_strings_of_python_2() -> None:
    for data in (b"\xe9", b"\xff" * 255, b"\xff" * 256, bytes(LARGE) + b"\xff"):
        tree = machine(b"T" + len(data).to_bytes(4, "little") + data + b"q\x00h\x00\x86.")
        written = emit(tree).data
        assert pickle.loads(written, encoding="bytes") == (data, data)
        assert len(data) > 255 or names(written) <= WEIGHTS_ONLY_OPCODES
    assert isomorphic(machine(emit([ByteString(b"\xe9")]).data), [ByteString(b"\xe9")])


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_byte_strings_are_written_from_the_source(kind: type) -> None:
    value = kind(range(256)) * 400
    tree = machine(pickle.dumps([value, value], 5))
    loaded = pickle.loads(emit(tree).data)
    assert loaded == [value, value]
    assert loaded[0] is loaded[1]
    assert names(emit(tree).data) <= WEIGHTS_ONLY_OPCODES


# Objects


OBJECTS: dict[str, Any] = {
    "defaultdict": collections.defaultdict(list, {"a": [1]}), "deque": collections.deque([1, 2], 3),
    "namespace": argparse.Namespace(lr=0.1, name="x"), "path": pathlib.PurePosixPath("a/b"),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(days=1), "frozenset": frozenset([1]), "slice": slice(1, 2),
    "range": range(1, 9, 2), "numpy float": np.float32(1.5), "numpy int": np.int64(-7),
    "numpy bool": np.bool_(True), "numpy array": np.arange(6, dtype=">i2").reshape(2, 3),
    "numpy fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "numpy dtype": np.dtype("<f8"), "numpy objects": np.array(["a", None, 1], dtype=object),
    "numpy rng": np.random.get_state(),
    "numpy RandomState": np.random.RandomState(3).get_state(legacy=False),
}  # fmt: skip


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        same_type = (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.flags.f_contiguous == b.flags.f_contiguous
        )
        return same_type and bool(np.array_equal(a, b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("case", OBJECTS)
def test_harmless_objects_are_kept(case: str, protocol: int) -> None:
    value = {"x": OBJECTS[case], "y": OBJECTS[case]}
    tree = machine(pickle.dumps(value, protocol))
    pickled = emit(tree)
    assert alike(pickle.loads(pickled.data), pickle.loads(pickle.dumps(value, protocol)))
    assert isomorphic(machine(pickled.data), tree)
    assert pickled.data[1] == 2


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_generators_of_numpy_are_kept(protocol: int) -> None:
    for generator in (np.random.default_rng(5), np.random.RandomState(5)):
        again = pickle.loads(emit(machine(pickle.dumps(generator, protocol))).data)
        assert again.normal(size=3).tolist() == generator.normal(size=3).tolist()


def test_nested_classes() -> None:
    tree = machine(pickle.dumps([Outer.Inner(), Outer()], 4))
    assert tree[0].callable == Global(Outer.__module__, "Outer.Inner")
    data = emit(tree).data
    assert list(map(type, pickle.loads(data))) == [Outer.Inner, Outer]
    assert isomorphic(machine(data), tree)
    with pytest.raises(UnsafeGlobalError, match=r"contains .*\.Outer, which is your own code"):
        emit([Global(Outer.__module__, "Outer")])


class Keywords:
    def __new__(cls, *args: Any, **kwargs: Any) -> Keywords:
        made = super().__new__(cls)
        made.got = (args, kwargs)  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> Any:
        return self.got  # type: ignore[attr-defined]


def test_keyword_arguments_raise_the_protocol() -> None:
    value = [Keywords(1, a=2), range(3), {1}, b"x"]
    tree = machine(pickle.dumps(value, 4))
    data = emit(tree).data
    assert data[1] == 4
    loaded = pickle.loads(data)
    assert loaded[0].got == ((1,), {"a": 2})
    assert loaded[1:] == value[1:]
    assert isomorphic(machine(data), tree)


def test_names_that_protocol_2_would_take_for_others_raise_the_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Policy, "check_names", lambda policy, root: None)
    tree = [Global("thread", "Thing"), Global("builtins", "range"), Global("queue", "Queue")]
    data = emit(tree).data
    assert data[1] == 4
    assert machine(data) == tree
    assert emit(tree[1:]).data[1] == 2
    assert machine(emit(tree[1:]).data) == tree[1:]


def test_every_renamed_name_of_the_standard_library_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Policy, "check_names", lambda policy, root: None)
    of = _compat_pickle
    modules = {*of.IMPORT_MAPPING, *of.IMPORT_MAPPING.values(), *of.REVERSE_IMPORT_MAPPING}
    names = {*of.NAME_MAPPING, *of.NAME_MAPPING.values(), *of.REVERSE_NAME_MAPPING}
    for each in itertools.starmap(Global, {*names, *((module, "Thing") for module in modules)}):
        assert machine(emit(each).data) == each


@pytest.mark.parametrize(
    ("module", "name"), [("a\nb", "c"), ("a", "b\ncposix\nsystem"), ("a", "b\n")]
)
def test_newlines_in_a_name_are_refused(module: str, name: str) -> None:
    with pytest.raises(FormatError, match="newline"):
        emit(Global(module, name))


def test_pairs_are_refused() -> None:
    with pytest.raises(AmbiguousError, match="repeated"):
        emit([Pairs([(1, 2), (1, 3)])])


def test_an_object_inside_its_own_arguments_is_refused() -> None:
    made = Object(Global("m", "F"), new=True)
    made.args = ([made],)
    with pytest.raises(UnsupportedError):
        emit(made)
    inside = SetNode([])
    inside.items.append((inside,))
    with pytest.raises(UnsafeGlobalError, match="keys"):  # it cannot be hashed
        emit(inside)


def test_steps_are_written_in_order() -> None:
    made = Object(Global("m", "f"), (1,), new=True)
    made.steps = [("append", [1, 2]), ("set", [("a", 1)]), ("append", [3]), ("build", {"x": made})]
    again = machine(emit(made).data)
    assert isomorphic(again, made)
    made.steps.insert(0, ("add", [1]))
    data = emit(made).data
    assert data[1] == 4
    assert isomorphic(machine(data), made)


def test_notes_name_what_weights_only_refuses(tmp_path: Path) -> None:
    path = Object(Global("pathlib", "PosixPath"), ("a",))
    pickled = emit({"a": path, "b": Global("numpy", "float32"), "c": Global("torch", "float64")})
    assert pickled.notes == (
        "kept values that torch.load(weights_only=True) rejects: numpy.float32, pathlib.PosixPath",
    )
    assert emit({"a": 1, "d": Global("torch", "float64")}, objects="error").notes == ()
    with pytest.raises(UnsafeGlobalError, match="PosixPath"):
        emit({"a": path}, objects="error")
    dropped = emit({"a": path, "b": 1}, objects="drop")
    assert machine(dropped.data) == {"b": 1}
    assert "a (pathlib.PosixPath)" in dropped.notes[0]


def test_a_copy_of_a_tree_is_written_the_same(tmp_path: Path) -> None:
    root = read_saved(MULTIPLE["optimizer"](), tmp_path).root
    assert Written(rebuild(root), tmp_path / "a").pickled == Written(root, tmp_path / "b").pickled


def test_a_value_of_no_kind_is_not_written() -> None:
    with pytest.raises(FormatError, match="cannot store"):
        emit({"a": object()})


def test_values_too_deep_to_be_written() -> None:
    root: list[Any] = []
    for _ in range(LIMITS.depth + 10):
        root = [root]
    with pytest.raises(LimitError, match="depth"):
        emit(root)


def test_a_tensor_of_another_layout_that_nobody_made() -> None:
    with pytest.raises(UnsupportedError, match="whose parts are unknown"):
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


def test_pieces_are_joined_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a long dict, and between a dict and what it holds."""
    tree = {"a": {str(n): n for n in range(2500)}, "b": [{"c": n} for n in range(20)]}
    whole = write_pickle(tree, lambda typed: ()).data
    monkeypatch.setattr("ckptkit.pickles.writer._JOINED", 3)
    assert write_pickle(tree, lambda typed: ()).data == whole
    assert isomorphic(machine(whole), tree)
