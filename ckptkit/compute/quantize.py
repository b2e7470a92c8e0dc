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

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Rows, ends_after
from ckptkit.core.bytesource import Derived, Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError

BLOCK = 128  # number of rows, and of columns, of a block of fp8-block
GROUP = 32  # number of columns of a block of mxfp4 and Q8_0
LARGEST = 448.0  # largest number of E4M3
# Midpoints between adjacent magnitudes of FP4. A midpoint is rounded to the even code.
_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True, slots=True)
class Quantize(Rows):
    """Quantizes a floating-point matrix.

    The output contains the codes or the scales of the matrix, or its blocks (of Q8_0), as `part`
    selects. `name` is the name of the weight for error messages.
    """

    kind: str
    part: str
    dtype: str
    columns: int
    name: str

    @property
    def rows(self) -> tuple[int, ...]:
        height = BLOCK if self.kind == "fp8-block" else 1
        size = {
            ("fp8-block", "codes"): BLOCK * self.columns,
            ("fp8-block", "scales"): 4 * (self.columns // BLOCK),
            ("mxfp4", "codes"): self.columns // 2,
            ("mxfp4", "scales"): self.columns // GROUP,
            ("Q8_0", "blocks"): self.columns // GROUP * (2 + GROUP),
        }[self.kind, self.part]
        return size, height * self.columns * BY_NAME[self.dtype].itemsize

    def of(self, *pieces: Piece) -> memoryview:
        """Raise TensorError for NaN, infinities and values that exceed the scales of Q8_0."""
        with np.errstate(all="ignore"):
            values = decode(pieces[0], BY_NAME[self.dtype]).astype("<f4").reshape(-1, self.columns)
            largest = np.maximum(values.max(), -values.min())
            if self.kind == "Q8_0":
                largest = (largest / np.float32(127)).astype("<f2")
            if not np.isfinite(largest):
                # The recipes that write GGUF files have no option --drop.
                drops = "" if self.kind == "Q8_0" else "; --drop drops the weight"
                raise TensorError(
                    f"{self.name!r} contains NaN, infinite or too large values, which {self.kind} "
                    "cannot represent",
                    hint=f"`verify --values` counts NaN and infinities{drops}",
                )
            return _KINDS[self.kind](values, self.part)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        return ends_after(extent, size if extent.length > 2 * size else extent.length)


def quantized_records(
    record: Record, kind: str, source: DType, rows: int, columns: int, name: str
) -> tuple[Record, ...]:
    """Return the codes and the scales of a matrix of dtype `source`, or its blocks of Q8_0.

    `name` is the name of the matrix for messages.
    """
    found = []
    for part in ("blocks",) if kind == "Q8_0" else ("codes", "scales"):
        operation = Quantize(kind, part, source.name, columns, name)
        size, read = operation.rows
        length = rows * columns * source.itemsize // read * size
        found.append(Pending(operation, (record,), length))
    return tuple(found)


def q8_0_record(record: Record, source: DType, name: str) -> Record:
    """Return the elements of a record of dtype `source`, quantized to Q8_0.

    The number of elements must be divisible by 32. `name` is the name of the weight for messages.
    """
    groups = record.length // (GROUP * source.itemsize)
    return quantized_records(record, "Q8_0", source, groups, GROUP, name)[0]


def _bytes(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view("u1").data


def _fp8_block(values: Array, part: str) -> memoryview:
    """Return the codes of the blocks, or the inverse of the scale of each block.

    The largest magnitude of a scaled block is 448.
    """
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


def _q8_0(values: Array, part: str) -> memoryview:
    """Return the blocks of groups of 32 elements: a float16 scale and 32 codes."""
    groups = values.reshape(-1, GROUP)
    scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.float32(1) / scales
    # If the scale is 0, or so small that its inverse is infinite, all codes are 0.
    groups = groups * np.where(np.isfinite(inverse), inverse, np.float32(0))
    # Round to the nearest integer. Round a midpoint away from zero.
    sizes = np.abs(groups)
    whole = np.floor(sizes)
    codes = np.copysign(whole + (sizes - whole >= 0.5), groups)
    made = np.empty((len(groups), 2 + GROUP), "u1")
    made[:, :2] = scales.astype("<f2").view("u1")
    made[:, 2:] = codes.astype("i1").view("u1")
    return _bytes(made)


_KINDS = {"fp8-block": _fp8_block, "mxfp4": _mxfp4, "Q8_0": _q8_0}
