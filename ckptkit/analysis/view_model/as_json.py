"""The facts of `inspect` as JSON values; `ckptkit help json` documents the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptkit.analysis.summary import Opaque, Summary, TensorRow, Value
from ckptkit.analysis.values import json_number, key_list, number
from ckptkit.analysis.view_model import tensors as model
from ckptkit.core.tree import join


def file(
    summary: Summary, rows: Iterable[TensorRow], digests: Sequence[str | None] | None = None
) -> dict[str, Any]:
    """Return FILE of the schema, its lists as iterators; with the SHA-256 of each row if given."""
    totals = summary.totals
    tensors: Iterator[dict[str, Any]] = map(model.as_json, rows)
    if digests is not None:
        tensors = (
            {**row, "sha256": digest}
            for row, digest in zip(map(model.as_json, rows), digests, strict=True)
        )
    return {
        "path": summary.path,
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
            "tensors": totals.tensors,
            "parameters": number(totals.parameters),
            "nbytes": number(totals.nbytes),
            "storage_nbytes": number(totals.storage_nbytes),
        },
        **_of_processes(summary),
    }


def _of_processes(summary: Summary) -> dict[str, Any]:
    """Return the facts about ranks, of one part or of a folder; empty for other checkpoints."""
    found: dict[str, Any] = {"about": summary.about} if summary.about else {}
    if summary.part is not None:
        part = summary.part
        facts = {
            "kind": part.kind,
            "said": part.name,
            "detail": part.detail,
            "folder": part.folder,
        }
        found["part"] = facts
    return found


def value(found: Value) -> dict[str, Any]:
    return {
        "path": join(found.path),
        "keys": key_list(found.path),
        "type": found.type,
        "value": json_number(found.value),
    }


def opaque(found: Opaque) -> dict[str, Any]:
    return {"path": join(found.path), "keys": key_list(found.path), "global": found.global_}
