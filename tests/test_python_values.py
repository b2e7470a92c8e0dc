"""Values of tensors and entries of checkpoints, read from Python; values of Python, saved."""

from __future__ import annotations

import argparse
import collections
import copy
import io
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import ArgumentError, PositionError, TensorError
from ckptkit.formats import read
from tests.conftest import ENVIRONMENT
from tests.pickles.making import saved
from tests.torch_equality import same

VALUES = torch.arange(5 * 7 * 6.0).reshape(5, 7, 6)


class Counting(Memory):
    """Notes which bytes are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.seen: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.seen.append((offset, length))
        return super().read(offset, length)


INDICES: list[Any] = [
    (slice(0, 3), slice(None), 4), 3, -1, (), ..., (..., 2), (1, ..., -2),
    (slice(None, None, 2), slice(5, 1, -2)), (slice(4, 4),), (slice(-100, 100), 0, 0),
    (None, 0, slice(None), None), (2, 3, 4),
    (slice(None, None, -1), slice(None, None, -1), slice(None, None, -1)), np.int64(2),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("turned", [False, True])
def test_slices_are_those_of_numpy(index: Any, turned: bool) -> None:
    value = VALUES.transpose(0, 2) if turned else VALUES
    ck = ckptkit.open(saved({"w": value}))
    index = (2, 3, 1) if turned and isinstance(index, tuple) and index == (2, 3, 4) else index
    ours, theirs = ck.weights["w"][index], value.numpy()[index]
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert np.array_equal(ours, theirs)


def test_a_slice_reads_its_bytes_only() -> None:
    """Nothing before, after, or between rows that are far apart."""
    value = torch.arange(64 * 1024 * 8, dtype=torch.float32).reshape(64, 1024, 8)
    source = Counting(saved({"w": value}))
    tensor = read(source).weights["w"]
    storage = tensor.storage
    assert storage is not None
    place = storage.record.locate().offset  # type: ignore[union-attr]
    row = 1024 * 8 * 4
    source.seen.clear()
    assert np.array_equal(tensor[3, 5:9], value[3, 5:9].numpy())
    assert source.seen == [(place + 3 * row + 5 * 32, 4 * 32)]
    source.seen.clear()
    assert np.array_equal(tensor[0:3, :, 5], value[0:3, :, 5].numpy())
    assert sum(length for _, length in source.seen) <= 3 * row
    assert max(at + length for at, length in source.seen) <= place + 3 * row
    source.seen.clear()
    assert np.array_equal(tensor[::32, 0, 0], value[::32, 0, 0].numpy())  # a megabyte apart
    assert sum(length for _, length in source.seen) == 2 * 4


@pytest.mark.parametrize(
    ("index", "kind"),
    [(5, PositionError), ((0, 0, 0, 0), PositionError), ((..., ...), PositionError), ([0], TypeError),
     ("a", TypeError), (1.0, TypeError), (True, TypeError), (slice("a"), TypeError),
     (slice(0, 3, 0), TypeError)],
)  # fmt: skip
def test_an_index_that_numpy_would_not_take(index: Any, kind: type[Exception]) -> None:
    tensor = ckptkit.open({"w": VALUES}).weights["w"]
    with pytest.raises(kind) as caught:
        tensor[index]
    assert isinstance(caught.value, ckptkit.CkptkitError)


def test_a_tensor_behaves_as_one() -> None:
    tensor = ckptkit.open(saved({"w": VALUES, "s": torch.tensor(3)})).weights
    assert len(tensor["w"]) == 5
    assert [row.shape for row in tensor["w"]] == [(7, 6)] * 5
    assert np.asarray(tensor["w"]).sum() == VALUES.sum().item()
    assert np.asarray(tensor["w"], dtype="f8").dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        tensor["w"].__array__(copy=False)  # as np.asarray(t, copy=False) of numpy 2 calls it
    assert tensor["w"].__array__(np.dtype("f8"), copy=True).dtype == np.float64
    assert torch.equal(tensor["w"].torch(), VALUES)
    assert torch.equal(tensor["s"].torch("cpu"), torch.tensor(3))
    assert tensor["s"][()] == 3 and tensor["s"].numpy().shape == ()
    assert bool(tensor["s"]) is True
    with pytest.raises(TypeError):
        len(tensor["s"])


@pytest.mark.parametrize(
    "name",
    ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64",
     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "uint16"],
)  # fmt: skip
def test_numpy_of_each_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    value = torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4)
    tensor = ckptkit.open(saved({"w": value})).weights["w"]
    assert tensor.numpy().dtype.name == name
    assert np.array_equal(
        tensor.numpy().astype("c16"), value.to(torch.complex128).numpy()
        if name.startswith("complex") else value.to(torch.float64).numpy().astype("c16"),
    )  # fmt: skip
    back = ckptkit.open({"w": tensor.numpy()}).weights["w"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.torch().view(torch.uint8), value.view(torch.uint8))


def test_what_numpy_lacks_names_torch() -> None:
    ck = ckptkit.open(
        saved({"h": torch.ones(2, dtype=torch.complex32), "m": torch.empty(2, device="meta")})
    )
    with pytest.raises(TensorError) as wrong:
        ck.weights["h"].numpy()
    assert ".torch()" in str(wrong.value.hint)
    for read_all in (ck.weights["m"].numpy, ck.weights["m"].torch):
        with pytest.raises(TensorError, match="meta"):
            read_all()


def test_dtypes_equal_those_of_torch_and_numpy() -> None:
    weights = ckptkit.open({"b": torch.ones(2).bfloat16(), "f": torch.ones(2)}).weights
    kind = weights["b"].dtype
    assert kind == torch.bfloat16 and kind == "bfloat16" and kind == "torch.bfloat16"
    assert kind != torch.float16 and kind != "float32" and kind != 16 and kind != weights["f"].dtype
    assert weights["f"].dtype == np.float32 and weights["f"].dtype == np.dtype("f4")
    assert {kind: 1}["bfloat16"] == 1 and repr(kind) == "<DType bfloat16>"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make", [torch.tensor, torch.as_tensor, torch.asarray, torch.from_dlpack],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_torch_takes_a_tensor_whole(make: Any) -> None:
    """Not row by row, as it takes other sequences."""
    values = {
        "w": VALUES, "b": torch.ones(3).bfloat16(), "s": torch.tensor(3),
        "c": torch.ones(2, dtype=torch.complex64), "p": nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    weights = ckptkit.open(values).weights
    for name, value in values.items():
        made = make(weights[name])
        assert made.dtype == value.dtype and torch.equal(made, value.detach())
    assert np.array_equal(np.from_dlpack(weights["w"]), VALUES.numpy())


def test_a_tensor_has_no_methods_of_torch() -> None:
    tensor = ckptkit.open({"w": VALUES}).weights["w"]
    assert tensor.ndim == 3
    assert not hasattr(tensor, "mean") and not hasattr(tensor, "grad")
    assert torch.equal(copy.deepcopy(tensor).torch(), VALUES)


def test_hints_show_in_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptkitError) as caught:
        ckptkit.open(nn.Linear(2, 2))  # type: ignore[arg-type]
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.endswith("\nhint: pass the model's state_dict()\n")


def test_a_bomb_is_not_read() -> None:
    tensor = ckptkit.open(saved({"w": torch.ones(1).expand(1 << 40)})).weights["w"]
    for read_all in (tensor.numpy, tensor.torch):
        with pytest.raises(TensorError, match="EXPANSION"):
            read_all()
    assert tensor[5:7].tolist() == [1, 1]


def test_entries_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them for each."""
    from ckptkit.core import checkpoint

    ck = ckptkit.open({f"w{n}": torch.ones(1) for n in range(300)})
    seen = [0]

    def counted(node: Any) -> Any:
        for pair in children(node):
            seen[0] += 1
            yield pair

    children = checkpoint.children
    monkeypatch.setattr(checkpoint, "children", counted)
    assert len(ck.items()) == len(dict(ck)) == 300
    assert seen[0] <= 2 * 300


def test_entries(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    torch.save(
        {"model": model.state_dict(), "epoch": 3, 7: "x", "a.b": {"c": 1}}, tmp_path / "a.pth"
    )
    with ckptkit.open(tmp_path / "a.pth") as ck:
        assert list(ck) == ck.keys() == ["model", "epoch", 7, "a.b"]
        assert ck["epoch"] == 3 and ck[7] == "x" and ck["a.b.c"] == 1
        assert repr(ck["model"]["weight"]) == "<Tensor float32 [3]>"
        assert ck["model.running_mean"].numpy().tolist() == [0, 0, 0]
        assert "model" in ck and "nope" not in ck and 3 not in ck
        assert dict(ck.items())["a.b"] == {"c": 1} and ck.get("epoch") == 3
        assert ck.get("nope") is None and ck.get("a.b.d", 5) == 5
        with pytest.raises(KeyError) as caught:
            ck["weight"]
        assert "ck.weights['weight']" in caught.value.hint  # type: ignore[attr-defined]
        for odd in ([], None, 1.5, ("model",)):
            with pytest.raises(KeyError):
                ck[odd]
        assert repr(ck.items()[0][1]) == repr(ck["model"])
    with pytest.raises(ckptkit.CkptkitError, match=r"(?s)was closed.*hint: .*`with`"):
        ck["model.weight"].numpy()
    with pytest.raises(ckptkit.CkptkitError, match=r"(?s)was closed.*hint: .*`with`"):
        ckptkit.save(ck, tmp_path / "b.pth")
    assert not (tmp_path / "b.pth").exists()


def sources(path: Path) -> Iterator[Any]:
    yield str(path)
    yield path
    yield path.read_bytes()
    yield bytearray(path.read_bytes())
    yield io.BytesIO(path.read_bytes())
    yield path.open("rb")
    yield ckptkit.open(path)
    yield torch.load(path, weights_only=True)


def test_every_kind_of_source(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"w": VALUES}, path)
    for number, source in enumerate(sources(path)):
        ck = ckptkit.open(source)
        assert np.array_equal(ck.weights["w"][1], VALUES[1].numpy())
        ckptkit.save(ck, tmp_path / f"{number}.safetensors")
        assert torch.equal(ckptkit.load(tmp_path / f"{number}.safetensors")["w"], VALUES)
        assert ckptkit.cast(source, "float16").weights["w"].dtype.name == "float16"
        if hasattr(source, "close"):
            source.close()


def test_saving_to_a_file_object(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": VALUES, "epoch": 3}, tmp_path / "a.pth")
    done = ckptkit.save(tmp_path / "a.pth", buffer)
    assert (done.format, done.path) == ("torch-zip", "<stream>")
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()))["w"], VALUES)
    with open(tmp_path / "b", "wb") as file:
        assert ckptkit.save({"w": VALUES}, file, format="safetensors").path == str(tmp_path / "b")
    assert torch.equal(ckptkit.load(tmp_path / "b")["w"], VALUES)


def test_file_objects_that_nothing_is_saved_to(tmp_path: Path) -> None:
    made = {"w": VALUES}
    for target, options, said in (
        (io.StringIO(), {"format": "safetensors"}, "destination: expected a binary file object"),
        (io.BytesIO(), {}, "<stream>: the suffix does not name a format"),
        (io.BytesIO(), {"shard_size": 10}, "a stream is a single file"),
        (io.BytesIO(), {"format": "dcp"}, "a stream is a single file"),
    ):
        with pytest.raises(ckptkit.CkptkitError, match=said):
            ckptkit.save(made, target, **options)
        assert target.getvalue() in (b"", "")
    unwritten = io.BytesIO()
    assert ckptkit.save(made, unwritten, format="safetensors", dry_run=True).published is None
    assert unwritten.getvalue() == b""


class Pipe(io.BytesIO):
    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("underlying stream is not seekable")


@pytest.mark.parametrize("file", [io.StringIO("text"), Pipe(b"x"), io.BytesIO(b"not one")])
def test_file_objects_that_are_none(file: Any) -> None:
    with pytest.raises(ValueError) as caught:
        ckptkit.open(file)
    assert isinstance(caught.value, ckptkit.CkptkitError) and str(caught.value)


EVERYTHING: dict[str, Any] = {
    "model": nn.BatchNorm1d(3).state_dict(), "w": VALUES, "view": VALUES[0].t(),
    "parameter": nn.Parameter(torch.ones(2)), "array": np.arange(70_000.0).reshape(7, -1),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big": np.arange(3, dtype=">i4").astype("=i4"), "empty": np.zeros((0, 3)),
    "scalars": [np.float64(3.5), np.int64(4), 2 + 3j, None, True, b"bytes", "text"],
    "counter": collections.Counter("abca"),
    "default": collections.defaultdict(list, a=[torch.ones(1)]),
    "ordered": collections.OrderedDict(a=1), "namespace": argparse.Namespace(lr=0.1),
    "sparse": torch.eye(3).to_sparse(), "set": {1, 2}, "dtype": torch.float16,
    "device": torch.device("cpu"), "size": torch.Size([2, 3]), "tuple": ((1, [2]), torch.ones(2)),
    "half": torch.ones(2, dtype=torch.bfloat16), "conj": torch.tensor([1 + 2j]).conj(),
    "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8),
}  # fmt: skip


@pytest.mark.parametrize("name", [*EVERYTHING, ""])
def test_saved_values_are_those_of_torch_save(name: str, tmp_path: Path) -> None:
    value = {name: EVERYTHING[name]} if name else EVERYTHING
    ckptkit.save(value, tmp_path / "ours.pth")
    torch.save(value, tmp_path / "theirs.pth")
    made, expected = (
        torch.load(tmp_path / each, weights_only=False) for each in ("ours.pth", "theirs.pth")
    )
    for key, array in expected.items():
        if isinstance(array, np.ndarray):
            assert made[key].dtype == array.dtype
            made[key], expected[key] = torch.from_numpy(made[key]), torch.from_numpy(array)
    same(made, expected)


def test_sharing_and_cycles_stay(tmp_path: Path) -> None:
    weight = torch.ones(3)
    value: dict[str, Any] = {"a": weight, "b": weight, "rows": [weight[1:]]}
    value["itself"] = value
    ckptkit.save(value, tmp_path / "a.pth")
    made = torch.load(tmp_path / "a.pth", weights_only=False)
    assert made["itself"] is made and made["a"] is made["b"]
    made["a"][1] = 5
    assert made["rows"][0].tolist() == [5, 1]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
def test_a_mapping_of_arrays_to_any_format(suffix: str, tmp_path: Path) -> None:
    value = {"a": np.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    ckptkit.save(value, tmp_path / f"x{suffix}")
    with ckptkit.open(tmp_path / f"x{suffix}") as ck:
        assert {name: tensor.numpy().tolist() for name, tensor in ck.weights.items()} == {
            "a": [[0, 1, 2], [3, 4, 5]],
            "b": [1, 1],
        }


def test_tensors_of_checkpoints_in_a_mapping(tmp_path: Path) -> None:
    torch.save({"w": VALUES}, tmp_path / "a.pth")
    with ckptkit.open(tmp_path / "a.pth") as ck:
        ckptkit.save({"x": ck.weights["w"], "y": {"z": ck}, "t": torch.ones(1)}, tmp_path / "b.pth")
    made = torch.load(tmp_path / "b.pth")
    assert torch.equal(made["x"], VALUES) and torch.equal(made["y"]["z"]["w"], VALUES)
    assert made["x"].data_ptr() == made["y"]["z"]["w"].data_ptr()


class Own:
    def __init__(self) -> None:
        self.weight = torch.ones(1)


@pytest.mark.parametrize("value", [lambda: 1, sys, Own(), (each for each in ())])
def test_what_cannot_be_saved(value: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        ckptkit.save({"model": {"x": value}}, tmp_path / "a.pth")
    assert "state_dict()" in str(caught.value.hint)
    assert not (tmp_path / "a.pth").exists()


def test_with_value_and_without(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "epoch": 3, "log": [1, 2]}, tmp_path / "a.pth")
    ck = ckptkit.open(tmp_path / "a.pth")
    made = ck
    for path, value in {
        "epoch": 9, "model.bias": torch.zeros(2), "optimizer": {"lr": np.float64(0.5)},
        "model.new.weight": np.ones(3, "f4"), "log.1": "two",
    }.items():  # fmt: skip
        made = made.with_value(path, value)
    made = made.without("model.weight")
    ckptkit.save(made, tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth", weights_only=False)
    assert found["epoch"] == 9 and found["log"] == [1, "two"] and found["optimizer"] == {"lr": 0.5}
    assert list(found["model"]) == ["bias", "new.weight"]
    assert found["model"]._metadata == model.state_dict()._metadata
    assert ck["epoch"] == 3
    with pytest.raises(KeyError):
        ck.without("nope")
    with pytest.raises(ckptkit.CkptkitError):
        ck.with_value("", 1)
    with pytest.raises(ckptkit.CkptkitError):
        ck.without("epoch.x.y")


def test_map_is_torchs_arithmetic(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(3, 4))
    torch.save(
        {"a.weight": weight, "tied.weight": weight, "a.bias": torch.ones(3)}, tmp_path / "a.pth"
    )
    ck = ckptkit.open(tmp_path / "a.pth")
    made = ck.map(lambda t: (t * 2).half().t(), keys="*.weight")
    assert made.weights["a.weight"].shape == (4, 3)
    ckptkit.save(made, tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth")
    assert torch.equal(found["a.weight"], (weight * 2).half().t())
    assert found["a.weight"].data_ptr() == found["tied.weight"].data_ptr()
    assert torch.equal(found["a.bias"], torch.ones(3))
    twice = made.map(lambda t: t.numpy().astype("f4") + 1)  # what the meta device cannot do
    assert np.allclose(
        twice.weights["a.weight"].numpy(), (weight * 2).half().t().detach().float() + 1
    )
    assert made.map(lambda t: t[:0]).weights["a.bias"].numpy().shape == (0,)


def test_map_refuses() -> None:
    ck = ckptkit.open({"w": VALUES})
    with pytest.raises(ckptkit.CkptkitError, match="no weight matches"):
        ck.map(lambda t: t, keys="x*")
    with pytest.raises(TypeError, match="w: the function returned a list"):
        ck.map(lambda t: [1])
    with pytest.raises(TypeError, match="function: expected a function"):
        ck.map("half")  # type: ignore[arg-type]
    counter = iter(range(9))
    made = ck.map(lambda t: t[: next(counter)])
    with pytest.raises(
        TypeError, match=r"same dtype and shape in each call, but returned float32 .*, then float32"
    ):
        made.weights["w"].numpy()
    with pytest.raises(ZeroDivisionError):  # what the function itself raises
        ck.map(lambda t: 1 // 0)


PEAK = """
import resource, sys, torch, ckptkit
big, many = int(sys.argv[1]), int(sys.argv[2])
import threading
def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
ck = ckptkit.open(sys.argv[3])
warm = ck.map(lambda t: t + 1, keys="small")
warm.weights["small"].numpy()
before = rss()
made = ck.map(lambda t: t + 1, keys="big*")
ckptkit.save(made, sys.argv[4])
print((rss() - before) / big)
"""


def test_map_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A weight and what is made of it, whatever the number of weights."""
    big, many = 32 << 20, 4
    value = {f"big{n}": torch.ones(big // 4) for n in range(many)} | {"small": torch.ones(4)}
    torch.save(value, tmp_path / "a.pth")
    words = [str(big), str(many), str(tmp_path / "a.pth"), str(tmp_path / "b.pth")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *words],
        capture_output=True, encoding="utf-8", env=ENVIRONMENT, timeout=120, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 3.2
    assert torch.equal(torch.load(tmp_path / "b.pth")["big3"], torch.full((big // 4,), 2.0))


def test_reprs_are_short(tmp_path: Path) -> None:
    torch.save(
        {"model": nn.Linear(2, 2).state_dict(), "s": {1}, "p": nn.Parameter(torch.ones(2))},
        tmp_path / "a.pth",
    )
    ck = ckptkit.open(tmp_path / "a.pth")
    done = ckptkit.save(ck, tmp_path / "b.safetensors")
    tensor = ck.weights["weight"]
    shown = [ck, tensor, tensor.storage, ck.source, ck["s"], ck["p"], ck.selection, done, done.plan,
             ckptkit.diff(ck, ck), *done.plan.files]  # fmt: skip
    assert [len(repr(each)) < 300 for each in shown] == [True] * len(shown), shown
    assert repr(ck["p"]) == "<Parameter float32 [2]>"
    assert "b'" not in "".join(map(repr, shown)) and "0x" not in "".join(map(repr, shown))


def test_weights_are_changed_by_with_value_alone() -> None:
    """An assignment would change nothing that is saved."""
    ck = ckptkit.open({"model": {"a.w": torch.ones(2), "b": torch.ones(2)}, "epoch": 3})
    weights: Any = ck.weights
    changes: list[Callable[[], object]] = [
        lambda: weights.__setitem__("a.w", np.zeros(2)), lambda: weights.__delitem__("b"),
        lambda: weights.update({"c": 1}), lambda: weights.pop("b"), lambda: weights.clear(),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(TypeError, match="cannot change a checkpoint in place"):
            change()
    assert list(copy.copy(weights)) == list(weights) == ["a.w", "b"]
    new = ck.with_value("model.a.w", np.zeros(2)).without("model.b")
    assert new.weights["a.w"].numpy().tolist() == [0, 0] and list(new.weights) == ["a.w"]
