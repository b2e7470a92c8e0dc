"""digest: of the elements, whatever their layout on disk."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

from ckptkit.analysis.digests import sha256_each, tensor_ids
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError, TruncatedError
from ckptkit.core.tensor import Storage, Tensor
from tests.analysis.made import tensor


def sha256(tensor: Tensor) -> str | None:
    return next(sha256_each([("", tensor)]))


def tensor_id(tensor: Tensor) -> str:
    ((_, _, found),) = tensor_ids([("", tensor)])
    if isinstance(found, TensorError):
        raise found
    return found


def test_sha256_is_of_the_contiguous_elements() -> None:
    assert sha256(tensor(1, 2, 3)) == hashlib.sha256(struct.pack("<3f", 1, 2, 3)).hexdigest()


def test_big_endian_bytes_are_turned() -> None:
    data = struct.pack(">2f", 1, 2)
    big = Tensor(
        Storage(Range(Memory(data), 0, 8), big_endian=True), BY_NAME["float32"], (2,), (1,)
    )
    assert sha256(big) == sha256(tensor(1, 2))


@pytest.mark.parametrize(
    ("dtype", "stride", "facts"),
    [
        ("quint4x2", (1, 2), {}),
        ("float8_e5m2", (2, 1), {"neg": True}),
        ("float32", (), {"layout": "sparse_coo"}),
        ("bool", (2, 1), {"neg": True}),
    ],
)
def test_what_has_no_plain_bytes_has_no_digest(
    dtype: str, stride: tuple[int, ...], facts: dict[str, Any]
) -> None:
    memory = Storage(Range(Memory(bytes(16)), 0, 16))
    odd = Tensor(memory, BY_NAME[dtype], (2, 2), stride, **facts)
    assert sha256(odd) is None
    with pytest.raises(TensorError):
        tensor_id(odd)


def test_digests_of_many_come_in_order_and_name_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.compute.workers.BATCH", 64)
    monkeypatch.setattr("ckptkit.compute.workers.processors", lambda: 4)
    many = [(f"w{n}", tensor(*range(n % 9 + 1))) for n in range(200)]
    done: list[int] = []
    assert list(sha256_each(many, done.append)) == [sha256(each) for _, each in many]
    assert done == [each.nbytes for _, each in many]
    assert [found for _, _, found in tensor_ids(many)] == [tensor_id(each) for _, each in many]
    cut = Tensor(Storage(Range(Memory(b""), 0, 4)), BY_NAME["float32"], (1,), (1,))
    with pytest.raises(TruncatedError, match=r"layer\.bias: ") as failure:
        list(sha256_each([*many, ("layer.bias", cut)]))
    assert failure.value.exit_code == 3
