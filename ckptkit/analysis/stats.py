"""Compute statistics of the values of each tensor, of groups of tensors, and of all tensors.

Each tensor is read once. The memory usage does not depend on the size of the tensors.

NaN and infinities are counted. All other statistics ignore NaN and infinities. Tied tensors are
read once, and count once in groups and totals. Floats, integers, bools and complex numbers have
separate groups and totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ckptkit.analysis import summary
from ckptkit.compute import tallies, workers
from ckptkit.compute.tallies import ElementRange, Tally
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, TensorError
from ckptkit.core.plan import sources
from ckptkit.core.tensor import Shape
from ckptkit.core.text import Modules, family, flatten, ranges

Key = tuple[object, ...]


@dataclass(slots=True)
class TensorStats:
    """The statistics of one tensor, or of a group of tensors.

    `tensors` is the number of tensors. For a group, `shape` and `source` are None.
    """

    label: str
    kind: str
    dtypes: tuple[str, ...]
    shape: Shape | None = None
    tensors: int = 1
    tally: Tally = field(default_factory=Tally)
    source: summary.TensorRow | None = None

    def add(self, other: TensorStats) -> None:
        """Add the statistics of `other` to the group."""
        self.dtypes = tuple(dict.fromkeys((*self.dtypes, *other.dtypes)))
        self.tensors += other.tensors
        self.tally.add(other.tally)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A tensor whose statistics cannot be computed, and the reason."""

    name: str
    dtype: str
    why: str


def modules(checkpoint: Checkpoint) -> Modules:
    """Return the structure of the modules of a checkpoint."""
    rows = summary.summarize(checkpoint).rows
    return Modules((row.label, (row.dtype, len(row.tensor.shape))) for row in rows)


def depth(parts: int) -> Callable[[str], str]:
    """Return a function that returns the first `parts` path components of a name."""
    return lambda name: ".".join(name.split(".")[:parts])


@dataclass(slots=True)
class Statistics:
    """The statistics of tensors, of groups and of all tensors.

    - `rows`: the statistics of each tensor, in the order of the tensors
    - `totals`: the statistics of all float tensors, all int tensors, and so on; `label` is empty
    - `skipped`: tensors without statistics
    - `groups`: the statistics of each group, in the order of the first tensors
    - `grouped`: True if a function `label` was given
    """

    rows: list[TensorStats] = field(default_factory=list)
    totals: list[TensorStats] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    groups: list[TensorStats] = field(default_factory=list)
    grouped: bool = False

    @property
    def odd(self) -> list[TensorStats]:
        """The tensors with NaN or infinities."""
        return [row for row in self.rows if row.tally.nan or row.tally.infinite]


def statistics(
    sources: Sequence[summary.TensorRow],
    label: Callable[[str], str] | None = None,
    modules: Modules | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    fork: bool = False,
) -> Statistics:
    """Compute the statistics of tensors, and of groups of tensors with the same `label`.

    In two cases, the label of a group is the range of its names, such as
    ``layers.{0..11}.weight``:

    - The function `label` is `family`.
    - Modules with different structures have the same label.

    `statistics` calls `progress` with the number of bytes read. If `fork` is true, `statistics` may
    fork worker processes. Raises CkptkitError if a tensor cannot be read.
    """
    # Tied tensors have equal keys.
    keys: list[Key] = [
        (number,) if row.tensor.storage is None else row.tensor.elements_key
        for number, row in enumerate(sources)
    ]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    numbers = sorted(first.values())
    tallies = _tallies([(number, sources[number]) for number in numbers], progress, fork)
    known = dict(zip(numbers, tallies, strict=True))
    found = Statistics(grouped=label is not None)
    totals, groups = dict[str, TensorStats](), dict[Key, TensorStats]()
    members: defaultdict[Key, list[str]] = defaultdict(list)
    seen: set[tuple[str, Key]] = set()
    for number, (source, key) in enumerate(zip(sources, keys, strict=True)):
        tally, name, dtype = known[first[key]], source.label, source.tensor.dtype
        if isinstance(tally, str):
            found.skipped.append(Skipped(name, dtype.name, tally))
            continue
        row = TensorStats(name, dtype.kind, (dtype.name,), source.tensor.shape, 1, tally, source)
        found.rows.append(row)
        if first[key] == number:
            totals.setdefault(dtype.kind, TensorStats("", dtype.kind, (), None, 0)).add(row)
        own = None if label is None else label(name)
        if own is not None and (own, key) not in seen:
            seen.add((own, key))
            group = (own, dtype.kind, None if modules is None else modules(name))
            members[group].append(name)
            groups.setdefault(group, TensorStats(own, dtype.kind, (), None, 0)).add(row)
    found.totals = list(totals.values())
    found.groups = list(groups.values())
    times = Counter((each.label, each.kind) for each in found.groups)
    for key, each in groups.items():
        if label is family or times[each.label, each.kind] > 1:
            each.label = ranges(members[key])
    return found


Task = tuple[int, summary.TensorRow, ElementRange | str | None]
Result = tuple[int, Tally | str, int]


def _tallies(
    rows: list[tuple[int, summary.TensorRow]], progress: Callable[[int], None], fork: bool
) -> Iterator[Tally | str]:
    """Yield the statistics of each tensor, or the reason why a tensor has no statistics."""
    tasks = list(_tasks(rows)) if fork else []
    places = [part.extent for _, _, part in tasks if isinstance(part, ElementRange)]
    if workers.should_fork(sum(map(_nbytes, tasks)), sources(places)):
        found = _by_forks(tasks)
    else:
        found = workers.ordered(_work, tasks or _tasks(rows), _nbytes)
    for _, same in groupby(found, key=lambda result: result[0]):
        whole: Tally | str = Tally()
        for _, tally, nbytes in same:
            if isinstance(tally, str) or isinstance(whole, str):
                whole = tally
            else:
                whole.add(tally)
                progress(nbytes)
        yield whole


def _nbytes(task: Task) -> int:
    return task[2].nbytes if isinstance(task[2], ElementRange) else 0


def _tasks(rows: list[tuple[int, summary.TensorRow]]) -> Iterator[Task]:
    """Yield (number, row, part) for each part of each tensor.

    For an empty tensor, the part is None. If a tensor cannot be read as numbers, the part is a
    string with the reason.
    """
    for number, row in rows:
        try:
            parts = list(tallies.parts(row.tensor))
        except TensorError as error:
            yield number, row, error.message
            continue
        for part in parts or (None,):
            yield number, row, part


def _work(task: Task) -> Result:
    number, row, part = task
    if part is None or isinstance(part, str):
        return number, Tally() if part is None else part, 0
    try:
        return number, tallies.tally(part), part.nbytes
    except CkptkitError as error:
        error.message = f"{row.label}: {error.message}"
        raise


def _by_forks(tasks: Sequence[Task]) -> Iterator[Result]:
    """Yield the results of `_work` in the order of the tasks. Forked processes compute the results.

    Threads would not be faster, because `_work` holds the GIL most of the time.
    """
    some = list(workers.batches(tasks, _nbytes))

    def call(number: int) -> list[Any]:
        results = map(_work, some[number])
        return [(n, t if isinstance(t, str) else t.to_json(), size) for n, t, size in results]

    processes = min(workers.THREADS, workers.processors())
    with closing(workers.results(call, len(some), processes)) as answers:
        for number, tally, nbytes in flatten(workers.in_order(answers)):
            yield number, tally if isinstance(tally, str) else Tally.from_json(tally), nbytes


def chosen(
    checkpoint: Checkpoint, globs: Sequence[str], everything: bool = False
) -> list[summary.TensorRow]:
    """Return the weights whose names match the globs.

    With `everything`, or if the checkpoint has no weights, return all tensors that match the globs.
    """
    rows = summary.summarize(checkpoint).rows
    weights = [] if everything else [row for row in rows if row.name is not None]
    return summary.matching(weights or rows, globs)
