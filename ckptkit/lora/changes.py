"""Convert a module of an adapter to the formula and operands of its weight update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptkit.compute.arranged import contiguous, joined
from ckptkit.core.bytesource import Memory, Range, Record
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shape as shape_text
from ckptkit.core.text import shown
from ckptkit.lora.arithmetic import Factor, Formula, as_matrix
from ckptkit.lora.reading import Module, matches, table

# Each entry contains the kind of adapter, `Formula.combine`, `Formula.rounding`, `Factor.how` for
# factors of three and more operands, and the roles of the operands of each factor. If a role ends
# in ', the operand is transposed. If a kind has several entries, the first entry applies whose
# roles all exist in the module. The sources are `get_delta_weight` of each tuner in peft, and
# `get_weight` of LyCORIS.
_TABLE: tuple[tuple[str, str, str, str, tuple[tuple[str, ...], ...]], ...] = (
    ("lora", "", "once", "", (("B", "A"),)),
    ("attention_out", "", "again", "", (("B", "A"),)),
    ("embedding", "", "twice", "", (("embedding_A'", "embedding_B'"),)),
    ("adalora", "", "once", "scaled", (("B", "A", "E"),)),
    ("tucker", "", "once", "core", (("B", "mid", "A"),)),
    ("vera", "", "once", "vera", (("vera_B", "vera_A", "lambda_d", "lambda_b"),)),
    ("loha", "*", "once", "core",
     (("hada_w1_a'", "hada_t1", "hada_w1_b"), ("hada_w2_a'", "hada_t2", "hada_w2_b"))),
    ("loha", "*", "once", "", (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b"))),
    *(("lokr", "kron", "once", "core", (first, second))
      for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
      for second in (("lokr_w2",), ("lokr_w2_a'", "lokr_t2", "lokr_w2_b"),
                     ("lokr_w2_a", "lokr_w2_b"))),
    ("diff", "", "once", "", (("diff",),)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """The weight update of a module, with the numbers of rows and columns of the weight."""

    formula: Formula
    operands: tuple[Tensor, ...]
    rows: int
    columns: int
    kernel: Shape = ()  # kernel size of a convolution, empty if the adapter does not contain it
    name: str = ""  # name of the module for error messages

    def transposed(self) -> ModuleChange:
        """Return the update of the transposed weight.

        Raises UnsupportedError for VeRA and Tucker decompositions.
        """
        operands = list(self.operands)
        for factor in self.formula.factors:
            first, *others = factor.operands
            if factor.how in ("core", "vera") and others:
                what = "ckptkit cannot transpose an update of VeRA or a Tucker decomposition"
                raise UnsupportedError(what)
            turned = [turn(operands[number]) for number in (first, *others[:1])]
            for number, made in zip((first, *others[:1]), reversed(turned), strict=True):
                operands[number] = made
        by = "columns" if self.formula.by == "rows" else "rows"
        formula = replace(self.formula, by=by)
        return replace(
            self, formula=formula, operands=tuple(operands), rows=self.columns, columns=self.rows
        )


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


def placed(parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Return a new tensor. `parts` lists an offset per dimension, and the tensor at this offset.

    Offsets of the last dimensions may be missing and are then 0.
    """
    dtype, ndim = parts[0][1].dtype, parts[0][1].ndim
    places = [((*at, *(0,) * (ndim - len(at))), tensor) for at, tensor in parts]
    ends = [[o + n for o, n in zip(at, each.shape, strict=True)] for at, each in places]
    shape = (*map(max, zip(*ends, strict=True)),)
    return made_of(joined(dtype, shape, places), dtype, shape)


def zeros(like: Tensor, shape: Shape) -> Tensor:
    """Return a tensor of zeros with the dtype of `like`."""
    zero = Storage(Range(Memory(bytes(16), "zeros"), 0, 16))
    return Tensor(zero, like.dtype, shape, (0,) * len(shape))


def _block_diagonal(module: Module, tensor: Tensor, blocks: object) -> Tensor:
    """Return the block-diagonal matrix of BD-LoRA. Each block consists of rows of `tensor`."""
    rows, columns = tensor.shape
    if not isinstance(blocks, int) or blocks < 1 or rows % blocks:
        raise UnsupportedError(
            f"{shown(module.path)} has {rows} rows, which are not divisible into {blocks} blocks"
        )
    step, numbers = rows // blocks, range(blocks)
    zero = zeros(tensor, (step, columns))
    return placed([
        ((n * step, m * columns), box(tensor, n * step, (n + 1) * step) if n == m else zero)
        for n in numbers for m in numbers
    ])  # fmt: skip


def change_of(
    module: Module, config: Mapping[str, Any], weight: float = 1.0, **tensors: Tensor
) -> ModuleChange:
    """Return the update of a module, multiplied by `weight`.

    The keyword arguments `tensors` replace tensors of the module. The keywords are roles. Raises
    UnsupportedError if the shapes of the factors do not match.
    """
    has = {**module.tensors, **tensors}
    blocks = config.get("use_bdlora") if module.kind == "lora" else None
    blocks = blocks if isinstance(blocks, dict) else {}
    for role, field in (("A", "target_modules_bd_a"), ("B", "target_modules_bd_b")):
        end, names = module.path.rpartition(".")[2], blocks.get(field) or ()
        if any(str(each) in end for each in names):
            has[role] = _block_diagonal(module, has[role], blocks.get("nblocks"))
    _, combine, rounding, how, factors = next(
        row
        for row in _TABLE
        if row[0] == module.kind and all(e.rstrip("'") in has for part in row[4] for e in part)
    )
    operands: list[Tensor] = []
    made: list[Factor] = []
    sizes: list[tuple[int, int]] = []
    for roles in factors:
        numbers = tuple(range(len(operands), len(operands) + len(roles)))
        inner = "" if len(roles) < 3 else how
        made.append(Factor(numbers, inner))
        found = [turn(matrix(has[r[:-1]])) if r[-1] == "'" else matrix(has[r]) for r in roles]
        operands += found
        sizes.append(_size(module, found, inner))
    rows, columns = sizes[0]
    group = 1
    if combine == "kron":
        rows, columns = rows * sizes[1][0], columns * sizes[1][1]
        if "lokr_w2" in has and has["lokr_w2"].ndim == 3 and not module.prefix:
            # torch.kron inserts the missing dimension of w1 as the first dimension. peft then
            # reshapes the result.
            combine, group = "front", has["lokr_w2"].shape[1]
            operands[-1] = matrix(
                has["lokr_w2"], (prod(has["lokr_w2"].shape[:2]), sizes[1][1] // group)
            )
    elif len(set(sizes)) > 1:
        raise _unfit(module, found)
    is_mica = config.get("init_lora_weights") == "mica" and module.kind == "lora"
    two = is_mica or module.parameter or bool(blocks)
    scale = 1.0 if module.scale is None else module.scale
    formula = Formula(
        tuple(made), combine, scale * weight, module.divisor, "twice" if two else rounding,
        group=group,
    )  # fmt: skip
    kernel = has["A"].shape[2:] if module.kind == "lora" and "A" in has else ()
    change = ModuleChange(formula, tuple(operands), rows, columns, kernel, module.path)
    return _with_norm(change, module) if module.is_dora else change


def _size(module: Module, found: list[Tensor], how: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a factor.

    Raises UnsupportedError if the shapes of the operands do not match.
    """
    left, *others = found
    rows, columns = left.shape
    if not others:
        return rows, columns
    right = others[-1] if how == "core" else others[0]
    inner = others[0].shape[0]
    fits = columns == inner
    kernel = 1
    if how == "core":
        kernel, rest = divmod(others[0].shape[1], max(1, right.shape[0]))
        fits = fits and not rest
    elif how:
        fits = fits and prod(others[1].shape) == inner
        fits = fits and all(prod(each.shape) == rows for each in others[2:])
    if not fits:
        raise _unfit(module, found)
    return rows, right.shape[1] * kernel


def _unfit(module: Module, found: list[Tensor]) -> UnsupportedError:
    sizes = " and ".join(shape_text(each.shape) for each in found)
    what = f"the shapes of the factors of {shown(module.path)} do not match: {sizes}"
    return UnsupportedError(what, code="shape")


def _with_norm(change: ModuleChange, module: Module) -> ModuleChange:
    """Return the update with the magnitudes of DoRA.

    A magnitude belongs to a row, or to a column of an embedding. In LyCORIS, magnitudes of shape
    [1, in, ...] belong to columns, and `EPS` is added to the norm.
    """
    numbers = module.tensors["magnitude"]
    by, norm, group = "rows", "norm", 1
    if module.kind == "embedding":
        by = "columns"
    elif any(module.prefix in table("prefixes")[layout] for layout in ("kohya", "comfy")):
        norm = "norm+eps"
    if norm == "norm+eps" and numbers.shape[0] == 1 != change.rows:
        by, group = "columns", change.columns // max(1, prod(numbers.shape))
    count = change.rows if by == "rows" else change.columns // max(1, group)
    if prod(numbers.shape) != count:
        raise UnsupportedError(
            f"the magnitudes of {shown(module.path)} have shape {shape_text(numbers.shape)}, but "
            f"the module has {count} {by}"
        )
    formula = replace(change.formula, norm=norm, by=by, group=group)
    return replace(change, formula=formula, operands=(*change.operands, matrix(numbers)))


def multiplied(module: Module, shape: Shape, config: Mapping[str, Any]) -> ModuleChange:
    """Return the update of IA3 for a weight of this shape. IA3 multiplies rows or columns."""
    numbers = module.tensors["ia3"]
    rows, columns = as_matrix(shape)
    by, turned = "rows", bool(config.get("fan_in_fan_out")) and len(shape) == 2
    if is_feedforward(module, config):
        by = "columns"
    if turned:
        by = "columns" if by == "rows" else "rows"
    group = columns // shape[1] if by == "columns" and len(shape) > 1 else 1
    count = rows if by == "rows" else columns // max(1, group)
    if prod(numbers.shape) != count:
        raise UnsupportedError(
            f"the IA3 vector of {shown(module.path)} has {prod(numbers.shape)} numbers, but the "
            f"weight has {count} {by}"
        )
    return ModuleChange(Formula(norm="none", by=by, group=group), (matrix(numbers),), rows, columns)


def is_feedforward(module: Module, config: Mapping[str, Any]) -> bool:
    """Return whether IA3 multiplies the inputs of a module. peft uses the same criterion."""
    names = config.get("feedforward_modules") or ()
    if isinstance(names, str):
        return matches(names, module.path)
    return any(module.path.endswith(str(each)) for each in names)
