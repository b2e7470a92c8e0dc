"""The figures as tables, in markdown: those of several runs beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tabulate import tabulate

from tests.benchmarks.results import CP, OURS, Growth, Row, growths
from tests.benchmarks.works import JUDGED

Run = Sequence[Row]


def report(machine: Mapping[str, Any], runs: Sequence[Run], notes: Iterable[str] = ()) -> str:
    """Machine, table of works, table of growth, and who did not take part."""
    rows = _beside(runs, lambda run: [(row.key, row) for row in run])
    inside, outside = ([each for each in rows if bool(each[0].place) is at] for at in (False, True))
    grown = _beside(runs, lambda run: [(each.label, each) for each in growths(run)])
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    works = tabulate(
        [_work(each) for each in inside],
        headers=["work", "ckptkit", "budget", "within", "torch", "others"], tablefmt="github",
    )  # fmt: skip
    places = tabulate(
        [_place(each) for each in outside],
        headers=["work", "ckptkit", "cp", "budget", "within"],
        tablefmt="github",
    )
    growth = tabulate(
        [_growth(each) for each in grown],
        headers=["growth", "ckptkit", "budget", "within", "cp"],
        tablefmt="github",
    )
    parts = [
        f"{about}; runs: {len(runs)}",
        works,
        places if outside else "",
        growth if grown else "",
        _notes(runs, notes),
    ]
    return "\n\n".join(part for part in parts if part)


def brief(runs: Sequence[Run], works: Sequence[str] = ()) -> str:
    """Return a table for users: ckptkit beside the best of the others, `cp` aside."""
    rows = _beside(runs, lambda run: [(row.key, row) for row in run])
    return tabulate(
        [
            [each[0].label, _cost(each, OURS), _best(each)]
            for each in rows
            if not each[0].place and (not works or (each[0].work in works and each[0].gib >= JUDGED))
        ],
        headers=["work", "ckptkit", "best of the others"], tablefmt="github",
    )  # fmt: skip


def _best(rows: Sequence[Row]) -> str:
    """Return the name and cost of whoever took the least time, `cp` and ckptkit aside."""
    times = [
        (seconds, name)
        for row in rows
        for name in row.taken
        if name not in (OURS, CP) and (seconds := row.seconds(name)) is not None
    ]
    if not times:
        return ""
    best = min(times)[1]
    return f"{best}: {_cost(rows, best)}"


def kept(runs: Sequence[Run]) -> bool:
    """Return whether every budget was kept, in every run."""
    return not any(row.within is False for run in runs for row in run) and all(
        growth.within for run in runs for growth in growths(run)
    )


def _beside(runs: Sequence[Run], rows: Callable[[Run], list[tuple[Any, Any]]]) -> list[list[Any]]:
    """Return what has one key in all runs, in the order of the first run that has it."""
    found: dict[Any, list[Any]] = {}
    for run in runs:
        for key, row in rows(run):
            found.setdefault(key, []).append(row)
    return list(found.values())


def _work(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    return [
        first.label,
        _cost(rows, OURS, best=True),
        _budget(first),
        verdict([row.within for row in rows]) + _stretch(rows),
        f"{first.torch}: {_cost(rows, first.torch)}" if first.torch else "",
        "; ".join(f"{name}: {_cost(rows, name)}" for name in _others(rows)),
    ]


def _place(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    return [
        first.label,
        f"{_cost(rows, OURS, best=True)}, {_disk(rows, OURS)}",
        f"{_joined([row.seconds(CP) for row in rows], ' s')}, {_disk(rows, CP)}",
        _budget(first),
        verdict([row.within for row in rows]),
    ]


def _disk(rows: Sequence[Row], name: str) -> str:
    found = [disk for row in rows if (disk := row.disk(name)) is not None]
    return f"{max(found, default=0):.1f} MiB of disk"


def _cost(rows: Sequence[Row], name: str, best: bool = False) -> str:
    """Medians of the runs, in seconds or against cp, best against best in brackets; the largest
    peak memory."""
    peaks = [peak for row in rows if (peak := row.mib(name)) is not None]
    if not peaks:
        return "failed"
    absent = [name not in row.taken for row in rows]
    if best and rows[0].budget.to_torch is not None:
        time = _joined([row.ratio(name, row.torch or CP) for row in rows], " x torch", absent)
    elif rows[0].in_seconds:
        time = _joined([row.seconds(name) for row in rows], " s", absent)
    else:
        unit = f" ({_joined([row.best(name) for row in rows], '', absent)}) x cp"
        time = _joined([row.ratio(name) for row in rows], unit if best else " x cp", absent)
    return f"{time}, {max(peaks):.0f} MiB"


def _joined(values: Sequence[float | None], unit: str, absent: Sequence[bool] = ()) -> str:
    """Figures of runs; `absent` says in which of them there was none to be expected."""
    missing = ["-" if each else "failed" for each in absent] or ["failed"] * len(values)
    said = [
        each if value is None else f"{value:.2f}"
        for value, each in zip(values, missing, strict=True)
    ]
    return " / ".join(said) + unit


def _others(rows: Sequence[Row]) -> list[str]:
    """Return the other contestants of all runs, `cp` only where the row is not in its measure."""
    told = {OURS, rows[0].torch, *(() if rows[0].in_seconds else (CP,))}
    return [name for name in dict.fromkeys(chain(*(row.taken for row in rows))) if name not in told]


def _budget(row: Row) -> str:
    budget = row.budget
    said = [f"{budget.seconds:g} s"] if budget.seconds else []
    said += [f"{budget.to_cp:g} x cp"] if budget.to_cp and row.gib >= JUDGED else []
    said += [f"{budget.to_torch:g} x torch"] if budget.to_torch and row.gib >= JUDGED else []
    said += [f"{budget.mib} MiB"] if budget.mib else []
    return ", ".join([*said, *([f"{budget.disk} MiB of disk"] if budget.disk else [])])


def _stretch(rows: Sequence[Row]) -> str:
    stretch = rows[0].budget.stretch
    if stretch is None:
        return ""
    met = all((row.seconds() or stretch + 1) <= stretch for row in rows)
    return f" ({stretch:g} s too)" if met else f" ({stretch:g} s not)"


def verdict(kept: Sequence[bool | None]) -> str:
    """yes, NO, in how many runs not, or nothing where nothing was held against a budget."""
    missed = [each for each in kept if each is False]
    if missed:
        return "NO" if len(missed) == len(kept) else f"NO in {len(missed)} of {len(kept)}"
    return "yes" if True in kept else ""


def _growth(grown: Sequence[Growth]) -> list[str]:
    first = grown[0]
    unit = f" {first.unit}"
    cps = [each.cp for each in grown if each.cp is not None]
    return [
        first.label,
        _joined([each.value for each in grown], unit),
        f"{first.limit:.1f}{unit}" if first.limit % 1 else f"{first.limit:.0f}{unit}",
        verdict([each.within for each in grown]),
        _joined(cps, unit) if cps else "",
    ]


def _notes(runs: Sequence[Run], notes: Iterable[str]) -> str:
    """Return the skipped and the failed, each reason once."""
    found = list(notes)
    for row in (row for run in runs for row in run):
        found += [f"{name} was skipped: {why}" for name, why in row.skipped.items()]
        found += [
            f"{row.label}: {name} failed: {_why(t.failed)}"
            for name, t in row.taken.items()
            if t.failed
        ]
    return "\n".join(f"- {note}" for note in dict.fromkeys(found))


def _why(said: str) -> str:
    """The line of an error that says what it is: the last one, hints aside."""
    return [line for line in said.splitlines() if not line.startswith("hint:")][-1]


def short(row: Row) -> str:
    """One line, while measuring."""
    ours = _cost([row], OURS)
    return f"{row.label}: {ours} {verdict([row.within])}".rstrip()
