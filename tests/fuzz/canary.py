"""Somebody's own package, as pickles name it: whatever calls one of these functions is a finding.

Making an object through ``__new__`` and handing its state to ``__setstate__`` is what "needs these
classes" says will happen; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODULE = "usercode"  # the name that pickles know this module by

tell: Callable[[str], None] = print  # the sandbox puts its own in place
wants: Callable[[str], None] = print  # likewise


def fire(*args: Any, **kwargs: Any) -> Any:
    """Tell that somebody has called it."""
    tell("usercode.fire was called")
    return fire


class Net:
    """A plain class: attributes, no hooks. It tells what others look for in it."""

    def __getattr__(self, name: str) -> Any:
        wants(name)
        raise AttributeError(name)


class Caller:
    """A class that must be made by nobody but ``__new__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tell("usercode.Caller.__init__ was called")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tell("usercode.Caller.__call__ was called")
        return self

    def method(self, *args: Any, **kwargs: Any) -> Any:
        """Tell that somebody has called it."""
        tell("usercode.Caller.method was called")
        return self

    @classmethod
    def make(cls, *args: Any, **kwargs: Any) -> Any:
        """Tell that somebody has called it."""
        tell("usercode.Caller.make was called")
        return cls


class Stateful:
    """A class that takes its state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Items(list):  # type: ignore[type-arg]
    """A list of its own."""


class Table(dict):  # type: ignore[type-arg]
    """A dict of its own."""
