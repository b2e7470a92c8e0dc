"""Causes in the file or folder itself, whatever it contains."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckptkit.analysis.advice import convert, edit, packed
from ckptkit.core.parts import PartOf
from ckptkit.core.text import argument, shell_command
from ckptkit.diagnosis.cause import ERROR, WARNING, Cause, Fix
from ckptkit.diagnosis.facts import Facts, alone, format_of, is_script, is_wrapped, some
from ckptkit.formats.table import NONE, SAFETENSORS, TORCH_SUFFIXES

_PACKED = (
    " Its quantized layers keep theirs packed, outside of the state_dict: --dequantize makes "
    "float32 of them."
)
_SHARD = re.compile(r"-[0-9]{1,9}-of-([0-9]{1,9})\.")


def causes(facts: Facts) -> Iterator[Cause]:
    for look in (
        _container,
        _suffix,
        _elsewhere,
        _program,
        _version,
        _lacking,
        _index,
        _shard,
        _ambiguous,
    ):
        yield from look(facts)


def part(path: str, found: PartOf) -> Cause:
    """The cause of a file that is one part of a checkpoint: no command makes it whole alone."""
    command = None
    if found.folder is not None:
        command = shell_command(
            ("ckptkit", "convert", *argument(found.folder), "whole.safetensors")
        )
    return Cause(
        "part",
        ERROR,
        f"It is {found}.",
        "A model needs all parts: they are put together from the folder that holds them.",
        command,
    )


def _container(facts: Facts) -> Iterator[Cause]:
    format = format_of(facts)
    if format.distributed:
        what = f" ({facts.summary.about})" if facts.summary.about else ""
        yield Cause(
            format.name,
            WARNING,
            f"It is {format.noun}, not a file{what}.",
            "torch.load reads files, and a plain model has no use for the parts of several "
            "processes: they must be put together.",
            alone(facts, "whole"),
            Fix(bare=is_wrapped(facts)),
        )
    elif format.loaded_by_torch and format.torch_error:
        yield Cause(
            "old-format",
            ERROR,
            f"It is {format.noun}.",
            "torch.load(weights_only=True), the default since 2.6, refuses such: "
            f"{format.torch_error}.",
            convert(facts.path, "new"),
            Fix(),
        )


def _suffix(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for a name whose suffix is that of another format.

    Arrays of numpy in a pickle become tensors in a safetensors file alone.
    """
    format, path = format_of(facts), facts.path.lower()
    chosen = facts.summary.chosen
    if format.is_folder or format is NONE:
        return
    if path.endswith(TORCH_SUFFIXES) and not format.loaded_by_torch:
        arrays = any(row.tensor.kind == "ndarray" for row in facts.summary.rows)
        torch = convert(facts.path, "torch", *chosen)
        yield Cause(
            "suffix",
            ERROR,
            f"Its name says torch.save, its content is {format.name}.",
            'torch.load cannot read that: "invalid load key", "Invalid magic number" or '
            '"Weights only load failed".',
            edit("convert", facts.path, "safe", *chosen, suffix=".safetensors")
            if arrays
            else torch,
            Fix(),
        )
    elif path.endswith(SAFETENSORS.suffixes) and format is not SAFETENSORS:
        yield Cause(
            "suffix",
            ERROR,
            f"Its name says safetensors, its content is {format.name}.",
            'safetensors cannot read that: "Error while deserializing header".',
            edit("convert", facts.path, "safe", *chosen),
            Fix(),
        )


def _elsewhere(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for a file of numpy or pickle that is not named as one of torch.save."""
    format, path = format_of(facts), facts.path.lower()
    if format.loaded_by_torch or not format.torch_error or path.endswith(TORCH_SUFFIXES):
        return
    none = facts.summary.weights is None and not facts.summary.inner
    yield Cause(
        "not-torch",
        ERROR,
        f"It is {format.noun}, not a file of torch.save.",
        f"torch.load refuses it: {format.torch_error}." + " It holds no weights." * none,
        *_as_torch(facts),
    )


def _as_torch(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return command and fix that make a file for torch.load; safetensors for numpy's arrays."""
    if facts.summary.weights is None:
        return None, None
    arrays = any(row.tensor.kind == "ndarray" for row in facts.summary.rows)
    if arrays:
        words = ("convert", facts.path, "safe", *facts.summary.chosen)
        return edit(*words, suffix=".safetensors"), None
    return convert(facts.path, "torch", *facts.summary.chosen), Fix()


def _program(facts: Facts) -> Iterator[Cause]:
    if is_script(facts):
        dequantize = packed(facts.summary) > 0
        options = ["--dequantize"] * dequantize
        yield Cause(
            "program",
            WARNING,
            "It is a TorchScript program, not a state_dict.",
            "torch.jit.load runs it; torch.load(weights_only=True) refuses it, and a model of "
            "your own needs its weights." + _PACKED * dequantize,
            convert(facts.path, "weights", *facts.summary.chosen, *options),
            Fix(bare=is_wrapped(facts), dequantize=dequantize),
        )


def _version(facts: Facts) -> Iterator[Cause]:
    if facts.no_version:
        yield Cause(
            "no-version",
            ERROR,
            "It has no version record.",
            'torch refuses archives without one: "Expected hasRecord("version") to be true".',
            convert(facts.path, "whole"),
            Fix(),
        )


def _lacking(facts: Facts) -> Iterator[Cause]:
    if facts.lacking:
        yield Cause(
            "newer",
            ERROR,
            f"It was saved by a newer torch than the one here, which has no {some(facts.lacking)}.",
            "What it names is made by that torch alone.",
            "pip install --upgrade torch",
        )


def _index(facts: Facts) -> Iterator[Cause]:
    if facts.no_index:
        yield Cause(
            "no-index",
            ERROR,
            "It is a folder of shards without their index.",
            "transformers and others find the tensors of a sharded model through its .index.json "
            "alone.",
            edit("convert", facts.path, "indexed", "--format", facts.summary.format),
            Fix(),
        )


def _shard(facts: Facts) -> Iterator[Cause]:
    folder, name = os.path.split(facts.path)
    found = _SHARD.search(name)
    if found and int(found[1]) > 1:
        yield Cause(
            "one-shard",
            ERROR,
            f"It is one of {int(found[1]):,} shards of a checkpoint.",
            "The other tensors are in the files beside it; the folder stands for all of them.",
            convert(folder or ".", "whole")
            if folder
            else shell_command(("ckptkit", "convert", ".", "whole.pth")),
        )


def _ambiguous(facts: Facts) -> Iterator[Cause]:
    if facts.ambiguous:
        yield Cause(
            "ambiguous",
            WARNING,
            f"Several entries could be the weights: {some(facts.ambiguous)}.",
            "A model takes one of them; --key says which.",
            shell_command(
                ("ckptkit", "doctor", "--key", facts.ambiguous[0], *argument(facts.path))
            ),
        )
