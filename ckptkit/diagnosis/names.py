"""Causes in the names of the weights: parts that a plain model does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from glob import escape

from ckptkit.analysis.advice import prefix_options, wrappers
from ckptkit.core.text import flatten
from ckptkit.core.weights import WRAPPERS
from ckptkit.diagnosis.cause import ERROR, NOTE, Cause
from ckptkit.diagnosis.facts import Facts, edit, is_lightning, is_torch_file, names_of, some

ATTRIBUTE = "model."  # what many modules call the network inside


def causes(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for wrappers before the names and inside them.

    With a model, `fit` finds them.
    """
    if not facts.with_model:
        yield from _prefix(facts)
        yield from _attribute(facts)
        yield from _inner(facts)


def _prefix(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrappers before most names, one inside the other perhaps."""
    names = names_of(facts)
    if not names or _is_inside_too(names):
        return
    found = wrappers(names)
    rest = names
    for each in found:
        rest = [name.removeprefix(each) for name in rest]
    if found:
        yield _wrappers(facts, names, found)
    if is_lightning(facts) and (attribute := _first_part(rest)):
        yield _network(facts, (*found, attribute))


def _wrappers(facts: Facts, names: list[str], found: list[str]) -> Cause:
    """Return the cause for wrappers before most names."""
    having = sum(name.startswith(found[0]) for name in names)
    how_many = "All" if having == len(names) else f"{having:,} of {len(names):,}"
    why = "; ".join(WRAPPERS[each] for each in dict.fromkeys(found))
    return Cause(
        "prefix",
        ERROR,
        f"{how_many} keys start with {''.join(found)!r}.",
        f'{why[:1].upper()}{why[1:]}; a plain model has no such names: "Missing key(s) in '
        'state_dict".',
        edit(facts, "strip-module", "stripped", *prefix_options(found)),
        {"strip": {"prefixes": tuple(found)}},
    )


def _network(facts: Facts, prefixes: tuple[str, ...]) -> Cause:
    """Return the note for a LightningModule that is its network and nothing else.

    `prefixes` are those to strip, that of the network last.
    """
    attribute = prefixes[-1]
    return Cause(
        "attribute",
        NOTE,
        f"All keys start with {attribute!r}, the name of the network in the LightningModule.",
        "Lightning loads the file as it is. The network alone has no such names; for it:",
        edit(
            facts,
            "strip-module",
            "network",
            *flatten(("--prefix", each) for each in prefixes),
        ),
        {"strip": {"prefixes": (attribute,)}},
    )


def _first_part(names: list[str]) -> str:
    """Return the part before the first dot of all names, dot included, "" if they differ."""
    first = names[0].partition(".")[0] + "."
    return first if all(name.startswith(first) for name in names) else ""


def _attribute(facts: Facts) -> Iterator[Cause]:
    """Yield a note for a common first part: a network inside a module, or part of each network."""
    names = names_of(facts)
    if not is_torch_file(facts) or not names:
        return
    if is_lightning(facts):
        yield from _network_and_others(facts, names)
    elif _first_part(names) == ATTRIBUTE:
        yield Cause(
            "attribute",
            NOTE,
            f"All keys start with {ATTRIBUTE!r}.",
            "Was the network an attribute of the module that was saved? The network alone has no "
            "such names, and --model tells which of the two yours is.",
            edit(facts, "strip-module", "stripped", "--prefix", ATTRIBUTE),
        )


def _network_and_others(facts: Facts, names: list[str]) -> Iterator[Cause]:
    """Yield a note for the network of a LightningModule that has other parts: metrics, losses."""
    first, count = Counter(name.partition(".")[0] for name in names).most_common(1)[0]
    if wrappers(names) or count == len(names) or 2 * count <= len(names):
        return
    prefix = f"{first}."
    words = ("--keep", f"{escape(prefix)}*", "--strip", prefix)
    yield Cause(
        "attribute",
        NOTE,
        f"{count:,} of {len(names):,} keys start with {prefix!r}.",
        "Is that what the LightningModule calls its network? The network alone has no such names, "
        "and --model tells if it is so.",
        edit(facts, "convert", "network", *words),
    )


def _inner(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrapped submodules: ``layers.0._orig_mod.weight``, or a few names."""
    parts = [each[:-1] for each in WRAPPERS if each != "module."]
    names = names_of(facts)
    if wrappers(names) and not _is_inside_too(names):
        return
    new = {name: short for name in names if (short := _without(name, parts)) != name}
    if not new or len({*(new.get(name, name) for name in names)}) != len(names):
        return
    inside = [part for part in parts if any(part in name.split(".") for name in new)]
    pattern = rf"(^|\.)(({'|'.join(inside)})\.)+=\1"  # several may follow each other
    yield Cause(
        "inner-prefix",
        ERROR,
        f"{len(new):,} of {len(names):,} keys have {some(inside)} inside them.",
        "Submodules were wrapped, by torch.compile, FSDP or activation checkpointing; a plain "
        "model has no such names.",
        edit(facts, "rename", "renamed", "--sub", pattern),
        {"rename": {"mapping": new}},
    )


def _is_inside_too(names: list[str]) -> bool:
    """Return whether names begin with a wrapper, not ``module.``, and have wrappers inside.

    FSDP does that; one edit then removes both.
    """
    parts = {each[:-1] for each in WRAPPERS if each != "module."}
    begins = {each[:-1] for each in wrappers(names)[:1]}
    return (
        begins <= parts
        and bool(begins)
        and any(not parts.isdisjoint(name.split(".")[2:]) for name in names)
    )


def _without(name: str, parts: Collection[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)
