"""Copy a strided view in row-major order, through strips that stay in a core's cache.

Element by element, a transpose touches a new cache line for each element that it reads. A strip of
rows is copied first, in its own order, into rows that are a little longer: rows whose distance is a
power of two would share the same few lines of the cache. It is transposed from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ROWS = 256  # of a strip
WIDTH = 1024  # bytes of a strip's rows
_PADDING = 64  # bytes after each row: a cache line
_SMALL = 32  # elements of an axis, up to which strips cost more than they save


def copy(target: Array, view: Array) -> None:
    """Copy `view` into `target`, a row-major array of the same shape and dtype."""
    import numpy as np

    last = view.ndim - 1
    near = min(range(view.ndim), key=lambda axis: (view.shape[axis] == 1, view.strides[axis]))
    if near == last or min(view.shape[near], view.shape[last]) <= _SMALL:
        target[...] = view
        return
    order = [axis for axis in range(view.ndim) if axis not in (near, last)] + [last, near]
    target, view = target.transpose(order), view.transpose(order)
    size = view.itemsize
    columns = WIDTH // size
    strip = np.empty((ROWS, columns + _PADDING // size), view.dtype)
    for index in np.ndindex(view.shape[:-2]):
        _transpose(target[index], view[index], strip[:, :columns])


def _transpose(target: Array, rows: Array, strip: Array) -> None:
    """Copy a matrix whose rows are contiguous into one whose columns are."""
    height, width = strip.shape
    for column in range(0, rows.shape[1], width):
        for row in range(0, rows.shape[0], height):
            part = rows[row : row + height, column : column + width]
            held = strip[: part.shape[0], : part.shape[1]]
            held[...] = part
            target[row : row + height, column : column + width] = held
