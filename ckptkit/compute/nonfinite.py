"""Counts of elements that are not finite."""

from __future__ import annotations

from ckptkit.compute.expanded import once, refusal, repeated, times
from ckptkit.compute.floats import decode, is_decoded
from ckptkit.compute.operations import BUFFER, aligned, flow
from ckptkit.compute.tensors import contiguous
from ckptkit.core.tensor import Tensor


def nonfinite(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are NaN and infinite; of complex ones, in one part at least.

    None where the type has neither, or its elements are no numbers by themselves. Raises
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
    for piece in aligned(flow(contiguous(each).locate()), dtype.itemsize, BUFFER):
        values = decode(piece, dtype)
        odd = values[~np.isfinite(values)]
        if len(odd):
            numbers = int(np.count_nonzero(np.isnan(odd)))
            nan, infinite = nan + numbers, infinite + len(odd) - numbers
    return nan * count, infinite * count
