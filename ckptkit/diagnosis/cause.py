"""Define the causes of loading problems, and the facts from which checks derive causes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
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

ERROR = "error"  # the file does not load
WARNING = "warning"  # only some functions load the file
NOTE = "note"  # the file loads, but a property of the file may surprise the user
LEVELS = (ERROR, WARNING, NOTE)  # most severe first


DROP_OBJECTS: Fix = {OPTIONS: {"objects": "drop"}}  # drop Python objects


@dataclass(frozen=True)
class Cause:
    """A reason why a file does not load.

    ``command`` is the command line that solves the problem, or None if no such command exists.
    ``fix`` contains the edits that `doctor --fix` applies. If ``fix`` is None, `doctor --fix`
    cannot solve the problem. If ``fix`` is empty, writing the file again solves the problem.
    """

    code: str
    level: str
    title: str
    explanation: str
    command: str | None = None
    fix: Fix | None = None


@cache
def _rows() -> Mapping[str, Mapping[str, str]]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name("causes.toml").read_text("utf-8"))


def cause(
    name: str,
    command: str | None = None,
    fix: Fix | None = None,
    *,
    code: str = "",
    level: str = "",
    more: object = False,
    **words: object,
) -> Cause:
    """Return the cause `name` of `causes.toml`. `words` replace the braces in its sentences.

    If `more` is true, the sentence `more` continues the explanation. `code` and `level` replace
    those of the table.
    """
    row = _rows()[name]
    explanation = row["explanation"] + (row["more"] if more else "")
    text = (row["title"].format(**words), explanation.format(**words))
    return Cause(code or name.partition("/")[0], level or row["level"], *text, command, fix)


def at_least(causes: Iterable[Cause], level: str) -> list[Cause]:
    """Return the causes that are at least as severe as `level`."""
    return [cause for cause in causes if LEVELS.index(cause.level) <= LEVELS.index(level)]


def together(causes: Iterable[Cause]) -> Fix | None:
    """Merge the fixes of all causes into one fix. Return None if no cause has a fix."""
    fixes = [cause.fix for cause in causes if cause.fix is not None]
    return edits.together(fixes) if fixes else None


# The facts that several checks use

SHOWN = 4  # maximum number of names in a sentence


class Form(NamedTuple):
    """A selection of the contents of a file.

    ``options`` are the command line options that make the selection. ``suffix`` is the suffix of
    the output, or None for the suffix of the input. ``fix`` contains the edits that make the same
    selection.
    """

    options: tuple[str, ...] = ()
    suffix: str | None = None
    fix: Fix = MappingProxyType({})


WHOLE = Form()
DROPPED = Form(("--objects", "drop"), None, DROP_OBJECTS)
WEIGHTS = Form((), SAFETENSORS.suffixes[0], {"weights": {}, **DROP_OBJECTS})


@dataclass(frozen=True)
class Facts:
    """Facts about the examined checkpoint.

    ``path`` is the path that the user typed.
    ``devices`` lists the devices of this machine. ``devices`` is None if torch is not installed.
    ``lacking`` lists torch names that the pickle needs but the installed torch lacks.
    ``ambiguous`` lists the entries that could be the weights, if several could.
    ``no_index`` is True for a folder of shards without an index file.
    ``no_version`` is True for a zip archive without the record ``version``.
    ``with_model`` is True if the user gave a model. `fit` then checks the prefixes.
    ``quantized`` describes the quantized weights.
    ``method`` is the quantization method in config.json.
    ``needs_floats`` is True if the user's model has floating-point weights where the file has
    quantized weights.
    ``for_here`` is True if messages may mention this machine.
    ``checkpoint`` is None if ckptkit cannot read the file.
    ``container`` is the outer format, such as gzip, if the file contains a checkpoint file.
    ``step`` is an opcode or call that `torch.load(weights_only=True)` rejects in the pickle.
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

    @property
    def format(self) -> Format:
        return BY_NAME.get(self.summary.format, NONE)

    @property
    def is_script(self) -> bool:
        """True if the file is TorchScript."""
        return self.format.loaded_by_torch and self.format.program

    @property
    def is_torch_file(self) -> bool:
        """True if torch.load reads files of this format."""
        return self.format.loaded_by_torch and not self.format.program

    @property
    def is_wrapped(self) -> bool:
        """True if the weights are in an entry of the file."""
        return bool(self.summary.weights)

    @property
    def is_lightning(self) -> bool:
        return isinstance(self.root, dict) and "pytorch-lightning_version" in self.root

    @property
    def names(self) -> list[str]:
        """The names of the weights."""
        return [row.name for row in self.summary.rows if row.name is not None]

    def edit(self, command: str, mark: str, *options: str, suffix: str | None = None) -> str | None:
        """Return a command that edits the file, or None if ckptkit cannot write the contents."""
        form = self.form
        if form is None:
            return None
        mark = "weights" if form is WEIGHTS else mark
        words = (*self.summary.chosen, *form.options, *options)
        return advice.edit(command, self.path, mark, *words, suffix=form.suffix or suffix)

    def convert(self, mark: str, *options: str) -> str | None:
        """Return a `convert` command whose output torch.load reads.

        For a compressed safetensors file, the output is a safetensors file.
        """
        suffix = advice.suffix_for_torch(self.path)
        if self.format is SAFETENSORS and self.container is not None:
            suffix = SAFETENSORS.suffixes[0]
        return self.edit("convert", mark, *options, suffix=suffix)

    def extract_weights(self, mark: str) -> str | None:
        """Return the command that writes a file with only the weights."""
        if not self.is_wrapped:
            return self.convert(mark)
        suffix = advice.suffix_for_torch(self.path)
        if not self.are_weights_for_torch:
            suffix = SAFETENSORS.suffixes[0]
        words = ("--key", join(self.summary.weights or ()), *self.summary.words)
        return advice.edit("extract", self.path, mark, *words, suffix=suffix)

    @cached_property
    def form(self) -> Form | None:
        """Return the largest selection of contents that ckptkit can write, or None."""
        return next(filter(self.can_be_written, (WHOLE, DROPPED, WEIGHTS)), None)

    def can_be_written(self, form: Form) -> bool:
        """Return whether ckptkit can write this selection of the contents."""
        if self.checkpoint is None or not self._is_odd:
            return True
        if form is DROPPED:
            survives = self.summary.survives_dropping()
            return survives and is_written(self._planned, TORCH_ZIP, objects="drop")
        return is_written(self._planned, TORCH_ZIP if form is WHOLE else SAFETENSORS)

    @cached_property
    def _planned(self) -> Checkpoint:
        """Return the checkpoint after dequantizing the packed layers of a TorchScript file."""
        assert self.checkpoint is not None
        if not (self.is_script and advice.packed(self.summary)):
            return self.checkpoint
        from ckptkit.edits.quantized import dequantize

        try:
            return dequantize(self.checkpoint)
        except CkptkitError:  # a weight cannot be dequantized; `is_written` then returns False
            return self.checkpoint

    @property
    def _is_odd(self) -> bool:
        """Return whether torch.save or safetensors may be unable to store some values."""
        dtypes = {row.tensor.dtype.name for row in self.summary.rows}
        return bool(self.summary.refused) or not NOT_IN_TORCH.isdisjoint(dtypes)

    @cached_property
    def are_weights_for_torch(self) -> bool:
        """Return whether ckptkit can write the weights as a file of torch.save."""
        if self.checkpoint is None or not self._is_odd:
            return True
        return is_written(bare(self._planned), TORCH_ZIP)


def is_written(checkpoint: Checkpoint, format: Format, objects: str = "keep") -> bool:
    """Return whether ckptkit can write a checkpoint in a format. No file is written."""
    try:
        formats.layout(checkpoint, format, Options(objects=objects))
    except CkptkitError:
        return False
    return True


def as_sentence(hint: str | None) -> str:
    """Return a hint as a sentence after a space. Return "" if there is no hint."""
    return f" {hint[:1].upper()}{hint[1:]}." if hint else ""


def some(names: Iterable[str]) -> str:
    return text.some((each[:80] for each in names), SHOWN)
