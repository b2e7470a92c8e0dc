"""Devices of tensors: the device tag of each storage, changed without a device or a byte read.

A device is named in three places: by the tag of a storage, by an argument of the calls that rebuild
tensors that have no storage (``_rebuild_wrapper_subclass``...), and by ``torch.device`` values in
configurations. ``map_location`` of ``torch.load`` changes the first two; the last are the user's
own, and changed only on request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, NoEffect, edit
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import plural, quoted, typed
from ckptkit.core.tree import Global, Node, Object, join, nodes, rebuild, walk
from ckptkit.edits.nodes import moved

# What torch can restore to, and the names that vendors give to `privateuseone`.
DEVICES = (
    "cpu", "cuda", "mps", "meta", "xpu", "hpu", "mtia", "xla", "ipu", "maia", "vulkan",
    "privateuseone",
    "npu", "mlu", "musa", "gcu",
)  # fmt: skip
_VALID = re.compile(
    rf"cpu|meta|(?:{'|'.join(DEVICES[1:])})(?::[0-9]{{1,4}})?"
)  # torch cannot restore to `cpu:0`

_DEVICE = Global("torch", "device")
# Position of the device among the arguments of a call (torch/_utils.py).
_POSITIONS = {
    "_rebuild_wrapper_subclass": 6,
    "_rebuild_device_tensor_from_numpy": 2,
    "_rebuild_device_tensor_from_cpu_tensor": 2,
    "_rebuild_xla_tensor": 2,
}
_FROM_TYPE = (
    "_rebuild_from_type_v2",
    "_rebuild_from_type",
)  # called with function, class, arguments[, state]

Device: TypeAlias = Any  # a name, or a torch.device
Remap = Callable[[str], str]
T = TypeVar("T")
Changed = TypeVar("Changed")
Places: TypeAlias = list[tuple[T, str]]  # what names a device, and which


@edit
def remap(
    ck: Checkpoint, devices: Device | Mapping[Any, Any], *, values: bool = False
) -> Checkpoint:
    """Change device tags: all to the device `devices`, or those that a mapping names, exactly.

    The same as ``map_location`` does when loading; ``meta`` stays unless a mapping names it.
    ``torch.device`` values in the tree are listed, and changed where `values` is true. Raises
    UsageError for what is no device.
    """
    if isinstance(devices, Mapping):
        devices = {_name(old): _name(new) for old, new in devices.items()}
    else:
        devices = _name(devices)
    places = _Places.of(ck.root)
    new = _mapping(devices, places.devices)
    storages = _changed(places.storages, new, _tagged)
    swap = _changed(places.calls, new, _with_device)
    plain = _changed(places.values, new, _device_like)
    notes = [
        *_arrows("changed the device tag of", "storage", places.storages, new),
        *_arrows("changed the argument of", "rebuild call", places.calls, new),
    ]
    if values:
        notes += _arrows("changed", "torch.device value", places.values, new)
        swap |= plain
    warnings: list[str] = list(_without_effect(devices, places, bool(notes)))
    if plain and not values:
        warnings.append(_left(ck.root, plain.keys()))
    root = ck.root
    if storages or swap:
        root = rebuild(root, partial(moved, storages=storages), swap)
    return ck.with_root(root, notes=notes, warnings=warnings)


def _changed(
    places: Places[T], new: Remap, make: Callable[[T, str], Changed]
) -> dict[int, Changed]:
    """Return what `make` gives for each place that moves, by its id."""
    targets = {device: new(device) for device in {device for _, device in places}}
    return {
        id(each): make(each, targets[device])
        for each, device in places
        if targets[device] != device
    }


@dataclass(frozen=True)
class _Places:
    """Everything in a tree that names a device: storages, calls and ``torch.device`` values."""

    storages: Places[Storage]
    calls: Places[Object]
    values: Places[Object]

    @classmethod
    def of(cls, root: Node) -> _Places:
        storages: dict[int, Storage] = {}
        calls: list[tuple[Object, str]] = []
        values: list[Object] = []
        arguments: set[int] = set()
        for node in nodes(root):
            if isinstance(node, (Tensor, TypedStorage)):
                if node.storage is not None:
                    storages[id(node.storage)] = node.storage
            elif isinstance(node, Object):
                if _is_device(node):
                    values.append(node)
                elif (argument := _argument(node)) is not None:
                    calls.append((node, _text(argument)))
                    arguments.add(id(argument))
        return cls(
            [(each, each.device) for each in storages.values()],
            calls,
            [(node, _text(node)) for node in values if id(node) not in arguments],
        )

    @property
    def devices(self) -> set[str]:
        return {device for _, device in (*self.storages, *self.calls, *self.values)}


def _mapping(devices: str | Mapping[str, str], known: set[str]) -> Remap:
    if isinstance(devices, str):
        target = check_device(devices)
        return lambda device: device if device == "meta" else target
    table = {
        old if old in known else check_device(old): check_device(new)
        for old, new in devices.items()
    }
    return lambda device: table.get(device, device)


def _name(device: object) -> str:
    """Return the name of a device, given as a name or a torch.device."""
    return str(arguments.device("a device", device))


def check_device(device: str) -> str:
    """Return `device` if torch knows it by name; raises UsageError."""
    if _VALID.fullmatch(device):
        return device
    kind = device.partition(":")[0].strip().lower()
    hint = {"gpu": "say cuda, or cuda:0", "cpu": "say cpu", "meta": "say meta"}.get(kind)
    raise UsageError(
        f"{device!r} is not a device",
        hint=hint or f"devices are {', '.join(DEVICES[:8])}; cuda:1 is the second GPU",
    )


def _tagged(storage: Storage, device: str) -> Storage:
    return Storage(storage.record, device, storage.crc32, storage.big_endian)


def _moves(device: str, new: Remap) -> bool:
    return new(device) != device


def _arrows(verb: str, noun: str, places: Places[Any], new: Remap) -> Iterator[str]:
    for device, number in sorted(Counter(device for _, device in places).items()):
        if _moves(device, new):
            yield f"{verb} {plural(number, noun)}: {device} -> {new(device)}"


def _without_effect(
    devices: str | Mapping[str, str], places: _Places, changed: bool
) -> Iterator[NoEffect]:
    """Yield a warning if nothing is changed, or nothing on one of the devices of a mapping."""
    there = ", ".join(sorted({device for _, device in places.storages}))
    unused = (
        [] if isinstance(devices, str) else [old for old in devices if old not in places.devices]
    )
    if not there:
        yield NoEffect("no device tags to change: there are no tensors")
    elif not changed or unused:
        wanted = "another device" if isinstance(devices, str) else ", ".join(unused or devices)
        yield NoEffect(f"no device tags to change: the storages are on {there}, none on {wanted}")


def _left(root: Node, changing: Container[int]) -> str:
    paths = [f"{join(path)} ({_text(node)})" for path, node in walk(root) if id(node) in changing]
    return (
        f"left as they are: {plural(len(paths), 'torch.device value')}, {quoted(paths)}; "
        f"{typed('--device-values', 'values=True')} changes them too"
    )


def _is_device(node: Object) -> bool:
    made = node.callable
    return isinstance(made, Global) and made == _DEVICE


def _text(node: Node) -> str:
    """``cuda:1`` of that string, or of ``torch.device('cuda', 1)``."""
    args = node.args if isinstance(node, Object) and isinstance(node.args, tuple) else (node,)
    return ":".join(str(each) for each in args if isinstance(each, (str, int)))


def _device_like(_: Object, device: str) -> Object:
    return _device(device)


def _device(device: str) -> Object:
    kind, _, index = device.partition(":")
    return Object(_DEVICE, (kind, int(index)) if index else (kind,))


def _argument(node: Object) -> Node:
    """Return the device argument of a call that rebuilds a tensor, None without one."""
    found = _call(node)
    if found is None:
        return None
    args, position = found
    device = args[position]
    says = isinstance(device, str) or (isinstance(device, Object) and _is_device(device))
    return device if says else None


def _call(node: Object) -> tuple[tuple[Node, ...], int] | None:
    """Return the arguments in which a rebuild call names its device, and where; None for others."""
    made, args = node.callable, node.args
    if (
        isinstance(made, Global)
        and made.name in _FROM_TYPE
        and isinstance(args, tuple)
        and len(args) > 2
    ):
        made, args = args[0], args[2]
    position = _POSITIONS.get(made.name) if isinstance(made, Global) else None
    if position is None or not isinstance(args, tuple) or len(args) <= position:
        return None
    return args, position


def _with_device(node: Object, device: str) -> Object:
    found = _call(node)
    assert found is not None
    args, position = found
    value = device if isinstance(args[position], str) else _device(device)
    inner = (*args[:position], value, *args[position + 1 :])
    new = Object(
        node.callable, inner if args is node.args else (*node.args[:2], inner, *node.args[3:])
    )
    new.new, new.kwargs, new.steps, new.tensor, new.value = (
        node.new,
        node.kwargs,
        node.steps,
        node.tensor,
        node.value,
    )
    return new
