"""Dequantize weights that consist of codes and scales, and quantized torch tensors.

The output is computed in tiles that fit the cache of a core. :mod:`packing` contains the formula
for an element. Each step of the formula processes a complete tile, in place. If scales are bytes, a
table contains the result for each pair of a scale and a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import encode, own_dtype
from ckptkit.compute.operation import (
    Pieces,
    Reader,
    ScratchBuffer,
    as_bytes,
    by_rows,
    ends_after,
    stream,
    within,
)
from ckptkit.compute.packing import (
    TARGET,
    Blocks,
    Codes,
    Numbers,
    PackedZero,
    Scale,
    Span,
    ZeroPoint,
    apply,
    combined,
    is_byte,
    joined,
    places,
    rounded,
    table_of,
)
from ckptkit.compute.strided_read import transposed_copy
from ckptkit.core.bytesource import Derived, Operation, Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError, TensorError
from ckptkit.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Number of elements per tile. The numpy calls must be long enough that threads rarely wait for the
# interpreter lock. Two float32 copies of a tile must fit the cache of a core.
TILE = 1 << 18
WIDE = 1 << 19  # maximum number of elements of a row; a longer row is split into several tiles
# Number of rows per tile for layouts in which adjacent codes of the input belong to different rows
# of the weight. The rows fill a cache line of the input. For these layouts, ckptkit processes a
# tile in ranges of columns, so that each range fits the cache.
TALL = {"columns": 16, "interleaved": 128, "turned": 128}
# Maps each 8-bit dtype with at most four significant bits to its lowest code of an infinity or NaN,
# without the sign bit.
_ODD = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
# The largest and the smallest scale whose product with any code is a normal float32 number.
_LARGEST, _LEAST = 2.0**100, 2.0**-100


@dataclass(frozen=True, slots=True)
class Dequantize(Operation):
    """Dequantizes a weight. The inputs are the codes, scales and zero points of the weight."""

    blocks: Blocks
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        import numpy as np

        size = BY_NAME[self.blocks.target].itemsize
        first, last = start // size, -(-stop // size)
        kind = TabledDequantizer if is_tabled(self.blocks) else Dequantizer
        readers = [Reader(each) for each in extent.inputs]
        make = kind(self.blocks, readers, [each.length for each in extent.inputs], last)
        for begin, span in spans(self.blocks, first, last):
            with np.errstate(all="ignore"):  # the original libraries return infinities and NaN too
                made = make(span)
            yield from within((made,), begin * size, start, stop)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Return the end of each part of the output. A part has about `size` bytes.

        Parts do not split the small matrices of a batch.
        """
        matrix = extent.length // self.blocks.batches
        step = -(-size // matrix) * matrix if matrix <= 2 * size else size
        return ends_after(extent, step)


def spans(blocks: Blocks, first: int, last: int) -> Iterator[tuple[int, Span]]:
    """Yield rectangles in order. All rectangles together contain the elements `first` to `last`.

    Each item is a pair: the position of the rectangle's first element, and the rectangle. A
    rectangle consists of complete rows, or is a part of one row.
    """
    rows, columns = blocks.rows, blocks.columns
    tall = 1 << (max(1, TILE // max(1, columns)).bit_length() - 1)  # a power of two
    tall = max(tall, TALL.get(blocks.packing.kind, 1))
    while first < last:
        row, left = divmod(first, columns)
        batch, top = divmod(row, rows)
        if columns > WIDE:
            left -= left % TILE
            right = min(left + TILE, columns)
            yield row * columns + left, Span(batch, top, top + 1, left, right)
            first = row * columns + right
            continue
        end = min(top - top % tall + tall, rows, -(-last // columns) - batch * rows)
        if blocks.packing.kind == "turned":  # in the layout "turned", several rows share a scale
            top -= top % tall
            end = min(top + tall, rows)
        yield (batch * rows + top) * columns, Span(batch, top, end, 0, columns)
        first = (batch * rows + end) * columns


class Dequantizer:
    """Dequantizes rectangles in ascending order, up to element `last`."""

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reader], sizes: Sequence[int], last: int
    ) -> None:
        import numpy as np

        self.index: Array | None = None
        if blocks.index:
            blocks, self.index = _indexed(blocks, reads[blocks.index].copy(0, sizes[blocks.index]))
        whole = self.index is not None
        self.blocks, self.target = blocks, BY_NAME[blocks.target]
        self.codes = Codes(blocks, reads[0], sizes[0], last)
        self.scales = [Scale(each, reads, sizes, whole) for each in blocks.scales]
        self.bias = None if blocks.bias is None else Scale(blocks.bias, reads, sizes, whole)
        self.zero: Scale | PackedZero | None = None
        if isinstance(blocks.zero, ZeroPoint):
            self.zero = PackedZero(
                blocks.zero, reads[blocks.zero.input], sizes[blocks.zero.input], whole
            )
        elif blocks.zero is not None:
            self.zero = Scale(blocks.zero, reads, sizes, whole)
        self.table: Array | None = None
        if blocks.table in ("map", "map-signed"):
            self.table = np.frombuffer(reads[blocks.map](0, sizes[blocks.map]), "<f4").copy()
            self.table[np.isnan(self.table)] = np.nan
            if blocks.table == "map-signed" and self.table[8] == 0:
                self.table[8] = -0.0  # bitsandbytes writes 0 to the file but computes with -0
        elif blocks.table is not None:
            self.table = table_of(blocks.table)
        # The dtypes to which scales and products are rounded.
        self.scale_dtype, self.product_dtype = (
            blocks.target if name == TARGET else name
            for name in (blocks.scale_dtype, blocks.product_dtype)
        )
        self.unit = np.dtype(f"<u{self.target.itemsize}")
        self._memory, self._spare = ScratchBuffer(), ScratchBuffer()
        self._pairs: Array | None = None  # the two numbers of each pair of adjacent codes
        # A pair: the scales that `_has_ties` tested last, and the result of `_has_ties`.
        self._ties: tuple[Array, bool] | None = None

    def __call__(self, span: Span) -> memoryview:
        """Return the bytes of the elements of a rectangle."""
        import numpy as np

        rows, columns = span.shape
        made = np.empty(span.shape, self.unit)
        step = max(1, TILE // rows // 512) * 512 if self.blocks.packing.kind in TALL else columns
        for left in range(span.left, span.right, step):
            part = span._replace(left=left, right=min(left + step, span.right))
            self._fill(made[:, left - span.left : part.right - span.left], part)
        return made.reshape(-1).view("u1").data

    def _fill(self, made: Array, span: Span) -> None:
        """Fill `made` with the elements of a rectangle.

        An item of `made` has the size of an element of the target dtype.
        """
        import numpy as np

        blocks = self.blocks
        is_direct = self.target.name == "float32" and made.flags.c_contiguous
        if is_direct:
            values = made.view("<f4")
        else:
            values = np.frombuffer(self._memory.of(4 * made.size), "<f4").reshape(made.shape)
        scale = combined(self.scales, span, self.scale_dtype)
        is_shifted = self._is_shifted
        is_nearest = self._numbers(span, values, scale)
        if self.zero is not None and not is_shifted:
            self._apply(np.subtract, values, self.zero, span)
            if isinstance(self.zero, Scale):
                self._round(values)
        apply(np.multiply, values, scale, self.scales[0].grid, span, self.index)
        if blocks.factor or self.bias is not None or self.product_dtype != self.target.name:
            self._round(values)
        if blocks.factor:
            values *= np.float32(blocks.factor)
        if self.bias is not None:
            self._apply(np.subtract if blocks.subtract_bias else np.add, values, self.bias, span)
            self._round(values)
        if is_nearest:
            bits = values.view("<u4")
            bits += np.uint32(0x8000)
            bits >>= np.uint32(16)
            np.copyto(made, bits, casting="unsafe")
        elif self.target.name == "bfloat16":
            np.copyto(made.view(own_dtype("bfloat16")), values, casting="unsafe")
        elif not is_direct:
            data = encode(values.reshape(-1), self.target)
            np.copyto(made, np.frombuffer(data, self.unit).reshape(made.shape))

    def _apply(self, how: Any, values: Array, owner: Scale | PackedZero, span: Span) -> None:
        apply(how, values, owner.part(span), owner.grid, span, self.index)

    @property
    def _is_shifted(self) -> bool:
        """True if zero points are subtracted from integer codes before the cast to float32."""
        same = self.zero.same if isinstance(self.zero, PackedZero) else None
        return same is not None and self.blocks.packing.bits < 8 and not self.blocks.signed

    def _round(self, values: Array) -> None:
        """Round float32 numbers to `product_dtype`, in place."""
        import numpy as np

        if self.product_dtype != "float32":
            np.copyto(values, rounded(values, self.product_dtype))

    def _numbers(self, span: Span, values: Array, scale: Array) -> bool:
        """Fill `values` with the numbers that the codes represent.

        Return False if a product of a number and its scale may be NaN or halfway between two
        bfloat16 numbers. If the result is True, the caller can round a product to bfloat16 by an
        addition to the bits of the product.
        """
        import numpy as np

        blocks, bits = self.blocks, self.blocks.packing.bits
        if self.table is None:
            codes, is_signed = self.codes(span), blocks.signed
            if isinstance(self.zero, PackedZero) and self._is_shifted:
                # The subtraction of bytes may wrap around, but the signed result is correct.
                codes = codes - np.uint8((self.zero.same or 0) & 0xFF)
                is_signed = True
            np.copyto(values, codes.view("i1") if is_signed else codes)
            if blocks.offset:
                values -= np.float32(blocks.offset)
            return False
        if blocks.packing.kind == "flat" and bits == 4 and values.size % 2 == 0:
            pairs, skip = self.codes.flat(span)
            if not skip:
                np.take(self._two(4), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
                return False
        codes = self.codes(span)
        if (
            bits == 8
            and len(self.table) == 256
            and codes.size % 2 == 0
            and codes.flags.c_contiguous
        ):
            pairs = codes.reshape(-1).view("<u2")
            np.take(self._two(8), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
        else:
            np.take(self.table, codes, out=values, mode="clip")
        odd = _ODD.get(blocks.table or "", 0)
        more = self.zero or blocks.factor or self.bias or self.product_dtype != "float32"
        if not odd or more or self.target.name != "bfloat16":
            return False
        sizes = np.frombuffer(self._spare.of(codes.size), "u1").reshape(codes.shape)
        np.bitwise_and(codes, np.uint8(0x7F), out=sizes)
        if self._ties is None or self._ties[0] is not scale:
            self._ties = scale, _has_ties(scale)
        return not self._ties[1] and bool(sizes.max() < odd)

    def _two(self, bits: int) -> Array:
        """Return a table that contains two float32 numbers for each pair of codes.

        With this table, the number of lookups is half the number of codes. A computation from the
        bits of the codes would be slower. Its intermediate results are subnormal for the smallest
        codes, and many processors take 100x as long for subnormal numbers.
        """
        import numpy as np

        if self._pairs is None:
            assert self.table is not None
            pairs = np.arange(1 << 2 * bits)
            low, high = self.table[pairs & (1 << bits) - 1], self.table[pairs >> bits]
            order = (high, low) if bits == 4 and self.blocks.packing.high_first else (low, high)
            self._pairs = np.stack(order, axis=-1).astype("<f4").reshape(-1).view("<u8")
        return self._pairs


def _has_ties(scale: Array) -> bool:
    """Return True if a product of a scale and a code may be halfway between two bfloat16 numbers.

    A code has 8 bits and at most four significant bits. Therefore it is sufficient to test the
    products of the scales with the integers from 8 to 15.
    """
    import numpy as np

    sizes = np.abs(scale)
    if not ((sizes >= _LEAST) & (sizes <= _LARGEST)).all():
        return True
    products = scale[..., None] * np.arange(8, 16, dtype="<f4")
    return bool(((products.view("<u4") & 0xFFFF) == 0x8000).any())


def _indexed(blocks: Blocks, data: bytes) -> tuple[Blocks, Array | None]:
    """Return the layout of the weight, and the group number of each column.

    If the groups are in order and have equal widths, set the width in the layout, and return None
    instead of the group numbers. Raise CorruptError if a group has no scale.
    """
    import numpy as np

    index = np.frombuffer(data, "<i4")
    groups = blocks.scales[0].grid.columns
    if len(index) != blocks.columns or ((index < 0) | (index >= groups)).any():
        raise CorruptError(
            f"g_idx must contain a group number below {groups} for each of the {blocks.columns} "
            f"columns"
        )
    changes = np.flatnonzero(index[1:] != index[:-1])
    width = int(changes[0]) + 1 if len(changes) else blocks.columns
    if (index != np.arange(len(index)) // width).any():
        return blocks, index
    scales = tuple(replace(each, grid=replace(each.grid, width=width)) for each in blocks.scales)
    zero = blocks.zero
    if isinstance(zero, (ZeroPoint, Numbers)):
        zero = replace(zero, grid=replace(zero.grid, width=width))
    return replace(blocks, scales=scales, zero=zero, index=0), None


# Tables of results


def is_tabled(blocks: Blocks) -> bool:
    """Return True if each element depends only on its code and one scale byte."""
    first, *others = blocks.scales
    grid, bits = first.grid, blocks.packing.bits
    if not is_byte(first.dtype) or any(each.grid.rows * each.grid.columns > 1 for each in others):
        return False
    if blocks.table in (None, "map", "map-signed") or blocks.zero or blocks.bias:
        return False
    whole = blocks.columns % grid.width == 0 and (blocks.columns <= WIDE or TILE % grid.width == 0)
    is_flat = blocks.packing.kind == "flat" and whole and grid.width * bits % 8 == 0
    return is_flat or blocks.packing.kind == "turned"


class TabledDequantizer(Dequantizer):
    """Looks up elements in a table that contains the element for each pair of a scale and a code.

    For 4-bit codes, one lookup returns two elements.
    """

    _of: int | None = None  # index of the batch for which `_results` was computed

    def __call__(self, span: Span) -> memoryview:
        if self._of != span.batch:
            self._results, self._of = self._computed(span), span.batch
        if self.blocks.packing.kind == "turned":
            return super().__call__(span)
        data, _ = self.codes.flat(span)
        rows = places(span.top, span.bottom, 1, self.scales[0].grid.height)
        return self._taken(self.scales[0].raw(span)[rows], data).reshape(-1).view("u1").data

    def _taken(self, scale: Array, data: Array) -> Array:
        """Return the elements for `data`, which contains the bytes of the codes.

        Each scale applies to the same number of bytes.
        """
        import numpy as np

        index = np.frombuffer(self._memory.of(2 * data.size), "<u2").reshape(*scale.shape, -1)
        np.bitwise_or(scale.astype("<u2")[..., None] << 8, data.reshape(index.shape), out=index)
        found = np.empty(index.shape, self._results.dtype)
        np.take(self._results, index, mode="clip", out=found)
        return found

    def _fill(self, made: Array, span: Span) -> None:
        """Fill `made` with the elements of a rectangle.

        The input contains the transposed rectangle.
        """
        import numpy as np

        data = self.codes.band(span.batch, span.top // 2, span.bottom // 2)[span.left : span.right]
        found = self._taken(self.scales[0].raw(span).T, np.ascontiguousarray(data))
        transposed_copy(made, found.view(self.unit).reshape(len(data), -1).T)

    def _computed(self, span: Span) -> Array:
        """Return a table of elements for all pairs of a scale byte and a code byte.

        Item ``scale * 256 + byte`` is the element for a scale and the code in a byte. If a byte
        contains two codes, an item contains two elements.
        """
        import numpy as np

        first, *others = self.scales
        assert self.table is not None
        if first.numbers.dtype == "ldexp":
            exact = np.ldexp(self.table.astype("f8"), np.arange(256)[:, None] - 127)
            values = exact.astype("<f4")
        else:
            dtype = self.scale_dtype
            scale = rounded(first.decoded(np.arange(256, dtype="u1")), dtype)
            for each in others:
                scale = joined(scale, rounded(each.part(span)[0], dtype), each.numbers, dtype)
            values = rounded(self.table * scale[:, None], self.product_dtype)
        made = np.frombuffer(encode(values.reshape(-1), self.target), self.unit)
        if self.blocks.packing.bits == 8:
            return made
        made = made.reshape(256, 16)
        pairs = np.empty((256, 16, 16, 2), self.unit)  # [scale, high code, low code, result]
        low, high = (1, 0) if self.blocks.packing.high_first else (0, 1)
        pairs[..., low], pairs[..., high] = made[:, None], made[..., None]
        found: Array = pairs.reshape(-1).view(f"<u{2 * self.unit.itemsize}")
        return found


# Quantized tensors of torch

_CHANNELS = frozenset({"float32", "float64", "int32", "int64"})  # dtypes of scales and zero points
_STORED = {"qint8": "i1", "quint8": "u1", "qint32": "<i4", "quint4x2": "u1", "quint2x4": "u1"}
_BLOCK = 1 << 16  # number of bytes per step; temporary arrays are many times larger


@dataclass(frozen=True, slots=True)
class TorchDequantize(Operation):
    """Dequantizes elements of a quantized torch dtype to float32, bit-exactly as torch on a CPU.

    The sources are AffineQuantizerBase.cpp and cpu/kernels/QuantizedOpKernels.cpp in
    ATen/native/quantized.

    If the tensor has one scale, `parameters` contains the scale and the zero point. In this case,
    ckptkit rounds the scale to float32, and subtracts the zero point as a 32-bit integer, which may
    overflow.

    If each channel has a scale, the second input contains the scales, and the third input contains
    the zero points. In this case, `parameters` contains the dtype of the scales, the dtype of the
    zero points, and the number of elements of a channel. ckptkit subtracts the zero point of a
    channel as float32, multiplies the difference by the scale of the channel in the dtype of the
    scale, and rounds the product to float32.
    """

    dtype: str
    parameters: tuple[Any, ...]

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        import numpy as np

        data, *tables = extent.inputs
        dtype = BY_NAME[self.dtype]
        several = max(1, 8 // dtype.bits)  # number of elements per byte of the input
        at = start // (4 * several) * several
        if tables:
            scales, zeros = (
                np.frombuffer(b"".join(stream(table)), np.dtype(name).newbyteorder("<"))
                for table, name in zip(tables, self.parameters, strict=False)
            )
            zeros = zeros.astype("<f4")
        else:
            with np.errstate(over="ignore"):
                scale, zero = np.float32(self.parameters[0]), np.int32(self.parameters[1])

        def made(piece: Piece) -> memoryview:
            nonlocal at
            values = np.frombuffer(piece, _STORED[dtype.name])
            if several > 1:  # the low bits are first
                shifts = np.arange(0, 8, dtype.bits, dtype="u1")
                values = (values[:, None] >> shifts & (1 << dtype.bits) - 1).ravel()
            with np.errstate(all="ignore"):  # torch returns infinities and NaN too
                if tables:
                    channel = np.arange(at, at + len(values)) // self.parameters[2] % len(scales)
                    found = (values.astype("<f4") - zeros[channel]) * scales[channel]
                else:
                    found = (values.astype("<i4") - zero).astype("<f4") * scale
                at += len(values)
                return as_bytes(found.astype("<f4", copy=False))

        unit = dtype.itemsize
        if start < stop:
            yield from by_rows((data,), (unit,), 4 * several, start, stop, made, _BLOCK // unit)


def dequantized_record(
    tensor: Tensor, scale: float | Tensor, zero_point: int | Tensor, axis: int = 0
) -> Record:
    """Return the elements of a quantized tensor as float32, row-major and little-endian.

    `scale` and `zero_point` are numbers, or tensors with one number for each index of the dimension
    `axis`. Raise TensorError if the shapes or dtypes of `scale` and `zero_point` are wrong. Raise
    TensorError also if the elements are not contiguous.
    """
    data, length = contiguous(tensor), 4 * tensor.numel
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        fits = (
            0 <= axis < len(tensor.shape)
            and scale.shape == zero_point.shape == tensor.shape[axis : axis + 1]
        )
        if (
            not fits
            or scale.dtype.kind != "float"
            or not {scale.dtype.numpy, zero_point.dtype.numpy} <= _CHANNELS
        ):
            raise TensorError(
                f"scales ({scale.dtype} {scale.shape}) and zero points ({zero_point.dtype} "
                f"{zero_point.shape}) do not fit axis {axis} of a tensor of shape {tensor.shape}"
            )
        inner = prod(tensor.shape[axis + 1 :])
        parameters = (scale.dtype.name, zero_point.dtype.name, inner)
        records = (data, contiguous(scale), contiguous(zero_point))
        return Pending(TorchDequantize(tensor.dtype.name, parameters), records, length)
    if (
        type(scale) is not float
        or type(zero_point) is not int
        or not -(2**31) <= zero_point < 2**31
    ):
        raise TensorError("a quantized tensor must have a float scale and an int32 zero point")
    operation = TorchDequantize(tensor.dtype.name, (scale, zero_point))
    return Pending(operation, (data,), length)
