"""Which refusals of a package its tests reach: the places in its source where errors are made.

found = watch(monkeypatch, (errors.CkptkitError, "__init__"))
...                                 # make each refusal happen
assert unreached(modules(package), found, is_raised) == []
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

Place = tuple[str, int]  # module and line


def watch(monkeypatch: pytest.MonkeyPatch, *made_by: tuple[Any, str]) -> set[Place]:
    """Record from where the functions (owner, name) are called from now on, frame by frame."""
    found: set[Place] = set()
    for owner, name in made_by:
        monkeypatch.setattr(owner, name, _recorded(getattr(owner, name), found))
    return found


def _recorded(function: Callable[..., Any], found: set[Place]) -> Callable[..., Any]:
    def recorded(*args: Any, **named: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found.add((frame.f_globals.get("__name__", ""), frame.f_lineno))
            frame = frame.f_back
        return function(*args, **named)

    return recorded


def modules(package: ModuleType) -> list[str]:
    """The names of the modules of a package."""
    folder = Path(inspect.getfile(package)).parent
    return sorted(f"{package.__name__}.{path.stem}" for path in folder.glob("[a-z]*.py"))


def unreached(
    names: Iterable[str], found: set[Place], is_refusal: Callable[[ast.AST], bool]
) -> list[str]:
    """The refusals in modules of these names that are not among the places, as module:line."""
    return [place for name in names for place in _unreached(name, found, is_refusal)]


def _unreached(name: str, found: set[Place], is_refusal: Callable[[ast.AST], bool]) -> list[str]:
    lines = {line for module, line in found if module == name}
    source = inspect.getsource(importlib.import_module(name))
    places = [node for node in ast.walk(ast.parse(source)) if is_refusal(node)]
    return [
        f"{name}:{node.lineno}"
        for node in places
        if lines.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]


def is_raised(node: ast.AST) -> bool:
    """Return whether a statement raises an error that it makes; not one that it passes on."""
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
        return False
    made = node.exc.func
    is_passed_on = isinstance(made, ast.Attribute) and made.attr == "at"
    return not is_passed_on and getattr(made, "id", "") != "NotImplementedError"


def is_called(name: str) -> Callable[[ast.AST], bool]:
    """Return a predicate: whether an expression calls a method or function of a module, `name`."""

    def is_call(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
        )

    return is_call
