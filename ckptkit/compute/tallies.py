"""Statistics of numbers, in one pass, of parts that can be joined.

Mean and sum of squared deviations are float64: those of a block are computed in two passes over it
while it is in the cache, and blocks are joined as Chan, Golub and LeVeque do (1979), which loses
nothing where the mean is large. Numbers whose squares float64 cannot hold are scaled by a power of
two. Parts of a tensor are cut at fixed places and joined in order, so the result does not depend on
the threads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.arranged import contiguous, once, refusal, repeated, times
from ckptkit.compute.numbers import decode, is_decoded
from ckptkit.compute.operation import (
    BUFFER,
    aligned,
    import_numpy,
    keep_memory,
    stream_reusing_buffer,
)
from ckptkit.core.bytesource import Extent, Range
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST = sys.float_info.max  # also of absolute values of complex numbers
BINS = 64  # of a histogram, at most
_SCALES = 126  # exponents of float32 that are powers of two of it, either way
FINE = 40  # bits: a bin is no smaller than the largest number divided by 2**40
LEAST = -1_200  # exponent of the bins of zeros alone: smaller than that of any number
# Elements worked on at once: calls of numpy are so long that threads seldom wait for the lock of
# the interpreter. Smaller blocks are no faster by themselves.
BLOCK = 1 << 18
BLOCK_BYTES = 2 << 20  # at most
PART = 32 << 20  # bytes of a tensor that are a task of their own
COUNTED = 2 << 20  # bytes of one from which on the codes of small types are counted
DOT = 8_192  # numbers of a dot product: of more, a library may start threads of its own
# Exponents of the largest number between which its square, and a sum of squares, is in float64.
SQUARED = (-400, 500)
NEAR = 16  # times as much as a mean contributes to a sum of squares, that it is taken out of


@dataclass(slots=True)
class Histogram:
    """Bin ``i`` of `counts` counts the numbers from ``(first + i) * 2**exponent`` on, up to where
    the next one begins.

    The width is the smallest power of two with which `BINS` bins reach from the smallest number to
    the largest (1 at least for integers, or with `FINE`). So one pass is enough, as bins are joined
    in pairs when a number is outside; histograms of different tensors can be added; and neither
    the order nor the parts make a difference.
    """

    exponent: int = 0
    first: int = 0
    counts: list[int] = field(default_factory=list)

    @property
    def edges(self) -> list[float]:
        """Edges of the bins: the lower edge of each, then the upper edge of the last."""
        return [_scaled(self.first + i, self.exponent) for i in range(len(self.counts) + 1)]

    def coarser(self, exponent: int) -> Histogram:
        """The same numbers in bins as wide as that."""
        steps = exponent - self.exponent
        if not steps or not self.counts:
            return self
        first = self.first >> steps
        counts = [0] * ((self.first + len(self.counts) - 1 >> steps) - first + 1)
        for i, count in enumerate(self.counts, self.first):
            counts[(i >> steps) - first] += count
        return Histogram(exponent, first, counts)

    def at_most(self, bins: int) -> Histogram:
        """The same numbers in no more bins than that."""
        made = self
        while len(made.counts) > bins:
            made = made.coarser(made.exponent + 1)
        return made

    def plus(self, other: Histogram, exponent: int) -> Histogram:
        """The numbers of both, in bins that are wide enough."""
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
    except OverflowError:  # the end of a bin that holds the largest of all floats, a norm
        return math.copysign(math.inf, number)


def _ldexp(number: float | complex, exponent: int) -> float | complex:
    """Return ``number * 2**exponent``, no more than the largest float: a mean may be rounded up."""
    if not exponent:
        return number
    if isinstance(number, complex):
        return complex(*(_ldexp(part, exponent) for part in (number.real, number.imag)))
    made = _scaled(number, exponent)
    return made if math.isfinite(made) else math.copysign(MOST, made)


@dataclass(slots=True)
class Tally:
    """Statistics of some numbers.

    NaN and infinities are counted, and left out of all else.

    ``low`` and ``high`` are the smallest and largest, None if there are none; of complex numbers,
    those of their absolute values, which the histogram is of as well. ``squares`` is the sum of
    squared deviations from the mean, times ``2**(-2 * scale)``.
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
    whole: bool = True  # whether all of them are integers by their type
    scale: int = 0

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite

    @property
    def std(self) -> float | None:
        """As ``torch.std``: squares divided by one less than the number; None below two numbers."""
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
        """The fraction of zeros."""
        return self.zeros / self.count if self.count else None

    def to_json(self) -> list[Any]:
        """Return the same as what JSON can say, exactly."""
        mean = [self.mean.real, self.mean.imag] if isinstance(self.mean, complex) else self.mean
        bins = [self.histogram.exponent, self.histogram.first, self.histogram.counts]
        others = (self.count, self.nan, self.infinite, self.zeros, self.squares)
        return [*others, mean, self.low, self.high, bins, self.whole, self.scale]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> Tally:
        """Return what `to_json` was called for."""
        count, nan, infinite, zeros, squares, mean, low, high, bins, whole, scale = found
        mean = complex(*mean) if isinstance(mean, list) else mean
        histogram = Histogram(*bins)
        return cls(count, nan, infinite, zeros, mean, squares, low, high, histogram, whole, scale)

    def add(self, other: Tally) -> None:
        """Count the numbers of `other` too."""
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
            self._bins(other)
        self.count += other.count
        self.nan += other.nan
        self.infinite += other.infinite
        self.zeros += other.zeros

    def repeated(self, times: int) -> Tally:
        """The same for numbers that are there so many times."""
        if times == 1:
            return self
        counts = [count * times for count in self.histogram.counts]
        return replace(
            self,
            count=self.count * times,
            nan=self.nan * times,
            infinite=self.infinite * times,
            zeros=self.zeros * times,
            squares=self.squares * times,
            histogram=replace(self.histogram, counts=counts),
        )

    def _bins(self, other: Tally) -> None:
        assert other.low is not None and other.high is not None
        self.low = other.low if self.low is None else min(self.low, other.low)
        self.high = other.high if self.high is None else max(self.high, other.high)
        exponent = bin_exponent(float(self.low), float(self.high), self.whole)
        self.histogram = self.histogram.plus(other.histogram, exponent)


def bin_exponent(low: float, high: float, whole: bool) -> int:
    """The exponent of two for the width of bins, by the rule of `Histogram`."""
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
    """Bytes `start` to `stop` of what a tensor's elements are."""

    extent: Extent
    dtype: DType
    start: int
    stop: int
    times: int = 1  # how often each of them is there

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parts(tensor: Tensor) -> Iterator[ElementRange]:
    """The elements of a tensor, in parts of a bounded size where each can be read by itself.

    Raises TensorError for elements that are not numbers by themselves, or are not there.
    """
    if not is_decoded(tensor.dtype):
        raise TensorError(f"elements of {tensor.dtype} are not numbers by themselves")
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
    """Return all elements of a tensor, in its shape; the caller must make sure that they are few.

    Raises like `parts`.
    """
    import numpy as np

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
    """The statistics of one part."""
    keep_memory()
    import_numpy()
    import numpy as np

    small = part.dtype.itemsize <= 2 and part.nbytes >= COUNTED
    found = Tally()
    with np.errstate(all="ignore"):  # absolute values of complex numbers may be infinite
        if small:
            return _of_codes(part).repeated(part.times)
        for piece in _pieces(part):
            found.add(_block(decode(piece, part.dtype)))
    return found.repeated(part.times)


def _of_codes(part: ElementRange) -> Tally:
    """The statistics of elements of 8 or 16 bits: of each number, and how often it is there."""
    import numpy as np

    unit = np.dtype(f"<u{part.dtype.itemsize}")
    counts = np.zeros(256**unit.itemsize, np.int64)
    for piece in _pieces(part):
        counts += np.bincount(np.frombuffer(piece, unit), minlength=len(counts))
    codes = np.flatnonzero(counts)
    return _counted(decode(codes.astype(unit).tobytes(), part.dtype), counts[codes])


def _counted(values: Array, counts: Array) -> Tally:
    """The statistics of numbers that are there so many times."""
    import numpy as np

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
    """The statistics of a few numbers."""
    import numpy as np

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
    exact = values.dtype == np.float32 and -_SCALES <= exponent <= 0
    if exact:
        made.histogram = _bins(values, low, exponent)
    wide = values if values.dtype.kind == "c" else values.astype("f8")
    if not exact:
        made.histogram = _bins(wide, low, exponent)
    largest = math.frexp(max(high, -low))[1]
    if largest and not SQUARED[0] < largest < SQUARED[1]:
        made.scale = largest
        wide = np.ldexp(wide.view("f8"), -largest).view(wide.dtype)
    mean = (wide.sum() / len(wide)).item()
    made.mean = _ldexp(mean, made.scale)
    made.squares = _squares(wide, mean)
    return made


def _squares(wide: Array, mean: float | complex) -> float:
    """Return the sum of squared deviations from the mean; the numbers may be changed.

    A mean near zero is subtracted afterwards: the sum loses less than a bit by that.
    """
    total, part = _dot(wide.view("f8")), len(wide) * abs(mean) ** 2
    if part <= total / NEAR and math.isfinite(total):
        return total - part
    wide -= mean
    return _dot(wide.view("f8"))


def _dot(values: Array) -> float:
    """Return the sum of squares."""
    import numpy as np

    whole = len(values) // DOT * DOT
    rows, rest = values[:whole].reshape(-1, 1, DOT), values[whole:]
    sums = np.matmul(rows, rows.reshape(-1, DOT, 1)).reshape(-1)
    return sum(sums.tolist(), float(np.dot(rest, rest)))


def _range(values: Array) -> tuple[float | int, float | int]:
    """The smallest and the largest; of complex numbers, their absolute values."""
    import numpy as np

    sizes = np.abs(values) if values.dtype.kind == "c" else values
    return sizes.min().item(), sizes.max().item()


def _exponent(tally: Tally) -> int:
    assert tally.low is not None and tally.high is not None
    return bin_exponent(float(tally.low), float(tally.high), tally.whole)


def _bins(values: Array, low: float, exponent: int, counts: Array | None = None) -> Histogram:
    """The histogram of numbers, each of them there as often as `counts` says, or once.

    float32 is as exact as float64 here: a number is divided by a power of two that does not make it
    too small, and the difference of whole numbers, which is small, is what is left.
    """
    import numpy as np

    sizes = np.minimum(np.abs(values), MOST) if values.dtype.kind == "c" else values
    scale = 2.0**-exponent if exponent > -1_000 else 0.0  # which would be infinite
    scaled = sizes * sizes.dtype.type(scale) if scale else np.ldexp(sizes, -exponent)
    bins = np.floor(scaled, out=scaled)
    first = math.floor(math.ldexp(low, -exponent))
    bins -= first
    codes = bins.astype(np.uint8)
    numbers = _count(codes) if counts is None else np.bincount(codes, counts).astype(np.int64)
    return Histogram(exponent, first, numbers.tolist())


def _count(bins: Array) -> Array:
    """Return how often each bin below `BINS` is there, up to the last that is.

    Two at a time are counted as one number of 12 bits: numpy takes as long for each. Every second
    pair counts in a table of its own: where all are equal, as of zeros, each count waits for the
    one before to be written.
    """
    import numpy as np

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


# Numbers that are not finite, or zero


def nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are NaN and infinite; of complex ones, in one part at least.

    None where the type has neither, or its elements are not numbers by themselves. Raises
    TensorError for a tensor without elements to read.
    """
    import numpy as np

    nan = infinite = 0
    axes = repeated(tensor)
    for values in _floats(once(tensor, axes)):
        odd = values[~np.isfinite(values)]
        if len(odd):
            numbers = int(np.count_nonzero(np.isnan(odd)))
            nan, infinite = nan + numbers, infinite + len(odd) - numbers
    return nan * times(tensor, axes), infinite * times(tensor, axes)


def zeros(tensor: Tensor) -> int:
    """Return how many elements are zero, of either sign."""
    import numpy as np

    return sum(values.size - int(np.count_nonzero(values)) for values in _values(tensor))


def first_nonfinite(tensor: Tensor, most: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the index and kind (nan, inf, -inf) of the first elements that are not finite.

    Of complex ones the parts are looked at as one. Raises TensorError like `nonfinite`.
    """
    import numpy as np

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
    """Yield the elements in row-major order, in pieces, if some may not be finite."""
    if tensor.dtype.kind in ("float", "complex") and is_decoded(tensor.dtype):
        if (error := refusal(tensor)) is not None:
            raise error
        yield from _values(tensor)


def _values(tensor: Tensor) -> Iterator[Any]:
    """Yield the elements in row-major order, in pieces."""
    for piece in aligned(
        stream_reusing_buffer(contiguous(tensor).locate()), tensor.dtype.itemsize, BUFFER
    ):
        yield decode(piece, tensor.dtype)
