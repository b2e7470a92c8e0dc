"""Groups of items: flatten them, find the group of an item, merge and thin out mappings."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def flatten(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """Return the items of all groups, one group after another."""
    return chain.from_iterable(groups)


def owners(groups: Iterable[tuple[T, Iterable[Key]]]) -> dict[Key, T]:
    """Map each item to its group, from pairs of a group and its items; the last group wins."""
    found: dict[Key, T] = {}
    for group, items in groups:
        found.update(dict.fromkeys(items, group))
    return found


def merge_all(mappings: Iterable[Mapping[Key, T]]) -> dict[Key, T]:
    """Merge mappings; the last one wins."""
    found: dict[Key, T] = {}
    for each in mappings:
        found.update(each)
    return found


def without(mapping: Mapping[Key, T], keys: Container[object]) -> dict[Key, T]:
    """Return the mapping without the entries of `keys`, in its order."""
    return {key: value for key, value in mapping.items() if key not in keys}
