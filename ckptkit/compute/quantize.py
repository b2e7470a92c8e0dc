"""Quantize weights: compute codes and scales by rounding to nearest.

* ``fp8-block`` has blocks of 128 x 128 elements, as in transformers. ckptkit scales each block so
  that its largest magnitude is 448. The file contains the inverse of the scale of each block.
* ``mxfp4`` has blocks of 32 columns, as in compressed-tensors. The scale of a block is its largest
  magnitude, rounded to a power of two and divided by 4.
* ``Q8_0`` of GGUF has blocks of 32 elements, with a float16 scale and int8 codes. The results are
  equal to those of ggml's quantizer.
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

BLOCK = 128  # number of rows, and of columns, of a block of fp8-block
GROUP = 32  # number of columns of a block of mxfp4
LARGEST = 448.0  # largest number of E4M3
TILE = 1 << 18  # maximum number of elements per step
# Midpoints between adjacent magnitudes of FP4. A midpoint is rounded to the even code.
_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True, slots=True)
class Quantize(Operation):
    """Quantizes a floating-point matrix.

    The output contains the codes or the scales of the matrix, as `part` selects. `name` is the name
    of the weight for error messages.
    """

    kind: str
    part: str
    dtype: str
    rows: int
    columns: int
    name: str

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        """Raise TensorError for NaN and infinities, because codes cannot represent them."""
        import numpy as np

        dtype, rows, columns = BY_NAME[self.dtype], self.rows, self.columns
        read = Reader(extent.inputs[0])
        unit = BLOCK if self.kind == "fp8-block" else 1
        tall = max(unit, TILE // max(1, columns) // unit * unit)
        size = extent.length * unit // rows  # number of output bytes for `unit` rows
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
                        hint="`verify --values` counts NaN and infinities; --drop drops the weight",
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
    """Return the codes and the scales of a matrix of dtype `source`.

    `name` is the name of the matrix for messages.
    """
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
    """Quantizes blocks of 32 floating-point elements to ggml's Q8_0.

    `name` is the name of the weight for messages.
    """

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
                hint = "`verify --values` counts NaN and infinities"
                raise TensorError(f"{self.name!r} {what}", hint=hint)
            inverse = np.float32(1) / scales
            # If the scale is 0, or so small that its inverse is infinite, all codes are 0.
            groups = groups * np.where(np.isfinite(inverse), inverse, np.float32(0))
            # Round to the nearest integer. Round a midpoint away from zero.
            sizes = np.abs(groups)
            whole = np.floor(sizes)
            codes = np.copysign(whole + (sizes - whole >= 0.5), groups)
        made = np.empty((len(groups), 2 + GROUP), "u1")
        made[:, :2] = stored.view("u1")
        made[:, 2:] = codes.astype("i1").view("u1")
        return made.reshape(-1).data


def q8_0_record(record: Record, source: DType, name: str) -> Record:
    """Return the elements of a record of dtype `source`, quantized to Q8_0.

    The number of elements must be divisible by 32. `name` is the name of the weight for messages.
    """
    blocks = record.length // (GROUP * source.itemsize)
    return Pending(Q8_0(source.name, name), (record,), blocks * (2 + GROUP))


def _bytes(values: Array) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(values).reshape(-1).view("u1").data


def _fp8_block(values: Array, part: str) -> memoryview:
    """Return the codes of the blocks, or the inverse of the scale of each block.

    The largest magnitude of a scaled block is 448.
    """
    import numpy as np

    rows, columns = values.shape
    blocks = values.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    # For a number divided by a tensor, torch computes the number times the tensor's reciprocal.
    scales = np.float32(LARGEST) * (np.float32(1) / np.where(largest > 0, largest, np.float32(1)))
    scales = np.where(largest > 0, scales, np.float32(1))
    if part == "scales":
        return _bytes((np.float32(1) / scales).astype("<f4"))
    blocks *= scales[:, None, :, None]
    np.clip(values, -LARGEST, LARGEST, out=values)
    return encode(values.reshape(-1), BY_NAME["float8_e4m3fn"])


def _mxfp4(values: Array, part: str) -> memoryview:
    """Return the codes of groups of 32 elements, or the exponent byte of each group.

    A byte contains two codes. The scale of a group is the largest magnitude, rounded to a power of
    two and divided by 4. For example, 1.74 is rounded to 1, and 1.75 to 2.
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
    # Round a midpoint down if the code below is even, and up if the code below is odd.
    for number, limit in enumerate(_LIMITS):
        code += size > limit if number % 2 == 0 else size >= limit
    code |= (scaled < 0).astype("u1") << 3
    return _bytes(code[0::2] | (code[1::2] << 4))


_KINDS = {"fp8-block": _fp8_block, "mxfp4": _mxfp4}
