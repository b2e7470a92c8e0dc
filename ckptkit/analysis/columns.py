"""The facts about a tensor, one line for each, in the order in which every view shows them.

Tables of tensors fold rows whose names differ only in an index. To add a fact, add a line to FACTS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.analysis.summary import TensorRow, key_list, number
from ckptkit.core.tensor import Shape
from ckptkit.core.text import Item, escape, flatten, fold, plural, shape, size

if TYPE_CHECKING:
    from ckptkit.core.text import Folded
    from ckptkit.quantized import QuantizedWeight


class ViewTable(NamedTuple):
    """Rows of escaped text below headings; the columns named in `right` are right-aligned.

    `things` is the number of things in it, which may be more than the folded rows.
    """

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    things: int = 0

    def without_empty(self) -> ViewTable:
        """Return the table without the columns that are empty in every row."""
        used = [n for n in range(len(self.headers)) if any(row[n] for row in self.rows)]
        if len(used) == len(self.headers):
            return self
        headers = tuple(self.headers[n] for n in used)
        return self._replace(
            headers=headers, rows=[tuple([row[n] for n in used]) for row in self.rows]
        )


class Fact(NamedTuple):
    """A fact about a tensor.

    `value` is what people see; rows fold where all values are equal. `text` formats it; facts with
    an empty text are not shown. `json` is its JSON value, None where JSON leaves it out. `phrase`
    is how the tree says it, as ``on {}``. A fact that is not `brief` is shown only in JSON and
    where one tensor is described.
    """

    name: str
    title: str
    value: Callable[[TensorRow], Hashable]
    text: Callable[[Any], str] = str
    json: Callable[[TensorRow], Any] | None = None
    phrase: str = ""
    brief: bool = True


def remark(row: TensorRow) -> str:
    """Return a remark on a tensor that is not plain, strided and alone in its storage."""
    if row.local is not None:
        from ckptkit.core.parts import extent

        local = " and ".join(shape(each.shape) for each in row.local.local()) or "nothing"
        place = extent(row.local)
        return f"here {local}" + (f": {place}" if place else "")
    if row.group is not None:
        return "" if row.is_logical else _part(row.group)
    return "" if _is_plain(row) else ", ".join(_remarks(row))


def _part(group: QuantizedWeight) -> str:
    """Return what a tensor is a part of."""
    return f"{group.label}, not read" if group.reason else f"part of {group.label}"


def _is_plain(row: TensorRow) -> bool:
    """Return whether there is nothing to remark, as for almost all tensors."""
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


def _remarks(row: TensorRow) -> Iterable[str]:
    tensor = row.tensor
    if tensor.layout != "strided":
        below = f" of {plural(len(row.inside), 'tensor')} below" if row.inside else ""
        yield tensor.layout + below
    if tensor.kind == "ndarray":
        yield "numpy"
    if tensor.storage is not None:
        if row.is_shared:
            yield f"shares storage {row.storage}"
        if tensor.layout == "strided" and tensor.storage.nbytes > row.nbytes:
            yield f"view of {size(tensor.storage.nbytes)}"
    if tensor.conj or tensor.neg:
        yield "conjugated" if tensor.conj else "negated"


def quantization(group: QuantizedWeight) -> dict[str, Any]:
    """Return how the weight is quantized that a tensor stands for, or is a part of."""
    return {
        "weight": group.name,
        "family": group.family,
        "label": group.label,
        "shape": group.shape,
        "parts": group.parts,
        "dropped": group.dropped,
        "reason": group.reason or None,
    }


def _local_shapes(row: TensorRow) -> list[tuple[int, ...]] | None:
    return None if row.local is None else [each.shape for each in row.local.local()]


SIZE = Fact("nbytes", "size", lambda row: row.nbytes, size, lambda row: number(row.nbytes))


def _attribute(name: str, usual: object = None, text: Callable[[Any], str] = str) -> Fact:
    """Return a fact in JSON, and where one tensor is described; not shown if it is `usual`."""

    def value(row: TensorRow) -> Any:
        found = getattr(row.tensor, name)
        return "" if found == usual else found

    title = "" if usual is None else name
    return Fact(name, title, value, text, attrgetter(f"tensor.{name}"), brief=False)


FACTS: tuple[Fact, ...] = (
    Fact("dtype", "dtype", lambda row: row.dtype, escape, lambda row: row.tensor.dtype.name, "{}"),
    Fact("shape", "shape", lambda row: row.tensor.shape, shape, lambda row: row.tensor.shape, "{}"),
    Fact("elements", "elements", lambda row: f"{min(row.tensor.numel, 1 << 63):,}", brief=False),
    SIZE,
    Fact("device", "device", lambda row: row.device, escape, lambda row: row.device, "on {}"),
    Fact("remark", "", remark),
    # In JSON, and where one tensor is described:
    Fact(
        "stride",
        "stride",
        lambda row: "" if row.tensor.is_contiguous else shape(row.tensor.stride),
        json=lambda row: row.tensor.stride,
        brief=False,
    ),
    _attribute("offset", 0, lambda offset: f"{offset:,}" if offset else ""),
    Fact(
        "storage",
        "storage",
        lambda row: row.storage,
        lambda number: "" if number is None else str(number),
        lambda row: row.storage,
        brief=False,
    ),
    _attribute("requires_grad"),
    _attribute("kind", "tensor"),
    _attribute("layout", "strided"),
    Fact("local_shapes", "", lambda row: None, json=_local_shapes, brief=False),
    Fact(
        "quantization",
        "",
        lambda row: None,
        json=lambda row: None if row.group is None else quantization(row.group),
        brief=False,
    ),
)
BRIEF = tuple(fact for fact in FACTS if fact.brief)
_FOLDED = tuple(fact for fact in BRIEF if fact is not SIZE)
_PHRASED = tuple(fact for fact in FACTS if fact.phrase)
_JSON = tuple((fact.name, fact.json) for fact in FACTS if fact.json is not None)


def as_json(row: TensorRow) -> dict[str, Any]:
    """Return TENSOR of the JSON schema."""
    found = {"name": row.name, "path": row.place, "keys": key_list(row.path)}
    for name, json in _JSON:
        found[name] = json(row)
    return found


def sentence(row: TensorRow) -> str:
    """Return the tensor in a few words: ``float32 [2, 3] on cpu``."""
    return " ".join([fact.phrase.format(fact.text(fact.value(row))) for fact in _PHRASED])


def details(row: TensorRow) -> list[tuple[str, str]]:
    """Return every fact that has a text, with its title."""
    found = [(fact.title or fact.name, fact) for fact in FACTS if fact.title or fact.brief]
    texts = [(title, fact.text(fact.value(row))) for title, fact in found]
    return [(title, text) for title, text in texts if text]


def brief(row: TensorRow) -> dict[str, str]:
    """Return the texts of the facts that tables have, by name."""
    return {fact.name: fact.text(fact.value(row)) for fact in BRIEF}


def tables(
    parts: Mapping[str, Sequence[TensorRow]],
    *,
    flat: bool = False,
    sort: str = "file",
    among: Sequence[TensorRow] = (),
) -> Iterator[ViewTable]:
    """Yield the table of each of the parts that has rows; its key is the title.

    Tensors that differ only in an index are one row unless `flat`, if their modules are of one
    kind. `among` are all tensors, where the parts are selected ones.
    """
    from ckptkit.core.text import fold, unfolded

    items = flatten(_items(rows, title) for title, rows in parts.items())
    if flat:
        folded = unfolded(items)
    else:
        # Dtype and number of dimensions tell parts of modules apart, also of tensors in no part.
        others: Iterable[TensorRow] = ()
        if sum(map(len, parts.values())) != len(among):
            shown = set(map(id, flatten(parts.values())))
            others = (row for row in among if id(row) not in shown)
        folded = fold(
            chain(items, _items(others, None)), lambda columns: (columns[0], len(columns[1]))
        )
    for title, rows in parts.items():
        if rows:
            found = [row for row in folded if row.columns[-1] == title]
            yield _table(title, found, len(rows), sort)


def _items(
    rows: Iterable[TensorRow], title: str | None
) -> Iterator[tuple[str, tuple[Hashable, ...], int]]:
    """Yield the name of each tensor, what must be equal where rows fold, and its bytes."""
    known: dict[tuple[str, Shape, str], tuple[Hashable, ...]] = {}
    for row in rows:
        if not _is_plain(row):
            yield row.label, _columns(title, row), row.nbytes
            continue
        name, _, tensor, _, nbytes, *_ = row
        # Nothing else is shown of a plain one: of many, few differ in that.
        kind = tensor.dtype.name, tensor.shape, tensor.device
        columns = known.get(kind)
        if columns is None:
            columns = known[kind] = _columns(title, row)
        yield row.place if name is None else name, columns, nbytes


def _columns(title: str | None, row: TensorRow) -> tuple[Hashable, ...]:
    return (*[fact.value(row) for fact in _FOLDED], title)


def _table(title: str, found: list[Folded], count: int, sort: str) -> ViewTable:
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
    return ViewTable(title, tuple(headers), rows, ("tensors", SIZE.title), count).without_empty()


_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")  # as in fold
_RANGES = re.compile(r"\{[^}]*\}|[0-9]+")


class FoldedPair(NamedTuple):
    label: str
    other: str
    columns: Any  # Hashable
    rows: int


class _Other(NamedTuple):
    """The second name of a pair: texts between indices, and index differences to the first."""

    texts: tuple[str, ...]
    steps: tuple[int, ...]
    columns: Hashable
    first: tuple[str, ...]  # texts of the first name


def fold_pairs(pairs: Iterable[tuple[str, str, Hashable]]) -> list[FoldedPair]:
    """Fold pairs (name, other name, value) whose values are equal and whose indices run in step."""
    items = (Item(label, _other(label, other, columns), 0) for label, other, columns in pairs)
    return [
        FoldedPair(row.label, _label(row.label, row.columns), row.columns.columns, row.rows)
        for row in fold(items)
    ]


def _other(label: str, other: str, columns: Hashable) -> _Other:
    parts, others = _INDEX.split(label), _INDEX.split(other)
    if len(parts) != len(others):
        others = [other]  # nothing goes along: such pairs stand alone
    steps = tuple([int(b) - int(a) for a, b in zip(parts[1::2], others[1::2], strict=False)])
    return _Other(tuple(others[::2]), steps, columns, tuple(parts[::2]))


def _label(label: str, other: _Other) -> str:
    """Return the second label, with the index ranges that folding gave the first."""
    at, made = len(other.first[0]), other.texts[0]
    for step, ours, theirs in zip(other.steps, other.first[1:], other.texts[1:], strict=False):
        found = _RANGES.match(label, at)
        assert found is not None
        at = found.end() + len(ours)

        def moved(number: re.Match[str], step: int = step) -> str:
            return str(int(number[0]) + step)

        made += re.sub("[0-9]+", moved, found[0]) + theirs
    return made
