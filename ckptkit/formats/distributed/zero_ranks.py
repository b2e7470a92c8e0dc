"""Find the files of a ZeRO training state, and assemble the tensors of all ranks.

The module :mod:`deepspeed` describes these files.
"""

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
from ckptkit.core.text import NAMES, and_more, shell_word, some
from ckptkit.core.tree import Node, key_text
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed.reading import (
    Fields,
    FlatRow,
    RankReader,
    is_flat,
    own,
    shared_out,
)

# Names of folders and files


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
EXPERT = re.compile(r"(layer_.*_)?expert_.*|expp_rank_.*")
_NAMES = "zero_pp_rank_{}_mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_MODEL_FILE = re.compile(r"(.*\.index\.json|.*\.safetensors|(pytorch|adapter)_model.*\.bin)")
_MERGE = "merge the ranks with DeepSpeed's ds_to_universal.py; ckptkit reads its output"
_SAVE_WHOLE = "load it with DeepSpeed and save engine.module_state_dict()"


def is_tag(names: Iterable[str]) -> bool:
    """Return whether the names include a file of a training state."""
    return any(map(_STATES.fullmatch, names))


def tag_folders(folder: Folder) -> list[str]:
    """Return the subfolders of `folder` that contain training states."""
    return [name for name in folder.folders() if _holds_states(folder, name)]


def _holds_states(folder: Folder, name: str) -> bool:
    try:
        return is_tag(folder.sub(name).list())
    except CkptkitError:  # not a folder, or no permission to list it
        return False


def pointer(folder: Folder, names: Collection[str]) -> tuple[str, str] | None:
    """Return the name of a file such as ``latest``, and the folder name that the file contains.

    Return None if `folder` has no such file.
    """
    for name in POINTERS:
        try:
            source: ByteSource | None = folder.open(name) if name in names else None
        except CkptkitError:
            continue
        if source is not None and source.size <= _POINTER_BYTES:
            tag = source.read(0, source.size).decode("utf-8", "replace").strip()
            if tag and tag.isprintable():
                return name, tag
    return None


def find(folder: Folder, names: Collection[str]) -> Folder:
    """Find the folder that contains the files of the training state.

    Return `folder` itself, the subfolder that ``latest`` names, or the only subfolder with a
    training state. Raises AmbiguousError if several subfolders contain training states and
    ``latest`` is missing.
    """
    if is_tag(names):
        return folder
    named = pointer(folder, names)
    tags = [named[1]] if named else tag_folders(folder)
    if len(tags) != 1:
        raise AmbiguousError(
            f"contains {len(tags)} training states, but no file `latest`: {some(tags)}",
            hint=f"name one, e.g. {shell_word(os.path.join(folder.name, tags[0]))}",
        )
    if named and not _holds_states(folder, named[1]):
        others = tag_folders(folder)
        hint = f"name one of these folders: {some(others)}"
        raise CorruptError(
            f"{named[0]} names {named[1][:80]!r}, which is not the folder of a training state",
            hint=hint if others else "download the whole folder again",
        )
    model_files = sorted(filter(_MODEL_FILE.fullmatch, names))
    model_files = [name for name in model_files if name.endswith(".index.json")] or model_files
    if model_files:
        paths = [os.path.join(folder.name, name) for name in (tags[0], model_files[0])]
        raise AmbiguousError(
            f"contains the training state {tags[0]} and also a model, {some(model_files)}",
            hint=f"name either {paths[0]} or {paths[1]}",
        )
    return folder.sub(tags[0])


class RankFiles:
    """The files of a training state by rank.

    ``models`` maps ranks to the model files of stage 3. In stages 0 to 2, ``models`` contains a
    single file, under the key -1. ``optims`` maps ranks to optimizer files. The constructor raises
    UnsupportedError if there are several model-parallel ranks. If `merged` is true, the constructor
    instead sets ``parallel`` to True, and ignores the files of all model-parallel ranks except rank
    0.
    """

    def __init__(self, names: Iterable[str], *, merged: bool) -> None:
        others: list[str] = []
        models: dict[int, str] = {}
        optims: dict[int, str] = {}
        for name in sorted(filter(_STATES.fullmatch, names)):
            if EXPERT.fullmatch(name):
                raise UnsupportedError(
                    f"has files of single experts, e.g. {name}, which ckptkit cannot join",
                    hint=_SAVE_WHOLE,
                )
            model, optim = _MODEL.fullmatch(name), _OPTIM.fullmatch(name)
            match = model or optim
            if match is None:
                layer = name.startswith("layer_")
                what = "single pipeline layers" if layer else "an unsupported kind"
                raise UnsupportedError(
                    f"has files of {what}, e.g. {name}, which ckptkit cannot join", hint=_MERGE
                )
            if int(match["mp"]):
                others.append(name)
                continue
            rank = -1 if match["rank"] is None else int(match["rank"])
            held = models if model else optims
            if rank in held:
                raise AmbiguousError(
                    f"has two files of rank {rank}: {held[rank]} and {name}",
                    hint="move the files of each save to a folder of its own",
                )
            held[rank] = name
        if others and not merged:
            raise UnsupportedError(
                f"has several model-parallel ranks, which ckptkit cannot join ({some(others)})",
                hint=_MERGE,
            )
        self.parallel = bool(others)
        self.models, self.optims = dict(sorted(models.items())), dict(sorted(optims.items()))
        if -1 in self.models and len(self.models) > 1:
            raise AmbiguousError(
                f"contains {self.models[-1]} and files of ZeRO stage 3: "
                f"{some(list(self.models.values())[1:])}",
                hint="the files are from two runs: move the files of one run to another folder",
            )

    @property
    def model(self) -> str:
        """Return the name of rank 0's model file. Raises CorruptError if the file is missing."""
        found = self.models.get(-1) or self.models.get(0)
        if found is None:
            raise _incomplete(
                [_NAMES[0].format(0) if self.models else "mp_rank_00_model_states.pt"]
            )
        return found

    def check_complete(self, ranks: int) -> None:
        """Raise CorruptError unless each rank has an optimizer file.

        In stage 3, each rank also needs a model file.
        """
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optims.values()) else ""
        _check(self.optims, ranks, prefix + _NAMES[1])
        if -1 not in self.models:
            self.check_models(ranks)

    def check_models(self, ranks: int) -> None:
        """Raise CorruptError unless each rank has a model file (stage 3)."""
        _check(self.models, ranks, _NAMES[0])


def _check(found: Mapping[int, str], ranks: int, name: str) -> None:
    # In a corrupt file, `ranks` can be huge.
    absent = (rank for rank in count() if rank not in found)
    missing = [name.format(rank) for rank in islice(absent, NAMES) if rank < ranks]
    if missing:
        raise _incomplete(missing, ranks - sum(rank < ranks for rank in found))
    stale = [name for rank, name in found.items() if rank >= ranks]
    if stale:
        raise CorruptError(
            f"has {ranks:,} ranks, but contains files of other ranks: {some(stale)}",
            hint="these files are from another run: move them to another folder",
        )


def _incomplete(missing: Collection[str], total: int = 1) -> CorruptError:
    names = some(missing) + and_more(total - len(missing))
    return CorruptError(
        f"is incomplete: {names} {'is' if total == 1 else 'are'} missing",
        hint="copy the missing files; each rank wrote a file, perhaps on another machine",
    )


# Assembling full-precision weights and the optimizer state from the optim_states of all ranks


FLATS = "single_partition_of_fp32_groups"  # key of the flat tensors in stages 1 and 2
FLATS_3 = "fp32_flat_groups"
STATE, STATE_3 = "base_optimizer_state", "optimizer_state_dict"
COUNT, STAGE = "partition_count", "zero_stage"
GAPS, TRIMMED = "param_alignment_paddings", "group_paddings"
# Fields that describe the split. The assembled state does not contain these fields.
CUT = frozenset(
    {FLATS, FLATS_3, STATE, STATE_3, COUNT, STAGE, GAPS, TRIMMED, "param_slice_mappings"}
)

Named = dict[str, dict[Node, Node]]  # optimizer state by parameter name


class Rank(NamedTuple):
    """The flat tensors and optimizer state of one rank, by group.

    ``cut`` contains the number of padding elements that DeepSpeed removed from each flat tensor.
    """

    flats: list[Tensor]
    cut: list[int]
    state: list[Mapping[Node, Node]]


class Slot(NamedTuple):
    """The location of a parameter in the flat tensors of a group.

    In each flat tensor, elements `start` to `start + share` belong to the parameter.
    """

    shape: Shape
    group: int
    start: int
    share: int


class ZeroRank:
    """The optim_states of all ranks. Raises CorruptError if ranks contradict each other."""

    def __init__(self, reader: RankReader, files: RankFiles) -> None:
        first, *others = files.optims.values()
        self.first = _fields(reader, first)
        self.stage_3 = FLATS_3 in self.first
        self.key = FLATS_3 if self.stage_3 else FLATS
        self.state_key = STATE_3 if self.stage_3 else STATE
        counts = set(self.first.integers(COUNT))
        if len(counts) > 1 or "ds_zero_partition_groups" in self.first:
            raise UnsupportedError(
                "its parameter groups are split over different numbers of ranks (expert "
                "parallelism), which ckptkit cannot join",
                hint=_SAVE_WHOLE,
            )
        self.count = max(counts, default=0)
        files.check_complete(self.count)
        self.ranks = [self._rank(self.first)]
        self.ranks += [self._rank(_fields(reader, name)) for name in others]
        if not self.stage_3:
            for group in range(len(self.ranks[0].flats)):
                self._check_parts(group)

    def _rank(self, fields: Fields) -> Rank:
        place = fields.place
        if self.key not in fields:
            raise FormatError(
                f"{place} has no {self.key}: the file is of another ZeRO stage, or an old "
                "version of DeepSpeed wrote it"
            )
        if set(fields.integers(COUNT)) != {self.count}:
            raise CorruptError(f"{place}: {COUNT} is not {self.count:,}, the value of rank 0")
        # The files of DeepSpeed's bf16_optimizer.py contain no stage.
        stages = fields.integers(STAGE) if STAGE in fields else []
        if any((stage == 3) != self.stage_3 for stage in stages):
            raise CorruptError(
                f"{place}: {STAGE} is {stages[0]}, but {self.key} is of another stage"
            )
        flats = fields.tensors(self.key)
        cut = fields.integers(TRIMMED) if TRIMMED in fields else [0] * len(flats)
        first = len(self.first.items(self.key))
        if not len(flats) == len(cut) == first:
            raise CorruptError(
                f"{place} has {len(flats):,} {self.key} and {len(cut):,} {TRIMMED}; both numbers "
                f"must be {first:,}, as in the file of rank 0"
            )
        # The optimizer state of each group. The state is empty before the first training step, or
        # if DeepSpeed did not save the optimizer.
        states: Mapping[Node, Node] = {}
        inner = f"{place}: {self.state_key}"
        if isinstance(fields.node.get(self.state_key), (list, tuple)):  # elastic_checkpoint
            states = dict(enumerate(fields.items(self.state_key)))
        elif self.state_key in fields:
            states = Fields(fields.fields(self.state_key).node.get("state", {}), inner).node
        found = [Fields(states.get(group, {}), inner).node for group in range(len(flats))]
        most = max(map(len, found), default=0)
        check("optimizer_values", most, f"values for a parameter in {inner}")
        return Rank(flats, cut, list(found))

    def _check_parts(self, group: int) -> None:
        """Raise CorruptError unless all ranks' shards of a group have the same size.

        The shards of some ranks may lack the padding at the end.
        """
        sizes = [rank.flats[group].numel for rank in self.ranks]
        cut = [rank.cut[group] for rank in self.ranks]
        whole = {size + less for size, less in zip(sizes, cut, strict=True)}
        last = next((number for number, less in enumerate(cut) if less), len(cut))
        if len(whole) == 1 and not any(sizes[last + 1 :]):
            return
        if len(set(sizes)) > 1:
            raise CorruptError(
                f"the ranks' shards of group {group} differ in size: {sizes[:8]}, after "
                f"{cut[:8]} padding elements were removed"
            )
        for rank in self.ranks:
            rank.cut[group] = 0  # bf16_optimizer.py does not remove the padding that it records

    def slots(self, groups: Sequence[Mapping[str, Shape]]) -> dict[str, Slot]:
        """Return the location of each parameter in the concatenated flat tensors.

        In stages 1 and 2, the flat tensors of a group are concatenated over the ranks. The
        concatenated tensor contains the parameters of the group in order, with padding after each
        parameter. At the end, fewer than 2 * N padding elements may follow, where N is the number
        of ranks. In stage 3, the flat tensors of a rank are concatenated. All ranks have the same
        number of elements of a parameter. Raises CorruptError if the parameters do not fill the
        concatenated tensors.
        """
        gaps = [[0] * len(shapes) for shapes in groups]
        flats = len(self.ranks[0].flats)
        if not self.stage_3:
            if GAPS in self.first:
                listed_gaps = self.first.items(GAPS)
                gaps = [Fields({GAPS: n}, self.first.place).integers(GAPS) for n in listed_gaps]
            if not len(gaps) == len(groups) == flats:
                raise CorruptError(
                    f"the numbers of groups differ: {len(groups):,} in param_shapes, {len(gaps):,} "
                    f"in {GAPS}, {flats:,} in {FLATS}"
                )
        slots: dict[str, Slot] = {}
        taken: list[int] = []
        start = 0
        for group, (shapes, behind) in enumerate(zip(groups, gaps, strict=True)):
            if len(behind) != len(shapes):
                raise CorruptError(
                    f"group {group} has {len(shapes):,} parameters, but {len(behind):,} {GAPS}"
                )
            start = end = start if self.stage_3 else 0
            for (name, shape), gap in zip(shapes.items(), behind, strict=True):
                if name in slots:
                    raise AmbiguousError(
                        f"{name[:80]!r} is in two groups of param_shapes: {slots[name].group} and "
                        f"{group}"
                    )
                share = -(-prod(shape) // self.count) if self.stage_3 else prod(shape)
                slots[name] = Slot(shape, group, start, share)
                end = start + share
                start = end + gap
            taken.append(end)
        if self.stage_3:
            taken = [start] * self.count
        unit = 1 if self.stage_3 else 2 * self.count
        held = [[flat.numel for flat in rank.flats] for rank in self.ranks]
        sizes = [sum(row) for row in (held if self.stage_3 else zip(*held, strict=True))]
        for number, (size, needed) in enumerate(zip(sizes, taken, strict=True)):
            if not needed <= size <= -(-needed // unit) * unit:
                raise CorruptError(
                    f"the parameters need {needed:,} elements, but flat tensor {number} has "
                    f"{size:,} elements"
                )
        return slots

    def parameters(self, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
        """Return the weights by name."""
        rows = self._rows([list(rank.flats) for rank in self.ranks], slots)
        return {name: _shared_out(rows, slot) for name, slot in slots.items()}

    def _rows(
        self, parts: Sequence[Sequence[Tensor | None]], slots: Mapping[str, Slot]
    ) -> dict[int, tuple[FlatRow, ...]]:
        """Return the concatenated flat tensors (FlatRow) of each group.

        `parts` contains a list for each rank. The list contains a tensor or None for each group. In
        stages 1 and 2, if a rank lacks the tensor of a group, the result lacks this group. In stage
        3, if any tensor is missing, the result is empty.
        """
        lines = parts if self.stage_3 else list(zip(*parts, strict=True))
        rows = [
            FlatRow([part for part in line if part is not None]) if None not in line else None
            for line in lines
        ]
        if not self.stage_3:
            return {group: (row,) for group, row in enumerate(rows) if row is not None}
        every = tuple(row for row in rows if row is not None)
        groups = {slot.group for slot in slots.values()}
        return dict.fromkeys(groups, every) if len(every) == len(rows) else {}

    def optimizer(self, slots: Mapping[str, Slot]) -> tuple[Named, list[str]]:
        """Return the optimizer state by parameter name, and warnings.

        Values with one element per weight, such as exp_avg, are assembled like the weights. Single
        values of a group, such as the step, are taken from rank 0.
        """
        states = self.ranks[0].state
        keys = dict.fromkeys(chain(*states))
        rows = {
            key: self._rows(
                [
                    [_per_element(rank, group, key) for group in range(len(rank.flats))]
                    for rank in self.ranks
                ],
                slots,
            )
            for key in keys
        }
        made: Named = {name: {} for name in slots}
        left: dict[str, None] = {}
        for name, slot in slots.items():
            kept = states[slot.group] if slot.group < len(states) else {}
            for key, whole in rows.items():
                tensor = as_tensor(kept.get(key))
                if slot.group in whole:
                    made[name][key] = _shared_out(whole, slot)
                elif key in kept and (tensor is None or tensor.numel == 1):
                    made[name][key] = kept[key] if tensor is None else own(tensor)
                elif key in kept:
                    left[key_text(key)[:80]] = None
        warning = (
            "dropped from the optimizer state, because they do not have one value per weight: "
            f"{', '.join(left)}"
        )
        return made, [warning] if left else []


def _fields(reader: RankReader, name: str) -> Fields:
    return reader.fields(name).fields("optimizer_state_dict")


def _per_element(rank: Rank, group: int, key: Node) -> Tensor | None:
    tensor = as_tensor(rank.state[group].get(key))
    size, cut = rank.flats[group].numel, rank.cut[group]
    fits = tensor is not None and is_flat(tensor) and tensor.numel in (size, size + cut)
    return tensor if fits else None


def _shared_out(rows: Mapping[int, tuple[FlatRow, ...]], slot: Slot) -> Tensor:
    return shared_out(rows[slot.group], slot.shape, slot.start, slot.share)


# Reading a universal checkpoint, which has a folder for each parameter


SETTINGS = "optimizer_state.pt"
_WEIGHTS, _SUFFIX = "fp32.pt", ".pt"


def read_universal(
    reader: RankReader, folder: Folder, shapes: Mapping[str, Shape], skip: Collection[str]
) -> tuple[dict[str, Tensor], Named]:
    """Read all parameters in the folder ``zero`` except `skip`.

    Return the weights and the optimizer state by parameter name.

    The parameters have the order of `shapes`. If the training run had several model-parallel ranks,
    `shapes` must be empty.
    """
    there = folder.folders()
    missing = [name for name in shapes if name not in there]
    if missing:
        raise CorruptError(
            f"has no folder for parameter {missing[0][:80]!r} ({len(missing):,} folders are "
            "missing)"
        )
    parameters: dict[str, Tensor] = {}
    state: Named = {}
    for name in dict.fromkeys([*shapes, *there]):
        if name in skip:
            continue
        inner = folder.sub(name)
        files = [each for each in inner.list() if each.endswith(_SUFFIX)]
        if _WEIGHTS not in files:
            raise CorruptError(f"has no {_WEIGHTS}", where=inner.name)
        values = {each: reader.read(each, inner).root for each in files}
        node = values.pop(_WEIGHTS)
        tensor = as_tensor(_value(node))
        if tensor is None:
            raise FormatError(f"{_WEIGHTS} does not contain a tensor", where=inner.name)
        # An embedding in a universal checkpoint lacks the padding rows that `shapes` includes.
        is_cut = isinstance(node, dict) and node.get("vocab_tensor") is True
        shape = tensor.shape if is_cut else shapes.get(name, tensor.shape)
        shaped = _shaped(tensor, shape)
        if shaped is None:
            raise CorruptError(
                f"{_WEIGHTS} has the shape {tensor.shape}, but the parameter has {shape}",
                where=inner.name,
            )
        parameters[name], state[name] = shaped, {}
        for each, node in values.items():
            value = _value(node)
            held = as_tensor(value)
            if held is not None:
                value = _shaped(held, shaped.shape) or own(held)
            state[name][each.removesuffix(_SUFFIX)] = value
    return parameters, state


def _value(node: Node) -> Node:
    return node["param"] if isinstance(node, dict) and "param" in node else node


def _shaped(tensor: Tensor, shape: Shape) -> Tensor | None:
    """Reshape a flat tensor. Return None if the number of elements differs."""
    if tensor.shape == shape:
        return tensor
    if not is_flat(tensor) or tensor.numel != prod(shape):
        return None
    return Tensor(tensor.storage, tensor.dtype, shape, contiguous_stride(shape), tensor.offset)
