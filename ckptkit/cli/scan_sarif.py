"""Findings as SARIF 2.1.0 (OASIS), for code hosts and dashboards: one result for each reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from ckptkit.cli.render import escape
from ckptkit.core import __version__
from ckptkit.core.text import is_url
from ckptkit.scanning.files import Failure
from ckptkit.scanning.verdict import (
    CLASSES,
    CODE,
    HARMLESS,
    LABELS,
    UNKNOWN,
    FileVerdict,
    Finding,
    findings,
)

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = (CODE, UNKNOWN, CLASSES, HARMLESS)
_IDS = {
    CODE: "would-run-code",
    UNKNOWN: "cannot-tell",
    CLASSES: "needs-classes",
    HARMLESS: "not-for-weights-only",
}
_LEVELS = {CODE: "error", UNKNOWN: "warning", CLASSES: "warning", HARMLESS: "note"}
_MEANING = {
    CODE: "Loading the file with pickle calls code with arguments that the file chooses.",
    UNKNOWN: "It is malformed, ambiguous, or contains a step that is not proven harmless.",
    CLASSES: "The file makes objects of classes that are not in the allowlist: their code decides.",
    HARMLESS: "Everything is in the allowlist, but torch.load(weights_only=True) does not read it.",
}


def log(results: Iterable[FileVerdict | Failure], strict: bool) -> dict[str, Any]:
    """Return the whole log; results are written while files are scanned, unreadable files at the
    end.
    """
    failures: list[Failure] = []
    run = {
        "tool": {
            "driver": {
                "name": "ckptkit",
                "version": __version__,
                "rules": [_rule(each) for each in RULES],
            }
        },
        "columnKind": "utf16CodeUnits",
        "results": _results(results, failures, strict),
        "invocations": (_invocation(failures) for _ in range(1)),
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": iter((run,))}


def _rule(verdict: str) -> dict[str, Any]:
    return {
        "id": _IDS[verdict],
        "shortDescription": {"text": LABELS[verdict]},
        "fullDescription": {"text": _MEANING[verdict]},
        "defaultConfiguration": {"level": _LEVELS[verdict]},
    }


def _results(
    results: Iterable[FileVerdict | Failure], failures: list[Failure], strict: bool
) -> Iterator[dict[str, Any]]:
    for each in results:
        if isinstance(each, Failure):
            failures.append(each)
        else:
            yield from (_result(each.path, finding) for finding in findings(each, strict))


def _result(path: str, finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(path)}}
    if finding.offset is not None:
        location["region"] = {"byteOffset": finding.offset, "byteLength": 0}
    place: dict[str, Any] = {"physicalLocation": location}
    if finding.where:
        place["logicalLocations"] = [
            {"fullyQualifiedName": escape(finding.where), "kind": "member"}
        ]
    return {
        "ruleId": _IDS[finding.verdict],
        "ruleIndex": RULES.index(finding.verdict),
        "level": _LEVELS[finding.verdict],
        "message": {
            "text": escape(f"{finding.where}: {finding.text}" if finding.where else finding.text)
        },
        "locations": [place],
    }


def _uri(path: str) -> str:
    """Return a path as a URI reference."""
    if is_url(path):
        return quote(path, safe="/:?&=%@*~,+")
    given = quote(os.fsencode(path).replace(os.sep.encode(), b"/"))
    return f"file://{given}" if os.path.isabs(path) else given


def _invocation(failures: list[Failure]) -> dict[str, Any]:
    notices = [
        {"level": "error", "message": {"text": escape(str(each.error.at(each.path)))}}
        for each in failures
    ]
    return {"executionSuccessful": not failures, "toolExecutionNotifications": notices}
