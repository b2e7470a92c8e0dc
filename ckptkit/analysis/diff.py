"""Compare the weights of two checkpoints, or of a checkpoint and a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ckptkit.analysis import advice
from ckptkit.analysis.matching import Kind as Kind
from ckptkit.analysis.matching import (
    Matching,
    PrefixChange,
    is_taken_by_torch,
    pairs,
    prefixes,
    shapes_of,
)
from ckptkit.analysis.matching import Renamed as Renamed
from ckptkit.analysis.summary import json_number, summarize
from ckptkit.compute.compare import Difference
from ckptkit.compute.compare import compare as compare_tensors
from ckptkit.compute.workers import ordered
from ckptkit.core import hooks
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, TensorError
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import Modules, escape, plural, shell_command, some
from ckptkit.core.tree import join, key_text
from ckptkit.core.weights import locate
from ckptkit.lora.reading import adapter_of

if TYPE_CHECKING:
    from ckptkit.analysis.json_types import DiffFacts

Tensors = Mapping[str, Tensor]
Progress = Callable[[int], None]
Matches = Callable[[str], bool]
T = TypeVar("T")


class Mismatch(NamedTuple):
    """A key that both sides have, and whose dtype or shape differs.

    `tolerance` and `difference` are set if only the dtypes differ and values were compared.
    `tolerance` is the relative tolerance. If all values are within the tolerance, `difference` is
    None.
    """

    name: str
    a: Kind
    b: Kind
    tolerance: float | None = None
    difference: Difference | None = None


class Changed(NamedTuple):
    """A key whose dtype and shape are equal on both sides, and whose values differ."""

    name: str
    difference: Difference


class Explanation(NamedTuple):
    """Tells if quantization explains the difference between a GGUF weight and the original weight.

    ``type`` is the quantization type of the GGUF weight. ``explained`` is true if the difference is
    at most ``limit``. ``reordered`` is true if the two tensors contain the same rows in a different
    order.
    """

    type: str
    limit: float  # maximum of (norm of the difference) / (norm of the weight)
    explained: bool
    reordered: bool = False


class Entry(NamedTuple):
    """Two different values that are not tensors.

    `a` and `b` are the two values as strings. A missing value is None.
    """

    path: str
    a: str | None
    b: str | None


class Silent(NamedTuple):
    """Counts of the tensors that `load_state_dict(strict=False)` silently does not load.

    - `skipped`: number of tensors in the file that `load_state_dict` ignores
    - `parameters`: number of elements of the skipped tensors
    - `kept`: number of tensors of the model that keep their initial values
    - `kept_parameters`: number of elements of the kept tensors
    - `all_parameters`: number of elements of all tensors of the model
    """

    skipped: int
    parameters: int
    kept: int
    kept_parameters: int
    all_parameters: int


@dataclass(frozen=True, repr=False)
class Diff:
    """The differences of the weights A and B.

    - `missing`: keys that only B has
    - `unexpected`: keys that only A has
    - `mismatched`: keys whose dtype or shape differs
    - `changed`: keys whose dtype and shape are equal and whose values differ
    - `common`: number of keys that both sides have
    - `renamed` and `reshaped`: pairs of an unexpected and a missing key, from `matching`
    - `entries`: different values that are not tensors
    - `uncompared`: descriptions of data that was not compared
    - `unread`: tensors whose values cannot be compared, each with the reason
    - `advice`: hints with commands
    - `silent`: the effects of ``strict=False``, or None if B is not a model
    - `modules`: the structure of the modules, for tables that fold names
    - `explanations`: an Explanation for each changed key, if one side is a GGUF file

    The keys in `renamed` and `reshaped` are also in `unexpected` and `missing`. The dtypes of a
    GGUF file and its original are not compared.
    """

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
    unread: tuple[str, ...] = ()
    modules: Modules | None = field(default=None, compare=False)
    explanations: Mapping[str, Explanation] = field(default_factory=dict)
    dtypes_compared: bool = True

    @property
    def renamed(self) -> tuple[Renamed, ...]:
        """Pairs of keys with equal shapes. The two keys of a pair are probably one tensor with two
        names."""
        return self.matching.renamed

    @property
    def reshaped(self) -> tuple[Renamed, ...]:
        """Pairs of keys with different shapes. The two keys of a pair may be one tensor with two
        names."""
        return self.matching.reshaped

    @property
    def equal(self) -> bool:
        """True if all compared keys and values are equal."""
        differing = (self.missing, self.unexpected, self.mismatched, self.changed, self.entries)
        return not any(differing)

    @property
    def explained(self) -> bool:
        """True if the quantization of a GGUF file explains all differences."""
        others = (self.missing, self.unexpected, self.mismatched, self.entries, self.unexplained)
        return not any(others)

    @property
    def unexplained(self) -> list[Changed]:
        """The changed tensors whose difference is larger than the error of their GGUF type."""
        explained = {name for name, each in self.explanations.items() if each.explained}
        return [each for each in self.changed if each.name not in explained]

    def as_json(self) -> DiffFacts:
        """Return the object of ``ckptkit diff --json`` without the names of the two files."""

        def explanation(name: str) -> dict[str, Any]:
            each = self.explanations.get(name)
            return {} if each is None else {"type": each.type, "explained": each.explained}

        facts = {
            "equal": self.equal,
            "values_compared": self.values_compared,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mismatched": self.mismatched,
            "changed": [
                {"name": name, **_facts(each), **explanation(name)} for name, each in self.changed
            ],
            "renamed": self.renamed,
            "reshaped": self.reshaped,
            "strict_false": self.silent,
            "entries": self.entries,
            "uncompared": self.uncompared,
            "advice": self.advice,
        }
        facts = {name: _facts(value) for name, value in facts.items()}
        return cast("DiffFacts", facts)

    @property
    def summary(self) -> str:
        """The summary of the differences in one line."""
        keys = plural(self.common, "key")
        if self.equal and self.silent is not None:
            return f"equal: {keys} (names and shapes)"
        dtypes = self.dtypes_compared
        if self.equal and (self.unread or not self.values_compared):
            what = plural(len(self.unread), "tensor") if self.values_compared else "values"
            same = "names, shapes and dtypes" if dtypes else "names and shapes"
            return f"same {same}: {keys}; {what} not compared"
        if self.equal:
            return f"equal: {keys} (names,{' dtypes,' * dtypes} shapes and values)"
        if self.explained:
            differing = plural(len(self.changed), "differing tensor")
            return f"the same model: {keys}; the types of the GGUF file explain {differing}"
        counts = [f"{len(self.missing):,} missing", f"{len(self.unexpected):,} unexpected"]
        counts.append(f"{len(self.mismatched):,} mismatched")
        if self.values_compared:
            counts.append(f"{len(self.unexplained):,} changed")
        if self.entries:
            counts.append(f"{plural(len(self.entries), 'other value')}")
        text = f"different: {', '.join(counts)}, of {keys} on both sides"
        for found, what in ((self.renamed, "renamed"), (self.reshaped, "renamed and reshaped")):
            if found:
                text += f"; {len(found):,} look{'s' * (len(found) == 1)} {what}"
        return text

    def __bool__(self) -> bool:
        """Return True if there are differences."""
        return not self.equal

    def __repr__(self) -> str:
        return f"<Diff {self.summary}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook."""
        html: str = hooks.html(self)
        return html

    def __str__(self) -> str:
        """Return the summary, the first keys of each list of differences, and the hints."""
        lines = [self.summary]
        for kind in ("missing", "unexpected", "mismatched", "changed"):
            names = [name if isinstance(name, str) else name[0] for name in getattr(self, kind)]
            if names:
                lines.append(f"{kind}: {some(names, 8)}")
        lines += [f"hint: {each}" for each in self.advice]
        if self.uncompared:
            lines.append(f"not compared: {'; '.join(self.uncompared)}")
        return "\n".join(map(escape, lines))


def _facts(value: Any) -> Any:
    """Return a record or a list of records as JSON objects."""
    if isinstance(value, Difference):
        value = asdict(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: _facts(each) for name, each in value.items()}
    return (
        [_facts(each) for each in value] if isinstance(value, (list, tuple)) else json_number(value)
    )


def compare(
    a: Tensors,
    b: Tensors,
    *,
    values: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    name: str | None = None,
    chosen: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Diff:
    """Compare the names, dtypes and shapes of two dicts of tensors. With `values`, compare the
    elements.

    With `atol` or `rtol`, elements are equal if |a - b| <= atol + rtol * |b|. Otherwise, elements
    are equal if their bytes are equal. Tensors of different dtypes are compared in float64, and the
    default tolerance is the precision of the narrower dtype.

    `name` is the file of A, and `chosen` contains the options that select the weights of A. The
    suggested commands contain `name` and `chosen`. `compare` calls `progress` with the number of
    bytes read. Raises TensorError for values that cannot be compared with a tolerance.
    """
    found = _common(a, b, values, atol, rtol, progress)
    return named(found, kinds(a), kinds(b), name, chosen)


# The eps and the smallest subnormal of each floating-point dtype, as in torch.finfo.
PRECISION = {
    "float64": (2**-52, 0.0), "float32": (2**-23, 2**-149), "float16": (2**-10, 2**-24),
    "bfloat16": (2**-7, 2**-133), "float8_e4m3fn": (2**-3, 2**-9), "float8_e5m2": (2**-2, 2**-16),
}  # fmt: skip


def _common(
    a: Tensors,
    b: Tensors,
    values: bool,
    atol: float | None,
    rtol: float | None,
    progress: Progress | None,
) -> Diff:
    """Compare the tensors that both sides have. Several threads read tensors at the same time."""
    values = values or atol is not None or rtol is not None
    tell = progress or (lambda nbytes: None)
    mismatched, alike = [], []
    for key in a:
        if key not in b:
            continue
        ours, theirs = kind(a[key]), kind(b[key])
        if ours == theirs:
            alike.append(key)
            continue
        mismatch = Mismatch(key, ours, theirs)
        known = [PRECISION[each.dtype] for each in (ours, theirs) if each.dtype in PRECISION]
        if values and ours.shape == theirs.shape and len(known) == 2:
            relative, absolute = rtol, atol
            if atol is None and rtol is None:
                relative, absolute = max(known)
            difference = _difference(key, a[key], b[key], absolute, relative)
            # If a tolerance is given, `_difference` raises the TensorError instead of returning it.
            assert not isinstance(difference, TensorError)
            mismatch = mismatch._replace(tolerance=relative or 0.0, difference=difference)
            tell(a[key].nbytes + b[key].nbytes)
        mismatched.append(mismatch)
    found = Diff(mismatched=tuple(mismatched), values_compared=values)
    return with_values(
        found, alike if values else [], lambda key: _difference(key, a[key], b[key], atol, rtol),
        lambda key: 2 * a[key].nbytes, tell,
    )  # fmt: skip


def with_values(
    found: Diff,
    keys: Sequence[str],
    difference: Callable[[str], Difference | TensorError | None],
    nbytes: Callable[[str], int],
    tell: Progress,
) -> Diff:
    """Add the differences of the values of `keys` to `found`. Several threads compute them."""
    changed, unread = [], []
    for key, result in zip(keys, ordered(difference, keys, nbytes), strict=True):
        tell(nbytes(key))
        if isinstance(result, TensorError):
            unread.append(f"{key} ({result.message})")
        elif result is not None:
            changed.append(Changed(key, result))
    return replace(found, changed=tuple(changed), unread=tuple(unread))


def _difference(
    key: str, a: Tensor, b: Tensor, atol: float | None, rtol: float | None
) -> Difference | TensorError | None:
    """Return the difference of the values, or None if the values are equal.

    If the values cannot be compared, return a TensorError. If a tolerance is given, raise
    the TensorError instead.
    """
    try:
        return compare_tensors(a, b, atol=atol, rtol=rtol, measured=True)
    except CkptkitError as error:
        if isinstance(error, TensorError) and atol is None and rtol is None:
            return error
        error.message = f"{key}: {error.message}"
        raise


def against(
    a: Tensors,
    shapes: Mapping[str, tuple[str, Shape]],
    ties: Iterable[Sequence[str]] = (),
    *,
    name: str | None = None,
    chosen: tuple[str, ...] = (),
) -> Diff:
    """Compare A with the state_dict of a model. `shapes` maps each key of the model to (dtype,
    shape).

    `against` does not compare dtypes, because `load_state_dict` casts to the dtypes of the model.
    Each item of `ties` lists the names of one tied tensor.
    """
    ours, theirs = kinds(a), {key: Kind(*kind) for key, kind in shapes.items()}
    mismatched = tuple(
        Mismatch(key, kind, theirs[key])
        for key, kind in ours.items()
        if key in theirs and kind.shape != theirs[key].shape
    )
    found = named(Diff(mismatched=mismatched), ours, theirs, name, chosen)
    taken = [each for each in found.renamed if is_taken_by_torch(each)]
    skipped = {*found.unexpected} - {each.old for each in taken}
    lacking = {*found.missing} - {each.new for each in taken}
    # Count each tied tensor once. A tied tensor is loaded if the file contains any of its names.
    first = {name: same[0] for same in ties for name in same}
    once = {first.get(key, key): kind for key, kind in theirs.items()}
    filled = {first.get(key, key) for key in theirs if key not in lacking}
    kept = {first.get(key, key) for key in theirs if key in lacking} - filled
    sizes = {key: prod(kind.shape) for key, kind in once.items()}
    silent = Silent(
        skipped=len(skipped),
        parameters=sum(prod(ours[key].shape) for key in skipped),
        kept=len(kept),
        kept_parameters=sum(sizes[key] for key in kept),
        all_parameters=sum(sizes.values()),
    )
    return replace(found, silent=silent)


def kind(tensor: Tensor) -> Kind:
    return Kind(tensor.dtype.name, tensor.shape)


def kinds(tensors: Tensors) -> dict[str, Kind]:
    return {name: kind(tensor) for name, tensor in tensors.items()}


def named(
    found: Diff,
    a: Mapping[str, Kind],
    b: Mapping[str, Kind],
    name: str | None,
    chosen: tuple[str, ...],
) -> Diff:
    """Add the missing and unexpected keys, the renamed keys and the hints to `found`.

    `a` and `b` map the keys of each side to dtype and shape. See `compare` for `name` and `chosen`.
    """
    unexpected = {key: kind for key, kind in a.items() if key not in b}
    missing = {key: kind for key, kind in b.items() if key not in a}
    way = prefixes(shapes_of(unexpected), shapes_of(missing), a.keys() & b.keys())
    matching = pairs(unexpected, missing, way)
    helpful = _prefix_advice(way, a, b, name, chosen)
    if matching.renamed and helpful is None:
        helpful = (
            "if these pairs are right, --write-map map.json writes them to a file and prints "
            "the command that renames the keys"
        )
    made = replace(
        found,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        common=len(a) - len(unexpected),
        advice=() if helpful is None else (helpful,),
        matching=matching,
    )
    if made.equal:
        return made
    # The dtypes of the two sides may differ, so compare the structure of modules without dtypes.
    parts = {(key, len(kind.shape)): None for side in (a, b) for key, kind in side.items()}
    return replace(made, modules=Modules(parts))


def _prefix_advice(
    way: PrefixChange,
    a: Mapping[str, Kind],
    b: Mapping[str, Kind],
    name: str | None,
    chosen: tuple[str, ...],
) -> str | None:
    """If A has all keys of B after a prefix is stripped or added, return a hint. Otherwise, return
    None."""
    if bool(way.strip) == bool(way.add) or not b.keys() <= {way(key) for key in a}:
        return None
    if not name:
        command = f"`{'strip' if way.strip else 'add'}-module` of {way.strip or way.add!r}"
    elif way.strip:
        command = advice.strip_module(name, [way.strip], *chosen)
    else:
        command = advice.add_module(name, way.add, *chosen)
    return f"this makes all keys match: {command}"


SHOWN = 6  # maximum number of root entries in the list of data that was not compared


class Rest(NamedTuple):
    """The tensors, values and Python objects of a checkpoint outside the weights. The keys are
    paths."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, str]
    objects: Mapping[str, str]

    def selected(self, matches: Matches | None) -> Rest:
        """Return the tensors, values and objects whose paths match."""
        parts = selected(self.values, matches), selected(self.objects, matches)
        return Rest(selected(self.tensors, matches), *parts)


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    everything: bool = False,
    values: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    name: str | None = None,
    matches: Matches | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare the weights of two checkpoints. With `everything`, compare all other entries too.

    Other entries, such as optimizers and settings, are matched by their paths. If neither
    checkpoint has weights, all entries are compared. `matches` selects keys and paths. See
    :func:`compare` for the other arguments. ``uncompared`` of the result describes the data that
    was not compared.
    """
    weights: tuple[Tensors, Tensors] = ({}, {})
    if has_weights(a, b):
        weights = a.weights, b.weights
    else:
        everything = True
    names = weights[0].keys() | weights[1].keys()
    weights = selected(weights[0], matches), selected(weights[1], matches)
    excluded = len(names) - len(weights[0].keys() | weights[1].keys())
    found = _common(*weights, values, atol, rtol, progress)
    found = named(found, kinds(weights[0]), kinds(weights[1]), name, a.chosen)
    ours, theirs = rest_of(a, everything), rest_of(b, everything)
    if everything and not any((*weights, ours.tensors, theirs.tensors)):
        found = replace(found, values_compared=True)  # no values to compare
    left = [] if found.values_compared else ["the values of tensors (--no-values)"]
    if found.values_compared and (pairs := len(found.renamed)):
        left.append(f"the values of {plural(pairs, 'key')} that look renamed")
    if excluded:
        left.append(f"{plural(excluded, 'key')} that --keys excludes")
    if found.unread:
        left.append(f"the values of {some(found.unread)}")
    if not everything:
        if beside := _beside(ours, theirs):
            left.append(f"{beside} (--all)")
        return _of_adapters(replace(found, uncompared=tuple(left)), a, b)
    ours, theirs = ours.selected(matches), theirs.selected(matches)
    both = _common(ours.tensors, theirs.tensors, values, atol, rtol, progress)
    if both.unread:
        left.append(f"the values of {some(both.unread)}")
    if objects := ours.objects.keys() | theirs.objects.keys():
        left.append(f"the content of {plural(len(objects), 'Python object')}")
    # List the entries of A in the order of A. Then list the entries that only B has.
    entries = []
    for one, other in ((ours.values, theirs.values), (ours.objects, theirs.objects)):
        for path in dict.fromkeys((*one, *other)):
            texts = one.get(path), other.get(path)
            entries += [Entry(path, *texts)] if texts[0] != texts[1] else []
    lacking = (key for key in theirs.tensors if key not in ours.tensors)
    beyond = (key for key in ours.tensors if key not in theirs.tensors)
    found = replace(
        found,
        missing=(*found.missing, *lacking),
        unexpected=(*found.unexpected, *beyond),
        mismatched=(*found.mismatched, *both.mismatched),
        changed=(*found.changed, *both.changed),
        common=found.common + len(ours.tensors.keys() & theirs.tensors.keys()),
        entries=tuple(entries),
        uncompared=tuple(left),
        unread=(*found.unread, *both.unread),
    )
    return _of_adapters(found, a, b)


def _of_adapters(found: Diff, a: Checkpoint, b: Checkpoint) -> Diff:
    """If both checkpoints are adapters, add the ranks, alphas and targets that differ to `found`.

    If only one checkpoint is an adapter, add a hint. The hint contains the command that compares
    the adapter with the other checkpoint.
    """
    ours, theirs = adapter_of(a), adapter_of(b)
    if ours is not None and theirs is not None:
        facts = ours.facts, theirs.facts
        pairs = [(key, facts[0].get(key), facts[1].get(key)) for key in {**facts[0], **facts[1]}]
        entries = [
            Entry(f"adapter: {key}", *texts) for key, *texts in pairs if texts[0] != texts[1]
        ]
        return replace(found, entries=(*found.entries, *entries))
    adapter, base = ours or theirs, b if ours is not None else a
    if adapter is None or not adapter.path or not base.name:
        return found
    place = base.folder.name if base.folder is not None else base.name
    words = ("ckptkit", "lora", "check", "--base", place, adapter.path)
    line = f"{adapter.path} is an adapter; to compare it with its base: {shell_command(words)}"
    return replace(found, advice=(line,))


def selected(values: Mapping[str, T], matches: Matches | None) -> Mapping[str, T]:
    """Return the values whose names match. If `matches` is None, return all values."""
    if matches is None:
        return values
    return {name: value for name, value in values.items() if matches(name)}


def has_weights(*sides: Checkpoint) -> bool:
    """Return True if any of the checkpoints has weights."""
    return any(each.selection is not None for each in sides)


def entire(checkpoint: Checkpoint) -> Checkpoint:
    """If the ``key`` of a checkpoint is ``""`` but the file has no weights, set the key to None.

    The key ``""`` selects the complete file as the weights. But the file of an optimizer, for
    example, has no weights.
    """
    if checkpoint.key == "" and locate(checkpoint.root) is None:
        return checkpoint.with_key(None)
    return checkpoint


def rest_of(checkpoint: Checkpoint, exact: bool) -> Rest:
    """Return the content outside the weights. Do not include the attributes of a pickled module.

    If `exact` is true, two different values always have different strings. Otherwise, two long
    arrays that differ only after the first items have equal strings.
    """
    summary = summarize(checkpoint)
    values = {
        join(each.path): each.exact() if exact else f"{each.value!r}"
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


def _beside(ours: Rest, theirs: Rest) -> str:
    """List the root entries outside the weights, such as ``optimizer (24 tensors)``."""
    counts: dict[str, list[int]] = {}
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for path in {**one, **other}:
            key = key_text(path.partition(".")[0])
            counts.setdefault(key, [0, 0, 0])[number] += 1
    texts = []
    for key, found in counts.items():
        named = zip(found, ("tensor", "value", "object"), strict=True)
        parts = ", ".join(plural(count, noun) for count, noun in named if count)
        texts.append(key if found == [0, 1, 0] else f"{key} ({parts})")
    return some(texts, SHOWN)
