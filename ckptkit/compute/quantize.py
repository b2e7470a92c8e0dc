"""Quantize weights: compute codes and scales by rounding to nearest.

``fp8-block`` has blocks of 128 x 128, as in transformers. The scale maps the largest magnitude of a
block to 448, and its inverse is stored. ``mxfp4`` has blocks of 32 columns, as in
compressed-tensors. The exponent is that of the largest magnitude after rounding. ``Q8_0`` of GGUF
has blocks of 32 elements: a float16 scale and int8 codes, as ggml's quantizer makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, Reader, Rows
from ckptkit.core.bytesource import Derived, Operation, Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BLOCK = 128  # rows and columns of fp8-block
GROUP = 32  # columns of mxfp4
LARGEST = 448.0  # largest number of E4M3
TILE = 1 << 18  # elements per step
# Midpoints between the magnitudes of FP4. A midpoint itself is rounded to the even code.
_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True, slots=True)
class Quantize(Operation):
    """Codes or scales (`part`) of a floating-point matrix. `name` is for error messages."""

    kind: str
    part: str
    dtype: str
    rows: int
    columns: int
    name: str

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        """Raise TensorError for NaN and infinities, because no scale can represent them."""
        import numpy as np

        dtype, rows, columns = BY_NAME[self.dtype], self.rows, self.columns
        read = Reader(extent.inputs[0])
        unit = BLOCK if self.kind == "fp8-block" else 1
        tall = max(unit, TILE // max(1, columns) // unit * unit)
        size = extent.length * unit // rows  # bytes of the result for `unit` rows
        top = start // size * unit
        while (at := top // unit * size) < stop:
            bottom = min(top + tall, rows)
            step = columns * dtype.itemsize
            data = read.copy(top * step, (bottom - top) * step)
            with np.errstate(all="ignore"):
                values = decode(data, dtype).astype("<f4").reshape(bottom - top, columns)
                if not np.isfinite(values).all():
                    raise TensorError(
                        f"{self.name!r} contains NaN, infinite or too large values, which "
                        f"{self.kind} cannot represent",
                        hint="`verify --values` counts them; --drop drops the weight",
                    )
                made = _KINDS[self.kind](values, self.part)
            yield made[max(start - at, 0) : min(stop - at, len(made))]
            top = bottom

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        step = size if extent.length > 2 * size else extent.length
        yield from range(step, extent.length, step)
        yield extent.length


def quantized_records(
    record: Record, kind: str, source: DType, rows: int, columns: int, name: str
) -> tuple[Record, Record]:
    """Return the codes and scales of a matrix of `source` elements. `name` is for messages."""
    sizes = {
        "fp8-block": (rows * columns, 4 * (rows // BLOCK) * (columns // BLOCK)),
        "mxfp4": (rows * columns // 2, rows * columns // GROUP),
    }[kind]
    codes, scales = (
        Pending(Quantize(kind, part, source.name, rows, columns, name), (record,), size)
        for part, size in zip(("codes", "scales"), sizes, strict=True)
    )
    return codes, scales


@dataclass(frozen=True, slots=True)
class Q8_0(Rows):  # noqa: N801  # the name of the type
    """Blocks of 32 floating-point elements as ggml's Q8_0. `name` is for error messages."""

    dtype: str
    name: str

    @property
    def rows(self) -> tuple[int, ...]:
        return 2 + GROUP, GROUP * BY_NAME[self.dtype].itemsize

    def of(self, *pieces: Piece) -> memoryview:
        """Raise TensorError for NaN, infinities, and values whose scale exceeds float16."""
        import numpy as np

        with np.errstate(all="ignore"):
            groups = decode(pieces[0], BY_NAME[self.dtype]).astype("<f4").reshape(-1, GROUP)
            scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
            stored = scales.astype("<f2")
            if not np.isfinite(stored).all():
                what = "contains NaN, infinite or too large values, which Q8_0 cannot represent"
                raise TensorError(f"{self.name!r} {what}", hint="`verify --values` counts them")
            inverse = np.float32(1) / scales
            # The inverse is infinite if float16 rounds the scale to 0. The codes are then 0 too.
            groups = groups * np.where(np.isfinite(inverse), inverse, np.float32(0))
            # Round to the nearest integer, halves away from zero.
            sizes = np.abs(groups)
            whole = np.floor(sizes)
            codes = np.copysign(whole + (sizes - whole >= 0.5), groups)
        made = np.empty((len(groups), 2 + GROUP), "u1")
        made[:, :2] = stored.view("u1")
        made[:, 2:] = codes.astype("i1").view("u1")
        return made.reshape(-1).data


def q8_0_record(record: Record, source: DType, name: str) -> Record:
    """Return elements of `source`, in whole blocks of 32, as Q8_0. `name` is for messages."""
    blocks = record.length // (GROUP * source.itemsize)
    return Pending(Q8_0(source.name, name), (record,), blocks * (2 + GROUP))


def _bytes(values: Array) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(values).reshape(-1).view("u1").data


def _fp8_block(values: Array, part: str) -> memoryview:
    """Return the codes of blocks scaled to a largest magnitude of 448, or the inverse scales."""
    import numpy as np

    rows, columns = values.shape
    blocks = values.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    # torch computes a number divided by a tensor as the number times the reciprocal
    scales = np.float32(LARGEST) * (np.float32(1) / np.where(largest > 0, largest, np.float32(1)))
    scales = np.where(largest > 0, scales, np.float32(1))
    if part == "scales":
        return _bytes((np.float32(1) / scales).astype("<f4"))
    blocks *= scales[:, None, :, None]
    np.clip(values, -LARGEST, LARGEST, out=values)
    return encode(values.reshape(-1), BY_NAME["float8_e4m3fn"])


def _mxfp4(values: Array, part: str) -> memoryview:
    """Return the codes of groups of 32, two per byte, or the exponent byte of each group.

    The exponent is that of the largest magnitude, rounded to a power of two, minus 2.
    """
    import numpy as np

    groups = values.reshape(len(values), -1, GROUP)
    bits = np.abs(groups).max(axis=2).view("<u4") + np.uint32(1 << 21)
    exponents = np.clip((bits >> 23).astype("<i4") - 2, 0, 255)
    if part == "scales":
        return _bytes(exponents.astype("u1"))
    scaled = np.ldexp(groups, 127 - exponents[..., None]).reshape(-1)
    size = np.abs(scaled)
    code = np.zeros(len(size), "u1")
    for number, limit in enumerate(_LIMITS):  # a midpoint above an even code stays at that code
        code += size > limit if number % 2 == 0 else size >= limit
    code |= (scaled < 0).astype("u1") << 3
    return _bytes(code[0::2] | (code[1::2] << 4))


_KINDS = {"fp8-block": _fp8_block, "mxfp4": _mxfp4}
