"""Storage, TypedStorage and Tensor: descriptions of byte ranges.

A storage is a byte range with a device tag. A tensor is a strided view of a storage. Two tensors
share memory if and only if they refer to the same Storage object. This module reads no data.

Objects of the three classes must not be changed, but only the type checker enforces this rule.
Frozen dataclasses would enforce the rule at run time, but their construction takes 3x as long. A
file may contain 100,000 storages and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from ckptkit.core import hooks
from ckptkit.core.bytesource import Record
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import ArgumentError, TensorError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.text import shape as shape_text

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

Shape = tuple[int, ...]


class Count(int):
    """An integer that returns itself when called: ``t.numel`` and ``t.numel()`` are equal."""

    __slots__ = ()

    def __call__(self) -> int:
        return int(self)


@dataclass(slots=True, eq=False, repr=False)
class Storage:
    """A block of bytes that tensors view.

    * ``record``: the location and the length of the bytes.
    * ``device``: the device from which the storage was saved.
    * ``crc32``: the CRC-32 of the bytes, or None if it is unknown.
    """

    record: Final[Record]
    device: Final[str] = "cpu"
    crc32: Final[int | None] = None
    big_endian: Final[bool] = False

    @property
    def nbytes(self) -> int:
        """Number of bytes of the storage."""
        return self.record.length

    def __repr__(self) -> str:
        return f"<Storage {self.nbytes:,} bytes, {self.device}>"


@dataclass(slots=True, eq=False, repr=False)
class TypedStorage:
    """A storage whose elements have the type `dtype`.

    If `dtype` is None, the elements are bytes (torch's UntypedStorage). Pickled tensors refer to
    typed storages. Few checkpoints contain a typed storage as a value. Torch 0.1 to 0.3 could save
    a view of a storage. The view contains the elements from `start` to `stop`.
    """

    storage: Final[Storage]
    dtype: Final[DType | None]
    start: Final[int] = 0
    stop: Final[int | None] = None

    @property
    def elements(self) -> int:
        if self.stop is not None:
            return self.stop - self.start
        return self.storage.nbytes // (1 if self.dtype is None else self.dtype.itemsize)

    def __repr__(self) -> str:
        return f"<TypedStorage {self.dtype or 'of bytes'} [{self.elements}]>"


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """A strided view of a storage. `shape`, `stride` and `offset` are numbers of elements.

    * ``storage`` is None for a meta tensor.
    * ``kind`` is ``tensor``, ``parameter`` or ``ndarray``.
    * ``layout`` is ``strided``, ``sparse_coo``, ``nested`` and so on. A tensor that is not
      ``strided`` consists of several tensors. For such a tensor, ``storage`` contains the values,
      and ``stride`` is empty.
    * If ``conj`` is True, the elements are the conjugates of the numbers in the storage.
    * If ``neg`` is True, the elements are the negatives of the numbers in the storage.

    ckptkit reads elements on demand. ``t[0:3, :, 5]`` and ``t.numpy()`` return numpy arrays, and
    ``t.torch()`` returns a torch tensor.
    """

    storage: Final[Storage | None]
    dtype: Final[DType]
    shape: Final[Shape]
    stride: Final[Shape]
    offset: Final[int] = 0
    requires_grad: Final[bool] = False
    kind: Final[str] = "tensor"
    layout: Final[str] = "strided"
    conj: Final[bool] = False
    neg: Final[bool] = False

    def __post_init__(self) -> None:
        strided = self.storage if self.layout == "strided" else None
        check_geometry(strided, self.dtype, self.shape, self.stride, self.offset)

    def over(self, storage: Storage) -> Tensor:
        """Return this tensor with another storage of the same length.

        For speed, this method does not validate the new tensor. A file may contain 100,000 tensors.
        """
        made: Any = object.__new__(Tensor)
        made.storage, made.dtype, made.shape = storage, self.dtype, self.shape
        made.stride, made.offset, made.requires_grad = self.stride, self.offset, self.requires_grad
        made.kind, made.layout, made.conj, made.neg = self.kind, self.layout, self.conj, self.neg
        return made  # type: ignore[no-any-return]

    def remade(
        self, record: Record, dtype: DType | None = None, shape: Shape | None = None
    ) -> Tensor:
        """Return a contiguous tensor with the elements in `record`.

        The device, the kind and `requires_grad` do not change. By default, the dtype and the shape
        do not change either.
        """
        shape = self.shape if shape is None else shape
        storage, stride = Storage(record, self.device), contiguous_stride(shape)
        grad, kind = self.requires_grad, self.kind
        return Tensor(storage, dtype or self.dtype, shape, stride, 0, grad, kind)

    def numpy(self) -> Array:
        """Read the elements into a numpy array.

        bfloat16 and 8-bit floats become dtypes of the package ml_dtypes. Raises TensorError if
        numpy cannot represent the tensor.
        """
        array: Array = hooks.numpy(self)
        return array

    def torch(self, device: object = None) -> torch.Tensor:
        """Read the elements into a torch tensor on `device` (default: the CPU)."""
        tensor: torch.Tensor = hooks.torch_tensor(self, device)
        return tensor

    def __getitem__(self, index: object) -> Array:
        """Read the elements that `index` selects.

        As in numpy, `index` may contain integers, slices, ``...`` and None.

        ckptkit reads only the bytes of these elements, and gaps of less than 64 KiB between
        elements.
        """
        found: Array = hooks.elements(self, index)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise TensorError(
                "cannot make an array without a copy: the elements are in a file",
                hint="omit copy=False",
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **how: Any) -> Any:
        """Read the elements for ``torch.tensor(t)``, ``torch.from_dlpack(t)`` and similar calls."""
        return self.torch().__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device of the elements: the CPU."""
        return 1, 0

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self.shape:
            raise ArgumentError("a tensor with 0 dimensions has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True, without reading the elements."""
        return True

    def __repr__(self) -> str:
        place = "" if self.device == "cpu" else f" on {self.device}"
        kind = {"tensor": "Tensor", "parameter": "Parameter"}.get(self.kind, self.kind)
        layout = "" if self.layout == "strided" else f" {self.layout}"
        return f"<{kind} {self.dtype} {shape_text(self.shape)}{layout}{place}>"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> str:
        """Name of the device from which the tensor was saved, or ``meta``."""
        return "meta" if self.storage is None else self.storage.device

    @property
    def numel(self) -> Count:
        """Number of elements. ``t.numel`` and, as in torch, ``t.numel()`` both work."""
        return Count(prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements. For a sparse tensor, number of bytes of the values."""
        if self.layout != "strided":
            return self.storage.nbytes if self.storage is not None else 0
        return self.dtype.nbytes(prod(self.shape))

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps.

        Dimensions of size 1 are ignored.
        """
        if self.layout != "strided":
            return False
        if 0 in self.shape or self.stride == contiguous_stride(self.shape):
            return True
        step = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != step:
                return False
            step *= n
        return True

    @property
    def elements_key(self) -> tuple[object, ...]:
        """A key that is equal for tensors with the same elements of the same storage.

        The key of a meta tensor is unique.
        """
        geometry = self.dtype, self.shape, self.stride, self.offset
        return id(self.storage or self), *geometry, self.conj, self.neg

    @property
    def extent(self) -> tuple[int, int]:
        """The byte range of the elements in the storage: a pair (start, length)."""
        if 0 in self.shape:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        start = self.offset // self.dtype.block * self.dtype.bits // 8
        return start, self.dtype.nbytes(last + 1) - start


def contiguous_stride(shape: Shape) -> Shape:
    """Return row-major strides in elements, as torch computes them (a size of 0 counts as 1)."""
    if len(shape) == 1:
        return (1,)
    stride = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= n or 1
    return tuple(reversed(stride))


def check_geometry(
    storage: Storage | None, dtype: DType, shape: Shape, stride: Shape, offset: int
) -> None:
    """Raise TensorError unless the storage contains every element of the tensor.

    Raise LimitError if the tensor has too many dimensions. The computation uses Python integers,
    which cannot overflow.
    """
    rank = len(shape)
    if rank != len(stride) and (storage is not None or stride):
        raise TensorError(f"a tensor has {rank} sizes but {len(stride)} strides")
    if rank > LIMITS.rank:
        check("rank", rank, "dimensions of a tensor")
    if offset.__class__ is not int or offset >> 63:
        raise TensorError("a tensor's storage offset must be a non-negative integer of 64 bits")
    last = offset
    for n, s in zip(shape, stride or shape):  # noqa: B905 - same lengths, and `strict` is slower
        # If a number is negative or has more than 63 bits, the result of the shift is not 0.
        if n.__class__ is not int or s.__class__ is not int or (n | s) >> 63:
            raise TensorError(
                "a tensor's sizes and strides must be non-negative integers of 64 bits"
            )
        last += (n - 1) * s
    if (
        storage is not None
        and (last + 1) * dtype.bits > storage.record.length * 8 * dtype.block
        and 0 not in shape
    ):
        raise TensorError(
            f"shape {shape}, stride {stride}, offset {offset} of {dtype} "
            f"need {dtype.nbytes(last + 1):,} bytes, but the storage has {storage.nbytes:,}"
        )
