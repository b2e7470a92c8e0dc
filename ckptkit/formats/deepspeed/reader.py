"""Read a folder of DeepSpeed as one tree.

The root is rank 0's model_states, with

    module             the state_dict, in full precision
    module_<dtype>     that of the run, if it was in 16 bits and the folder has it (stages 1 and 2)
    optimizer          {"state": {name: {"exp_avg", "exp_avg_sq", "step"}}, "param_groups",
                       settings}

The fields on how these were cut (param_shapes, paddings, slices) are left out. No bytes of a tensor
are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError, FormatError, InputError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten, merge_all, without
from ckptkit.core.tree import Node
from ckptkit.formats import table, whats_inside
from ckptkit.formats.common.rank_files import Fields, Reader
from ckptkit.formats.deepspeed import places
from ckptkit.formats.deepspeed.module import FROZEN, FROZEN_SHAPES, MODULE, SHAPES, SHARED, Model
from ckptkit.formats.deepspeed.places import RankFiles
from ckptkit.formats.deepspeed.ranks import CUT, Named, Zero
from ckptkit.formats.deepspeed.universal import SETTINGS, Universal
from ckptkit.formats.format import CheckedPart, Defect, Probe

OPTIMIZER = "optimizer"
_SCRIPT = "zero_to_fp32.py"
_GROUPS, _PARAMS, _RANKS = "param_groups", "params", "dp_world_size"
_DROPPED = (SHAPES, FROZEN_SHAPES, FROZEN)  # how it was cut, and what is in the state_dict now


def matches(probe: Probe) -> bool:
    """Return whether this is the folder of a training state, or one with such folders."""
    if not probe.is_folder:
        return False
    if places.is_tag(probe.names) or places.tag_folders(probe.folder):
        return True
    return _SCRIPT in probe.names and places.pointer(probe.folder, probe.names) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the training state that ``latest`` names, or the only one: every file, headers alone.

    Raises AmbiguousError where several could be meant, UnsupportedError for other than data
    parallelism, CorruptError for a folder that is not complete and for files that contradict each
    other.
    """
    folder = places.find(probe.folder, probe.names)
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
        self.universal = places.UNIVERSAL in folder.folders()
        self.files = RankFiles(folder.list(), merged=self.universal)
        if self.universal and self.files.optims:
            raise AmbiguousError(
                f"holds a universal checkpoint ({places.UNIVERSAL}) and files of ranks: "
                f"{places.listed(list(self.files.optims.values()))}",
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
        zero = Zero(self.reader, self.files)
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
        zero = self.folder.sub(places.UNIVERSAL)
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
    """Yield the records of every file of the training state. Raises what `places.find` raises."""
    folder = places.find(probe.folder, probe.names)
    yield from _records(folder, "")
    if places.UNIVERSAL in folder.folders():
        zero = folder.sub(places.UNIVERSAL)
        yield from _records(zero, f"{places.UNIVERSAL}/")
        for name in zero.folders():
            yield from _records(zero.sub(name), f"{places.UNIVERSAL}/{name}/")


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
