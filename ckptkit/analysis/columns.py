"""Define the facts about a tensor, such as dtype and shape, in the order of the table columns.

If the names of tensors differ only in an index, tables show the tensors as one row. To add a fact,
add a line to FACTS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.analysis.summary import TensorRow, key_list, number
from ckptkit.core.tensor import Shape
from ckptkit.core.text import Item, escape, flatten, fold, plural, shape, size

if TYPE_CHECKING:
    from ckptkit.core.text import Folded
    from ckptkit.quantized import QuantizedWeight


class Table(NamedTuple):
    """A table of escaped strings. `right` contains the headers of right-aligned columns.

    `total` is the number of items in the table. One row can represent several items.
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    total: int = 0

    def without_empty(self) -> Table:
        """Return the table without the columns that are empty in every row."""
        used = [n for n in range(len(self.headers)) if any(row[n] for row in self.rows)]
        if len(used) == len(self.headers):
            return self
        headers = tuple(self.headers[n] for n in used)
        return self._replace(
            headers=headers, rows=[tuple([row[n] for n in used]) for row in self.rows]
        )


class Fact(NamedTuple):
    """A fact about a tensor, such as its dtype.

    - `value` returns the value. Tables fold rows only if the values of all facts are equal.
    - `text` formats the value. If the result is an empty string, the fact is not printed.
    - `json` returns the value for JSON. If `json` is None, JSON does not contain the fact.
    - `phrase` is the format of the fact in the tree view, such as ``on {}``.
    - `brief` is false for a fact that only JSON and the details of a single tensor contain.
    """

    name: str
    title: str
    value: Callable[[TensorRow], Hashable]
    text: Callable[[Any], str] = str
    json: Callable[[TensorRow], Any] | None = None
    phrase: str = ""
    brief: bool = True


def remark(row: TensorRow) -> str:
    """Return a remark on a tensor that shares memory, or that is sharded, quantized or not dense.
    For all other tensors, return an empty string."""
    tensor, group = row.tensor, row.group
    if row.local is not None:
        from ckptkit.formats.distributed.parts import extent

        local = " and ".join(shape(each.shape) for each in row.local.local()) or "nothing"
        place = extent(row.local)
        return f"this rank has {local}" + (f": {place}" if place else "")
    is_part = group is not None and (group.reason or group.label != tensor.dtype.name)
    if group is not None and is_part and not row.is_logical:
        return f"{group.label}, not dequantized" if group.reason else f"part of {group.label}"
    if group is not None or _is_plain(row):
        return ""
    found = []
    if tensor.layout != "strided":
        below = f" of {plural(len(row.inside), 'tensor')} below" if row.inside else ""
        found.append(tensor.layout + below)
    if tensor.kind == "ndarray":
        found.append("numpy")
    if row.is_shared:
        found.append(f"shares storage {row.storage}")
    whole = 0 if tensor.storage is None else tensor.storage.nbytes
    if tensor.layout == "strided" and whole > row.nbytes:
        found.append(f"view of {size(whole)}")
    if tensor.conj or tensor.neg:
        found.append("conjugated" if tensor.conj else "negated")
    return ", ".join(found)


def _is_plain(row: TensorRow) -> bool:
    """Return True for a dense tensor that fills its own storage, and is neither sharded nor
    quantized.

    In most files, the result is True for almost all tensors.
    """
    _, _, tensor, _, nbytes, local, _, group, is_shared = row
    storage = tensor.storage
    return (
        storage is not None
        and storage.record.length == nbytes
        and local is None
        and group is None
        and not is_shared
        and tensor.kind != "ndarray"
        and tensor.layout == "strided"
        and not (tensor.conj or tensor.neg)
    )


def quantization(group: QuantizedWeight) -> dict[str, Any]:
    """Return the object QUANTIZATION of the JSON schema for a quantized weight."""
    names = ("family", "label", "shape", "parts", "dropped")
    facts = {name: getattr(group, name) for name in names}
    return {"weight": group.name, **facts, "reason": group.reason or None}


SIZE = Fact("nbytes", "size", lambda row: row.nbytes, size, lambda row: number(row.nbytes))


def _attribute(name: str, usual: object = None, text: Callable[[Any], str] = str) -> Fact:
    """Return a fact about the attribute `name` of tensors. The details of a tensor do not show the
    value `usual`."""

    def value(row: TensorRow) -> Any:
        found = getattr(row.tensor, name)
        return "" if found == usual else found

    title = "" if usual is None else name
    return Fact(name, title, value, text, attrgetter(f"tensor.{name}"), brief=False)


def _only_json(name: str, json: Callable[[TensorRow], Any]) -> Fact:
    return Fact(name, "", lambda row: None, json=json, brief=False)


FACTS: tuple[Fact, ...] = (
    Fact("dtype", "dtype", lambda row: row.dtype, escape, lambda row: row.tensor.dtype.name, "{}"),
    Fact("shape", "shape", lambda row: row.tensor.shape, shape, lambda row: row.tensor.shape, "{}"),
    Fact("elements", "elements", lambda row: f"{min(row.tensor.numel, 1 << 63):,}", brief=False),
    SIZE,
    Fact("device", "device", lambda row: row.device, escape, lambda row: row.device, "on {}"),
    Fact("remark", "", remark),
    # Only JSON and the details of a single tensor contain the following facts.
    Fact("stride", "stride", lambda row: None if row.tensor.is_contiguous else row.tensor.stride,
         lambda stride: "" if stride is None else shape(stride), lambda row: row.tensor.stride,
         brief=False),
    _attribute("offset", 0, lambda offset: f"{offset:,}" if offset else ""),
    Fact("storage", "storage", lambda row: row.storage,
         lambda number: "" if number is None else str(number), lambda row: row.storage,
         brief=False),
    _attribute("requires_grad"),
    _attribute("kind", "tensor"),
    _attribute("layout", "strided"),
    _only_json("local_shapes", lambda row: row.local and [t.shape for t in row.local.local()]),
    _only_json("quantization", lambda row: row.group and quantization(row.group)),
)  # fmt: skip
BRIEF = tuple(fact for fact in FACTS if fact.brief)
_FOLDED = tuple(fact for fact in BRIEF if fact is not SIZE)
_PHRASED = tuple(fact for fact in FACTS if fact.phrase)
_JSON = tuple((fact.name, fact.json) for fact in FACTS if fact.json is not None)


def as_json(row: TensorRow) -> dict[str, Any]:
    """Return the object TENSOR of the JSON schema."""
    found = {"name": row.name, "path": row.place, "keys": key_list(row.path)}
    for name, json in _JSON:
        found[name] = json(row)
    return found


def sentence(row: TensorRow) -> str:
    """Return a short description of the tensor: ``float32 [2, 3] on cpu``."""
    return " ".join([fact.phrase.format(fact.text(fact.value(row))) for fact in _PHRASED])


def details(row: TensorRow) -> list[tuple[str, str]]:
    """Return (title, string) for every fact whose string is not empty."""
    found = [(fact.title or fact.name, fact) for fact in FACTS if fact.title or fact.brief]
    texts = [(title, fact.text(fact.value(row))) for title, fact in found]
    return [(title, text) for title, text in texts if text]


def brief(row: TensorRow) -> dict[str, str]:
    """Return the names and formatted values of the facts in tables."""
    return {fact.name: fact.text(fact.value(row)) for fact in BRIEF}


def tables(
    rows: Iterable[TensorRow],
    *,
    flat: bool = False,
    sort: str = "file",
    among: Sequence[TensorRow] = (),
) -> Iterator[Table]:
    """Yield the table of the weights and the table of all other tensors. Do not yield an empty
    table.

    If `flat` is false, tensors are folded into one row if their names differ only in an index and
    their modules have the same structure. `among` contains all tensors of the checkpoint, and
    `rows` contains the tensors to show.
    """
    from ckptkit.core.text import fold, unfolded

    rows = list(rows)
    weights = [row for row in rows if row.name is not None]
    others = [row for row in rows if row.name is None] if len(weights) < len(rows) else []
    parts = {"": weights, "other tensors": others} if weights else {"": others}
    items = flatten(_items(part, title) for title, part in parts.items())
    if flat:
        folded = unfolded(items)
    else:
        # Two modules have the same structure if their tensors have equal names, dtypes and numbers
        # of dimensions. This comparison includes tensors that are not shown.
        shown = set(map(id, rows)) if len(rows) != len(among) else set()
        hidden = [row for row in among if id(row) not in shown] if shown else []
        folded = fold(
            chain(items, _items(hidden, None)), lambda columns: (columns[0], len(columns[1]))
        )
    for title, part in parts.items():
        if part:
            found = [row for row in folded if row.columns[-1] == title]
            yield _table(title, found, len(part), sort)


def _items(
    rows: Iterable[TensorRow], title: str | None
) -> Iterator[tuple[str, tuple[Hashable, ...], int]]:
    """Yield (name, values of its facts, number of bytes) for each tensor.

    Tensors whose facts have equal values can be folded into one row.
    """
    known: dict[tuple[str, Shape, str], tuple[Hashable, ...]] = {}
    for row in rows:
        name, _, tensor, _, nbytes, *_ = row
        # The values of a plain tensor depend only on dtype, shape and device. Most tensors have one
        # of a few combinations, so the values of each combination are cached.
        kind = (tensor.dtype.name, tensor.shape, tensor.device) if _is_plain(row) else None
        columns = None if kind is None else known.get(kind)
        if columns is None:
            columns = (*[fact.value(row) for fact in _FOLDED], title)
            if kind is not None:
                known[kind] = columns
        yield row.place if name is None else name, columns, nbytes


def _table(title: str, found: list[Folded], count: int, sort: str) -> Table:
    if sort == "size":
        found.sort(key=lambda row: -row.nbytes)
    elif sort == "name":
        found.sort(key=lambda row: row.label)
    headers: list[str] = ["name"]
    for fact in BRIEF:
        headers += ["tensors", fact.title] if fact is SIZE else [fact.title]
    rows = []
    for row in found:
        values = iter(row.columns)
        cells = [escape(row.label) or "(root)"]
        for fact in BRIEF:
            if fact is SIZE:
                cells += [f"{row.rows:,}" if row.rows > 1 else "", size(row.nbytes)]
            else:
                cells.append(fact.text(next(values)))
        rows.append(tuple(cells))
    return Table(title, tuple(headers), rows, ("tensors", SIZE.title), count).without_empty()


_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")  # a number between dots, as in `fold`


def fold_pairs(
    pairs: Iterable[tuple[str, str, Hashable]],
    rows_of: Callable[[list[Item]], list[Folded]] = fold,
) -> list[tuple[Folded, Folded]]:
    """Fold pairs of names into rows.

    A pair is (name, other name, value). Two pairs are folded if they differ only in indices, and if
    the index in the other name minus the index in the name is the same for both pairs. For example,
    (a.0, b.1) and (a.1, b.2) are folded. Return a list of (row for the names, row for the other
    names). To get one row for each pair, pass `unfolded` as `rows_of`.
    """
    sides: tuple[list[Item], list[Item]] = [], []
    for name, other, value in pairs:
        ours, theirs = _INDEX.split(name), _INDEX.split(other)
        if len(ours) != len(theirs):
            theirs = [other]  # a pair with unequal numbers of indices is never folded
        steps = tuple([int(b) - int(a) for a, b in zip(ours[1::2], theirs[1::2], strict=False)])
        columns = tuple(ours[::2]), tuple(theirs[::2]), steps, value
        sides[0].append(Item(name, columns, 0))
        sides[1].append(Item(other, columns, 0))
    return list(zip(*map(rows_of, sides), strict=True))
