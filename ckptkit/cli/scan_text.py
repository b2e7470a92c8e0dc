"""Format verdicts as text, and as SARIF 2.1.0 (OASIS) for code hosts and dashboards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from ckptkit.cli.render import escape, paint, wrapped
from ckptkit.core import __version__
from ckptkit.core.text import flatten, is_url
from ckptkit.scanning import verdict as verdicts
from ckptkit.scanning.files import Failure
from ckptkit.scanning.verdict import (
    CLASSES,
    CODE,
    HARMLESS,
    UNKNOWN,
    FileVerdict,
    Finding,
    PickleVerdict,
)

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


SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
# The verdicts as SARIF rules: id, level, meaning.
RULES = {
    CODE: ("would-run-code", "error",
           "Loading the file with pickle calls code with arguments from the file."),
    UNKNOWN: ("cannot-tell", "warning",
              "The pickle is malformed or ambiguous, or ckptkit cannot prove that it is harmless."),
    CLASSES: ("needs-classes", "warning",
              "Loading makes objects of classes that are not allowlisted and run their own code."),
    HARMLESS: ("not-for-weights-only", "note",
               "Every call is allowlisted, but torch.load(weights_only=True) refuses the file."),
}  # fmt: skip


def sarif(results: Iterable[FileVerdict | Failure], strict: bool) -> dict[str, Any]:
    """Return the log. The log contains iterators, so results are written during the scan.
    Unreadable files are written at the end."""
    failures: list[dict[str, Any]] = []
    rules = [
        {
            "id": name,
            "shortDescription": {"text": verdicts.LABELS[verdict]},
            "fullDescription": {"text": meaning},
            "defaultConfiguration": {"level": level},
        }
        for verdict, (name, level, meaning) in RULES.items()
    ]
    run = {
        "tool": {"driver": {"name": "ckptkit", "version": __version__, "rules": rules}},
        "columnKind": "utf16CodeUnits",
        "results": _results(results, failures, strict),
        "invocations": (
            {"executionSuccessful": not failures, "toolExecutionNotifications": failures}
            for _ in range(1)
        ),
    }
    return {"$schema": SARIF, "version": "2.1.0", "runs": iter((run,))}


def _results(
    results: Iterable[FileVerdict | Failure], failures: list[dict[str, Any]], strict: bool
) -> Iterator[dict[str, Any]]:
    for each in results:
        if isinstance(each, Failure):
            text = escape(str(each.error.at(each.path)))
            failures.append({"level": "error", "message": {"text": text}})
        else:
            found = verdicts.findings(each, strict)
            yield from (_result(each.path, finding) for finding in found)


def _result(path: str, finding: Finding) -> dict[str, Any]:
    if is_url(path):
        uri = quote(path, safe="/:?&=%@*~,+")
    else:
        uri = quote(os.fsencode(path).replace(os.sep.encode(), b"/"))
        uri = f"file://{uri}" if os.path.isabs(path) else uri
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.offset is not None:
        location["region"] = {"byteOffset": finding.offset, "byteLength": 0}
    place: dict[str, Any] = {"physicalLocation": location}
    text = finding.text
    if finding.where:
        member = {"fullyQualifiedName": escape(finding.where), "kind": "member"}
        place["logicalLocations"] = [member]
        text = f"{finding.where}: {text}"
    name, level, _ = RULES[finding.verdict]
    return {
        "ruleId": name,
        "ruleIndex": list(RULES).index(finding.verdict),
        "level": level,
        "message": {"text": escape(text)},
        "locations": [place],
    }
