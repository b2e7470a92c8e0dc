"""Convert the results of commands to JSON values. The page `ckptkit help json` documents the
schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Any

from ckptkit.analysis import columns
from ckptkit.analysis.summary import (
    Summary,
    TensorRow,
    Value,
    json_number,
    key_list,
    number,
    selected,
)
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Digests
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.analysis.verify import Verdict
    from ckptkit.pickles.streams import Call
    from ckptkit.scanning.files import Failure
    from ckptkit.scanning.verdict import FileVerdict, PickleVerdict

Json = dict[str, Any]
TEXT = 384  # maximum number of bytes of a string in an array
_COMMAND = re.compile("`(ckptkit [^`]+)`|^(ckptkit .+)$")


def file(
    summary: Summary,
    rows: Sequence[TensorRow],
    digests: Sequence[str | None] | None = None,
    *,
    is_selection: bool = False,
) -> Json:
    """Return the object FILE of the JSON schema of `inspect`.

    The lists in the object are iterators. `digests` contains the SHA-256 of the elements of each
    row. If globs selected the rows, `is_selection` is true, and the object also contains the totals
    of the selection.
    """
    tensors: Iterator[Json] = map(columns.as_json, rows)
    if digests is not None:
        pairs = zip(tensors, digests, strict=True)
        tensors = ({**row, "sha256": digest} for row, digest in pairs)
    totals, part = summary.totals, summary.part
    return {
        "file": summary.path,
        "format": summary.format,
        "size": summary.size,
        "weights": None if summary.weights is None else join(summary.weights),
        "tensors": tensors,
        "values": map(_value, summary.values),
        "objects": (
            {"path": join(each.path), "keys": key_list(each.path), "global": each.global_}
            for each in summary.objects
        ),
        "globals": list(map(str, summary.globals)),
        "metadata": dict(summary.extras),
        "warnings": list(summary.warnings),
        "totals": _totals(*totals[:4]),
        "selected": _totals(*selected(rows)) if is_selection else None,
        "about": summary.about or None,
        "adapter": None if summary.adapter is None else summary.adapter.as_json(),
        "part": None
        if part is None
        else {name: getattr(part, name) for name in ("kind", "name", "detail", "folder")},
    }


def _value(each: Value) -> Json:
    """Return the object VALUE of the JSON schema. For an array, include only the first values."""
    facts = {"path": join(each.path), "keys": key_list(each.path), "type": each.type}
    if each.array is None:
        return {**facts, "value": json_number(each.value)}
    whole = [json_number(value) for value in each.array.first]
    first = [_cut(value) if isinstance(value, str) else value for value in whole]
    cut = {"truncated": True} if first != whole else {}
    return {**facts, "of": each.array.of, "count": each.array.count, **cut, "value": first}


def _cut(text: str) -> str:
    """Return the beginning of a string. As JSON, it takes at most `TEXT` bytes."""
    text = text[:TEXT]
    while len(dumps(text)) > TEXT:
        text = text[: len(text) * 3 // 4]
    return text


def _totals(tensors: int, *sizes: int) -> Json:
    names = ("parameters", "nbytes", "storage_nbytes")
    return {"tensor_count": tensors, **dict(zip(names, map(number, sizes), strict=False))}


def failure(error: CkptkitError, file: str | None = None) -> Json:
    """Return the JSON object for an error. If the hint contains a command, include the command."""
    command = _COMMAND.search(error.hint or "")
    facts = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "command": None if command is None else command[1] or command[2],
    }
    return {"file": file or error.where, "error": facts}


def verdict(found: Verdict) -> Json:
    """Return the object FILE of the JSON schema of `verify`."""
    return {
        "file": found.path,
        "format": found.format,
        "ok": found.ok,
        "tensor_count": found.tensors,
        "records": found.records,
        "nbytes": found.nbytes,
        "findings": [
            {"part": each.file or None, "what": each.what, "names": list(each.tensors)}
            for each in found.findings
        ],
        "notes": list(found.notes),
    }


def digests(path: str, format: str, found: Digests) -> Json:
    """Return the object FILE of the JSON schema of `digest`. The list of tensors is an iterator."""
    return {
        "file": path,
        "format": format,
        "digest": found.whole,
        "tensors": (
            {
                "name": name,
                "dtype": found.tensors[name].dtype.name,
                "shape": [number(size) for size in found.tensors[name].shape],
                "digest": id,
            }
            for name, id in found.ids.items()
        ),
        "without": [{"name": name, "why": why} for name, why in found.without.items()],
    }


def statistics(
    path: str | None, format: str, found: Statistics, rows: Iterable[TensorStats]
) -> Json:
    """Return the object of the JSON schema of `stats`. The lists in the object are iterators."""
    return {
        "file": path,
        "format": format,
        "groups" if found.grouped else "tensors": map(_statistics, rows),
        "totals": map(_statistics, found.totals),
        "skipped": map(asdict, found.skipped),
    }


def _statistics(row: TensorStats) -> Json:
    """Return the object STATS of the JSON schema."""
    from ckptkit.analysis.view_model import numbers

    source, histogram = row.source, row.tally.histogram
    place: Json = {"path": None, "keys": None, "shape": None}
    if source is not None:
        place = {"path": source.place, "keys": key_list(source.path), "shape": row.shape}
    found = numbers(row.tally, row.kind)
    if isinstance(found["mean"], complex):
        found["mean"] = [found["mean"].real, found["mean"].imag]
    bins, edges = None, histogram.edges
    if histogram.counts:
        bins = {"start": edges[0], "width": edges[1] - edges[0], "counts": histogram.counts}
    return {
        "name": row.label,
        **place,
        "kind": row.kind,
        "dtypes": row.dtypes,
        "tensor_count": row.tensors,
        **{name: json_number(value) for name, value in found.items()},
        "histogram": bins,
    }


def scanned(result: FileVerdict | Failure) -> Json:
    """Return the object FILE of the JSON schema of `scan`, or an error object for an unreadable
    file."""
    from ckptkit.scanning.files import Failure
    from ckptkit.scanning.verdict import LABELS

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


def _pickle(pickle: PickleVerdict) -> Json:
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
            "loads": pickle.refused is None,
            "refused": pickle.refused,
        },
        "versions": pickle.versions,
        "globals": list(map(str, trace.globals)),
        "needs": list(map(str, pickle.needs)),
        "held": list(map(str, pickle.held)),
        "calls": list(map(_call, trace.calls)),
        "runs": list(map(_call, pickle.runs)),
        "reasons": pickle.reasons,
        "error": trace.error,
    }


def _call(call: Call) -> Json:
    return {
        "name": call.name,
        "opcode": call.opcode,
        "kind": call.kind,
        "arguments": call.args,
        "offset": call.offset,
        "count": call.times,
    }
