"""Test whether rules can be run backwards: plan the way back, and compare its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptkit.core.errors import CollisionError
from ckptkit.core.tensor import Shape
from ckptkit.rules.errors import MisfitError, NotReversibleError, RuleError, about
from ckptkit.rules.planner import Outcome, Rules
from ckptkit.rules.sizes import Config


def check_reversible(
    rules: Rules,
    shapes: Mapping[str, Shape],
    outcome: Outcome,
    *,
    keep: str | Sequence[str] = (),
    config: Config = None,
    args: Mapping[str, int] | None = None,
) -> None:
    """Raise NotReversibleError unless the reversed rules make `shapes` of the outcome again."""
    for taken in outcome.taken:
        if taken.dropped:
            message = f"drops {taken.dropped:,} elements"
            raise about(taken.number, NotReversibleError(message), " ")
    made = {
        name: shapes[name] if target is None else target.shape
        for name, target in outcome.targets.items()
    }
    back = rules.reversed()
    try:
        found = back.outcome(made, keep=keep, config=config, args=args)
    except (RuleError, MisfitError, CollisionError) as error:
        caught = _caught(outcome, back, made, args, config)
        raise caught or NotReversibleError(f"on the way back, {error.message}") from error
    again = {name: made[name] if t is None else t.shape for name, t in found.targets.items()}
    if again != dict(shapes) or _rules_of(found) != _rules_of(outcome):
        caught = _caught(outcome, back, made, args, config)
        odd = sorted(again.keys() ^ shapes.keys()) or [n for n in shapes if again[n] != shapes[n]]
        lost = NotReversibleError(f"the way back would not give {', '.join(odd[:3])}")
        raise caught or lost


def _rules_of(outcome: Outcome) -> list[tuple[int, int]]:
    return [(taken.number, taken.matched + taken.made) for taken in outcome.taken]


def _caught(
    outcome: Outcome,
    back: Rules,
    made: Mapping[str, Shape],
    args: Mapping[str, int] | None,
    config: Config,
) -> NotReversibleError | None:
    """The error for the first name that another rule would take on the way back."""
    planning = back.planning(made, config=config, args=args)
    for name, target in outcome.targets.items():
        match = planning.first(name)
        number = None if match is None else match[0].number
        if target is None and number is not None:
            kept = NotReversibleError(f"would take {name}, which was kept")
            return about(number, kept, " ")
        if target is not None and number is not None and number != target.rule:
            other = NotReversibleError(f"would take {name}, which rule {target.rule} made")
            return about(number, other, " ")
    return None
