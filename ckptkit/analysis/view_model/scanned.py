"""Verdicts as JSON: the schema ckptkit.scan/2."""

from __future__ import annotations

from typing import Any

from ckptkit.analysis.view_model.as_json import failure
from ckptkit.pickles.streams import Call
from ckptkit.scanning.files import Failure
from ckptkit.scanning.verdict import LABELS, FileVerdict, PickleVerdict


def file(result: FileVerdict | Failure) -> dict[str, Any]:
    """Return the JSON object of one file, or the error if it could not be read."""
    if isinstance(result, Failure):
        return failure(result.error, result.path)
    return {
        "file": result.path,
        "size": result.size,
        "verdict": result.verdict,
        "label": LABELS[result.verdict],
        "pickles": list(map(_pickle, result.pickles)),
        "remarks": [{"where": each.where, "reason": each.reason} for each in result.remarks],
        "programs": [
            {"where": each.where, "functions": each.functions, "files": each.files}
            for each in result.programs
        ],
    }


def _pickle(pickle: PickleVerdict) -> dict[str, Any]:
    found, trace = pickle.found, pickle.found.trace
    return {
        "where": found.where,
        "offset": found.offset,
        "file_offset": None if found.base is None else found.base + found.offset,
        "length": trace.stop - found.offset,
        "protocol": trace.protocol,
        "loader": found.loader,
        "nested": found.nested,
        "verdict": pickle.verdict,
        "weights_only": {
            "loads": pickle.refused is None and not pickle.needs,
            "refused": pickle.refused,
        },
        "versions": pickle.versions,
        "globals": list(map(str, trace.globals)),
        "needs": list(map(str, pickle.needs)),
        "calls": list(map(_call, trace.calls)),
        "runs": list(map(_call, pickle.runs)),
        "reasons": pickle.reasons,
        "error": trace.error,
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "name": call.name,
        "opcode": call.opcode,
        "kind": call.kind,
        "arguments": call.args,
        "offset": call.offset,
        "count": call.times,
    }
