"""Checks of function arguments. A check takes the name and the value of an argument.

A check returns a valid value, or raises an ArgumentError that names the expected type.

`checked` wraps a function and checks its arguments. The table `KINDS` maps annotations to checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import IO, Any, TypeGuard, TypeVar

from ckptkit.core.errors import ArgumentError, PathError, UsageError
from ckptkit.core.text import shown

Check = Callable[[str, Any], Any]


def wrong(name: str, expected: str, value: object) -> ArgumentError:
    """Return an ArgumentError for the argument `name`, with the expected type and the value."""
    plain = isinstance(value, (str, int, float, bytes, type(None)))
    given = shown(value) if plain else type(value).__name__
    if isinstance(value, type):
        given = f"the class {value.__name__}"
    return ArgumentError(f"{name}: expected {expected}, got {given}")


def _check(expected: str, fits: Callable[[Any], bool]) -> Check:
    """Return a check that accepts a value if `fits` returns True."""

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise wrong(name, expected, value)
        return value

    return check


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(isinstance(each, str) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


text = _check("a string", lambda value: isinstance(value, str))
function = _check("a function", callable)
flag = _check("True or False", lambda value: isinstance(value, (bool, type(None))))
number = _check("a number", lambda value: value is None or _is_number(value))
count = _check(
    "an integer >= 0",
    lambda value: value is None or (_is_number(value) and isinstance(value, int) and value >= 0),
)
tolerance = _check(
    "a number >= 0", lambda value: value is None or (isinstance(value, (int, float)) and value >= 0)
)
device = _check(
    "a name such as 'cpu' or a torch.device",
    lambda value: isinstance(value, str) or type(value).__name__ == "device",
)


def flags(**values: object) -> None:
    """Raise ArgumentError unless each value is True, False or None."""
    for name, value in values.items():
        flag(name, value)


def texts(name: str, value: object) -> list[str]:
    """Return a string, or several strings, as a list of strings."""
    if isinstance(value, str):
        return [value]
    is_several = isinstance(value, Iterable) and not isinstance(value, bytes)
    listed: list[Any] = list(value) if is_several else [None]  # type: ignore[call-overload]
    if not all(isinstance(each, str) for each in listed):
        raise wrong(name, "a string or several", value)
    return listed


def text_pairs(name: str, value: object) -> list[tuple[str, str]]:
    """Return the pairs of strings in `value` as a list."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    listed: list[Any] = list(value) if several else [None]  # type: ignore[call-overload]
    if not all(map(_is_pair, listed)):
        raise wrong(name, "pairs of strings", value)
    return [(old, new) for old, new in listed]


def mapping(name: str, value: object) -> Mapping[Any, Any]:
    """Return a mapping with string keys. If `value` is None, return an empty mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong(name, "a mapping with string keys", value)
    return value


def names(name: str, value: object) -> Mapping[Any, Any] | Callable[[str], str]:
    """Return `value`: a mapping or a function from old names to new names."""
    return value if callable(value) else mapping(name, value)


def numbers(name: str, value: object) -> list[float]:
    """Return a list or tuple of numbers as a list."""
    listed: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(each, (int, float)) for each in listed):
        error = wrong(name, "a list of numbers", value)
        # If `value` is a path, the caller probably wrote average(a, b) instead of average([a, b]).
        if isinstance(value, (str, os.PathLike)):
            error.hint = "to name several checkpoints, pass one list of them"
        raise error
    return listed


def path(name: str, value: object) -> str:
    """Return a path or URL as a string."""
    if not isinstance(value, (str, os.PathLike)):
        error = wrong(name, _PATHS[name], value)
        error.hint = "pass the model's state_dict()" if hasattr(value, "state_dict") else None
        if hasattr(value, "checkpoint"):  # `value` is the result of `recover`
            error.hint = "pass its attribute checkpoint"
        if name == "destination" and hasattr(value, "write"):
            error.hint = "only `ckptkit.save` can write to a file object"
        raise error
    found = os.fsdecode(value)
    if not found:
        raise UsageError(f"{name} is an empty path")
    if "\0" in found:
        raise PathError("is not a valid path: it contains a null character", where=found)
    return found


_PATHS = {
    "source": "a path, a URL, bytes, a binary file object, a mapping or a Checkpoint",
    "destination": "a path or URL",
    "deltas": "a path, or several paths",
    "adapters": "the path of an adapter, or several paths",
}


def is_stream(value: object) -> TypeGuard[IO[bytes]]:
    """Return True for a binary file object. Raise ArgumentError for a file in text mode."""
    if isinstance(value, (str, os.PathLike)) or not hasattr(value, "write"):
        return False
    if hasattr(value, "encoding"):  # a file in text mode rejects bytes
        error = wrong("destination", "a binary file object", value)
        error.hint = "open(path, 'wb') returns a binary file object"
        raise error
    return True


def module(name: str, value: object) -> None:
    """Raise ArgumentError unless `value` is a torch.nn.Module. Do not import torch."""
    if not any(each.__module__ == "torch.nn.modules.module" for each in type(value).__mro__):
        error = wrong(name, "a torch.nn.Module", value)
        if isinstance(value, type):
            error.hint = f"pass an instance: {value.__name__}(...)"
        raise error


def takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function requires exactly two positional arguments."""
    from inspect import Parameter, signature

    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return False
    needed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in needed and each.default is Parameter.empty for each in parameters) == 2


def settings(name: str, value: object) -> list[Any] | None:
    """Return `value` as a list of numbers and dicts. Each dict maps globs to numbers.

    If `value` is None, return None.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return numbers(name, value)  # raises an error
    for each in value:
        if isinstance(each, Mapping):
            numbers(name, list(mapping(name, each).values()))
        elif not isinstance(each, (int, float)):
            raise wrong(name, "a list of numbers and mappings", each)
    return [*value]


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


# Maps an annotation to the check of arguments.
Kinds = Mapping[str, Check]
KINDS: Kinds = {
    "bool": flag,
    "bool | None": flag,
    "float | None": number,
    "int": lambda name, value: count(name, value) or 0,
    "Sequence[Setting] | None": settings,
    "int | None": count,
    "str": text,
    "str | None": optional(text),
    "str | Sequence[str]": texts,
    "str | Iterable[str]": texts,
    "Sequence[tuple[str, str]]": text_pairs,
    "Sequence[float] | None": optional(numbers),
    "Names | None": names,
    "Mapping[str, str]": mapping,
    "Mapping[str, str] | None": mapping,
    "Mapping[str, int] | None": mapping,
    "Mapping[str, object] | None": mapping,
    "Mapping[str, str | int] | None": mapping,
}
F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F, more: Kinds | None = None) -> F:
    """Return a wrapper that checks the arguments of `function`.

    `KINDS` and `more` map annotations to checks. The wrapper checks each argument whose annotation
    is in one of these mappings, and raises ArgumentError for a wrong argument.
    """
    known = {**KINDS, **(more or {})}
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = {
        name: known[kind] for name in names if (kind := function.__annotations__.get(name)) in known
    }

    @wraps(function)
    def with_checks(*given: Any, **named: Any) -> Any:
        read = [
            kinds[name](name, value) if name in kinds else value
            for name, value in zip(names, given, strict=False)
        ]
        for name in named.keys() & kinds.keys():
            named[name] = kinds[name](name, named[name])
        return function(*read, *given[len(read) :], **named)

    return with_checks  # type: ignore[return-value]
