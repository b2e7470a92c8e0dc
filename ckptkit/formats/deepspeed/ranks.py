"""Assemble full-precision weights and the optimizer's state from the optim_states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ckptkit.core.errors import CorruptError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten
from ckptkit.core.tree import Node, key_text
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.partitions import Layout, PartitionRow, Shapes, by_group, by_rank
from ckptkit.formats.common.rank_files import Fields, Reader, is_flat, own
from ckptkit.formats.deepspeed.places import RankFiles

FLATS = "single_partition_of_fp32_groups"  # of stages 1 and 2
FLATS_3 = "fp32_flat_groups"
STATE, STATE_3 = "base_optimizer_state", "optimizer_state_dict"
COUNT, STAGE, GAPS, TRIMMED = (
    "partition_count",
    "zero_stage",
    "param_alignment_paddings",
    "group_paddings",
)
# Fields on how the state was cut, of no use once it is assembled.
CUT = frozenset(
    {FLATS, FLATS_3, STATE, STATE_3, COUNT, STAGE, GAPS, TRIMMED, "param_slice_mappings"}
)
_PARTITIONS = "ds_zero_partition_groups"

Named = dict[str, dict[Node, Node]]  # the state of the optimizer by name of the parameter


class Rank(NamedTuple):
    """One rank: flat tensors of the groups, elements that may be cut off, the optimizer's state."""

    flats: list[Tensor]
    cut: list[int]
    state: list[Mapping[Node, Node]]


class Zero:
    """The files of all ranks, read. Raises CorruptError where they contradict each other."""

    def __init__(self, reader: Reader, files: RankFiles) -> None:
        names = list(files.optims.values())
        self.first = _fields(reader, names[0])
        self.stage_3 = FLATS_3 in self.first
        counts = set(self.first.integers(COUNT))
        if len(counts) > 1 or _PARTITIONS in self.first:
            raise UnsupportedError(
                "its groups are cut for different numbers of ranks (expert parallelism)",
                hint="load it with DeepSpeed and save engine.module_state_dict()",
            )
        self.count = max(counts, default=0)
        files.check_complete(self.count)
        self.ranks = [
            self._rank(each)
            for each in (self.first, *(_fields(reader, name) for name in names[1:]))
        ]
        if not self.stage_3:
            for group in range(len(self.ranks[0].flats)):
                _check_parts(self.ranks, group)

    def _rank(self, fields: Fields) -> Rank:
        key = FLATS_3 if self.stage_3 else FLATS
        self._check(fields, key)
        flats = fields.tensors(key)
        cut = fields.integers(TRIMMED) if TRIMMED in fields else [0] * len(flats)
        first = len(self.first.items(key))
        if not len(flats) == len(cut) == first:
            raise CorruptError(
                f"{fields.place} has {len(flats):,} {key} and {len(cut):,} {TRIMMED}, "
                f"the first file has {first:,}"
            )
        return Rank(flats, cut, self._kept(fields, len(flats)))

    def _check(self, fields: Fields, key: str) -> None:
        if key not in fields:
            raise FormatError(
                f"{fields.place} has no {key}: "
                "another stage than the first file, or an old DeepSpeed"
            )
        if set(fields.integers(COUNT)) != {self.count}:
            raise CorruptError(
                f"{fields.place}: {COUNT} is not {self.count:,} as in the first file"
            )
        stages = fields.integers(STAGE) if STAGE in fields else []  # bf16_optimizer.py writes none
        if any((stage == 3) != self.stage_3 for stage in stages):
            raise CorruptError(f"{fields.place}: {STAGE} is {stages[0]}, but there are {key}")

    @property
    def state_key(self) -> str:
        return STATE_3 if self.stage_3 else STATE

    def _kept(self, fields: Fields, groups: int) -> list[Mapping[Node, Node]]:
        """Return the optimizer's state of each group; empty before its first step or unsaved."""
        key = self.state_key
        place = f"{fields.place}: {key}"
        if isinstance(fields.node.get(key), (list, tuple)):  # elastic_checkpoint
            states = dict(enumerate(fields.items(key)))
        else:
            states = (
                Fields(fields.fields(key).node.get("state", {}), place).node
                if key in fields
                else {}
            )
        found = [Fields(states.get(group, {}), place).node for group in range(groups)]
        check(
            "optimizer_values",
            max(map(len, found), default=0),
            f"values for a parameter in {place}",
        )
        return list(found)

    def layout(self, groups: Sequence[Shapes]) -> Layout:
        """Return the places of the parameters of `groups` in rows of flat tensors."""
        if self.stage_3:
            return by_rank(groups, self.count)
        gaps = (
            self.first.items(GAPS)
            if GAPS in self.first
            else [[0] * len(shapes) for shapes in groups]
        )
        flats = len(self.ranks[0].flats)
        if not len(gaps) == len(groups) == flats:
            raise CorruptError(
                f"{len(groups):,} groups in param_shapes, {len(gaps):,} in {GAPS}, "
                f"{flats:,} in {FLATS}"
            )
        return by_group(
            groups, [Fields({GAPS: each}, self.first.place).integers(GAPS) for each in gaps]
        )

    def parameters(self, layout: Layout) -> dict[str, Tensor]:
        """Return the weights.

        Raises CorruptError unless there are as many elements as `layout` says.
        """
        rows = self._rows([rank.flats for rank in self.ranks], layout)
        every = {id(row): row for row in flatten(rows.values())}
        layout.check(list(every.values()), 1 if self.stage_3 else 2 * self.count)
        return {name: slot.tensor(rows[slot.group]) for name, slot in layout.slots.items()}

    def _rows(
        self, parts: Sequence[Sequence[Tensor | None]], layout: Layout
    ) -> dict[int, tuple[PartitionRow, ...]]:
        """Return the rows that groups are cut from, of tensors by rank and group.

        Empty where one is missing.
        """
        lines = parts if self.stage_3 else list(zip(*parts, strict=True))
        whole = [[part for part in line if part is not None] for line in lines]
        rows = [
            PartitionRow(some) if len(some) == len(line) else None
            for some, line in zip(whole, lines, strict=True)
        ]
        if not self.stage_3:
            return {group: (row,) for group, row in enumerate(rows) if row is not None}
        every = tuple(row for row in rows if row is not None)
        return dict.fromkeys(range(layout.groups), every) if len(every) == len(rows) else {}

    def optimizer(self, layout: Layout) -> tuple[Named, list[str]]:
        """Return the optimizer's state, and warnings.

        State for each element is assembled as the weights are; a value for a whole group, such as
        the step, is that of rank 0.
        """
        states = dict(enumerate(self.ranks[0].state))
        rows = {
            key: self._rows(self._state(key), layout)
            for key in dict.fromkeys(chain(*states.values()))
        }
        made: Named = {name: {} for name in layout.slots}
        left: dict[str, None] = {}
        for name, slot in layout.slots.items():
            kept = states.get(slot.group, {})
            for key, whole in rows.items():
                tensor = as_tensor(kept.get(key))
                if slot.group in whole:
                    made[name][key] = slot.tensor(whole[slot.group])
                elif key in kept and (tensor is None or tensor.numel == 1):
                    made[name][key] = kept[key] if tensor is None else own(tensor)
                elif key in kept:
                    left[key_text(key)[:80]] = None
        return made, [
            f"not one value per weight, so left out of the optimizer: {', '.join(left)}"
        ] if left else []

    def _state(self, key: Node) -> list[list[Tensor | None]]:
        """Return an optimizer's value by rank and group, None if it is not one per element."""
        return [
            [_per_element(rank, group, key) for group in range(len(rank.flats))]
            for rank in self.ranks
        ]


def _fields(reader: Reader, name: str) -> Fields:
    return reader.fields(name).fields("optimizer_state_dict")


def _check_parts(ranks: Sequence[Rank], group: int) -> None:
    """Check that the parts of a group have one size, with or without the cut at its end."""
    sizes = [rank.flats[group].numel for rank in ranks]
    cut = [rank.cut[group] for rank in ranks]
    whole = {size + less for size, less in zip(sizes, cut, strict=True)}
    last = next((number for number, less in enumerate(cut) if less), len(ranks))
    if len(whole) == 1 and not any(sizes[last + 1 :]):
        return
    if len(set(sizes)) > 1:
        raise CorruptError(
            f"the ranks' parts of group {group} differ in size: {sizes[:8]}, cut by {cut[:8]}"
        )
    for rank in ranks:
        rank.cut[group] = 0  # not carried out: bf16_optimizer.py


def _per_element(rank: Rank, group: int, key: Node) -> Tensor | None:
    tensor = as_tensor(rank.state[group].get(key))
    size, cut = rank.flats[group].numel, rank.cut[group]
    return (
        tensor
        if tensor is not None and is_flat(tensor) and tensor.numel in (size, size + cut)
        else None
    )
