"""The differences of two sets of weights, or of one and what a model expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckptkit.analysis import advice
from ckptkit.analysis.matching import Kind as Kind
from ckptkit.analysis.matching import Matching, is_taken_by_torch, pairs
from ckptkit.analysis.matching import Renamed as Renamed
from ckptkit.analysis.summary import json_number, summarize
from ckptkit.compute.compare import Difference, distance
from ckptkit.compute.compare import compare as compare_tensors
from ckptkit.compute.workers import ordered
from ckptkit.core import above
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import escape, plural, some
from ckptkit.core.tree import join, key_text
from ckptkit.core.weights import locate

if TYPE_CHECKING:
    from ckptkit.analysis.json_types import DiffFacts
    from ckptkit.core.text import Modules


LEVELS = 4  # dotted parts that a prefix may have


class Mismatch(NamedTuple):
    """`name` is on both sides, but not the same kind of tensor.

    Where only the dtypes differ and values were compared, `tolerance` is the relative one, and
    `difference` what is beyond it.
    """

    name: str
    a: Kind
    b: Kind
    tolerance: float | None = None
    difference: Difference | None = None


class Changed(NamedTuple):
    """`name` is the same kind of tensor on both sides, with other values."""

    name: str
    difference: Difference


class Entry(NamedTuple):
    """A value that is no tensor and differs: its path, and its text on each side if it is there."""

    path: str
    a: str | None
    b: str | None


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
    lists as well. `silent` is None unless B is a model. `entries` are values beside the tensors
    that differ, `uncompared` names what was not compared. `modules` are the kinds of modules, for
    views that fold names."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    changed: tuple[Changed, ...] = ()
    common: int = 0
    values_compared: bool = False
    advice: tuple[str, ...] = ()
    matching: Matching = field(default_factory=Matching)
    silent: Silent | None = None
    entries: tuple[Entry, ...] = ()
    uncompared: tuple[str, ...] = ()
    modules: Modules | None = field(default=None, compare=False)

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
        """Return whether nothing differs that was compared."""
        differing = (self.missing, self.unexpected, self.mismatched, self.changed, self.entries)
        return not any(differing)

    def as_json(self) -> DiffFacts:
        """Return what ``ckptkit diff --json`` prints, without the names of the two sides."""
        facts = {
            "equal": self.equal,
            "values_compared": self.values_compared,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "mismatched": [
                {
                    "name": each.name,
                    "a": each.a._asdict(),
                    "b": each.b._asdict(),
                    "tolerance": each.tolerance,
                    "difference": None if each.difference is None else _moved(each.difference),
                }
                for each in self.mismatched
            ],
            "changed": [{"name": name, **_moved(each)} for name, each in self.changed],
            "renamed": [_pair(each) for each in self.renamed],
            "reshaped": [_pair(each) for each in self.reshaped],
            "strict_false": None if self.silent is None else self.silent._asdict(),
            "entries": [each._asdict() for each in self.entries],
            "uncompared": list(self.uncompared),
            "advice": list(self.advice),
        }
        return cast("DiffFacts", facts)

    @property
    def summary(self) -> str:
        """Return the result in one line."""
        keys = plural(self.common, "key")
        if self.equal and self.silent is not None:
            return f"equal: {keys} (names and shapes)"
        if self.equal and not self.values_compared:
            return f"same names, shapes and dtypes: {keys}; values not compared"
        if self.equal:
            return f"equal: {keys} (names, dtypes, shapes and values)"
        counts = [f"{len(self.missing):,} missing", f"{len(self.unexpected):,} unexpected"]
        counts.append(f"{len(self.mismatched):,} mismatched")
        if self.values_compared:
            counts.append(f"{len(self.changed):,} changed")
        if self.entries:
            counts.append(f"{plural(len(self.entries), 'other value')}")
        counted = ((self.renamed, "renamed"), (self.reshaped, "renamed and reshaped"))
        looks = [
            f"; {len(pairs):,} look{'s' * (len(pairs) == 1)} {what}"
            for pairs, what in counted
            if pairs
        ]
        return f"different: {', '.join(counts)}, of {keys} on both sides{''.join(looks)}"

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
        hints = [f"hint: {each}" for each in self.advice]
        left = [f"not compared: {'; '.join(self.uncompared)}"] if self.uncompared else []
        return "\n".join(map(escape, (self.summary, *named, *hints, *left)))


def compare(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    name: str | None = None,
    chosen: tuple[str, ...] = (),
    progress: Callable[[int], None] | None = None,
) -> Diff:
    """Compare two mappings of tensors: names, dtypes and shapes; with `values` also the elements,
    by bytes unless a tolerance is given (then |a - b| <= atol + rtol * |b|). `name` is A's file and
    `chosen` the options that name its weights, for the advice, `progress` gets the bytes that were
    read.
    Tensors of different dtypes are compared in float64, with the precision of the narrower dtype
    as the tolerance unless one is given. Raises TensorError for values that cannot be compared.
    """
    found = common(a, b, values=values, atol=atol, rtol=rtol, progress=progress)
    kinds = (
        {key: _kind(side[key]) for key in side if key not in other}
        for side, other in ((a, b), (b, a))
    )
    return _names(a, b, (name, chosen), *kinds, **found)


def common(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Compare the tensors that both have: return the fields of the Diff about them."""
    compare_values = values or atol is not None or rtol is not None
    tell = progress or (lambda nbytes: None)
    mismatched, alike = [], []
    for key in _common(a, b):
        ours, theirs = _kind(a[key]), _kind(b[key])
        if ours == theirs:
            alike.append(key)
        else:
            mismatched.append(Mismatch(key, ours, theirs))
    if compare_values:
        mismatched = [_compared(each, a, b, atol, rtol, tell) for each in mismatched]
    changed = _changed(a, b, alike, atol, rtol, tell) if compare_values else ()
    return {
        "mismatched": tuple(mismatched),
        "changed": tuple(changed),
        "values_compared": compare_values,
    }


# Relative precision and smallest step of the narrow floating-point types: torch.finfo.
PRECISION = {
    "float64": (2**-52, 0.0), "float32": (2**-23, 2**-149), "float16": (2**-10, 2**-24),
    "bfloat16": (2**-7, 2**-133), "float8_e4m3fn": (2**-3, 2**-9), "float8_e5m2": (2**-2, 2**-16),
}  # fmt: skip


def _compared(
    found: Mismatch,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    atol: float | None,
    rtol: float | None,
    progress: Callable[[int], None],
) -> Mismatch:
    """Compare the values of two tensors of one shape and different floating-point dtypes."""
    known = [PRECISION.get(kind.dtype) for kind in (found.a, found.b)]
    if found.a.shape != found.b.shape or None in known:
        return found
    if atol is None and rtol is None:
        rtol, atol = max(each for each in known if each is not None)
    ours, theirs = a[found.name], b[found.name]
    difference = _difference(found.name, ours, theirs, atol, rtol)
    progress(ours.nbytes + theirs.nbytes)
    return found._replace(tolerance=rtol or 0.0, difference=difference)


def against(
    a: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[str, Shape]],
    ties: Iterable[Sequence[str]] = (),
    *,
    name: str | None = None,
    chosen: tuple[str, ...] = (),
) -> Diff:
    """Compare A with the state_dict of a model, given as name -> (dtype, shape).

    Only shapes count: `load_state_dict` casts to the dtypes of the model. `ties` are the names that
    are one tensor of the model: a value for one of them is the value of all.
    """
    pairs = ((key, _kind(a[key]), Kind(*shapes[key])) for key in _common(a, shapes))
    mismatched = tuple(
        Mismatch(key, ours, theirs) for key, ours, theirs in pairs if ours.shape != theirs.shape
    )
    ours = {key: _kind(tensor) for key, tensor in a.items() if key not in shapes}
    theirs = {key: Kind(*kind) for key, kind in shapes.items() if key not in a}
    found = _names(a, shapes, (name, chosen), ours, theirs, mismatched=mismatched)
    placed = [each for each in found.renamed if is_taken_by_torch(each)]
    for each in placed:
        del ours[each.old], theirs[each.new]
    tied = {name: same[0] for same in ties for name in same}
    filled = {tied.get(name, name) for name in shapes if name not in theirs}
    theirs = {
        tied.get(name, name): kind
        for name, kind in theirs.items()
        if tied.get(name, name) not in filled
    }
    once = {tied.get(name, name): shape for name, (_, shape) in shapes.items()}
    everything = sum(map(prod, once.values()))
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
    progress: Callable[[int], None],
) -> Iterator[Changed]:
    """Yield the keys whose values differ; several are compared at a time."""
    compare = partial(_difference, atol=atol, rtol=rtol)
    found = ordered(lambda key: compare(key, a[key], b[key]), keys, lambda key: 2 * a[key].nbytes)
    for key, difference in zip(keys, found, strict=True):
        progress(2 * a[key].nbytes)
        if difference is not None:
            yield Changed(key, difference)


def _difference(
    key: str, a: Tensor, b: Tensor, atol: float | None, rtol: float | None
) -> Difference | None:
    try:
        found = compare_tensors(a, b, atol=atol, rtol=rtol)
        far = None if found is None else distance(a, b)
        if found is None or far is None:
            return found
        largest, relative, cosine = far
        if found.largest is not None:
            largest = found.largest
        return replace(found, largest=largest, relative=relative, cosine=cosine)
    except CkptkitError as error:
        error.message = f"{key}: {error.message}"
        raise


def _kind(tensor: Tensor) -> Kind:
    return Kind(tensor.dtype.name, tensor.shape)


def _common(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    return (key for key in a if key in b)


def _names(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor] | Mapping[str, tuple[str, Shape]],
    place: tuple[str | None, tuple[str, ...]],
    unexpected: Mapping[str, Kind],
    missing: Mapping[str, Kind],
    **found: Any,
) -> Diff:
    """Return the difference of the names, added to what is `found` already."""
    matching = pairs(unexpected, missing, a.keys() & b.keys())
    name, chosen = place
    helpful = list(_prefix_advice(a, b, missing, unexpected, name, chosen))
    if matching.renamed and not helpful:
        helpful.append(
            "if these are the same, --write-map map.json writes their names to a file, and prints "
            "the command that renames them"
        )
    common = len(a) - len(unexpected)
    made = Diff(
        tuple(missing),
        tuple(unexpected),
        common=common,
        advice=tuple(helpful),
        matching=matching,
        **found,
    )
    return made if made.equal else replace(made, modules=_modules(a, b))


def _modules(*sides: Mapping[str, Tensor] | Mapping[str, tuple[str, Shape]]) -> Modules:
    """Return the kinds of the modules of both sides; dtypes, which may differ, do not count."""
    from ckptkit.core.text import Modules

    shapes: dict[tuple[str, str, int], None] = {}
    for side in sides:
        for name, each in side.items():
            shapes[name, "", len(each.shape if isinstance(each, Tensor) else each[1])] = None
    return Modules(shapes)


def _prefix_advice(
    a: Mapping[str, object],
    b: Mapping[str, object],
    missing: Iterable[str],
    unexpected: Iterable[str],
    name: str | None,
    chosen: tuple[str, ...],
) -> Iterator[str]:
    """Return the command after which A lacks nothing, if only a prefix differs from B."""
    for strips, longer, shorter in ((True, unexpected, missing), (False, missing, unexpected)):
        for prefix in _prefixes(longer, set(shorter)):
            changed = {key.removeprefix(prefix) if strips else prefix + key for key in a}
            if not b.keys() <= changed:
                continue
            what = f" `{'strip' if strips else 'add'}-module` of {prefix!r}"
            if name and strips:
                what = f": {advice.strip_module(name, [prefix], *chosen)}"
            elif name:
                what = f": {advice.add_module(name, prefix, *chosen)}"
            yield f"no key is missing after{what}"
            return


def _prefixes(names: Iterable[str], others: set[str]) -> Iterable[str]:
    """Return the prefixes (``module.``) without which one of the names is one of the others."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".", LEVELS)
        starts = (".".join(parts[:n]) + "." for n in range(1, len(parts)))
        found.update((start, None) for start in starts if name[len(start) :] in others)
    return found


# As JSON


def _moved(found: Difference) -> dict[str, Any]:
    return {
        "count": found.count,
        "first": found.first,
        "largest": json_number(found.largest),
        "relative": json_number(found.relative),
        "cosine": json_number(found.cosine),
    }


def _pair(pair: Renamed) -> dict[str, Any]:
    """Return a pair of names; their kinds come before the confidence."""
    facts = pair._asdict() | {"a": pair.a._asdict(), "b": pair.b._asdict()}
    return {name: facts[name] for name in ("old", "new", "a", "b", "confidence", "why")}


SHOWN = 6  # entries of the root that are named as not compared


class Rest(NamedTuple):
    """The content of a checkpoint beside its weights, by path: tensors, and values as text."""

    tensors: dict[str, Tensor]
    values: dict[str, str]
    objects: dict[str, str]


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    everything: bool = False,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    name: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diff:
    """Compare the weights of two checkpoints, and with `everything` what is beside them.

    The rest is compared path by path: optimizers, averages, settings. So is all of two checkpoints
    without weights. See :func:`compare` for the other arguments. What is not compared is named in
    ``uncompared``.
    """
    how = {"values": values, "atol": atol, "rtol": rtol, "progress": progress}
    everything = everything or not has_weights(a, b)
    weights = (a.weights, b.weights) if has_weights(a, b) else ({}, {})
    found = compare(*weights, name=name, chosen=a.chosen, **how)  # type: ignore[arg-type]
    ours, theirs = rest_of(a), rest_of(b)
    if everything and not any((*weights, ours.tensors, theirs.tensors)):
        found = replace(found, values_compared=True)  # of no tensor
    left = [] if found.values_compared else ["the values of tensors (--values)"]
    if not everything:
        if beside := _named(ours, theirs):
            left.append(f"{beside} (--all)")
        return replace(found, uncompared=tuple(left))
    both = common(ours.tensors, theirs.tensors, **how)  # type: ignore[arg-type]
    if objects := ours.objects.keys() | theirs.objects.keys():
        left.append(f"the inside of {plural(len(objects), 'Python object')}")
    return replace(
        found,
        missing=(*found.missing, *_only(theirs.tensors, ours.tensors)),
        unexpected=(*found.unexpected, *_only(ours.tensors, theirs.tensors)),
        mismatched=(*found.mismatched, *both["mismatched"]),
        changed=(*found.changed, *both["changed"]),
        common=found.common + len(ours.tensors.keys() & theirs.tensors.keys()),
        entries=tuple(_entries(ours, theirs)),
        uncompared=tuple(left),
    )


def has_weights(*sides: Checkpoint) -> bool:
    """Return whether one of the sides has weights."""
    return any(each.selection is not None for each in sides)


def entire(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of which the key ``""`` selects all: an optimizer has no weights."""
    if checkpoint.key == "" and locate(checkpoint.root) is None:
        return checkpoint.with_key(None)
    return checkpoint


def rest_of(checkpoint: Checkpoint) -> Rest:
    """Return what is beside the weights; of a pickled module, without the attributes inside it."""
    summary = summarize(checkpoint)
    values = {
        join(each.path): f"{each.value!r}"
        for each in summary.values
        if not summary.in_module(each.path)
    }
    objects = {
        join(each.path): each.global_
        for each in summary.objects
        if not summary.in_module(each.path) and each.path != summary.weights
    }
    tensors = {row.place: row.tensor for row in summary.rows if row.name is None}
    return Rest(tensors, values, objects)


def _only(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[str]:
    return (name for name in one if name not in other)


def _entries(ours: Rest, theirs: Rest) -> Iterator[Entry]:
    """Yield the values and classes of objects that differ, in the order of A, then of B."""
    for one, other in ((ours.values, theirs.values), (ours.objects, theirs.objects)):
        for path in dict.fromkeys((*one, *other)):
            if one.get(path) != other.get(path):
                yield Entry(path, one.get(path), other.get(path))


def _named(ours: Rest, theirs: Rest) -> str:
    """Return the entries beside the weights, with what is in them: ``optimizer (24 tensors)``."""
    counts: dict[str, list[set[str]]] = {}
    for side in (ours, theirs):
        for number, paths in enumerate((list(side.tensors), list(side.values), list(side.objects))):
            for path in paths:
                key = key_text(path.partition(".")[0])
                counts.setdefault(key, [set(), set(), set()])[number].add(path)
    texts = []
    for key, found in counts.items():
        kinds = zip(found, ("tensor", "value", "object"), strict=True)
        parts = [plural(len(paths), noun) for paths, noun in kinds if paths]
        is_value = [len(paths) for paths in found] == [0, 1, 0]
        texts.append(key if is_value else f"{key} ({', '.join(parts)})")
    return some(texts, SHOWN)
