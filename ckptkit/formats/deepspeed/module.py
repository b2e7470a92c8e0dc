"""The full-precision state_dict: the ranks' weights, buffers, frozen parameters and ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from ckptkit.compute.numbers import cast_record
from ckptkit.core import dtypes
from ckptkit.core.errors import CorruptError
from ckptkit.core.tensor import Shape, Storage, Tensor
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.partitions import PartitionRow, Slot
from ckptkit.formats.common.rank_files import Fields, is_flat
from ckptkit.formats.deepspeed.places import listed

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
