"""Trees of tensors by dotted name, and whether they are equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def flat(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its dotted path."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, (list, tuple)):
        for key, value in enumerate(node):
            yield from flat(value, f"{name}.{key}" if name else str(key))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(one, other)


def assert_same(found: Any, expected: Any) -> None:
    """Raise AssertionError unless both hold the same tensors under the same names."""
    ours, theirs = dict(flat(found)), dict(flat(expected))
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not is_same(ours[name], theirs[name])] == []
