"""TorchScript of torch 1.0 to 1.2, by hand after caffe2/proto/torch.proto: no torch since 2.0
writes or reads it."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ckptkit.compute.operation import stream
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    TensorError,
    UnsupportedError,
)
from ckptkit.edits.quantized import dequantize
from ckptkit.formats.table import TORCHSCRIPT
from tests.formats.catalogue import change, read_as
from tests.formats.conformance import storage_bytes
from tests.formats.containers.zips import Member, build

FLOATS = struct.pack("<6f", *range(6))
LONGS = struct.pack("<q", 7)


def tensor(
    key: str = "tensors/0", dims: tuple[int, ...] = (2, 3), kind: str = "FLOAT", **more: Any
) -> dict[str, Any]:
    strides = [1] * len(dims)
    for at in range(len(dims) - 1, 0, -1):
        strides[at - 1] = strides[at] * dims[at]
    said = {"dims": list(map(str, dims)), "strides": list(map(str, strides)), "dataType": kind}
    said |= {"device": "cpu", "offset": "0", "requiresGrad": kind == "FLOAT"}
    return said | {"data": {"key": key}} | more


def model() -> dict[str, Any]:
    """A module with a submodule, a tied parameter, a transposed view, attributes and a constant."""
    parameters = [
        {"name": "weight", "tensorId": "0", "isBuffer": False}, {"name": "tied", "tensorId": "0"},
    ]  # fmt: skip
    fc = {"name": "fc", "parameters": parameters, "torchscriptArena": {"key": "code/fc.py"}}
    main = {
        "name": "Net", "optimize": True, "submodules": [fc],
        "parameters": [
            {"isBuffer": True, "tensorId": "1", "name": "count"}, {"tensorId": "2", "name": "view"},
        ],
        "attributes": [
            {"type": "int", "name": "rate", "id": "0"},
            {"type": "Optional[int]", "name": "missing", "id": "-1"},
            {"type": "Tensor", "name": "count", "id": "1"},
        ],
    }  # fmt: skip
    view, part = tensor(dims=(3, 2), strides=["1", "3"]), tensor(dims=(2,), offset="4")
    tensors = [tensor(), tensor("tensors/1", (), "INT64", device="cuda:1"), view, part]
    return {"protoVersion": "3", "mainModule": main, "producerName": "pytorch", "tensors": tensors}


PLAIN = pickle.dumps((16000, None), 2)


def archive(said: Any, attributes: bytes | None = PLAIN) -> bytes:
    """An archive with this model.json; None leaves attributes.pkl out, as torch 1.0 did."""
    records = {
        "version": b"1\n", "model.json": json.dumps(said).encode(), "tensors/0": FLOATS,
        "tensors/1": LONGS, "code/fc.py": b"op_version_set = 0\n",
    }  # fmt: skip
    records |= {} if attributes is None else {"attributes.pkl": attributes}
    return build(*(Member(f"made/{name}", data) for name, data in records.items()))


read = partial(read_as, TORCHSCRIPT)


def test_weights_and_attributes() -> None:
    checkpoint = read(archive(model()))
    weights = checkpoint.weights
    assert list(weights) == ["view", "count", "fc.weight", "fc.tied"]
    assert weights["fc.weight"] is weights["fc.tied"]
    assert weights["view"].storage is weights["fc.weight"].storage
    assert (weights["view"].shape, weights["view"].stride) == ((3, 2), (1, 3))
    facts = [(each.dtype.name, each.device, each.requires_grad) for each in weights.values()]
    plain = ("float32", "cpu", True)
    assert facts == [plain, ("int64", "cuda:1", False), plain, plain]
    assert storage_bytes(weights["count"]) == LONGS
    state = checkpoint.root.state
    assert (state["rate"], state["missing"]) == (16000, None) and "count" not in state
    assert [*state["CONSTANTS"]] == ["c3"]
    part = state["CONSTANTS"]["c3"]
    assert (part.offset, part.shape) == (4, (2,))
    assert str(checkpoint.root.global_) == "__torch__.Net" and not checkpoint.warnings


@pytest.mark.parametrize("scale", [0.5, 2])
def test_quantized(scale: float) -> None:
    more = {"isQuantized": True, "scale": scale, "zeroPoint": "3", "requiresGrad": False}
    said = {"mainModule": {"parameters": [{"name": "w"}]}}  # what has its default is left out
    checkpoint = read(
        archive(said | {"tensors": [tensor("tensors/0", (24,), "UINT8", **more)]}, None)
    )
    assert checkpoint.weights["w"].dtype.name == "quint8"
    record = dequantize(checkpoint).weights["w"].storage
    assert record is not None
    floats = struct.unpack("<24f", b"".join(map(bytes, stream(record.record.locate()))))
    assert floats == tuple((value - 3) * scale for value in FLOATS)


def test_attributes_that_are_tensors() -> None:
    said = model()
    said["mainModule"]["attributes"] = [{"type": "Tensor", "name": "plain", "id": "0"}]
    pickled = b"\x80\x02ctorch.jit._pickle\nbuild_tensor_from_id\nK\x03\x85R\x85."
    plain = read(archive(said, pickled)).root.state["plain"]
    assert (plain.offset, plain.shape) == (4, (2,))
    with pytest.raises(FormatError, match=r"attributes\.pkl does not contain a tuple"):
        read(archive(model(), pickle.dumps({"a": 1}, 2)))


DEEP: dict[str, Any] = {"name": "m"}
for _ in range(200):
    DEEP = {"name": "m", "submodules": [DEEP]}


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (change("mainModule", to=[]), FormatError, "lacks the required field 'mainModule'"),
        (change("tensors", to={}), FormatError, "lacks the required field 'tensors'"),
        (change("tensors", to=[3]), FormatError, "values that are not objects"),
        (change("tensors", 0, "dims", to=["x"]), FormatError, "instead of an integer"),
        (change("tensors", 0, "dims", to=[2.0, 3]), FormatError, "instead of an integer"),
        (change("tensors", 0, "dims", to=["-2", "-3"]), TensorError, "must be non-negative integers"),
        (change("tensors", 0, "dims", to=["200", "3"]), TensorError, "storage has 24"),
        (change("tensors", 0, "dataType", to="STRING"), UnsupportedError, "STRING"),
        (change("tensors", 0, "isQuantized", to=True), UnsupportedError, "FLOAT"),
        (change("tensors", 0, "offset", to="x"), FormatError, "instead of an integer"),
        (change("tensors", 0, "data", "key", to="tensors/9"), CorruptError, "missing"),
        (change("tensors", 0, "data", "key", to="../model.json"), CorruptError, "missing"),
        (change("tensors", 2, "device", to="cuda:0"), CorruptError, "two devices"),
        (change("mainModule", "parameters", 0, "tensorId", to="4"), CorruptError, "entry 4 of a list of 4 entries"),
        (change("mainModule", "parameters", 0, "tensorId", to="-1"), CorruptError, "entry -1"),
        (change("mainModule", "parameters", 0, "name", to=3), FormatError, "lacks the required field 'name'"),
        (change("mainModule", "attributes", 0, "id", to="2"), CorruptError, "entry 2 of a list of 2 entries"),
        (change("mainModule", "submodules", 0, to=DEEP), LimitError, "json_depth"),
    ],
)  # fmt: skip
def test_refused(
    edit: Callable[[dict[str, Any]], None], error: type[CkptkitError], said: str
) -> None:
    broken = model()
    edit(broken)
    with pytest.raises(error, match=said):
        read(archive(broken))


@pytest.mark.parametrize("scale", ["0.5", None, True, [1]])
def test_a_scale_that_is_no_number(scale: Any) -> None:
    said = tensor("tensors/0", (24,), "UINT8", isQuantized=True, scale=scale)
    with pytest.raises(FormatError, match="a quantized tensor whose scale is not a number"):
        read(archive({"mainModule": {}, "tensors": [said]}))
