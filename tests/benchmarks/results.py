"""Measurements, and what follows: medians, ratios, and whether budgets are kept.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from tests.benchmarks.measure import Cost, Taken
from tests.benchmarks.peers import TORCH
from tests.benchmarks.works import JUDGED, PLAIN, Budget

SCHEMA = "ckptkit.benchmarks/1"
OURS, CP = "ckptkit", "cp"


@dataclass(frozen=True)
class Row:
    """A work on an input, with the rounds of all runs of the suite."""

    work: str
    gib: float
    tensors: int
    budget: Budget
    taken: Mapping[str, Taken]
    skipped: Mapping[str, str]  # who did not take part, and why

    @property
    def key(self) -> tuple[str, float, int]:
        """Return the identity of the row."""
        return self.work, self.gib, self.tensors

    @property
    def label(self) -> str:
        """The work and its input, for people."""
        if self.tensors < PLAIN:
            return self.work
        many = size(self.gib) if self.tensors == PLAIN else f"{self.tensors:,} tensors"
        return f"{self.work}, {many}"

    @property
    def in_seconds(self) -> bool:
        """Return whether seconds say more than ratios to cp: without a copy, or with a small one."""
        return self.budget.seconds is not None or self.tensors != PLAIN

    def costs(self, name: str) -> list[Cost]:
        return [cost for cost in self.taken[name].costs if cost] if name in self.taken else []

    def seconds(self, name: str = OURS) -> float | None:
        """Median."""
        return median(cost.seconds for cost in found) if (found := self.costs(name)) else None

    def mib(self, name: str = OURS) -> float | None:
        """The largest peak."""
        return max(cost.mib for cost in found) if (found := self.costs(name)) else None

    def ratio(self, name: str = OURS, to: str = CP) -> float | None:
        """Median, over the rounds in which both ran, of the one's seconds to the other's."""
        if name not in self.taken or to not in self.taken:
            return None
        both = zip(self.taken[name].costs, self.taken[to].costs, strict=False)
        found = [one.seconds / other.seconds for one, other in both if one and other]
        return median(found) if found else None

    @property
    def torch(self) -> str | None:
        """The plain way with torch that took the least time."""
        ran = [(seconds, name) for name in TORCH if (seconds := self.seconds(name)) is not None]
        return min(ran)[1] if ran else None

    @property
    def within(self) -> bool | None:
        """Return whether the budget is kept, None without one. Failures keep none."""
        if not self.costs(OURS) or self.taken[OURS].failed:
            return False
        budget, judged = self.budget, self.gib >= JUDGED
        limits = [
            (self.seconds(), budget.seconds),
            (self.mib(), budget.mib),
            (self.ratio() if judged else None, budget.to_cp),
            (self.ratio(to=self.torch) if judged and self.torch else None, budget.to_torch),
        ]
        kept = [
            value <= limit for value, limit in limits if value is not None and limit is not None
        ]
        return all(kept) if kept else None

    def plus(self, other: Row) -> Row:
        """The same work with the rounds of another run as well."""
        taken = dict(self.taken)
        rounds = max(len(each.costs) for each in taken.values())
        for name, (costs, failed) in other.taken.items():
            before = taken.get(name, Taken([]))
            missing: list[Cost | None] = [None] * (rounds - len(before.costs))
            taken[name] = Taken([*before.costs, *missing, *costs], failed or before.failed)
        return replace(self, budget=other.budget, taken=taken, skipped=other.skipped)


def size(gib: float) -> str:
    """2 GiB, 64 MiB."""
    return f"{gib:g} GiB" if gib >= 1 else f"{gib * 1024:g} MiB"


def to_json(row: Row) -> dict[str, Any]:
    """All figures, as they were taken."""
    budget = {name: value for name, value in row.budget._asdict().items() if value is not None}
    taken = {name: each._asdict() for name, each in row.taken.items()}
    return {**asdict(row), "budget": budget, "within": row.within, "taken": taken}


def from_json(facts: Mapping[str, Any]) -> Row:
    """Return what `to_json` was called for."""
    taken = {
        name: Taken([cost and Cost(*cost) for cost in each["costs"]], each["failed"])
        for name, each in facts["taken"].items()
    }
    given = {name: value for name, value in facts.items() if name != "within"}
    return Row(**{**given, "budget": Budget(**facts["budget"]), "taken": taken})
