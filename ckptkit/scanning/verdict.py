"""Determine verdicts: what would happen if a program loaded a file.

A verdict depends on the names and calls in the pickles of the file. The functions of this module
read no file and run no code.

A pickle gets one of these verdicts, from harmless to harmful:

* ``safe for weights_only``: `torch.load(weights_only=True)`, the default of torch, loads the file.
* ``harmless``: every call and name is allowlisted, but weights_only rejects the file.
* ``needs these classes``: the pickle contains objects of classes that are not allowlisted, because
  nobody has reviewed the code of these classes. Every other call and name is allowlisted.
* ``cannot tell``: ckptkit cannot determine what the pickle does. For example, the pickle is
  malformed, computes a name, or makes a call that ckptkit cannot verify. A pickle with a function
  of Python or torch that is not allowlisted also gets the verdict ``cannot tell``, even if no
  opcode calls the function.
* ``would run code``: a program that loads the pickle calls a function that is not allowlisted, with
  arguments from the file.

The verdict on a file is the worst verdict on its pickles, its programs and its unreadable parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import NamedTuple

from ckptkit.core.text import some
from ckptkit.core.tree import Global
from ckptkit.pickles import judge
from ckptkit.pickles.streams import TORCHSCRIPT, Call, Program, Remark, Traced

VERDICTS = ("none", "safe", "harmless", "classes", "unknown", "code")
NONE, SAFE, HARMLESS, CLASSES, UNKNOWN, CODE = VERDICTS
LABELS = {
    NONE: "no pickles", SAFE: "safe for weights_only", HARMLESS: "harmless",
    CLASSES: "needs these classes", UNKNOWN: "cannot tell", CODE: "would run code",
}  # fmt: skip
# `judge` contains the names that weights_only of torch 2.13 accepts. SINCE and UNTIL contain the
# names that other versions of torch treat differently. The source is
# torch/_weights_only_unpickler.py of torch 2.13, 2.14.1 and the development branch after 2.14.
# Torch 2.15 also requires a state (BUILD after NEWOBJ) for objects of pybind11 classes that the
# user added to the allowlist. The default allowlist of torch contains no pybind11 class.
SINCE = {("torch", "bcomplex32"): "2.15"}  # first version that accepts the name
UNTIL = {("torch._utils", "_rebuild_nested_tensor"): "2.15"}  # first version that rejects the name
SHOWN = 8  # maximum number of names in a reason
FINDINGS = (CLASSES, UNKNOWN, CODE)


@dataclass(frozen=True, slots=True)
class PickleVerdict:
    """The verdict on one pickle.

    * ``needs`` are classes of objects in the pickle. These classes are not allowlisted.
    * ``held`` are classes and functions that the pickle stores as values. ``held`` does not contain
      names of Python or torch, or allowlisted names.
    * ``runs`` are calls of functions that are not allowlisted.
    * ``reasons`` explain why the verdict is uncertain.
    * ``refused`` is the reason why weights_only rejects the pickle, or None if weights_only accepts
      the pickle.
    * ``versions`` describe how other versions of torch treat the pickle.
    """

    found: Traced
    verdict: str
    needs: tuple[Global, ...]
    held: tuple[Global, ...]
    runs: tuple[Call, ...]
    reasons: tuple[str, ...]
    refused: str | None
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """The verdict on one file.

    ``path`` is the path that the caller passed. If the caller passed a folder, ``path`` is the path
    of one file inside this folder.
    """

    path: str
    size: int
    verdict: str
    pickles: tuple[PickleVerdict, ...]
    remarks: tuple[Remark, ...]
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class Trusted:
    """Globs of class and function names that the caller trusts, such as ``transformers.*``.

    A glob that matches a package or module also matches all names in this package or module.
    """

    globs: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        globs = [*self.globs, *(f"{each}.*" for each in self.globs)]
        return bool(globs) and re.match("|".join(map(translate, globs)), str(name)) is not None


def judge_file(
    path: str, size: int, seen: Iterable[Traced | Remark | Program], trusted: Trusted
) -> FileVerdict:
    """Return the verdict on a file.

    `seen` contains the file's pickles, programs and unreadable parts.
    """
    pickles: list[PickleVerdict] = []
    remarks: list[Remark] = []
    programs: list[Program] = []
    verdicts = [NONE]
    for each in seen:
        if isinstance(each, Traced):
            pickles.append(judge_pickle(each, trusted))
            verdicts.append(pickles[-1].verdict)
        elif isinstance(each, Remark):
            remarks.append(each)
            verdicts.append(NONE if each.harmless else UNKNOWN)
        else:
            programs.append(each)
            verdicts.append(CODE if each.files else HARMLESS)
    worst = max(verdicts, key=VERDICTS.index)
    return FileVerdict(path, size, worst, tuple(pickles), tuple(remarks), tuple(programs))


def judge_pickle(found: Traced, trusted: Trusted) -> PickleVerdict:
    """Return the verdict on one pickle."""
    trace = found.trace
    runs = tuple(
        each
        for each in trace.calls
        if each.kind == judge.HARMFUL or (each.kind == judge.CALLED and each.name not in trusted)
    )
    unknown = [
        name
        for name in trace.globals
        if not judge.is_known(name) and not _is_trusted(str(name), trusted)
    ]
    if found.loader == TORCHSCRIPT:  # the archive contains the code of the classes in __torch__
        unknown = [name for name in unknown if judge.top_of(name) != "__torch__"]
    held = tuple(name for name in unknown if name in trace.values and judge.is_own(name))
    needs = tuple(name for name in unknown if name not in held and judge.is_own(name))
    rejected = [str(name) for name in trace.globals if judge.refused_by_weights_only(name)]
    refused = found.no_weights_only or trace.refused
    if refused is None and rejected:
        refused = f"torch.load(weights_only=True) rejects {some(rejected, SHOWN)}"
    reasons = tuple(_reasons(found, trusted))
    if runs:
        verdict = CODE
    elif reasons:
        verdict = UNKNOWN
    elif held or needs:
        verdict = CLASSES
    else:
        verdict = HARMLESS if refused is not None else SAFE
    disagree = () if refused is not None else tuple(differences(trace.globals))
    return PickleVerdict(found, verdict, needs, held, runs, reasons, refused, disagree)


def _reasons(found: Traced, trusted: Trusted) -> Iterator[str]:
    trace = found.trace
    if trace.error is not None:
        yield f"unpickling fails: {trace.error}"
    yield from trace.doubts
    for name in trace.values:
        reason = judge.out_of_place(name)
        if reason is not None and not judge.is_own(name):
            yield f"contains {name}, which {reason}; code that receives this value may call it"
    for call in trace.calls:
        if call.kind == judge.UNSURE and not _is_trusted(call.name, trusted):
            yield (
                f"cannot verify {call.opcode} of {call.name} with {call.args} (byte "
                f"{call.offset:,})"
            )


def _is_trusted(name: str, trusted: Trusted) -> bool:
    return name in trusted and not judge.is_guarded(name)


class Finding(NamedTuple):
    """One reason for a verdict, with its place and its offset in the file, if known."""

    verdict: str
    where: str
    text: str
    offset: int | None = None


def counts(result: object, strict: bool) -> bool:
    """Return True if the verdict of `result` is a finding.

    If `strict` is True, every file that weights_only rejects is a finding.
    """
    return isinstance(result, FileVerdict) and result.verdict in (
        (HARMLESS, *FINDINGS) if strict else FINDINGS
    )


def findings(file: FileVerdict, strict: bool) -> Iterator[Finding]:
    """Yield the reasons for a verdict. For a pickle that would run code, yield its calls."""
    for pickle in file.pickles:
        where, base = pickle.found.where, pickle.found.base
        offset = None if base is None else base + pickle.found.offset
        for call in pickle.runs:
            yield Finding(
                CODE,
                where,
                f"calls {call.name}{call.args} ({call.opcode})",
                None if base is None else base + call.offset,
            )
        if pickle.verdict == UNKNOWN:
            yield from (Finding(UNKNOWN, where, reason, offset) for reason in pickle.reasons)
        elif pickle.verdict == CLASSES:
            yield from (Finding(CLASSES, where, text, offset) for text in needed(pickle))
        elif strict and pickle.verdict == HARMLESS:
            yield Finding(HARMLESS, where, f"weights_only rejects it: {pickle.refused}", offset)
    doubts = (each for each in file.remarks if not each.harmless)
    yield from (Finding(UNKNOWN, each.where, each.reason) for each in doubts)
    for program in file.programs:
        if program.files:
            yield Finding(
                CODE,
                program.where,
                f"its TorchScript code uses file operators: {', '.join(program.files)}",
            )


def needed(pickle: PickleVerdict) -> Iterator[str]:
    """Yield messages that name the pickle's classes and functions that are not allowlisted."""
    names = some(list(map(str, pickle.needs)), SHOWN)
    if names:
        only = "" if pickle.held else "; review the code of these classes"
        yield f"needs {names}{only}"
    if pickle.held:
        held = some(list(map(str, pickle.held)), SHOWN)
        yield f"contains {held}; code that receives these values may call them"


def differences(names: Iterable[Global]) -> Iterator[str]:
    """Yield a sentence for each name that some versions of torch reject."""
    for name in names:
        key = name.module, name.name
        if key in SINCE:
            yield f"weights_only of torch before {SINCE[key]} rejects {name}"
        if key in UNTIL:
            yield f"weights_only of torch {UNTIL[key]} and later rejects {name}"
