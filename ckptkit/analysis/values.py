"""The values of nodes as text and plain numbers, as reports show them."""

from __future__ import annotations

import math
from typing import Any

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Range
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import TypedStorage
from ckptkit.core.tree import ByteString, Global, Node, Object, Path, StoredBytes, key_text

Plain = bool | int | float | str | None
Key = str | int

BYTES_SHOWN = 1_024  # byte strings up to this length are shown as text
EXACT = (
    1 << 8 * LIMITS.int_bytes
)  # integers from here on are described: Python puts no more digits into text
_HEAD, _LEAST = 4, 64  # bytes that say what a file is, and that a file has at least
_HEADS = {
    b"PK\3\4": "zip archive",
    **{bytes((0x80, protocol)): "pickle" for protocol in range(2, 6)},
}
_SCALARS = frozenset({bool, float, str, type(None)})


def plain(node: Node) -> tuple[str, Plain] | None:
    """Return type and value of a scalar, a string or what reads as one, None for others."""
    kind = node.__class__
    if kind in _SCALARS:
        return ("none" if node is None else kind.__name__), node
    if kind is int:
        return "int", number(node)
    if kind is Object:
        return _object(node)
    if kind is Global:
        return ("torch.dtype", str(node)) if is_dtype(node) else None
    return _odd(node)


def _odd(node: Node) -> tuple[str, Plain] | None:
    if isinstance(node, (bytes, bytearray)):
        return "bytes", bytes_text(node)
    if isinstance(node, ByteString):
        return "str", str(node)
    if isinstance(node, StoredBytes):
        return "bytes", f"{node.extent.length:,} bytes"
    if isinstance(node, TypedStorage):
        return "storage", f"{node.elements:,} x {node.dtype or 'byte'} on {node.storage.device}"
    return ("complex", str(node)) if isinstance(node, complex) else None


def inner_file(node: Node) -> tuple[str, int] | None:
    """The kind of file that a long byte string is, and its length; None for other bytes."""
    if isinstance(node, StoredBytes):
        size = node.extent.length
        head = (
            node.extent.source.read(node.extent.offset, min(size, _HEAD))
            if isinstance(node.extent, Range)
            else b""
        )
    elif isinstance(node, (bytes, bytearray)):
        size, head = len(node), bytes(node[:_HEAD])
    else:
        return None
    kind = next((name for start, name in _HEADS.items() if head.startswith(start)), None)
    return (kind, size) if kind is not None and size >= _LEAST else None


def _object(node: Object) -> tuple[str, Plain] | None:
    """A scalar of numpy, a torch.Size, torch.device or torch.layout; None for every other
    Object."""
    made = node.global_
    if made is None:
        return None
    if node.value is not None:
        return str(made) if made.name != "scalar" else "numpy.scalar", _scalar(node.value)
    args = node.args if isinstance(node.args, tuple) else ()
    if (made.module, made.name) == ("torch", "device") and args:
        return "torch.device", ":".join(map(key_text, args))
    if (made.module, made.name) == ("torch.serialization", "_get_layout") and len(args) == 1:
        return "torch.layout", key_text(args[0])
    if (made.module, made.name) == ("torch", "Size") and len(args) == 1:
        return "torch.Size", key_text(
            tuple(args[0]) if isinstance(args[0], (list, tuple)) else args[0]
        )
    return None


def _scalar(value: Node) -> Plain:
    if value.__class__ is int:
        return number(value)
    return str(value) if isinstance(value, complex) else value


def is_dtype(node: Global) -> bool:
    return node.module == "torch" and (node.name in dtypes.BY_NAME or node.name in dtypes.ALIASES)


def bytes_text(data: bytes | bytearray) -> str:
    """Bytes as Python writes them between quotes; long ones as their number."""
    return repr(bytes(data))[2:-1] if len(data) <= BYTES_SHOWN else f"{len(data):,} bytes"


def number(value: int) -> int | str:
    """An integer as such, or what it is where it has too many digits to be printed."""
    return value if -EXACT < value < EXACT else f"<integer of {value.bit_length():,} bits>"


def key_list(path: Path) -> list[Key]:
    """A path as the list of its keys: strings and integers as such, others as text."""
    return [
        key
        if key.__class__ is str or (key.__class__ is int and -EXACT < key < EXACT)
        else key_text(key)
        for key in path
    ]


def json_number(value: Any) -> Any:
    """Replace NaN and infinities by their names, since JSON has neither; return all else as is."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
