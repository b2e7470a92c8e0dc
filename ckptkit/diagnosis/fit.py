"""Causes that keep weights from fitting a model."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape

from ckptkit.analysis.advice import add_module, convert, edit, strip_module
from ckptkit.analysis.matching import Kind, Renamed, Way, is_taken_by_torch, pair
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.text import argument, flatten, output_name, plural, shell_command, some, without
from ckptkit.diagnosis.cause import ERROR, NOTE, Cause

DROPPED = 8  # names that a command leaves out
RULES = 4  # substitutions in a command
SHOWN, LONG = 3, 200  # names in a sentence, and characters of each


@dataclass(frozen=True)
class Fitting:
    """Names and kinds of both sides, and the prefixes by which they match.

    ``ours`` as they are in the file; ``way``: prefixes by which most of them become ``theirs``;
    ``ties`` are names that stand for one parameter of the model; ``options`` say the model on the
    command line, none where it is an object; ``is_quantized``: ``ours`` are what codes and scales
    mean.
    """

    path: str
    ours: Mapping[str, Kind]
    theirs: Mapping[str, Kind]
    way: Way = field(default_factory=Way)
    ties: Sequence[Sequence[str]] = ()
    options: tuple[str, ...] = ()
    is_quantized: bool = False
    chosen: tuple[str, ...] = ()  # options that name the entry of the weights


def causes(fitting: Fitting) -> list[Cause]:
    """Return all causes that apply, each on what those before it left."""
    ours = {fitting.way(name): kind for name, kind in fitting.ours.items()}
    ties = dict(_ties(ours, fitting))
    wanted = without(fitting.theirs, ties)
    matching = pair(fitting.ours, wanted, fitting.way)
    renamed = [each for each in matching.renamed if not is_taken_by_torch(each)]
    if renamed:
        ties |= _ties_of_renamed(fitting, matching.renamed)
    paired = (*matching.renamed, *matching.reshaped)
    shapes = [*_same_names(fitting), *((each.old, each.a, each.b) for each in paired)]
    met = {*ours, *ties, *(each.new for each in paired)}
    return [
        *_prefix(fitting),
        *_renamed(fitting, renamed),
        *_tied(fitting, ties),
        *_mismatched(fitting, [(name, a, b) for name, a, b in shapes if a.shape != b.shape]),
        *_unexpected(fitting, _unpaired(fitting, wanted, {each.old for each in paired})),
        *_missing([*without(wanted, met)]),
        *_dtypes(fitting, shapes),
    ]


def _ties_of_renamed(fitting: Fitting, renamed: Sequence[Renamed]) -> dict[str, str]:
    """Return the ties whose partner has only just got its name."""
    new = {each.old: each.new for each in renamed}
    now = {new.get(name, fitting.way(name)): kind for name, kind in fitting.ours.items()}
    return dict(_ties(now, fitting))


def _same_names(fitting: Fitting) -> Iterator[tuple[str, Kind, Kind]]:
    """Yield the names that meet by the prefixes alone, with the kinds of both sides."""
    for name, kind in fitting.ours.items():
        new = fitting.way(name)
        if new in fitting.theirs:
            yield name, kind, fitting.theirs[new]


def _unpaired(fitting: Fitting, wanted: Container[str], paired: Container[str]) -> list[str]:
    """Return the names of the file that no name of the model was found for."""
    left = without(fitting.ours, paired)
    return [name for name in left if fitting.way(name) not in wanted]


def _prefix(fitting: Fitting) -> Iterator[Cause]:
    (strip, add), path = fitting.way, fitting.path
    if not strip and not add:
        return
    having = sum(name.startswith(strip) for name in fitting.ours)
    how_many = "All" if having == len(fitting.ours) else f"{having:,} of {len(fitting.ours):,}"
    options = (*(("--strip", strip) if strip else ()), *(("--add", add) if add else ()))
    if not add:
        title = f"{how_many} keys start with {strip!r}, those of the model do not."
        command = strip_module(path, [strip], *fitting.chosen)
    elif not strip:
        title = f"The keys of the model start with {add!r}, those of the file do not."
        command = add_module(path, add, *fitting.chosen)
    else:
        title = f"{how_many} keys start with {strip!r}, those of the model with {add!r}."
        command = convert(path, "renamed", *fitting.chosen, *options)
    yield Cause(
        "prefix",
        ERROR,
        title,
        'One of the two was wrapped when it was saved or is now: "Missing key(s) in state_dict".',
        command,
        {
            **({"strip": {"prefix": (strip,)}} if strip else {}),
            **({"add": {"prefix": add}} if add else {}),
        },
    )


def _ties(ours: Mapping[str, Kind], fitting: Fitting) -> Iterator[tuple[str, str]]:
    """Return the missing names, each with the name of the same parameter that the file has."""
    for same in fitting.ties:
        held = [name for name in same if name in ours]
        there = [name for name in held if ours[name].shape == fitting.theirs[name].shape]
        if there:
            yield from ((name, there[0]) for name in same if name not in ours)


def _tied(fitting: Fitting, ties: Mapping[str, str]) -> Iterator[Cause]:
    if not ties:
        return
    pairs = [f"{name} is {tied}" for name, tied in ties.items()]
    yield Cause(
        "tied",
        ERROR,
        f"Tied weights were saved once: {_some(pairs)}.",
        "In the model both names stand for one parameter, in the file there is one of them: "
        '"Missing key(s)".',
        _doctor(fitting, "tied"),
        {"tie": {"names": ties}},
    )


def _renamed(fitting: Fitting, pairs: Sequence[Renamed]) -> Iterator[Cause]:
    if not pairs:
        return
    names = {each.old: each.new for each in pairs}
    least = min(each.confidence for each in pairs)
    texts = [f"{old} -> {new}" for old, new in names.items()]
    look = "; `diff` with this --model lists them." if fitting.options else "."
    yield Cause(
        "renamed",
        ERROR,
        f"{plural(len(names), 'key')} with another name in the model: {_some(texts)}.",
        f"Shapes and names say so, the least sure of them with {least:.0%}{look}",
        _substituted(fitting, names) or _doctor(fitting, "renamed"),
        {"rename": {"mapping": {fitting.way(old): new for old, new in names.items()}}},
    )


def _substituted(fitting: Fitting, names: Mapping[str, str]) -> str | None:
    """Return the command that renames by prefixes, None where prefixes do not suffice."""
    rules = dict.fromkeys(_rule(old, new) for old, new in names.items())
    if any(fitting.way) or len(rules) > RULES or not all(old for old, _ in rules):
        return None
    for name in fitting.ours:
        new = name
        for old, head in rules:
            new = f"{head}{new.removeprefix(old)}" if new.startswith(old) else new
        if new != names.get(name, name):
            return None
    words = flatten(("--sub", f"^{re.escape(old)}={_literal(new)}") for old, new in rules)
    if any("=" in old for old, _ in rules):  # which ends the expression
        return None
    return edit("rename", fitting.path, "renamed", *fitting.chosen, *words)


def _rule(old: str, new: str) -> tuple[str, str]:
    """Return the beginnings of two names, without the last dotted parts that are equal."""
    ours, theirs = old.split("."), new.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        del ours[-1], theirs[-1]
    return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def _mismatched(fitting: Fitting, shapes: Sequence[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    if shapes:
        texts = [
            f"{name} is {list(a.shape)} in the file and {list(b.shape)} in the model"
            for name, a, b in shapes
        ]
        yield Cause(
            "mismatched",
            ERROR,
            f"{plural(len(shapes), 'key')} of another shape: {_some(texts)}.",
            '"size mismatch", with strict=False as well. If that layer is to be trained again, '
            "leave it out of the file, and load with strict=False.",
            _without(fitting, [name for name, _, _ in shapes]),
        )


def _unexpected(fitting: Fitting, names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "unexpected",
            ERROR,
            f"{plural(len(names), 'key')} that the model does not have: {_some(names)}.",
            '"Unexpected key(s) in state_dict"; strict=False leaves them out silently.',
            _without(fitting, names) if len(names) < len(fitting.ours) else None,
        )


def _missing(names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "missing",
            ERROR,
            f"The file lacks {plural(len(names), 'key')} of the model: {_some(names)}.",
            '"Missing key(s) in state_dict"; with strict=False the model keeps its initial '
            "values for them, silently.",
        )


def _dtypes(fitting: Fitting, pairs: Iterable[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    """Yield a note for floating-point types that differ from those of the model."""
    other = [
        (a.dtype, b.dtype)
        for _, a, b in pairs
        if a.dtype != b.dtype and _is_float(a) and _is_float(b)
    ]
    if other:
        first = ("--dequantize",) * fitting.is_quantized  # codes are not cast
        kinds = [f"{a} in the file, {b} in the model" for a, b in dict.fromkeys(other)]
        yield Cause(
            "dtype",
            NOTE,
            f"{plural(len(other), 'key')} of another dtype: {_some(kinds)}.",
            "load_state_dict casts them silently to those of the model; with assign=True, "
            "or as a file, they stay.",
            convert(fitting.path, other[0][1], *fitting.chosen, *first, "--cast", other[0][1]),
        )


def _is_float(kind: Kind) -> bool:
    return kind.dtype in BY_NAME and BY_NAME[kind.dtype].kind == "float"


def _without(fitting: Fitting, names: Sequence[str]) -> str | None:
    """Return the command that leaves names out, None if they are too many for one."""
    if len(names) > DROPPED:
        return None
    words = flatten(("--drop", escape(name)) for name in names)
    return convert(fitting.path, "fitting", *fitting.chosen, *words)


def _doctor(fitting: Fitting, mark: str) -> str | None:
    """Return the `doctor` command, which alone knows the names of the model, if it can be named."""
    if not fitting.options:
        return None
    output = output_name(fitting.path, mark)
    return shell_command(
        ("ckptkit", "doctor", *fitting.options, "--fix", output, *argument(fitting.path))
    )


def _some(texts: Sequence[str]) -> str:
    return some((each[:LONG] for each in texts), SHOWN)
