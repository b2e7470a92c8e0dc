"""The facts of `inspect` as JSON values; `ckptkit help json` documents the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.summary import Opaque, Summary, TensorRow, Value
from ckptkit.analysis.values import json_number, key_list, number
from ckptkit.analysis.view_model import tensors as model
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.core.parts import PartOf


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
        "about": summary.about or None,
        "part": _part(summary.part),
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
