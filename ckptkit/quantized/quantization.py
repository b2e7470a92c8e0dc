"""The quantized groups of tensors in a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckptkit.core.text import owners
from ckptkit.quantized.marks import last_component

if TYPE_CHECKING:
    from ckptkit.quantized.group import Group, View


@dataclass(frozen=True)
class Quantization:
    """The groups of a checkpoint in order, and the names of what serves none of them alone."""

    groups: tuple[Group, ...] = ()
    serving: tuple[str, ...] = ()
    view: View | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @cached_property
    def by_member(self) -> dict[str, Group]:
        """Name of a tensor -> the group that it belongs to."""
        return owners((group, group.members) for group in self.groups)

    @property
    def labels(self) -> dict[str, int]:
        """Count the weights of each kind."""
        counts: dict[str, int] = defaultdict(int)
        for group in self.groups:
            counts[group.label] += 1
        return dict(counts)

    @property
    def unread(self) -> tuple[Group, ...]:
        """The groups that cannot be dequantized."""
        return tuple(group for group in self.groups if group.layout is None)

    def foreign_to(self, names: Iterable[str]) -> Quantization:
        """The groups that a model with these names does not hold as codes and scales.

        It holds those of whose other parts it has names with the same last components.
        """
        endings = set(map(last_component, names))
        groups = (each for each in self.groups if not _holds(endings, each))
        return replace(self, groups=tuple(groups))

    def touching(self, names: Iterable[str]) -> Iterator[Group]:
        """The groups that some names belong to, each once."""
        seen = {
            id(group): group for name in names if (group := self.by_member.get(name)) is not None
        }
        yield from seen.values()


def _holds(endings: Collection[str], group: Group) -> bool:
    others = [last_component(name) for name in group.parts if name != group.name]
    return bool(others) and all(each in endings for each in others)
