"""An index-built reference for rules: arrays whose every element is another number, and the copies
of a plan carried out by numpy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ckptkit.compute.strided import ZEROS
from ckptkit.rules.planner import Target

Arrays = Mapping[str, np.ndarray]


def carried_out(plan: Mapping[str, Target], arrays: Arrays) -> dict[str, np.ndarray]:
    """The targets of a plan, made of `arrays`."""
    return {name: _made(target, arrays) for name, target in plan.items()}


def _made(target: Target, arrays: Arrays) -> np.ndarray:
    dtype = next(iter(arrays.values())).dtype
    flat = np.full(prod(target.shape), -1, dtype)
    size = dtype.itemsize
    for source, start, place, dims in target.copies:
        sizes = tuple(n for n, _, _ in dims)
        into = as_strided(flat[place:], sizes, tuple(t * size for _, _, t in dims))
        if source == ZEROS:
            into[...] = 0
            continue
        data = np.ascontiguousarray(arrays[target.sources[source]]).reshape(-1)
        into[...] = as_strided(data[start:], sizes, tuple(s * size for _, s, _ in dims))
    assert -1 not in flat
    return flat.reshape(target.shape)


def numbered(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of these shapes; no element of all of them is like another, and none is 0."""
    found, first = [], 1
    for shape in shapes:
        found.append(np.arange(first, first + prod(shape)).reshape(shape))
        first += prod(shape)
    return found


def same(found: Arrays, expected: Arrays) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].shape == each.shape and np.array_equal(found[name], each)
        for name, each in expected.items()
    )


def shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in arrays.items()}
