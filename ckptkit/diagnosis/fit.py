"""Check whether the keys, shapes and dtypes of weights match those of a model."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape

from ckptkit.analysis.advice import add_module, convert, edit, strip_module
from ckptkit.analysis.matching import Kind, PrefixChange, Renamed, is_taken_by_torch, pair
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.text import argument, flatten, output_name, plural, shell_command, some, without
from ckptkit.diagnosis.cause import ERROR, NOTE, Cause

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
    ours = {fitting.way(name): kind for name, kind in fitting.ours.items()}
    ties = dict(_ties(ours, fitting))
    expected = without(fitting.theirs, ties)
    matching = pair(fitting.ours, expected, fitting.way)
    renamed = [each for each in matching.renamed if not is_taken_by_torch(each)]
    if renamed:
        ties |= _ties_of_renamed(fitting, matching.renamed)
    paired = (*matching.renamed, *matching.reshaped)
    shapes = [*_same_names(fitting), *((each.old, each.a, each.b) for each in paired)]
    filled = {*ours, *ties, *(each.new for each in paired)}
    return [
        *_prefix(fitting),
        *_renamed(fitting, renamed),
        *_tied(fitting, ties),
        *_mismatched(fitting, [(name, a, b) for name, a, b in shapes if a.shape != b.shape]),
        *_unexpected(fitting, _unpaired(fitting, expected, {each.old for each in paired})),
        *_missing([*without(expected, filled)]),
        *_dtypes(fitting, shapes),
    ]


def _ties_of_renamed(fitting: Fitting, renamed: Sequence[Renamed]) -> dict[str, str]:
    """Map each missing name of a tied parameter to the name of the parameter in the file.

    The names are those that the file has after the renames in `renamed`.
    """
    new = {each.old: each.new for each in renamed}
    now = {new.get(name, fitting.way(name)): kind for name, kind in fitting.ours.items()}
    return dict(_ties(now, fitting))


def _same_names(fitting: Fitting) -> Iterator[tuple[str, Kind, Kind]]:
    """Yield the keys that are equal to keys of the model after the change of prefixes.

    Each item is (key, dtype and shape in the file, dtype and shape in the model).
    """
    for name, kind in fitting.ours.items():
        new = fitting.way(name)
        if new in fitting.theirs:
            yield name, kind, fitting.theirs[new]


def _unpaired(fitting: Fitting, expected: Container[str], paired: Container[str]) -> list[str]:
    """Return the keys of the file that match no key of the model."""
    left = without(fitting.ours, paired)
    return [name for name in left if fitting.way(name) not in expected]


def _prefix(fitting: Fitting) -> Iterator[Cause]:
    (strip, add), path = fitting.way, fitting.path
    if not strip and not add:
        return
    count = sum(name.startswith(strip) for name in fitting.ours)
    how_many = "All" if count == len(fitting.ours) else f"{count:,} of {len(fitting.ours):,}"
    options = (*(("--strip", strip) if strip else ()), *(("--add", add) if add else ()))
    if not add:
        title = f"{how_many} keys start with {strip!r}, but the keys of the model do not."
        command = strip_module(path, [strip], *fitting.chosen)
    elif not strip:
        title = f"The keys of the model start with {add!r}, but the keys of the file do not."
        command = add_module(path, add, *fitting.chosen)
    else:
        title = (
            f"{how_many} keys start with {strip!r}, but the keys of the model start with {add!r}."
        )
        command = convert(path, "renamed", *fitting.chosen, *options)
    yield Cause(
        "prefix",
        ERROR,
        title,
        "Either the saved model was wrapped, or your model is wrapped. load_state_dict raises "
        '"Missing key(s) in state_dict".',
        command,
        {
            **({"strip": {"prefix": (strip,)}} if strip else {}),
            **({"add": {"prefix": add}} if add else {}),
        },
    )


def _ties(ours: Mapping[str, Kind], fitting: Fitting) -> Iterator[tuple[str, str]]:
    """Yield (missing name, name in the file) for tied parameters."""
    for same in fitting.ties:
        held = [name for name in same if name in ours]
        there = [name for name in held if ours[name].shape == fitting.theirs[name].shape]
        if there:
            yield from ((name, there[0]) for name in same if name not in ours)


def _tied(fitting: Fitting, ties: Mapping[str, str]) -> Iterator[Cause]:
    if not ties:
        return
    pairs = [f"{name} = {tied}" for name, tied in ties.items()]
    yield Cause(
        "tied",
        ERROR,
        f"Tied weights were saved under one name: {_some(pairs)}.",
        "The model has one parameter with two names, but the file has only one of these names. "
        'load_state_dict raises "Missing key(s)".',
        _doctor(fitting, "tied"),
        {"tie": {"names": ties}},
    )


def _renamed(fitting: Fitting, pairs: Sequence[Renamed]) -> Iterator[Cause]:
    if not pairs:
        return
    names = {each.old: each.new for each in pairs}
    least = min(each.confidence for each in pairs)
    examples = [f"{old} -> {new}" for old, new in names.items()]
    look = ". `diff` with this --model lists all pairs." if fitting.options else "."
    yield Cause(
        "renamed",
        ERROR,
        f"{plural(len(names), 'key')} with another name in the model: {_some(examples)}.",
        f"Names and shapes suggest these pairs, with a confidence of at least {least:.0%}{look}",
        _substituted(fitting, names) or _doctor(fitting, "renamed"),
        {"rename": {"map": {fitting.way(old): new for old, new in names.items()}}},
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
    words = flatten(("--sub", f"^{re.escape(old)}={_literal(new)}") for old, new in rules)
    if any("=" in old for old, _ in rules):  # "=" ends the pattern in the argument of --sub
        return None
    return edit("rename", fitting.path, "renamed", *fitting.chosen, *words)


def _rule(old: str, new: str) -> tuple[str, str]:
    """Split off the common suffix of two dotted names, and return the two prefixes."""
    ours, theirs = old.split("."), new.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        del ours[-1], theirs[-1]
    return "".join(f"{part}." for part in ours), "".join(f"{part}." for part in theirs)


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def _mismatched(fitting: Fitting, shapes: Sequence[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    if shapes:
        examples = [
            f"{name} is {list(a.shape)} in the file and {list(b.shape)} in the model"
            for name, a, b in shapes
        ]
        yield Cause(
            "mismatched",
            ERROR,
            f"{plural(len(shapes), 'key')} with a different shape: {_some(examples)}.",
            'load_state_dict raises "size mismatch", even with strict=False. To train such a layer '
            "again, drop its keys from the file and load with strict=False.",
            _without(fitting, [name for name, _, _ in shapes]),
        )


def _unexpected(fitting: Fitting, names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "unexpected",
            ERROR,
            f"{plural(len(names), 'key')} that the model does not have: {_some(names)}.",
            'load_state_dict raises "Unexpected key(s) in state_dict". With strict=False, '
            "load_state_dict silently ignores these keys.",
            _without(fitting, names) if len(names) < len(fitting.ours) else None,
        )


def _missing(names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "missing",
            ERROR,
            f"The file lacks {plural(len(names), 'key')} of the model: {_some(names)}.",
            'load_state_dict raises "Missing key(s) in state_dict". With strict=False, these '
            "parameters silently keep their initial values.",
        )


def _dtypes(fitting: Fitting, pairs: Iterable[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    """Yield a note if floating-point dtypes in the file and in the model differ."""
    other = [
        (a.dtype, b.dtype)
        for _, a, b in pairs
        if a.dtype != b.dtype and _is_float(a) and _is_float(b)
    ]
    if other:
        first = ("--dequantize",) * fitting.is_quantized  # --cast does not change quantized weights
        kinds = [f"{a} in the file, {b} in the model" for a, b in dict.fromkeys(other)]
        yield Cause(
            "dtype",
            NOTE,
            f"{plural(len(other), 'key')} with a different dtype: {_some(kinds)}.",
            "load_state_dict silently casts tensors to the dtype of the model. With assign=True, "
            "load_state_dict keeps the dtype of the file.",
            convert(fitting.path, other[0][1], *fitting.chosen, *first, "--cast", other[0][1]),
        )


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
