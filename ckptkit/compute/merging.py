"""Merge elements of several models with the methods of mergekit.

The source is mergekit 0.1.5, `merge_methods` and `sparsify`. Means and slerp are computed in
float32 and rounded once. All other methods except passthrough add differences to the tensors of a
base model. A method that adds differences rounds each step to the dtype of the tensors, as torch
does. For example, the difference of two bfloat16 tensors is rounded to bfloat16.

Slerp needs the angle between two tensors. Methods that drop small differences need the smallest
magnitude to keep. To find the angle or the magnitude, ckptkit reads the complete tensors once or
twice before the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import acos, inf, sin
from typing import Any, ClassVar, NamedTuple

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, encode, rounded
from ckptkit.compute.operation import Pieces, in_step, read_into, stream_reusing_buffer, within
from ckptkit.core.bytesource import Derived, Operation, starts_anywhere
from ckptkit.core.dtypes import BY_NAME

# The names of mergekit's methods in ckptkit. If a method adds differences, the first input is the
# base.
LINEAR, SLERP, PASSTHROUGH = "linear", "slerp", "passthrough"
TASK, TIES, DARE_TIES, DARE_LINEAR = "task", "ties", "dare-ties", "dare-linear"
METHODS = (LINEAR, SLERP, TASK, TIES, DARE_TIES, DARE_LINEAR, PASSTHROUGH)
OF_DIFFERENCES = (TASK, TIES, DARE_TIES, DARE_LINEAR)
SPARSE = (TIES, DARE_TIES, DARE_LINEAR)  # methods that drop some differences (see `densities`)
_CONSENSUS = (TIES, DARE_TIES)  # methods that drop differences with the minority sign
_COLLINEAR = 0.9995  # if the inputs' cosine exceeds this number, slerp interpolates linearly
_SMALLEST = 1e-7  # if the sum of the magnitudes is below this number, differences are not rescaled
# Number of elements per step. The elements fit the caches. The numpy calls are long enough that
# threads rarely wait for the interpreter lock.
_AT_ONCE = 1 << 17
_SAMPLED = 1 << 16  # maximum number of elements in the sample that narrows a search
# If a tensor has at least this number of bytes, dare-ties and dare-linear compute the scale of the
# kept differences from unrounded differences.
_UNROUNDED = 1 << 21
_FEWEST_SPOTS = 8  # minimum number of places from which a sample takes elements
_SPOT = 1 << 10  # number of adjacent elements that a sample takes from one place


class _Kept(NamedTuple):
    """Selects which differences of one input to keep.

    A difference is kept if its magnitude exceeds `least`. Of the differences with the magnitude
    `least`, the first `ties` are kept. The kept differences are multiplied by `scale`.
    """

    least: float
    ties: int
    scale: float


@dataclass(frozen=True, slots=True)
class Merge(Operation):
    """Merges the elements of all inputs by `method`, and rounds to `dtype` at each step.

    ``weights`` and ``densities`` contain a number for each input except the base. The sum of the
    differences is multiplied by ``scale``. For slerp, ``scale`` is the share of the second input.
    For dare-ties and dare-linear, ``seed`` selects the differences to keep.
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
    # If the operation keeps only some of several equal differences, it keeps the first ones.
    # Therefore the operation must read the elements in order.
    seekable: ClassVar[bool] = False

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        with np.errstate(all="ignore"):
            made = (encode(values, BY_NAME[self.dtype]) for values in self._merged(extent))
            yield from within(made, 0, start, stop)

    def _inputs(self, extent: Derived) -> Iterator[list[Array]]:
        """Yield lists with one block of each input. `_values` has converted the blocks."""
        units = [BY_NAME[name].itemsize for name in self.dtypes]
        streams = [
            stream_reusing_buffer(each, size=_AT_ONCE * unit)
            for each, unit in zip(extent.inputs, units, strict=True)
        ]
        return map(self._values, in_step(streams, units, _AT_ONCE))

    def _values(self, pieces: Iterable[memoryview]) -> list[Array]:
        """Convert one piece of each input to numbers that are rounded to `dtype`.

        The arrays are float32, or float64 if `dtype` is float64.
        """
        wide = "f8" if self.dtype == "float64" else "f4"
        values = []
        for piece, name in zip(pieces, self.dtypes, strict=True):
            each = decode(piece, BY_NAME[name]).astype(wide, copy=False)
            if name != self.dtype and self.dtype not in ("float32", "float64"):
                each = rounded(each, self.dtype)
            values.append(each)
        return values

    def _round(self, values: Array) -> None:
        """Round an array of one or two dimensions to `dtype`, in place."""
        if self.dtype == "bfloat16":
            # An addition to the bits is twice as fast as ml_dtypes. The addition does not overflow
            # for a NaN: every NaN results from arithmetic on 16-bit floats, so its lower 16 bits
            # are 0.
            bits = values.view("u4")
            made = bits >> 16
            made &= 1  # rounds ties to even
            made += 0x7FFF
            bits += made
            bits &= 0xFFFF0000
        elif self.dtype not in ("float32", "float64"):
            values[...] = rounded(values, self.dtype)

    def _number(self, value: float) -> Any:
        """Round a number to `dtype`. Return a float32 number, or float64 if `dtype` is float64."""
        values = np.array([value], "f8" if self.dtype == "float64" else "f4")
        self._round(values)
        return values[0]

    def _merged(self, extent: Derived) -> Iterator[Array]:
        if self.method == SLERP:
            shares = self._shares(extent)
            for base, other in self._inputs(extent):
                yield shares[0] * base + shares[1] * other
        elif self.method == LINEAR:
            for values in self._inputs(extent):
                # torch's addcmul uses fused multiply-add, which does not round the products.
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

    # Methods that add differences to a base

    def _differences(
        self, extent: Derived, *, is_rounded: bool = True
    ) -> Iterator[tuple[Array, Array]]:
        """Yield pairs: a block of the base, and the differences to the base.

        The differences are an array of shape (inputs, elements). The array has one row for each
        input except the base. Each array of differences overwrites the previous array.
        """
        memory: Array | None = None
        for base, *others in self._inputs(extent):
            if memory is None:
                memory = np.empty((len(others), _AT_ONCE), base.dtype)
            changes = memory[:, : len(base)]
            for row, each in zip(changes, others, strict=True):
                np.subtract(each, base, out=row)
            if is_rounded:
                self._round(changes)
            yield base, changes

    def _chances(self) -> list[_Chances | None]:
        """Return, for each input, the random numbers that select the differences to keep."""
        is_random = self.method in (DARE_TIES, DARE_LINEAR)
        return [
            _Chances(density, (self.seed % (1 << 64), number))
            if is_random and density < 1
            else None
            for number, density in enumerate(self.densities)
        ]

    def _changed(self, extent: Derived) -> Iterator[Array]:
        """Yield the sum of the base and the kept differences."""
        weights = list(map(self._number, self.weights))
        kept = self._kept(extent) if min(self.densities) < 1 and self.method in SPARSE else []
        # For each input, the number of differences of magnitude `_Kept.least` kept so far.
        taken = [0] * len(weights)
        chances = self._chances()
        # If one or two weights are all 1, the divisor is 1 or 2. Half of a bfloat16 number is a
        # bfloat16 number, except for subnormal numbers.
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
        """Return, for each element, the sum of its changes that have the majority sign.

        Return also the sum of the weights of these changes, or 1 if this sum is 0. This function
        overwrites `changes`.
        """
        # If a value has the majority sign, the product of value and sign is positive. In numpy, xor
        # of sign bits is 20x as fast as np.where.
        total = _total(changes)
        total += 0  # replaces -0 by 0
        bits = total.view(f"i{total.itemsize}")
        sign = bits & np.iinfo(bits.dtype).min
        flipped = changes.view(bits.dtype)
        flipped ^= sign
        # np.maximum compares the bits of floats as integers, because the bits of a negative float
        # are a negative integer. If a total is NaN or infinite, np.maximum compares the floats
        # themselves, and NaN remains NaN. An array of zeros makes np.maximum twice as fast as the
        # number 0.
        zeros = np.zeros_like(total)
        positive = flipped if np.dot(total, zeros) == 0 else changes
        np.maximum(positive, zeros.view(positive.dtype), out=positive)
        agree = changes > 0
        total = _total(changes)
        self._round(total)
        bits = total.view(bits.dtype)
        bits ^= sign
        if set(weights) == {1} and len(weights) < 256:  # the sum of the weights fits in a byte
            counts = _total(agree.view("u1"))
            return total, np.maximum(counts, 1).astype(total.dtype)
        divisor = _total([each * weight for each, weight in zip(agree, weights, strict=True)])
        self._round(divisor)
        divisor += divisor == 0
        return total, divisor

    def _thin(self, change: Array, keep: _Kept, taken: int) -> int:
        """Replace small differences by 0 and scale the other differences, in place.

        A tie is a difference whose magnitude is exactly ``keep.least``. `taken` is the number of
        ties that earlier calls kept. Return the number of ties that this call keeps.
        """
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
        """Return the `_Kept` of each input, computed from all its differences.

        Return None for an input whose differences need neither a minimum magnitude nor a scale.
        """
        if self.method == TIES:
            return self._by_magnitude(extent)
        kept: list[_Kept | None] = [None] * len(self.weights)
        if not self.rescale:
            return kept
        all_, stay = [0.0] * len(kept), [0.0] * len(kept)
        chances = self._chances()
        # In a large tensor, the rounding of each difference hardly changes the sum of differences.
        is_small = extent.length < _UNROUNDED
        for _, changes in self._differences(extent, is_rounded=is_small):
            ones = np.ones(changes.shape[1], changes.dtype)
            for change, chance, number in zip(changes, chances, range(len(kept)), strict=True):
                if chance is not None:
                    sizes = np.abs(change, out=change)
                    all_[number] += float(np.dot(sizes, ones))
                    stay[number] += float(
                        np.dot(sizes, chance.kept(len(sizes)).astype(sizes.dtype))
                    )
        for number, chance in enumerate(chances):
            if chance is not None:
                kept[number] = _Kept(0.0, 0, self._ratio(all_[number], stay[number]))
        return kept

    def _ratio(self, before: float, after: float) -> float:
        ours, theirs = self._number(before), self._number(after)
        if ours < _SMALLEST or theirs < _SMALLEST:
            return 1.0
        return float(self._number(float(ours / theirs)))

    def _sample(self, extent: Derived, length: int, spots: int) -> Array:
        """Return rounded differences of each input, from `spots` equally spaced places."""
        pieces = []
        for each, name in zip(extent.inputs, self.dtypes, strict=True):
            unit = BY_NAME[name].itemsize
            piece = memoryview(bytearray(spots * _SPOT * unit))
            for spot in range(spots):
                at = spot * _SPOT * unit
                read_into(each, spot * (length // spots) * unit, piece[at : at + _SPOT * unit])
            pieces.append(piece)
        base, *others = self._values(pieces)
        changes = np.stack(others)
        changes -= base
        self._round(changes)
        return changes

    def _by_magnitude(self, extent: Derived) -> list[_Kept | None]:
        """For each input, find the lowest magnitude at which differences are kept."""
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
            sampled = self._sample(extent, length, spots)
            for number, search in searches.items():
                search.guess(sampled[number], length)
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
    """Random numbers that select the differences to keep."""

    def __init__(self, density: float, seed: Sequence[int]) -> None:
        self.limit = int(density * 2.0**16)
        self.generator = np.random.SFC64(seed)
        self.rest: Array = np.empty(0, "<u2")  # random numbers for the next elements

    def kept(self, count: int) -> Array:
        """Return a bool for each of the next `count` elements. True means "keep the element"."""
        if missing := max(count - len(self.rest), 0):
            drawn = self.generator.random_raw(-(-missing // 4)).view("<u2")
            self.rest = np.concatenate([self.rest, drawn]) if len(self.rest) else drawn
        codes, self.rest = self.rest[:count], self.rest[count:]
        found: Array = codes < self.limit
        return found


class _MagnitudeSearch:
    """Finds the largest magnitude that at least `goal` elements reach or exceed, without a sort.

    A code is the bits of a float without the sign bit, as an integer. Codes have the same order as
    magnitudes. Each pass over the elements counts the codes in an interval and narrows the
    interval. The search ends when the interval contains one code. An element is rounded only if its
    rounded value may be in the interval.
    """

    def __init__(self, goal: int, dtype: str, round_: Callable[[Array], None]) -> None:
        self.goal, self.round = goal, round_
        self.kind, bits = ("i8", 63) if dtype == "float64" else ("i4", 31)
        self.top = 1 << bits
        self.unused = {"bfloat16": 16, "float16": 13}.get(dtype, 0)  # number of low bits that are 0
        self.interval = 0, self.top  # [first, end)
        self.is_done = False
        self._begin()

    def _begin(self) -> None:
        low, high = self.interval
        self.above = 0  # number of codes above the interval
        self.shift = max(self.unused, (high - low - 1).bit_length() - 19)
        self.counts = np.zeros((high - low - 1 >> self.shift) + 1, "i8")
        self.waiting: list[Array] = []  # codes in the interval that are not counted yet
        # An unrounded element may round into `interval` only if its code is in `candidates`, a
        # wider interval. Adjacent 16-bit floats differ by at most 2**-7 of their magnitude, or by
        # 2**-24 for subnormal float16 numbers.
        self.candidates = self.interval
        if self.unused and high < self.top:
            step = max(self._magnitude(high) * 2.0**-7, 2.0**-24)
            ends = max(self._magnitude(low) - step, 0), self._magnitude(high) + step
            first, last = np.array(ends, "f4").view("i4").tolist()
            self.candidates = first, last

    def _magnitude(self, code: int) -> float:
        return float(np.array(code, self.kind).view(self.kind.replace("i", "f")))

    @property
    def least(self) -> float:
        """The smallest magnitude among the elements to keep. Valid after the search has ended."""
        return self._magnitude(self.interval[0])

    @property
    def ties(self) -> int:
        """The number of elements to keep whose magnitude is exactly `least`."""
        return self.goal - self.above

    def _codes(self, values: Array) -> Array:
        codes: Array = values.view(self.kind) & (self.top - 1)
        return codes

    def guess(self, sampled: Array, length: int) -> None:
        """Narrow the interval with a sample of rounded values.

        `length` is the number of all elements. If the narrowed interval does not contain the
        magnitude to find, the search needs another pass.
        """
        codes = self._codes(sampled)
        place = int(len(codes) * (1 - self.goal / length))
        # `place` estimates how many codes in the sample are below the code to find. The margin is
        # at least three standard deviations of this estimate.
        margin = max(len(codes) // 100, int(1.5 * len(codes) ** 0.5))
        ends = max(place - margin, 0), min(place + margin, len(codes) - 1)
        low, high = np.partition(codes, ends)[list(ends)].tolist()
        self.interval = low, high + (1 << self.unused)
        self._begin()

    def count(self, values: Array) -> None:
        """Count the elements whose rounded codes are above the interval or in the interval."""
        if self.is_done:
            return
        low, high = self.interval
        first, last = self.candidates
        codes = self._codes(values)
        self.above += int(np.count_nonzero(codes >= last))
        codes -= first
        # Codes that were below `first` are negative now. As unsigned integers, they are large.
        inside = values[np.flatnonzero(codes.view(self.kind.replace("i", "u")) < last - first)]
        self.round(inside)
        codes = self._codes(inside)
        self.above += int(np.count_nonzero(codes >= high)) if last != self.top else 0
        self.waiting.append(codes[(codes >= low) & (codes < high)] - low)
        if sum(map(len, self.waiting)) > _AT_ONCE << 3:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self.waiting:
            bins = np.concatenate(self.waiting) >> self.shift
            self.counts += np.bincount(bins, minlength=len(self.counts))
            self.waiting.clear()

    def narrow(self) -> None:
        """Narrow the interval to the bin that contains the code to find."""
        if self.is_done:
            return
        self._count_waiting()
        low, high = self.interval
        if self.above >= self.goal:  # the guessed interval was too low
            self.interval = high, self.top
        elif self.above + self.counts.sum() < self.goal:  # the guessed interval was too high
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
