"""Evaluate NumPy arrays and scalars in pickles without importing NumPy.

NumPy pickles an array as the call ``numpy.core.multiarray._reconstruct(ndarray, (0,), b"b")``. The
array's BUILD state is ``(version, shape, dtype, is_fortran, data)``. With protocol 5, the call is
``_frombuffer(data, dtype, shape, order[, axes])``. Since NumPy 2, the module is ``numpy._core``.

NumPy pickles a dtype as the call ``numpy.dtype("f4", False, True)``. The dtype's BUILD state is
``(version, byte order, ...)``. A scalar is ``numpy.core.multiarray.scalar(dtype, data)``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from struct import unpack

from ckptkit.core.bytesource import Extent, Memory, Range
from ckptkit.core.dtypes import BY_NUMPY, DType
from ckptkit.core.errors import CorruptError, FormatError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.tree import ByteString, Global, Node, Object, StoredBytes

_NAME = re.compile("[a-z][0-9]{1,3}")
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_STRUCT = {
    "float16": "e", "float32": "f", "float64": "d", "bool": "?", "complex64": "ff",
    "complex128": "dd",
}  # fmt: skip


def built(target: Object, state: Node) -> bool:
    """Set `target.tensor` if `target` is a `_reconstruct` call for a numeric array.

    Return False: the object does not become a plain tensor.
    """
    if isinstance(state, tuple) and len(state) in (4, 5):
        shape, dtype, fortran, data = state[-4:]
        if not isinstance(shape, tuple):
            raise FormatError("the pickle of a numpy array contains no shape")
        target.tensor = _array(dtype, shape, bool(fortran), data)
    return False


def from_buffer(made: Global, args: tuple[Node, ...]) -> Node:
    """Return the array that ``_frombuffer(data, dtype, shape, order[, axes])`` makes.

    If ``order`` is "K", ``axes`` permutes the dimensions.
    """
    if not 4 <= len(args) <= 5 or not isinstance(args[2], tuple):
        return Object(made, args)
    tensor = _array(args[1], args[2], args[3] == "F", args[0])
    if tensor is not None and len(args) == 5 and args[4] is not None:
        tensor = _transposed(tensor, args[4])
    return Object(made, args, tensor=tensor)


def _transposed(tensor: Tensor, axes: Node) -> Tensor:
    if not isinstance(axes, tuple) or not all(type(axis) is int for axis in axes):
        raise FormatError("the axes of a numpy array are not integers")
    if sorted(axes) != list(range(len(tensor.shape))):
        raise FormatError("the axes of a numpy array are not a permutation")
    shape, stride = (tuple(each[axis] for axis in axes) for each in (tensor.shape, tensor.stride))
    return replace(tensor, shape=shape, stride=stride)


def scalar(made: Global, args: tuple[Node, ...]) -> Node:
    """Return an Object whose `value` is the scalar that ``scalar(dtype, data)`` makes."""
    node = Object(made, args)
    kind = _dtype(args[0]) if len(args) == 2 else None
    data = _extent(args[1]) if len(args) == 2 else None
    if kind is not None and data is not None:
        dtype, big_endian = kind
        if data.length != dtype.itemsize or not isinstance(data, Range):
            raise CorruptError(f"a numpy scalar of {dtype} has {data.length} bytes")
        node.value = _value(dtype, big_endian, data.read())
    return node


def _value(dtype: DType, big_endian: bool, data: bytes) -> bool | int | float | complex:
    if dtype.kind == "int":
        return int.from_bytes(
            data, "big" if big_endian else "little", signed=not dtype.name.startswith("u")
        )
    values = unpack((">" if big_endian else "<") + _STRUCT[dtype.name], data)
    return complex(*values) if dtype.kind == "complex" else values[0]


def _array(dtype: Node, shape: tuple[int, ...], fortran: bool, data: Node) -> Tensor | None:
    kind, extent = _dtype(dtype), _extent(data)
    if kind is None or extent is None:
        return None
    check("rank", len(shape), "dimensions of an array")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise FormatError("a numpy array has an impossible shape")
    if prod(shape) * kind[0].itemsize != extent.length:
        raise CorruptError(
            f"a numpy array of shape {shape} and {kind[0]} has {extent.length:,} bytes"
        )
    stride = contiguous_stride(shape[::-1])[::-1] if fortran else contiguous_stride(shape)
    return Tensor(Storage(extent, big_endian=kind[1]), kind[0], shape, stride, kind="ndarray")


def _dtype(node: Node) -> tuple[DType, bool] | None:
    """Return the element type and whether it is big-endian. Return None for non-numeric types."""
    if not isinstance(node, Object) or node.global_ is None or str(node.global_) != "numpy.dtype":
        return None
    name = node.args[0] if isinstance(node.args, tuple) and node.args else None
    if len(node.steps) > 1 or not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    kind, size = _KINDS.get(name[0]), int(name[1:])
    found = BY_NUMPY.get(kind if kind == "bool" else f"{kind}{size * 8}")
    state = node.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
    return None if found is None else (found, order == ">")


def _extent(node: Node) -> Extent | None:
    """Return the location of an array's bytes. Return None for an array of Python objects."""
    if isinstance(node, StoredBytes):
        return node.extent
    data = node.data if isinstance(node, ByteString) else node
    if isinstance(data, str) and data.isascii():  # a str of Python 2
        data = data.encode("ascii")
    if isinstance(data, (bytes, bytearray)):
        return Range(Memory(bytes(data), "<array>"), 0, len(data))
    return None
