"""Assemble full-precision weights and the optimizer's state from the optim_states of all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, count, islice
from math import prod
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    UnsupportedError,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.text import flatten, shell_word
from ckptkit.core.tree import Node, key_text
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.partitions import Layout, PartitionRow, Shapes, by_group, by_rank
from ckptkit.formats.distributed.reading import Fields, Reader, is_flat, own

# Find the folder and the files of a training state: tags, ranks, and unsupported parallelism.


POINTERS = ("latest", "latest_universal")
UNIVERSAL = "zero"
_POINTER_BYTES = 1 << 10
_STATES = re.compile(r".+_(model|optim)_states\.pt|layer_.*-model_states\.pt")
_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>[0-9]{1,9})_)?mp_rank_(?P<mp>[0-9]{1,9})_model_states\.pt"
)
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_(?P<mp>[0-9]{1,9})_optim_states\.pt"
)
_EXPERT = re.compile(r"(layer_.*_)?expert_.*|expp_rank_.*")
_LAYER = re.compile(r"layer_.*")
_MODEL_NAME, _OPTIM_NAME = (
    f"zero_pp_rank_{{}}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")
)
_MODEL_FILE = re.compile(r"(.*\.index\.json|.*\.safetensors|(pytorch|adapter)_model.*\.bin)")
_MERGE = "merge the ranks with DeepSpeed's ds_to_universal.py; ckptkit reads its output"
_SHOWN = 4  # names in a message


def is_tag(names: Iterable[str]) -> bool:
    """Return whether these are the files of one training state."""
    return any(map(_STATES.fullmatch, names))


def tag_folders(folder: Folder) -> list[str]:
    """Return the folders of training states in `folder`."""
    return [name for name in folder.folders() if _holds_states(folder, name)]


def _holds_states(folder: Folder, name: str) -> bool:
    try:
        return is_tag(folder.sub(name).list())
    except CkptkitError:  # no folder, or one without permission to list
        return False


def pointer(folder: Folder, names: Collection[str]) -> tuple[str, str] | None:
    """Return the file that names the current tag, and the tag; None where there is none."""
    for name in POINTERS:
        if name in names and (tag := _word(folder, name)):
            return name, tag
    return None


def _word(folder: Folder, name: str) -> str:
    """Return the single line of a file, "" if it is no such file."""
    try:
        source: ByteSource = folder.open(name)
    except CkptkitError:
        return ""
    text = source.read(0, source.size) if source.size <= _POINTER_BYTES else b""
    word = text.decode("utf-8", "replace").strip()
    return word if word.isprintable() else ""


def find(folder: Folder, names: Collection[str]) -> Folder:
    """Return the folder with the files.

    It is `folder` itself, that of the tag in ``latest``, or the only one.
    """
    if is_tag(names):
        return folder
    named = pointer(folder, names)
    tags = [named[1]] if named else tag_folders(folder)
    if len(tags) != 1:
        raise AmbiguousError(
            f"holds {len(tags)} training states and no file that names the latest: {listed(tags)}",
            hint=f"name one of them, e.g. {shell_word(os.path.join(folder.name, tags[0]))}",
        )
    if named and not _holds_states(folder, named[1]):
        others = tag_folders(folder)
        hint = (
            f"it holds {listed(others)}: name the folder to read"
            if others
            else "fetch the whole folder again"
        )
        raise CorruptError(
            f"{named[0]} names {named[1][:80]!r}, which is not a folder of a training state",
            hint=hint,
        )
    _check_alone(folder, names, tags[0])
    return folder.sub(tags[0])


def _check_alone(folder: Folder, names: Collection[str], tag: str) -> None:
    model_files = sorted(filter(_MODEL_FILE.fullmatch, names))
    model_files = [name for name in model_files if name.endswith(".index.json")] or model_files
    if model_files:
        paths = [os.path.join(folder.name, name) for name in (tag, model_files[0])]
        raise AmbiguousError(
            f"holds the training state {tag} and a model of its own, {listed(model_files)}",
            hint=f"name one of them: {paths[0]} or {paths[1]}",
        )


def listed(names: Collection[str]) -> str:
    return ", ".join(islice(names, _SHOWN)) + (", ..." if len(names) > _SHOWN else "")


class RankFiles:
    """The files of a training state by rank; those of other parallelism are refused.

    ``models`` holds the one of stages 0 to 2 as that of rank -1, or those of stage 3; ``optims``
    those with weights and optimizer. Where the model-parallel ranks are `merged` elsewhere, the
    files of the first are taken, and ``parallel`` says that there are others.
    """

    def __init__(self, names: Iterable[str], *, merged: bool) -> None:
        states = sorted(filter(_STATES.fullmatch, names))
        others = _others(states)
        if others and not merged:
            raise UnsupportedError(
                f"is of several model-parallel ranks ({listed(others)})", hint=_MERGE
            )
        self.parallel = bool(others)
        left = [name for name in states if name not in set(others)]
        self.models, self.optims = _by_rank(left, _MODEL), _by_rank(left, _OPTIM)
        if -1 in self.models and len(self.models) > 1:
            raise AmbiguousError(
                f"holds {self.models[-1]} and files of ZeRO stage 3: "
                f"{listed(list(self.models.values())[1:])}",
                hint="the files of two runs are mixed: move those of one of them away",
            )

    @property
    def model(self) -> str:
        """The file with the model of rank 0. Raises CorruptError if it is missing."""
        found = self.models.get(-1) or self.models.get(0)
        if found is None:
            raise _incomplete(
                [_MODEL_NAME.format(0)] if self.models else ["mp_rank_00_model_states.pt"]
            )
        return found

    def check_complete(self, ranks: int) -> None:
        """Raise CorruptError unless there is exactly one file of each kind for each rank."""
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optims.values()) else ""
        _check(self.optims, ranks, prefix + _OPTIM_NAME)
        if -1 not in self.models:
            self.check_models(ranks)

    def check_models(self, ranks: int) -> None:
        """Raise CorruptError unless there is exactly one model file of stage 3 for each rank."""
        _check(self.models, ranks, _MODEL_NAME)


def _others(names: Iterable[str]) -> list[str]:
    """Return the files of model-parallel ranks after the first.

    Raises UnsupportedError for other parallelism.
    """
    others = []
    for name in names:
        if _EXPERT.fullmatch(name):
            hint = "load it with DeepSpeed and save engine.module_state_dict()"
            raise UnsupportedError(
                f"has files of single experts, e.g. {name}, which ckptkit cannot join", hint=hint
            )
        match = _MODEL.fullmatch(name) or _OPTIM.fullmatch(name)
        if match is None:
            what = (
                "single pipeline layers"
                if _LAYER.fullmatch(name)
                else "a kind that ckptkit does not know"
            )
            raise UnsupportedError(f"has files of {what}, e.g. {name}", hint=_MERGE)
        if int(match["mp"]):
            others.append(name)
    return others


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return names by rank, in the order of the ranks, -1 for a name without one."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = -1 if match["rank"] is None else int(match["rank"])
        if rank in found:
            raise AmbiguousError(f"has two files of rank {rank}: {found[rank]} and {name}")
        found[rank] = name
    return dict(sorted(found.items()))


def _check(found: Mapping[int, str], ranks: int, name: str) -> None:
    absent = (rank for rank in count() if rank not in found)  # however many `ranks` claims to be
    missing = [name.format(rank) for rank in islice(absent, _SHOWN + 1) if rank < ranks]
    if missing:
        raise _incomplete(missing)
    stale = [name for rank, name in found.items() if rank >= ranks]
    if stale:
        raise CorruptError(
            f"is of {ranks:,} ranks, but there are files of others: {listed(stale)}",
            hint="they are from another run: move them away",
        )


def _incomplete(missing: Collection[str]) -> CorruptError:
    return CorruptError(
        f"is not complete: {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        hint="copy the missing files too; every process wrote its own, perhaps on its own machine",
    )


# Assemble full-precision weights and the optimizer's state from the optim_states of all ranks.


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


class ZeroRank:
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


# A universal checkpoint: a folder for each parameter, independent of the ranks that wrote it.


SETTINGS = "optimizer_state.pt"
_WEIGHTS = "fp32.pt"
_SUFFIX = ".pt"


class Universal:
    """The folder ``zero``.

    `shapes` are those of the parameters where the ranks were not merged from several.
    """

    def __init__(self, reader: Reader, folder: Folder, shapes: Mapping[str, Shape]) -> None:
        self._reader = reader
        self._folder = folder
        self._shapes = shapes
        self.parameters: dict[str, Tensor] = {}
        self.state: Named = {}

    def read(self, skip: set[str]) -> None:
        """Read every parameter but those in `skip`, in the order of `shapes`."""
        there = self._folder.folders()
        missing = [name for name in self._shapes if name not in there]
        if missing:
            raise CorruptError(
                f"has no folder for parameter {missing[0][:80]!r} ({len(missing):,} are missing)"
            )
        for name in dict.fromkeys([*self._shapes, *there]):
            if name not in skip:
                self._read(name, self._folder.sub(name))

    def _read(self, name: str, folder: Folder) -> None:
        files = [each for each in folder.list() if each.endswith(_SUFFIX)]
        if _WEIGHTS not in files:
            raise CorruptError(f"has no {_WEIGHTS}", where=folder.name)
        values = {each: self._reader.read(each, folder).root for each in files}
        weights = self._tensor(name, values.pop(_WEIGHTS), folder)
        self.parameters[name] = weights
        self.state[name] = {
            each.removesuffix(_SUFFIX): self._of_element(_value(node), weights.shape)
            for each, node in values.items()
        }

    def _tensor(self, name: str, node: Node, folder: Folder) -> Tensor:
        tensor = as_tensor(_value(node))
        if tensor is None:
            raise FormatError(f"{_WEIGHTS} does not hold a tensor", where=folder.name)
        cut = (
            isinstance(node, dict) and node.get("vocab_tensor") is True
        )  # rows that fill up the vocabulary
        shape = tensor.shape if cut else self._shapes.get(name, tensor.shape)
        shaped = _shaped(tensor, shape)
        if shaped is None:
            raise CorruptError(
                f"{_WEIGHTS} is of shape {tensor.shape}, the parameter of {shape}",
                where=folder.name,
            )
        return shaped

    def _of_element(self, node: Node, shape: Shape) -> Node:
        tensor = as_tensor(node)
        return node if tensor is None else _shaped(tensor, shape) or own(tensor)


def _value(node: Node) -> Node:
    return node["param"] if isinstance(node, dict) and "param" in node else node


def _shaped(tensor: Tensor, shape: Shape) -> Tensor | None:
    """Return a flat tensor in that shape; None if the number of elements differs."""
    if tensor.shape == shape:
        return tensor
    if not is_flat(tensor) or tensor.numel != prod(shape):
        return None
    return Tensor(tensor.storage, tensor.dtype, shape, contiguous_stride(shape), tensor.offset)
