"""The table of families for the manual, made of what the families say of themselves."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.quantized.finding import families
from ckptkit.quantized.others import METHODS, OTHERS

_HEADER = ("family", "known by", "read", "written", "compared with")


def markdown() -> str:
    """The families that are read, and those that are named and refused, as Markdown."""
    return "\n".join((*_read(), "", *_refused())) + "\n"


def _read() -> Iterator[str]:
    yield f"| {' | '.join(_HEADER)} |"
    yield "|---|---|---|---|---|"
    for family in families():
        if family.read:
            marks = (*family.marks, *(f"*{ending}" for ending in family.endings))
            written = f"`--quantize {family.written}`" if family.written else ""
            known = ", ".join(f"`{mark}`" for mark in marks)
            yield f"| {family.title} | {known} | yes | {written} | {family.oracle} |"


def _refused() -> Iterator[str]:
    yield "| named and refused | known by | read by |"
    yield "|---|---|---|"
    seen: dict[str, None] = {}
    for other in OTHERS:
        if other.name not in seen:
            seen[other.name] = None
            marks = ", ".join(f"`{mark}`" for mark in (other.codes, *other.companions))
            yield f"| {other.name} | {marks} | {other.reader} |"
    for name in dict.fromkeys(METHODS.values()):
        if name not in seen:
            yield f"| {name} | `quant_method` | its own library |"
