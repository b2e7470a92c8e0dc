"""A cause, the command that helps, what a plan can do about it; and the facts that checks need."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from ckptkit import edits, formats
from ckptkit.analysis import advice
from ckptkit.analysis.summary import Summary
from ckptkit.core import text
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import NOT_IN_TORCH
from ckptkit.core.errors import CkptkitError
from ckptkit.core.options import Options
from ckptkit.core.tree import Node, join
from ckptkit.edits import OPTIONS
from ckptkit.edits import Fix as Fix
from ckptkit.edits.structure import bare
from ckptkit.formats.format import Format
from ckptkit.formats.table import BY_NAME, NONE, SAFETENSORS, TORCH_ZIP
from ckptkit.quantized import Quantization

ERROR = "error"  # it does not load
WARNING = "warning"  # it does not load everywhere, or not as its name promises
NOTE = "note"  # it loads, and costs more or is something else than one may think
LEVELS = (ERROR, WARNING, NOTE)  # most severe first


DROP_OBJECTS: Fix = {OPTIONS: {"objects": "drop"}}  # a fix that leaves out Python objects


@dataclass(frozen=True)
class Cause:
    """A reason why it does not load: `title`, `explanation`, and the `command` to type, if any.

    ``fix`` is what one plan can do about it, None if nothing; an empty fix rewrites the checkpoint,
    enough for a faulty file.
    """

    code: str
    level: str
    title: str
    explanation: str
    command: str | None = None
    fix: Fix | None = None


def at_least(causes: Iterable[Cause], level: str) -> list[Cause]:
    """Return the causes that are as severe as `level`, or more."""
    return [cause for cause in causes if LEVELS.index(cause.level) <= LEVELS.index(level)]


def together(causes: Iterable[Cause]) -> Fix | None:
    """Return one fix for all of the causes, None if none has a fix."""
    fixes = [cause.fix for cause in causes if cause.fix is not None]
    return edits.together(fixes) if fixes else None


# The facts that several checks need

SHOWN = 4  # names in a sentence


class Form(NamedTuple):
    """The way in which ckptkit can write the contents of a file.

    ``options`` and the ``suffix`` of the output (None: that of the file), and the same as a `fix`.
    """

    options: tuple[str, ...] = ()
    suffix: str | None = None
    fix: Fix = MappingProxyType({})


WHOLE = Form()
DROPPED = Form(("--objects", "drop"), None, DROP_OBJECTS)
WEIGHTS = Form((), SAFETENSORS.suffixes[0], {"weights": {}, **DROP_OBJECTS})


@dataclass(frozen=True)
class Facts:
    """The checkpoint under examination.

    ``path`` is the file as it was typed, ``ambiguous`` the entries that could be the weights.
    ``checkpoint`` is what was read, None where nothing is written; ``container`` is the format of
    the file itself, if that is not the format of the checkpoint in it (compressed). ``step`` is
    what in its pickle weights_only=True refuses, apart from names, None if nothing.

    ``devices`` are those of this machine (None: not known, for want of torch), ``lacking`` the
    names in its pickles that the torch here does not have; ``no_index`` says that it is a folder of
    shards without one, ``no_version`` that it lacks a record which torch requires; ``with_model``:
    prefixes are looked at beside the model; ``for_here``: titles may speak of this machine.
    ``quantized`` is what is quantized in the weights, ``method`` what the configuration says of
    it; ``needs_floats``: the model has numbers where the file has codes and scales.
    """

    path: str
    summary: Summary
    root: Node
    devices: Collection[str] | None = ("cpu",)
    lacking: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    no_index: bool = False
    no_version: bool = False
    with_model: bool = False
    quantized: Quantization | None = None
    method: str = ""
    needs_floats: bool = False
    for_here: bool = True
    checkpoint: Checkpoint | None = None
    container: Format | None = None
    step: str | None = None

    @cached_property
    def form(self) -> Form | None:
        """The first form in which ckptkit can write the contents, None if there is none."""
        return next(filter(self.can_be_written, (WHOLE, DROPPED, WEIGHTS)), None)

    def can_be_written(self, form: Form) -> bool:
        """Return whether the contents can be written in a form."""
        if self.checkpoint is None or not self._is_odd:
            return True
        if form is DROPPED:
            survives = self.summary.survives_dropping()
            return survives and is_written(self._planned, TORCH_ZIP, objects="drop")
        return is_written(self._planned, TORCH_ZIP if form is WHOLE else SAFETENSORS)

    @cached_property
    def _planned(self) -> Checkpoint:
        """The checkpoint as the commands write it: packed layers of a program are dequantized."""
        assert self.checkpoint is not None
        if not (is_script(self) and advice.packed(self.summary)):
            return self.checkpoint
        from ckptkit.edits.quantized import dequantize

        try:
            return dequantize(self.checkpoint)
        except CkptkitError:  # which `is_written` meets too
            return self.checkpoint

    @property
    def _is_odd(self) -> bool:
        """Return whether a writer may refuse the contents: only then a file is planned to know."""
        dtypes = {row.tensor.dtype.name for row in self.summary.rows}
        return bool(self.summary.refused) or not NOT_IN_TORCH.isdisjoint(dtypes)

    @cached_property
    def are_weights_for_torch(self) -> bool:
        """Return whether ckptkit can write the weights alone as a file of torch.save."""
        if self.checkpoint is None or not self._is_odd:
            return True
        return is_written(bare(self._planned), TORCH_ZIP)


def is_written(checkpoint: Checkpoint, format: Format, objects: str = "keep") -> bool:
    """Return whether a checkpoint can be written in a format; its file is planned to know."""
    try:
        formats.layout(checkpoint, format, Options(objects=objects))
    except CkptkitError:
        return False
    return True


def format_of(facts: Facts) -> Format:
    return BY_NAME.get(facts.summary.format, NONE)


def is_script(facts: Facts) -> bool:
    """Return whether it is a program that torch loads: TorchScript."""
    format = format_of(facts)
    return format.loaded_by_torch and format.program


def is_torch_file(facts: Facts) -> bool:
    """Return whether torch.load reads it."""
    format = format_of(facts)
    return format.loaded_by_torch and not format.program


def is_wrapped(facts: Facts) -> bool:
    return bool(facts.summary.weights)


def edit(
    facts: Facts, command: str, mark: str, *options: str, suffix: str | None = None
) -> str | None:
    """Return the command that edits the file, None if nothing can be written of it."""
    form = facts.form
    if form is None:
        return None
    mark = "weights" if form is WEIGHTS else mark
    words = (*facts.summary.chosen, *form.options, *options)
    return advice.edit(command, facts.path, mark, *words, suffix=form.suffix or suffix)


def convert(facts: Facts, mark: str, *options: str) -> str | None:
    """Return a `convert` command: into a .pth file, or a safetensors file as it was one."""
    suffix = advice.suffix_for_torch(facts.path)
    if facts.summary.format == SAFETENSORS.name and facts.container is not None:
        suffix = SAFETENSORS.suffixes[0]
    return edit(facts, "convert", mark, *options, suffix=suffix)


def alone(facts: Facts, mark: str) -> str | None:
    """The command that makes a file of the weights alone."""
    if not is_wrapped(facts):
        return convert(facts, mark)
    suffix = advice.suffix_for_torch(facts.path)
    if not facts.are_weights_for_torch:
        suffix = SAFETENSORS.suffixes[0]
    words = ("--key", join(facts.summary.weights or ()), *facts.summary.words)
    return advice.edit("extract", facts.path, mark, *words, suffix=suffix)


def names_of(facts: Facts) -> list[str]:
    return [row.name for row in facts.summary.rows if row.name is not None]


def is_lightning(facts: Facts) -> bool:
    return isinstance(facts.root, dict) and "pytorch-lightning_version" in facts.root


def some(names: Iterable[str]) -> str:
    return text.some((each[:80] for each in names), SHOWN)
