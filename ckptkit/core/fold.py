"""Folding of rows that differ only in an index: ``layers.{0..31}.attn.weight``.

An index is a part between dots that is a number. Each folded row represents exactly the rows that
its ranges spell out: folding goes over one index after the other, last first, and joins only rows
that are equal in all else.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ckptkit.core.text import some

_INDEX = r"(0|[1-9][0-9]{0,17})"
_split = re.compile(rf"(?<![^.]){_INDEX}(?![^.])").split
_last_index = re.compile(rf"((?:.*\.)?){_INDEX}((?:\..*)?)", re.DOTALL).fullmatch
COUNTERS = ("num_batches_tracked", "step")
RUNS = 8  # runs of numbers that are spelled out between braces

Indices = tuple[tuple[int, ...], ...]  # for each index in a name, the values that it takes


class Item(NamedTuple):
    label: str
    columns: Hashable  # what must be equal
    nbytes: int


class Folded(NamedTuple):
    label: str
    columns: Any  # Hashable
    nbytes: int  # of all
    rows: int


_Block = tuple[int, Indices, int, int]  # joined rows: position of the first, indices, bytes, number


class Modules:
    """The kinds of modules, by what each holds directly: a linear layer is no batch norm.

    `tensors` are names with dtype and number of dimensions, of the whole checkpoint, each once. A
    kind is the sum of the hashes of its parts: a set for each module would take more memory than
    the tensors.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, int]] = ()) -> None:
        self._kinds = kinds = dict[str, int]()
        for name, dtype, dimensions in tensors:
            module, _, last = name.rpartition(".")
            if not last.isdecimal():  # the items of a list are no parts of a module
                kinds[module] = kinds.get(module, 0) + hash((last, dtype, dimensions))

    def __call__(self, name: str) -> int | None:
        """Return the kind of the module that a tensor is in; None for one in a list, or a counter.

        Counters of training (steps, batches) are alike in modules of all kinds.
        """
        module, _, last = name.rpartition(".")
        return None if last in COUNTERS else self._kinds.get(module)


def fold(
    items: Iterable[Item | tuple[str, Hashable, int]],
    part: Callable[[Any], Hashable] | None = None,
) -> list[Folded]:
    """Join rows that differ only in an index, each at the place of the first that it represents.

    With `part`, rows are joined only if their modules are of one kind, as `Modules` tells; it
    returns what the columns of a tensor say about that. The items are then all tensors.
    """
    found, runs = _runs(items)
    known = {} if part is None else _kinds(runs, part)
    groups: defaultdict[_Family, list[_Block]] = defaultdict(list)
    for (before, after, columns, nbytes), run in runs.items():
        parts = _split(before)
        texts, others = (*parts[::2], after), [(int(index),) for index in parts[1::2]]
        for kind, rows in _by_kind(run, before, after, known):
            last = tuple(rows[1::2])
            block = rows[0], (*others, last), nbytes * len(last), len(last)
            groups[texts, columns, kind].append(block)
    for (texts, columns, _), blocks in groups.items():
        for first, indices, nbytes, count in _joined(blocks, len(texts) - 1):
            found.append((first, Folded(_label(texts, indices), columns, nbytes, count)))
    return [row for _, row in sorted(found)]


# Rows that agree in all but their last index: position and index of one after the other. Little
# for each, since there may be a million.
_Run: TypeAlias = "array[int]"
_new_run = partial(array, "q")
# By the texts before and after the last index, what must be equal, and the bytes of each row.
_Runs = dict[tuple[str, str, Hashable, int], _Run]
_Family = tuple[tuple[str, ...], Hashable, "int | None"]
_Place = tuple[str, str]  # of modules: the texts in their paths before and after the last index
_NOWHERE = (("", "?"), "")  # of rows that are in no module with an index
_Kinds = dict[_Place, "int | dict[int, int]"]  # the kind of all modules there, or by index


def _runs(
    items: Iterable[Item | tuple[str, Hashable, int]],
) -> tuple[list[tuple[int, Folded]], _Runs]:
    """Return the rows without an index, with their positions, and runs of the others."""
    found: list[tuple[int, Folded]] = []
    runs: _Runs = defaultdict(_new_run)
    for position, (label, columns, nbytes) in enumerate(items):
        if (last := _last_index(label)) is None:
            found.append((position, Folded(label, columns, nbytes, 1)))
            continue
        before, index, after = last.groups()
        run = runs[before, after, columns, nbytes]
        run.append(position)
        run.append(int(index))
    return found, runs


def _kinds(runs: _Runs, part: Callable[[Any], Hashable]) -> _Kinds:
    """Return the kinds of the modules that have an index in their path.

    Rows in modules without one are never joined: their kinds do not matter.
    """
    modules: defaultdict[_Place, list[tuple[_Run, int]]] = defaultdict(list)
    asked: set[_Place] = set()  # by the items of lists, which are no parts of a module
    for (before, after, columns, _), run in runs.items():
        module, dot, last = after.rpartition(".")
        if dot and not last.isdecimal():
            modules[before, module].append((run, hash((last, part(columns)))))
        else:
            asked.add(_module(before, after)[0])
    return {place: _sums(parts, place in asked) for place, parts in modules.items()}


def _sums(parts: list[tuple[_Run, int]], is_asked: bool) -> int | dict[int, int]:
    """Return the kind of the modules that have these parts, or the kinds by index.

    One is enough if all have every part once, and nothing but their parts asks for it.
    """
    indices = parts[0][0][1::2]
    are_same = len({*indices}) == len(indices) and all(run[1::2] == indices for run, _ in parts)
    if are_same and not is_asked:
        return sum([part for _, part in parts])
    found: defaultdict[int, int] = defaultdict(int)
    for run, part in parts:
        for index in run[1::2]:
            found[index] += part
    return found


def _module(before: str, after: str) -> tuple[_Place, str]:
    """Return the place of the modules of a run, and the index of the module that all are in.

    The index is empty if each row is in another module. Items of a list are all in one, whose path
    may have an index itself.
    """
    if after:
        return (before, after.rpartition(".")[0]), ""
    last = _last_index(before.removesuffix("."))
    return ((last[1], last[3]), last[2]) if last else _NOWHERE


def _by_kind(
    run: _Run, before: str, after: str, known: _Kinds
) -> Iterable[tuple[int | None, _Run]]:
    """Return the rows of a run, by the kinds of their modules.

    That is None for rows in no module, and for counters, which are alike in modules of all kinds.
    """
    place, index = _module(before, after) if known else _NOWHERE
    kinds = None if after.rpartition(".")[2] in COUNTERS else known.get(place)
    if not isinstance(kinds, dict):
        return ((kinds, run),)
    if index:
        return ((kinds.get(int(index)), run),)
    found: defaultdict[int | None, _Run] = defaultdict(_new_run)
    for position, value in zip(run[::2], run[1::2], strict=True):
        found[kinds.get(value)].extend((position, value))
    return found.items()


def family(name: str) -> str:
    """Return the label of names that differ in indices alone: ``layers.*.weight``."""
    return "*".join(_split(name)[::2])


def ranges(names: Iterable[str]) -> str:
    """Return the label of names that differ in indices alone, as ``{0,2}.weight``."""
    return some([row.label for row in fold(Item(name, (), 0) for name in names)])


def unfolded(items: Iterable[Item | tuple[str, Hashable, int]]) -> list[Folded]:
    """Return the same rows, unjoined."""
    return [Folded(label, columns, nbytes, 1) for label, columns, nbytes in items]


def _joined(blocks: list[_Block], dimensions: int) -> Iterable[_Block]:
    for dimension in reversed(range(dimensions)):
        if len(blocks) > 1:
            blocks = list(_along(blocks, dimension))
    return blocks


def _along(blocks: list[_Block], dimension: int) -> Iterator[_Block]:
    """Join blocks that agree in every index but one."""
    together: defaultdict[Indices, list[_Block]] = defaultdict(list)
    for block in blocks:
        indices = block[1]
        together[indices[:dimension] + indices[dimension + 1 :]].append(block)
    for same in together.values():
        if len(same) == 1:
            yield same[0]
            continue
        first, indices = min([block[0] for block in same]), same[0][1]
        values = tuple(chain.from_iterable([block[1][dimension] for block in same]))
        nbytes, rows = sum([block[2] for block in same]), sum([block[3] for block in same])
        yield first, (*indices[:dimension], values, *indices[dimension + 1 :]), nbytes, rows


def _label(texts: tuple[str, ...], indices: Indices) -> str:
    pieces = [texts[0]]
    for values, text in zip(indices, texts[1:], strict=True):
        pieces += [_ranges(values), text]
    return "".join(pieces)


def _ranges(values: tuple[int, ...]) -> str:
    """Format numbers as ``7``, ``{0..31}``, ``{0..3,5}``; many runs are cut short."""
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return str(ordered[0])
    texts = []
    first = last = ordered[0]
    for value in (*ordered[1:], -1):  # which ends the last run
        if value != last + 1:
            texts.append(f"{first}..{last}" if last > first else str(first))
            first = value
        last = value
    if len(texts) > RUNS:
        texts[3:-1] = [".."]
    return "{" + ",".join(texts) + "}"
