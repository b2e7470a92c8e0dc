"""numpy arrays and scalars in pickles against numpy."""

from __future__ import annotations

import io
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest

from ckptkit import formats
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import TABLE
from ckptkit.core.errors import CorruptError, FormatError, LimitError
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Node, Object, StoredBytes
from ckptkit.pickles.machine import LARGE
from tests.pickles.making import emit, machine, same

PLAIN = [row.numpy for row in TABLE if row.numpy]
PROTOCOLS = range(6)


def tensor_of(node: Node) -> Tensor:
    assert isinstance(node, Object)
    assert node.tensor is not None
    assert node.tensor.kind == "ndarray"
    return node.tensor


def array_of(tensor: Tensor) -> Any:
    """Return the described array, read by numpy."""
    assert tensor.storage is not None
    data = b"".join(stream(tensor.storage.record.locate()))
    dtype = np.dtype(tensor.dtype.numpy).newbyteorder(">" if tensor.storage.big_endian else "<")
    stride = [each * dtype.itemsize for each in tensor.stride]
    return np.ndarray(tensor.shape, dtype, data, tensor.offset * dtype.itemsize, stride)


def check(array: Any, protocol: int) -> None:
    made = array_of(tensor_of(machine(pickle.dumps(array, protocol))))
    assert made.shape == array.shape
    assert made.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert (
        np.ascontiguousarray(made).astype(array.dtype).tobytes()
        == np.ascontiguousarray(array).tobytes()
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_plain_type(protocol: int) -> None:
    numbers = (np.arange(12) % 5).reshape(3, 4)
    for dtype, order in product(PLAIN, "<>"):
        check(numbers.astype(np.dtype(dtype).newbyteorder(order)), protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", [
    np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1), np.arange(10)[::2], np.array(5), np.zeros((0, 3)),
    np.zeros((3, 0), order="F"), np.arange(5)[::-1], np.broadcast_to(np.arange(3), (2, 3)), np.ones((1, 1, 1)),
    np.array([np.nan, -0.0, np.inf], np.float16), np.arange(30_000, dtype=np.int64),
], ids=range(12))  # fmt: skip
def test_every_order(array: Any, protocol: int) -> None:
    check(array, protocol)


def test_a_long_array_stays_in_the_file() -> None:
    array = np.arange(LARGE, dtype=np.uint8)
    made = machine(pickle.dumps(array, 3))
    assert isinstance(made.state[-1], StoredBytes)
    check(array, 3)


def test_an_array_of_python_2() -> None:
    """As Python 2.7 and numpy 1.16 write it; the bytes are a str, ASCII or not."""
    for data in (b"\0\0\x80?\0\0\0@", b"abcdefgh"):
        text = (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x02"
            b"\x85cnumpy\ndtype\nq\x04U\x02f4K\x00K\x01\x87Rq\x05(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            b"\x89U\x08" + data + b"tb."
        )
        assert array_of(tensor_of(machine(text))).tobytes() == data
        assert pickle.loads(emit(machine(text)).data, encoding="latin1").tobytes() == data
        assert pickle.loads(text, encoding="latin1").tobytes() == data


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", [
    np.array(["a", None], dtype=object), np.array(["a", "bc"]), np.array([b"a", b"bc"]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.array([1], dtype="m8[s]"), np.array([b"x"], dtype="V3"),
    np.ones(2, np.longdouble), np.ones(2, np.clongdouble),
], ids=range(9))  # fmt: skip
def test_what_is_no_plain_number_stays_opaque(array: Any, protocol: int) -> None:
    made = machine(pickle.dumps(array, protocol))
    assert isinstance(made, Object)
    assert made.tensor is None
    again = pickle.loads(emit(made).data)
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes() or array.dtype == object


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scalars_show_their_value(protocol: int) -> None:
    for dtype, number in product(PLAIN, (0, 1, 100)):
        scalar = np.dtype(dtype).type(number)
        made = machine(pickle.dumps(scalar, protocol))
        assert isinstance(made, Object)
        assert same(made.value, scalar.item()), (dtype, number)
        assert pickle.loads(emit(made).data) == scalar, (dtype, number)


def test_scalars_of_other_orders_and_signs() -> None:
    for value in (
        np.int16(-2), np.uint64(2**64 - 1), np.float32(-0.5), np.complex64(1 - 2j),
        np.int64(-(2**63)),
    ):  # fmt: skip
        assert same(machine(pickle.dumps(value)).value, value.item())
        head, data = (
            b"\x80\x03cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n(X\x02\0\0\0",
            value.tobytes()[::-1],
        )
        if value.dtype.kind == "c":
            continue
        big = (
            head
            + value.dtype.str[1:].encode()
            + b"\x89\x88tR(K\x03X\x01\0\0\0>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        )
        assert same(machine(big + b"C%c" % len(data) + data + b"\x86R.").value, value.item())


def test_scalars_that_are_no_numbers_have_no_value() -> None:
    for scalar in (
        np.datetime64("2020-01-01"), np.longdouble(1), np.str_("a"), np.bytes_(b"a"),
        np.void(b"abc"),
    ):  # fmt: skip
        made = machine(pickle.dumps(scalar, 2))
        assert not isinstance(made, Object) or made.value is None


def array_pickle(
    shape: bytes = b"K\x02\x85",
    dtype: bytes = b"f4",
    data: bytes = b"C\x08abcdefgh",
    fortran: bytes = b"\x89",
) -> bytes:
    return (
        b"\x80\x03cnumpy.core.multiarray\n_reconstruct\n)R(K\x01" + shape + b"cnumpy\ndtype\n(X\x02\0\0\0" + dtype
        + b"\x89\x88tR" + fortran + data + b"tb."
    )  # fmt: skip


def test_bytes_that_are_too_many_or_too_few() -> None:
    assert tensor_of(machine(array_pickle())).shape == (2,)
    for data in (b"C\x07abcdefg", b"C\x09abcdefghi", b"C\x00"):
        with pytest.raises(CorruptError, match="shape"):
            machine(array_pickle(data=data))
    with pytest.raises(CorruptError, match="scalar"):
        machine(
            b"\x80\x03cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n(X\x02\0\0\0f4\x89\x88tRC\x03abc\x86R."
        )


def test_shapes_that_are_none() -> None:
    for shape in (b"N", b"]", b"K\x02", b"\x88\x85", b"G" + bytes(8) + b"\x85"):
        with pytest.raises(FormatError):
            machine(array_pickle(shape=shape))
    with pytest.raises(LimitError, match="65 exceeds the limit of 64"):
        machine(array_pickle(shape=b"(" + b"K\x01" * 65 + b"t"))


def test_state_in_a_form_that_is_not_known_stays_opaque() -> None:
    made = machine(b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x02tb.")
    assert isinstance(made, Object)
    assert made.tensor is None


def test_axes_of_a_transposed_array() -> None:
    head = b"\x80\x05cnumpy._core.numeric\n_frombuffer\n(C\x06abcdefcnumpy\ndtype\n"
    head += b"(X\x02\0\0\0u1\x89\x88tRK\x01K\x02K\x03\x87X\x01\0\0\0K"
    tensor = tensor_of(machine(head + b"K\x02K\x00K\x01\x87tR."))
    assert (tensor.shape, tensor.stride) == ((3, 1, 2), (1, 6, 3))
    for axes in (b"K\x02K\x00K\x00\x87", b"K\x00K\x01\x86", b"]", b"NNN\x87"):
        with pytest.raises(FormatError, match="axes"):
            machine(head + axes + b"tR.")


def read(data: bytes) -> Checkpoint:
    return formats.read(Memory(data, "made"))


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_text_of_numpy_that_is_none(order: str) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array("ab", dtype=f"{order}U2"))
    data = buffer.getvalue()[:-4] + b"\xff\xff\xff\xff"
    with pytest.raises(FormatError, match="UTF-32"):
        read(data)
