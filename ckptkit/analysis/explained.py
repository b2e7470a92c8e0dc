"""Compare a GGUF model with its original, and separate quantization errors from other differences.

Each quantization type has a limit for its error. The limit is 1.5 times the largest error of ggml's
quantizer on typical weights. A wrong conversion, for example with permuted rows, causes differences
above the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from ckptkit.analysis.diff import (
    Changed,
    Diff,
    Explanation,
    Mismatch,
    Progress,
    Tensors,
    kind,
    kinds,
    named,
    with_values,
)
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.compare import Difference
from ckptkit.compute.compare import compare as compare_tensors
from ckptkit.compute.lazy import np
from ckptkit.compute.numbers import INVERSES, Compute, cast_record, decode, is_decoded
from ckptkit.compute.operation import BUFFER, Reader, aligned, stream_reusing_buffer
from ckptkit.core.bytesource import Pending, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural

# Maximum quantization error of each type. The error is the norm of the difference divided by the
# norm of the weight.
LIMITS = {
    "Q8_0": 0.0125, "Q6_K": 0.04, "Q5_K": 0.07, "Q5_1": 0.075, "Q5_0": 0.1, "Q4_K": 0.14,
    "Q4_1": 0.15, "IQ4_NL": 0.15, "IQ4_XS": 0.15, "Q4_0": 0.19, "NVFP4": 0.2, "MXFP4": 0.22,
    "Q3_K": 0.28, "IQ3_S": 0.31, "IQ3_XXS": 0.4, "Q2_K": 0.5, "IQ2_S": 0.54, "IQ2_XS": 0.58,
    "IQ2_XXS": 0.7, "IQ1_M": 0.72, "IQ1_S": 0.85, "TQ1_0": 1.05, "TQ2_0": 1.05, "Q2_0": 1.05,
    "Q1_0": 1.2,
}  # fmt: skip
COMPUTED = 1e-6  # maximum relative rounding error of float32 arithmetic
SAMPLES = 8  # maximum number of rows of a GGUF tensor to look for in the original
REORDERED = 8  # maximum number of tensors to check for permuted rows


class Origin(NamedTuple):
    """The GGUF tensors from which a tensor of the original is restored: their types and names.

    ``computed`` is the expression that computes the tensor from the GGUF tensors.
    """

    types: tuple[str, ...]
    computed: str = ""  # expression in `INVERSES`, or ""
    names: frozenset[str] = frozenset()

    @property
    def limit(self) -> float:
        """The maximum relative error that the GGUF types and the expression can cause."""
        computed = COMPUTED if self.computed else 0.0
        return max((*(LIMITS.get(each, 0.0) for each in self.types), computed))


def compare_with_original(
    gguf: Tensors,
    original: Tensors,
    origins: Mapping[str, Origin],
    *,
    values: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare the original model (A) with the dequantized tensors of a GGUF file (B).

    `gguf` maps the tensor names of the original to dequantized tensors. `name` is the file of the
    original. Dtypes are not compared. Instead, elements of the original are rounded to the dtype in
    the GGUF file.
    """
    both = [key for key in gguf if key in original]
    mismatched = tuple(
        Mismatch(key, kind(original[key]), kind(gguf[key]))
        for key in both
        if gguf[key].shape != original[key].shape
    )
    odd = {each.name for each in mismatched}
    found = with_values(
        Diff(mismatched=mismatched, values_compared=values, dtypes_compared=False),
        [key for key in both if key not in odd] if values else [],
        lambda key: _difference(gguf[key], original[key], origins[key]),
        lambda key: gguf[key].nbytes + original[key].nbytes,
        progress or (lambda nbytes: None),
    )
    explanations = {}
    for key, each in found.changed:
        origin, is_finite = origins[key], isfinite(each.largest or 0.0)
        explains = each.relative is not None and each.relative <= origin.limit and is_finite
        explanations[key] = Explanation(", ".join(origin.types), origin.limit, explains)
    unexplained = [key for key, each in explanations.items() if not each.explained]
    for key in unexplained[:REORDERED]:
        if _has_rows_elsewhere(gguf[key], original[key], explanations[key].limit):
            explanations[key] = explanations[key]._replace(reordered=True)
    left = [] if values else ["the values of tensors (--no-values)"]
    left += [f"the values of {each}" for each in found.unread]
    found = replace(found, explanations=explanations)
    return replace(named(found, kinds(original), kinds(gguf), name, ()), uncompared=tuple(left))


def _difference(a: Tensor, b: Tensor, origin: Origin) -> Difference | TensorError | None:
    """Return the difference between a GGUF tensor `a` and a tensor `b` of the original.

    If the tensors are equal, return None. If they cannot be compared, return a TensorError.

    If `a` is not quantized, `b` is first rounded to the dtype of `a`. If llama.cpp computed `a`
    during the conversion, the computation was in float16 or float32. In this case, `a` is compared
    with the results of both computations.
    """
    try:
        if origin.limit > COMPUTED:
            return compare_tensors(a, b, atol=0.0, rtol=0.0, measured=True)
        record = contiguous(b)
        found = _compared(a, b, record, b.dtype)
        is_near = found is None or (found.relative or 0.0) <= origin.limit
        if is_near or not origin.computed or b.dtype.name != "float16":
            return found
        inverse = Compute(INVERSES[origin.computed], "float16", "")
        wide = cast_record(
            Pending(inverse, (record,), b.nbytes), b.dtype, BY_NAME["float32"], big_endian=False
        )
        again = Pending(Compute(origin.computed, "float32", ""), (wide,), 2 * b.nbytes)
        rounded = _compared(a, b, again, BY_NAME["float32"])
        return rounded if rounded is None or (rounded.relative or 0.0) <= origin.limit else found
    except TensorError as error:
        return error


def _compared(a: Tensor, b: Tensor, record: Record, dtype: DType) -> Difference | None:
    """Return the difference between `a` and `record`. `record` contains elements of `dtype` in the
    shape of `b`."""
    if dtype != b.dtype or dtype != a.dtype:
        if dtype != a.dtype:
            record = cast_record(record, dtype, a.dtype, big_endian=False)
        storage = Storage(record, b.device)
        b = Tensor(storage, a.dtype, b.shape, contiguous_stride(b.shape), 0)
    return compare_tensors(a, b, atol=0.0, rtol=0.0, measured=True)


def _has_rows_elsewhere(a: Tensor, b: Tensor, limit: float) -> bool:
    """Return True if `b` contains all sampled rows of `a`, but not all at equal positions.

    Two rows count as equal if their difference is small.
    """
    if len(a.shape) != 2 or min(a.shape) < 2 or limit > 0.5 or not is_decoded(b.dtype):
        return False
    (rows, columns), step = a.shape, a.shape[1] * a.dtype.itemsize
    read = Reader(contiguous(a).locate())
    places = sorted({rows * n // SAMPLES for n in range(SAMPLES)})
    wanted = [decode(read.copy(place * step, step), a.dtype).astype("f4") for place in places]
    x = np.stack(wanted)
    squares = (x * x).sum(axis=1)
    nearest, where = np.full(len(places), np.inf), np.zeros(len(places), "i8")
    at, unit = 0, columns * b.dtype.itemsize
    for piece in aligned(stream_reusing_buffer(contiguous(b).locate()), unit, max(unit, BUFFER)):
        y: np.ndarray[Any, Any] = decode(piece, b.dtype).astype("f4").reshape(-1, columns)
        with np.errstate(all="ignore"):
            far = squares[:, None] + (y * y).sum(axis=1) - 2 * x @ y.T
        best = far.argmin(axis=1)
        distance = far[np.arange(len(places)), best]
        where = np.where(distance < nearest, at + best, where)
        nearest = np.fmin(distance, nearest)
        at += len(y)
    is_near = nearest <= squares * max(2 * limit, 0.01) ** 2
    return bool(is_near.all() and (where != np.array(places)).any())


def lines(explanations: Mapping[str, Explanation], changed: Iterable[Changed]) -> list[str]:
    """Return a sentence for each GGUF type whose error explains differences, and for each tensor
    whose difference is larger than the error of its type."""
    by_type: dict[str, list[float]] = {}
    limits, others = dict[str, float](), []
    for name, difference in changed:
        each, relative = explanations[name], difference.relative
        if each.explained and relative is not None:
            by_type.setdefault(each.type, []).append(relative)
            limits.setdefault(each.type, each.limit)
            continue
        differs = "differs" if relative is None else f"differs by {_percent(relative)}"
        if not isfinite(difference.largest or 0.0):
            differs = "differs in NaN or infinite elements"
        why = f"but {each.type} is a lossless type"
        if each.limit:
            why = f"more than the error of {each.type} (limit {_percent(each.limit, 3)})"
        why += "; both files have the same rows in a different order" * each.reordered
        others.append(f"{name}: {differs}, {why}")
    found = []
    for type, errors in by_type.items():
        low, high = _percent(min(errors)), _percent(max(errors))
        span = high if low == high else f"{low.removesuffix(' %')} to {high}"
        differ = f"{plural(len(errors), 'tensor')} differ{'s' * (len(errors) == 1)}"
        limit = _percent(limits[type], 3)
        found.append(f"{differ}, within the error of {type} ({span}, limit {limit})")
    return [*found, *others]


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}g} %" if share < 1 else f"{100 * share:.0f} %"
