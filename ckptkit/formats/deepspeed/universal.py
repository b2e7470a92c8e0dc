"""A universal checkpoint: a folder for each parameter, independent of the ranks that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ckptkit.core.bytesource import Folder
from ckptkit.core.errors import CorruptError, FormatError
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.rank_files import Reader, is_flat, own
from ckptkit.formats.deepspeed.ranks import Named

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
