"""Everything that ckptkit can do with a file or folder, and what must be true of any."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import numpy as np

from ckptkit import formats
from ckptkit.analysis import json_facts
from ckptkit.analysis.digests import summed
from ckptkit.analysis.summary import summarize
from ckptkit.cli import inspect, render, scan_text
from ckptkit.core.bytesource import ByteSource, Folder, Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.options import Options
from ckptkit.core.plan import Plan
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Path, join, walk
from ckptkit.formats.format import CheckedPart, Probe
from ckptkit.publish.copying import checksums, in_order
from ckptkit.scanning import find as hidden
from ckptkit.scanning.verdict import Trusted, judge_file
from tests.formats.conformance import storage_bytes

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 1 << 20  # bytes of outputs and tensors that are not looked at any more
# Formats, and whether everything is kept.
WRITERS = (("torch-zip", False), ("safetensors", False), ("safetensors", True))
LINES = 250_000  # that may be shown of one file


def quietly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return the result; None if it refuses, as it may."""
    try:
        return function(*args, **kwargs)
    except CkptkitError as error:
        check_refusal(error)
        return None


def check_refusal(error: CkptkitError) -> None:
    """It says something, in text that can be encoded and shown, and the code is one of bad
    input."""
    assert error.message and error.exit_code in (2, 3, 4), error
    check_lines([render.escape(str(error)), render.escape(error.hint or "")])


def check_lines(lines: Iterable[str]) -> None:
    count = 0
    for count, line in enumerate(islice(lines, LINES + 1)):  # noqa: B007
        assert line.isprintable(), repr(line)
        line.encode()
    assert count < LINES


def look(place: ByteSource | Folder) -> Checkpoint | None:
    """Everything that can be done with a place; the checkpoint in it, if there is one."""
    if isinstance(place, ByteSource):
        scan(place)
        quietly(recover, place)
    quietly(check, place)
    checkpoint = quietly(formats.read, place)
    if checkpoint is not None:
        quietly(show, checkpoint)
        for name, everything in WRITERS:
            rewrite(checkpoint, name, everything)
    return checkpoint


def scan(source: ByteSource) -> None:
    """Never raises, whatever the bytes are."""
    verdict = judge_file(source.name, source.size, hidden.pickles(source), Trusted())
    check_lines(map(render.escape, scan_text.lines(verdict)))
    json.loads("".join(render.json_pieces(json_facts.scanned(verdict))))


def check(place: ByteSource | Folder) -> None:
    found = list(formats.check(Probe(place)))
    list(summed([each for each in found if isinstance(each, CheckedPart)], lambda count: None))


def recover(source: ByteSource) -> None:
    """Check that what is recovered can be shown and written as well."""
    saved = formats.recover(source)
    quietly(show, saved.checkpoint)
    rewrite(saved.checkpoint, "torch-zip", False)


def show(checkpoint: Checkpoint) -> None:
    """As the command line does: as tables, as a tree, as JSON."""
    for tree in (False, True):
        want = SimpleNamespace(
            globs=(), sort="file", fold=None, tree=tree, names=False, digest=False, stored=False
        )
        check_lines(
            line.strip("\n") for line in inspect._lines(checkpoint, summarize(checkpoint), want)
        )
        json.loads("".join(render.json_pieces(inspect._facts(checkpoint, want))))


def rewrite(checkpoint: Checkpoint, name: str, everything: bool) -> None:
    """Check that what is written reads back: the same tensors, and the same bytes once more."""
    data = quietly(written, checkpoint, name, everything)
    if data is None:
        return
    again, plain = read_own(data), named(checkpoint)
    twice = written(again, name, everything)
    # Of a program, and in safetensors, the weights alone.
    if formats.holds_program(checkpoint) or not (name == "torch-zip" or everything):
        assert {key: each for key, each in named(again).items() if key in plain} == plain
    else:
        assert tensors(again) == tensors(checkpoint)
    assert twice == data or (
        name == "safetensors" and twice and read_own(twice).extras == again.extras
    )


def written(checkpoint: Checkpoint, name: str, everything: bool) -> bytes | None:
    """The bytes of the file, None if it is large."""
    format = formats.by_name(name)
    assert format is not None
    plan = formats.layout(checkpoint, format, Options(all=everything))
    return output(plan) if plan.size < LARGE else None


def output(plan: Plan) -> bytes:
    (file,) = plan.files
    return b"".join(map(bytes, in_order(file.segments, checksums(file.segments))))


def read_own(data: bytes) -> Checkpoint:
    """Read what ckptkit wrote, which it must accept."""
    try:
        return formats.read(Memory(data, "own"))
    except CkptkitError as error:
        raise AssertionError(f"refused what was written: {error}") from error


Facts = tuple[object, ...]


def tensors(checkpoint: Checkpoint) -> list[tuple[str, Facts]]:
    """All tensors with their places, geometry and bytes."""
    return [(join(path), facts(node)) for path, node in _leaves(checkpoint)]


def _leaves(checkpoint: Checkpoint) -> Iterable[tuple[Path, Tensor]]:
    return ((path, node) for path, node in walk(checkpoint.root) if isinstance(node, Tensor))


def named(checkpoint: Checkpoint) -> dict[str, Facts]:
    """The weights without strides, of which safetensors has none, nor of what is negated on the
    way; none if there are no weights, or several that could be."""
    weights = quietly(lambda: checkpoint.weights) or {}
    return {
        name: (tensor.dtype.name, tensor.shape, content(tensor))
        for name, tensor in weights.items()
        if not (tensor.conj or tensor.neg)
    }


def facts(tensor: Tensor) -> Facts:
    geometry = (
        tensor.dtype.name, tensor.shape, tensor.stride, tensor.kind, tensor.layout, tensor.conj,
        tensor.neg,
    )  # fmt: skip
    return (*geometry, tensor.requires_grad, tensor.device, content(tensor))


def content(tensor: Tensor) -> bytes | None:
    """The bytes of the elements, little-endian; None of what is not made of elements in a row, or
    is large."""
    storage = tensor.storage
    if storage is None or tensor.layout != "strided" or tensor.dtype.bits < 8:
        return None
    if max(storage.nbytes, tensor.nbytes) > LARGE or len(tensor.shape) > 32:
        return None
    data, unit = elements(storage_bytes(tensor), tensor), tensor.dtype.component
    if storage.big_endian and unit > 1:
        return b"".join(data[at : at + unit][::-1] for at in range(0, len(data), unit))
    return data


def elements(data: bytes, tensor: Tensor) -> bytes:
    """Of a storage of these bytes, as numpy finds them."""
    if not tensor.numel:
        return b""
    size = tensor.dtype.itemsize
    whole = np.frombuffer(data, f"V{size}", len(data) // size)[tensor.offset :]
    strides = [
        size * step if n > 1 else 0 for n, step in zip(tensor.shape, tensor.stride, strict=True)
    ]
    return np.lib.stride_tricks.as_strided(whole, tensor.shape, strides).tobytes()
