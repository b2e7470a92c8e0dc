"""Files of safetensors made by hand: the header as JSON, then bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BITS = {
    "F64": 64, "F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "I32": 32,
    "U32": 32, "I8": 8, "U8": 8,
}  # fmt: skip
Row = tuple[str, list[int], bytes]


def row(dtype: str, shape: list[int], data: bytes | None = None) -> Row:
    """A tensor; without data, of bytes that count up."""
    size = math.prod(shape) * BITS[dtype] // 8
    return dtype, shape, data if data is not None else bytes(number % 120 for number in range(size))


def ones(shape: list[int], dtype: str = "F32") -> Row:
    """A tensor of ones."""
    one = {"F32": struct.pack("<f", 1), "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}[dtype]
    return row(dtype, shape, one * math.prod(shape))


def text(value: object) -> Row:
    """A tensor that holds JSON."""
    data = json.dumps(value).encode()
    return row("U8", [len(data)], data)


def write(
    path: Path,
    tensors: Mapping[str, Row],
    metadata: Mapping[str, str] | None = None,
    config: Any = None,
) -> Path:
    """A file of safetensors, with a config.json beside it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, (dtype, shape, each) in tensors.items():
        start = len(data)
        data += each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}
    head = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def read(path: Path) -> dict[str, Row]:
    """Read the rows of a file of safetensors."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (each["dtype"], each["shape"], data[8 + size :][slice(*each["data_offsets"])])
        for name, each in header.items()
    }
