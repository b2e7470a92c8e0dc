"""Statistics of tensor elements, computed in one pass.

The statistics of a tensor are the merged statistics of blocks of its elements. Mean and sum of
squared deviations are float64. For each block, mean and deviations are computed in two passes while
the block is in the cache. The formula of Chan, Golub and LeVeque (1979) merges blocks accurately,
even if the mean is large. Numbers whose squares overflow float64 are scaled by a power of two.

Each task computes a part of a tensor. The boundaries of the parts and the order in which ckptkit
merges them are fixed. The result therefore does not depend on the number of threads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous, once, refusal, repeated, times
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, is_decoded
from ckptkit.compute.operation import BUFFER, aligned, keep_memory, stream_reusing_buffer
from ckptkit.core.bytesource import Extent, Range
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor

MOST = sys.float_info.max  # absolute values of complex numbers are clipped to this maximum
BINS = 64  # maximum number of bins of a histogram
_SCALES = 126  # maximum n for which float32 represents 2**n and 2**-n
FINE = 40  # the width of a bin is at least the largest number divided by 2**40
LEAST = -1_200  # exponent of the bin width if all numbers are zero; lower than any other exponent
# Maximum number of elements per step. The numpy calls must be long enough that threads rarely wait
# for the interpreter lock. Smaller blocks are not faster.
BLOCK = 1 << 18
BLOCK_BYTES = 2 << 20  # maximum number of bytes per step
PART = 32 << 20  # maximum number of bytes of a tensor in one task
COUNTED = 2 << 20  # minimum number of bytes for which the codes of 8- and 16-bit types are counted
DOT = 8_192  # maximum length of a dot product; for a longer one, a library may start threads
# If the exponent of the largest number is between these bounds, float64 can represent sums of
# squares.
SQUARED = (-400, 500)
NEAR = 16  # a mean of n numbers is near zero if n * mean**2 <= (sum of their squares) / NEAR


@dataclass(slots=True)
class Histogram:
    """Counts of numbers in bins. Bin ``i`` starts at ``(first + i) * 2**exponent``.

    The width of a bin is the smallest power of two for which `BINS` bins cover all numbers. For
    integers, the width is at least 1. See also `FINE`. One pass is enough: if a number is outside
    of all bins, pairs of bins are merged. The sum of several histograms does not depend on the
    order of the additions.
    """

    exponent: int = 0
    first: int = 0
    counts: list[int] = field(default_factory=list)

    @property
    def edges(self) -> list[float]:
        """The lower edge of each bin, then the upper edge of the last bin."""
        return [_scaled(self.first + i, self.exponent) for i in range(len(self.counts) + 1)]

    def coarser(self, exponent: int) -> Histogram:
        """Return the histogram with bins of the width ``2**exponent``."""
        steps = exponent - self.exponent
        if not steps or not self.counts:
            return self
        first = self.first >> steps
        counts = [0] * ((self.first + len(self.counts) - 1 >> steps) - first + 1)
        for i, count in enumerate(self.counts, self.first):
            counts[(i >> steps) - first] += count
        return Histogram(exponent, first, counts)

    def at_most(self, bins: int) -> Histogram:
        """Merge bins until at most `bins` bins remain. Return the new histogram."""
        made = self
        while len(made.counts) > bins:
            made = made.coarser(made.exponent + 1)
        return made

    def plus(self, other: Histogram, exponent: int) -> Histogram:
        """Return the sum of two histograms, with bins of the width ``2**exponent``."""
        a, b = self.coarser(exponent), other.coarser(exponent)
        if not a.counts or not b.counts:
            return a if a.counts else b
        first = min(a.first, b.first)
        counts = [0] * (max(a.first + len(a.counts), b.first + len(b.counts)) - first)
        for each in (a, b):
            for i, count in enumerate(each.counts, each.first - first):
                counts[i] += count
        return Histogram(exponent, first, counts)


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:  # a norm or the upper edge of the last bin may exceed the largest float
        return math.copysign(math.inf, number)


def _ldexp(number: float | complex, exponent: int) -> float | complex:
    """Return ``number * 2**exponent``, clipped to the largest float.

    A mean may be rounded up and exceed the largest float.
    """
    if not exponent:
        return number
    if isinstance(number, complex):
        return complex(*(_ldexp(part, exponent) for part in (number.real, number.imag)))
    made = _scaled(number, exponent)
    return made if math.isfinite(made) else math.copysign(MOST, made)


@dataclass(slots=True)
class Tally:
    """Statistics of some numbers.

    ``nan`` and ``infinite`` count NaN and infinities. All other statistics, except ``count``, omit
    NaN and infinities. ``low`` and ``high`` are the smallest and the largest number, or None if no
    finite number exists. ``squares`` is the sum of squared deviations from the mean, times
    ``2**(-2 * scale)``. For complex numbers, ``low``, ``high`` and the histogram describe absolute
    values.
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    mean: float | complex = 0.0
    squares: float = 0.0
    low: float | int | None = None
    high: float | int | None = None
    histogram: Histogram = field(default_factory=Histogram)
    whole: bool = True  # True if all dtypes are integer types
    scale: int = 0

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite

    @property
    def std(self) -> float | None:
        """Standard deviation as in ``torch.std``, with the divisor n - 1. None if n < 2."""
        if self.finite < 2:
            return None
        return _scaled(math.sqrt(self.squares / (self.finite - 1)), self.scale)

    @property
    def norm(self) -> float:
        """The square root of the sum of squares."""
        mean = abs(_ldexp(self.mean, -self.scale))
        return _scaled(math.sqrt(self.squares + self.finite * mean**2), self.scale)

    @property
    def abs_max(self) -> float | int | None:
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    @property
    def sparsity(self) -> float | None:
        """Number of zeros divided by the number of elements."""
        return self.zeros / self.count if self.count else None

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as numbers and lists. JSON represents these values exactly."""
        facts = asdict(self)
        if isinstance(self.mean, complex):
            facts["mean"] = [self.mean.real, self.mean.imag]
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Tally:
        """Convert a result of `to_json` back to a Tally."""
        mean, histogram = facts["mean"], Histogram(**facts["histogram"])
        mean = complex(*mean) if isinstance(mean, list) else mean
        return cls(**{**facts, "mean": mean, "histogram": histogram})

    def add(self, other: Tally) -> None:
        """Add the numbers of `other` to these statistics."""
        if not self.count:
            for each in fields(self):
                setattr(self, each.name, getattr(other, each.name))
            return
        ours, theirs = self.finite, other.finite
        if theirs:
            both = ours + theirs
            scale = max((each.scale for each in (self, other) if each.abs_max), default=0)
            mean = _ldexp(self.mean, -scale)
            delta = _ldexp(other.mean, -scale) - mean
            squares = [math.ldexp(each.squares, 2 * (each.scale - scale)) for each in (self, other)]
            self.squares = sum(squares) + abs(delta) ** 2 * (ours * theirs / both)
            self.mean, self.scale = _ldexp(mean + delta * (theirs / both), scale), scale
            self.whole = other.whole and (self.whole or not ours)
            assert other.low is not None and other.high is not None
            self.low = other.low if self.low is None else min(self.low, other.low)
            self.high = other.high if self.high is None else max(self.high, other.high)
            self.histogram = self.histogram.plus(other.histogram, _exponent(self))
        self.count += other.count
        self.nan += other.nan
        self.infinite += other.infinite
        self.zeros += other.zeros

    def repeated(self, times: int) -> Tally:
        """Return the statistics for `times` copies of the same numbers."""
        if times == 1:
            return self
        counts = [count * times for count in self.histogram.counts]
        return replace(
            self, count=self.count * times, nan=self.nan * times, infinite=self.infinite * times,
            zeros=self.zeros * times, squares=self.squares * times,
            histogram=replace(self.histogram, counts=counts),
        )  # fmt: skip


def bin_exponent(low: float, high: float, whole: bool) -> int:
    """Return the exponent of the bin width. `Histogram` explains the rule."""
    largest = max(high, -low)
    exponent = math.frexp(largest)[1] - FINE if largest else LEAST
    exponent = max(exponent, 0) if whole else exponent
    significand, reach = math.frexp(high / 2 - low / 2)
    if significand:
        exponent = max(exponent, reach + 1 - BINS.bit_length())
    while math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) >= BINS:
        exponent += 1
    return exponent


class ElementRange(NamedTuple):
    """The bytes from `start` to `stop` of the elements of a tensor."""

    extent: Extent
    dtype: DType
    start: int
    stop: int
    times: int = 1  # number of times that the tensor repeats each element

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parts(tensor: Tensor) -> Iterator[ElementRange]:
    """Yield the elements of a tensor in parts of at most `PART` bytes.

    If the elements are not a byte range of a file, yield one part. Raise TensorError for elements
    that are not numbers, for meta tensors and for non-strided tensors.
    """
    if not is_decoded(tensor.dtype):
        raise TensorError(f"elements of {tensor.dtype} are not plain numbers")
    axes = repeated(tensor)
    each = once(tensor, axes)
    if (error := refusal(each)) is not None:
        raise error
    extent = contiguous(each).locate()
    size = PART if isinstance(extent, Range) else max(1, extent.length)
    for start in range(0, extent.length, size):
        yield ElementRange(
            extent, tensor.dtype, start, min(start + size, extent.length), times(tensor, axes)
        )


def numbers(tensor: Tensor) -> Array:
    """Return all elements of a tensor as an array of the same shape.

    The caller ensures that the elements fit in memory. Raise TensorError as `parts` does.
    """
    each = once(tensor, repeated(tensor))
    made: list[Array] = []
    for part in parts(each):
        made += [decode(bytes(data), part.dtype) for data in _pieces(part)]
    flat: Array = np.concatenate(made) if made else decode(b"", tensor.dtype)
    return np.broadcast_to(flat.reshape(each.shape), tensor.shape)


def _pieces(part: ElementRange) -> Iterator[memoryview]:
    extent, dtype, start, stop, _ = part
    size = min(BLOCK, BLOCK_BYTES // dtype.itemsize) * dtype.itemsize
    return aligned(stream_reusing_buffer(extent, start, stop, size), dtype.itemsize, size)


def tally(part: ElementRange) -> Tally:
    """Return the statistics of the elements in `part`."""
    keep_memory()
    found = Tally()
    with np.errstate(all="ignore"):  # absolute values of complex numbers may be infinite
        if part.dtype.itemsize <= 2 and part.nbytes >= COUNTED:  # count each code
            unit = np.dtype(f"<u{part.dtype.itemsize}")
            counts = np.zeros(256**unit.itemsize, np.int64)
            for piece in _pieces(part):
                counts += np.bincount(np.frombuffer(piece, unit), minlength=len(counts))
            codes = np.flatnonzero(counts)
            found = _counted(decode(codes.astype(unit).tobytes(), part.dtype), counts[codes])
        else:
            for piece in _pieces(part):
                found.add(_block(decode(piece, part.dtype)))
    return found.repeated(part.times)


def _counted(values: Array, counts: Array) -> Tally:
    """Return the statistics of `values`. Value i occurs `counts[i]` times."""
    made = Tally(int(counts.sum()), whole=values.dtype.kind != "f")
    made.nan = int(counts[np.isnan(values)].sum())
    finite = np.isfinite(values)
    values, counts = values[finite], counts[finite]
    number = int(counts.sum())
    made.infinite = made.count - made.nan - number
    if not number:
        return made
    made.low, made.high = _range(values)
    made.zeros = int(counts[values == 0].sum())
    wide = values.astype("f8")
    made.histogram = _bins(wide, made.low, _exponent(made), counts)
    made.mean = float(np.dot(wide, counts)) / number
    wide -= made.mean
    made.squares = float(np.dot(wide * wide, counts))
    return made


def _block(values: Array) -> Tally:
    """Return the statistics of the numbers in an array."""
    values = values.astype("c16") if values.dtype.kind == "c" else values
    made = Tally(len(values), whole=values.dtype.kind not in "fc")
    low, high = _range(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        made.nan = int(np.count_nonzero(np.isnan(values)))
        values = values[np.isfinite(values)]
        made.infinite = made.count - made.nan - len(values)
        if not len(values):
            return made
        low, high = (min(each, MOST) for each in _range(values))
    made.low, made.high = low, high
    made.zeros = int(np.count_nonzero(values == 0)) if low <= 0 <= high else 0
    exponent = _exponent(made)
    wide = values if values.dtype.kind == "c" else values.astype("f8")
    is_exact = values.dtype == np.float32 and -_SCALES <= exponent <= 0
    made.histogram = _bins(values if is_exact else wide, low, exponent)
    largest = math.frexp(max(high, -low))[1]
    if largest and not SQUARED[0] < largest < SQUARED[1]:
        made.scale = largest
        wide = np.ldexp(wide.view("f8"), -largest).view(wide.dtype)
    mean = (wide.sum() / len(wide)).item()
    made.mean = _ldexp(mean, made.scale)
    made.squares = _squares(wide, mean)
    return made


def _squares(wide: Array, mean: float | complex) -> float:
    """Return the sum of squared deviations from the mean. The function may overwrite `wide`.

    If the mean is near zero, compute the sum of squares and subtract n * mean**2. The subtraction
    costs less than one bit of precision.
    """
    total, part = _dot(wide.view("f8")), len(wide) * abs(mean) ** 2
    if part <= total / NEAR and math.isfinite(total):
        return total - part
    wide -= mean
    return _dot(wide.view("f8"))


def _dot(values: Array) -> float:
    """Return the sum of squares."""
    whole = len(values) // DOT * DOT
    rows, rest = values[:whole].reshape(-1, 1, DOT), values[whole:]
    sums = np.matmul(rows, rows.reshape(-1, DOT, 1)).reshape(-1)
    # The result of sum() depends on the version of Python.
    return math.fsum([*sums.tolist(), float(np.dot(rest, rest))])


def _range(values: Array) -> tuple[float | int, float | int]:
    """Return the smallest and the largest number. For complex numbers, use absolute values."""
    sizes = np.abs(values) if values.dtype.kind == "c" else values
    return sizes.min().item(), sizes.max().item()


def _exponent(tally: Tally) -> int:
    assert tally.low is not None and tally.high is not None
    return bin_exponent(float(tally.low), float(tally.high), tally.whole)


def _bins(values: Array, low: float, exponent: int, counts: Array | None = None) -> Histogram:
    """Return the histogram of `values`. Value i occurs `counts[i]` times, or once without `counts`.

    The computation is exact in float32: a product with a power of two is exact, and bin numbers are
    small integers.
    """
    sizes = np.minimum(np.abs(values), MOST) if values.dtype.kind == "c" else values
    # For smaller exponents, the power of two could exceed the largest float.
    scale = 2.0**-exponent if exponent > -1_000 else 0.0
    scaled = sizes * sizes.dtype.type(scale) if scale else np.ldexp(sizes, -exponent)
    bins = np.floor(scaled, out=scaled)
    first = math.floor(math.ldexp(low, -exponent))
    bins -= first
    codes = bins.astype(np.uint8)
    numbers = _count(codes) if counts is None else np.bincount(codes, counts).astype(np.int64)
    return Histogram(exponent, first, numbers.tolist())


def _count(bins: Array) -> Array:
    """Return the number of occurrences of each bin, up to the last bin that occurs.

    The function joins the numbers of two bins into one 12-bit number and counts these pairs,
    because numpy counts a pair as fast as a single bin. Every second pair is counted in a separate
    table. With one table, equal bins would be slow, because each increment would wait for the
    previous increment.
    """
    whole = len(bins) // 4 * 4
    pairs = bins[:whole].view("<u2")
    joined = pairs >> np.uint16(2)
    joined &= np.uint16(0xFC0)
    joined |= pairs & np.uint16(0x3F)
    seconds = joined.view("<u4")
    seconds |= np.uint32(BINS * BINS << 16)
    table = np.bincount(joined, minlength=2 * BINS * BINS).reshape(2, BINS, BINS).sum(0)
    counts = table.sum(0) + table.sum(1) + np.bincount(bins[whole:], minlength=BINS)
    found: Array = counts[: np.flatnonzero(counts)[-1] + 1]
    return found


# Non-finite and zero elements


def nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return the number of NaN elements and the number of infinite elements.

    A complex number counts as NaN or infinite if one of its parts is NaN or infinite. For dtypes
    without NaN and infinities, return (0, 0). Raise TensorError for a tensor whose elements cannot
    be read.
    """
    nan = infinite = 0
    axes = repeated(tensor)
    for values in _floats(once(tensor, axes)):
        odd = values[~np.isfinite(values)]
        if len(odd):
            numbers = int(np.count_nonzero(np.isnan(odd)))
            nan, infinite = nan + numbers, infinite + len(odd) - numbers
    return nan * times(tensor, axes), infinite * times(tensor, axes)


def zeros(tensor: Tensor) -> int:
    """Return the number of elements that are 0 or -0."""
    return sum(values.size - int(np.count_nonzero(values)) for values in _values(tensor))


def first_nonfinite(tensor: Tensor, most: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the index and the kind (nan, inf, -inf) of the first `most` non-finite elements.

    A complex number is non-finite if its real or imaginary part is non-finite. Raise TensorError as
    `nonfinite` does.
    """
    found: list[tuple[tuple[int, ...], str]] = []
    start = 0
    for values in _floats(tensor):
        for place in np.flatnonzero(~np.isfinite(values))[: most - len(found)]:
            index = np.unravel_index(start + int(place), tensor.shape)
            kind = "nan" if np.isnan(values[place]) else str(values[place])
            found.append((tuple(map(int, index)), kind))
        if len(found) == most:
            break
        start += len(values)
    return found


def _floats(tensor: Tensor) -> Iterator[Any]:
    """Yield the elements in row-major order, in blocks. Yield nothing for dtypes without NaN."""
    if tensor.dtype.kind in ("float", "complex") and is_decoded(tensor.dtype):
        if (error := refusal(tensor)) is not None:
            raise error
        yield from _values(tensor)


def _values(tensor: Tensor) -> Iterator[Any]:
    """Yield the elements in row-major order, in blocks."""
    for piece in aligned(
        stream_reusing_buffer(contiguous(tensor).locate()), tensor.dtype.itemsize, BUFFER
    ):
        yield decode(piece, tensor.dtype)
