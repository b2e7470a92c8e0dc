"""Read DeepSpeed folders: the training state of ZeRO stages 0 to 3, and universal checkpoints.

In these paths, ``<tag>`` is the name of a subfolder, such as ``global_step2``:

* ``latest`` and ``latest_universal`` are text files that contain the name of the subfolder.
* ``<tag>/mp_rank_00_model_states.pt`` contains the model of rank 0 (stages 0 to 2).
* ``<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt`` contains the model of rank r (stage 3).
* ``<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` contains the weights and the
  optimizer of rank r (stages 1 to 3).
* ``<tag>/zero/<name>/`` is the folder of one complete parameter in a universal checkpoint. The file
  ``fp32.pt`` contains the weights. The files ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``
  contain the optimizer state.
* ``<tag>/zero/optimizer_state.pt`` contains the optimizer settings of a universal checkpoint.

All .pt files are torch.save files. With model, pipeline or expert parallelism, the files have other
names: ``mp_rank_01``, ``layer_*``, ``expert_*``.

A model_states file contains these fields:

* ``module`` is a state_dict with the dtype of the run. In stage 3, all tensors in ``module`` except
  buffers are empty.
* ``buffer_names`` is a list of names in ``module``.
* ``param_shapes`` is a list with one dict {name: torch.Size} for each group (None in stage 0).
* ``frozen_param_shapes`` is a dict {name: torch.Size} or None.
* ``frozen_param_fragments`` is a dict {name: tensor} or None.
* ``shared_params`` maps the second name of a shared parameter to the first name.
* The other fields are counters and the arguments of save_checkpoint.

An optim_states file contains ``optimizer_state_dict`` with these fields in stages 1 and 2:

* ``single_partition_of_fp32_groups`` is a list of one 1-D tensor for each group.
* ``group_paddings`` is a list of integers.
* ``param_alignment_paddings`` is a list of lists of integers.
* ``partition_count`` is a list of integers.
* ``base_optimizer_state`` is the optimizer state.

In stage 3, ``optimizer_state_dict`` contains these fields:

* ``fp32_flat_groups`` is a list of one 1-D tensor for each group.
* ``partition_count`` is an integer or a list of integers.
* ``optimizer_state_dict`` is the optimizer state.

The optimizer state is a list with the state of each group, or {"state": {group: {"exp_avg": 1-D
tensor, ..., "step"}}, "param_groups"}.

``fp32.pt`` and the optimizer files of a parameter contain {"param": tensor, ...}, or only a tensor.
If the checkpoint was converted from stage 3, the tensors in all files of a parameter are flat.

To read stages 1 and 2, :func:`read` concatenates all ranks' tensors of one group. The concatenated
tensor contains the parameters of the group in order. ``param_alignment_paddings`` gives the number
of padding elements after each parameter. At the end, fewer than 2 * N padding elements may follow,
where N is the number of ranks.

To read stage 3, :func:`read` concatenates all tensors of one rank. The concatenated tensor contains
ceil(elements / ranks) elements of each parameter in order. A parameter consists of its elements on
all ranks, without the padding at the end. A frozen parameter of stage 3 is split over the ranks in
the same way as other parameters.

The optimizer's tensors are split like the weights, but may lack the padding.

Sources: deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py, stage3.py and
checkpoint/ds_to_universal.py of DeepSpeed 0.19.8.

The function :func:`read` returns rank 0's model_states, and replaces or adds these entries:

* ``module`` is the state_dict in full precision.
* ``module_<dtype>`` is the 16-bit state_dict of the run, if the folder contains one (stages 1, 2).
* ``optimizer`` is a dict of the optimizer settings, "param_groups", and
  "state": {name: {"exp_avg", "exp_avg_sq", "step"}}.

The fields that describe the split (param_shapes, paddings, slices) are dropped. Reading needs no
tensor bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ckptkit.compute.numbers import cast_record
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Folder, small_file_beside
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    InputError,
    UnsupportedError,
)
from ckptkit.core.limits import check as check_limit
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, merge_all, shell_word, some, without
from ckptkit.core.tree import Node, OrderedMapping, key_text
from ckptkit.core.weights import as_tensor
from ckptkit.formats import table, whats_inside
from ckptkit.formats.distributed.reading import (
    Fields,
    FlatRow,
    RankReader,
    check_ranks,
    is_flat,
    own,
    shared_out,
)
from ckptkit.formats.format import CheckedPart, Defect, Probe

# Names of folders and files


POINTERS = ("latest", "latest_universal")
UNIVERSAL = "zero"
_POINTER_BYTES = 1 << 10
_STATES = re.compile(r".+_(model|optim)_states\.pt|layer_.*-model_states\.pt")
_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>[0-9]{1,9})_)?mp_rank_(?P<mp>[0-9]{1,9})_model_states\.pt"
    r"|(?:bf16_|fp16_)?zero_pp_rank_(?P<optim>[0-9]{1,9})_mp_rank_(?P<optim_mp>[0-9]{1,9})"
    r"_optim_states\.pt"
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


def pointer(folder: Folder) -> tuple[str, str] | None:
    """Return the name of a file such as ``latest``, and the folder name that the file contains.

    Return None if `folder` has no such file.
    """
    for name in POINTERS:
        data = small_file_beside(folder, name) or b""
        tag = data.decode("utf-8", "replace").strip()
        if tag and tag.isprintable() and len(data) <= _POINTER_BYTES:
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
    named = pointer(folder)
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

    ``models`` maps ranks to the model files of stage 3. In stages 0 to 2, ``models`` contains only
    the file of rank 0. ``optims`` maps ranks to optimizer files. The constructor raises
    UnsupportedError if there are several model-parallel ranks. If `merged` is true, the constructor
    instead sets ``parallel`` to True, and ignores the files of all model-parallel ranks except rank
    0.
    """

    def __init__(self, names: Iterable[str], *, merged: bool) -> None:
        others: list[str] = []
        models: dict[int, str] = {}
        optims: dict[int, str] = {}
        for name in sorted(filter(_STATES.fullmatch, names)):
            found = _FILE.fullmatch(name)
            if found is None:
                is_expert = EXPERT.fullmatch(name)
                what = "single experts" if is_expert else "an unsupported kind"
                raise UnsupportedError(
                    f"has files of {what}, e.g. {name}, which ckptkit cannot join",
                    hint=_SAVE_WHOLE if is_expert else _MERGE,
                )
            if int(found["mp"] or found["optim_mp"]):
                others.append(name)
                continue
            held = models if found["mp"] else optims
            rank = int(found["rank"] or found["optim"] or 0)
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
        self.stage_3 = any(name.startswith("zero") for name in models.values())
        if 0 not in models:
            _check({}, 1, _NAMES[0] if models else "mp_rank_00_model_states.pt")

    def check_complete(self, ranks: int) -> None:
        """Raise CorruptError unless each rank has an optimizer file.

        In stage 3, each rank also needs a model file.
        """
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optims.values()) else ""
        _check(self.optims, ranks, prefix + _NAMES[1])
        self.check_models(ranks)

    def check_models(self, ranks: int) -> None:
        """Raise CorruptError unless each rank has a model file (stage 3)."""
        if self.stage_3:
            _check(self.models, ranks, _NAMES[0])


def _check(found: Mapping[int, str], ranks: int, name: str) -> None:
    """Raise CorruptError unless there is one file for each rank. `name` is a template."""
    check_limit("ranks", ranks, "ranks")
    check_ranks(found, range(ranks), name.format)


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
Rows = Mapping[int, tuple[FlatRow, ...]]  # concatenated flat tensors by group


class Rank(NamedTuple):
    """The flat tensors and optimizer state of one rank, by group.

    ``cut`` contains the number of padding elements that DeepSpeed removed from each flat tensor.
    """

    flats: list[Tensor]
    cut: list[int]
    state: list[Mapping[Node, Node]]

    def per_element(self, group: int, key: Node) -> Tensor | None:
        """Return an optimizer state with one value for each element of the flat tensor."""
        tensor = as_tensor(self.state[group].get(key))
        size = self.flats[group].numel
        sizes = (size, size + self.cut[group])
        fits = tensor is not None and is_flat(tensor) and tensor.numel in sizes
        return tensor if fits else None


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
        for group in range(0 if self.stage_3 else len(self.ranks[0].flats)):
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
        inner, node = f"{place}: {self.state_key}", fields.node.get(self.state_key)
        if isinstance(node, (list, tuple)):  # elastic_checkpoint
            states: Mapping[Node, Node] = dict(enumerate(node))
        else:
            held = Fields(node if node is not None else {}, inner).node
            states = Fields(held.get("state", {}), inner).node
        found = [Fields(states.get(group, {}), inner).node for group in range(len(flats))]
        most = max(map(len, found), default=0)
        check_limit("optimizer_values", most, f"values for a parameter in {inner}")
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
        flats = len(groups) if self.stage_3 else len(self.ranks[0].flats)
        if GAPS in self.first and not self.stage_3:
            listed = self.first.items(GAPS)
            gaps = [Fields({GAPS: each}, self.first.place).integers(GAPS) for each in listed]
        names = set(flatten(groups))
        counts = [len(shapes) for shapes in groups]
        if list(map(len, gaps)) != counts or len(names) != sum(counts) or len(groups) != flats:
            raise CorruptError(
                f"param_shapes has {len(names):,} names in groups of {counts[:8]}, {GAPS} has "
                f"groups of {list(map(len, gaps))[:8]}, and there are {flats:,} {self.key}"
            )
        slots: dict[str, Slot] = {}
        needed: list[int] = []  # number of elements of each concatenated tensor
        start = 0
        for group, (shapes, behind) in enumerate(zip(groups, gaps, strict=True)):
            start = end = start if self.stage_3 else 0
            for (name, shape), gap in zip(shapes.items(), behind, strict=True):
                share = -(-prod(shape) // self.count) if self.stage_3 else prod(shape)
                slots[name] = Slot(shape, group, start, share)
                end = start + share
                start = end + gap
            needed.append(end)
        if self.stage_3:
            needed = [start] * self.count
        unit = 1 if self.stage_3 else 2 * self.count
        held = [[flat.numel for flat in rank.flats] for rank in self.ranks]
        sizes = map(sum, held if self.stage_3 else zip(*held, strict=True))
        for number, (size, least) in enumerate(zip(sizes, needed, strict=True)):
            if not least <= size <= -(-least // unit) * unit:
                raise CorruptError(
                    f"the parameters need {least:,} elements, but flat tensor {number} has "
                    f"{size:,} elements"
                )
        return slots

    def parameters(self, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
        """Return the weights by name."""
        rows = self._rows([rank.flats for rank in self.ranks])
        return {name: self._taken(rows, slot) for name, slot in slots.items()}

    def _rows(self, parts: Sequence[Sequence[Tensor | None]]) -> Rows:
        """Return the concatenated flat tensors of each group. In stage 3, the only group is 0.

        `parts` contains a list for each rank. The list contains a tensor or None for each group.
        The result lacks a group if a rank lacks the tensor of the group.
        """
        lines: list[list[Sequence[Tensor | None]]] = [list(parts)]
        if not self.stage_3:
            lines = [[line] for line in zip(*parts, strict=True)]
        return {
            group: tuple(FlatRow([part for part in row if part is not None]) for row in rows)
            for group, rows in enumerate(lines)
            if None not in flatten(rows)
        }

    def _taken(self, rows: Rows, slot: Slot) -> Tensor:
        row = rows[0 if self.stage_3 else slot.group]
        return shared_out(row, slot.shape, slot.start, slot.share)

    def optimizer(self, slots: Mapping[str, Slot]) -> tuple[Named, list[str]]:
        """Return the optimizer state by parameter name, and warnings.

        Values with one element per weight, such as exp_avg, are assembled like the weights. Single
        values of a group, such as the step, are taken from rank 0.
        """
        states = self.ranks[0].state
        rows = {}
        for key in dict.fromkeys(flatten(states)):
            rows[key] = self._rows([
                [rank.per_element(group, key) for group in range(len(rank.flats))]
                for rank in self.ranks
            ])  # fmt: skip
        made: Named = {name: {} for name in slots}
        left: dict[str, None] = {}
        for name, slot in slots.items():
            kept = states[slot.group] if slot.group < len(states) else {}
            for key, whole in rows.items():
                tensor = as_tensor(kept.get(key))
                if (0 if self.stage_3 else slot.group) in whole:
                    made[name][key] = self._taken(whole, slot)
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
        values = {each: reader.read(each, inner).root for each in files}
        node = values.pop(_WEIGHTS, None)
        tensor = as_tensor(_value(node))
        if tensor is None:
            raise CorruptError(f"has no {_WEIGHTS} with a tensor", where=inner.name)
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
                value = _shaped(held, shape) or own(held)
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


# The model of rank 0, and reading a folder


MODULE, BUFFERS, SHAPES, SHARED = "module", "buffer_names", "param_shapes", "shared_params"
FROZEN_SHAPES, FROZEN = "frozen_param_shapes", "frozen_param_fragments"
OPTIMIZER = "optimizer"
_SCRIPT = "zero_to_fp32.py"
_GROUPS, _PARAMS, _RANKS = "param_groups", "params", "dp_world_size"
# Fields that `read` drops, because they describe the split, or because `module` then contains their
# tensors.
_DROPPED = (SHAPES, FROZEN_SHAPES, FROZEN)


class Model:
    """The model_states of rank 0: names and shapes of parameters, and the state_dict `module`."""

    def __init__(self, states: Fields) -> None:
        self.states = states
        self.module = states.names(MODULE)
        groups = states.listed(SHAPES)
        self.groups = [Fields({SHAPES: each}, states.place).shapes(SHAPES) for each in groups]
        self.frozen_shapes = states.shapes(FROZEN_SHAPES) if FROZEN in states else {}
        self.buffer_names = [each for each in states.listed(BUFFERS) if isinstance(each, str)]
        self.warnings: list[str] = []
        # Maps (id of the original storage, dtype) to a storage on the CPU.
        self._cpu: dict[tuple[int, str], Storage] = {}

    def state_dict(
        self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor], *, placeholders: bool
    ) -> OrderedMapping:
        """Return the complete state_dict, in the order of the model.

        Set `placeholders` for stage 3, in which `module` has empty tensors in place of weights.
        """
        module, found = self.module, dict[str, Node]()
        for name, made in parameters.items():
            held = as_tensor(module.get(name))
            if held is not None and held.numel and held.shape != made.shape:
                raise CorruptError(
                    f"{name[:80]!r} has the shape {held.shape} in {self.states.place}, but its "
                    f"shards give {made.shape}"
                )
        for name in self.buffer_names:
            if name in module:
                tensor = as_tensor(module[name])
                found[name] = module[name] if tensor is None else self._on_cpu(tensor, wide=True)
        found |= {**frozen, **parameters}
        for name, same in self.states.names(SHARED).items():
            if isinstance(same, str) and same in found:
                found[name] = _alias(found[same])
        # The other entries of `module` are frozen parameters of stage 1, aliases of parameters, or
        # values that are not tensors.
        tensors = {name: as_tensor(node) for name, node in module.items()}
        known = {_place(each): name for name in found if (each := tensors.get(name)) is not None}
        taken, missing = [], []
        for name in [name for name in module if name not in found]:
            tensor = tensors[name]
            if tensor is None:
                found[name] = module[name]
            elif placeholders and not tensor.numel:
                missing.append(name)
            elif _place(tensor) in known:
                found[name] = _alias(found[known[_place(tensor)]])
            else:
                found[name] = self._on_cpu(tensor)
                taken.append(name)
        if taken:
            self.warnings.append(
                f"copied these tensors unchanged from {MODULE}, because their fp32 weights are "
                f"missing: {some(taken)}"
            )
        if missing:
            self.warnings.append(
                f"dropped these entries of {MODULE}, because they have no data (perhaps aliases of "
                f"a weight): {some(missing)}"
            )
        order = dict.fromkeys([*module, *found])
        state = getattr(self.states.node.get(MODULE), "state", None)
        return OrderedMapping(((name, found[name]) for name in order if name in found), state)

    def _on_cpu(self, tensor: Tensor, *, wide: bool = False) -> Tensor:
        """Return the tensor with a storage on the CPU, because assembled tensors are on the CPU.

        If `wide` is true, convert 16-bit floats to float32, as DeepSpeed's own script does.
        """
        storage, dtype = tensor.storage, tensor.dtype
        if storage is None or tensor.layout != "strided":
            return tensor
        if wide and dtype.kind == "float" and dtype.bits == 16 and storage.nbytes % 2 == 0:
            dtype = dtypes.BY_NAME["float32"]
        elif storage.device == "cpu":
            return tensor
        key = (id(storage), dtype.name if dtype != tensor.dtype else "")
        if key not in self._cpu:
            self._cpu[key] = replace(storage, device="cpu")
            if dtype != tensor.dtype:
                big = storage.big_endian
                record = cast_record(storage.record, tensor.dtype, dtype, big_endian=big)
                self._cpu[key] = Storage(record)
        return replace(
            tensor, storage=self._cpu[key], dtype=dtype, requires_grad=False, kind="tensor"
        )

    def frozen(self, reader: RankReader, files: RankFiles, ranks: int) -> dict[str, Tensor]:
        """Return the frozen parameters by name. In stage 3, join the fragments of all ranks."""
        if not self.frozen_shapes:
            return {}
        files.check_models(ranks)
        others = [name for rank, name in files.models.items() if rank]
        parts = [self.states.names(FROZEN)]
        parts += [reader.fields(name).names(FROZEN) for name in others]
        made = {}
        for name, shape in self.frozen_shapes.items():
            held = [as_tensor(each.get(name)) for each in parts]
            tensors = [tensor for tensor in held if tensor is not None]
            share = -(-prod(shape) // ranks) if files.stage_3 else prod(shape)
            if len(tensors) < len(held) or not all(
                is_flat(each) and each.numel == share if files.stage_3 else each.shape == shape
                for each in tensors
            ):
                raise CorruptError(
                    f"the frozen parameter {name[:80]!r} of shape {shape} is missing in {FROZEN} "
                    "of some ranks, or has another size there"
                )
            rows = tuple(FlatRow([each]) for each in tensors) if files.stage_3 else ()
            made[name] = shared_out(rows, shape, 0, share) if rows else self._on_cpu(tensors[0])
        return made

    def half(self, parameters: Mapping[str, Tensor]) -> dict[str, Node]:
        """Return ``{"module_<dtype>": state_dict}``, where <dtype> is the dtype of the run.

        If the assembled parameters have the dtype of the run, return an empty dict.
        """
        held = ((as_tensor(self.module.get(name)), tensor) for name, tensor in parameters.items())
        other = {
            old.dtype.name
            for old, new in held
            if old is not None and old.numel and old.dtype != new.dtype
        }
        key = f"{MODULE}_{'_'.join(sorted(other))}"
        return {key: self.states.node[MODULE]} if other and key not in self.states.node else {}


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that identifies the elements of a tensor in memory."""
    return id(tensor.storage), tensor.offset, tensor.dtype.name, tensor.shape, tensor.stride


def _alias(node: Node) -> Node:
    """If `node` is a tensor, return another tensor object with the same storage."""
    return replace(node) if isinstance(node, Tensor) else node


def matches(probe: Probe) -> bool:
    """Return whether the folder is a training state, or contains folders of training states."""
    if not probe.is_folder:
        return False
    if is_tag(probe.names) or tag_folders(probe.folder):
        return True
    return _SCRIPT in probe.names and pointer(probe.folder) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the headers of the training state that ``latest`` names.

    Without ``latest``, read the only training state in the folder. Raises AmbiguousError if there
    are several training states. Raises UnsupportedError for model, pipeline and expert parallelism.
    Raises CorruptError if files are missing or contradict each other.
    """
    folder = find(probe.folder, probe.names)
    try:
        return _read(probe.folder, folder)
    except CkptkitError as error:
        error.at(folder.name)
        raise


def _read(top: Folder, folder: Folder) -> Checkpoint:
    reader = RankReader(folder)
    universal = UNIVERSAL in folder.folders()
    files = RankFiles(folder.list(), merged=universal)
    if universal and files.optims:
        raise AmbiguousError(
            f"contains both a universal checkpoint ({UNIVERSAL}) and rank files: "
            f"{some(files.optims.values())}",
            hint="move the folder `zero` or the rank files into another folder",
        )
    states = reader.fields(files.models[0])
    if MODULE not in states and not universal:
        raise FormatError(f"{states.place} has no {MODULE}")
    root, warnings = states.node, list[str]()
    if universal or SHAPES in states or files.optims:
        model = Model(states)
        zero = folder.sub(UNIVERSAL) if universal else None
        new = _assembled(model, reader, files, zero)
        root = {**new, **without(states.node, (*new, *_DROPPED))}
        warnings = model.warnings
    return Checkpoint(
        root, table.DEEPSPEED.name, top, globals=tuple(reader.globals),
        warnings=(*warnings, *reader.warnings), key=MODULE,
    )  # fmt: skip


def _assembled(
    model: Model, reader: RankReader, files: RankFiles, zero: Folder | None
) -> dict[Node, Node]:
    """Return the entries of the model and the optimizer, assembled from all ranks.

    `zero` is the folder of a universal checkpoint, whose files contain complete parameters.
    """
    notes: list[str] = []
    if zero is not None:
        shapes = {} if files.parallel else merge_all(model.groups)
        skip = {*model.buffer_names, *model.states.names(SHARED), *model.frozen_shapes}
        parameters, state = read_universal(reader, zero, shapes, skip)
        held = reader.read(SETTINGS, zero).root if SETTINGS in zero else {}
        described, groups, count = Fields(held, SETTINGS).node, None, len(files.models)
    else:
        if not files.optims:
            counts = model.states.integers(_RANKS) if _RANKS in model.states else ()
            files.check_complete(max(1, *counts))
        ranks = ZeroRank(reader, files)
        if ranks.stage_3 != files.stage_3:
            raise CorruptError(
                f"{ranks.first.place} and {model.states.place} are of different ZeRO stages"
            )
        slots = ranks.slots(model.groups)
        parameters = ranks.parameters(slots)
        state, notes = ranks.optimizer(slots)
        described, count = ranks.first.node, ranks.count
        inner = described.get(ranks.state_key)
        groups = inner.get(_GROUPS) if isinstance(inner, dict) else None
    frozen = model.frozen(reader, files, count)
    module = model.state_dict(parameters, frozen, placeholders=files.stage_3)
    model.warnings += notes
    settings = {_GROUPS: groups, **without(described, CUT)}
    settings[_GROUPS] = _groups(settings[_GROUPS], model)
    return {
        MODULE: module,
        **({} if files.stage_3 else model.half(parameters)),
        OPTIMIZER: {"state": state, **settings},
    }


def _groups(groups: Node, model: Model) -> list[Node]:
    """Return the optimizer's param_groups, with parameter names in place of numbers."""
    names = [list(shapes) for shapes in model.groups]
    if not isinstance(groups, list):
        return [{_PARAMS: each} for each in names]
    made = []
    for group in groups:
        numbers = group.get(_PARAMS) if isinstance(group, dict) else None
        if isinstance(numbers, list) and all(
            type(n) is int and 0 <= n < len(names) for n in numbers
        ):
            named = list(flatten(names[number] for number in dict.fromkeys(numbers)))
            group = {**group, _PARAMS: named}
        made.append(group)
    return made


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the zip members of every file, so that `verify` checks their CRC-32.

    Raises AmbiguousError or CorruptError if `find` cannot determine the folder.
    """
    yield from _members(find(probe.folder, probe.names))


def _members(folder: Folder, path: str = "") -> Iterator[CheckedPart | Defect]:
    """Yield the zip members of the files in a folder and its subfolders. `path` is the folder's."""
    folders = folder.folders()
    for name in folder.list():
        if name in folders:
            yield from _members(folder.sub(name), f"{path}{name}/")
        elif name.endswith(".pt"):
            try:
                file = Probe(folder.open(name))
                if file.zip is not None:
                    yield from whats_inside.members(file.zip, path + name)
            except InputError as error:
                yield Defect(error.message, path + name)
