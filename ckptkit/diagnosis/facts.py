"""The facts that several checks of the doctor need."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptkit.analysis.advice import convert, edit
from ckptkit.analysis.summary import Summary
from ckptkit.core import text
from ckptkit.core.tree import Node, join
from ckptkit.formats.format import Format
from ckptkit.formats.table import BY_NAME, NONE, TORCH_SUFFIXES
from ckptkit.quantized import Quantization

SHOWN = 4  # names in a sentence


@dataclass(frozen=True)
class Facts:
    """The checkpoint under examination.

    ``path`` is the file as it was typed, ``ambiguous`` the entries that could be the weights.

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


def alone(facts: Facts, mark: str) -> str:
    """The command that makes a file of the weights alone."""
    if not is_wrapped(facts):
        return convert(facts.path, mark)
    suffix = None if facts.path.lower().endswith(TORCH_SUFFIXES) else ".pth"
    return edit(
        "extract", facts.path, mark, "--key", join(facts.summary.weights or ()), suffix=suffix
    )


def names_of(facts: Facts) -> list[str]:
    return [row.name for row in facts.summary.rows if row.name is not None]


def is_lightning(facts: Facts) -> bool:
    return isinstance(facts.root, dict) and "pytorch-lightning_version" in facts.root


def some(names: Iterable[str]) -> str:
    return text.some((each[:80] for each in names), SHOWN)
