"""Format verdicts as text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.cli.render import escape, paint, wrapped
from ckptkit.core.text import flatten
from ckptkit.scanning import verdict as verdicts
from ckptkit.scanning.files import Failure
from ckptkit.scanning.verdict import CLASSES, CODE, HARMLESS, UNKNOWN, FileVerdict, PickleVerdict

COLOURS = {CODE: "red", UNKNOWN: "yellow"}
SHOWN = 8  # maximum number of printed calls of a pickle, and of printed reasons of a file


def painted(result: FileVerdict | Failure) -> Iterator[str]:
    """Yield the escaped lines of a verdict. The first line is colored."""
    for number, line in enumerate(map(escape, lines(result))):
        colour = None if number or isinstance(result, Failure) else COLOURS.get(result.verdict)
        fitting = wrapped(line, whole=number == 0)
        yield from fitting if colour is None else (paint(each, colour) for each in fitting)


def lines(result: FileVerdict | Failure) -> Iterator[str]:
    """Yield the verdict on a file, then the reasons. Yield nothing for a failed file."""
    if isinstance(result, Failure):
        return
    yield f"{result.path}: {verdicts.LABELS[result.verdict]}"
    reasons = list(flatten(map(_pickle, result.pickles)))
    reasons += [f"{_place(each.where)}{each.reason}" for each in result.remarks]
    for each in result.programs:
        if each.files:
            reasons.append(f"{each.where}: a program that uses {', '.join(each.files)}")
    functions = sum(each.functions for each in result.programs)
    if functions:
        what = f"a TorchScript program of {functions:,} functions: calling the model runs it"
        reasons.append(what)
    reasons = list(dict.fromkeys(reasons))
    yield from (f"  {line}" for line in reasons[:SHOWN])
    if len(reasons) > SHOWN:
        yield f"  and {len(reasons) - SHOWN:,} more (--json lists them)"


def _pickle(pickle: PickleVerdict) -> Iterator[str]:
    """Yield the reasons for the verdict on one pickle. A safe pickle has no reasons."""
    place = _place(pickle.found.where)
    hidden = " (in a byte string that loading ignores)" if pickle.found.nested else ""
    for call in pickle.runs[:SHOWN]:
        times = f", {call.times:,} times" if call.times > 1 else ""
        where = f"{call.opcode} at byte {call.offset:,}"
        yield f"{place}calls {call.name}{call.args}{times}: {where}{hidden}"
    if len(pickle.runs) > SHOWN:
        yield f"{place}calls {len(pickle.runs) - SHOWN:,} more (--json lists them)"
    if pickle.verdict in (CODE, UNKNOWN):
        yield from (f"{place}{reason}" for reason in pickle.reasons)
    if pickle.verdict == CLASSES:
        yield from (f"{place}{line}" for line in verdicts.needed(pickle))
    if pickle.verdict in (CLASSES, HARMLESS) and pickle.refused is not None:
        yield f"{place}weights_only does not apply: {pickle.refused}"
    yield from pickle.versions


def _place(where: str) -> str:
    return f"{where}: " if where else ""
