"""Change the device tags of tensors without reading tensors and without a GPU.

A checkpoint contains devices in three places:
- the device tag of a storage
- an argument of a call that rebuilds a tensor without a storage (``_rebuild_wrapper_subclass``...)
- a ``torch.device`` value in user data, such as a configuration

``map_location`` of ``torch.load`` changes the devices of storages and rebuild calls. `remap`
changes the same devices, and on request also ``torch.device`` values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, NoOpWarning, edit
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import plural, quoted, typed
from ckptkit.core.tree import Global, Node, Object, join, nodes, rebuild, walk

# Device types on which torch.load can put tensors. The last four are vendors' names for
# `privateuseone`.
DEVICES = (
    "cpu", "cuda", "mps", "meta", "xpu", "hpu", "mtia", "xla", "ipu", "maia", "vulkan",
    "privateuseone",
    "npu", "mlu", "musa", "gcu",
)  # fmt: skip
# torch.load cannot put tensors on `cpu:0`, only on `cpu`.
_VALID = re.compile(rf"cpu|meta|(?:{'|'.join(DEVICES[1:])})(?::[0-9]{{1,4}})?")

_DEVICE = Global("torch", "device")
# Maps functions of torch/_utils.py that rebuild tensors to the index of their device argument.
_POSITIONS = {
    "_rebuild_wrapper_subclass": 6,
    "_rebuild_device_tensor_from_numpy": 2,
    "_rebuild_device_tensor_from_cpu_tensor": 2,
    "_rebuild_xla_tensor": 2,
}
# Functions of torch/_tensor.py whose arguments are (function, class, arguments[, state]).
_FROM_TYPE = ("_rebuild_from_type_v2", "_rebuild_from_type")

Device: TypeAlias = Any  # a name, or a torch.device


@edit
def remap(
    ck: Checkpoint, devices: Device | Mapping[Any, Any], *, device_values: bool = False
) -> Checkpoint:
    """Change the device tags of tensors. Copy nothing to a device.

    `devices` is the new device of all tensors, or a mapping from old to new devices. If you load
    the output, its tensors are on the new devices, as with ``map_location``. Tensors on ``meta``
    stay unchanged unless a mapping contains ``meta``. By default, `remap` does not change values of
    the type ``torch.device``, and a warning lists them. With `device_values`, `remap` also changes
    ``torch.device`` values. Raises UsageError for an invalid device.
    """
    places = _places(ck.root)
    known = {device for _, _, device in places}
    if isinstance(devices, Mapping):
        named = {_name(old): _name(new) for old, new in devices.items()}
        table = {
            old if old in known else check_device(old): check_device(new)
            for old, new in named.items()
        }
        unused, asked = [old for old in named if old not in known], list(named)
    else:
        target = check_device(_name(devices))
        table = dict.fromkeys(known - {"meta"}, target)
        unused, asked = [], ["another device"]
    table = {old: new for old, new in table.items() if new != old}
    storages: dict[int, Storage] = {}
    swap: dict[int, Node] = {}
    plain: dict[int, Node] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for kind, node, device in places:
        if device not in table:
            continue
        counts[kind, device] += 1
        if isinstance(node, Storage):
            storages[id(node)] = replace(node, device=table[device])
        elif kind == _CALL:
            swap[id(node)] = _with_device(node, table[device])
        else:
            plain[id(node)] = _device(table[device])
    notes = [
        f"{verb} {plural(number, kind)}: {device} -> {table[device]}"
        for kind, verb in _VERBS.items()
        for (found, device), number in sorted(counts.items())
        if found == kind and (device_values or kind != _VALUE)
    ]
    warnings: list[str] = []
    there = ", ".join(sorted({device for kind, _, device in places if kind == _STORAGE}))
    if not there:
        warnings.append(NoOpWarning("no device tags to change: there are no tensors"))
    elif not notes or unused:
        nothing = f"the storages are on {there}, not on {', '.join(unused or asked)}"
        warnings.append(NoOpWarning(f"no device tags to change: {nothing}"))
    warnings += _stay_on_cpu(ck.root, table)
    if device_values:
        swap |= plain
    elif plain:
        paths = [
            f"{join(path)} ({_text(node)})" for path, node in walk(ck.root) if id(node) in plain
        ]
        warnings.append(
            f"kept {plural(len(paths), 'torch.device value')}: {quoted(paths)}; "
            f"{typed('--device-values', 'device_values=True')} changes them too"
        )

    def moved(leaf: Node) -> Node:
        if not isinstance(leaf, (Tensor, TypedStorage)) or id(leaf.storage) not in storages:
            return leaf
        new = storages[id(leaf.storage)]
        return leaf.over(new) if isinstance(leaf, Tensor) else replace(leaf, storage=new)

    root = rebuild(ck.root, moved, swap) if storages or swap else ck.root
    return ck.with_root(root, notes=notes, warnings=warnings)


def _stay_on_cpu(root: Node, table: Mapping[str, str]) -> list[str]:
    """Return a warning if `table` changes the device tag of tensors that torch keeps on the CPU.

    torch keeps two kinds of tensors on the CPU: the states of random number generators, and
    ``step`` of Adam (unless ``fused`` or ``capturable``). If some tensors have other device tags,
    the warning names the options that change only the other tags.
    """
    target = table.get("cpu")
    if target is None:
        return []
    found = [
        join(path)
        for path, node in walk(root)
        if isinstance(node, Tensor) and _belongs_on_cpu(path, node)
    ]
    if not found:
        return []
    others = {old: new for old, new in table.items() if old != "cpu"}
    pairs = " ".join(f"--device {old}={new}" for old, new in others.items())
    how = f"{typed(pairs, repr(others))} does not change these tensors"
    if not others:
        by_tag = typed("--device", "a dict")
        how = f"{by_tag} cannot exclude these tensors, because all tensors have the tag cpu"
    return [f"torch keeps {quoted(found, 2)} on the CPU, but their tag is now {target}; {how}"]


def _belongs_on_cpu(path: tuple[Node, ...], tensor: Tensor) -> bool:
    """Return True for two kinds of tensors with the device tag ``cpu``: the ``step`` of Adam, and
    states of random number generators."""
    if tensor.storage is None or tensor.storage.device != "cpu":
        return False
    names = [key for key in path if isinstance(key, str)]
    if names[-1:] == ["step"]:
        return "state" in names[:-1] and tensor.shape in ((), (1,))
    is_state = tensor.dtype.name == "uint8" and len(tensor.shape) == 1
    return is_state and any(re.search("rng|random_state", key) for key in names)


_STORAGE, _CALL, _VALUE = "storage", "rebuild call", "torch.device value"
_VERBS = {
    _STORAGE: "changed the device tag of", _CALL: "changed the argument of", _VALUE: "changed"
}  # fmt: skip


def _places(root: Node) -> list[tuple[str, Storage | Object, str]]:
    """Return the storages, rebuild calls and ``torch.device`` values of a tree.

    Each item is (kind, storage or object, device).
    """
    found: dict[int, tuple[str, Storage | Object, str]] = {}
    arguments: set[int] = set()
    for node in nodes(root):
        if isinstance(node, (Tensor, TypedStorage)) and node.storage is not None:
            found[id(node.storage)] = _STORAGE, node.storage, node.storage.device
        elif isinstance(node, Object) and node.global_ == _DEVICE:
            found[id(node)] = _VALUE, node, _text(node)
        elif isinstance(node, Object) and (call := _call(node)) is not None:
            args, position = call
            found[id(node)] = _CALL, node, _text(args[position])
            arguments.add(id(args[position]))
    return [each for key, each in found.items() if key not in arguments]


def _name(device: object) -> str:
    """Return the name of a device. `device` is a name or a torch.device."""
    return str(arguments.device("a device", device))


def check_device(device: str) -> str:
    """Return `device` if it is a valid device of torch. Raises UsageError otherwise."""
    if _VALID.fullmatch(device):
        return device
    kind = device.partition(":")[0].strip().lower()
    hint = {"gpu": "use cuda or cuda:0", "cpu": "use cpu", "meta": "use meta"}.get(kind)
    raise UsageError(
        f"{device!r} is not a device",
        hint=hint or f"use one of {', '.join(DEVICES[:8])}; cuda:1 is the second GPU",
    )


def _text(node: Node) -> str:
    """Return the name of a device: ``cuda:1`` for ``torch.device('cuda', 1)`` and for
    ``"cuda:1"``."""
    args = node.args if isinstance(node, Object) and isinstance(node.args, tuple) else (node,)
    return ":".join(str(each) for each in args if isinstance(each, (str, int)))


def _device(device: str) -> Object:
    kind, _, index = device.partition(":")
    return Object(_DEVICE, (kind, int(index)) if index else (kind,))


def _call(node: Object) -> tuple[tuple[Node, ...], int] | None:
    """For a rebuild call, return (arguments, index of the device argument). For other objects,
    return None."""
    made, args = node.callable, node.args
    is_nested = isinstance(made, Global) and made.name in _FROM_TYPE
    if is_nested and isinstance(args, tuple) and len(args) > 2:
        made, args = args[0], args[2]
    position = _POSITIONS.get(made.name) if isinstance(made, Global) else None
    if position is None or not isinstance(args, tuple) or len(args) <= position:
        return None
    device = args[position]
    is_named = isinstance(device, Object) and device.global_ == _DEVICE
    return (args, position) if is_named or isinstance(device, str) else None


def _with_device(node: Object, device: str) -> Object:
    found = _call(node)
    assert found is not None
    args, position = found
    value = device if isinstance(args[position], str) else _device(device)
    inner = (*args[:position], value, *args[position + 1 :])
    new = copy(node)
    new.args = inner if args is node.args else (*node.args[:2], inner, *node.args[3:])
    return new
