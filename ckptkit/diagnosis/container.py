"""Check the file or folder itself: wrong format or suffix, damage, reasons why reading fails."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit import formats
from ckptkit.analysis import advice
from ckptkit.analysis.advice import packed
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import PartOf
from ckptkit.core.dtypes import NOT_IN_TORCH
from ckptkit.core.errors import (
    LLAMA_CPP,
    NEWER_TORCH,
    AmbiguousError,
    CkptkitError,
    LimitError,
    SeveralError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
    coded,
)  # fmt: skip
from ckptkit.core.text import argument, is_url, plural, shape, shell_command
from ckptkit.diagnosis.cause import (
    ERROR,
    WARNING,
    Cause,
    Facts,
    Fix,
    convert,
    edit,
    extract_weights,
    format_of,
    is_script,
    is_wrapped,
    some,
)  # fmt: skip
from ckptkit.formats.table import GGUF, NONE, SAFETENSORS, TORCH_SUFFIXES

_PACKED = (
    " Quantized layers keep their weights packed, outside of the state_dict: --dequantize converts "
    "them to float32."
)
_SHARD = re.compile(r"-[0-9]{1,9}-of-([0-9]{1,9})\.")


def causes(facts: Facts) -> Iterator[Cause]:
    looks = (
        _container, _suffix, _elsewhere, _llama_cpp, _program, _version, _lacking, _dtypes, _index,
        _shard, _ambiguous,
    )  # fmt: skip
    for look in looks:
        yield from look(facts)


def part(found: PartOf) -> Cause:
    """Return the cause for a single rank's file: the model needs the whole folder."""
    folder, problem = found.folder, None
    if folder is not None:
        problem = _problem(folder)
    why = "" if problem is None else f" But this {_sentence(problem)}"
    words = ("ckptkit", "convert", *argument(folder or ""), "whole.safetensors")
    return Cause(
        "part",
        ERROR,
        f"It is {found}.",
        f"A model needs all ranks: `convert` merges them from their folder.{why}",
        None if folder is None or problem is not None else shell_command(words),
    )


def _problem(folder: str) -> CkptkitError | None:
    """Return the error of reading a local folder; None for a readable folder or a URL."""
    if is_url(folder):
        return None
    try:
        formats.read(Folder(folder))
    except CkptkitError as error:
        return error
    return None


def _sentence(error: CkptkitError) -> str:
    """Return a sentence, without its first word, with the message and hint of an error."""
    hint = f" {error.hint[:1].upper()}{error.hint[1:]}." if error.hint else ""
    return f"folder cannot be read: {error.message}.{hint}"


def _container(facts: Facts) -> Iterator[Cause]:
    format = format_of(facts)
    if format.distributed:
        what = f" ({facts.summary.about})" if facts.summary.about else ""
        yield Cause(
            format.name,
            WARNING,
            f"It is {format.noun}, not a file{what}.",
            "torch.load reads single files, and a single-process model needs complete tensors: the "
            "ranks must be merged.",
            extract_weights(facts, "whole"),
            _bare(facts),
        )
    elif format.loaded_by_torch and format.torch_error:
        yield Cause(
            "old-format",
            ERROR,
            f"It is {format.noun}.",
            "torch.load(weights_only=True), the default since 2.6, refuses this format: "
            f"{format.torch_error}.",
            convert(facts, "new"),
            {},
        )


def _bare(facts: Facts) -> Fix:
    """Return a fix that extracts the weights, if they are in an entry; an empty fix otherwise."""
    return {"weights": {}} if is_wrapped(facts) else {}


def _suffix(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for a suffix that does not match the content."""
    format, path = facts.container or format_of(facts), facts.path.lower()
    if format.is_folder or format is NONE:
        return
    if path.endswith(TORCH_SUFFIXES) and not format.loaded_by_torch:
        yield Cause(
            "suffix",
            ERROR,
            f"Its suffix is one of torch.save, but its content is {format.name}.",
            'torch.load raises "invalid load key", "Invalid magic number" or "Weights only load '
            'failed".',
            *_as_torch(facts),
        )
    elif path.endswith(SAFETENSORS.suffixes) and format is not SAFETENSORS:
        yield Cause(
            "suffix",
            ERROR,
            f"Its suffix is .safetensors, but its content is {format.name}.",
            'safetensors raises "Error while deserializing header".',
            edit(facts, "convert", "safe"),
            {},
        )


def _elsewhere(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for formats that torch.load refuses: NumPy, pickle, archives, folders.

    `_suffix` reports files with a suffix of torch.save.
    """
    format, path = facts.container or format_of(facts), facts.path.lower()
    is_named = path.endswith(TORCH_SUFFIXES) and not format.is_folder
    if format.loaded_by_torch or not format.torch_error or is_named:
        return
    none = facts.summary.weights is None
    yield Cause(
        "not-torch",
        WARNING if format.program else ERROR,
        f"It is {format.noun}, not a file of torch.save.",
        f"torch.load refuses it: {format.torch_error}."
        + " It contains no weights." * (none and not facts.summary.inner),
        *((None, None) if none else _as_torch(facts)),
    )


def _as_torch(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return the command and the fix that write a file for torch.load.

    Only a safetensors output converts NumPy arrays to tensors, and GGUF tensors without their
    metadata.
    """
    if any(row.tensor.kind == "ndarray" for row in facts.summary.rows):
        return edit(facts, "convert", "safe", suffix=".safetensors"), None
    if format_of(facts) is GGUF:
        found = facts.quantized
        if found is not None and found.unread:
            return None, None
        words = ["--dequantize", "bfloat16"] if found else []
        command = edit(facts, "convert", "safe", *words, suffix=".safetensors")
        return command, _bare(facts)
    return convert(facts, "torch"), {}


def _llama_cpp(facts: Facts) -> Iterator[Cause]:
    for warning in coded(facts.summary.warnings, LLAMA_CPP):
        yield Cause(
            "llama-cpp",
            WARNING,
            f"Its {warning}.",
            "ckptkit and gguf-py can read it.",
        )


def _program(facts: Facts) -> Iterator[Cause]:
    if is_script(facts):
        dequantize = packed(facts.summary) > 0
        options = ["--dequantize"] * dequantize
        yield Cause(
            "program",
            WARNING,
            "It is a TorchScript program, not a state_dict.",
            "torch.jit.load runs it; torch.load(weights_only=True) refuses it. A model class of "
            "your own needs only its weights." + _PACKED * dequantize,
            convert(facts, "weights", *options),
            {**_bare(facts), **({"dequantize": {}} if dequantize else {})},
        )


def _version(facts: Facts) -> Iterator[Cause]:
    if facts.no_version:
        yield Cause(
            "no-version",
            ERROR,
            "It has no version record.",
            'torch refuses archives without one: "Expected hasRecord("version") to be true".',
            convert(facts, "whole"),
            {},
        )


def _lacking(facts: Facts) -> Iterator[Cause]:
    if facts.lacking:
        yield Cause(
            "newer",
            ERROR,
            f"It was saved by a newer torch: the installed one has no {some(facts.lacking)}.",
            "torch cannot rebuild these objects.",
            "pip install --upgrade torch",
        )


def _dtypes(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for dtypes that torch does not have: F6, and F4 with rows of odd length."""
    rows = [row for row in facts.summary.rows if row.tensor.dtype.name in NOT_IN_TORCH]
    names = [f"{row.label} ({row.dtype} {shape(row.tensor.shape)})" for row in rows]
    if names and format_of(facts) is SAFETENSORS:
        yield Cause(
            "no-dtype",
            ERROR,
            f"torch has no dtype for {plural(len(names), 'tensor')}: {some(names)}.",
            'safetensors.torch.load_file refuses the file: "Dtype not understood" for F6, "f4_x2 '
            'dtype requires that the last dim be divisible by 2" for F4.',
        )


def _index(facts: Facts) -> Iterator[Cause]:
    if facts.no_index:
        yield Cause(
            "no-index",
            ERROR,
            "It is a folder of shards without their index.",
            "transformers and other libraries need the .index.json to find the tensors of a "
            "sharded model.",
            edit(facts, "convert", "indexed", "--format", facts.summary.format),
            {},
        )


def _shard(facts: Facts) -> Iterator[Cause]:
    folder, name = os.path.split(facts.path)
    found = _SHARD.search(name)
    if found and int(found[1]) > 1:
        problem = _problem(folder or ".")
        whole = shell_command(("ckptkit", "convert", ".", "whole.pth"))
        command = advice.convert(folder, "whole") if folder else whole
        yield Cause(
            "one-shard",
            ERROR,
            f"It is one of {int(found[1]):,} shards of a checkpoint.",
            "The other tensors are in the files next to it; use the path of the folder to read all."
            + (f" But this {_sentence(problem)}" if problem else ""),
            None if problem else command,
        )


def _ambiguous(facts: Facts) -> Iterator[Cause]:
    if facts.ambiguous:
        yield Cause(
            "ambiguous",
            WARNING,
            f"Several entries could be the weights: {some(facts.ambiguous)}.",
            "A model needs one of them; choose it with --key.",
            shell_command(
                ("ckptkit", "doctor", "--key", facts.ambiguous[0], *argument(facts.path))
            ),
        )


_SIZE = re.compile(rb"\nsize ([0-9]{1,18})\n?")


@dataclass(frozen=True)
class Refusal:
    """A file or folder that cannot be read, with the error.

    - ``known``: its format was recognized. ``head``: its first bytes; empty for a folder.
    - ``recoverable``: some tensors are intact. ``unverified``: tensors can be read, but not
      verified. ``opens``: torch.load reads the file without an error.
    - ``whole``: a complete folder of the same run.
    """

    path: str
    error: CkptkitError
    head: bytes = b""
    is_folder: bool = False
    known: bool = False
    recoverable: bool = False
    unverified: bool = False
    opens: bool = False
    whole: str | None = None


def refused(refusal: Refusal) -> Cause:
    """Return the cause for a file or folder that cannot be read."""
    error, head = refusal.error, refusal.head
    fault = error.message + (f" ({error.where})" if error.where not in (None, refusal.path) else "")
    hint = f" {error.hint[:1].upper()}{error.hint[1:]}." if error.hint else ""
    if head.startswith(b"version https://git-lfs"):
        return _pointer(refusal)
    if re.match(rb"\s*<(!doctype html|html|head)", head, re.IGNORECASE):
        return Cause(
            "html",
            ERROR,
            "It is an HTML page, not a checkpoint.",
            "The download saved a web page, such as a login form, instead of the file. torch.load "
            "raises \"invalid load key, '<'\"." + hint,
        )
    if error.code == NEWER_TORCH:
        return Cause(
            "newer",
            ERROR,
            f"Its format is too new for the installed torch: {fault}.",
            'torch raises "Attempted to read a PyTorch file with version ...". A newer torch reads '
            "it, and can save it for older versions.",
            "pip install --upgrade torch",
        )
    if (
        isinstance(error, (AmbiguousError, UnsupportedError, UnsafeGlobalError, LimitError))
        and refusal.known
    ):
        return Cause(
            _ID.get(type(error), "refused"),
            ERROR,
            f"It {_verb(fault)}.",
            f"{_WHY.get(type(error), 'ckptkit cannot read such files.')}{hint}",
        )
    if refusal.is_folder and refusal.known:
        return _unfinished(refusal, fault, hint)
    if refusal.known:
        return _damaged(refusal, fault)
    return Cause(
        "foreign", ERROR, f"It {_verb(fault)}.", f"torch.load cannot read it either.{hint}"
    )


_ID = {
    AmbiguousError: "ambiguous",
    SeveralError: "ambiguous",
    UnsupportedError: "unsupported",
    LimitError: "limit",
}
_WHY = {
    AmbiguousError: "ckptkit does not guess which one you need.",
    LimitError: "ckptkit does not read files above this limit.",
}


def _pointer(refusal: Refusal) -> Cause:
    size = _SIZE.search(refusal.head)
    of_size = f" of {int(size[1]):,} bytes" if size else ""
    return Cause(
        "lfs-pointer",
        ERROR,
        f"It is a Git LFS pointer to a file{of_size}, not the file itself.",
        "The repository was cloned without git-lfs: torch.load raises \"invalid load key, 'v'\". "
        "Run this in the clone:",
        "git lfs pull",
    )


def _unfinished(refusal: Refusal, fault: str, hint: str) -> Cause:
    command = None if refusal.whole is None else advice.convert(refusal.whole, "whole")
    more = f" {refusal.whole} is complete." if refusal.whole else ""
    return Cause(
        "unfinished",
        ERROR,
        f"Its files do not belong to one complete checkpoint: {fault}.",
        "The save was interrupted, the copy is incomplete, or the files come from two saves."
        f"{hint}{more}",
        command,
    )


def _damaged(refusal: Refusal, fault: str) -> Cause:
    again = "Download or copy it again."
    command: str | None = None
    fix: Fix | None = None
    if refusal.recoverable:
        again += " If you cannot, save its intact tensors:"
        command, fix = advice.recover(refusal.path), {}
    elif refusal.unverified:
        again += " If you cannot, save the tensors that can be read; their values may be wrong:"
        command = advice.recover(refusal.path, unverified=True)
    truncated = isinstance(refusal.error, TruncatedError)
    title = f"It is {'truncated' if truncated else 'damaged'}: {fault}."
    why = _OPENS if refusal.opens else _CHANGED
    why = _TRUNCATED if truncated else why
    return Cause("damaged", ERROR, title, f"{why} {again}", command, fix)


_TRUNCATED = (
    'The download or the save did not finish. torch.load raises "failed finding central '
    'directory" or "unexpected EOF"; safetensors raises "incomplete metadata".'
)
_CHANGED = (
    "Bytes changed after the save. torch.load checks no checksums: it fails, or loads wrong values "
    "without an error."
)
_OPENS = (
    "Bytes changed after the save. torch.load checks no checksums: it loads wrong values without "
    "an error."
)


def _verb(fault: str) -> str:
    """Turn a message into the predicate of a sentence about the file.

    Most messages are already predicates, because they follow the file name: ``is empty``, ``has no
    ...``.
    """
    return (
        fault
        if re.match(r"(is|has|holds|contains|begins|starts|names|puts|says|was) ", fault)
        else f"cannot be read: {fault}"
    )
