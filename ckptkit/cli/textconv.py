"""Format a checkpoint for `git diff`: one line for each tensor, value and object.

The lines contain no path and no totals. So one change in the file changes one line of the diff. git
passes a temporary file, and stops if the command fails. Therefore, the lines of an unreadable file
contain its error and its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from ckptkit.cli.render import escape, shape
from ckptkit.core.errors import CkptkitError, InputChangedError
from ckptkit.core.text import flatten
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

HEX = 16  # number of printed characters of a digest, enough to show a difference
LONG = 200  # maximum number of printed characters of a value
# If an unreadable file, such as a Git LFS pointer, has at most this many bytes, print its text.
SMALL = 1_024


def lines(path: str, read: Options) -> list[str]:
    """Return the lines for the file at `path`, escaped. Reads every tensor."""
    from ckptkit.api import reading

    try:
        with reading(path, read) as checkpoint:
            return list(map(escape, _facts(checkpoint)))
    except CkptkitError as error:
        if error.code == InputChangedError.code:
            raise
        return list(map(escape, _unreadable(path, error)))


def _facts(checkpoint: Checkpoint) -> Iterator[str]:
    from ckptkit.analysis.digests import sha256_each
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import dequantized_view

    summary = summarize(dequantized_view(checkpoint))
    yield f"format: {summary.format}"
    if summary.weights is not None:
        yield f"weights: {join(summary.weights) or 'the whole file'}"
    stored = {} if summary.weights is None else checkpoint.weights
    made_of = []  # stored tensors of each row; a quantized weight has several
    for row in summary.rows:
        tensors = [(row.place, row.tensor)]
        if row.group is not None and row.is_logical:
            # a pickled tensor subclass: its inner tensors have no names
            if len(row.group.parts) == 1:
                tensors = [(row.place, tensor) for tensor in row.group.inputs]
            else:
                tensors = [(name, stored[name]) for name in row.group.members]
        made_of.append(tensors)
    found = sha256_each(flatten(made_of))
    for row, tensors in zip(summary.rows, made_of, strict=True):
        digests = list(islice(found, len(tensors)))
        digest = digests[0]
        if row.is_logical:
            digest = hashlib.sha256(repr(digests).encode()).hexdigest()
        content = "no bytes" if digest is None else f"sha256 {digest[:HEX]}"
        yield f"{row.place}: {row.dtype} {shape(row.tensor.shape)} {row.tensor.device} {content}"
    for value in summary.values:
        text = _value(value.value) if value.array is None else value.exact()
        yield f"{join(value.path)}: {text}"
    yield from (f"{join(each.path)}: an object of {each.global_}" for each in summary.objects)
    yield from (f"metadata {name}: {_value(value)}" for name, value in summary.extras.items())


def _value(value: object) -> str:
    """Format a value. If the result is too long, return its beginning and its digest."""
    text = repr(value)
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONG]}... ({len(text):,} characters, sha256 {digest[:HEX]})"


def _unreadable(path: str, error: CkptkitError) -> Iterator[str]:
    yield f"unreadable: {error.message}"
    try:
        with open(path, "rb") as file:
            start = file.read(SMALL + 1)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return
    if len(start) <= SMALL and b"\0" not in start:
        yield from start.decode(errors="replace").splitlines()
    else:
        yield f"sha256 {digest[:HEX]}"
