"""The facts of `inspect` as JSON values; `ckptkit help json` documents the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.summary import Opaque, Summary, TensorRow, Value
from ckptkit.analysis.values import key_list, number
from ckptkit.cli.render import json_number
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.quantized import Group


def file(
    summary: Summary, rows: Iterable[TensorRow], digests: Sequence[str | None] | None = None
) -> dict[str, Any]:
    """Return FILE of the schema, its lists as iterators; with the SHA-256 of each row if given."""
    totals = summary.totals
    tensors: Iterator[dict[str, Any]] = map(tensor, rows)
    if digests is not None:
        tensors = (
            {**row, "sha256": digest}
            for row, digest in zip(map(tensor, rows), digests, strict=True)
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


def tensor(row: TensorRow) -> dict[str, Any]:
    """TENSOR of the schema."""
    name, path, leaf, storage, nbytes = row[:5]
    piece, group = row.local, row.group
    local = {} if piece is None else {"local_shapes": [each.shape for each in piece.local()]}
    return {
        "name": name,
        "path": join(path),
        "keys": key_list(path),
        "shape": leaf.shape,
        "dtype": leaf.dtype.name,
        "device": row.device,
        "stride": leaf.stride,
        "offset": leaf.offset,
        "storage": storage,
        "nbytes": number(nbytes),
        "requires_grad": leaf.requires_grad,
        "kind": leaf.kind,
        "layout": leaf.layout,
        **local,
        "quantization": None if group is None else quantization(group),
    }


def quantization(group: Group) -> dict[str, Any]:
    """Return the facts about the quantized weight that a tensor represents or belongs to."""
    return {
        "weight": group.name,
        "family": group.family,
        "label": group.label,
        "shape": group.shape,
        "parts": group.parts,
        "dropped": group.dropped,
        "reason": group.reason or None,
    }


def value(found: Value) -> dict[str, Any]:
    return {
        "path": join(found.path),
        "keys": key_list(found.path),
        "type": found.type,
        "value": json_number(found.value),
    }


def opaque(found: Opaque) -> dict[str, Any]:
    return {"path": join(found.path), "keys": key_list(found.path), "global": found.global_}
