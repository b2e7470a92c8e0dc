"""Checkpoints put together by hand, opcode by opcode, and read and written without the rest of
ckptkit."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.options import Options
from ckptkit.core.plan import Plan
from ckptkit.formats.table import TORCH_ZIP as FORMAT
from tests.formats.catalogue import read_as
from tests.formats.containers.zips import Member, build, execute

FLOATS = struct.pack("<4f", 0, 1, 2, 3)
NO_HOOKS = b"\x89ccollections\nOrderedDict\n)R"  # and no gradient


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(
    made: str = "torch\nFloatStorage", key: bytes = text("0"), numel: int = 4, location: str = "cpu"
) -> bytes:
    head = b"(" + text("storage") + b"c" + made.encode() + b"\n"
    return head + key + text(location) + number(numel) + b"tQ"


def tensor(
    of: bytes, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0
) -> bytes:
    rest = number(offset) + sizes(*shape) + sizes(*stride) + NO_HOOKS
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + of + rest + b"tR"


def untyped(shape: tuple[int, ...] = (8,), dtype: str = "uint16") -> bytes:
    held = storage("torch.storage\nUntypedStorage", numel=16)
    rest = number(0) + sizes(*shape) + sizes(1) + NO_HOOKS + b"ctorch\n" + dtype.encode() + b"\n"
    return b"ctorch._utils\n_rebuild_tensor_v3\n(" + held + rest + b"tR"


def pickle_of(*values: bytes) -> bytes:
    """{"a": first, "b": second...}."""
    items = (text(chr(97 + i)) + value for i, value in enumerate(values))
    return b"\x80\x02}(" + b"".join(items) + b"u."


def archive(
    pickle: bytes,
    *more: Member,
    records: dict[str, bytes] | None = None,
    version: bytes | None = b"3\n",
) -> bytes:
    held = {"data.pkl": pickle, **({"data/0": FLOATS} if records is None else records)}
    held |= {} if version is None else {"version": version}
    return build(*(Member(f"a/{name}", data) for name, data in held.items()), *more)


def read(data: bytes | Path) -> Checkpoint:
    return read_as(FORMAT, data)


def by_torch(data: bytes, tmp_path: Path, **options: Any) -> Any:
    (tmp_path / "made.pth").write_bytes(data)
    return torch.load(tmp_path / "made.pth", weights_only=True, **options)


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def write(checkpoint: Checkpoint, path: Path) -> Path:
    return execute(laid_out(checkpoint).files[0].segments, path)


def laid_out(checkpoint: Checkpoint) -> Plan:
    assert FORMAT.layout is not None
    plan = FORMAT.layout(checkpoint, Options())
    assert [file.name for file in plan.files] == [""]
    return plan
