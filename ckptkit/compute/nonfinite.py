"""Counts of elements that are not finite, or zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptkit.compute.byte_pieces import aligned
from ckptkit.compute.expanded import once, refusal, repeated, times
from ckptkit.compute.floats import decode, is_decoded
from ckptkit.compute.operations import BUFFER, flow
from ckptkit.compute.tensors import contiguous
from ckptkit.core.tensor import Tensor


def nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are NaN and infinite; of complex ones, in one part at least.

    None where the type has neither, or its elements are not numbers by themselves. Raises
    TensorError for a tensor without elements to read.
    """
    import numpy as np

    dtype = tensor.dtype
    if dtype.kind not in ("float", "complex") or not is_decoded(dtype):
        return 0, 0
    axes = repeated(tensor)
    each, count = once(tensor, axes), times(tensor, axes)
    if (error := refusal(each)) is not None:
        raise error
    nan = infinite = 0
    for values in _values(each):
        odd = values[~np.isfinite(values)]
        if len(odd):
            numbers = int(np.count_nonzero(np.isnan(odd)))
            nan, infinite = nan + numbers, infinite + len(odd) - numbers
    return nan * count, infinite * count


def zeros(tensor: Tensor) -> int:
    """Return how many elements are zero, of either sign."""
    import numpy as np

    return sum(values.size - int(np.count_nonzero(values)) for values in _values(tensor))


def first_nonfinite(tensor: Tensor, most: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the index and kind (nan, inf, -inf) of the first elements that are not finite.

    Of complex ones the parts are looked at as one. Raises TensorError like `nonfinite`.
    """
    import numpy as np

    if tensor.dtype.kind not in ("float", "complex") or not is_decoded(tensor.dtype):
        return []
    if (error := refusal(tensor)) is not None:
        raise error
    found: list[tuple[tuple[int, ...], str]] = []
    start = 0
    for values in _values(tensor):
        for place in np.flatnonzero(~np.isfinite(values))[: most - len(found)]:
            index = np.unravel_index(start + int(place), tensor.shape)
            kind = "nan" if np.isnan(values[place]) else str(values[place])
            found.append((tuple(map(int, index)), kind))
        if len(found) == most:
            break
        start += len(values)
    return found


def _values(tensor: Tensor) -> Iterator[Any]:
    """Yield the elements in row-major order, in pieces."""
    for piece in aligned(flow(contiguous(tensor).locate()), tensor.dtype.itemsize, BUFFER):
        yield decode(piece, tensor.dtype)
