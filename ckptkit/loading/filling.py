"""Parameters and buffers that are filled straight from a file, where torch would only copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptkit.compute.torch_bridge import dtype_of
from ckptkit.compute.torch_bridge import fill as fill_tensors
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Node

if TYPE_CHECKING:
    import torch
    from torch import nn

_NUMBERS = ("float", "int", "bool")  # kinds of elements that torch casts to each other


def fill(model: nn.Module, nodes: Mapping[str, Node]) -> set[str]:
    """Fill plain parameters and buffers of `model`, and return the names of those.

    They are contiguous ones of modules without loading of their own. Of several names of one
    parameter the last one counts, as for torch. Where parameters overlap in another way, their
    order matters: none is filled.
    """
    filled: set[str] = set()
    pairs: dict[tuple[int, int], tuple[Tensor, torch.Tensor]] = {}
    for name, value in _held(model):
        node = nodes.get(name)
        if isinstance(node, Tensor) and _fits(node, value):
            filled.add(name)
            pairs[value.data_ptr(), value.data_ptr() + value.nbytes] = node, value
    if any(end > start for (_, end), (start, _) in pairwise(sorted(pairs))):
        return set()
    fill_tensors(pairs.values())
    return filled


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the entries that `load_state_dict` fills by the code of `torch.nn.Module` itself."""
    from torch.nn import Module

    for path, module in model.named_modules(remove_duplicate=False):
        loading = getattr(module._load_from_state_dict, "__func__", None)
        if loading is not Module._load_from_state_dict:
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, value


def _fits(tensor: Tensor, value: torch.Tensor) -> bool:
    """Return whether a plain contiguous parameter takes the elements of a tensor one by one."""
    return (
        tensor.storage is not None
        and tensor.layout == "strided"
        and tensor.kind != "ndarray"
        and _is_plain(value)
        and tensor.shape == tuple(value.shape)
        and _casts(tensor, value)
    )


def _is_plain(value: torch.Tensor) -> bool:
    import torch
    from torch.nn import Parameter

    return (
        type(value) in (torch.Tensor, Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg() or value.is_inference())
        and value.is_contiguous()
    )


def _casts(tensor: Tensor, value: torch.Tensor) -> bool:
    """Return whether torch casts the elements, each of whole bytes, to the dtype of `value`."""
    both = tensor.dtype, dtype_of(value)
    if any(each.bits % 8 for each in both):
        return False
    plain = all(each.kind in _NUMBERS and each.packed == 1 for each in both)
    return plain or both[0] == both[1]
