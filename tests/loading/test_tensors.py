"""Weights as torch tensors: torch.load on the same file is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, DeviceError, TensorError, UnsupportedError, UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Global, Object, StoredList
from ckptkit.loading.tensors import PythonValues, TorchTensors
from tests.torch_equality import same

Cuda = Callable[..., AbstractContextManager[None]]

SHELLS = {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}  # torch cannot save them
DTYPES = [
    row.name
    for row in dtypes.TABLE
    if isinstance(getattr(torch, row.name, None), torch.dtype)
    and row.kind != "quantized"
    and row.name not in SHELLS
]


def saved(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def views() -> dict[str, Any]:
    base = torch.arange(24.0)
    return {
        "whole": base,
        "transposed": base.view(4, 6).t(),
        "slice": base[3:9:2],
        "expanded": base[:1].expand(5),
        "empty": base[:0],
        "scalar": base[7],
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": nn.Parameter(base[:6].view(2, 3)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "meta": torch.empty(2, 3, device="meta"),
    }


def of_dtype(name: str) -> dict[str, torch.Tensor]:
    memory = torch.arange(64, dtype=torch.uint8).untyped_storage()
    return {"w": torch.empty(0, dtype=getattr(torch, name)).set_(memory, 1, (2,), (1,))}


def as_torch(path: Path, where: Any = None) -> Any:
    """Return what ckptkit loads, after comparing it with what torch loads."""
    theirs = torch.load(path, map_location=where, weights_only=True)
    ours = ckptkit.load(path, map_location=where)
    same(theirs, ours)
    return ours


@pytest.mark.parametrize("legacy", [False, True])
def test_state_dicts_views_parameters_and_flags(tmp_path: Path, legacy: bool) -> None:
    for number, state in enumerate((net().state_dict(), views())):
        path = tmp_path / f"{number}.pth"
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
        as_torch(path)
    assert not any(net().load_state_dict(ckptkit.load(tmp_path / "0.pth")))


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(tmp_path: Path, name: str) -> None:
    as_torch(saved(of_dtype(name), tmp_path / "a.pth"))


def test_part_of_a_checkpoint(tmp_path: Path) -> None:
    path = saved(
        {"epoch": 3, "a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(2)}}, tmp_path / "a.pth"
    )
    with pytest.raises(CkptkitError, match="could be the weights"):
        ckptkit.load(path)
    ours = ckptkit.load(path, key="b")
    assert type(ours) is dict
    assert ours["w"].tolist() == [0.0, 0.0]
    with pytest.raises(UsageError):
        ckptkit.load(path, key="epoch")


DENSE = torch.tensor([[0, 1.5, 0, 0], [2, 0, 0, 3], [0, 0, 0, 0], [0, 0, 4, 0]])
SCALES, ZEROS = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3])
SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "coo uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
    "parameter": lambda: nn.Parameter(DENSE.to_sparse()),
}
SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    **SPARSE,
    "quantized": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8),
    "quantized int32": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.qint32),
    "per channel": lambda: torch.quantize_per_channel(DENSE, SCALES, ZEROS, 1, torch.qint8),
    "per channel, float": lambda: torch.quantize_per_channel(
        DENSE, SCALES, ZEROS.float(), 1, torch.quint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "where"), [*((name, "cpu") for name in SPECIAL), *((name, "meta") for name in SPARSE)]
)
def test_special_layouts(tmp_path: Path, name: str, where: str) -> None:
    """On the meta device, there are no indices to check."""
    path = saved({"w": SPECIAL[name](), "v": torch.ones(1)}, tmp_path / "a.pth")
    ours = ckptkit.load(path, map_location=where)["w"]
    theirs = torch.load(path, map_location=where, weights_only=True)["w"]
    assert repr(ours) == repr(theirs)  # type, layout, shape, indices, values, dtype, scales
    assert (ours.layout, ours.dtype, ours.device) == (theirs.layout, theirs.dtype, theirs.device)
    assert theirs.layout != torch.sparse_coo or ours.is_coalesced() == theirs.is_coalesced()
    assert not theirs.is_quantized or torch.equal(ours.int_repr(), theirs.int_repr())


def test_a_pickled_module_gives_what_its_state_dict_would(tmp_path: Path) -> None:
    model = net()
    ours = ckptkit.load(saved({"model": model, "epoch": 1}, tmp_path / "a.pth"))
    assert list(ours) == list(model.state_dict())
    same(list(model.state_dict().values()), list(ours.values()))


# map_location


class Noting:
    """A map_location that keeps what it is called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        self.seen.append((type(storage), str(storage.device), storage.nbytes(), tag))
        return storage


FORMS: dict[str, Any] = {
    "cpu": "cpu",
    "device cpu": torch.device("cpu"),
    "meta": "meta",
    "device meta": torch.device("meta"),
    "dict to cpu": {"cuda:1": "cpu"},
    "dict to meta": {"cuda:1": "meta"},
    "function": Noting(),
    "function that copies": lambda storage, tag: torch.UntypedStorage(storage.nbytes()).copy_(storage),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_map_location_is_torchs(tmp_path: Path, simulated_cuda: Cuda, name: str) -> None:
    form = FORMS[name]
    with simulated_cuda(1):
        path = saved({"w": torch.arange(4.0), "v": torch.arange(6)[2:]}, tmp_path / "a.pth")
    assert ckptkit.open(path).weights["w"].device == "cuda:1"
    as_torch(path, form)
    if isinstance(form, Noting):
        assert len(form.seen) == 4 and form.seen[:2] == form.seen[2:]


def test_map_location_leaves_arrays_of_numpy(tmp_path: Path) -> None:
    """They have no other device, and a function is not called for them."""
    array = numpy.arange(3.0)
    path = saved({"w": torch.ones(2), "array": array}, tmp_path / "a.pth")
    noting = Noting()
    for where in ("meta", torch.device("meta"), noting):
        ours = ckptkit.load(path, map_location=where, whole=True)
        assert ours["w"].is_meta is (where is not noting)
        assert numpy.array_equal(ours["array"], array)
    assert len(noting.seen) == 1


def test_map_location_function_that_gives_none(tmp_path: Path, simulated_cuda: Cuda) -> None:
    as_torch(saved({"w": torch.arange(4.0)}, tmp_path / "a.pth"), lambda storage, tag: None)
    with simulated_cuda(1):
        path = saved({"w": torch.arange(4.0)}, tmp_path / "b.pth")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError):
            ckptkit.load(path, map_location=lambda storage, tag: None)


def test_what_is_registered_for_a_tag_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vendor's package, played by one that puts its tensors on the CPU."""
    registry = list(torch.serialization._package_registry)
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    torch.serialization.register_package(
        0, lambda storage: "vendor:0", lambda storage, tag: storage if tag == "vendor:0" else None
    )
    path = saved({"w": torch.arange(4.0)}, tmp_path / "a.pth")
    assert ckptkit.open(path).weights["w"].device == "vendor:0"
    as_torch(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "form", [None, "cuda:1", {"cpu": "cuda:1"}, torch.device("cuda", 1), {"cuda:1": "nowhere"}]
)
def test_a_device_that_is_not_there(tmp_path: Path, simulated_cuda: Cuda, form: Any) -> None:
    with simulated_cuda(1):
        path = saved({"w": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(DeviceError) as caught:
        ckptkit.load(path, map_location=form)
    assert caught.value.hint is not None
    assert "map_location='cpu'" in caught.value.hint
    assert str(path) in str(caught.value)


def test_map_location_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ckptkit.load(saved({"w": torch.ones(2)}, tmp_path / "a.pth"), map_location=3)  # type: ignore[arg-type]


def test_meta_reads_nothing() -> None:
    class Unreadable(Memory):
        def read(self, offset: int, length: int) -> bytes:
            raise AssertionError("was read")

    storage = Storage(Range(Unreadable(bytes(8)), 0, 8), "cuda:0")
    ck = Checkpoint({"w": Tensor(storage, dtypes.BY_NAME["float32"], (2,), (1,))})
    assert ckptkit.load(ck, map_location="meta")["w"].is_meta


def test_big_endian() -> None:
    storage = Storage(Range(Memory(bytes.fromhex("3fc00000c0000000")), 0, 8), big_endian=True)
    ck = Checkpoint({"w": Tensor(storage, dtypes.BY_NAME["float32"], (2,), (1,))})
    assert ckptkit.load(ck)["w"].tolist() == [1.5, -2.0]


# TorchTensors that a file describes wrongly


def tensor(*values: int, dtype: str = "int64") -> Tensor:
    row = dtypes.BY_NAME[dtype]
    data = b"".join(value.to_bytes(row.itemsize, "little", signed=True) for value in values)
    return Tensor(Storage(Range(Memory(data), 0, len(data))), row, (len(values),), (1,))


def shaped(leaf: Tensor, *shape: int) -> Tensor:
    return Tensor(leaf.storage, leaf.dtype, shape, (shape[-1], 1) if len(shape) == 2 else (1,))


def call(name: str, *args: object, layout: str = "strided", **like: Any) -> Object:
    leaf = tensor(*range(8), dtype="int8")
    values = {"shape": (4,), "stride": (1,), "dtype": leaf.dtype, "storage": leaf.storage, **like}
    shown = Tensor(
        values["storage"], values["dtype"], values["shape"], values["stride"], layout=layout
    )
    return Object(Global("torch._utils", name), args, tensor=shown)


def sparse(layout: str, shape: tuple[int, ...], *parts: object) -> Object:
    return call("_rebuild_sparse_tensor", None, parts, layout=layout, shape=shape, stride=())


def nested(*parts: object) -> Object:
    return call(
        "_rebuild_nested_tensor", tensor(1, 2), *parts, layout="nested", shape=(), stride=()
    )


def quantized(*scheme: object) -> Object:
    qint8 = dtypes.BY_NAME["qint8"]
    return call("_rebuild_qtensor", None, 0, 0, 0, scheme, False, None, dtype=qint8)


ONE, TWO = (shaped(tensor(n), 1, 1) for n in (1, 2))
PER_CHANNEL = Global("torch", "per_channel_affine")


@pytest.mark.parametrize(
    "node",
    [
        sparse("sparse_coo", (4,), shaped(tensor(9), 1, 1), tensor(1), (4,)),
        sparse("sparse_csr", (1, 4), tensor(0, 9), tensor(7), tensor(1), (1, 4)),
        sparse("float32", (1, 4), tensor(0, 1), tensor(0), tensor(1), (1, 4)),
        nested(shaped(tensor(3), 1, 1), ONE, tensor(0)),
        nested(TWO, shaped(tensor(-1), 1, 1), tensor(1)),
        nested(TWO, ONE, tensor(-5)),
        nested(PER_CHANNEL, PER_CHANNEL, tensor(0)),
        quantized(PER_CHANNEL, [0.1], [0], 0),
        quantized(PER_CHANNEL, [0.1] * 4, [0] * 4, 7),
        quantized(PER_CHANNEL, [0.1] * 4, [0] * 4, -1),
        quantized(PER_CHANNEL),
        quantized(1.5, [0.1] * 4, [0] * 4, 0),
        quantized(Global("torch", "per_tensor_affine"), "x", "y"),
    ],
)
def test_parts_that_do_not_hold_together(node: Object) -> None:
    with pytest.raises(TensorError) as caught:
        ckptkit.load(Checkpoint({"w": node, "v": tensor(1)}))
    assert str(caught.value).startswith("w: ") or ": w: " in str(caught.value)


def test_what_only_its_class_can_make() -> None:
    node = call("_rebuild_wrapper_subclass", layout="subclass", storage=None, stride=())
    with pytest.raises(UnsupportedError) as caught:
        ckptkit.load(Checkpoint({"w": node}))
    assert "_rebuild_wrapper_subclass" in str(caught.value)


def test_calls_of_other_modules_are_not_taken_for_torchs() -> None:
    """A name alone does not make it the known call: what it reads as is given, nothing is
    called."""
    leaf = tensor(1, 2)
    node = Object(Global("evil", "_rebuild_parameter"), (), tensor=leaf)
    assert ckptkit.load(Checkpoint({"w": node}))["w"].tolist() == [1, 2]


def test_device_tensors(tmp_path: Path) -> None:
    """xla and others write values on the CPU, and the device to move them to."""
    data = tensor(1, 2)
    args = (data, Global("torch", "float32"), "xla:0", True)
    node = Object(Global("torch._utils", "_rebuild_device_tensor_from_numpy"), args, tensor=data)
    made = ckptkit.load(Checkpoint({"w": node}), map_location="cpu")["w"]
    assert (made.tolist(), made.dtype, made.requires_grad) == ([1.0, 2.0], torch.float32, True)
    with pytest.raises(DeviceError):
        ckptkit.load(Checkpoint({"w": node}))
    with pytest.raises(UnsupportedError):
        ckptkit.load(Checkpoint({"w": node}), map_location=lambda storage, tag: storage)


def test_each_storage_is_read_once() -> None:
    reads = []

    class Counted(Memory):
        def read(self, offset: int, length: int) -> bytes:
            reads.append((offset, length))
            return super().read(offset, length)

    storage = Storage(Range(Counted(bytes(8)), 0, 8))
    leaf = Tensor(storage, dtypes.BY_NAME["float32"], (2,), (1,))
    made = TorchTensors()
    made.tensor(leaf)
    made.tensor(Tensor(storage, leaf.dtype, (1,), (1,), 1))
    made.storage(TypedStorage(storage, None).storage)
    assert reads == [(0, 8)]


def test_a_list_that_stays_in_the_file_is_read_once() -> None:
    held = StoredList("number", 5, (1, 2, 3), lambda: [1, 2, 3, 4, 5])
    tree = PythonValues(TorchTensors("cpu"))({"a": held, "b": held})
    assert tree["a"] == [1, 2, 3, 4, 5]
    assert tree["a"] is tree["b"]
