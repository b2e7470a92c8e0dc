"""Make numbers of the codes and scales of quantized weights, and of torch's quantized tensors.

The output is made in tiles that stay in a core's cache; what :class:`Blocks` says of an element is
done to all of a tile at once, and in place. Where scales are bytes, a table holds the result for
each pair of a scale and a code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import encode, numbers
from ckptkit.compute.operation import BUFFER, Pieces, Reader, Room, as_bytes, by_rows, stream
from ckptkit.compute.packing import (
    TARGET,
    Blocks,
    FlatCodes,
    Numbers,
    PackedZero,
    Scale,
    Span,
    Spread,
    TransposedCodes,
    ZeroPoint,
    codes_of,
    combined,
    is_byte,
    joined,
    places,
    rounded,
    zero_points,
)
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Derived, Operation, Pending, Piece, Record
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CorruptError, TensorError
from ckptkit.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Elements worked on at once: as many as make each call of numpy so long that threads seldom wait
# for the interpreter lock, and still fit a core's cache: as float32 and once more for rounding.
TILE = 1 << 18
WIDE = 1 << 19  # elements of a row that is made in several pieces
# Rows of a tile where a byte of the input holds several rows, or words lie down a column: as many
# as make a cache line of the input. Such tiles are cut into columns.
TALL = {"columns": 16, "interleaved": 128, "turned": 32}
# The first code, its sign aside, that is not a number: of tables of at most four significant bits.
_ODD = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
# How bits of float32 become bfloat16: no product lies between two numbers, none in the middle, any.
EXACT, NEAREST, EVEN = "exact", "nearest", "even"
# Scales that give no product above the largest number of float32, or below its normal ones.
_LARGEST, _LEAST = 2.0**100, 2.0**-100


@dataclass(frozen=True, slots=True)
class Dequantize(Operation):
    """Elements of a quantized weight, whose codes, scales and zero points are the inputs."""

    blocks: Blocks
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        import numpy as np

        blocks = self.blocks
        size = dtypes.BY_NAME[blocks.target].itemsize
        first, last = start // size, -(-stop // size)
        kind = TabledDequantizer if is_tabled(blocks) else Dequantizer
        readers = [Reader(each) for each in extent.inputs]
        machine = kind(blocks, readers, [each.length for each in extent.inputs], last)
        for begin, span in spans(blocks, first, last):
            at = begin * size
            with np.errstate(all="ignore"):  # infinities and NaN are those of the libraries too
                made = machine(span)
            yield made[max(start - at, 0) : min(stop - at, len(made))]

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Yield where `size` bytes or more end: whole matrices where several are in one tensor."""
        matrix = extent.length // self.blocks.batches
        step = -(-size // matrix) * matrix if matrix <= 2 * size else size
        yield from range(step, extent.length, step)
        yield extent.length


def spans(blocks: Blocks, first: int, last: int) -> Iterator[tuple[int, Span]]:
    """Yield what covers elements `first` to `last`: whole rows, or a part of one.

    Each comes with its first element. They are in order.
    """
    rows, columns = blocks.rows, blocks.columns
    tall = 1 << (max(1, TILE // max(1, columns)).bit_length() - 1)  # blocks of 128 rows end there
    tall = max(tall, TALL.get(blocks.packing.kind, 1))
    while first < last:
        row, left = divmod(first, columns)
        batch, top = divmod(row, rows)
        if columns > WIDE:
            left -= left % TILE
            right = min(left + TILE, columns)
            yield row * columns + left, Span(batch, top, top + 1, left, right)
            first = row * columns + right
        else:
            bottom = min(top - top % tall + tall, rows, -(-last // columns) - batch * rows)
            yield row * columns, Span(batch, top, bottom, 0, columns)
            first = (batch * rows + bottom) * columns


class Dequantizer:
    """Makes the elements of spans, which come in rising order up to element `last`."""

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reader], sizes: Sequence[int], last: int
    ) -> None:
        self.index: Array | None = None
        if blocks.index:
            blocks, self.index = _indexed(blocks, reads[blocks.index].copy(0, sizes[blocks.index]))
        self.blocks = blocks
        self.target = dtypes.BY_NAME[blocks.target]
        whole = self.index is not None
        self.scales = [Scale(each, reads, sizes, whole) for each in blocks.scales]
        self.bias = None if blocks.bias is None else Scale(blocks.bias, reads, sizes, whole)
        self.zero = zero_points(blocks.zero, reads, sizes, whole)
        self.codes = codes_of(blocks, reads[0], sizes[0], last)
        self.table = _table(blocks, reads, sizes)
        self.scale_dtype = self._named(blocks.scale_dtype)
        self.product_dtype = self._named(blocks.product_dtype)
        self._memory, self._spare = Room(), Room()
        self._multiply = Spread(self.scales[0].grid, self.index)
        self._rounding = EVEN  # that products need to become bfloat16
        self._pairs: Array | None = None  # the numbers of two codes that lie together
        self._ties: Ties | None = None

    def _named(self, name: str) -> str:
        return self.blocks.target if name == TARGET else name

    def __call__(self, span: Span) -> memoryview:
        """The bytes of the elements of a span."""
        import numpy as np

        rows, columns = span.shape
        step = max(1, TILE // rows // 512) * 512
        if self.blocks.packing.kind not in TALL or columns <= step:
            return self._encoded(self.values(span))
        unit = "<f4" if self.target.itemsize == 4 else "<u2"
        made = np.empty(span.shape, unit)
        for left in range(span.left, span.right, step):
            right = min(left + step, span.right)
            part = self._encoded(self.values(span._replace(left=left, right=right)))
            place = made[:, left - span.left : right - span.left]
            np.copyto(place, np.frombuffer(part, unit).reshape(place.shape))
        return made.reshape(-1).view("u1").data

    def _encoded(self, values: Array) -> memoryview:
        """The bytes of float32 numbers as elements of the target."""
        import numpy as np

        flat = values.reshape(-1)
        if self.target.name == "float32":
            return flat.view("u1").data
        if self.target.name != "bfloat16":
            return encode(flat, self.target)
        bits = self._rounded_bits(flat) if self._rounding == EVEN else flat.view("<u4")
        if self._rounding == NEAREST:
            bits += np.uint32(0x8000)
        bits >>= np.uint32(16)
        made = np.empty(len(bits), "<u2")
        np.copyto(made, bits, casting="unsafe")
        return made.view("u1").data

    def _rounded_bits(self, flat: Array) -> Array:
        """The bits of float32 numbers with half of a last place of bfloat16 added, ties to even.

        No NaN has bits that are carried into its sign: all of them are made here.
        """
        import numpy as np

        bits = flat.view("<u4")
        made = self._spare.like(bits, "<u4")
        np.right_shift(bits, np.uint32(16), out=made)
        made &= np.uint32(1)
        made += bits
        made += np.uint32(0x7FFF)
        return made

    def values(self, span: Span) -> Array:
        """The elements as float32, not yet rounded to the target; the next overwrite them."""
        import numpy as np

        blocks = self.blocks
        scale = combined(self.scales, span, self.scale_dtype)
        self._rounding = EVEN
        values, scale = self._numbers(span, scale)
        if isinstance(self.zero, Scale):
            self._apply(np.subtract, values, self.zero, span)
            self._round(values)
        elif self.zero is not None and not self._is_shifted:
            self._apply(np.subtract, values, self.zero, span)
        self._multiply.apply(np.multiply, values, scale, span)
        more = bool(blocks.factor) or self.bias is not None
        if more or self.product_dtype != self.target.name:
            self._round(values)
        if blocks.factor:
            values *= np.float32(blocks.factor)
        if self.bias is not None:
            self._apply(np.subtract if blocks.subtract_bias else np.add, values, self.bias, span)
            self._round(values)
        return values

    def _apply(self, how: Any, values: Array, owner: Scale | PackedZero, span: Span) -> None:
        Spread(owner.grid, self.index).apply(how, values, owner.part(span), span)

    @property
    def _is_shifted(self) -> bool:
        """True if zero points are subtracted from codes, before these become float32."""
        same = self.zero.same if isinstance(self.zero, PackedZero) else None
        return same is not None and self.blocks.packing.bits < 8 and not self.blocks.signed

    def _round(self, values: Array) -> None:
        """Round float32 numbers to what products are rounded to, in place."""
        import numpy as np

        if self.product_dtype == "bfloat16":
            bits = self._rounded_bits(values.reshape(-1))
            np.bitwise_and(bits, 0xFFFF0000, out=values.reshape(-1).view("<u4"))
        elif self.product_dtype != "float32":
            np.copyto(values, rounded(values, self.product_dtype))

    def _numbers(self, span: Span, scale: Array) -> tuple[Array, Array]:
        """Return the numbers that the codes represent, and their scale."""
        import numpy as np

        rows, columns = span.shape
        if self.target.name == "float32":  # handed out as they are
            values = np.empty((rows, columns), "<f4")
        else:
            memory = self._memory.of(4 * rows * columns)
            values = np.frombuffer(memory, "<f4").reshape(rows, columns)
        if isinstance(self.codes, TransposedCodes):
            self.codes.numbers(span, values)
            self._rounding = EXACT
            return values, self._unlimited(scale, values)
        if self.table is None:
            self._integers(self.codes(span), values)
            return values, scale
        pairs = self._codes_in_pairs(span)
        if pairs is not None:
            np.take(self._two(), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
            return values, scale
        codes = self.codes(span)
        self._rounding = self._rounding_of(codes, scale)
        if self._is_of_bytes and codes.flags.c_contiguous and codes.size % 2 == 0:
            pairs = codes.reshape(-1).view("<u2")
            np.take(self._two(), pairs, out=values.reshape(-1).view("<u8"), mode="clip")
        else:
            np.take(self.table, codes, out=values, mode="clip")
        return values, scale

    @property
    def _is_of_bytes(self) -> bool:
        """True if each code is a byte, and any byte has a number in the table."""
        return self.blocks.packing.bits == 8 and self.table is not None and len(self.table) == 256

    def _integers(self, codes: Array, values: Array) -> None:
        """Make numbers of codes that are integers, less what all of them have in common."""
        import numpy as np

        is_signed = self.blocks.signed
        if self._is_shifted:
            assert isinstance(self.zero, PackedZero) and self.zero.same is not None
            codes = np.subtract(codes, np.uint8(self.zero.same & 0xFF))  # may wrap around
            is_signed = True
        np.copyto(values, codes.view("i1") if is_signed else codes)
        if self.blocks.offset:
            values -= np.float32(self.blocks.offset)

    def _unlimited(self, scale: Array, values: Array) -> Array:
        """Return scales for numbers that are too small; 2**128 is one of them.

        Numbers are made larger first where scales that make up for it all would be infinite.
        """
        import numpy as np

        half = np.minimum(scale * np.float32(0.5), np.float32(2.0**127))
        twice = np.float32(2.0 ** (TransposedCodes.lack + 1))
        if (half <= 2.0 ** (126 - TransposedCodes.lack)).all():
            half *= twice
        else:
            values *= twice
        return half

    def _codes_in_pairs(self, span: Span) -> Array | None:
        """The bytes of codes of 4 bits that lie in order, None where that is not how they lie."""
        rows, columns = span.shape
        if not isinstance(self.codes, FlatCodes) or self.codes.bits != 4 or rows * columns % 2:
            return None
        data, skip = self.codes.bytes(span)
        return None if skip else data

    def _two(self) -> Array:
        """Two float32 numbers for each pair of codes: half as many look-ups.

        No arithmetic makes them of the bits: what is below the normal numbers, as the smallest
        codes would be on the way, takes many processors a hundred times as long.
        """
        import numpy as np

        if self._pairs is None:
            assert self.table is not None
            bits = 8 if self._is_of_bytes else 4
            pairs = np.arange(1 << 2 * bits)
            low, high = self.table[pairs & (1 << bits) - 1], self.table[pairs >> bits]
            order = (high, low) if bits == 4 and self.blocks.packing.high_first else (low, high)
            self._pairs = np.stack(order, axis=-1).astype("<f4").reshape(-1).view("<u8")
        return self._pairs

    def _rounding_of(self, codes: Array, scale: Array) -> str:
        """Return how products with codes of 8 bits are rounded: the cheap way where it is right."""
        import numpy as np

        odd = _ODD.get(self.blocks.table or "")
        if odd is None or self.zero is not None or self.product_dtype != "float32":
            return EVEN
        if self._ties is None or self._ties.scale is not scale:
            self._ties = Ties(scale, _has_ties(scale))
        sizes = self._spare.like(codes, "u1")
        np.bitwise_and(codes, np.uint8(0x7F), out=sizes)
        return EVEN if self._ties.has_ties or sizes.max() >= odd else NEAREST


class Ties(NamedTuple):
    """Some scales, and whether products with them may lie between two bfloat16 numbers."""

    scale: Array
    has_ties: bool


def _has_ties(scale: Array) -> bool:
    """Return whether a product with a code of 8 bits may lie in the middle of two bfloat16 numbers.

    Codes have at most four significant bits, so that eight products have all there are.
    """
    import numpy as np

    sizes = np.abs(scale)
    if not ((sizes >= _LEAST) & (sizes <= _LARGEST)).all():
        return True
    products = scale[..., None] * np.arange(8, 16, dtype="<f4")
    return bool(((products.view("<u4") & 0xFFFF) == 0x8000).any())


def _table(blocks: Blocks, reads: Sequence[Reader], sizes: Sequence[int]) -> Array | None:
    import numpy as np

    if blocks.table not in ("map", "map-signed"):
        return None if blocks.table is None else numbers(blocks.table)
    found = np.frombuffer(reads[blocks.map](0, sizes[blocks.map]), "<f4").copy()
    found[np.isnan(found)] = np.nan
    if (
        blocks.table == "map-signed" and found[8] == 0
    ):  # as bitsandbytes computes, whatever it writes
        found[8] = -0.0
    made: Array = found
    return made


def _indexed(blocks: Blocks, data: bytes) -> tuple[Blocks, Array | None]:
    """The index, None where the blocks of columns are in order after all and of one width.

    Raises CorruptError for an index that leads out of the scales.
    """
    import numpy as np

    index = np.frombuffer(data, "<i4")
    groups = blocks.scales[0].grid.columns
    if len(index) != blocks.columns or ((index < 0) | (index >= groups)).any():
        raise CorruptError("the groups of columns (g_idx) lead out of the scales")
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
    """Return whether a code and one byte of scale determine each result."""
    first, *others = blocks.scales
    grid, bits = first.grid, blocks.packing.bits
    if not is_byte(first.dtype) or any(each.grid.rows * each.grid.columns > 1 for each in others):
        return False
    if blocks.table in (None, "map", "map-signed") or blocks.zero or blocks.bias:
        return False
    whole = blocks.columns % grid.width == 0 and (blocks.columns <= WIDE or TILE % grid.width == 0)
    return blocks.packing.kind == "flat" and whole and grid.width * bits % 8 == 0


class TabledDequantizer(Dequantizer):
    """Takes what each pair of a scale and a code gives from a table; of 4 bits, two at once."""

    _of: int | None = None  # batch that the results are for

    def __init__(
        self, blocks: Blocks, reads: Sequence[Reader], sizes: Sequence[int], last: int
    ) -> None:
        super().__init__(blocks, reads, sizes, last)
        self._index = Room()

    def __call__(self, span: Span) -> memoryview:
        """The bytes of the elements of a span."""
        import numpy as np

        if self._of != span.batch:
            self._results, self._of = self._computed(span), span.batch
        index = self._flat(span)
        found = np.empty(len(index), self._results.dtype)
        np.take(self._results, index, mode="clip", out=found)
        return found.view("u1").data

    def _flat(self, span: Span) -> Array:
        import numpy as np

        codes = self.codes
        assert isinstance(codes, FlatCodes)
        data, _ = codes.bytes(span)
        first = self.scales[0]
        wide = first.grid.width * self.blocks.packing.bits // 8
        rows = places(span.top, span.bottom, 1, first.grid.height)
        scale = first.raw(span).astype("<u2")[rows] << 8
        made = self._index.like(data, "<u2")
        shape = (*scale.shape, wide)
        np.bitwise_or(scale[..., None], data.reshape(shape), out=made.reshape(shape))
        return made

    def _computed(self, span: Span) -> Array:
        """Results for all scales and codes, [scale * 256 + byte].

        Two in one number where a byte holds two codes.
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
        size = self.target.itemsize
        flat = np.frombuffer(encode(values.reshape(-1), self.target), f"<u{size}")
        made: Array = flat.reshape(values.shape)
        if self.blocks.packing.bits == 8:
            return flat
        pairs = np.empty((256, 16, 16, 2), made.dtype)  # of a scale, the high code, the low code
        low, high = (1, 0) if self.blocks.packing.high_first else (0, 1)
        pairs[..., low], pairs[..., high] = made[:, None], made[..., None]
        found: Array = pairs.reshape(-1).view(f"<u{2 * size}")
        return found


# Quantized tensors of torch

_CHANNELS = frozenset({"float32", "float64", "int32", "int64"})  # dtypes of scales and zero points
_STORED = {"qint8": "i1", "quint8": "u1", "qint32": "<i4", "quint4x2": "u1", "quint2x4": "u1"}
_BLOCK = 1 << 16  # bytes worked on at once: what is in between is many times as large


@dataclass(frozen=True, slots=True)
class TorchDequantize(Operation):
    """Elements of a quantized dtype as float32, exactly as torch computes them on a CPU.

    Per tensor, the difference to the zero point is an integer of 32 bits, with its overflow, and
    the scale is rounded to float32 first. Per channel, the difference is a float32, and its product
    with the scale is as wide as the scale before it is rounded. (ATen/native/quantized:
    AffineQuantizerBase.cpp, cpu/kernels/QuantizedOpKernels.cpp.)

    `parameters` are a scale and a zero point; or, where the second and third input hold one of each
    for each channel, the dtypes of these, and the number of elements of a channel.
    """

    dtype: str
    parameters: tuple[Any, ...]

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        data, *tables = extent.inputs
        dtype = dtypes.BY_NAME[self.dtype]
        several = max(1, 8 // dtype.bits)  # elements in a unit of the input
        held = [b"".join(stream(table)) for table in tables]
        first = start // (4 * several) * several
        machine = TorchDequantizer(dtype, self.parameters, held, first)
        unit = dtype.itemsize
        made = (data,), (unit,), 4 * several, start, stop, machine, BUFFER // unit
        return by_rows(*made) if start < stop else iter(())


class TorchDequantizer:
    """Makes float32 of the stored bytes of a tensor, in successive pieces from element `at` on.

    `parameters` are those of the operation, `tables` the bytes of the scales and the zero points of
    the channels, if it is done per channel.
    """

    def __init__(
        self, dtype: DType, parameters: Sequence[Any], tables: Sequence[bytes], at: int
    ) -> None:
        self.dtype = dtype
        self.at = at
        self._compute: Callable[[Array, int], Array]
        if tables:
            scales, zero_points = map(_channels, tables, parameters[:2])
            self._compute = _per_channel(scales, zero_points, parameters[2])
        else:
            self._compute = _per_tensor(*parameters)

    def __call__(self, data: Piece) -> memoryview:
        import numpy as np

        made = np.empty(len(data) * 8 // self.dtype.bits, "<f4")
        done = 0
        with np.errstate(all="ignore"):  # infinities and what comes of them are torch's too
            for start in range(0, len(data), _BLOCK):
                values = self._integers(data[start : start + _BLOCK])
                made[done : done + len(values)] = self._compute(values, self.at + done)
                done += len(values)
        self.at += done
        return as_bytes(made)

    def _integers(self, data: Piece) -> Array:
        """Return the stored integers; elements smaller than a byte from its low bits up."""
        import numpy as np

        bits = self.dtype.bits
        values: Array = np.frombuffer(data, _STORED[self.dtype.name])
        if bits >= 8:
            return values
        unpacked: Array = (values[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & (
            (1 << bits) - 1
        )
        return unpacked.ravel()


def _channels(data: bytes, dtype: str) -> Array:
    import numpy as np

    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _per_tensor(scale: float, zero_point: int) -> Callable[[Array, int], Array]:
    import numpy as np

    zero = np.int32(zero_point)
    with np.errstate(over="ignore"):
        factor = np.float32(scale)
    return lambda values, at: (values.astype(np.int32) - zero).astype(np.float32) * factor


def _per_channel(scales: Array, zero_points: Array, inner: int) -> Callable[[Array, int], Array]:
    """Dequantize per channel: channels of `inner` elements follow each other, in a cycle."""
    import numpy as np

    zeros = zero_points.astype(np.float32)

    def compute(values: Array, at: int) -> Array:
        channel = np.arange(at, at + len(values)) // inner % len(scales)
        made: Array = (values.astype(np.float32) - zeros[channel]) * scales[channel]
        return made

    return compute


def dequantized_record(
    tensor: Tensor, scale: float | Tensor, zero_point: int | Tensor, axis: int = 0
) -> Record:
    """Return the elements of a quantized tensor as float32, row-major and little-endian.

    Scale and zero point are two numbers, or two tensors with one for each index of the dimension
    `axis`. Raises TensorError where these do not fit, or the elements have no bytes in order.
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
                f"scales and zero points of {scale.shape} do not fit a shape of {tensor.shape}"
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
        raise TensorError(
            "a quantized tensor without a scale and a zero point that torch could have"
        )
    operation = TorchDequantize(tensor.dtype.name, (scale, zero_point))
    return Pending(operation, (data,), length)
