"""Write checkpoints as GPU runs would save them, without a GPU. Compare checkpoints.

torch calls registered tag functions to get the device of each storage that it saves. This module
registers a function that returns ``cuda:1``. :func:`as_on_gpus` simulates the other contents that
depend on the device: devices in the arguments, states of GPU generators, and tensors that stay on
the CPU (states of all generators, and ``step`` of Adam).

This module does not simulate versions of CUDA and cuDNN, different rounding, or LSTM weights. CUDA
stores LSTM weights as views of one storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckptkit
from ckptkit.core import tensor
from ckptkit.core.tree import join, type_name, walk

GENERATOR_BYTES = 16  # number of bytes of a GPU generator's state, which is a seed and an offset


@contextmanager
def simulated_cuda(
    index: int = 1,
    only: Iterable[Tensor] | None = None,
    others: Mapping[int, Iterable[Tensor]] | None = None,
) -> Iterator[None]:
    """Make torch save storages with the tag ``cuda:<index>``.

    With `only`, tag only the storages of these tensors. `others` maps indices of other GPUs to the
    tensors that get the tags of these GPUs.
    """
    by_storage = {
        each.untyped_storage()._cdata: number
        for number, tensors in (others or {}).items()
        for each in tensors
    }
    chosen = None if only is None else {each.untyped_storage()._cdata for each in only}

    def tag(storage: Any) -> str | None:
        number = by_storage.get(storage._cdata, index)
        if chosen is not None and storage._cdata not in chosen and storage._cdata not in by_storage:
            return None
        return "cuda" + ":" + str(number)  # like torch, make a new string object each time

    registry = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(0, tag, lambda storage, location: None)
    try:
        yield
    finally:
        registry[:] = before


def as_on_gpus(contents: dict[str, Any], devices: list[str], gpus: int) -> list[Tensor]:
    """Change a full checkpoint of a CPU run to the checkpoint that a run on `devices` would save.

    The function changes `contents` in place. The function returns the tensors that a GPU run keeps
    on the first device. Pass them to :func:`simulated_cuda`.
    """
    for name in ("rng", "rng_of_ranks"):
        states = contents.get(name, [])
        for state in [states] if isinstance(states, dict) else states:
            state["cuda"] = [torch.zeros(GENERATOR_BYTES, dtype=torch.uint8) for _ in range(gpus)]
    if "args" in contents:
        contents["args"]["devices"] = devices
    weights = contents.get("model", contents)
    tensors = [value for value in weights.values() if isinstance(value, Tensor)]
    for state in contents.get("optimizer", {}).get("state", {}).values():
        # Adam's `step` stays on the CPU, unless `fused` or `capturable`.
        held = [each for name, each in state.items() if name != "step"]
        tensors += [each for each in held if isinstance(each, Tensor)]
    return tensors


def description(path: Path) -> dict[str, str]:
    """Map each path in a file to a description of the value at this path.

    The description of a tensor contains the tag and the layout in the file. A string describes
    itself. The description of any other value is its type. Storages are numbered in the order of
    the file.
    """
    found: dict[str, str] = {}
    numbers: dict[int, int] = {}
    for place, node in walk(ckptkit.open(path).root):
        what = type_name(node)
        if isinstance(node, tensor.Tensor) and node.storage is not None:
            number = numbers.setdefault(id(node.storage), len(numbers))
            layout = f"{list(node.shape)} stride {list(node.stride)} offset {node.offset}"
            storage = f"storage {number} ({node.storage.nbytes} bytes)"
            what = f"{node.dtype} {layout} of {storage} on {node.storage.device}"
        elif isinstance(node, (dict, list, tuple)):
            what = f"{what} of {len(node)}"
        elif isinstance(node, str):
            what = repr(node)
        found[join(place)] = what
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences of two files in keys, tags, layouts and strings. Ignore element
    values."""
    ours, theirs = description(one), description(other)
    found = [f"{place}: only in {one.name}" for place in ours if place not in theirs]
    found += [f"{place}: only in {other.name}" for place in theirs if place not in ours]
    for place, each in ours.items():
        is_version = place.startswith("versions.")  # None on a machine without CUDA
        if place in theirs and each != theirs[place] and not is_version:
            found.append(f"{place}: {each}, not {theirs[place]}")
    if not found and list(ours) != list(theirs):
        found.append("the keys have a different order")
    return found
