"""DeepSpeed's folders: a training state, each process writing its part (ZeRO 0 to 3, universal).

    latest, latest_universal                           the name of the folder <tag>: global_step2
    <tag>/mp_rank_00_model_states.pt                   stages 0 to 2: the model of rank 0
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt  stage 3: that of each rank
    <tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt
                                                       stages 1 to 3: each rank's weights, optimizer
    <tag>/zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                                                       universal: one parameter, assembled
    <tag>/zero/optimizer_state.pt

All are files of torch.save. Other names (``mp_rank_01``, ``layer_*``, ``expert_*``) come from
model, pipeline and expert parallelism. What is in them:

    model_states   module           state_dict: in 16 bits if the run was; in stage 3 of empty
                                    tensors, buffers aside
                   buffer_names     names in module
                   param_shapes     [{name: torch.Size} for each group]; None in stage 0
                   frozen_param_shapes, frozen_param_fragments
                                    {name: torch.Size}, {name: tensor}, or None
                   shared_params    {name: name of the same parameter}
                   the arguments of save_checkpoint, and counters
    optim_states   optimizer_state_dict
        stages 1, 2    single_partition_of_fp32_groups [1-D tensor for each group],
                       group_paddings [int], param_alignment_paddings [[int]],
                       partition_count [int], base_optimizer_state
        stage 3        fp32_flat_groups [1-D tensor for each group], partition_count,
                       optimizer_state_dict
        the last are   {"state": {group: {"exp_avg": 1-D tensor, ..., "step"}}, "param_groups"},
                       or [state of group]
    fp32.pt ...    {"param": tensor, ...}, or the tensor; of stage 3 a flat one

Of W ranks, with c = ceil(elements / W):

- stages 1 and 2: the tensors of one group, joined over the ranks, are its parameters in order, each
  followed by as many elements as param_alignment_paddings says. Less than 2 W elements may follow.
- stage 3: the tensors of one rank, joined over the groups, hold c elements of each parameter in
  order; a parameter is its elements joined over the ranks, cut to its size. Frozen ones are
  fragments of the same kind, by name.

The optimizer's tensors are laid out in the same way, padded or not.
(deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py, stage3.py,
checkpoint/ds_to_universal.py of 0.19.8)

:mod:`places` finds the files, :mod:`states` reads them, :mod:`partitions` is the arithmetic above,
:mod:`ranks` and :mod:`universal` apply it, :mod:`module` assembles the state_dict, :mod:`reader` is
the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from ckptkit.compute.numbers import cast_record
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError, FormatError, InputError
from ckptkit.core.tensor import Shape, Storage, Tensor
from ckptkit.core.text import flatten, merge_all, without
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.core.weights import as_tensor
from ckptkit.formats import table, whats_inside
from ckptkit.formats.distributed import zero_ranks
from ckptkit.formats.distributed.partitions import PartitionRow, Slot
from ckptkit.formats.distributed.reading import Fields, Reader, is_flat
from ckptkit.formats.distributed.zero_ranks import (
    CUT,
    SETTINGS,
    Named,
    RankFiles,
    Universal,
    ZeroRank,
    listed,
)
from ckptkit.formats.format import CheckedPart, Defect, Probe

# The full-precision state_dict: the ranks' weights, buffers, frozen parameters and ties.


MODULE, BUFFERS, SHAPES, SHARED = "module", "buffer_names", "param_shapes", "shared_params"
FROZEN_SHAPES, FROZEN = "frozen_param_shapes", "frozen_param_fragments"


class Model:
    """The model_states of rank 0: facts about parameters, and the `module` they go into."""

    def __init__(self, states: Fields) -> None:
        self.states = states
        self.module = states.names(MODULE)
        groups = states.items(SHAPES) if SHAPES in states else []
        self.groups = [Fields({SHAPES: each}, states.place).shapes(SHAPES) for each in groups]
        self.frozen_shapes = states.shapes(FROZEN_SHAPES) if FROZEN in states else {}
        names = states.items(BUFFERS) if BUFFERS in states else []
        self.buffer_names = [name for name in names if isinstance(name, str)]
        self.warnings: list[str] = []
        self._cpu: dict[tuple[int, str], Storage] = {}  # by id of the storage and dtype

    def state_dict(
        self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor], *, placeholders: bool
    ) -> OrderedMapping:
        """Return every entry by name, in the order of the model.

        In stage 3 empty tensors are `placeholders`.
        """
        self._check_shapes(parameters)
        found: dict[str, Node] = {**self._buffers(), **frozen, **parameters}
        for name, same in self.states.names(SHARED).items():
            if isinstance(same, str) and same in found:
                found[name] = _alias(found[same])
        self._add_others(found, placeholders)
        order = dict.fromkeys([*self.module, *found])
        state = getattr(self.states.node.get(MODULE), "state", None)
        return OrderedMapping(((name, found[name]) for name in order if name in found), state)

    def _check_shapes(self, parameters: Mapping[str, Tensor]) -> None:
        for name, tensor in parameters.items():
            held = as_tensor(self.module.get(name))
            if held is not None and held.numel and held.shape != tensor.shape:
                raise CorruptError(
                    f"{name[:80]!r} is of shape {held.shape} in {self.states.place}, "
                    f"but its parts make {tensor.shape}"
                )

    def _buffers(self) -> dict[str, Node]:
        """Return the buffers, 16-bit ones in 32 bits as DeepSpeed's own script does it."""
        held = {name: self.module[name] for name in self.buffer_names if name in self.module}
        tensors = {name: as_tensor(node) for name, node in held.items()}
        return {
            name: held[name] if tensor is None else self._wide(tensor)
            for name, tensor in tensors.items()
        }

    def _wide(self, tensor: Tensor) -> Tensor:
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
        """Return the same tensor with the CPU tag that assembled tensors have."""
        storage = tensor.storage
        if storage is None or storage.device == "cpu" or tensor.layout != "strided":
            return tensor
        key = (id(storage), "")
        if key not in self._cpu:
            self._cpu[key] = Storage(storage.record, "cpu", storage.crc32, storage.big_endian)
        return Tensor(
            self._cpu[key],
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            tensor.offset,
            conj=tensor.conj,
            neg=tensor.neg,
        )

    def _add_others(self, found: dict[str, Node], placeholders: bool) -> None:
        """Add the entries that only `module` has.

        They are aliases of a parameter, frozen ones of stage 1, values that are not tensors.
        """
        known = {
            _place(tensor): name
            for name in found
            if (tensor := as_tensor(self.module.get(name))) is not None
        }
        taken, missing = [], []
        for name in [name for name in self.module if name not in found]:
            tensor = as_tensor(self.module[name])
            if tensor is None:
                found[name] = self.module[name]
            elif placeholders and not tensor.numel:
                missing.append(name)
            elif _place(tensor) in known:
                found[name] = _alias(found[known[_place(tensor)]])
            else:
                found[name] = self.on_cpu(tensor)
                taken.append(name)
        if taken:
            self.warnings.append(
                f"not among the fp32 weights, taken unchanged from {MODULE}: {listed(taken)}"
            )
        if missing:
            self.warnings.append(
                f"left out, as only their names are in {MODULE} (perhaps aliases of a weight): "
                f"{listed(missing)}"
            )

    def frozen(self, fragments: Iterable[Mapping[str, Node]], ranks: int) -> dict[str, Tensor]:
        """Return the frozen parameters: whole in stage 2 (`ranks` 0), else a fragment per rank."""
        parts = list(fragments)
        made = {}
        for name, shape in self.frozen_shapes.items():
            held = [as_tensor(each.get(name)) for each in parts]
            tensors = [tensor for tensor in held if tensor is not None]
            if len(tensors) < len(held):
                raise CorruptError(
                    f"the frozen parameter {name[:80]!r} is not in {FROZEN} of every rank"
                )
            made[name] = (
                _joined(name, shape, tensors, ranks)
                if ranks
                else self._whole(name, shape, tensors[0])
            )
        return made

    def _whole(self, name: str, shape: Shape, tensor: Tensor) -> Tensor:
        if tensor.shape != shape:
            raise CorruptError(
                f"the frozen parameter {name[:80]!r} is of shape {tensor.shape}, not {shape}"
            )
        return self.on_cpu(tensor)

    def half(self, parameters: Mapping[str, Tensor]) -> dict[str, Node]:
        """Return `module` under a name with its dtype, where its parameters differ from these."""
        held = ((as_tensor(self.module.get(name)), tensor) for name, tensor in parameters.items())
        other = {
            old.dtype.name
            for old, new in held
            if old is not None and old.numel and old.dtype != new.dtype
        }
        key = f"{MODULE}_{'_'.join(sorted(other))}"
        return {key: self.states.node[MODULE]} if other and key not in self.states.node else {}


def _joined(name: str, shape: Shape, fragments: list[Tensor], ranks: int) -> Tensor:
    share = -(-prod(shape) // ranks)
    if not all(is_flat(tensor) and tensor.numel == share for tensor in fragments):
        raise CorruptError(
            f"the frozen parameter {name[:80]!r} does not have "
            f"{share:,} elements in each of {ranks:,} ranks"
        )
    rows = tuple(PartitionRow([fragment]) for fragment in fragments)
    return Slot(shape, 0, 0, share).tensor(rows)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same elements in memory."""
    return id(tensor.storage), tensor.offset, tensor.dtype.name, tensor.shape, tensor.stride


def _alias(node: Node) -> Node:
    """Return another tensor of the same memory."""
    if not isinstance(node, Tensor):
        return node
    return Tensor(
        node.storage, node.dtype, node.shape, node.stride, node.offset,
        node.requires_grad, node.kind, node.layout, node.conj, node.neg,
    )  # fmt: skip


# Read a folder of DeepSpeed as one tree.
#
# The root is rank 0's model_states, with
#
#     module             the state_dict, in full precision
#     module_<dtype>     that of the run, if it was in 16 bits and the folder has it (stages 1 and
# 2)
#     optimizer          {"state": {name: {"exp_avg", "exp_avg_sq", "step"}}, "param_groups",
#                        settings}
#
# The fields on how these were cut (param_shapes, paddings, slices) are left out. No bytes of a
# tensor
# are read.


OPTIMIZER = "optimizer"
_SCRIPT = "zero_to_fp32.py"
_GROUPS, _PARAMS, _RANKS = "param_groups", "params", "dp_world_size"
_DROPPED = (SHAPES, FROZEN_SHAPES, FROZEN)  # how it was cut, and what is in the state_dict now


def matches(probe: Probe) -> bool:
    """Return whether this is the folder of a training state, or one with such folders."""
    if not probe.is_folder:
        return False
    if zero_ranks.is_tag(probe.names) or zero_ranks.tag_folders(probe.folder):
        return True
    return _SCRIPT in probe.names and zero_ranks.pointer(probe.folder, probe.names) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the training state that ``latest`` names, or the only one: every file, headers alone.

    Raises AmbiguousError where several could be meant, UnsupportedError for other than data
    parallelism, CorruptError for a folder that is not complete and for files that contradict each
    other.
    """
    folder = zero_ranks.find(probe.folder, probe.names)
    try:
        return _Reading(probe.folder, folder).read()
    except CkptkitError as error:
        error.at(folder.name)
        raise


class _Reading:
    """One training state being read."""

    def __init__(self, top: Folder, folder: Folder) -> None:
        self.top = top
        self.folder = folder
        self.reader = Reader(folder)
        self.universal = zero_ranks.UNIVERSAL in folder.folders()
        self.files = RankFiles(folder.list(), merged=self.universal)
        if self.universal and self.files.optims:
            raise AmbiguousError(
                f"holds a universal checkpoint ({zero_ranks.UNIVERSAL}) and files of ranks: "
                f"{zero_ranks.listed(list(self.files.optims.values()))}",
                hint="move one of them into a folder of its own",
            )

    def read(self) -> Checkpoint:
        states = self.reader.fields(self.files.model)
        if MODULE not in states and not self.universal:
            raise FormatError(f"{states.place} has no {MODULE}")
        root, warnings = states.node, []
        if self.universal or SHAPES in states or self.files.optims:
            model = Model(states)
            parts = self._merged(model) if self.universal else self._ranks(model)
            root, warnings = (
                _root(model, parts, -1 not in self.files.models),
                [*model.warnings, *parts.warnings],
            )
        return Checkpoint(
            root, table.DEEPSPEED.name, self.top, globals=tuple(self.reader.globals),
            warnings=(*warnings, *self.reader.warnings), key=MODULE,
        )  # fmt: skip

    def _ranks(self, model: Model) -> Parts:
        """Read stages 1 to 3."""
        if not self.files.optims:
            self.files.check_complete(
                max(1, *model.states.integers(_RANKS)) if _RANKS in model.states else 1
            )
        zero = ZeroRank(self.reader, self.files)
        if zero.stage_3 != (-1 not in self.files.models):
            raise CorruptError(f"{zero.first.place} and {model.states.place} are not of one stage")
        layout = zero.layout(model.groups)
        parameters = zero.parameters(layout)
        state, warnings = zero.optimizer(layout)
        settings = without(zero.first.node, CUT)
        inner = zero.first.node.get(zero.state_key)
        groups = inner.get(_GROUPS) if isinstance(inner, dict) else None
        return Parts(
            parameters,
            self._frozen(model, zero.count),
            state,
            {_GROUPS: groups, **settings},
            warnings,
        )

    def _merged(self, model: Model) -> Parts:
        """Read a universal checkpoint, whose parameters are whole."""
        shapes = {} if self.files.parallel else merge_all(model.groups)
        zero = self.folder.sub(zero_ranks.UNIVERSAL)
        universal = Universal(self.reader, zero, shapes)
        universal.read(
            skip={*model.buffer_names, *model.states.names(SHARED), *model.frozen_shapes}
        )
        settings = self.reader.read(SETTINGS, zero).root if SETTINGS in zero else {}
        kept = without(Fields(settings, SETTINGS).node, CUT)
        frozen = self._frozen(model, len(self.files.models))
        return Parts(universal.parameters, frozen, universal.state, {_GROUPS: None, **kept}, [])

    def _frozen(self, model: Model, ranks: int) -> dict[str, Tensor]:
        """Return the frozen parameters, of which each rank of stage 3 has a fragment."""
        if not model.frozen_shapes:
            return {}
        if -1 in self.files.models:
            return model.frozen([model.states.names(FROZEN)], 0)
        self.files.check_models(ranks)
        others = (self.reader.fields(name) for rank, name in self.files.models.items() if rank)
        return model.frozen([each.names(FROZEN) for each in (model.states, *others)], ranks)


class Parts(NamedTuple):
    """The assembled result of all ranks: tensors by name, the optimizer's state and settings."""

    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    state: Named
    settings: dict[Node, Node]
    warnings: list[str]


def _root(model: Model, parts: Parts, stage_3: bool) -> dict[Node, Node]:
    """Return rank 0's model_states with the assembled weights and optimizer."""
    settings = {**parts.settings, _GROUPS: _groups(parts.settings[_GROUPS], model)}
    new: dict[Node, Node] = {
        MODULE: model.state_dict(parts.parameters, parts.frozen, placeholders=stage_3),
        **({} if stage_3 else model.half(parts.parameters)),
        OPTIMIZER: {"state": parts.state, **settings},
    }
    kept = without(model.states.node, (*new, *_DROPPED))
    return {**new, **kept}


def _groups(groups: Node, model: Model) -> list[Node]:
    """Return the optimizer's groups with parameter names instead of numbers of flat tensors."""
    names = [list(shapes) for shapes in model.groups]
    if not isinstance(groups, list):
        return [{_PARAMS: each} for each in names]
    return [_named(group, names) for group in groups]


def _named(group: Node, names: list[list[str]]) -> Node:
    numbers = group.get(_PARAMS) if isinstance(group, dict) else None
    if not isinstance(numbers, list) or not all(
        type(n) is int and 0 <= n < len(names) for n in numbers
    ):
        return group
    return {**group, _PARAMS: list(flatten(names[number] for number in dict.fromkeys(numbers)))}


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the records of every file of the training state. Raises like `zero_ranks.find`."""
    folder = zero_ranks.find(probe.folder, probe.names)
    yield from _records(folder, "")
    if zero_ranks.UNIVERSAL in folder.folders():
        zero = folder.sub(zero_ranks.UNIVERSAL)
        yield from _records(zero, f"{zero_ranks.UNIVERSAL}/")
        for name in zero.folders():
            yield from _records(zero.sub(name), f"{zero_ranks.UNIVERSAL}/{name}/")


def _records(folder: Folder, path: str) -> Iterator[CheckedPart | Defect]:
    """Yield the records of a folder's torch.save files; `path` is relative to the state's."""
    for name in folder.list():
        if not name.endswith(".pt"):
            continue
        try:
            probe = Probe(folder.open(name))
            if probe.zip is not None:
                yield from whats_inside.members(probe.zip, path + name)
        except InputError as error:
            yield Defect(error.message, path + name)
