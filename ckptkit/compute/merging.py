"""Elements of several models in step, merged as mergekit merges them.

Facts: mergekit 0.1.5, `merge_methods` and `sparsify`. Means and slerp are computed in float32 and
rounded once. Methods that add differences to a base round each step to the dtype of the tensors, as
torch does: differences of bfloat16 are those of bfloat16.

A method that needs a fact about whole tensors (the angle between two, the magnitude below which
differences are left out) reads them once before, or twice where magnitudes have more than 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import acos, inf, sin
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import Pieces, flow, in_step
from ckptkit.core.bytesource import Derived, Operation
from ckptkit.core.dtypes import BY_NAME

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# The methods of mergekit, by our name; those that change a base come with it as the first input.
LINEAR, SLERP, PASSTHROUGH = "linear", "slerp", "passthrough"
TASK, TIES, DARE_TIES, DARE_LINEAR = "task", "ties", "dare-ties", "dare-linear"
METHODS = (LINEAR, SLERP, TASK, TIES, DARE_TIES, DARE_LINEAR, PASSTHROUGH)
OF_DIFFERENCES = (TASK, TIES, DARE_TIES, DARE_LINEAR)
SPARSE = (TIES, DARE_TIES, DARE_LINEAR)  # leave out differences, to a density
_CONSENSUS = (TIES, DARE_TIES)  # leave out differences of the sign of the minority
_COLLINEAR = 0.9995  # the cosine from which slerp is linear
_SMALLEST = 1e-7  # sums of magnitudes below it are not scaled
_AT_ONCE = 1 << 17  # elements: so many stay in the caches, and calls of numpy are long enough
_BINS = 1 << 16


class _Kept(NamedTuple):
    """The differences of one input that stay: above `least`, and the first `ties` equal to it.

    They are multiplied by `scale`.
    """

    least: float
    ties: int
    scale: float


@dataclass(frozen=True, slots=True)
class Merge(Operation):
    """The elements of all inputs, merged by `method` and rounded to `dtype` at each step.

    ``weights`` and ``densities`` are those of the inputs, without the base. ``scale`` multiplies
    the sum of the differences, and is the share of the second input in slerp. With dare-ties and
    dare-linear `seed` chooses the differences that stay.
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
    seekable: ClassVar[bool] = False  # ties of magnitude stay in order, until there are enough

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

    def _inputs(self, extent: Derived) -> Iterator[list[Array]]:
        """Yield elements of all inputs, rounded to `dtype`, as float32 or float64."""
        wide = "f8" if self.dtype == "float64" else "f4"
        units = [BY_NAME[name].itemsize for name in self.dtypes]
        for pieces in in_step(map(flow, extent.inputs), units, _AT_ONCE):
            values = []
            for piece, name in zip(pieces, self.dtypes, strict=True):
                each = decode(piece, BY_NAME[name]).astype(wide, copy=False)
                values.append(each if name == self.dtype else self._rounded(each))
            yield values

    def _rounded(self, values: Array) -> Array:
        """Return numbers rounded to `dtype`, in the type that they have."""
        if self.dtype in ("float32", "float64"):
            return values
        return decode(encode(values, BY_NAME[self.dtype]), BY_NAME[self.dtype])

    def _number(self, value: float) -> Any:
        """Return a number rounded to `dtype`, of the type that its elements are computed in."""
        import numpy as np

        return self._rounded(np.array([value], "f8" if self.dtype == "float64" else "f4"))[0]

    def _merged(self, extent: Derived) -> Iterator[Array]:
        import numpy as np

        if self.method == SLERP:
            shares = self._shares(extent)
            for base, other in self._inputs(extent):
                yield shares[0] * base + shares[1] * other
        elif self.method == LINEAR:
            for values in self._inputs(extent):
                # As torch's addcmul: fused, so the products are not rounded by themselves.
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

    # Changes of a base

    def _differences(self, extent: Derived) -> Iterator[tuple[Array, list[Array]]]:
        """Yield a piece of the base, and what each other input changes in it."""
        for base, *others in self._inputs(extent):
            yield base, [self._rounded(each - base) for each in others]

    def _by_chance(self, at: int, change: Array, number: int) -> Array:
        """Return differences from element `at` on, with those set to zero that dare leaves out."""
        import numpy as np

        if self.method not in (DARE_TIES, DARE_LINEAR) or self.densities[number] >= 1:
            return change
        chances = np.random.Philox(key=[self.seed % (1 << 64), number], counter=[at, 0, 0, 0])
        codes = chances.random_raw(-(-len(change) // 4)).view("<u2")[: len(change)]
        return change * (codes < int(self.densities[number] * 2.0**16))

    def _changed(self, extent: Derived) -> Iterator[Array]:
        import numpy as np

        weights = list(map(self._number, self.weights))
        kept = self._kept(extent) if min(self.densities) < 1 and self.method in SPARSE else []
        taken = [0] * len(weights)  # ties so far
        at = 0
        for base, changes in self._differences(extent):
            for number, weight in enumerate(weights):
                change = self._by_chance(at, changes[number], number)
                if kept and (keep := kept[number]) is not None:
                    change = self._thinned(change, keep, taken, number)
                changes[number] = change if weight == 1 else self._rounded(change * weight)
            total = self._rounded(_total(changes))
            if self.method in _CONSENSUS:
                # Times the sign of the majority, what agrees with it is positive.
                sign = np.where(total >= 0, base.dtype.type(1), base.dtype.type(-1))
                agree = [np.maximum(each * sign, 0) for each in changes]
                total = self._rounded(_total(agree) * sign)
            if self.normalize and self.method in _CONSENSUS:
                divisor = _total(
                    (each > 0) * weight for each, weight in zip(agree, weights, strict=True)
                )
                divisor = self._rounded(divisor)
                divisor[divisor == 0] = 1
                total = self._rounded(total / divisor)
            elif self.normalize:
                whole = self._number(sum(weights))
                total = total if abs(whole) < 1e-8 else self._rounded(total / whole)
            if self.scale != 1:
                total = self._rounded(total * base.dtype.type(self.scale))
            yield base + total
            at += len(base)

    def _thinned(self, change: Array, keep: _Kept, taken: list[int], number: int) -> Array:
        """Return a difference without what is left out, scaled; count the ties that stay."""
        import numpy as np

        if keep.least > 0:
            sizes = np.abs(change)
            stays = sizes > keep.least
            ties = np.flatnonzero(sizes == keep.least)[: keep.ties - taken[number]]
            stays[ties] = True
            taken[number] += len(ties)
            change = change * stays
        return change if keep.scale == 1 else self._rounded(change * self._number(keep.scale))

    def _kept(self, extent: Derived) -> list[_Kept | None]:
        """Return for each input which differences stay, from a pass over all of them."""
        import numpy as np

        if self.method == TIES:
            return self._by_magnitude(extent)
        kept: list[_Kept | None] = [None] * len(self.weights)
        if not self.rescale:
            return kept
        all_, stay = np.zeros(len(kept)), np.zeros(len(kept))
        at = 0
        for base, changes in self._differences(extent):
            for number, each in enumerate(changes):
                all_[number] += np.abs(each).sum(dtype="f8")
                stay[number] += np.abs(self._by_chance(at, each, number)).sum(dtype="f8")
            at += len(base)
        for number, density in enumerate(self.densities):
            if density < 1:
                kept[number] = _Kept(0.0, 0, self._ratio(all_[number], stay[number]))
        return kept

    def _ratio(self, before: float, after: float) -> float:
        ours, theirs = self._number(before), self._number(after)
        if ours < _SMALLEST or theirs < _SMALLEST:
            return 1.0
        return float(self._number(float(ours / theirs)))

    def _by_magnitude(self, extent: Derived) -> list[_Kept | None]:
        """Return the magnitude from which differences stay, exactly, by histograms of their bits.

        The upper bits are counted first, 16 of them; then, if there are more, those below them of
        what has the same upper bits as the magnitude that is looked for.
        """
        import numpy as np

        length = extent.length // BY_NAME[self.dtype].itemsize
        if not length:
            return [None] * len(self.densities)
        goals = [max(int(density > 0), int(density * length)) for density in self.densities]
        code, bits = ("<u8", 63) if self.dtype == "float64" else ("<u4", 31)
        unused = {"bfloat16": 16, "float16": 13}.get(self.dtype, 0)  # bits that are zero
        found = [0] * len(goals)  # upper bits that are known
        above = [0] * len(goals)
        sums, larger = [0.0] * len(goals), [0.0] * len(goals)
        low = bits
        while low > unused:
            high, low = low, max(low - 16, unused)
            counts = [np.zeros(1 << (high - low), "i8") for _ in goals]
            for _, changes in self._differences(extent):
                for number, each in enumerate(changes):
                    codes = each.view(code) & np.array((1 << bits) - 1, code)
                    if high < bits:
                        codes = codes[codes >> high == found[number]]
                    elif self.rescale:
                        sums[number] += float(np.abs(each).sum(dtype="f8"))
                    places = (codes >> low) & ((1 << (high - low)) - 1)
                    counts[number] += np.bincount(places, minlength=len(counts[number]))
            for number, each in enumerate(counts):
                from_above = np.cumsum(each[::-1])
                place = int(np.searchsorted(from_above, goals[number] - above[number]))
                above[number] += int(from_above[place] - each[::-1][place])
                found[number] = found[number] << (high - low) | (len(each) - 1 - place)
        least = [
            float(np.array(each << unused, code).view(code.replace("u", "f"))) for each in found
        ]
        if self.rescale:
            for _, changes in self._differences(extent):
                for number, each in enumerate(changes):
                    sizes = np.abs(each)
                    larger[number] += float(sizes[sizes > least[number]].sum(dtype="f8"))
        kept: list[_Kept | None] = []
        for number, density in enumerate(self.densities):
            ties = goals[number] - above[number]
            after = larger[number] + ties * least[number]
            scale = self._ratio(sums[number], after) if self.rescale else 1.0
            keep = _Kept(least[number], ties, scale) if density > 0 else _Kept(inf, 0, 1.0)
            kept.append(None if density >= 1 else keep)
        return kept


def _total(values: Iterable[Array]) -> Array:
    """Return the sum of arrays, in order."""
    total, *others = values
    for each in others:
        total = total + each
    return total
