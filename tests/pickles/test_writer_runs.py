"""Tensors whose code is remembered by their kind, against the same trees without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError, UnsafeGlobalError, UnsupportedError
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.formats.torch_zip import Numbering
from ckptkit.pickles import writer
from ckptkit.pickles.writer import write_pickle
from tests.random_checkpoints import make

PADDING = [f"{n}" for n in range(300)]  # fills the part of the memo that one byte addresses
FLOAT, SHORT = BY_NAME["float32"], BY_NAME["uint16"]


def storage(nbytes: int = 16, device: str = "cpu") -> Storage:
    return Storage(Range(Memory(bytes(nbytes)), 0, nbytes), device)


def matrix(of: Storage | None = None, dtype: DType = FLOAT, **more: Any) -> Tensor:
    return Tensor(of or storage(), dtype, (2, 2), (2, 1), **more)


def written(root: Node) -> tuple[bytes, list[str], int]:
    """The pickle, the devices of its storages in order, and how many tensors are views of them."""
    numbering = Numbering()
    data = write_pickle(root, numbering).data
    return data, [each.device for each in numbering.storages], numbering.tensors


def one_by_one(root: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, list[str], int]:
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_MOST_KINDS", 0)
        return written(root)


def state(entries: dict[Any, Node]) -> OrderedMapping:
    return OrderedMapping({"padding": PADDING, **entries})


SAME, SHARED = matrix(), storage()

TREES: dict[str, Node] = {
    "alike": state({f"{n}": matrix() for n in range(1000, 3500)}),
    "kinds in turns": state({f"{n}": matrix(storage(16 + 4 * (n % 3))) for n in range(1000, 1030)}),
    "devices": state({f"{n}": matrix(storage(16, f"cuda:{n % 2}")) for n in range(1000, 1020)}),
    "parameters": state(
        {f"{n}": matrix(kind="parameter", requires_grad=n % 2 > 0) for n in range(1000, 1020)}
    ),
    "flags": state({
        f"{n}.{conj}": matrix(storage(32), BY_NAME["complex64"], conj=conj, neg=n % 2 > 0)
        for n in range(1000, 1010) for conj in (False, True)
    }),
    "no class of storages": state({f"{n}": matrix(dtype=SHORT) for n in range(1000, 1010)}),
    "the same tensor": state({f"{n}": SAME for n in range(1000, 1010)}),
    "one storage": state({f"{n}": matrix(SHARED) for n in range(1000, 1010)}),
    "no storage": state({f"{n}": Tensor(None, FLOAT, (2,), (1,)) for n in range(1000, 1010)}),
    "other names": state({key: matrix() for key in (1, 2.5, None, True, ("a", 1), "a", "b", "c")}),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_bytes_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(TREES[name]) == one_by_one(TREES[name], monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_generated_trees(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(seed).save(tmp_path / "a.pth")
    root = ckptkit.open(tmp_path / "a.pth").root
    assert written(root) == one_by_one(root, monkeypatch)


def test_kinds_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    root = state({f"{n}": matrix(storage(16 + 4 * (n % 5))) for n in range(1000, 1050)})
    expected = one_by_one(root, monkeypatch)
    monkeypatch.setattr(writer, "_MOST_KINDS", 3)
    assert written(root) == expected


@pytest.mark.parametrize("change", [
    {"shape": (4,), "stride": (1,)}, {"stride": (1, 2)}, {"offset": 1}, {"requires_grad": True},
    {"kind": "parameter"}, {"neg": True}, {"conj": True}, {"dtype": BY_NAME["int32"]},
    {"storage": storage(20, "cuda:1")}, {"storage": storage(24)}, {"storage": None},
])  # fmt: skip
def test_one_that_differs(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a kind is looked at."""
    tensors = [matrix(storage(20)) for _ in range(8)]
    tensors[4] = replace(tensors[4], **change)
    root = state({f"name{n}": each for n, each in enumerate(tensors)})
    assert written(root) == one_by_one(root, monkeypatch)


def test_two_types_of_one_storage_are_refused() -> None:
    """Also where tensors of both were met before."""
    shared = storage()
    others = [matrix(dtype=dtype) for dtype in (FLOAT, BY_NAME["int32"]) for _ in range(3)]
    both = [matrix(shared), matrix(shared, BY_NAME["int32"])]
    root = state({f"name{n}": each for n, each in enumerate([*others, *both])})
    with pytest.raises(TensorError, match="as float32 and as int32"):
        written(root)


def test_a_layout_without_its_parts_is_refused() -> None:
    tensors = [matrix() for _ in range(3)]
    root = state({f"{n}": each for n, each in enumerate([*tensors, matrix(layout="sparse_coo")])})
    with pytest.raises(UnsupportedError, match="whose parts are unknown"):
        written(root)


def test_a_name_that_is_a_file_with_calls_is_refused() -> None:
    call = b"cos\nsystem\n(X\x02\0\0\0idtR."
    root = state({f"{n}": matrix() for n in range(5)} | {call.decode(): matrix()})
    with pytest.raises(UnsafeGlobalError, match="calls that are not allowlisted"):
        written(root)
