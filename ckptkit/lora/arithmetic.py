"""Add the weight update of an adapter to one matrix of the base, in tiles of complete rows.

The calculation uses float64 for a float64 base, and float32 for any other base. The result is
rounded to the dtype of the base once, unless the formula rounds more often.

Up to rank 128, matrix products of NumPy and torch are bit-identical, because both libraries sum in
order with fused multiply-add. For higher ranks, this module multiplies with torch, like peft. For a
matrix of one row or column, both libraries use another routine, and the results differ in their
bits. If the last tile would have a single row, this row becomes part of the previous tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, Reader, name_of
from ckptkit.core.bytesource import Derived, Operation
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError, UnsupportedError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shape as shape_text
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


class Operand(NamedTuple):
    """An input matrix. Number 0 is the first input after the matrix of the base."""

    number: int
    dtype: str
    rows: int
    columns: int


class Combined(NamedTuple):
    """A matrix that is computed from two matrices L and R.

    If ``how`` is ``@``, the matrix is the product of L and R.
    If ``how`` is ``*``, it is the elementwise product. R may be a single row or column.
    If ``how`` is ``core``, L is the core of a Tucker decomposition, [m, n * kernel]. R is [n, in].
    If ``how`` is ``kron``, the matrix is the Kronecker product.
    If ``how`` is ``front``, it is the Kronecker product for a one-dimensional convolution of peft.
    The kernel then has ``kernel`` elements.
    """

    how: str
    left: Term
    right: Term
    rows: int
    columns: int
    kernel: int = 1

    @classmethod
    def of(cls, how: str, left: Term, right: Term) -> Combined:
        """Combine two matrices. Raises UnsupportedError if their shapes do not match."""
        fits, kernel, sizes = True, 1, (left.rows, right.columns)
        if how == "kron":
            sizes = left.rows * right.rows, left.columns * right.columns
        elif how == "*":
            sizes = left.rows, left.columns
            fits = right.rows in (1, left.rows) and right.columns in (1, left.columns)
        else:
            kernel = left.columns // max(1, right.rows) if how == "core" else 1
            fits = left.columns == right.rows * kernel
        if not fits:
            shapes = (shape_text((each.rows, each.columns)) for each in (left, right))
            raise UnsupportedError(" and ".join(shapes), code="shape")
        return cls(how, left, right, sizes[0], sizes[1] * kernel)

    @property
    def rank(self) -> int:
        """Return the largest number of columns of a left matrix of a product."""
        inner = (each.rank for each in self[1:3] if isinstance(each, Combined))
        return max(self.left.columns if self.how == "@" else 0, *inner, 0)


Term: TypeAlias = Operand | Combined


@dataclass(frozen=True, slots=True)
class Formula:
    """The formula of a weight update.

    ``term`` is the update, or None if there is no update. The update is multiplied by ``scale`` and
    divided by ``divisor``.

    If ``rounding`` is ``once``, only the sum of weight and update is rounded.
    If ``rounding`` is ``twice``, the update is rounded before the addition too.
    If ``rounding`` is ``again``, the rounded update is added first, and then the update is added
    again.

    If ``norm`` is not "", the sum is multiplied by ``numbers``. This operand has one number for
    each row or column of the sum, as ``by`` specifies. In a convolution, ``group`` neighboring
    columns share one number.
    If ``norm`` is ``norm``, each number is first divided by the norm of its row or column.
    If ``norm`` is ``norm+eps``, each number is first divided by the norm plus `EPS`.
    If ``norm`` is ``none``, the numbers are not divided.
    """

    term: Term | None = None
    scale: float = 1.0
    divisor: float | None = None
    rounding: str = "once"
    norm: str = ""
    by: str = "rows"
    group: int = 1
    numbers: Operand | None = None


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
    first: int = 0
    name: str = ""  # name of the module for error messages
    has_origin: bool = False

    @property
    def height(self) -> int:
        """Return the number of rows per tile."""
        term = self.formula.term
        is_exact = not isinstance(term, Combined) or term.rank <= EXACT
        return max(LEAST if is_exact else 8 * LEAST, TILE // max(1, self.columns))

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
        self.held: dict[Term, Array] = {}

    def tile(self, top: int, end: int) -> memoryview:
        """Return the bytes of the rows `top` to `end` of the result."""
        import numpy as np

        formula = self.formula
        is_once = bool(formula.norm) or formula.rounding == "once"
        with np.errstate(all="ignore"):
            change = self.change(top, end)
            given = change if is_once or change is None else self.rounded(change)
            made = self.sum(top, end, self.base, given)
            if formula.norm:
                made *= self.factor(made, top, end)
            elif formula.rounding == "again":
                made = self.rounded(made)
                made += change
            return encode(made.reshape(-1), self.target)

    def rounded(self, values: Array) -> Array:
        """Return a new array of the values after rounding to the dtype of the base."""
        made = decode(encode(values.reshape(-1), self.target), self.target)
        return made.astype(self.wide).reshape(values.shape)

    def weight(self, top: int, end: int, reader: Reader) -> Array:
        unit = self.adapt.columns * self.target.itemsize
        found = decode(reader(top * unit, (end - top) * unit), self.target)
        return found.astype(self.wide, copy=False).reshape(end - top, self.adapt.columns)

    def sum(self, top: int, end: int, reader: Reader, change: Array | None) -> Array:
        """Return the weight plus `change` for the rows `top` to `end`. Overwrite `change`."""
        weight = self.weight(top, end, reader)
        if change is None:
            return weight.copy()
        change += weight
        return change

    def change(self, top: int, end: int) -> Array | None:
        """Return the update of the rows `top` to `end` as a new array."""
        formula, first = self.formula, self.adapt.first
        if formula.term is None:
            return None
        made = self.rows(formula.term, top + first, end + first)
        if formula.scale != 1:
            made *= made.dtype.type(formula.scale)
        if formula.divisor is not None:
            made /= made.dtype.type(formula.divisor)
        return made

    def whole(self, term: Term) -> Array:
        """Return all rows of a matrix. All tiles use this array."""
        if term not in self.held:
            self.held[term] = self.rows(term, 0, term.rows)
        return self.held[term]

    def rows(self, term: Term, top: int, end: int) -> Array:
        """Return the rows `top` to `end` of a matrix as a new array."""
        import numpy as np

        if isinstance(term, Operand):
            return self.read(term, top, end)
        if term.how == "*":
            is_row = term.right.rows < term.rows
            right = self.whole(term.right) if is_row else self.rows(term.right, top, end)
            made: Array = self.rows(term.left, top, end) * right
            return made
        right = self.whole(term.right)
        if term.how == "kron":
            numbers = np.arange(top, end)
            left = self.whole(term.left)[numbers // len(right)]
            made = left[:, :, None] * right[numbers % len(right)][:, None, :]
            return made.reshape(end - top, -1)
        if term.how == "front":
            blocks = right.reshape(len(right), 1, -1, 1, term.kernel)
            made = blocks * self.whole(term.left)[:, None, :, None]
            return made.reshape(term.rows, -1)[top:end].copy()
        left = self.rows(term.left, top, end)
        if term.how == "core":
            left = left.reshape(len(left), len(right), -1).transpose(0, 2, 1)
            made = _product(left.reshape(-1, len(right)), right)
            made = made.reshape(end - top, -1, term.right.columns).transpose(0, 2, 1)
            return made.reshape(end - top, -1)
        return _product(left, right)

    def read(self, operand: Operand, top: int, end: int) -> Array:
        """Return the rows `top` to `end` of an operand as a new array.

        Raises CorruptError for NaN and infinity.
        """
        import numpy as np

        dtype, reader = BY_NAME[operand.dtype], self.readers[operand.number]
        unit = operand.columns * dtype.itemsize
        data = decode(reader(top * unit, (end - top) * unit), dtype)
        if not np.isfinite(data).all():
            what = f"the adapter contains NaN or infinity for {shown(self.adapt.name)}"
            raise CorruptError(what, where=name_of(reader.extent))
        return data.astype(self.wide).reshape(end - top, operand.columns)

    def factor(self, made: Array, top: int, end: int) -> Array:
        """Return an array of factors for the sums `made`. The array broadcasts to their shape."""
        import numpy as np

        formula, first = self.formula, self.adapt.first
        assert formula.numbers is not None
        numbers = self.read(formula.numbers, 0, formula.numbers.rows).reshape(-1)
        is_row = formula.by == "rows"
        if is_row:
            numbers = numbers[top + first : end + first]
        if formula.norm != "none":
            if is_row and self.origin is not None:
                made = self.sum(top, end, self.origin, self.change(top, end))
            norms = _norms(made) if is_row else self.norms_of_columns
            numbers = numbers / (norms + norms.dtype.type(EPS if "eps" in formula.norm else 0))
        return numbers[:, None] if is_row else np.repeat(numbers, formula.group)

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
                made = self.sum(top, end, self.origin or self.base, self.change(top, end))
                held[top:end] = made[:, left : left + step]
            found.append(_norms(held, group, by_columns=True))
        return np.concatenate(found)


def _product(left: Array, right: Array) -> Array:
    """Return the matrix product as a new array. The result is bit-identical to that of torch."""
    made: Array
    if left.shape[1] > EXACT or 1 in (len(left), right.shape[1]):
        import torch

        made = torch.matmul(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    else:
        made = left @ right
    return made


def _norms(values: Array, group: int = 1, *, by_columns: bool = False) -> Array:
    """Return the norms of rows or of groups of columns, bit-identical to those of torch."""
    import torch

    if group > 1:
        values = values.reshape(len(values), -1, group).transpose(1, 0, 2)
        values = values.reshape(len(values), -1).T
    turned = torch.from_numpy(values)
    made: Array = torch.linalg.norm(turned.T if by_columns else turned, dim=1).numpy()
    return made


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor as a matrix.

    All dimensions except the first are columns.
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
