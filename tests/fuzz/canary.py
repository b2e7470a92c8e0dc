"""Somebody's packages, as pickles name them: whatever calls one of their functions is a finding.

Making an object through ``__new__`` and handing its state to ``__setstate__`` is what "needs these
classes" says will happen; nothing else is. A `Probe` answers whatever it is asked by another one,
and tells: so it is found out what a loader asks of a value, and in which place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULE = "usercode"  # the name that pickles know this module by
# Modules of packages that are not installed here: any name in them is a function or a class.
ABSENT = (
    "mynet.tools",
    "torchvision.ops.misc",
    "diffusers.utils",
    "deepspeed.runtime.utils",
    "lightning.pytorch.tools",
)

tell: Callable[[str], None] = print  # the sandbox puts its own in place
wants: Callable[[str], None] = print  # likewise


def fire(*args: Any, **kwargs: Any) -> Any:
    """Tell that somebody has called it."""
    tell("a function was called")
    return fire


class Net:
    """A plain class: attributes, no hooks."""


class Caller:
    """A class that must be made by nobody but ``__new__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tell("Caller.__init__ was called")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tell("an object was called")
        return self

    def method(self, *args: Any, **kwargs: Any) -> Any:
        """Tell that somebody has called it."""
        tell("a method was called")
        return self

    @classmethod
    def make(cls, *args: Any, **kwargs: Any) -> Any:
        """Tell that somebody has called it."""
        tell("a class method was called")
        return cls


class Stateful:
    """A class that takes its state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Items(list):
    """A list of its own."""


class Table(dict):
    """A dict of its own."""


class AttributeDict(dict):
    """As lightning has it, which is not installed: the attributes are the items."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as missing:
            raise AttributeError(name) from missing

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Probe:
    """An object that tells what it is asked, by the way from the first one to itself."""

    way = ""

    def __getattr__(self, name: str) -> Any:
        return self.asked(f".{name}") if name[:2] != "__" else self.refuse(name)

    def refuse(self, name: str) -> Any:
        """Tell of an attribute that decides how Python and others treat an object."""
        wants(f"{self.way}.{name}")
        raise AttributeError(name)

    def asked(self, question: str) -> Probe:
        """Tell, and return what answers the next question."""
        wants(self.way + question)
        made = object.__new__(Probe)
        made.__dict__["way"] = self.way + question
        return made

    def __setstate__(self, state: Any) -> None:
        self.__dict__["way"] = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.asked("()")

    def __iter__(self) -> Iterator[Any]:
        return iter([self.asked("*")])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key > 20:
            raise IndexError
        return self.asked(f"[{key!r}]" if type(key) in (int, str) else "[]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.asked("[]=")

    def __contains__(self, key: Any) -> bool:
        self.asked(" in")
        return False

    def __len__(self) -> int:
        self.asked(" len")
        return 1

    def __hash__(self) -> int:
        self.asked(" hash")
        return 1

    def __eq__(self, other: object) -> bool:
        self.asked(" ==")
        return self is other

    def __float__(self) -> float:
        self.asked(" float")
        return 1.0

    def __index__(self) -> int:
        self.asked(" index")
        return 1

    def compared(self, other: Any) -> bool:
        self.asked(" <")
        return False

    __lt__ = __le__ = __gt__ = __ge__ = compared

    def computed(self, other: Any = None) -> Any:
        return self.asked(" +")

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __neg__ = computed


class Absent(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        return Caller if name[:1].isupper() else self.refused(name)

    def refused(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return fire


def install() -> None:
    """Let pickles find the packages."""
    sys.modules[MODULE] = sys.modules[__name__]
    for name in ABSENT:
        sys.modules.setdefault(name, Absent(name))
    parsing = ModuleType("pytorch_lightning.utilities.parsing")
    parsing.AttributeDict = AttributeDict
    sys.modules.setdefault(parsing.__name__, parsing)
