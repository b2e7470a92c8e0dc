"""Describe how the elements of a quantized weight follow from codes and scales.

`Blocks` is the one parameter of the operation ``blocks``. Its result is an array of `batches`
matrices of `rows` x `columns` elements, row-major; codes, scales and zero points are each one of
its inputs.

    value = (number of the code - offset - zero) * scale [* factor] [+ bias]

where ``scale`` is the product (or quotient) of one or more arrays of numbers, each of which has one
number for a block of `height` x `width` elements.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = "target"  # in place of a dtype: the one that was asked for


@dataclass(frozen=True, slots=True)
class Grid:
    """An array of `rows` x `columns` numbers for each batch.

    Each number serves `height` x `width` elements.
    ``order`` is how they lie: ``rows`` (row-major), ``columns`` (its transpose), or ``tiles`` (as
    the scaled matrix products of cuBLAS take them: 128 rows by 4 columns, padded).
    """

    height: int
    width: int
    rows: int
    columns: int
    order: str = "rows"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of dtype `dtype` in input `input`.

    Besides dtypes of tensors: ``exponent``, 2 ** (byte - 127) in float32; ``ldexp``, the same
    without a limit; ``map``: the byte is an index into the float32 numbers of input `map`. With
    ``shared`` there is one batch of them, for all. `combine` says what becomes of the product of
    those before: ``multiply`` or ``divide``; `add` is then added to it, in float32 (the offset of
    nested scales).
    """

    input: int
    dtype: str
    grid: Grid
    combine: str = "multiply"
    shared: bool = False
    map: int = 0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of codes of `bits` bits in an input.

    ============  ==============================================================================
    flat          in the order of the elements; of 4 bits, the low half of a byte first or not
    rows          each row in `stride` bytes, densely from the low bits up
    words         each row in `stride` bytes, 32 // bits codes in each word of 32 bits
    columns       words of 32 bits [batch, `stride`, rows]: row n is packed densely down column n
    interleaved   words of 32 bits [columns, rows / 8]: code i of a word is row 8 * word + order[i]
    turned        bytes [batch, columns, rows / 2]: two rows in a byte, the low half first
    parts         in the order of the elements, cut into 8 / bits equal parts, one for each field of
                  a byte (of 3 bits: ten parts, for the fields of a word of 32 bits)
    ============  ==============================================================================
    """

    kind: str
    bits: int
    high_first: bool = False
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Zero:
    """Zero points that are packed: ``(code + add) % 2**bits - offset``, one for each block.

    `across` if words hold neighboring rows of the grid's blocks ([columns, words] of GPTQ), else
    they hold codes down a column ([words, columns] of compressed-tensors).
    """

    input: int
    bits: int
    grid: Grid
    kind: str = "across"  # or "down", "interleaved"
    add: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """See the module. `table` names the numbers of the codes; None: they are integers.

    Of ``map`` they are those of input `map`; of ``map-signed`` too, and code 8 is the negative
    zero.
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
    zero: Zero | Numbers | None = None
    index: int = 0  # input with the block of each column, where these are not in order; 0: none
    bias: Numbers | None = None
    subtract_bias: bool = False
    factor: float = 0.0  # in float32, after the product; 0: none
    scale_dtype: str = "float32"  # that each scale and their product are rounded to
    product_dtype: str = "float32"  # that differences, products and sums are rounded to
    target: str = "bfloat16"

    @property
    def elements(self) -> int:
        return self.batches * self.rows * self.columns
