"""Numbers that serve blocks of elements: read as they are needed, combined, applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.compute.blocks import Grid, Numbers, Zero
from ckptkit.compute.codes import INTERLEAVED, numbers, unpack, untiled
from ckptkit.compute.floats import decode, encode
from ckptkit.compute.gather import Reading
from ckptkit.compute.packed import Span
from ckptkit.core import dtypes

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EXPONENTS = ("exponent", "ldexp")


def is_byte(dtype: str) -> bool:
    """Return whether a scale of this dtype is a number of one byte."""
    return dtype in EXPONENTS or (dtype != "map" and dtypes.BY_NAME[dtype].bits == 8)


class Scale:
    """The numbers of one input; with `whole`, for all columns whatever columns a span has."""

    def __init__(
        self, numbers: Numbers, reads: Sequence[Reading], sizes: Sequence[int], whole: bool
    ) -> None:
        self.numbers, self.grid, self.whole = numbers, numbers.grid, whole
        self._read, self._size = reads[numbers.input], sizes[numbers.input]
        self._map = reads[numbers.map](0, sizes[numbers.map]) if numbers.dtype == "map" else b""
        is_byte = numbers.dtype in (*EXPONENTS, "map")
        self.itemsize = 1 if is_byte else dtypes.BY_NAME[numbers.dtype].itemsize
        self._key: tuple[int, ...] | None = None  # of what is held
        self._raw: Array
        self._made: Array | None = None
        self._batch: tuple[int, Array] | None = None
        self._decoded: tuple[int, Array] | None = None  # of a whole batch

    def part(self, span: Span) -> Array:
        """The numbers of the blocks that a span touches, as float32.

        They are [rows of blocks, columns of blocks].
        """
        if self.grid.order == "columns":
            batch, top, bottom, left, right = self._place(span)
            if self._decoded is None or self._decoded[0] != batch:
                self._decoded = batch, self.decoded(self._all(batch))
            return self._decoded[1][top:bottom, left:right]
        raw = self.raw(span)
        if self._made is None:
            self._made = self.decoded(raw)
        return self._made

    def decoded(self, raw: Array) -> Array:
        """Stored elements as float32."""
        import numpy as np

        data = np.ascontiguousarray(raw).reshape(-1).view("u1")
        if self.numbers.dtype == "map":
            made = np.take(np.frombuffer(self._map, "<f4"), data, mode="clip")
        elif self.numbers.dtype in EXPONENTS:
            made = numbers("exponent")[data]
        else:
            made = decode(data.data, dtypes.BY_NAME[self.numbers.dtype]).astype("<f4")
        wrong = np.isnan(made)
        if wrong.any():  # without the bits that rounding could carry upwards
            made = np.where(wrong, np.float32("nan"), made)
        found: Array = made.reshape(raw.shape)
        return found

    def _place(self, span: Span) -> tuple[int, int, int, int, int]:
        """Batch, rows and columns of the blocks that a span touches."""
        left, right = span.left // self.grid.width, -(-span.right // self.grid.width)
        if self.whole:
            left, right = 0, self.grid.columns
        batch = 0 if self.numbers.shared else span.batch
        height = self.grid.height
        return batch, span.top // height, -(-span.bottom // height), left, right

    def raw(self, span: Span) -> Array:
        """The same as they are stored."""
        key = self._place(span)
        if self._key != key:
            self._key, self._raw, self._made = key, self._fetch(*key), None
        return self._raw

    def _fetch(self, batch: int, top: int, bottom: int, left: int, right: int) -> Array:
        import numpy as np

        grid, size = self.grid, self.itemsize
        if grid.order != "rows":
            return self._all(batch)[top:bottom, left:right]
        first = batch * grid.rows + top
        if right - left == grid.columns or bottom - top == 1:
            start = first * grid.columns + left
            data = self._read(
                start * size, ((bottom - top - 1) * grid.columns + right - left) * size
            )
        else:
            starts = ((first + row) * grid.columns + left for row in range(bottom - top))
            data = b"".join([self._read(each * size, (right - left) * size) for each in starts])
        return np.frombuffer(data, f"<u{size}").reshape(bottom - top, right - left)

    def _all(self, batch: int) -> Array:
        """The numbers of a batch that do not lie row by row."""
        import numpy as np

        if self._batch is None or self._batch[0] != batch:
            grid = self.grid
            tiled = grid.order == "tiles"
            count = self._size // self.itemsize if tiled else grid.rows * grid.columns
            start = 0 if tiled else batch * count * self.itemsize
            found = np.frombuffer(self._read(start, count * self.itemsize), f"<u{self.itemsize}")
            made = (
                untiled(found, grid.rows, grid.columns)
                if tiled
                else found.reshape(grid.columns, grid.rows).T
            )
            self._batch = batch, made
        return self._batch[1]


class PackedZero:
    """Zero points of a few bits, all of which are held as bytes."""

    def __init__(self, zero: Zero, read: Reading, size: int, whole: bool) -> None:
        import numpy as np

        self.grid, self.whole = zero.grid, whole
        data = np.frombuffer(read(0, size), "u1")
        rows, columns = zero.grid.rows, zero.grid.columns
        if zero.kind == "down":
            turned = np.ascontiguousarray(data.view("<u4").reshape(-1, columns).T)
            codes = unpack(turned.view("u1"), zero.bits, rows).T
        else:
            codes = unpack(data.reshape(columns, -1), zero.bits, rows).T
        if zero.kind == "interleaved":
            codes = codes.reshape(-1, 8, columns)[:, np.argsort(INTERLEAVED)].reshape(-1, columns)
        shifted = (codes.astype("<i2") + zero.add) % (1 << zero.bits) - zero.offset
        self._numbers: Array = np.ascontiguousarray(shifted, "<f4")
        first = shifted.reshape(-1)[:1]
        self.same = int(first[0]) if (shifted == first).all() else None  # if all are the same

    def part(self, span: Span) -> Array:
        grid = self.grid
        top, bottom = span.top // grid.height, -(-span.bottom // grid.height)
        left, right = span.left // grid.width, -(-span.right // grid.width)
        if self.whole:
            left, right = 0, grid.columns
        return self._numbers[top:bottom, left:right]


def zero_points(
    zero: Zero | Numbers | None, reads: Sequence[Reading], sizes: Sequence[int], whole: bool
) -> Scale | PackedZero | None:
    """Return the source of the zero points of spans, None if there are none."""
    if isinstance(zero, Zero):
        return PackedZero(zero, reads[zero.input], sizes[zero.input], whole)
    return None if zero is None else Scale(zero, reads, sizes, whole)


def rounded(values: Array, dtype: str) -> Array:
    """float32 numbers rounded to a narrower type, still as float32."""
    if dtype == "float32":
        return values
    kind = dtypes.BY_NAME[dtype]
    made: Array = decode(encode(values.reshape(-1), kind), kind).reshape(values.shape)
    return made


def combined(scales: Sequence[Scale], span: Span, dtype: str) -> Array:
    """The scale of each block that a span touches, each step rounded to `dtype`."""

    first, *others = scales
    made = rounded(first.part(span), dtype)
    for each in others:
        made = joined(
            made,
            _finer(rounded(each.part(span), dtype), each.grid, first.grid, span),
            each.numbers,
            dtype,
        )
    return made


def joined(scale: Array, part: Array, how: Numbers, dtype: str) -> Array:
    """The product (or quotient) of scales of two levels."""
    import numpy as np

    made = scale / part if how.combine == "divide" else scale * part
    if how.add:
        made = made + np.float32(how.add)
    return rounded(made, dtype)


def _finer(part: Array, coarse: Grid, fine: Grid, span: Span) -> Array:
    """The numbers of the blocks of a coarse grid for each block of a finer one."""
    if part.size == 1:
        return part
    rows = places(span.top, span.bottom, fine.height, coarse.height)
    columns = places(span.left, span.right, fine.width, coarse.width)
    made: Array = part[rows[:, None], columns]
    return made


def places(start: int, stop: int, fine: int, coarse: int) -> Array:
    """The coarse block of each fine block of a range of elements, counted from the first."""
    import numpy as np

    first = np.arange(start // fine, -(-stop // fine)) * fine  # elements
    made: Array = first // coarse - start // coarse
    return made


class Spread:
    """Applies the numbers of blocks to the elements of spans.

    Neighboring spans mostly need the same row of numbers, so the last one is kept. An `index` has
    the block of each column, where they are not in order.
    """

    def __init__(self, grid: Grid, index: Array | None) -> None:
        self._grid, self._index = grid, index
        self._of: tuple[Array, int, int] | None = None  # numbers and columns that are kept
        self._kept: Array

    def apply(self, how: Any, values: Array, part: Array, span: Span) -> None:
        """Apply `how` in place to the elements of a span and the number of the block of each.

        `part` holds the numbers of the blocks that the span touches; with an index, those of all
        columns of blocks.
        """
        grid, (rows, columns) = self._grid, span.shape
        whole = not span.left % grid.width and not columns % grid.width
        if part.size == 1:
            how(values, part[0, 0], out=values)
        elif len(part) == rows and whole and self._index is None:
            cube = values.reshape(rows, -1, grid.width)
            how(cube, part[..., None], out=cube)
        else:
            self._apply_rows(how, values, self._rows(part, span), span)

    def _apply_rows(self, how: Any, values: Array, wide: Array, span: Span) -> None:
        """Apply `how` to the elements and one number for each column and row of blocks."""
        height = self._grid.height
        if len(wide) in (1, len(values)):
            how(values, wide, out=values)
        elif span.top % height or len(values) % height:
            how(values, wide[places(span.top, span.bottom, 1, height)], out=values)
        else:
            cube = values.reshape(len(wide), height, -1)
            how(cube, wide[:, None], out=cube)

    def _rows(self, part: Array, span: Span) -> Array:
        """Return the number of each column, for each row of blocks."""
        import numpy as np

        if self._index is not None:
            chosen: Array = part[:, self._index[span.left : span.right]]
            return chosen
        if part.shape[1] == 1 or self._grid.width == 1:
            return part
        left, right = span.left, span.right
        if self._of is None or self._of[0] is not part or self._of[1:] != (left, right):
            skip = left % self._grid.width
            wide = np.repeat(part, self._grid.width, axis=1)
            self._kept = wide[:, skip : skip + right - left]
            self._of = part, left, right
        return self._kept
