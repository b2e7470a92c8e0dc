"""Check whether the keys, shapes and dtypes of weights match those of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape

from ckptkit.analysis.advice import add_module, convert, edit, strip_module
from ckptkit.analysis.matching import Kind, PrefixChange, Renamed, is_taken_by_torch, pair
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.text import argument, flatten, output_name, plural, shell_command, some, without
from ckptkit.diagnosis.cause import Cause, Fix, cause

DROPPED = 8  # maximum number of --drop options in a command
RULES = 4  # maximum number of substitutions in a command
# Maximum number of names in a sentence, and maximum number of characters of a name
SHOWN, LONG = 3, 200


@dataclass(frozen=True)
class Fitting:
    """The weights of a file and the parameters of a model.

    ``ours`` maps the keys of the file to dtypes and shapes. ``theirs`` maps the keys of the model
    to dtypes and shapes. If ``is_quantized`` is True, ``ours`` describes the dequantized weights.

    ``way`` is the change of prefixes that converts the most keys of the file to keys of the model.
    Each item of ``ties`` lists the names of one tied parameter.
    """

    path: str
    ours: Mapping[str, Kind]
    theirs: Mapping[str, Kind]
    way: PrefixChange = field(default_factory=PrefixChange)
    ties: Sequence[Sequence[str]] = ()
    # command line options that select the model; empty if the caller gave a torch.nn.Module
    options: tuple[str, ...] = ()
    is_quantized: bool = False
    chosen: tuple[str, ...] = ()  # command line options that select the weights


def causes(fitting: Fitting) -> list[Cause]:
    """Return all reasons why the weights do not fit the model.

    Each check gets only the keys for which earlier checks found no reason.
    """
    way = fitting.way
    ours = {way(name): kind for name, kind in fitting.ours.items()}
    ties = dict(_ties(ours, fitting))
    expected = without(fitting.theirs, ties)
    matching = pair(fitting.ours, expected, way)
    paired = (*matching.renamed, *matching.reshaped)
    renamed = {each.old: each for each in matching.renamed if not is_taken_by_torch(each)}
    if renamed:  # also find missing names of tied parameters after the renames
        new = {each.old: each.new for each in matching.renamed}
        now = {new.get(name, way(name)): kind for name, kind in fitting.ours.items()}
        ties |= dict(_ties(now, fitting))
    same = [name for name in fitting.ours if way(name) in fitting.theirs]
    shapes = [(name, fitting.ours[name], fitting.theirs[way(name)]) for name in same]
    shapes += [(each.old, each.a, each.b) for each in paired]
    unpaired = without(fitting.ours, {each.old for each in paired})
    unexpected = [name for name in unpaired if way(name) not in expected]
    missing = [*without(expected, {*ours, *ties, *(each.new for each in paired)})]
    return [
        *_prefix(fitting),
        *_renamed(fitting, renamed),
        *_different(fitting, ties, [(name, a, b) for name, a, b in shapes if a.shape != b.shape]),
        *_unmatched(fitting, unexpected, missing),
        *_dtypes(fitting, shapes),
    ]


def _prefix(fitting: Fitting) -> Iterator[Cause]:
    (strip, add), path = fitting.way, fitting.path
    count = sum(name.startswith(strip) for name in fitting.ours)
    how_many = "All" if count == len(fitting.ours) else f"{count:,} of {len(fitting.ours):,}"
    if strip and add:
        command = convert(path, "renamed", *fitting.chosen, "--strip", strip, "--add", add)
        fix: Fix = {"strip": {"prefix": (strip,)}, "add": {"prefix": add}}
        yield cause("prefix/both", command, fix, how_many=how_many, strip=strip, add=add)
    elif strip:
        command, fix = strip_module(path, [strip], *fitting.chosen), {"strip": {"prefix": (strip,)}}
        yield cause("prefix/strip", command, fix, how_many=how_many, strip=strip)
    elif add:
        command, fix = add_module(path, add, *fitting.chosen), {"add": {"prefix": add}}
        yield cause("prefix/add", command, fix, add=add)


def _ties(ours: Mapping[str, Kind], fitting: Fitting) -> Iterator[tuple[str, str]]:
    """Yield (missing name, name in the file) for tied parameters."""
    for same in fitting.ties:
        held = [name for name in same if name in ours]
        there = [name for name in held if ours[name].shape == fitting.theirs[name].shape]
        if there:
            yield from ((name, there[0]) for name in same if name not in ours)


def _renamed(fitting: Fitting, pairs: Mapping[str, Renamed]) -> Iterator[Cause]:
    if pairs:
        names = {old: each.new for old, each in pairs.items()}
        yield cause(
            "renamed",
            _substituted(fitting, names) or _doctor(fitting, "renamed"),
            {"rename": {"map": {fitting.way(old): new for old, new in names.items()}}},
            more=fitting.options,
            keys=plural(len(names), "key"),
            names=_some([f"{old} -> {new}" for old, new in names.items()]),
            least=min(each.confidence for each in pairs.values()),
        )


def _substituted(fitting: Fitting, names: Mapping[str, str]) -> str | None:
    """Return the `rename` command that substitutes prefixes.

    Return None if substituting prefixes is not sufficient.
    """
    rules = dict.fromkeys(_rule(old, new) for old, new in names.items())
    if any(fitting.way) or len(rules) > RULES or not all(old for old, _ in rules):
        return None
    for name in fitting.ours:
        new = name
        for old, head in rules:
            new = f"{head}{new.removeprefix(old)}" if new.startswith(old) else new
        if new != names.get(name, name):
            return None
    literal = ((re.escape(old), new.replace("\\", r"\\")) for old, new in rules)
    words = flatten(("--sub", f"^{old}={new}") for old, new in literal)
    if any("=" in old for old, _ in rules):  # "=" ends the pattern in the argument of --sub
        return None
    return edit("rename", fitting.path, "renamed", *fitting.chosen, *words)


def _rule(old: str, new: str) -> tuple[str, str]:
    """Split off the common suffix of two dotted names, and return the two prefixes."""
    ours, theirs = old.split("."), new.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        del ours[-1], theirs[-1]
    return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)


def _different(
    fitting: Fitting, ties: Mapping[str, str], shapes: Sequence[tuple[str, Kind, Kind]]
) -> Iterator[Cause]:
    """Yield the causes for tied weights that were saved under one name, and for shapes."""
    if ties:
        pairs = _some([f"{name} = {tied}" for name, tied in ties.items()])
        yield cause("tied", _doctor(fitting, "tied"), {"tie": {"names": ties}}, pairs=pairs)
    if shapes:
        examples = [
            f"{name} is {list(a.shape)} in the file and {list(b.shape)} in the model"
            for name, a, b in shapes
        ]
        command = _without(fitting, [name for name, _, _ in shapes])
        keys = plural(len(shapes), "key")
        yield cause("mismatched", command, keys=keys, names=_some(examples))


def _unmatched(
    fitting: Fitting, unexpected: Sequence[str], missing: Sequence[str]
) -> Iterator[Cause]:
    if unexpected:
        command = _without(fitting, unexpected) if len(unexpected) < len(fitting.ours) else None
        keys = plural(len(unexpected), "key")
        yield cause("unexpected", command, keys=keys, names=_some(unexpected))
    if missing:
        yield cause("missing", keys=plural(len(missing), "key"), names=_some(missing))


def _dtypes(fitting: Fitting, pairs: Iterable[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    """Yield a note if floating-point dtypes in the file and in the model differ."""
    other = [
        (a.dtype, b.dtype)
        for _, a, b in pairs
        if a.dtype != b.dtype and _is_float(a) and _is_float(b)
    ]
    if other:
        dtype = other[0][1]
        first = ("--dequantize",) * fitting.is_quantized  # --cast does not change quantized weights
        command = convert(fitting.path, dtype, *fitting.chosen, *first, "--cast", dtype)
        kinds = [f"{a} in the file, {b} in the model" for a, b in dict.fromkeys(other)]
        yield cause("dtype", command, keys=plural(len(other), "key"), names=_some(kinds))


def _is_float(kind: Kind) -> bool:
    return kind.dtype in BY_NAME and BY_NAME[kind.dtype].kind == "float"


def _without(fitting: Fitting, names: Sequence[str]) -> str | None:
    """Return the command that drops these keys. Return None for more than DROPPED keys."""
    if len(names) > DROPPED:
        return None
    words = flatten(("--drop", escape(name)) for name in names)
    return convert(fitting.path, "fitting", *fitting.chosen, *words)


def _doctor(fitting: Fitting, mark: str) -> str | None:
    """Return the `doctor --fix` command with the options that select the model.

    Return None if the caller gave a torch.nn.Module.
    """
    if not fitting.options:
        return None
    output = output_name(fitting.path, mark)
    return shell_command(
        ("ckptkit", "doctor", *fitting.options, "--fix", output, *argument(fitting.path))
    )


def _some(texts: Sequence[str]) -> str:
    return some((each[:LONG] for each in texts), SHOWN)
