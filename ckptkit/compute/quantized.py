"""Quantized elements as float32, exactly as torch's ``dequantize`` computes them on a CPU.

Per tensor, the difference to the zero point is an integer of 32 bits, with its overflow, and the
scale is rounded to float32 first. Per channel, the difference is a float32, and its product with
the scale is as wide as the scale before it is rounded. (ATen/native/quantized:
AffineQuantizerBase.cpp, cpu/kernels/QuantizedOpKernels.cpp.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.core import dtypes

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_STORED = {"qint8": "i1", "quint8": "u1", "qint32": "<i4", "quint4x2": "u1", "quint2x4": "u1"}
_BLOCK = 1 << 16  # bytes worked on at once: what is in between is many times as large


class Dequantizer:
    """Makes float32 of the stored bytes of a tensor, in successive pieces from element `at` on.

    `parameters` are those of the operation ``dequant``, `tables` the bytes of the scales and the
    zero points of the channels, if it is done per channel.
    """

    def __init__(self, parameters: Sequence[Any], tables: Sequence[bytes], at: int) -> None:
        self.dtype = dtypes.BY_NAME[parameters[0]]
        self.at = at
        self._compute: Callable[[Array, int], Array]
        if tables:
            scales, zero_points = map(_table, tables, parameters[1:3])
            self._compute = _per_channel(scales, zero_points, parameters[3])
        else:
            self._compute = _per_tensor(*parameters[1:])

    def __call__(self, data: bytes | memoryview) -> Array:
        import numpy as np

        made = np.empty(len(data) * 8 // self.dtype.bits, "<f4")
        done = 0
        with np.errstate(all="ignore"):  # infinities and what comes of them are torch's too
            for start in range(0, len(data), _BLOCK):
                values = self._integers(data[start : start + _BLOCK])
                made[done : done + len(values)] = self._compute(values, self.at + done)
                done += len(values)
        self.at += done
        return made

    def _integers(self, data: bytes | memoryview) -> Array:
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


def _table(data: bytes, dtype: str) -> Array:
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
