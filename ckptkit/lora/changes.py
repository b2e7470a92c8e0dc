"""The updates of weights: their formulas, their computation in tiles, and what prevents a merge.

`change_of` converts a module of an adapter to the formula and operands of its update. `Adapt` adds
an update to one matrix of the base, in tiles of complete rows. The calculation uses float64 for a
float64 base, and float32 for any other base. The result is rounded to the dtype of the base once,
unless the formula rounds more often.

Up to rank 128, torch sums matrix products in order with fused multiply-add. On most processors,
NumPy does the same, so the products are bit-identical. For higher ranks, and on other processors,
this module multiplies with torch, like peft. For a matrix of one row or column, both libraries use
another routine, and the results differ in their bits. If the last tile would have fewer rows than
`Adapt.least`, these rows become part of the previous tile.

`problems` finds the reasons why an adapter cannot be merged, and a next step for each reason.
`problems` finds problems of the adapter itself. `ckptkit.lora.merge` finds problems of the adapter
and its base. `lora merge` raises the first problem. `lora check` lists all problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from ckptkit.compute.arranged import contiguous, joined
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, Reader, name_of
from ckptkit.core.bytesource import Derived, Memory, Operation, Pending, Range, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import quoted, shown, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.lora.reading import (
    CONFIG,
    Adapter,
    Formula,
    Module,
    expression,
    matches,
    roles_of,
    table,
)

# Number of elements per tile. A tile and its update fit into the caches of a core.
TILE = 1 << 19
HELD = 1 << 24  # maximum number of elements in memory for computing the norms of columns
EXACT = 128  # maximum rank at which torch, and NumPy on most processors, sum in order
# Minimum number of rows per tile. With fewer rows, torch sums products in another order. For ranks
# above EXACT, the minimum is eight times as large.
LEAST = 8
EPS = 2.0**-23  # epsilon of float32, which LyCORIS adds to norms


class Operand(NamedTuple):
    """A matrix that is an input of `Adapt`.

    ``number`` 0 is the first input after the matrix of the base.
    """

    number: int
    dtype: str
    rows: int
    columns: int


class Combined(NamedTuple):
    """A matrix that is computed from two matrices L and R.

    If ``how`` is ``@``, the matrix is the product of L and R.
    If ``how`` is ``*``, it is the elementwise product. R may be a single row or column.
    If ``how`` is ``core``, L is the core of a Tucker decomposition, with shape [m, n * kernel]. R
    has shape [n, in], and the matrix has shape [m, in * kernel].
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
        """Return the largest inner dimension of the matrix products, or 0 without a product."""
        inner = (each.rank for each in self[1:3] if isinstance(each, Combined))
        return max(self.left.columns if self.how == "@" else 0, *inner, 0)


Term: TypeAlias = Operand | Combined


@dataclass(frozen=True, slots=True)
class Adapt(Operation):
    """Add a weight update to a matrix of ``rows`` x ``columns``. The first input is the matrix.

    ``term`` is the update, or None if there is no update. The update is multiplied by ``scale`` and
    divided by ``divisor``. Row ``first`` of the update is added to the first row of the matrix.

    If ``rounding`` is ``once``, only the sum of weight and update is rounded.
    If ``rounding`` is ``twice``, the update is rounded before the addition too.
    If ``rounding`` is ``again``, the rounded update is added and the sum is rounded. Then the
    update is added again, without rounding it first.

    If ``norm`` is not "", the sum is multiplied by ``numbers``. This operand has one number for
    each row or column of the sum, as ``by`` specifies. In a convolution, ``group`` neighboring
    columns share one number.
    If ``norm`` is ``norm``, each number is first divided by the norm of its row or column.
    If ``norm`` is ``norm+eps``, each number is first divided by the norm plus `EPS`.
    If ``norm`` is ``none``, the numbers are not divided.

    If ``has_origin`` is True, the last input is the matrix before any adapter was merged. The norms
    are then those of this matrix plus the update.
    """

    rows: int
    columns: int
    name: str  # name of the module for error messages
    term: Term | None = None
    scale: float = 1.0
    divisor: float | None = None
    rounding: str = "once"
    norm: str = ""
    by: str = "rows"
    group: int = 1
    numbers: Operand | None = None
    dtype: str = "float32"
    first: int = 0
    has_origin: bool = False

    @property
    def height(self) -> int:
        """Return the number of rows per tile."""
        return max(self.least, TILE // max(1, self.columns))

    @property
    def least(self) -> int:
        """Return the minimum number of rows per tile, also for the last tile."""
        is_exact = not isinstance(self.term, Combined) or self.term.rank <= EXACT
        return LEAST if is_exact else 8 * LEAST

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        unit = self.columns * BY_NAME[self.dtype].itemsize
        if start >= stop:
            return
        work = _TileWork(self, extent)
        for top, end in self.tiles(start // unit, -(-stop // unit)):
            made, at = work.tile(top, end), top * unit
            yield made[max(start - at, 0) : min(stop - at, len(made))]

    def tiles(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield (first row, end row) of each tile that contains rows from `first` to `last`.

        `first` and `last` do not change the boundaries of the tiles.
        """
        height = self.height
        most = max(1, -(-self.rows // height) - (0 < self.rows % height < self.least))
        for number in range(min(first // height, most - 1), most):
            top = number * height
            if top >= last:
                return
            yield top, self.rows if number == most - 1 else top + height

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        unit = self.height * self.columns * BY_NAME[self.dtype].itemsize
        if self.norm in ("", "none") or self.by == "rows":
            yield from range(-(-size // unit) * unit, extent.length, -(-size // unit) * unit)
        yield extent.length


class _TileWork:
    """Computes tiles, and keeps values that several tiles need."""

    def __init__(self, adapt: Adapt, extent: Derived) -> None:
        self.adapt, self.target = adapt, BY_NAME[adapt.dtype]
        self.base, *readers = (Reader(each) for each in extent.inputs)
        self.wide = "f8" if adapt.dtype == "float64" else "f4"
        self.origin = readers.pop() if adapt.has_origin else None
        self.readers = readers
        self.held: dict[Term, Array] = {}

    def tile(self, top: int, end: int) -> memoryview:
        """Return the bytes of the rows `top` to `end` of the result."""
        adapt = self.adapt
        is_once = bool(adapt.norm) or adapt.rounding == "once"
        with np.errstate(all="ignore"):
            change = self.change(top, end)
            given = change if is_once or change is None else self.rounded(change)
            made = self.sum(top, end, self.base, given)
            if adapt.norm:
                made *= self.factor(made, top, end)
            elif adapt.rounding == "again":
                made = self.rounded(made)
                made += change
            return encode(made.reshape(-1), self.target)

    def rounded(self, values: Array) -> Array:
        """Return a new array of the values after rounding to the dtype of the base."""
        made = decode(encode(values.reshape(-1), self.target), self.target)
        return made.astype(self.wide).reshape(values.shape)

    def sum(self, top: int, end: int, reader: Reader, change: Array | None) -> Array:
        """Return the weight plus `change` for the rows `top` to `end`. Overwrite `change`."""
        unit = self.adapt.columns * self.target.itemsize
        weight = decode(reader(top * unit, (end - top) * unit), self.target)
        weight = weight.astype(self.wide, copy=False).reshape(end - top, self.adapt.columns)
        if change is None:
            return weight.copy()
        change += weight
        return change

    def change(self, top: int, end: int) -> Array | None:
        """Return the update of the rows `top` to `end` as a new array."""
        adapt = self.adapt
        if adapt.term is None:
            return None
        made = self.rows(adapt.term, top + adapt.first, end + adapt.first)
        if adapt.scale != 1:
            made *= made.dtype.type(adapt.scale)
        if adapt.divisor is not None:
            made /= made.dtype.type(adapt.divisor)
        return made

    def whole(self, term: Term) -> Array:
        """Return all rows of a matrix. All tiles use this array."""
        if term not in self.held:
            self.held[term] = self.rows(term, 0, term.rows)
        return self.held[term]

    def rows(self, term: Term, top: int, end: int) -> Array:
        """Return the rows `top` to `end` of a matrix as a new array."""
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
        dtype, reader = BY_NAME[operand.dtype], self.readers[operand.number]
        unit = operand.columns * dtype.itemsize
        data = decode(reader(top * unit, (end - top) * unit), dtype)
        if not np.isfinite(data).all():
            what = f"the adapter contains NaN or infinity for {shown(self.adapt.name)}"
            raise CorruptError(what, where=name_of(reader.extent))
        return data.astype(self.wide).reshape(end - top, operand.columns)

    def factor(self, made: Array, top: int, end: int) -> Array:
        """Return the factors for the sums `made`, in an array that broadcasts to their shape."""
        adapt = self.adapt
        assert adapt.numbers is not None
        numbers = self.read(adapt.numbers, 0, adapt.numbers.rows).reshape(-1)
        is_row = adapt.by == "rows"
        if is_row:
            numbers = numbers[top + adapt.first : end + adapt.first]
        if adapt.norm != "none":
            if is_row and self.origin is not None:
                made = self.sum(top, end, self.origin, self.change(top, end))
            norms = _norms(made) if is_row else self.norms_of_columns
            numbers = numbers / (norms + norms.dtype.type(EPS if "eps" in adapt.norm else 0))
        return numbers[:, None] if is_row else np.repeat(numbers, adapt.group)

    @cached_property
    def norms_of_columns(self) -> Array:
        """Return the norms of the columns of the sum, or of its groups of columns.

        A limited number of columns is in memory at once.
        """
        rows, columns, group = self.adapt.rows, self.adapt.columns, self.adapt.group
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
    is_other = left.shape[1] > EXACT or len(left) < LEAST or right.shape[1] == 1
    if is_other or not _sums_in_order():
        import torch

        made = torch.matmul(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    else:
        made = left @ right
    return made


@cache
def _sums_in_order() -> bool:
    """Return whether NumPy sums products in order with fused multiply-add on this processor.

    With AVX2 but without AVX-512, OpenBLAS sums parts of a matrix in another order.
    """
    left = np.sin(np.arange(11 * 24, dtype="f4")).reshape(11, 24)
    right = np.cos(np.arange(24 * 37, dtype="f4")).reshape(24, 37)
    total = np.zeros((11, 37), "f4")
    for column, row in zip(left.T.astype("f8"), right.astype("f8"), strict=True):
        total = (np.outer(column, row) + total).astype("f4")  # float64 holds the exact product
    return np.array_equal(left @ right, total)


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
    """Return (rows, columns) for viewing a tensor as a matrix.

    All dimensions except the first are columns.
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


# The update of a module


class ModuleChange(NamedTuple):
    """The weight update of a module. ``adapt`` adds the update to its complete weight.

    ``operands`` are the further inputs of ``adapt``. ``kernel`` is the kernel size of a
    convolution, empty if the adapter does not contain it.
    """

    adapt: Adapt
    operands: tuple[Tensor, ...]
    kernel: Shape = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Return (rows, columns) of the weight."""
        return self.adapt.rows, self.adapt.columns

    def transposed(self) -> ModuleChange:
        """Return the update of the transposed weight.

        Raises UnsupportedError for Tucker decompositions.
        """

        def turned(term: Term) -> Term:
            if isinstance(term, Operand):
                return term._replace(rows=term.columns, columns=term.rows)
            if term.how in ("core", "front"):
                raise UnsupportedError("ckptkit cannot transpose a Tucker decomposition")
            sides = turned(term.left), turned(term.right)
            return Combined.of(term.how, *(sides[::-1] if term.how == "@" else sides))

        columns, rows = self.shape
        term = None if self.adapt.term is None else turned(self.adapt.term)
        by = "columns" if self.adapt.by == "rows" else "rows"
        count = len(self.operands) - (self.adapt.numbers is not None)
        operands = *map(turn, self.operands[:count]), *self.operands[count:]
        adapt = replace(self.adapt, rows=rows, columns=columns, term=term, by=by)
        return self._replace(adapt=adapt, operands=operands)

    def added(self, base: Tensor, first: int, origin: Tensor | None = None) -> Tensor:
        """Return the matrix `base` plus rows of the update, from row `first` of the update on.

        If `origin` is not None, the norms are those of `origin` plus the update.
        """
        (rows, columns), has_origin = base.shape, origin is not None
        inputs = tuple(map(contiguous, (base, *self.operands, *((origin,) if origin else ()))))
        adapt = replace(
            self.adapt, rows=rows, columns=columns, dtype=base.dtype.name, first=first,
            has_origin=has_origin,
        )  # fmt: skip
        return made_of(Pending(adapt, inputs, inputs[0].length), base.dtype, base.shape)


def matrix(tensor: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """Return a tensor as a matrix. By default, all dimensions except the first are columns."""
    rows, columns = shape or as_matrix(tensor.shape)
    if not tensor.is_contiguous or tensor.conj or tensor.neg:
        return made_of(contiguous(tensor), tensor.dtype, (rows, columns))
    return replace(tensor, shape=(rows, columns), stride=(columns, 1))


def turn(tensor: Tensor) -> Tensor:
    """Return the transposed view of a matrix."""
    return replace(tensor, shape=tensor.shape[::-1], stride=tensor.stride[::-1])


def box(tensor: Tensor, start: int, stop: int, axis: int = 0) -> Tensor:
    """Return a view of the elements `start` to `stop` along the dimension `axis`."""
    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, offset=tensor.offset + start * tensor.stride[axis])


def made_of(record: Record, dtype: DType, shape: Shape) -> Tensor:
    """Return a contiguous tensor with the bytes of `record`."""
    return Tensor(Storage(record), dtype, shape, contiguous_stride(shape))


def placed(under: Tensor, parts: Iterable[tuple[int, int, Tensor]]) -> Tensor:
    """Return the matrix `under` with some parts replaced.

    Each item of `parts` is (first row, first column, new part). No two parts share a row.
    """
    found, last, (rows, columns) = list[tuple[Shape, Tensor]](), 0, under.shape
    end = rows, 0, zeros(under, (0, columns))
    for row, column, part in [*sorted(parts, key=itemgetter(0, 1)), end]:
        height, width = part.shape
        beside, right = box(under, row, row + height), column + width
        found += [
            ((last, 0), box(under, last, row)), ((row, column), part),
            ((row, 0), box(beside, 0, column, 1)), ((row, right), box(beside, right, columns, 1)),
        ]  # fmt: skip
        last = row + height
    found = [each for each in found if each[1].numel]
    if len(found) == 1:
        return found[0][1]
    return made_of(joined(under.dtype, under.shape, found), under.dtype, under.shape)


def zeros(like: Tensor, shape: Shape) -> Tensor:
    """Return a tensor of zeros with the dtype of `like`."""
    zero = Storage(Range(Memory(bytes(16), "zeros"), 0, 16))
    return Tensor(zero, like.dtype, shape, (0,) * len(shape))


def change_of(
    module: Module,
    config: Mapping[str, Any],
    weight: float = 1.0,
    shape: Shape | None = None,
    **tensors: Tensor,
) -> ModuleChange:
    """Return the update of a module, multiplied by `weight`.

    `shape` is the shape of the weight. IA3 and VeRA require the shape. Each keyword in `tensors` is
    a role; its argument replaces the tensor with this role. Raises UnsupportedError if the shapes
    of the factors do not match.
    """
    has = {**module.tensors, **tensors}
    if module.kind == "ia3":
        update = ModuleChange(Adapt(*as_matrix(shape or ()), module.path), ())
        return _with_numbers(update, module, shape or (), config)
    if module.kind == "vera" and shape is not None:
        rows, columns = as_matrix(shape)[:: -1 if config.get("fan_in_fan_out") else 1]
        has["vera_A"] = box(has["vera_A"], 0, columns, 1)
        has["vera_B"] = box(has["vera_B"], 0, rows)
    blocks = config.get("use_bdlora") if module.kind == "lora" else None
    blocks = blocks if isinstance(blocks, dict) else {}
    for role, field in (("A", "target_modules_bd_a"), ("B", "target_modules_bd_b")):
        end, names = module.path.rpartition(".")[2], blocks.get(field) or ()
        if not any(str(each) in end for each in names):
            continue
        # BD-LoRA: each block of the block-diagonal matrix consists of rows of the tensor.
        tensor, count = has[role], blocks.get("nblocks")
        rows, columns = tensor.shape
        if not isinstance(count, int) or count < 1 or rows % count:
            what = f"{shown(module.path)} has {rows} rows, which are not divisible"
            raise UnsupportedError(f"{what} into {count} blocks")
        step = rows // count
        parts = (
            (n * step, n * columns, box(tensor, n * step, n * step + step)) for n in range(count)
        )
        has[role] = placed(zeros(tensor, (rows, columns * count)), parts)
    operands: list[Tensor] = []

    def term_of(formula: Formula) -> Term:
        if not isinstance(formula, str):
            return Combined.of(formula[0], *map(term_of, formula[1:]))
        each = matrix(has[formula.rstrip("'")])
        operands.append(turn(each) if formula.endswith("'") else each)
        return Operand(len(operands) - 1, each.dtype.name, *operands[-1].shape)

    try:
        term = term_of(module.formula)
    except UnsupportedError as error:
        what = f"the shapes of the factors of {shown(module.path)} do not match: {error.message}"
        raise UnsupportedError(what, code="shape") from None
    whole = has.get("lokr_w2")
    if isinstance(term, Combined) and whole is not None and whole.ndim == 3 and not module.prefix:
        # torch.kron inserts the missing dimension of w1 as the first dimension. peft then
        # reshapes the result.
        term = term._replace(how="front", kernel=whole.shape[2])
    is_mica = config.get("init_lora_weights") == "mica" and module.kind == "lora"
    is_twice = module.kind == "embedding" or is_mica or module.parameter or bool(blocks)
    rounding = "twice" if is_twice else "once"
    rounding = "again" if module.kind == "attention_out" else rounding
    scale = weight * (1.0 if module.scale is None else module.scale)
    adapt = Adapt(term.rows, term.columns, module.path, term, scale, module.divisor, rounding)
    kernel = has["A"].shape[2:] if module.kind == "lora" and "A" in has else ()
    change = ModuleChange(adapt, tuple(operands), kernel)
    return _with_numbers(change, module, (), config) if module.is_dora else change


def change_of_bias(module: Module, role: str, weight: float) -> ModuleChange:
    """Return the update of a bias. IA3 multiplies the bias. Other methods add to the bias."""
    numbers = matrix(module.tensors[role], (module.tensors[role].numel(), 1))
    operand = Operand(0, numbers.dtype.name, *numbers.shape)
    adapt = Adapt(operand.rows, 1, module.path, norm="none", numbers=operand)
    if role != "ia3":
        scale = weight * ((module.scale or 0.0) if role == "B_bias" else 1.0)
        adapt = Adapt(operand.rows, 1, module.path, operand, scale)
    return ModuleChange(adapt, (numbers,))


def _with_numbers(
    change: ModuleChange, module: Module, shape: Shape, config: Mapping[str, Any]
) -> ModuleChange:
    """Return the update with a factor for each row or column: IA3 factors or DoRA magnitudes.

    IA3 multiplies the inputs of a feedforward module, and the outputs of any other module. A
    magnitude of DoRA belongs to a row of the weight, but in an embedding to a column. In LyCORIS,
    magnitudes of shape [1, in, ...] belong to columns, and `EPS` is added to the norm.
    """
    role, norm, by, group = "magnitude", "norm", "rows", 1
    rows, columns = change.shape
    numbers = module.tensors["ia3" if module.kind == "ia3" else role]
    count = prod(numbers.shape)
    if module.kind == "ia3":
        role, norm = "ia3", "none"
        is_turned = bool(config.get("fan_in_fan_out")) and len(shape) == 2
        if is_feedforward(module, config) != is_turned:
            by, group = "columns", columns // shape[1] if len(shape) > 1 else 1
    else:
        norm = "norm+eps" if module.is_lycoris else "norm"
        if is_of_columns(module, rows):
            by, group = "columns", columns // max(1, count)
    expected = rows if by == "rows" else columns // max(1, group)
    if count != expected:
        raise UnsupportedError(
            f"the {role} vector of {shown(module.path)} has {count} numbers, but the weight has "
            f"{expected} {by}"
        )
    operand = Operand(len(change.operands), numbers.dtype.name, *as_matrix(numbers.shape))
    adapt = replace(change.adapt, norm=norm, by=by, group=group, numbers=operand)
    return change._replace(adapt=adapt, operands=(*change.operands, matrix(numbers)))


def is_of_columns(module: Module, rows: int) -> bool:
    """Return whether a module of `rows` rows has one magnitude for each column, not for each row.

    LyCORIS stores magnitudes of columns in the shape [1, in, ...].
    """
    numbers = module.tensors.get("magnitude")
    is_row = numbers is not None and numbers.shape[:1] == (1,) != (rows,)
    return module.kind == "embedding" or (module.is_lycoris and is_row)


def is_feedforward(module: Module, config: Mapping[str, Any]) -> bool:
    """Return whether IA3 multiplies the inputs of a module. peft uses the same criterion."""
    names = config.get("feedforward_modules") or ()
    if isinstance(names, str):
        return matches(names, module.path, is_whole=True)
    return any(module.path.endswith(str(each)) for each in names)


# Problems of an adapter

HELP = "`ckptkit help lora` lists the supported adapters, and explains the search for names"
_AGAIN = "save the adapter again with `model.save_pretrained(FOLDER)` of the peft model"
BASE = "BASE must be the model that the adapter was trained on"
ERROR, WARNING = "error", "warning"
# Default hint of each problem code
_NEXT = {
    "pair": _AGAIN,
    "empty": "gather the parameters before saving (ZeRO-3, FSDP), then save again",
    "shape": BASE,
    "no-module": BASE,
    "module": BASE,
}


class Finding(NamedTuple):
    """A problem of an adapter. ``command`` or ``hint`` solves the problem.

    ``mend`` contains the options of `lora merge` that solve the problem.
    """

    code: str
    level: str
    title: str
    modules: tuple[str, ...] = ()
    command: str | None = None
    hint: str | None = HELP
    mend: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: CkptkitError, key: str) -> Finding:
        """Convert an error about the module `key` to a finding."""
        code = {"shape": "shape", "ambiguous": "module"}.get(error.code, "method")
        return problem(code, error.message, error.hint, key)

    @property
    def error(self) -> UnsupportedError:
        return UnsupportedError(self.title, hint=self.hint, code=self.code)


def problem(code: str, title: str, hint: str | None = None, *keys: str, mend: str = "") -> Finding:
    """Return a reason why an adapter cannot be merged. `keys` are the modules with the problem."""
    level = WARNING if code == "tied" else ERROR
    return Finding(code, level, title, keys, None, hint or _NEXT.get(code, HELP), (*mend.split(),))


def problems(adapter: Adapter, base_is: str | None = None) -> Iterator[Finding]:
    """Yield the problems that are visible in the files of the adapter.

    A problem without modules concerns the complete adapter.
    """
    config, method = adapter.config or {}, adapter.method
    kind = table("methods").get(method, "unsupported") if adapter.layout == "peft" else "merge"
    if method == "VERA" and not config.get("save_projection", True):
        kind = "projection"
    if kind != "merge":
        loads = "load the adapter and its base with PeftModel.from_pretrained"
        yield problem("method", f"has the method {method}, which {table('reasons')[kind]}", loads)
        return
    for config in adapter.configs.values():
        for name, why in table("fields")["refused"].items():
            if config.get(name) or config.get(name) == {}:  # {} selects defaults
                yield problem("method", f"{why} ({name} in {CONFIG})")
        start = config.get("init_lora_weights")
        is_ordinary = not start or start is True or _is_start("ordinary", start)
        if not is_ordinary and base_is != "residual":
            given = typed("--base-is residual", "base_is='residual'")
            title = f"was trained on a residual base (the base minus the initial update of {start})"
            if not _is_start("residual", start):
                title = f"has the unknown initialization {shown(start)}, which may change the base"
            hint = f"if BASE is this residual base, use {given}"
            yield problem("residual", title, hint, mend="--base-is residual")
    unscaled = tuple(key for key, each in adapter.modules.items() if each.scale is None)
    if unscaled:
        given = typed("--alpha A", "alpha=A")
        hint = f"if you know the alpha of the training, use {given}"
        title = f"contains no scale, because {CONFIG} is missing"
        yield problem("no-config", title, hint, *unscaled)
    if adapter.unknown:
        title = f"contains unknown tensors: {quoted(adapter.unknown)}"
        yield problem("method", title, None, *adapter.unknown)
    if not (adapter.modules or adapter.replaced or adapter.unknown):
        hint = "save the trained object: model.save_pretrained(FOLDER) of the peft model"
        yield problem("empty", "contains no tensors that change a base", hint)
    for key in adapter.modules:
        yield from _of_module(adapter, key)


def _is_start(kind: str, value: object) -> bool:
    return isinstance(value, str) and expression(kind).fullmatch(value.lower()) is not None


def _of_module(adapter: Adapter, key: str) -> Iterator[Finding]:
    module, name, found = adapter.modules[key], shown(key), list[tuple[str, str]]()
    config = adapter.configs.get(module.component, {})
    if not module.kind:
        title = f"{name} has only {quoted(sorted(module.tensors))}; the other factors are missing"
        found.append(("pair", title))
    is_plain = module.kind in ("lora", "embedding") and not module.is_dora
    if is_plain and config.get("use_dora"):
        found.append(("pair", f"{name} has no magnitude, but {CONFIG} has use_dora"))
    if module.expected is not None and module.rank != module.expected:
        title = f"{name} has rank {module.rank}, but {CONFIG} has {module.expected}"
        hint = f"set r or rank_pattern in {CONFIG} to the rank of the training"
        yield problem("rank", title, hint, key)
    more = () if module.kind in ("ia3", "tokens", "bias") else ("magnitude", "B_bias", "diff_b")
    extra = module.tensors.keys() - {*roles_of(module.formula)} - {"alpha", *more}
    if module.kind and extra:
        title = f"{name} ({module.kind}) has {quoted(sorted(extra))} too; the update is ambiguous"
        found.append(("method", title))
    if module.kind == "ia3":  # the vector is [out, 1], or [1, in] for a feedforward module
        sizes, is_input = module.tensors["ia3"].shape, is_feedforward(module, config)
        if len(sizes) == 2 and sizes[0 if is_input else 1] != 1:
            what = f"the vector of {name} has shape {shape_text(sizes)}, but feedforward_modules in"
            title = f"{what} {CONFIG} {'contains' if is_input else 'lacks'} the module"
            yield problem("shape", title, f"correct feedforward_modules in {CONFIG}", key)
    for role, tensor in module.tensors.items():
        if role != "alpha" and tensor.dtype.kind != "float":
            found.append(("method", f"{role} of {name} is {tensor.dtype}; ckptkit requires floats"))
        if role != "alpha" and tensor.ndim < (2 if role in module.pair else 1):
            what = f"{role} of {name} has shape {shape_text(tensor.shape)}"
            found.append(("shape", f"{what}; ckptkit requires more dimensions"))
        if 0 in tensor.shape and module.kind != "adalora":
            found.append(("empty", f"{name} is empty; {role} has no elements"))
    if not found and module.kind not in ("", "ia3", "tokens", "bias", "vera"):
        try:
            change_of(module, config)
        except UnsupportedError as error:
            found.append(("shape", error.message))
    for code, title in found:
        yield problem(code, title, None, key)
