"""Text output of `inspect`: a heading, a folded table of tensors, values and objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.summary import Summary, TensorRow, Value
from ckptkit.analysis.values import Plain
from ckptkit.cli.render import escape, plural, shape, size, table
from ckptkit.core.fold import Folded, Item, fold, unfolded
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.quantized import Group

SHOWN = 40  # values, objects or metadata entries; --json and --tree show all
LISTED = 8  # values of a list; likewise
LONG = 200  # characters of a value; likewise


def lines(summary: Summary, rows: list[TensorRow], *, flat: bool, sort: str) -> Iterator[str]:
    """Yield everything except warnings and hints; of a pickled module, its weights only."""
    yield escape(_heading(summary))
    if summary.about:
        yield escape(summary.about)
    if summary.part is not None:
        yield escape(f"this is {summary.part}")
    if summary.weights is not None and rows:
        yield f"weights: {escape(join(summary.weights)) or 'the whole file'}"
    if kinds := Counter(row.dtype for row in rows if row.is_logical):
        total = sum(row.name is not None for row in rows)
        parts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        yield escape(
            f"quantized: {sum(kinds.values()):,} of {total:,} weights ({parts}); --stored shows "
            "their parts"
        )
    shared = _shared(rows)
    weights = [row for row in rows if row.name is not None]
    others = [row for row in rows if row.name is None]
    for title, part in (("", weights), ("other tensors" if weights else "", others)):
        if part:
            yield f"\n{title}\n" if title else ""
            yield from _tensors(_arranged((_item(row, shared) for row in part), flat, sort))
    values = [value for value in summary.values if not summary.in_module(value.path)]
    objects = [each for each in summary.objects if not summary.in_module(each.path)]
    yield from _block("values", fold(_values(values)), _value)
    yield from _block("objects", fold(Item(join(o.path), o.global_, 0) for o in objects), _object)
    yield from _block("metadata", [Folded(k, v, 0, 1) for k, v in summary.extras.items()], _object)


def _heading(summary: Summary) -> str:
    totals = summary.totals
    parts = (
        [plural(totals.tensors, "tensor"), plural(totals.parameters, "parameter")]
        if totals.tensors
        else []
    )
    heading = f"{summary.path}: {summary.format}, {size(summary.size)}"
    if totals.tensors:
        parts.append(size(totals.nbytes))
        if totals.storage_nbytes != totals.nbytes:
            parts[-1] += f" in {size(totals.storage_nbytes)} of storage"
    return f"{heading}: {', '.join(parts)}" if parts else f"{heading}: no tensors"


def _shared(rows: Iterable[TensorRow]) -> set[int | None]:
    """Return the storages that hold several of the tensors."""
    held = Counter(row.storage for row in rows)
    return {storage for storage, count in held.items() if count > 1 and storage is not None}


def _item(row: TensorRow, shared: set[int | None]) -> Item:
    tensor = row.tensor
    name = row.name if row.name is not None else row.place
    columns = (row.dtype, tensor.shape, row.device, _remark(row, shared))
    return Item(name, columns, row.nbytes)


def _remark(row: TensorRow, shared: set[int | None]) -> str:
    """Return a remark on a tensor that is not plain, strided and alone in its storage."""
    tensor = row.tensor
    storage = tensor.storage
    if row.local is not None:
        from ckptkit.core.parts import extent

        local = " and ".join(shape(each.shape) for each in row.local.local()) or "nothing"
        place = extent(row.local)
        return f"here {local}" + (f": {place}" if place else "")
    if row.group is not None:
        return "" if row.is_logical else _part(row.group)
    if (
        storage is not None
        and storage.record.length == row.nbytes
        and row.storage not in shared
        and tensor.kind != "ndarray"
        and tensor.layout == "strided"
        and not (tensor.conj or tensor.neg)
    ):  # as almost all are
        return ""
    parts = [] if tensor.layout == "strided" else [tensor.layout]
    if row.inside:
        parts[0] += f" of {plural(len(row.inside), 'tensor')} below"
    if tensor.kind == "ndarray":
        parts.append("numpy")
    if tensor.storage is not None:
        if row.storage in shared:
            parts.append(f"shares storage {row.storage}")
        if tensor.layout == "strided" and tensor.storage.nbytes > row.nbytes:
            parts.append(f"view of {size(tensor.storage.nbytes)}")
    if tensor.conj or tensor.neg:
        parts.append("conjugated" if tensor.conj else "negated")
    return ", ".join(parts)


def _part(group: Group) -> str:
    """Name the quantized weight that a tensor belongs to."""
    return f"{group.label}, not read" if group.reason else f"part of {group.label}"


def _arranged(items: Iterable[Item], flat: bool, sort: str) -> list[Folded]:
    found = unfolded(items) if flat else fold(items)
    if sort == "size":
        found.sort(key=lambda row: -row.nbytes)
    elif sort == "name":
        found.sort(key=lambda row: row.label)
    return found


def _tensors(rows: list[Folded]) -> Iterator[str]:
    cells = [_cells(row) for row in rows]
    headers = ["name", "dtype", "shape", "tensors", "size", "device", ""]
    unused = [n for n in (3, 6) if not any(row[n] for row in cells)]
    if unused:
        kept = [n for n in range(len(headers)) if n not in unused]
        headers = [headers[n] for n in kept]
        cells = [tuple(row[n] for n in kept) for row in cells]
    yield from table(headers, cells, right=("tensors", "size"))


def _cells(row: Folded) -> tuple[str, ...]:
    columns: Any = row.columns
    dtype, sizes, device, remark = columns
    rows = f"{row.rows:,}" if row.rows > 1 else ""
    return (
        escape(row.label) or "(root)",
        escape(dtype),
        shape(sizes),
        rows,
        size(row.nbytes),
        escape(device),
        remark,
    )


def _block(title: str, rows: list[Folded], text: Callable[[Hashable], str]) -> Iterator[str]:
    if rows:
        yield f"\n{title}"
        yield from (
            f"  {escape(row.label) or '(root)'}: {text(row.columns)}" for row in rows[:SHOWN]
        )
        if len(rows) > SHOWN:
            yield f"  and {len(rows) - SHOWN:,} more: --tree shows all"


def _values(values: list[Value]) -> Iterator[Item]:
    """Yield values, those near the root first; a list is one row, as ``betas.{0..1}``."""
    nearest = sorted(values, key=lambda value: len(value.path))
    for parent, group in groupby(nearest, key=lambda value: join(value.path[:-1])):
        same = list(group)
        positions = [
            value.path[-1] if value.path and isinstance(value.path[-1], int) else None
            for value in same
        ]
        if len(same) > 1 and positions == list(range(len(same))):
            yield Item(
                f"{parent}{'.' * bool(parent)}{{0..{len(same) - 1}}}",
                tuple((value.type, value.value) for value in same),
                0,
            )
        else:
            yield from (Item(join(value.path), ((value.type, value.value),), 0) for value in same)


def _value(columns: Any) -> str:
    texts = [value_text(kind, value, LONG) for kind, value in columns[:LISTED]]
    return ", ".join(texts) + (f", ... ({len(columns):,})" if len(columns) > LISTED else "")


def _object(columns: Hashable) -> str:
    return cut(str(columns), LONG)


def value_text(kind: str, value: Plain, longest: int) -> str:
    """Return a value as Python would write it, escaped and cut at `longest` characters."""
    text = cut(str(value), longest)
    return f"'{text}'" if kind == "str" else text


def cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return escape(text)
    return f"{escape(text[:longest])}... ({len(text):,} characters)"
