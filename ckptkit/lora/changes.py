"""Convert a module of an adapter to the formula and operands of its weight update.

`problems` finds the reasons why an adapter cannot be merged, and a next step for each reason.
`problems` finds problems of the adapter itself. `ckptkit.lora.merge` finds problems of the adapter
and its base. `lora merge` raises the first problem. `lora check` lists all problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from ckptkit.compute.arranged import contiguous, joined
from ckptkit.core.bytesource import Memory, Pending, Range, Record
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import quoted, shown, typed
from ckptkit.lora.arithmetic import Adapt, Combined, Formula, Operand, Term, as_matrix
from ckptkit.lora.reading import CONFIG, Adapter, Module, expression, matches, table

_Spec: TypeAlias = str | tuple[str, Any, Any]  # a role, or how two matrices are combined

# The update of each kind of module. If a role ends in ', the matrix is transposed. If a kind has
# several updates, ckptkit uses the first whose roles all exist in the module. The sources are
# `get_delta_weight` of each tuner in peft, and `get_weight` of LyCORIS.
_UPDATES: tuple[tuple[str, _Spec], ...] = (
    ("lora", ("@", "B", "A")),
    ("attention_out", ("@", "B", "A")),
    ("embedding", ("@", "embedding_A'", "embedding_B'")),
    ("adalora", ("@", "B", ("*", "A", "E"))),
    ("tucker", ("@", "B", ("core", "mid", "A"))),
    ("vera", ("@", ("*", "vera_B", "lambda_b"), ("*", "vera_A", "lambda_d"))),
    ("loha", ("*", ("@", "hada_w1_a'", ("core", "hada_t1", "hada_w1_b")),
              ("@", "hada_w2_a'", ("core", "hada_t2", "hada_w2_b")))),
    ("loha", ("*", ("@", "hada_w1_a", "hada_w1_b"), ("@", "hada_w2_a", "hada_w2_b"))),
    *(("lokr", ("kron", first, second))
      for first in ("lokr_w1", ("@", "lokr_w1_a", "lokr_w1_b"))
      for second in ("lokr_w2", ("@", "lokr_w2_a'", ("core", "lokr_t2", "lokr_w2_b")),
                     ("@", "lokr_w2_a", "lokr_w2_b"))),
    ("diff", "diff"),
)  # fmt: skip
_ROUNDINGS = {"attention_out": "again", "embedding": "twice"}


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

        Raises UnsupportedError for Tucker decompositions.
        """

        def turned(term: Any) -> Any:
            if term is None or isinstance(term, Operand):
                return term and term._replace(rows=term.columns, columns=term.rows)
            sides = [turned(each) for each in (term.left, term.right)]
            if term.how in ("core", "front"):
                raise UnsupportedError("ckptkit cannot transpose a Tucker decomposition")
            return Combined.of(term.how, *(sides[::-1] if term.how == "@" else sides))

        by = "columns" if self.formula.by == "rows" else "rows"
        formula = replace(self.formula, term=turned(self.formula.term), by=by)
        count = len(self.operands) - (formula.numbers is not None)
        operands = *map(turn, self.operands[:count]), *self.operands[count:]
        return replace(
            self, formula=formula, operands=operands, rows=self.columns, columns=self.rows
        )

    def added(self, base: Tensor, first: int, origin: Tensor | None = None) -> Tensor:
        """Return the matrix `base` plus some rows of the update, beginning with row `first`.

        If `origin` is not None, the norms are those of `origin` plus the update.
        """
        kind, (rows, columns), has_origin = base.dtype.name, base.shape, origin is not None
        inputs = tuple(map(contiguous, (base, *self.operands, *((origin,) if origin else ()))))
        adapt = Adapt(kind, rows, columns, self.formula, first, self.name, has_origin)
        record = Pending(adapt, inputs, inputs[0].length)
        return made_of(record, base.dtype, base.shape)


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
    """Return a matrix like `under` after replacing some parts.

    `parts` contains the first row, the first column and the new part. No two parts share a row.
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


def _block_diagonal(module: Module, tensor: Tensor, blocks: object) -> Tensor:
    """Return the block-diagonal matrix of BD-LoRA. Each block consists of rows of `tensor`."""
    rows, columns = tensor.shape
    if not isinstance(blocks, int) or blocks < 1 or rows % blocks:
        raise UnsupportedError(
            f"{shown(module.path)} has {rows} rows, which are not divisible into {blocks} blocks"
        )
    step = rows // blocks
    parts = ((n * step, n * columns, box(tensor, n * step, (n + 1) * step)) for n in range(blocks))
    return placed(zeros(tensor, (rows, columns * blocks)), parts)


def change_of(
    module: Module,
    config: Mapping[str, Any],
    weight: float = 1.0,
    shape: Shape | None = None,
    **tensors: Tensor,
) -> ModuleChange:
    """Return the update of a module, multiplied by `weight`.

    `shape` is the shape of the weight. IA3 and VeRA require the shape. The keyword arguments
    `tensors` replace tensors of the module. The keywords are roles. Raises UnsupportedError if the
    shapes of the factors do not match.
    """
    has = {**module.tensors, **tensors}
    if module.kind == "ia3":
        update = ModuleChange(Formula(), (), *as_matrix(shape or ()))
        return _with_numbers(update, module, shape or (), config)
    if module.kind == "vera" and shape is not None:
        rows, columns = as_matrix(shape)
        has["vera_A"] = box(has["vera_A"], 0, columns, 1)
        has["vera_B"] = box(has["vera_B"], 0, rows)
    blocks = config.get("use_bdlora") if module.kind == "lora" else None
    blocks = blocks if isinstance(blocks, dict) else {}
    for role, field in (("A", "target_modules_bd_a"), ("B", "target_modules_bd_b")):
        end, names = module.path.rpartition(".")[2], blocks.get(field) or ()
        if any(str(each) in end for each in names):
            has[role] = _block_diagonal(module, has[role], blocks.get("nblocks"))
    specs = (spec for kind, spec in _UPDATES if kind == module.kind)
    spec = next(each for each in specs if {r.rstrip("'") for r in _roles_of(each)} <= has.keys())
    found = {
        role: turn(matrix(has[role[:-1]])) if role.endswith("'") else matrix(has[role])
        for role in _roles_of(spec)
    }
    numbers = {
        role: Operand(number, each.dtype.name, *each.shape)
        for number, (role, each) in enumerate(found.items())
    }
    try:
        term = _term(spec, numbers)
    except UnsupportedError as error:
        what = f"the shapes of the factors of {shown(module.path)} do not match: {error.message}"
        raise UnsupportedError(what, code="shape") from None
    whole = has.get("lokr_w2")
    is_front = whole is not None and whole.ndim == 3 and not module.prefix
    if whole is not None and isinstance(term, Combined) and is_front:
        # torch.kron inserts the missing dimension of w1 as the first dimension. peft then
        # reshapes the result.
        term = term._replace(how="front", kernel=whole.shape[2])
    is_mica = config.get("init_lora_weights") == "mica" and module.kind == "lora"
    two = is_mica or module.parameter or bool(blocks)
    scale = 1.0 if module.scale is None else module.scale
    rounding = "twice" if two else _ROUNDINGS.get(module.kind, "once")
    formula = Formula(term, scale * weight, module.divisor, rounding)
    kernel = has["A"].shape[2:] if module.kind == "lora" and "A" in has else ()
    operands = tuple(found.values())
    change = ModuleChange(formula, operands, term.rows, term.columns, kernel, module.path)
    return _with_numbers(change, module, (), config) if module.is_dora else change


def change_of_bias(module: Module, role: str, weight: float) -> ModuleChange:
    """Return the update of a bias. IA3 multiplies the bias. Other methods add to the bias."""
    numbers = matrix(module.tensors[role], (module.tensors[role].numel(), 1))
    operand = Operand(0, numbers.dtype.name, *numbers.shape)
    scale = weight * ((module.scale or 0.0) if role == "B_bias" else 1.0)
    is_product = role == "ia3"
    formula = Formula(norm="none", numbers=operand) if is_product else Formula(operand, scale)
    return ModuleChange(formula, (numbers,), operand.rows, 1, name=module.path)


def _roles_of(spec: _Spec) -> list[str]:
    """Return the roles in an update."""
    return [spec] if isinstance(spec, str) else [r for each in spec[1:] for r in _roles_of(each)]


def _term(spec: _Spec, operands: Mapping[str, Operand]) -> Term:
    if isinstance(spec, str):
        return operands[spec]
    return Combined.of(spec[0], *(_term(each, operands) for each in spec[1:]))


def _with_numbers(
    change: ModuleChange, module: Module, shape: Shape, config: Mapping[str, Any]
) -> ModuleChange:
    """Return the update with a factor for each row or column: those of IA3, or DoRA magnitudes.

    IA3 multiplies the outputs of a module, or its inputs in a feedforward module. A magnitude of
    DoRA belongs to a row, or to a column of an embedding. In LyCORIS, magnitudes of shape
    [1, in, ...] belong to columns, and `EPS` is added to the norm.
    """
    role, norm, by, group = "magnitude", "norm", "rows", 1
    numbers = module.tensors["ia3" if module.kind == "ia3" else role]
    count = prod(numbers.shape)
    if module.kind == "ia3":
        role, norm = "ia3", "none"
        is_turned = bool(config.get("fan_in_fan_out")) and len(shape) == 2
        if is_feedforward(module, config) != is_turned:
            by, group = "columns", change.columns // shape[1] if len(shape) > 1 else 1
    elif module.kind == "embedding":
        by = "columns"
    elif any(module.prefix in table("prefixes")[layout] for layout in ("kohya", "comfy")):
        norm = "norm+eps"
        if numbers.shape[0] == 1 != change.rows:
            by, group = "columns", change.columns // max(1, count)
    expected = change.rows if by == "rows" else change.columns // max(1, group)
    if count != expected:
        raise UnsupportedError(
            f"the {role} vector of {shown(module.path)} has {count} numbers, but the weight has "
            f"{expected} {by}"
        )
    operand = Operand(len(change.operands), numbers.dtype.name, *as_matrix(numbers.shape))
    formula = replace(change.formula, norm=norm, by=by, group=group, numbers=operand)
    return replace(change, formula=formula, operands=(*change.operands, matrix(numbers)))


def is_feedforward(module: Module, config: Mapping[str, Any]) -> bool:
    """Return whether IA3 multiplies the inputs of a module. peft uses the same criterion."""
    names = config.get("feedforward_modules") or ()
    if isinstance(names, str):
        return matches(names, module.path)
    return any(module.path.endswith(str(each)) for each in names)


# Problems of an adapter

HELP = "`ckptkit help lora` lists the supported adapters, and explains the search for names"
_AGAIN = "save the adapter again with `model.save_pretrained(FOLDER)` of the peft model"
_BASE = "BASE must be the model that the adapter was trained on"
# Default hint of each problem code
_NEXT = {
    "pair": _AGAIN,
    "empty": "gather the parameters before saving (ZeRO-3, FSDP), then save again",
    "shape": _BASE,
    "no-module": _BASE,
}


class Problem(NamedTuple):
    """A reason why an adapter cannot be merged.

    ``code`` is a code of `lora check`. ``mend`` contains the options of `lora merge` that solve the
    problem.
    """

    code: str
    title: str
    hint: str = HELP
    modules: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: CkptkitError, key: str) -> Problem:
        """Convert an error about the module `key` to a problem."""
        code = {"shape": "shape", "ambiguous": "no-module"}.get(error.code, "method")
        return cls(code, error.message, error.hint or _NEXT.get(code, HELP), (key,))

    @property
    def error(self) -> UnsupportedError:
        return UnsupportedError(self.title, hint=self.hint, code=self.code)


def problems(adapter: Adapter, base_is: str | None = None) -> Iterator[Problem]:
    """Yield the problems that are visible in the files of the adapter.

    A problem without modules concerns the complete adapter.
    """
    config, method = adapter.config or {}, adapter.method
    kind = table("methods").get(method, "unsupported") if adapter.layout == "peft" else "merge"
    if method == "VERA" and not config.get("save_projection", True):
        kind = "projection"
    if kind != "merge":
        loads = "load the adapter and its base with PeftModel.from_pretrained"
        yield Problem("method", f"has the method {method}, which {table('reasons')[kind]}", loads)
        return
    for config in adapter.configs.values():
        for name, why in table("fields")["refused"].items():
            if config.get(name):
                yield Problem("method", f"{why} ({name} in {CONFIG})")
        start = config.get("init_lora_weights")
        is_residual = isinstance(start, str) and expression("residual").fullmatch(start.lower())
        if is_residual and base_is != "residual":
            given = typed("--base-is residual", "base_is='residual'")
            title = f"was trained on the residual of the base after {start}, not on the base"
            hint = f"if BASE is this residual, use {given}"
            yield Problem("residual", title, hint, (), ("--base-is", "residual"))
    unscaled = tuple(key for key, each in adapter.modules.items() if each.scale is None)
    if unscaled:
        given = typed("--alpha A", "alpha=A")
        hint = f"if you know the alpha of the training, use {given}"
        yield Problem(
            "no-config", f"contains no scale, because {CONFIG} is missing", hint, unscaled
        )
    if adapter.unknown:
        title = f"contains unknown tensors: {quoted(adapter.unknown)}"
        yield Problem("method", title, HELP, adapter.unknown)
    for key in adapter.modules:
        yield from _of_module(adapter, key)


def _of_module(adapter: Adapter, key: str) -> Iterator[Problem]:
    module, name = adapter.modules[key], shown(key)
    found: list[tuple[str, str]] = []
    if not module.kind:
        title = f"{name} has only {quoted(sorted(module.tensors))}; the other factors are missing"
        found.append(("pair", title))
    if module.expected is not None and module.rank != module.expected:
        title = f"{name} has rank {module.rank}, but {CONFIG} has {module.expected}"
        hint = f"set r or rank_pattern in {CONFIG} to the rank of the training"
        yield Problem("rank", title, hint, (key,))
    for role, tensor in module.tensors.items():
        if role != "alpha" and tensor.dtype.kind != "float":
            found.append(("method", f"{role} of {name} is {tensor.dtype}; ckptkit requires floats"))
        if 0 in tensor.shape and module.kind != "adalora":
            found.append(("empty", f"{name} is empty; {role} has no elements"))
    if not found and module.kind not in ("", "ia3", "tokens", "bias", "vera"):
        try:
            change_of(module, adapter.configs.get(module.component, {}))
        except UnsupportedError as error:
            found.append(("shape", error.message))
    for code, title in found:
        yield Problem(code, title, _NEXT.get(code, HELP), (key,))


def unknown_fields(adapter: Adapter) -> list[str]:
    """Return the fields of a LoRA configuration that have a value but are unknown to ckptkit."""
    config = (adapter.config if adapter.method == "LORA" else None) or {}
    known = table("fields")["known"].split()
    return [name for name, value in config.items() if name not in known and value]
