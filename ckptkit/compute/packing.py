"""The layout of quantized weights: their codes, scales and zero points.

`Blocks` describes how to compute the elements of a weight from codes and scales. The weight is an
array of `batches` row-major matrices of `rows` x `columns` elements. Codes, scales and zero points
are separate inputs of an operation (:mod:`dequantize`).

    value = (number of the code - offset - zero) * scale [* factor] [+ bias]

``scale`` is the product or quotient of one or more arrays of numbers. Each array has one number for
each block of `height` x `width` elements.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = "target"  # placeholder for the dtype of the result


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The shape of an array of scales, with `rows` x `columns` numbers for each batch.

    Each number applies to a block of `height` x `width` elements. ``order`` is the layout of the
    array:

    * ``rows``: row-major.
    * ``columns``: column-major.
    * ``tiles``: padded tiles of 128 rows by 4 columns, for the scaled matrix products of cuBLAS.
    """

    height: int
    width: int
    rows: int
    columns: int
    order: str = "rows"


@dataclass(frozen=True, slots=True)
class Numbers:
    """An array of scales. `input` is the index of the input that contains the array.

    `dtype` is a dtype of tensors, or one of these names for bytes:

    * ``exponent``: the scale is 2 ** (byte - 127) in float32.
    * ``ldexp``: as ``exponent``, but the scale may be outside the range of float32.
    * ``map``: the byte is an index into the float32 numbers of the input with the index `map`.

    If ``shared`` is set, one batch of scales applies to all batches of the weight. `combine` is
    ``multiply`` or ``divide``. If a layout has several arrays, ckptkit multiplies or divides the
    product of the previous arrays by this array. Then ckptkit adds the float32 number `add`, which
    is the offset of nested scales.
    """

    input: int
    dtype: str
    grid: ScaleGrid
    combine: str = "multiply"
    shared: bool = False
    map: int = 0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of codes of `bits` bits in an input. `kind` is one of these names:

    * ``flat``: the codes are in the order of the elements. The first of two 4-bit codes is in the
      low half of a byte, or in the high half if `high_first` is set.
    * ``rows``: each row of codes has `stride` bytes, without gaps between the codes. A row starts
      at the low bits of its first byte.
    * ``words``: each row of codes has `stride` bytes. Each 32-bit word contains 32 // bits codes.
    * ``columns``: the input is an array of 32-bit words, [batch, `stride`, rows]. The words of
      column n contain the codes of row n without gaps.
    * ``interleaved``: the input is an array of 32-bit words, [columns, rows / 8]. Code number i of
      word number w is an element of row 8 * w + order[i].
    * ``turned``: the input is an array of bytes, [batch, columns, rows / 2]. A byte contains the
      codes of two adjacent rows. The code of the first row is in the low half of the byte.
    * ``parts``: the codes are split into 8 / bits parts of equal length. Field number n of each
      byte contains a code of part number n. Codes of 3 bits are split into ten parts, for the ten
      fields of 32-bit words.
    """

    kind: str
    bits: int
    high_first: bool = False
    stride: int = 0


@dataclass(frozen=True, slots=True)
class ZeroPoint:
    """Packed zero points, one for each block. A zero point is ``(code + add) % 2**bits - offset``.

    `kind` is the layout of the words:

    * ``across``: the words are an array [columns, words], as in GPTQ. A word contains the zero
      points of adjacent rows.
    * ``down``: the words are an array [words, columns], as in compressed-tensors. The words of a
      column contain the zero points of this column.
    * ``interleaved``: as ``across``, but the eight zero points of a word are in the order of AWQ.
    """

    input: int
    bits: int
    grid: ScaleGrid
    kind: str = "across"
    add: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """The layout of a quantized weight. The docstring of the module contains the formula.

    `table` is the name of the table that maps codes to numbers. If `table` is None, codes are
    integers. If `table` is ``map``, the input with the index `map` contains the table.
    ``map-signed`` is the same as ``map``, but code 8 is negative zero.
    """

    batches: int
    rows: int
    columns: int
    packing: Packing
    scales: tuple[Numbers, ...]
    table: str | None = None
    map: int = 0
    signed: bool = False
    offset: int = 0
    zero: ZeroPoint | Numbers | None = None
    # Index of the input that maps each column to its block. 0 means that blocks are in order.
    index: int = 0
    bias: Numbers | None = None
    subtract_bias: bool = False
    factor: float = 0.0  # float32 factor of the product; 0 means no factor
    scale_dtype: str = "float32"  # scales, and products of scales, are rounded to this dtype
    product_dtype: str = "float32"  # differences, products and sums are rounded to this dtype
    target: str = "bfloat16"

    @property
    def elements(self) -> int:
        return self.batches * self.rows * self.columns
