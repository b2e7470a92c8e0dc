"""A checkpoint as text for `git diff`: one line per tensor, value and object.

Without path and totals, so that one change in the file is one line in the diff. git passes a
temporary file and stops at a failure: a file that cannot be read becomes text too, with its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ckptkit.cli.render import escape, shape
from ckptkit.core.errors import CkptkitError, InputChangedError
from ckptkit.core.text import flatten
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.analysis.summary import Plain, TensorRow
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options
    from ckptkit.core.tensor import Tensor

HEX = 16  # characters of a digest: enough to see that it is another
LONG = 200  # characters of a value
SMALL = 1_024  # bytes of a text file that is shown as it is: a Git LFS pointer


def lines(path: str, read: Options) -> Iterator[str]:
    """Yield the lines for the file at `path`, escaped. Reads every tensor."""
    from ckptkit.api import reading

    try:
        with reading(path, read) as checkpoint:
            shown = list(map(escape, _facts(checkpoint)))
    except CkptkitError as error:
        if error.code == InputChangedError.code:
            raise
        shown = list(map(escape, _unreadable(path, error)))
    yield from shown


def _facts(checkpoint: Checkpoint) -> Iterator[str]:
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import look_through

    summary = summarize(look_through(checkpoint))
    yield f"format: {summary.format}"
    if summary.weights is not None:
        yield f"weights: {join(summary.weights) or 'the whole file'}"
    stored = {} if summary.weights is None else checkpoint.weights
    for row, digest in zip(summary.rows, _digests(summary.rows, stored), strict=True):
        content = "no bytes" if digest is None else f"sha256 {digest[:HEX]}"
        yield f"{row.place}: {row.dtype} {shape(row.tensor.shape)} {row.tensor.device} {content}"
    yield from (f"{join(value.path)}: {_value(value.value)}" for value in summary.values)
    yield from (f"{join(each.path)}: an object of {each.global_}" for each in summary.objects)
    yield from (f"metadata {name}: {_value(value)}" for name, value in summary.extras.items())


def _digests(rows: Sequence[TensorRow], stored: Mapping[str, Tensor]) -> Iterator[str | None]:
    """Yield the digest of each row: of a quantized weight, over all tensors that it is made of."""
    from ckptkit.analysis.digests import sha256_each

    made_of = [_made_of(row, stored) for row in rows]
    found = sha256_each(flatten(made_of))
    for row, tensors in zip(rows, made_of, strict=True):
        digests = list(islice(found, len(tensors)))
        if row.is_logical:
            yield hashlib.sha256(repr(digests).encode()).hexdigest()
        else:
            yield digests[0]


def _made_of(row: TensorRow, stored: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    if row.group is None or not row.is_logical:
        return [(row.place, row.tensor)]
    if len(row.group.parts) == 1:  # a pickled subclass: what it holds has no name
        return [(row.place, tensor) for tensor in row.group.inputs]
    return [(name, stored[name]) for name in row.group.members]


def _value(value: Plain) -> str:
    """Return a value, or the beginning and digest of a long one."""
    text = repr(value)
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONG]}... ({len(text):,} characters, sha256 {digest[:HEX]})"


def _unreadable(path: str, error: CkptkitError) -> Iterator[str]:
    yield f"unreadable: {error.message}"
    digest, start = hashlib.sha256(), b""
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                start = start or piece
    except OSError:
        return
    if len(start) <= SMALL and b"\0" not in start:
        yield from start.decode(errors="replace").splitlines()
    else:
        yield f"sha256 {digest.hexdigest()[:HEX]}"
