"""Causes for which a file or folder cannot be read at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptkit.analysis.advice import convert, recover
from ckptkit.core.errors import (
    NEWER_TORCH,
    AmbiguousError,
    CkptkitError,
    LimitError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.diagnosis.cause import ERROR, Cause, Fix

_SIZE = re.compile(rb"\nsize ([0-9]{1,18})\n?")


@dataclass(frozen=True)
class Refusal:
    """The reason why reading failed, and what there is.

    ``known``: a format claims it; ``recoverable``: tensors of it are whole; ``unverified``: what is
    left of it can be read, unverified. ``opens``: torch.load reads it without an error. ``head``
    are its first bytes, none of a folder; ``whole`` is another folder, which is complete.
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


def cause(refusal: Refusal) -> Cause:
    """Return the one cause of a refusal."""
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
            "The download got a page about the file, or one that asks to log in: torch.load says "
            "\"invalid load key, '<'\"." + hint,
        )
    if error.code == NEWER_TORCH:
        return Cause(
            "newer",
            ERROR,
            f"It is of a newer format than this torch can read: {fault}.",
            '"Attempted to read a PyTorch file with version ...": a newer torch reads it, and '
            "can save it for older ones.",
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
            f"{_WHY.get(type(error), 'ckptkit does not read such files.')}{hint}",
        )
    if refusal.is_folder and refusal.known:
        return _unfinished(refusal, fault, hint)
    if refusal.known:
        return _damaged(refusal, fault)
    return Cause(
        "foreign", ERROR, f"It {_verb(fault)}.", f"torch.load cannot read it either.{hint}"
    )


_ID = {AmbiguousError: "ambiguous", UnsupportedError: "unsupported", LimitError: "limit"}
_WHY = {
    AmbiguousError: "ckptkit does not guess what is meant.",
    LimitError: "ckptkit stops at this limit.",
}


def _pointer(refusal: Refusal) -> Cause:
    size = _SIZE.search(refusal.head)
    stands = f" of {int(size[1]):,} bytes" if size else ""
    return Cause(
        "lfs-pointer",
        ERROR,
        f"It is a Git LFS pointer, not the file{stands} that it stands for.",
        "The repository was cloned without git-lfs: torch.load says \"invalid load key, 'v'\". In "
        "the clone:",
        "git lfs pull",
    )


def _unfinished(refusal: Refusal, fault: str, hint: str) -> Cause:
    command = None if refusal.whole is None else convert(refusal.whole, "whole")
    more = f" {refusal.whole} is complete." if refusal.whole else ""
    return Cause(
        "unfinished",
        ERROR,
        f"Its files do not go together: {fault}.",
        "A save that was interrupted, a copy that left files out, or files of two saves cannot be "
        f"put together.{hint}{more}",
        command,
    )


def _damaged(refusal: Refusal, fault: str) -> Cause:
    again = "Download or copy it again."
    command: str | None = None
    fix: Fix | None = None
    if refusal.recoverable:
        again += " If you cannot, save its intact tensors:"
        command, fix = recover(refusal.path), {}
    elif refusal.unverified:
        again += " If you cannot, save what is left, which may have wrong values:"
        command = recover(refusal.path, unverified=True)
    truncated = isinstance(refusal.error, TruncatedError)
    title = f"It is {'truncated' if truncated else 'damaged'}: {fault}."
    why = _TRUNCATED if truncated else _OPENS if refusal.opens else _CHANGED
    return Cause("damaged", ERROR, title, f"{why} {again}", command, fix)


_TRUNCATED = (
    'The download or the save did not finish. torch.load raises "failed finding central '
    'directory" or "unexpected EOF", safetensors "incomplete metadata".'
)
_CHANGED = (
    "Bytes were changed after the save. torch.load compares no checksums: it fails, or loads wrong "
    "values without an error."
)
_OPENS = (
    "Bytes were changed after the save. torch.load compares no checksums: it loads the wrong "
    "values without an error."
)


def _verb(fault: str) -> str:
    """Return a message as the predicate of a sentence.

    Most are written to follow the name of the file: ``is empty``, ``holds 2 checkpoints``.
    """
    return (
        fault
        if re.match(r"(is|has|holds|begins|names|puts|says) ", fault)
        else f"cannot be read: {fault}"
    )
