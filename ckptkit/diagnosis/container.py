"""Check the format of a file or folder, its suffix, and damage that stops readers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit import formats
from ckptkit.analysis import advice
from ckptkit.analysis.advice import packed
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
from ckptkit.formats.gguf import ORIGINAL_SHAPE
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
    """Return the cause for the file of a single rank. A model needs the files of all ranks."""
    why, command = f"Put {found.files} into one folder, and pass it to `convert`.", None
    if found.folder is not None:
        problem, why = _problem(found.folder), "`convert` merges the files in the folder."
        if problem is None:
            words = ("ckptkit", "convert", *argument(found.folder), "whole.safetensors")
            command = shell_command(words)
        else:
            why += f" But this {_sentence(problem)}"
    return Cause(
        "part",
        ERROR,
        f"It is {found}.",
        f"A model needs the tensors of {found.files.removeprefix('the files of ')}. {why}",
        command,
    )


def _problem(folder: str) -> CkptkitError | None:
    """Read a local folder and return the error. Return None if no error occurs, and for a URL."""
    if is_url(folder):
        return None
    try:
        formats.read(Folder(folder))
    except CkptkitError as error:
        return error
    return None


def _sentence(error: CkptkitError) -> str:
    """Return a sentence that starts with "folder" and contains an error's message and hint."""
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
            "torch.load reads single files, and a single-process model needs complete tensors. "
            "ckptkit can merge the ranks.",
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
    """Return a fix that extracts the weights from their entry.

    If the file contains only weights, return an empty fix.
    """
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
            f"Its suffix is that of a torch.save file, but its format is {format.name}.",
            'torch.load raises "invalid load key", "Invalid magic number" or "Weights only load '
            'failed".',
            *_as_torch(facts),
        )
    elif path.endswith(SAFETENSORS.suffixes) and format is not SAFETENSORS:
        yield Cause(
            "suffix",
            ERROR,
            f"Its suffix is .safetensors, but its format is {format.name}.",
            'safetensors raises "Error while deserializing header".',
            edit(facts, "convert", "safe"),
            {},
        )


def _elsewhere(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for formats that torch.load rejects, such as NumPy, pickles and folders.

    `_suffix` yields the cause for files with a suffix of torch.save.
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

    For NumPy arrays and GGUF files, the command writes a safetensors file. It converts the arrays
    to tensors, and drops the metadata of the GGUF file.
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
        title, text = f"Its {warning}.", "ckptkit and gguf-py can read it."
        if warning.facts.get("misread"):
            title, text = "llama.cpp and gguf-py read wrong values from it.", f"{warning}."
        yield Cause("llama-cpp", WARNING, title, text)
    if format_of(facts) is GGUF and (reasons := list(_rejected(facts))):
        title = f"llama.cpp refuses the file: {'; '.join(reasons)}."
        yield Cause("llama-cpp", WARNING, title, "ckptkit can read it.")


def _rejected(facts: Facts) -> Iterator[str]:
    """Yield the reasons why llama.cpp rejects a GGUF file that is valid in other programs."""
    source = facts.checkpoint.source if facts.checkpoint is not None else None
    if isinstance(source, ByteSource) and source.read(4, 4) == b"\1\0\0\0":
        yield "it has version 1"
    root = facts.root if isinstance(facts.root, dict) else {}
    tensors = [(str(row.path[-1]), row.tensor.shape) for row in facts.summary.rows]
    deep = [name for name, shape in tensors if len(shape) > 4 and ORIGINAL_SHAPE + name not in root]
    if deep:
        yield f"more than 4 dimensions ({some(deep)})"
    if long := [name for name, _ in tensors if len(name.encode()) > 63]:
        yield f"names of more than 63 bytes ({some(long)})"


def _program(facts: Facts) -> Iterator[Cause]:
    if is_script(facts):
        dequantize = packed(facts.summary) > 0
        options = ["--dequantize"] * dequantize
        yield Cause(
            "program",
            WARNING,
            "It is a TorchScript program, not a state_dict.",
            "torch.jit.load runs the program. torch.load(weights_only=True) rejects the file. Your "
            "own model class needs only the weights." + _PACKED * dequantize,
            convert(facts, "weights", *options),
            {**_bare(facts), **({"dequantize": {}} if dequantize else {})},
        )


def _version(facts: Facts) -> Iterator[Cause]:
    if facts.no_version:
        yield Cause(
            "no-version",
            ERROR,
            "It has no version record.",
            'torch.load raises "Expected hasRecord("version") to be true".',
            convert(facts, "whole"),
            {},
        )


def _lacking(facts: Facts) -> Iterator[Cause]:
    if facts.lacking:
        yield Cause(
            "newer",
            ERROR,
            f"It was saved by a newer torch. The installed torch has no {some(facts.lacking)}.",
            "The installed torch cannot load objects of these classes.",
            "pip install --upgrade torch",
        )


def _dtypes(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for dtypes that torch does not support.

    torch does not support F6 of safetensors, and F4 with an odd number of elements per row.
    """
    rows = [row for row in facts.summary.rows if row.tensor.dtype.name in NOT_IN_TORCH]
    names = [f"{row.label} ({row.dtype} {shape(row.tensor.shape)})" for row in rows]
    if names and format_of(facts) is SAFETENSORS:
        yield Cause(
            "no-dtype",
            ERROR,
            f"torch has no dtype for {plural(len(names), 'tensor')}: {some(names)}.",
            'For F6, safetensors.torch.load_file raises "Dtype not understood". For F4, load_file '
            'raises "f4_x2 dtype requires that the last dim be divisible by 2".',
        )


def _index(facts: Facts) -> Iterator[Cause]:
    if facts.no_index:
        yield Cause(
            "no-index",
            ERROR,
            "It is a folder of shards without an index file.",
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
            "The other tensors are in other files of this folder. To read all tensors, use the "
            "path of the folder." + (f" But this {_sentence(problem)}" if problem else ""),
            None if problem else command,
        )


def _ambiguous(facts: Facts) -> Iterator[Cause]:
    if facts.ambiguous:
        yield Cause(
            "ambiguous",
            WARNING,
            f"Several entries could be the weights: {some(facts.ambiguous)}.",
            "Choose the entry for your model with --key.",
            shell_command(
                ("ckptkit", "doctor", "--key", facts.ambiguous[0], *argument(facts.path))
            ),
        )


_SIZE = re.compile(rb"\nsize ([0-9]{1,18})\n?")


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
            "The download saved a web page, such as a login form, instead of the checkpoint. "
            "torch.load raises \"invalid load key, '<'\"." + hint,
        )
    if error.code == NEWER_TORCH:
        return Cause(
            "newer",
            ERROR,
            f"Its format is too new for the installed torch: {fault}.",
            'torch raises "Attempted to read a PyTorch file with version ...". A newer torch can '
            "read the file, and save it for older versions.",
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
        "foreign", ERROR, f"It {_verb(fault)}.", f"torch.load cannot read the file either.{hint}"
    )


_ID = {
    AmbiguousError: "ambiguous",
    UnsupportedError: "unsupported",
    LimitError: "limit",
}
_WHY = {
    AmbiguousError: "Two programs may read different values from such a file, so ckptkit reads "
    "none. torch.load may load the wrong ones. Download or save the file again.",
    LimitError: "ckptkit does not read files that exceed this limit.",
}


def _pointer(refusal: Refusal) -> Cause:
    size = _SIZE.search(refusal.head)
    of_size = f" of {int(size[1]):,} bytes" if size else ""
    return Cause(
        "lfs-pointer",
        ERROR,
        f"It is a Git LFS pointer to a file{of_size}, not the file itself.",
        "The repository was cloned without git-lfs. torch.load raises \"invalid load key, 'v'\". "
        "Run this command in the clone:",
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
    again = "Download or copy the file again."
    command: str | None = None
    fix: Fix | None = None
    if refusal.recoverable:
        again += " If there is no intact copy, save the intact tensors:"
        command, fix = advice.recover(refusal.path), {}
    elif refusal.unverified:
        again += " If there is no intact copy, save the readable tensors. Values may be wrong:"
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
    "Bytes changed after the save. torch.load does not verify checksums: torch.load fails, or "
    "loads wrong values without an error."
)
_OPENS = (
    "Bytes changed after the save. torch.load does not verify checksums: torch.load loads "
    "wrong values without an error."
)


def _verb(fault: str) -> str:
    """Convert an error message to the predicate of a sentence about the file.

    Most error messages are predicates already, such as ``is empty`` or ``has no metadata``.
    """
    return (
        fault
        if re.match(r"(is|has|holds|contains|begins|starts|names|puts|says|was) ", fault)
        else f"cannot be read: {fault}"
    )
