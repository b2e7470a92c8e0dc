"""How two sets of weights differ, or how one differs from what a model expects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit import bridge
from ckptkit.bridge import Difference
from ckptkit.errors import CkptkitError
from ckptkit.reports import advice
from ckptkit.tensor import Shape, Tensor

LEVELS = 4  # dotted parts that a prefix may have


class Kind(NamedTuple):
    dtype: str
    shape: Shape


class Mismatch(NamedTuple):
    """`name` is on both sides, but not the same kind of tensor."""

    name: str
    a: Kind
    b: Kind


class Changed(NamedTuple):
    """`name` is the same kind of tensor on both sides, with other values."""

    name: str
    difference: Difference


@dataclass(frozen=True)
class Diff:
    """What A lacks (`missing`), what it has too much (`unexpected`), what is there on both sides and differs in dtype
    or shape (`mismatched`) or in its values alone (`changed`, if they were compared). `common` counts the names that
    both sides have; `advice` are commands that help."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    changed: tuple[Changed, ...] = ()
    common: int = 0
    values_compared: bool = False
    advice: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.changed)


def compare(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    name: str = "A",
) -> Diff:
    """How A differs from B: names, dtypes, shapes; with `values` also the elements, by bytes unless a tolerance is
    given (then |a - b| <= atol + rtol * |b|). `name` is A's file, for the advice. Raises TensorError for values that
    cannot be compared.
    """
    mismatched, changed = [], []
    compare_values = values or atol is not None or rtol is not None
    for key in _common(a, b):
        ours, theirs = _kind(a[key]), _kind(b[key])
        if ours != theirs:
            mismatched.append(Mismatch(key, ours, theirs))
        elif compare_values and (difference := _difference(key, a[key], b[key], atol, rtol)):
            changed.append(Changed(key, difference))
    return _names(a, b, name, mismatched=tuple(mismatched), changed=tuple(changed), values_compared=compare_values)


def against(a: Mapping[str, Tensor], shapes: Mapping[str, tuple[str, Shape]], *, name: str = "A") -> Diff:
    """How A differs from the state_dict of a model, given as name -> (dtype, shape).

    Only shapes count: `load_state_dict` casts to the dtypes of the model.
    """
    pairs = ((key, _kind(a[key]), Kind(*shapes[key])) for key in _common(a, shapes))
    mismatched = tuple(Mismatch(key, ours, theirs) for key, ours, theirs in pairs if ours.shape != theirs.shape)
    return _names(a, shapes, name, mismatched=mismatched)


def _difference(key: str, a: Tensor, b: Tensor, atol: float | None, rtol: float | None) -> Difference | None:
    try:
        return bridge.compare(a, b, atol=atol, rtol=rtol)
    except CkptkitError as error:
        error.message = f"{key}: {error.message}"
        raise


def _kind(tensor: Tensor) -> Kind:
    return Kind(tensor.dtype.name, tensor.shape)


def _common(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    return (key for key in a if key in b)


def _names(a: Mapping[str, object], b: Mapping[str, object], name: str, **found: Any) -> Diff:
    """What is `found` already, and how the names differ."""
    missing = tuple(key for key in b if key not in a)
    unexpected = tuple(key for key in a if key not in b)
    helpful = _prefix_advice(a, b, missing, unexpected, name)
    return Diff(missing, unexpected, common=len(a) - len(unexpected), advice=tuple(helpful), **found)


def _prefix_advice(
    a: Mapping[str, object], b: Mapping[str, object], missing: Iterable[str], unexpected: Iterable[str], name: str
) -> Iterator[str]:
    """The command after which A lacks nothing, if a prefix is all that lies between its names and those of B."""
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
    found = ((name, start) for name in names for start in _leading(name))
    return dict.fromkeys(start for name, start in found if name[len(start) :] in others)


def _leading(name: str) -> list[str]:
    """The first few dotted beginnings of a name, shortest first: ``module.``, ``module.encoder.``..."""
    parts = name.split(".", LEVELS)
    return [".".join(parts[:n]) + "." for n in range(1, len(parts))]
