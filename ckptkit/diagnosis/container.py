"""Check the format of a file or folder, its suffix, and damage that stops readers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit import formats
from ckptkit.analysis import advice
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import PartOf
from ckptkit.core.dtypes import NOT_IN_TORCH
from ckptkit.core.errors import (
    LLAMA_CPP,
    NEWER_TORCH,
    AmbiguousError,
    CkptkitError,
    LimitError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
    coded,
)  # fmt: skip
from ckptkit.core.text import argument, is_url, plural, shape, shell_command
from ckptkit.diagnosis.cause import ERROR, WARNING, Cause, Facts, Fix, as_sentence, cause, some
from ckptkit.formats.gguf import ORIGINAL_SHAPE
from ckptkit.formats.table import GGUF, NONE, SAFETENSORS, TORCH_SUFFIXES

_SHARD = re.compile(r"-[0-9]{1,9}-of-([0-9]{1,9})\.")
UPGRADE = "pip install --upgrade torch"


def causes(facts: Facts) -> Iterator[Cause]:
    yield from _format(facts)
    yield from _llama_cpp(facts)
    if facts.is_script:
        options = ["--dequantize"] * (advice.packed(facts.summary) > 0)
        fix: Fix = {**_bare(facts), **{word.strip("-"): {} for word in options}}
        yield cause("program", facts.convert("weights", *options), fix, more=options)
    if facts.no_version:
        yield cause("no-version", facts.convert("whole"), {})
    if facts.lacking:
        yield cause("newer/names", UPGRADE, names=some(facts.lacking))
    # torch does not support F6 of safetensors, and F4 with an odd number of elements per row.
    rows = [row for row in facts.summary.rows if row.tensor.dtype.name in NOT_IN_TORCH]
    if rows and facts.format is SAFETENSORS:
        names = some(f"{row.label} ({row.dtype} {shape(row.tensor.shape)})" for row in rows)
        yield cause("no-dtype", tensors=plural(len(rows), "tensor"), names=names)
    if facts.no_index:
        command = facts.edit("convert", "indexed", "--format", facts.summary.format)
        yield cause("no-index", command, {})
    folder, name = os.path.split(facts.path)
    shard = _SHARD.search(name)
    if shard and int(shard[1]) > 1:
        problem = _problem(folder or ".")
        merged = shell_command(("ckptkit", "convert", ".", "whole.pth"))
        merged = advice.convert(folder, "whole") if folder else merged
        count = int(shard[1])
        yield cause("one-shard", None if problem else merged, count=count, problem=problem)
    if facts.ambiguous:
        words = ("doctor", "--key", facts.ambiguous[0], *argument(facts.path))
        yield cause("ambiguous", shell_command(("ckptkit", *words)), names=some(facts.ambiguous))


def part(found: PartOf) -> Cause:
    """Return the cause for the file of a single rank. A model needs the files of all ranks."""
    why, command = f"Put {found.files} into one folder, and pass it to `convert`.", None
    if found.folder is not None:
        problem = _problem(found.folder)
        why = f"`convert` merges the files in the folder.{problem}"
        if not problem:
            words = ("ckptkit", "convert", *argument(found.folder), "whole.safetensors")
            command = shell_command(words)
    files = found.files.removeprefix("the files of ")
    return cause("part", command, part=found, files=files, why=why)


def _problem(folder: str) -> str:
    """Read a local folder. Return a sentence with the error, or "" if no error occurs.

    Return "" for a URL.
    """
    if not is_url(folder):
        try:
            formats.read(Folder(folder))
        except CkptkitError as error:
            hint = as_sentence(error.hint)
            return f" But this folder cannot be read: {error.message}.{hint}"
    return ""


def _format(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for a format that torch.load rejects, and for a suffix that does not match
    the content."""
    format = facts.format
    if format.distributed:
        about = f" ({facts.summary.about})" if facts.summary.about else ""
        command = facts.extract_weights("whole")
        noun = format.noun
        yield cause("folder", command, _bare(facts), code=format.name, noun=noun, about=about)
    elif format.loaded_by_torch and format.torch_error:
        command = facts.convert("new")
        yield cause("old-format", command, {}, noun=format.noun, error=format.torch_error)
    format, path = facts.container or format, facts.path.lower()
    has_torch_suffix = path.endswith(TORCH_SUFFIXES) and not format.is_folder
    if has_torch_suffix and format is not NONE and not format.loaded_by_torch:
        yield cause("suffix/torch", *_as_torch(facts), format=format.name)
    has_suffix = path.endswith(SAFETENSORS.suffixes) and not format.is_folder
    if has_suffix and format not in (NONE, SAFETENSORS):
        command = facts.edit("convert", "safe")
        yield cause("suffix/safetensors", command, {}, format=format.name)
    if not format.loaded_by_torch and format.torch_error and not has_torch_suffix:
        has_none = facts.summary.weights is None
        yield cause(
            "not-torch",
            *((None, None) if has_none else _as_torch(facts)),
            level=WARNING if format.program else ERROR,
            more=has_none and not facts.summary.inner,
            noun=format.noun,
            error=format.torch_error,
        )


def _bare(facts: Facts) -> Fix:
    """Return a fix that extracts the weights from their entry.

    If the file contains only weights, return an empty fix.
    """
    return {"weights": {}} if facts.is_wrapped else {}


def _as_torch(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return the command and the fix that write a file for torch.load.

    For NumPy arrays and GGUF files, the command writes a safetensors file. It converts the arrays
    to tensors, and drops the metadata of the GGUF file.
    """
    if any(row.tensor.kind == "ndarray" for row in facts.summary.rows):
        return facts.edit("convert", "safe", suffix=".safetensors"), None
    if facts.format is not GGUF:
        return facts.convert("torch"), {}
    if facts.quantized is not None and facts.quantized.unread:
        return None, None
    words = ["--dequantize", "bfloat16"] if facts.quantized else []
    return facts.edit("convert", "safe", *words, suffix=".safetensors"), _bare(facts)


def _llama_cpp(facts: Facts) -> Iterator[Cause]:
    """Yield the reasons why llama.cpp rejects or misreads a file that other programs can read."""
    for warning in coded(facts.summary.warnings, LLAMA_CPP):
        title, text = f"Its {warning}.", "ckptkit and gguf-py can read it."
        if warning.facts.get("misread"):
            title, text = "llama.cpp and gguf-py read wrong values from it.", f"{warning}."
        yield cause("llama-cpp", title=title, text=text)
    if facts.format is not GGUF:
        return
    reasons = []
    source = facts.checkpoint.source if facts.checkpoint is not None else None
    if isinstance(source, ByteSource) and source.read(4, 4) == b"\1\0\0\0":
        reasons.append("it has version 1")
    root = facts.root if isinstance(facts.root, dict) else {}
    tensors = [(str(row.path[-1]), row.tensor.shape) for row in facts.summary.rows]
    deep = [name for name, shape in tensors if len(shape) > 4 and ORIGINAL_SHAPE + name not in root]
    if deep:
        reasons.append(f"more than 4 dimensions ({some(deep)})")
    if long := [name for name, _ in tensors if len(name.encode()) > 63]:
        reasons.append(f"names of more than 63 bytes ({some(long)})")
    if reasons:
        title = f"llama.cpp refuses the file: {'; '.join(reasons)}."
        yield cause("llama-cpp", title=title, text="ckptkit can read it.")


@dataclass(frozen=True)
class Refusal:
    """A file or folder that ckptkit cannot read, and the error."""

    path: str
    error: CkptkitError
    head: bytes = b""  # First bytes of the file. Empty for a folder.
    is_folder: bool = False
    known: bool = False  # True if ckptkit recognized the format.
    recoverable: bool = False  # True if some tensors are intact.
    unverified: bool = False  # True if ckptkit can read tensors but cannot verify their values.
    opens: bool = False  # True if torch.load reads the file without an error.
    whole: str | None = None  # Path of a complete checkpoint folder of the same training run.


# Maps errors about files of a known format to names in `causes.toml`.
_REFUSED: dict[type[CkptkitError], str] = {
    AmbiguousError: "ambiguous/file",
    UnsupportedError: "unsupported",
    LimitError: "limit",
}
_SIZE = re.compile(rb"\nsize ([0-9]{1,18})\n?")
# Error messages that are the predicate of a sentence about the file, as most messages are.
_PREDICATE = re.compile(r"(is|has|holds|contains|begins|starts|names|puts|says|was) ")


def refused(refusal: Refusal) -> Cause:
    """Return the cause for a file or folder that cannot be read."""
    error, head, hint = refusal.error, refusal.head, as_sentence(refusal.error.hint)
    fault = error.message + (f" ({error.where})" if error.where not in (None, refusal.path) else "")
    verb = fault if _PREDICATE.match(fault) else f"cannot be read: {fault}"
    if head.startswith(b"version https://git-lfs"):
        size = _SIZE.search(head)
        of_size = f" of {int(size[1]):,} bytes" if size else ""
        return cause("lfs-pointer", "git lfs pull", size=of_size)
    if re.match(rb"\s*<(!doctype html|html|head)", head, re.IGNORECASE):
        return cause("html", hint=hint)
    if error.code == NEWER_TORCH:
        return cause("newer", UPGRADE, fault=fault)
    if not refusal.known:
        return cause("foreign", verb=verb, hint=hint)
    if isinstance(error, (*_REFUSED, UnsafeGlobalError)):
        return cause(_REFUSED.get(type(error), "refused"), verb=verb, hint=hint)
    if refusal.is_folder:
        command = None if refusal.whole is None else advice.convert(refusal.whole, "whole")
        more = f" {refusal.whole} is complete." if refusal.whole else ""
        return cause("unfinished", command, fault=fault, hint=hint, whole=more)
    saves, command, fix = "", None, None
    if refusal.recoverable:
        saves = " If there is no intact copy, save the intact tensors:"
        command, fix = advice.recover(refusal.path), dict[str, dict[str, object]]()
    elif refusal.unverified:
        saves = " If there is no intact copy, save the readable tensors. Values may be wrong:"
        command = advice.recover(refusal.path, unverified=True)
    name = "damaged/opens" if refusal.opens else "damaged"
    name = "damaged/truncated" if isinstance(error, TruncatedError) else name
    return cause(name, command, fix, fault=fault, saves=saves)
