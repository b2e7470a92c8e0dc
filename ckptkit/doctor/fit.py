"""What keeps weights from fitting a model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape

from ckptkit.analysis.advice import argument, convert, edit
from ckptkit.analysis.matching import Kind, match
from ckptkit.core.dtypes import BY_NAME
from ckptkit.doctor.cause import ERROR, NOTE, Cause, Fix

DROPPED = 8  # names that a command leaves out
SHOWN, LONG = 3, 200  # names in a sentence, and characters of each


@dataclass(frozen=True)
class Fitting:
    """Names and kinds of both sides, and how they meet.

    ``ours`` as they are in the file; ``strip`` and ``add`` are the prefixes by which most of them become ``theirs``;
    ``ties`` are names that stand for one parameter of the model; ``options`` say the model on the command line.
    """

    path: str
    ours: Mapping[str, Kind]
    theirs: Mapping[str, Kind]
    strip: str = ""
    add: str = ""
    ties: Sequence[Sequence[str]] = ()
    options: tuple[str, ...] = ()


def causes(fitting: Fitting) -> list[Cause]:
    """All that apply, each on what is left by those before it."""
    found = list(_prefix(fitting))
    names = {name: fitting.add + name.removeprefix(fitting.strip) for name in fitting.ours}
    ours = {names[name]: kind for name, kind in fitting.ours.items()}
    ties = dict(_ties(ours, fitting))
    missing = {name: kind for name, kind in fitting.theirs.items() if name not in ours and name not in ties}
    unexpected = {name: kind for name, kind in ours.items() if name not in fitting.theirs}
    matching = match(unexpected, missing)
    renamed = {pair.old: pair.new for pair in matching.renamed}
    back = {new: old for old, new in names.items()}
    if renamed:
        found.append(_renamed(fitting, renamed, min(pair.confidence for pair in matching.renamed)))
        # those whose partner has only just got its name
        ties |= dict(_ties({renamed.get(n, n): k for n, k in ours.items()}, fitting))
    if ties:
        found.append(_tied(fitting, ties))
    shapes = [(name, kind, fitting.theirs[name]) for name, kind in ours.items() if name in fitting.theirs]
    shapes += [(pair.old, pair.a, pair.b) for pair in (*matching.renamed, *matching.reshaped)]
    found += _mismatched(fitting, [each for each in shapes if each[1].shape != each[2].shape], back)
    paired = {*renamed, *(pair.old for pair in matching.reshaped)}
    taken = {*renamed.values(), *(pair.new for pair in matching.reshaped), *ties}
    found += _unexpected(fitting, [back[name] for name in unexpected if name not in paired])
    found += _missing([name for name in missing if name not in taken])
    return [*found, *_dtypes(fitting, shapes)]


def _prefix(fitting: Fitting) -> Iterator[Cause]:
    strip, add, path = fitting.strip, fitting.add, fitting.path
    if not strip and not add:
        return
    having = sum(name.startswith(strip) for name in fitting.ours)
    how_many = "All" if having == len(fitting.ours) else f"{having:,} of {len(fitting.ours):,}"
    options = (*(("--strip", strip) if strip else ()), *(("--add", add) if add else ()))
    if not add:
        title = f"{how_many} keys start with {strip!r}, those of the model do not."
        command = edit("strip-module", path, "stripped", *(() if strip == "module." else ("--prefix", strip)))
    elif not strip:
        title = f"The keys of the model start with {add!r}, those of the file do not."
        command = edit("add-module", path, "wrapped", *(() if add == "module." else ("--prefix", add)))
    else:
        title = f"{how_many} keys start with {strip!r}, those of the model with {add!r}."
        command = convert(path, "renamed", *options)
    yield Cause(
        "prefix",
        ERROR,
        title,
        'One of the two was wrapped when it was saved or is now: "Missing key(s) in state_dict".',
        command,
        Fix(strip=(strip,) * bool(strip), add=add),
    )


def _ties(ours: Mapping[str, Kind], fitting: Fitting) -> Iterator[tuple[str, str]]:
    """Names that the file does not have, and the one that it has of the same parameter."""
    for same in fitting.ties:
        there = next((name for name in same if name in ours and ours[name].shape == fitting.theirs[name].shape), None)
        if there is not None:
            yield from ((name, there) for name in same if name not in ours)


def _tied(fitting: Fitting, ties: Mapping[str, str]) -> Cause:
    pairs = [f"{name} is {tied}" for name, tied in ties.items()]
    return Cause(
        "tied",
        ERROR,
        f"Tied weights were saved once: {_some(pairs)}.",
        'In the model both names stand for one parameter, in the file there is one of them: "Missing key(s)".',
        _doctor(fitting, "tied"),
        Fix(ties=ties),
    )


def _renamed(fitting: Fitting, names: Mapping[str, str], least: float) -> Cause:
    pairs = [f"{old} -> {new}" for old, new in names.items()]
    look = shlex.join(("ckptkit", "diff", *fitting.options, *argument(fitting.path)))
    return Cause(
        "renamed",
        ERROR,
        f"{len(names):,} keys have other names in the model: {_some(pairs)}.",
        f"Shapes and names say so, the least sure of them with {least:.0%}; to look through them: {look}",
        _doctor(fitting, "renamed"),
        Fix(names=names),
    )


def _mismatched(fitting: Fitting, shapes: Sequence[tuple[str, Kind, Kind]], back: Mapping[str, str]) -> Iterator[Cause]:
    if shapes:
        texts = [f"{name} is {list(a.shape)} in the file and {list(b.shape)} in the model" for name, a, b in shapes]
        yield Cause(
            "mismatched",
            ERROR,
            f"{_count(len(shapes), 'key')} of another shape: {_some(texts)}.",
            '"size mismatch", with strict=False as well. If that layer is to be trained anew, '
            "leave it out of the file, and "
            "load with strict=False.",
            _without(fitting.path, [back.get(name, name) for name, _, _ in shapes]),
        )


def _unexpected(fitting: Fitting, names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "unexpected",
            ERROR,
            f"{_count(len(names), 'key')} that the model does not have: {_some(names)}.",
            '"Unexpected key(s) in state_dict"; strict=False leaves them out without a word.',
            _without(fitting.path, names) if len(names) < len(fitting.ours) else None,
        )


def _missing(names: Sequence[str]) -> Iterator[Cause]:
    if names:
        yield Cause(
            "missing",
            ERROR,
            f"The file lacks {_count(len(names), 'key')} of the model: {_some(names)}.",
            '"Missing key(s) in state_dict"; with strict=False the model keeps its initial '
            "values for them, without a word.",
        )


def _dtypes(fitting: Fitting, pairs: Iterable[tuple[str, Kind, Kind]]) -> Iterator[Cause]:
    """Floating-point types that are others in the model."""
    other = [(a.dtype, b.dtype) for _, a, b in pairs if a.dtype != b.dtype and _is_float(a) and _is_float(b)]
    if other:
        kinds = [f"{a} in the file, {b} in the model" for a, b in dict.fromkeys(other)]
        yield Cause(
            "dtype",
            NOTE,
            f"{_count(len(other), 'key')} of another dtype: {_some(kinds)}.",
            "load_state_dict casts them to those of the model without a word; with assign=True, "
            "or as a file, they stay.",
            convert(fitting.path, other[0][1], "--cast", other[0][1]),
        )


def _is_float(kind: Kind) -> bool:
    return kind.dtype in BY_NAME and BY_NAME[kind.dtype].kind == "float"


def _without(path: str, names: Sequence[str]) -> str | None:
    """The command that leaves names out, None if they are too many for one."""
    if len(names) > DROPPED:
        return None
    return convert(path, "fitting", *(word for name in names for word in ("--drop", escape(name))))


def _doctor(fitting: Fitting, mark: str) -> str:
    """What no other command does: it knows the names of the model."""
    output = shlex.split(edit("doctor", fitting.path, mark))[-1]
    return shlex.join(("ckptkit", "doctor", *fitting.options, "--fix", output, *argument(fitting.path)))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(each[:LONG] for each in texts[:SHOWN]) + (
        f" and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    )
