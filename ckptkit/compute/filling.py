"""New rows for a matrix: zeros, the mean of its rows, or random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, encode
from ckptkit.compute.operation import BUFFER, Pieces, aligned, stream_reusing_buffer, within
from ckptkit.core.bytesource import Derived, Operation
from ckptkit.core.dtypes import BY_NAME

FILLS = ("mean", "zeros", "normal")


@dataclass(frozen=True, slots=True)
class MoreRows(Operation):
    """Computes new rows for the input matrix. A row has `columns` elements of `dtype`.

    `fill` is one of `FILLS`. The random numbers of a column have the mean and the standard
    deviation of this column. A random number depends only on `seed` and its position.
    """

    dtype: str
    columns: int
    fill: str
    seed: int

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        dtype = BY_NAME[self.dtype]
        unit = self.columns * dtype.itemsize
        center = spread = np.zeros(self.columns)
        if self.fill != "zeros":
            center, spread = self._moments(extent)
        several = max(1, BUFFER // unit)
        for at in range(start // unit, ceil(stop / unit), several):
            rows = np.tile(center, (min(several, ceil(stop / unit) - at), 1))
            if self.fill == "normal":
                for place, row in enumerate(rows, at):
                    chances = np.random.Generator(
                        np.random.Philox(key=[self.seed % (1 << 64), place])
                    )
                    row += chances.standard_normal(self.columns) * spread
            yield from within((encode(rows.reshape(-1), dtype),), at * unit, start, stop)

    def _moments(self, extent: Derived) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each column, in float64."""
        dtype = BY_NAME[self.dtype]
        unit = self.columns * dtype.itemsize
        total, squares, count = np.zeros(self.columns), np.zeros(self.columns), 0
        (source,) = extent.inputs
        for piece in aligned(stream_reusing_buffer(source), unit, max(1, BUFFER // unit) * unit):
            rows = decode(piece, dtype).astype("f8").reshape(-1, self.columns)
            total += rows.sum(axis=0)
            squares += (rows**2).sum(axis=0)
            count += len(rows)
        center = total / max(count, 1)
        return center, np.sqrt(np.maximum(squares / max(count, 1) - center**2, 0))
