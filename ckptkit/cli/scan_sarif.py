"""Format findings as SARIF 2.1.0 (OASIS) for code hosts and dashboards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from ckptkit.cli.render import escape
from ckptkit.core import __version__
from ckptkit.core.text import is_url
from ckptkit.scanning import verdict as verdicts
from ckptkit.scanning.files import Failure
from ckptkit.scanning.verdict import CLASSES, CODE, HARMLESS, UNKNOWN, FileVerdict, Finding

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
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


def log(results: Iterable[FileVerdict | Failure], strict: bool) -> dict[str, Any]:
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
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": iter((run,))}


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
