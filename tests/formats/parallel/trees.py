"""Whether trees of tensors are equal bit for bit."""

from __future__ import annotations

from typing import Any

from tests.torch_equality import bits, tensors


def assert_same(found: Any, expected: Any) -> None:
    """Raise AssertionError unless both hold the same tensors under the same names."""
    ours, theirs = dict(tensors(found)), dict(tensors(expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(ours[name]) == bits(tensor), name
