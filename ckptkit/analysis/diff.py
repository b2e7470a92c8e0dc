"""The differences of two sets of weights, or of one and what a model expects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ckptkit import compute
from ckptkit.analysis import advice
from ckptkit.analysis.matching import Kind as Kind
from ckptkit.analysis.matching import Matching
from ckptkit.analysis.matching import Renamed as Renamed
from ckptkit.analysis.pairing import is_taken_by_torch, pairs
from ckptkit.compute import Difference
from ckptkit.core import above
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import escape, plural, some

LEVELS = 4  # dotted parts that a prefix may have


class Mismatch(NamedTuple):
    """`name` is on both sides, but not the same kind of tensor."""

    name: str
    a: Kind
    b: Kind


class Changed(NamedTuple):
    """`name` is the same kind of tensor on both sides, with other values."""

    name: str
    difference: Difference


class Silent(NamedTuple):
    """The effects of `load_state_dict(strict=False)` that it does not report.

    It leaves out `skipped` tensors of the file with so many `parameters`, and leaves `kept` tensors
    of the model, with `kept_parameters` of `all_parameters`, as they were."""

    skipped: int
    parameters: int
    kept: int
    kept_parameters: int
    all_parameters: int


@dataclass(frozen=True, repr=False)
class Diff:
    """The differences of two sets of weights, A and B.

    They are what A lacks (`missing`), what it has too much (`unexpected`), what is there on both
    sides and differs in dtype or shape (`mismatched`) or in its values alone (`changed`, if they
    were compared). `common` counts the names that both sides have; `advice` are commands that help.
    `renamed` and `reshaped` pair what is missing with what is unexpected: these names are in both
    lists as well. `silent` is None unless B is a model."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    changed: tuple[Changed, ...] = ()
    common: int = 0
    values_compared: bool = False
    advice: tuple[str, ...] = ()
    matching: Matching = field(default_factory=Matching)
    silent: Silent | None = None

    @property
    def renamed(self) -> tuple[Renamed, ...]:
        """Keys that have another name in B, of the same shape."""
        return self.matching.renamed

    @property
    def reshaped(self) -> tuple[Renamed, ...]:
        """Keys that may have another name in B, and have another shape."""
        return self.matching.reshaped

    @property
    def equal(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.changed)

    @property
    def summary(self) -> str:
        """One line."""
        compared = (
            "names, dtypes, shapes and values"
            if self.values_compared
            else "names, dtypes and shapes"
        )
        if self.equal:
            return f"equal: {plural(self.common, 'key')} ({compared})"
        counts = [f"{len(self.missing):,} missing", f"{len(self.unexpected):,} unexpected"]
        counts.append(f"{len(self.mismatched):,} mismatched")
        if self.values_compared:
            counts.append(f"{len(self.changed):,} changed")
        counted = ((self.renamed, "renamed"), (self.reshaped, "renamed and reshaped"))
        looks = [
            f"; {len(pairs):,} look{'s' * (len(pairs) == 1)} {what}"
            for pairs, what in counted
            if pairs
        ]
        return (
            f"different: {', '.join(counts)}, of {plural(self.common, 'key')} on both "
            f"sides{''.join(looks)}"
        )

    def __bool__(self) -> bool:
        """Return whether there are differences."""
        return not self.equal

    def __repr__(self) -> str:
        return f"<Diff {self.summary}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        html: str = above.call("html", self)
        return html

    def __str__(self) -> str:
        """The summary, the first names of each kind, and what to type."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mismatched": [each.name for each in self.mismatched],
            "changed": [each.name for each in self.changed],
        }
        named = [f"{kind}: {some(names, 8)}" for kind, names in kinds.items() if names]
        return "\n".join(
            map(escape, (self.summary, *named, *(f"hint: {each}" for each in self.advice)))
        )


def compare(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    name: str = "A",
) -> Diff:
    """Compare two checkpoints: names, dtypes and shapes; with `values` also the elements, by bytes
    unless a tolerance is given (then |a - b| <= atol + rtol * |b|). `name` is A's file, for the
    advice. Raises TensorError for values that cannot be compared.
    """
    mismatched, alike = [], []
    compare_values = values or atol is not None or rtol is not None
    for key in _common(a, b):
        ours, theirs = _kind(a[key]), _kind(b[key])
        if ours != theirs:
            mismatched.append(Mismatch(key, ours, theirs))
        else:
            alike.append(key)
    changed = _changed(a, b, alike, atol, rtol) if compare_values else ()
    kinds = (
        {key: _kind(side[key]) for key in side if key not in other}
        for side, other in ((a, b), (b, a))
    )
    found: dict[str, Any] = {
        "mismatched": tuple(mismatched),
        "changed": tuple(changed),
        "values_compared": compare_values,
    }
    return _names(a, b, name, *kinds, **found)


def against(
    a: Mapping[str, Tensor], shapes: Mapping[str, tuple[str, Shape]], *, name: str = "A"
) -> Diff:
    """Compare A with the state_dict of a model, given as name -> (dtype, shape).

    Only shapes count: `load_state_dict` casts to the dtypes of the model.
    """
    pairs = ((key, _kind(a[key]), Kind(*shapes[key])) for key in _common(a, shapes))
    mismatched = tuple(
        Mismatch(key, ours, theirs) for key, ours, theirs in pairs if ours.shape != theirs.shape
    )
    ours = {key: _kind(tensor) for key, tensor in a.items() if key not in shapes}
    theirs = {key: Kind(*kind) for key, kind in shapes.items() if key not in a}
    found = _names(a, shapes, name, ours, theirs, mismatched=mismatched)
    placed = [each for each in found.renamed if is_taken_by_torch(each)]
    for each in placed:
        del ours[each.old], theirs[each.new]
    everything = sum(prod(shape) for _, shape in shapes.values())
    silent = Silent(len(ours), _parameters(ours), len(theirs), _parameters(theirs), everything)
    return replace(found, silent=silent)


def _parameters(kinds: Mapping[str, Kind]) -> int:
    return sum(prod(kind.shape) for kind in kinds.values())


def _changed(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    keys: list[str],
    atol: float | None,
    rtol: float | None,
) -> Iterator[Changed]:
    """Return the keys whose values differ; several are compared at a time."""
    compare = partial(_difference, atol=atol, rtol=rtol)
    found = compute.ordered(
        lambda key: compare(key, a[key], b[key]), keys, lambda key: 2 * a[key].nbytes
    )
    return (
        Changed(key, difference) for key, difference in zip(keys, found, strict=True) if difference
    )


def _difference(
    key: str, a: Tensor, b: Tensor, atol: float | None, rtol: float | None
) -> Difference | None:
    try:
        return compute.compare(a, b, atol=atol, rtol=rtol)
    except CkptkitError as error:
        error.message = f"{key}: {error.message}"
        raise


def _kind(tensor: Tensor) -> Kind:
    return Kind(tensor.dtype.name, tensor.shape)


def _common(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    return (key for key in a if key in b)


def _names(
    a: Mapping[str, object],
    b: Mapping[str, object],
    name: str,
    unexpected: Mapping[str, Kind],
    missing: Mapping[str, Kind],
    **found: Any,
) -> Diff:
    """Return the difference of the names, added to what is `found` already."""
    matching = pairs(unexpected, missing, a.keys() & b.keys())
    helpful = list(_prefix_advice(a, b, missing, unexpected, name))
    if matching.renamed and not helpful:
        helpful.append(
            "if these are the same, --write-map map.json writes their names down, and this gives "
            "them to the file: " + advice.rename(name, "map.json")
        )
    common = len(a) - len(unexpected)
    return Diff(
        tuple(missing),
        tuple(unexpected),
        common=common,
        advice=tuple(helpful),
        matching=matching,
        **found,
    )


def _prefix_advice(
    a: Mapping[str, object],
    b: Mapping[str, object],
    missing: Iterable[str],
    unexpected: Iterable[str],
    name: str,
) -> Iterator[str]:
    """Return the command after which A lacks nothing, if only a prefix differs from B."""
    for prefix in _prefixes(unexpected, set(missing)):
        if b.keys() <= {key.removeprefix(prefix) for key in a}:
            yield f"no key is missing after: {advice.strip_module(name, prefix)}"
            return
    for prefix in _prefixes(missing, set(unexpected)):
        if b.keys() <= {prefix + key for key in a}:
            yield f"no key is missing after: {advice.add_module(name, prefix)}"
            return


def _prefixes(names: Iterable[str], others: set[str]) -> Iterable[str]:
    """Each dotted beginning (``module.``) without which one of the names is one of the others."""
    found: dict[str, None] = {}
    for name in names:
        found.update((start, None) for start in _leading(name) if name[len(start) :] in others)
    return found


def _leading(name: str) -> list[str]:
    """The first few dotted beginnings of a name, shortest first: ``module.``,
    ``module.encoder.``..."""
    parts = name.split(".", LEVELS)
    return [".".join(parts[:n]) + "." for n in range(1, len(parts))]
