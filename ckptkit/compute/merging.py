"""Merge elements of several models with the methods of mergekit.

Facts: mergekit 0.1.5, `merge_methods` and `sparsify`. Means and slerp are computed in float32 and
rounded once. Methods that add differences to a base round each step to the dtype of the tensors, as
in torch: a difference of bfloat16 tensors is rounded to bfloat16.

Some methods need a fact about whole tensors: the angle between two tensors, or the magnitude below
which differences are dropped. These methods read the tensors once or twice before the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import acos, inf, sin
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, in_step, stream_reusing_buffer
from ckptkit.core.bytesource import Derived, Operation, starts_anywhere
from ckptkit.core.dtypes import BY_NAME

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# The methods of mergekit, by their names in ckptkit. Methods that add differences take the base
# first.
LINEAR, SLERP, PASSTHROUGH = "linear", "slerp", "passthrough"
TASK, TIES, DARE_TIES, DARE_LINEAR = "task", "ties", "dare-ties", "dare-linear"
METHODS = (LINEAR, SLERP, TASK, TIES, DARE_TIES, DARE_LINEAR, PASSTHROUGH)
OF_DIFFERENCES = (TASK, TIES, DARE_TIES, DARE_LINEAR)
SPARSE = (TIES, DARE_TIES, DARE_LINEAR)  # methods that drop differences, to a density
_CONSENSUS = (TIES, DARE_TIES)  # methods that drop differences with the minority sign
_COLLINEAR = 0.9995  # above this cosine, slerp is linear
_SMALLEST = 1e-7  # smaller sums of magnitudes are not rescaled
_AT_ONCE = 1 << 17  # elements per step: fits the caches, and keeps numpy calls long
_SAMPLED = 1 << 16  # elements in the sample for a guess, at most a sixteenth of all
_FEWEST_SPOTS = 8  # of a sample
_SPOT = 1 << 10  # adjacent elements in a sample


class _Kept(NamedTuple):
    """The differences of one input to keep: all above `least`, and the first `ties` equal ones.

    The kept differences are multiplied by `scale`.
    """

    least: float
    ties: int
    scale: float


@dataclass(frozen=True, slots=True)
class Merge(Operation):
    """The elements of all inputs, merged by `method` and rounded to `dtype` at each step.

    ``weights`` and ``densities`` belong to the inputs without the base. ``scale`` multiplies the
    sum of the differences; for slerp, it is the share of the second input. For dare-ties and
    dare-linear, `seed` chooses the differences to keep.
    """

    method: str
    dtype: str
    dtypes: tuple[str, ...]
    weights: tuple[float, ...]
    densities: tuple[float, ...]
    normalize: bool
    rescale: bool
    scale: float
    seed: int
    seekable: ClassVar[bool] = False  # whether a tie is kept depends on the ties before it

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        import numpy as np

        unit, at = BY_NAME[self.dtype].itemsize, 0
        with np.errstate(all="ignore"):
            merged = self._merged(extent)
            for values in merged:
                made = encode(values, BY_NAME[self.dtype])
                if start < at + len(made) and at < stop:
                    yield made[max(start - at, 0) : min(stop - at, len(made))]
                at += len(values) * unit
                if at >= stop:
                    return

    def _inputs(
        self, extent: Derived, start: int = 0, stop: int | None = None
    ) -> Iterator[list[Array]]:
        """Yield elements of all inputs together, rounded to `dtype`, as float32 or float64."""
        wide = "f8" if self.dtype == "float64" else "f4"
        units = [BY_NAME[name].itemsize for name in self.dtypes]
        streams = [
            stream_reusing_buffer(each, start * unit, stop and stop * unit)
            for each, unit in zip(extent.inputs, units, strict=True)
        ]
        for pieces in in_step(streams, units, _AT_ONCE):
            values = []
            for piece, name in zip(pieces, self.dtypes, strict=True):
                each = decode(piece, BY_NAME[name]).astype(wide, copy=False)
                if name != self.dtype and self.dtype not in ("float32", "float64"):
                    each = decode(encode(each, BY_NAME[self.dtype]), BY_NAME[self.dtype])
                values.append(each)
            yield values

    def _round(self, values: Array) -> None:
        """Round an array of one or two dimensions to `dtype`, in place."""
        dtype = BY_NAME[self.dtype]
        if dtype.name in ("float32", "float64"):
            return
        if dtype.name == "bfloat16":
            # Twice as fast as ml_dtypes. NaN stays NaN: each comes from arithmetic on 16-bit
            # floats, so its lower bits are 0 and the addition does not overflow.
            bits = values.view("u4")
            made = bits >> 16
            made &= 1  # ties to even
            made += 0x7FFF
            bits += made
            bits &= 0xFFFF0000
            return
        for row in values.reshape(-1, values.shape[-1]):
            row[:] = decode(encode(row, dtype), dtype)

    def _number(self, value: float) -> Any:
        """Round a number to `dtype`, and return it in the type of the computation."""
        import numpy as np

        values = np.array([value], "f8" if self.dtype == "float64" else "f4")
        self._round(values)
        return values[0]

    def _merged(self, extent: Derived) -> Iterator[Array]:
        import numpy as np

        if self.method == SLERP:
            shares = self._shares(extent)
            for base, other in self._inputs(extent):
                yield shares[0] * base + shares[1] * other
        elif self.method == LINEAR:
            for values in self._inputs(extent):
                # As torch's addcmul: fused, so the products are not rounded separately.
                wide = values[0].dtype.type
                total = np.zeros_like(values[0])
                for each, weight in zip(values, self.weights, strict=True):
                    total = (each.astype("f8") * wide(weight) + total).astype(total.dtype)
                yield total / np.sum(self.weights, dtype=wide) if self.normalize else total
        elif self.method == PASSTHROUGH:
            for (each,) in self._inputs(extent):
                yield each * each.dtype.type(self.scale)
        else:
            yield from self._changed(extent)

    def _shares(self, extent: Derived) -> tuple[Any, Any]:
        """Return the factors of the two inputs of slerp."""
        import numpy as np

        ours = theirs = product = 0.0
        for base, other in self._inputs(extent):
            ours += float(np.dot(base, base))
            theirs += float(np.dot(other, other))
            product += float(np.dot(base, other))
        lengths = [norm if (norm := each**0.5) > 1e-8 else 1.0 for each in (ours, theirs)]
        cosine = product / lengths[0] / lengths[1]
        shares = 1 - self.scale, self.scale
        if abs(cosine) <= _COLLINEAR:
            angle = acos(cosine)
            part = angle * self.scale
            shares = sin(angle - part) / sin(angle), sin(part) / sin(angle)
        wide = np.float64 if self.dtype == "float64" else np.float32
        return wide(shares[0]), wide(shares[1])

    # Methods of differences from a base

    def _differences(
        self, extent: Derived, start: int = 0, stop: int | None = None, *, is_rounded: bool = True
    ) -> Iterator[tuple[Array, Array]]:
        """Yield elements of the base, and the differences of the other inputs from these.

        The differences are an array of shape (inputs, elements), which the next one overwrites.
        """
        import numpy as np

        memory: Array | None = None
        for base, *others in self._inputs(extent, start, stop):
            if memory is None:
                memory = np.empty((len(others), _AT_ONCE), base.dtype)
            changes = memory[:, : len(base)]
            for row, each in zip(changes, others, strict=True):
                np.subtract(each, base, out=row)
            if is_rounded:
                self._round(changes)
            yield base, changes

    def _chances(self) -> list[_Chances | None]:
        """Return for each input the random numbers that decide which differences dare keeps."""
        is_random = self.method in (DARE_TIES, DARE_LINEAR)
        return [
            _Chances(density, (self.seed % (1 << 64), number))
            if is_random and density < 1
            else None
            for number, density in enumerate(self.densities)
        ]

    def _changed(self, extent: Derived) -> Iterator[Array]:
        """Yield the base plus the sum of the differences that are kept."""
        weights = list(map(self._number, self.weights))
        kept = self._kept(extent) if min(self.densities) < 1 and self.method in SPARSE else []
        taken = [0] * len(weights)  # ties so far
        chances = self._chances()
        # Halves of bfloat16 are bfloat16, except for subnormal numbers.
        is_exact = self.dtype == "bfloat16" and set(weights) == {1} and len(weights) <= 2
        for base, changes in self._differences(extent):
            for number, (change, weight) in enumerate(zip(changes, weights, strict=True)):
                if (chance := chances[number]) is not None:
                    change *= chance.kept(len(change))
                if kept and (keep := kept[number]) is not None:
                    taken[number] += self._thin(change, keep, taken[number])
                if weight != 1:
                    change *= weight
                    self._round(change)
            if self.method in _CONSENSUS:
                total, divisor = self._agreed(changes, weights)
            else:
                total, divisor = _total(changes), self._number(sum(weights))
                self._round(total)
                divisor = self._number(1) if abs(divisor) < 1e-8 else divisor
            if self.normalize:
                total /= divisor
                if not is_exact:
                    self._round(total)
            if self.scale != 1:
                total *= total.dtype.type(self.scale)
                self._round(total)
            total += base
            yield total

    def _agreed(self, changes: Array, weights: Sequence[Any]) -> tuple[Array, Array]:
        """Return the sum of the changes that have the majority sign, and the sum of their weights.

        Where no change has that sign, the sum of the weights is 1. Overwrites `changes`.
        """
        import numpy as np

        # Multiplied by the majority sign, values that agree with it are positive. Flipping sign
        # bits is 20x as fast in numpy as choosing between two numbers.
        total = _total(changes)
        total += 0  # no negative zero
        bits = total.view(f"i{total.itemsize}")
        sign = bits & np.iinfo(bits.dtype).min
        flipped = changes.view(bits.dtype)
        flipped ^= sign
        # As integers, negative floats are negative too; np.maximum of floats keeps NaN.
        positive = flipped if np.isfinite(total.sum()) else changes
        np.maximum(positive, 0, out=positive)
        agree = changes > 0
        total = _total(changes)
        self._round(total)
        bits = total.view(bits.dtype)
        bits ^= sign
        if set(weights) == {1} and len(weights) < 256:  # a count, in bytes
            counts = _total(agree.view("u1"))
            return total, np.maximum(counts, 1).astype(total.dtype)
        divisor = _total([each * weight for each, weight in zip(agree, weights, strict=True)])
        self._round(divisor)
        divisor += divisor == 0
        return total, divisor

    def _thin(self, change: Array, keep: _Kept, taken: int) -> int:
        """Zero the small differences and scale the rest, in place.

        `taken` ties were kept before. Return the number of ties that were kept now.
        """
        import numpy as np

        count = 0
        if keep.least > 0:
            sizes = np.abs(change)
            stays = sizes > keep.least
            if taken < keep.ties:
                is_tie = sizes == keep.least
                if (count := int(np.count_nonzero(is_tie))) > keep.ties - taken:
                    count = keep.ties - taken
                    is_tie[np.flatnonzero(is_tie)[count:]] = False
                stays |= is_tie
            change *= stays
        if keep.scale != 1:
            change *= self._number(keep.scale)
            self._round(change)
        return count

    def _kept(self, extent: Derived) -> list[_Kept | None]:
        """Read all differences, and return for each input the differences to keep."""
        import numpy as np

        if self.method == TIES:
            return self._by_magnitude(extent)
        kept: list[_Kept | None] = [None] * len(self.weights)
        if not self.rescale:
            return kept
        all_, stay = [0.0] * len(kept), [0.0] * len(kept)
        chances = self._chances()
        for _, changes in self._differences(extent):
            for number, chance in enumerate(chances):
                if chance is not None:
                    sizes = np.abs(changes[number])
                    all_[number] += float(sizes.sum())  # numpy adds in pairs: precise in float32
                    stay[number] += float((sizes * chance.kept(len(sizes))).sum())
        for number, chance in enumerate(chances):
            if chance is not None:
                kept[number] = _Kept(0.0, 0, self._ratio(all_[number], stay[number]))
        return kept

    def _ratio(self, before: float, after: float) -> float:
        ours, theirs = self._number(before), self._number(after)
        if ours < _SMALLEST or theirs < _SMALLEST:
            return 1.0
        return float(self._number(float(ours / theirs)))

    def _by_magnitude(self, extent: Derived) -> list[_Kept | None]:
        """Return the exact threshold of each input: larger or equal magnitudes are kept."""
        import numpy as np

        length = extent.length // BY_NAME[self.dtype].itemsize
        kept: list[_Kept | None] = [
            None if density >= 1 or not length else _Kept(inf, 0, 1.0) for density in self.densities
        ]
        searches = {
            number: _MagnitudeSearch(max(1, int(density * length)), self.dtype, self._round)
            for number, density in enumerate(self.densities)
            if 0 < density < 1 and length
        }
        spots = min(_SAMPLED, length // 16) // _SPOT
        if spots >= _FEWEST_SPOTS and all(map(starts_anywhere, extent.inputs)):
            for at in range(0, length - _SPOT, length // spots):
                for _, changes in self._differences(extent, at, at + _SPOT):
                    for number, search in searches.items():
                        search.sample(changes[number])
            for search in searches.values():
                search.guess(length)
        while not all(search.is_done for search in searches.values()):
            for _, changes in self._differences(extent, is_rounded=False):
                for number, search in searches.items():
                    search.count(changes[number])
            for search in searches.values():
                search.narrow()
        sums, larger = [0.0] * len(kept), [0.0] * len(kept)
        if self.rescale:
            for _, changes in self._differences(extent):
                for number, search in searches.items():
                    sizes = np.abs(changes[number])
                    sums[number] += float(sizes.sum(dtype="f8"))
                    larger[number] += float(sizes[sizes > search.least].sum(dtype="f8"))
        for number, search in searches.items():
            after = larger[number] + search.ties * search.least
            scale = self._ratio(sums[number], after) if self.rescale else 1.0
            kept[number] = _Kept(search.least, search.ties, scale)
        return kept


class _Chances:
    """Random numbers that decide, element by element, which differences are kept."""

    def __init__(self, density: float, seed: Sequence[int]) -> None:
        import numpy as np

        self.limit = int(density * 2.0**16)
        self.generator = np.random.SFC64(seed)
        self.rest: Array = np.empty(0, "<u2")  # drawn for the following elements

    def kept(self, count: int) -> Array:
        """Return True for each of the next `count` elements that is kept."""
        import numpy as np

        if missing := max(count - len(self.rest), 0):
            drawn = self.generator.random_raw(-(-missing // 4)).view("<u2")
            self.rest = np.concatenate([self.rest, drawn]) if len(self.rest) else drawn
        codes, self.rest = self.rest[:count], self.rest[count:]
        found: Array = codes < self.limit
        return found


class _MagnitudeSearch:
    """Finds the magnitude that `goal` elements reach or exceed, without sorting the elements.

    The bits of magnitudes without the sign, here called codes, have the same order as the
    magnitudes. Each pass over the elements counts the codes in an interval, until the interval
    contains one code. Only elements that may round into the interval are rounded.
    """

    def __init__(self, goal: int, dtype: str, round_: Callable[[Array], None]) -> None:
        self.goal, self.round = goal, round_
        self.kind, bits = ("i8", 63) if dtype == "float64" else ("i4", 31)
        self.top = 1 << bits
        self.unused = {"bfloat16": 16, "float16": 13}.get(dtype, 0)  # low bits that are zero
        self.interval = 0, self.top  # [first, end)
        self.is_done = False
        self._begin()

    def _begin(self) -> None:
        import numpy as np

        low, high = self.interval
        self.above = 0  # number of codes above the interval
        self.shift = max(self.unused, (high - low - 1).bit_length() - 19)
        self.counts = np.zeros((high - low - 1 >> self.shift) + 1, "i8")
        self.waiting: list[Array] = []  # codes in the interval that are not counted yet
        # The interval of codes whose numbers may round into `interval`. Adjacent 16-bit floats
        # differ by at most 2**-7 of their size, or by 2**-24 for subnormal float16.
        self.candidates = self.interval
        if self.unused and high < self.top:
            step = max(self._magnitude(high) * 2.0**-7, 2.0**-24)
            ends = max(self._magnitude(low) - step, 0), self._magnitude(high) + step
            first, last = np.array(ends, "f4").view("i4").tolist()
            self.candidates = first, last

    def _magnitude(self, code: int) -> float:
        import numpy as np

        return float(np.array(code, self.kind).view(self.kind.replace("i", "f")))

    @property
    def least(self) -> float:
        """The magnitude found."""
        return self._magnitude(self.interval[0])

    @property
    def ties(self) -> int:
        """The number of elements of exactly the magnitude `least` to keep."""
        return self.goal - self.above

    def _codes(self, values: Array) -> Array:
        codes: Array = values.view(self.kind) & (self.top - 1)
        return codes

    def sample(self, values: Array) -> None:
        """Add rounded elements to the sample."""
        self.waiting.append(self._codes(values))

    def guess(self, length: int) -> None:
        """Narrow the interval by the sample. `length` counts all elements. A miss costs a pass."""
        import numpy as np

        codes = np.concatenate(self.waiting)
        place = int(len(codes) * (1 - self.goal / length))
        # At least three standard deviations of the number of codes below the limit.
        margin = max(len(codes) // 100, int(1.5 * len(codes) ** 0.5))
        ends = max(place - margin, 0), min(place + margin, len(codes) - 1)
        low, high = np.partition(codes, ends)[list(ends)].tolist()
        self.interval = low, high + (1 << self.unused)
        self._begin()

    def count(self, values: Array) -> None:
        """Count elements, not yet rounded, that lie above the interval or in it."""
        import numpy as np

        if self.is_done:
            return
        low, high = self.interval
        first, last = self.candidates
        codes = self._codes(values)
        self.above += int(np.count_nonzero(codes >= last))
        codes -= first
        # Codes below the first are negative here, and large as unsigned numbers.
        inside = values[np.flatnonzero(codes.view(self.kind.replace("i", "u")) < last - first)]
        self.round(inside)
        codes = self._codes(inside)
        self.above += int(np.count_nonzero(codes >= high)) if last != self.top else 0
        self.waiting.append(codes[(codes >= low) & (codes < high)] - low)
        if sum(map(len, self.waiting)) > _AT_ONCE << 3:
            self._count_waiting()

    def _count_waiting(self) -> None:
        import numpy as np

        if self.waiting:
            bins = np.concatenate(self.waiting) >> self.shift
            self.counts += np.bincount(bins, minlength=len(self.counts))
            self.waiting.clear()

    def narrow(self) -> None:
        """Narrow the interval to the bin that contains the goal."""
        import numpy as np

        if self.is_done:
            return
        self._count_waiting()
        low, high = self.interval
        if self.above >= self.goal:  # the guess was too low
            self.interval = high, self.top
        elif self.above + self.counts.sum() < self.goal:  # too high
            self.interval = 0, low
        else:
            from_above = np.cumsum(self.counts[::-1])
            place = int(np.searchsorted(from_above, self.goal - self.above))
            low += len(self.counts) - 1 - place << self.shift
            self.interval = low, min(high, low + (1 << self.shift))
            if self.shift == self.unused:
                self.is_done = True
                self.above += int(from_above[place - 1]) if place else 0
                return
        self._begin()


def _total(values: Sequence[Array] | Array) -> Array:
    """Return the sum of arrays, in order, as a new array."""
    if len(values) == 1:
        return values[0].copy()
    total: Array = values[0] + values[1]
    for each in values[2:]:
        total += each
    return total
