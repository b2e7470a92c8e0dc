"""The differences of two checkpoints: of their weights, and of everything else on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckptkit.analysis.diff import Diff, Entry, common, compare
from ckptkit.analysis.summary import summarize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import plural, some
from ckptkit.core.tree import join, key_text
from ckptkit.core.weights import locate

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
    found = compare(*weights, name=name, key=a.key, **how)  # type: ignore[arg-type]
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
