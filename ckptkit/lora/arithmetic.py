"""Add the weight update of an adapter to one matrix of the base, in tiles of complete rows.

The calculation uses float64 for a float64 base, and float32 for any other base. The result is
rounded to the dtype of the base once, unless the formula rounds more often.

Up to rank 128, matrix products of NumPy and torch are bit-identical, because both libraries sum in
order with fused multiply-add. For higher ranks, this module multiplies with torch, like peft. For a
matrix of one row or column, both libraries use another routine, whose results have other bits. If
the last tile would have a single row, this row becomes part of the previous tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, Reader, name_of
from ckptkit.core.bytesource import Derived, Operation, Pending, Record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import shown

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Number of elements per tile. A tile and its update fit into the caches of a core.
TILE = 1 << 19
HELD = 1 << 24  # maximum number of elements in memory for computing the norms of columns
EXACT = 128  # maximum rank at which products of NumPy and torch are bit-identical
# Minimum number of rows per tile. From 8 rows on, the number of rows does not change the bits of a
# product.
LEAST = 8
EPS = 2.0**-23  # epsilon of float32, which LyCORIS adds to norms


@dataclass(frozen=True, slots=True)
class Operand:
    """The dtype, rows and columns of an input matrix."""

    dtype: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix or a product of matrices. ``operands`` contains the indices of the matrices.

    If ``how`` is "", the factor is one matrix, or the product L @ R.
    If ``how`` is ``scaled``, the factor is L @ (R * E). E has one number for each row of R.
    If ``how`` is ``vera``, the factor is (L * F) @ (R * E). F has one number for each row of L.
    If ``how`` is ``core``, the operands are L, the core of a Tucker decomposition, and R.
    """

    operands: tuple[int, ...]
    how: str = ""


@dataclass(frozen=True, slots=True)
class Formula:
    """The formula of a weight update.

    If ``combine`` is "", the update is a single factor.
    If ``combine`` is ``*``, the update is the elementwise product of two factors.
    If ``combine`` is ``kron``, the update is the Kronecker product of two factors.
    If ``combine`` is ``front``, the update is the Kronecker product for a one-dimensional
    convolution of peft. The second factor then has ``group`` columns of kernels.
    The update is multiplied by ``scale`` and divided by ``divisor``.

    If ``rounding`` is ``once``, only the sum of weight and update is rounded.
    If ``rounding`` is ``twice``, the update is rounded before the addition too.
    If ``rounding`` is ``again``, the rounded update is added first, and then the update is added
    again.

    If ``norm`` is not "", the sum is multiplied by the numbers in the last operand. The operand has
    one number for each row or column of the sum, as ``by`` specifies. In a convolution, ``group``
    neighboring columns share one number.
    If ``norm`` is ``norm``, each number is first divided by the norm of its row or column.
    If ``norm`` is ``norm+eps``, each number is first divided by the norm plus `EPS`.
    If ``norm`` is ``none``, the numbers are not divided.
    """

    factors: tuple[Factor, ...] = ()
    combine: str = ""
    scale: float = 1.0
    divisor: float | None = None
    rounding: str = "once"
    norm: str = ""
    by: str = "rows"
    group: int = 1


@dataclass(frozen=True, slots=True)
class Adapt(Operation):
    """Add a weight update to a matrix. The first input is the matrix.

    The first row of the matrix gets row `first` of the update. If `has_origin` is True, the last
    input is the original matrix before merging earlier adapters. The norms are then those of the
    original matrix plus the update.
    """

    dtype: str
    rows: int
    columns: int
    formula: Formula
    operands: tuple[Operand, ...]
    first: int = 0
    name: str = ""  # name of the module for error messages
    has_origin: bool = False

    @property
    def height(self) -> int:
        """Return the number of rows per tile."""
        least = LEAST if self._rank <= EXACT else 8 * LEAST
        return max(least, TILE // max(1, self.columns))

    @property
    def _rank(self) -> int:
        lefts = [each.operands[0] for each in self.formula.factors if len(each.operands) > 1]
        return max((self.operands[left].columns for left in lefts), default=0)

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        unit = self.columns * BY_NAME[self.dtype].itemsize
        if start >= stop:
            return
        work = _TileWork(self, extent)
        for top, end in self.tiles(start // unit, -(-stop // unit)):
            made, at = work.tile(top, end), top * unit
            yield made[max(start - at, 0) : min(stop - at, len(made))]

    def tiles(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the first and last row of each tile that contains rows from `first` to `last`.

        The boundaries of the tiles do not depend on the arguments.
        """
        height = self.height
        most = max(1, -(-self.rows // height) - (self.rows % height == 1))
        for number in range(min(first // height, most - 1), most):
            top = number * height
            if top >= last:
                return
            yield top, self.rows if number == most - 1 else top + height

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        unit = self.height * self.columns * BY_NAME[self.dtype].itemsize
        if self.formula.norm in ("", "none") or self.formula.by == "rows":
            yield from range(-(-size // unit) * unit, extent.length, -(-size // unit) * unit)
        yield extent.length


class _TileWork:
    """Computes tiles, and keeps values that several tiles need."""

    def __init__(self, adapt: Adapt, extent: Derived) -> None:
        self.adapt, self.formula, self.target = adapt, adapt.formula, BY_NAME[adapt.dtype]
        self.base, *readers = (Reader(each) for each in extent.inputs)
        self.wide = "f8" if adapt.dtype == "float64" else "f4"
        self.origin = readers.pop() if adapt.has_origin else None
        self.readers = readers
        self.held: dict[int, Array] = {}

    def tile(self, top: int, end: int) -> memoryview:
        """Return the bytes of the rows `top` to `end` of the result."""
        import numpy as np

        formula, target = self.formula, self.target
        with np.errstate(all="ignore"):
            if formula.norm:
                made = self.sum(top, end, self.base)
                made *= self.factor(made, top, end)
                return encode(made.reshape(-1), target)
            change = self.change(top, end)
            assert change is not None
            if formula.rounding == "once":
                change += self.weight(top, end, self.base)
                return encode(change.reshape(-1), target)
            rounded = decode(encode(change.reshape(-1), target), target).astype(self.wide)
            made = rounded.reshape(change.shape)
            made += self.weight(top, end, self.base)
            data = encode(made.reshape(-1), target)
            if formula.rounding == "again":
                change += decode(data, target).reshape(change.shape)
                data = encode(change.reshape(-1), target)
            return data

    def weight(self, top: int, end: int, reader: Reader) -> Array:
        unit = self.adapt.columns * self.target.itemsize
        found = decode(reader(top * unit, (end - top) * unit), self.target)
        return found.astype(self.wide, copy=False).reshape(end - top, self.adapt.columns)

    def sum(self, top: int, end: int, reader: Reader) -> Array:
        """Return the rows `top` to `end` of the weight plus the update, as a new array."""
        weight, change = self.weight(top, end, reader), self.change(top, end)
        if change is None:
            return weight.copy()
        change += weight
        return change

    def change(self, top: int, end: int) -> Array | None:
        """Return the update of the rows `top` to `end` as a new array."""
        formula = self.formula
        if not formula.factors:
            return None
        top, end = top + self.adapt.first, end + self.adapt.first
        first, *others = formula.factors
        if formula.combine in ("kron", "front"):
            made = self._kron(first, others[0], top, end)
        else:
            made = self.rows(first, top, end)
            for each in others:
                made *= self.rows(each, top, end)
        if formula.scale != 1:
            made *= made.dtype.type(formula.scale)
        if formula.divisor is not None:
            made /= made.dtype.type(formula.divisor)
        return made

    def rows(self, factor: Factor, top: int, end: int) -> Array:
        """Return the rows `top` to `end` of a factor."""
        left = self.read(factor.operands[0], top, end)
        if len(factor.operands) == 1:
            return left.copy()
        if factor.how == "vera":
            left = left * self.read(factor.operands[3], top, end)
        return _product(left, self._right(factor))

    def read(self, number: int, top: int = 0, end: int | None = None) -> Array:
        """Return the rows `top` to `end` of an operand, by default all rows.

        Raises CorruptError for NaN and infinity.
        """
        import numpy as np

        operand = self.adapt.operands[number]
        end = operand.rows if end is None else end
        dtype = BY_NAME[operand.dtype]
        unit = operand.columns * dtype.itemsize
        data = decode(self.readers[number](top * unit, (end - top) * unit), dtype)
        if not np.isfinite(data).all():
            what = f"the adapter contains NaN or infinity for {shown(self.adapt.name)}"
            raise CorruptError(what, where=name_of(self.readers[number].extent))
        return data.astype(self.wide, copy=False).reshape(end - top, operand.columns)

    def _right(self, factor: Factor) -> Array:
        """Return the right matrix of a product. All tiles use this matrix."""
        number = factor.operands[1]
        if number not in self.held:
            right = self.read(number).copy()
            if factor.how:
                other = self.read(factor.operands[2])
            if factor.how in ("scaled", "vera"):
                right *= other.reshape(-1, 1)
            elif factor.how == "core":  # [m, n * kernel] and [n, in]
                outer, inner = len(right), len(other)
                turned = right.reshape(outer, inner, -1).transpose(0, 2, 1)
                made = _product(turned.reshape(-1, inner), other)
                made = made.reshape(outer, -1, other.shape[1]).transpose(0, 2, 1)
                right = made.reshape(outer, -1)
            self.held[number] = right
        return self.held[number]

    def _kron(self, first: Factor, second: Factor, top: int, end: int) -> Array:
        import numpy as np

        sizes = [self.adapt.operands[each.operands[0]].rows for each in (first, second)]
        if -1 not in self.held:
            self.held[-1], self.held[-2] = (
                self.rows(each, 0, size) for each, size in zip((first, second), sizes, strict=True)
            )
        if self.formula.combine == "front":  # [p, a, q, b, kernel]
            group = self.formula.group
            blocks = self.held[-2].reshape(-1, 1, group, 1, self.held[-2].shape[1])
            whole: Array = blocks * self.held[-1][:, None, :, None]
            return whole.reshape(-1, self.adapt.columns)[top:end].copy()
        numbers = np.arange(top, end)
        outer, inner = self.held[-1][numbers // sizes[1]], self.held[-2][numbers % sizes[1]]
        made: Array = outer[:, :, None] * inner[:, None, :]
        return made.reshape(end - top, -1)

    def factor(self, made: Array, top: int, end: int) -> Array:
        """Return an array of factors for the sums `made`. The array broadcasts to their shape."""
        import numpy as np

        if self.formula.by == "rows":
            if self.origin is not None:
                made = self.sum(top, end, self.origin)
            norms = None if self.formula.norm == "none" else _norms(made)
            first = self.adapt.first
            return self._over(self.read(-1).reshape(-1)[top + first : end + first], norms)[:, None]
        norms = None if self.formula.norm == "none" else self.norms_of_columns
        return np.repeat(self._over(self.read(-1).reshape(-1), norms), self.formula.group)

    def _over(self, numbers: Array, norms: Array | None) -> Array:
        if norms is None:
            return numbers
        over: Array = numbers / (norms + norms.dtype.type(EPS if "eps" in self.formula.norm else 0))
        return over

    @cached_property
    def norms_of_columns(self) -> Array:
        """Return the norms of the sum's columns or groups of columns.

        A limited number of columns is in memory at once.
        """
        import numpy as np

        rows, columns, group = self.adapt.rows, self.adapt.columns, self.formula.group
        step = max(1, HELD // rows // group) * group
        found = []
        for left in range(0, columns, step):
            held = np.empty((rows, min(step, columns - left)), self.wide)
            for top, end in self.adapt.tiles(0, rows):
                made = self.sum(top, end, self.origin or self.base)
                held[top:end] = made[:, left : left + step]
            found.append(_norms(held, group, by_columns=True))
        return np.concatenate(found)


def _product(left: Array, right: Array) -> Array:
    """Return the matrix product as a new array. The result is bit-identical to that of torch."""
    made: Array
    if left.shape[1] > EXACT or 1 in (len(left), right.shape[1]):
        import torch

        made = torch.matmul(torch.from_numpy(_own(left)), torch.from_numpy(right)).numpy()
    else:
        made = left @ right
    return made


def _own(values: Array) -> Array:
    return values if values.flags.writeable else values.copy()


def _norms(values: Array, group: int = 1, *, by_columns: bool = False) -> Array:
    """Return the norms of rows or of groups of columns, bit-identical to those of torch."""
    import torch

    if group > 1:
        values = values.reshape(len(values), -1, group).transpose(1, 0, 2)
        values = values.reshape(len(values), -1).T
    turned = torch.from_numpy(values)
    made: Array = torch.linalg.norm(turned.T if by_columns else turned, dim=1).numpy()
    return made


def adapted(
    base: Record, dtype: str, rows: int, columns: int, formula: Formula, operands: Iterable[Tensor],
    *, first: int = 0, name: str = "", origin: Record | None = None,
) -> Record:  # fmt: skip
    """Return the bytes of `rows` rows of `base` plus the update that `formula` computes.

    Each operand is a matrix. For a tensor with more dimensions, all dimensions except the first are
    columns. The last operand contains the numbers for `Formula.norm`. If `origin` is not None, the
    norms are those of `origin` plus the update.
    """
    tensors = list(operands)
    shapes = tuple(Operand(each.dtype.name, *as_matrix(each.shape)) for each in tensors)
    has_origin = origin is not None
    operation = Adapt(dtype, rows, columns, formula, shapes, first, name, has_origin)
    origins = () if origin is None else (origin,)
    return Pending(operation, (base, *map(contiguous, tensors), *origins), base.length)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor as a matrix.

    All dimensions except the first are columns.
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
