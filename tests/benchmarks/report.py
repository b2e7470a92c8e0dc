"""The figures as tables, in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from tests.benchmarks.results import CP, OURS, Row
from tests.benchmarks.works import JUDGED

VERDICTS = {True: "yes", False: "NO", None: ""}  # nothing was held against a budget


def report(machine: Mapping[str, Any], rows: Sequence[Row], notes: Iterable[str] = ()) -> str:
    """Machine, table of works, and who did not take part."""
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    works = [
        [
            row.label, _cost(row, OURS), _budget(row), VERDICTS[row.within],
            f"{row.torch}: {_cost(row, row.torch)}" if row.torch else "",
            "; ".join(f"{name}: {_cost(row, name)}" for name in _others(row)),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["work", "ckptkit", "budget", "within", "torch", "others"]
    parts = [about, tabulate(works, headers=heads, tablefmt="github")]
    said = list(notes)
    for row in rows:
        said += [f"{name} was skipped: {why}" for name, why in row.skipped.items()]
        said += [
            f"{row.label}: {name} failed: {_why(each.failed)}"
            for name, each in row.taken.items()
            if each.failed
        ]
    parts.append("\n".join(f"- {note}" for note in dict.fromkeys(said)))
    return "\n\n".join(part for part in parts if part)


def brief(rows: Sequence[Row], works: Sequence[str] = ()) -> str:
    """Return a table for users: ckptkit beside the fastest alternative, `cp` aside."""
    shown = []
    for row in rows:
        if works and (row.work not in works or row.gib < JUDGED):
            continue
        times = [
            (seconds, name)
            for name in row.taken
            if name not in (OURS, CP) and (seconds := row.seconds(name)) is not None
        ]
        best = min(times)[1] if times else ""
        shown.append([row.label, _cost(row, OURS), f"{best}: {_cost(row, best)}" if best else ""])
    heads = ["work", "ckptkit", "fastest alternative"]
    return tabulate(shown, headers=heads, tablefmt="github")


def kept(rows: Sequence[Row]) -> bool:
    """Return whether every budget was kept."""
    return all(row.within is not False for row in rows)


def short(row: Row) -> str:
    """One line, while measuring."""
    return f"{row.label}: {_cost(row, OURS)} {VERDICTS[row.within]}".rstrip()


def _cost(row: Row, name: str) -> str:
    """Median, in seconds or against torch or cp, and the largest peak memory."""
    peak = row.mib(name)
    if peak is None:
        return "failed"
    if name == OURS and row.budget.to_torch is not None:
        value, unit = row.ratio(name, row.torch or CP), "x torch"
    elif row.in_seconds:
        value, unit = row.seconds(name), "s"
    else:
        value, unit = row.ratio(name), "x cp"
    return f"failed, {peak:.0f} MiB" if value is None else f"{value:.2f} {unit}, {peak:.0f} MiB"


def _others(row: Row) -> list[str]:
    """Return the other contestants, `cp` only where the row is not in its measure."""
    told = {OURS, row.torch, *(() if row.in_seconds else (CP,))}
    return [name for name in row.taken if name not in told]


def _budget(row: Row) -> str:
    budget, judged = row.budget, row.gib >= JUDGED
    limits = [
        (budget.seconds, "s"), (budget.to_cp if judged else None, "x cp"),
        (budget.to_torch if judged else None, "x torch"), (budget.mib, "MiB"),
    ]  # fmt: skip
    return ", ".join(f"{limit:g} {unit}" for limit, unit in limits if limit)


def _why(said: str) -> str:
    """The line of an error that says what it is: the last one, hints aside."""
    return [line for line in said.splitlines() if not line.startswith("hint:")][-1]
