"""Hooks: `ckptkit.core` calls functions of other subpackages by name, without importing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def find(name: str) -> Callable[..., Any]:
    """Return the function called `name`. `ckptkit/__init__.py` replaces this function."""
    raise NotImplementedError(name)


def call(name: str, *args: Any) -> Any:
    """Call the hook `name` with `args` and return its result."""
    return find(name)(*args)
