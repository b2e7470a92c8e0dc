"""The facts of `inspect` as JSON values; `ckptkit help json` documents the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.summary import Opaque, Summary, TensorRow, Value, selected
from ckptkit.analysis.values import json_number, key_list, number
from ckptkit.analysis.view_model import tensors as model
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Digests
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.analysis.verify import Verdict
    from ckptkit.core.parts import PartOf


def file(
    summary: Summary,
    rows: Sequence[TensorRow],
    digests: Sequence[str | None] | None = None,
    *,
    is_selection: bool = False,
) -> dict[str, Any]:
    """Return FILE of the schema, its lists as iterators; with the SHA-256 of each row if given.

    `is_selection`: the rows are those that globs select, and their totals are given too.
    """
    totals = summary.totals
    tensors: Iterator[dict[str, Any]] = map(model.as_json, rows)
    if digests is not None:
        tensors = (
            {**row, "sha256": digest}
            for row, digest in zip(map(model.as_json, rows), digests, strict=True)
        )
    return {
        "file": summary.path,
        "format": summary.format,
        "size": summary.size,
        "weights": None if summary.weights is None else join(summary.weights),
        "tensors": tensors,
        "values": map(value, summary.values),
        "objects": map(opaque, summary.objects),
        "globals": list(map(str, summary.globals)),
        "metadata": dict(summary.extras),
        "warnings": list(summary.warnings),
        "totals": {
            "tensor_count": totals.tensors,
            "parameters": number(totals.parameters),
            "nbytes": number(totals.nbytes),
            "storage_nbytes": number(totals.storage_nbytes),
        },
        "selected": _selected(rows) if is_selection else None,
        "about": summary.about or None,
        "part": _part(summary.part),
    }


def _selected(rows: Sequence[TensorRow]) -> dict[str, Any]:
    """Return the totals of the tensors that globs select."""
    found = selected(rows)
    return {
        "tensor_count": found.tensors,
        "parameters": number(found.parameters),
        "nbytes": number(found.nbytes),
    }


def _part(part: PartOf | None) -> dict[str, Any] | None:
    """Return which part of a checkpoint of several processes a file is."""
    if part is None:
        return None
    return {"kind": part.kind, "name": part.name, "detail": part.detail, "folder": part.folder}


def value(found: Value) -> dict[str, Any]:
    return {
        "path": join(found.path),
        "keys": key_list(found.path),
        "type": found.type,
        "value": json_number(found.value),
    }


def opaque(found: Opaque) -> dict[str, Any]:
    return {"path": join(found.path), "keys": key_list(found.path), "global": found.global_}


_COMMAND = re.compile("`(ckptkit [^`]+)`|^(ckptkit .+)$")


def failure(error: CkptkitError, file: str | None = None) -> dict[str, Any]:
    """Return a file that could not be read, or a command that failed: what, and what to type."""
    command = _COMMAND.search(error.hint or "")
    facts = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "command": None if command is None else command[1] or command[2],
    }
    return {"file": file or error.where, "error": facts}


def verdict(found: Verdict) -> dict[str, Any]:
    """Return FILE of `verify`."""
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


def digests(path: str, format: str, found: Digests) -> dict[str, Any]:
    """Return FILE of `digest`, its tensors as an iterator."""
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
) -> dict[str, Any]:
    """Return the object of `stats`; totals come last, since they are only known then."""
    from ckptkit.analysis.view_model import statistics as model

    def totals() -> Iterator[dict[str, Any]]:
        yield from map(model.as_json, found.totals)

    def skipped() -> Iterator[dict[str, Any]]:
        for each in found.skipped:
            yield {"name": each.name, "dtype": each.dtype, "why": each.why}

    return {
        "file": path,
        "format": format,
        "groups" if found.grouped else "tensors": map(model.as_json, rows),
        "totals": totals(),
        "skipped": skipped(),
    }
