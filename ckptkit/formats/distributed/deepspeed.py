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
tensor bytes. The module :mod:`zero_ranks` finds the files and assembles the ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ckptkit.compute.numbers import cast_record
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError, FormatError, InputError
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.text import flatten, merge_all, some, without
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.core.weights import as_tensor
from ckptkit.formats import table, whats_inside
from ckptkit.formats.distributed import zero_ranks
from ckptkit.formats.distributed.reading import (
    Fields,
    FlatRow,
    RankReader,
    is_flat,
    shared_out,
)
from ckptkit.formats.distributed.zero_ranks import (
    CUT,
    SETTINGS,
    UNIVERSAL,
    Named,
    RankFiles,
    ZeroRank,
    read_universal,
)
from ckptkit.formats.format import CheckedPart, Defect, Probe

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
        groups = states.items(SHAPES) if SHAPES in states else []
        self.groups = [Fields({SHAPES: each}, states.place).shapes(SHAPES) for each in groups]
        self.frozen_shapes = states.shapes(FROZEN_SHAPES) if FROZEN in states else {}
        names = states.items(BUFFERS) if BUFFERS in states else []
        self.buffer_names = [name for name in names if isinstance(name, str)]
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
                found[name] = module[name] if tensor is None else self._wide(tensor)
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
                found[name] = self.on_cpu(tensor)
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

    def _wide(self, tensor: Tensor) -> Tensor:
        """Convert a buffer of 16-bit floats to float32, as DeepSpeed's own script does."""
        storage, half = tensor.storage, tensor.dtype.kind == "float" and tensor.dtype.bits == 16
        if not half or storage is None or tensor.layout != "strided" or storage.nbytes % 2:
            return self.on_cpu(tensor)
        single = dtypes.BY_NAME["float32"]
        key = (id(storage), tensor.dtype.name)
        if key not in self._cpu:
            self._cpu[key] = Storage(
                cast_record(storage.record, tensor.dtype, single, big_endian=storage.big_endian)
            )
        return Tensor(self._cpu[key], single, tensor.shape, tensor.stride, tensor.offset)

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """Return the tensor with a storage on the CPU, because assembled tensors are on the CPU."""
        storage = tensor.storage
        if storage is None or storage.device == "cpu" or tensor.layout != "strided":
            return tensor
        key = (id(storage), "")
        if key not in self._cpu:
            self._cpu[key] = Storage(storage.record, "cpu", storage.crc32, storage.big_endian)
        return Tensor(
            self._cpu[key], tensor.dtype, tensor.shape, tensor.stride, tensor.offset,
            conj=tensor.conj, neg=tensor.neg,
        )  # fmt: skip

    def frozen(self, fragments: Iterable[Mapping[str, Node]], ranks: int) -> dict[str, Tensor]:
        """Join the ranks' fragments of each frozen parameter. Return the parameters by name.

        If `ranks` is 0, the only fragment is the complete parameter.
        """
        parts = list(fragments)
        made = {}
        for name, shape in self.frozen_shapes.items():
            what = f"the frozen parameter {name[:80]!r}"
            held = [as_tensor(each.get(name)) for each in parts]
            tensors = [tensor for tensor in held if tensor is not None]
            if len(tensors) < len(held):
                raise CorruptError(f"{what} is missing in {FROZEN} of some ranks")
            if not ranks:
                if tensors[0].shape != shape:
                    raise CorruptError(f"{what} has the shape {tensors[0].shape}, not {shape}")
                made[name] = self.on_cpu(tensors[0])
                continue
            share = -(-prod(shape) // ranks)
            if not all(is_flat(tensor) and tensor.numel == share for tensor in tensors):
                raise CorruptError(
                    f"{what} does not have {share:,} elements in each of {ranks:,} ranks"
                )
            rows = tuple(FlatRow([fragment]) for fragment in tensors)
            made[name] = shared_out(rows, shape, 0, share)
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
    if zero_ranks.is_tag(probe.names) or zero_ranks.tag_folders(probe.folder):
        return True
    return _SCRIPT in probe.names and zero_ranks.pointer(probe.folder, probe.names) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the headers of the training state that ``latest`` names.

    Without ``latest``, read the only training state in the folder. Raises AmbiguousError if there
    are several training states. Raises UnsupportedError for model, pipeline and expert parallelism.
    Raises CorruptError if files are missing or contradict each other.
    """
    folder = zero_ranks.find(probe.folder, probe.names)
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
    states = reader.fields(files.model)
    if MODULE not in states and not universal:
        raise FormatError(f"{states.place} has no {MODULE}")
    root, warnings = states.node, list[str]()
    if universal or SHAPES in states or files.optims:
        model = Model(states)
        parts = _merged(model, reader, files, folder) if universal else _ranks(model, reader, files)
        stage_3 = -1 not in files.models
        new: dict[Node, Node] = {
            MODULE: model.state_dict(parts.parameters, parts.frozen, placeholders=stage_3),
            **({} if stage_3 else model.half(parts.parameters)),
            OPTIMIZER: {
                "state": parts.state,
                **parts.settings,
                _GROUPS: _groups(parts.settings[_GROUPS], model),
            },
        }
        root = {**new, **without(states.node, (*new, *_DROPPED))}
        warnings = [*model.warnings, *parts.warnings]
    return Checkpoint(
        root, table.DEEPSPEED.name, top, globals=tuple(reader.globals),
        warnings=(*warnings, *reader.warnings), key=MODULE,
    )  # fmt: skip


class Parts(NamedTuple):
    """Tensors by name, optimizer state and optimizer settings, assembled from all ranks."""

    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    state: Named
    settings: dict[Node, Node]
    warnings: list[str]


def _ranks(model: Model, reader: RankReader, files: RankFiles) -> Parts:
    """Read the rank files of ZeRO stages 1 to 3, and assemble their tensors."""
    if not files.optims:
        counts = model.states.integers(_RANKS) if _RANKS in model.states else ()
        files.check_complete(max(1, *counts))
    zero = ZeroRank(reader, files)
    if zero.stage_3 != (-1 not in files.models):
        raise CorruptError(
            f"{zero.first.place} and {model.states.place} are of different ZeRO stages"
        )
    slots = zero.slots(model.groups)
    state, warnings = zero.optimizer(slots)
    inner = zero.first.node.get(zero.state_key)
    groups = inner.get(_GROUPS) if isinstance(inner, dict) else None
    settings = {_GROUPS: groups, **without(zero.first.node, CUT)}
    frozen = _frozen(model, reader, files, zero.count)
    return Parts(zero.parameters(slots), frozen, state, settings, warnings)


def _merged(model: Model, reader: RankReader, files: RankFiles, folder: Folder) -> Parts:
    """Read a universal checkpoint, whose files contain complete parameters."""
    shapes = {} if files.parallel else merge_all(model.groups)
    zero = folder.sub(UNIVERSAL)
    skip = {*model.buffer_names, *model.states.names(SHARED), *model.frozen_shapes}
    parameters, state = read_universal(reader, zero, shapes, skip)
    settings = reader.read(SETTINGS, zero).root if SETTINGS in zero else {}
    kept = without(Fields(settings, SETTINGS).node, CUT)
    frozen = _frozen(model, reader, files, len(files.models))
    return Parts(parameters, frozen, state, {_GROUPS: None, **kept}, [])


def _frozen(model: Model, reader: RankReader, files: RankFiles, ranks: int) -> dict[str, Tensor]:
    """Return the frozen parameters by name. In stage 3, join the fragments of all ranks."""
    if not model.frozen_shapes:
        return {}
    if -1 in files.models:
        return model.frozen([model.states.names(FROZEN)], 0)
    files.check_models(ranks)
    others = (reader.fields(name) for rank, name in files.models.items() if rank)
    return model.frozen([each.names(FROZEN) for each in (model.states, *others)], ranks)


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

    Raises AmbiguousError or CorruptError if `zero_ranks.find` cannot determine the folder.
    """
    folder = zero_ranks.find(probe.folder, probe.names)
    places = [(folder, "")]
    if UNIVERSAL in folder.folders():
        zero = folder.sub(UNIVERSAL)
        places.append((zero, f"{UNIVERSAL}/"))
        places += [(zero.sub(name), f"{UNIVERSAL}/{name}/") for name in zero.folders()]
    for inner, path in places:
        for name in inner.list():
            if not name.endswith(".pt"):
                continue
            try:
                file = Probe(inner.open(name))
                if file.zip is not None:
                    yield from whats_inside.members(file.zip, path + name)
            except InputError as error:
                yield Defect(error.message, path + name)
