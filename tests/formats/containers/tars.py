"""Tar files by hand, and those of torch 0.1.1 as that wrote them: Python's tarfile, a pickle per
record and entry."""

from __future__ import annotations

import inspect
import io
import pickle
import pickletools
import struct
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ckptkit.core.dtypes import BY_NAME
from tests.torch_equality import storage_bits

BLOCK = 512
SYSTEM = {
    "protocol_version": 1000, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 8},
}  # fmt: skip


# Headers by hand


def header(
    name: bytes | str, size: int = 0, type: bytes = b"0", *, magic: bytes = b"ustar\x0000", link: bytes = b"",
    prefix: bytes = b"", size_field: bytes | None = None, shift: int = 0,
) -> bytes:  # fmt: skip
    """A header whose checksum is right, or off by `shift`."""
    raw = name.encode() if isinstance(name, str) else name
    fields = (
        raw.ljust(100, b"\0"), b"0000644\0" + b"0000000\0" * 2, size_field or b"%011o\0" % size, b"00000000000\0",
        b" " * 8, type, link.ljust(100, b"\0"), magic, bytes(32 + 32 + 16), prefix.ljust(155, b"\0"), bytes(12),
    )  # fmt: skip
    block = b"".join(fields)
    assert len(block) == BLOCK
    return block[:148] + b"%06o\0 " % (sum(block) + shift) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def member(name: bytes | str, data: bytes = b"", type: bytes = b"0", **fields: Any) -> bytes:
    return header(name, len(data), type, **fields) + padded(data)


def records(*pairs: tuple[bytes, bytes], type: bytes = b"x") -> bytes:
    """A member that says something about the next one, or about all that follow."""
    return member("././@PaxHeader", b"".join(record(*pair) for pair in pairs), type)


def record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    length = next(n for n in range(rest, rest + 9) if n == rest + len(str(n)))
    return b"%d %b=%b\n" % (length, key, value)


def archive(*members: bytes, end: int = 2 * BLOCK) -> bytes:
    return b"".join(members) + bytes(end)


# What the records of torch hold


def entry(key: Any, second: Any, made: str) -> bytes:
    """The pickled triple before each tensor and storage."""
    module, _, name = made.rpartition(".")
    inside = [opcodes(each) for each in (key, second)]
    return b"\x80\x02(" + b"".join(inside) + f"c{module or 'torch'}\n{name}\nt.".encode()


def storage(
    key: Any, data: bytes, made: str = "FloatStorage", location: Any = "cpu", numel: int | None = None
) -> bytes:  # fmt: skip
    count = struct.pack("<q", len(data) // 4 if numel is None else numel)
    return entry(key, location, made) + count + data


def tensor(
    key: Any, of: Any, shape: Iterable[int] = (4,), stride: Iterable[int] = (1,), offset: int = 0,
    made: str = "FloatTensor", rank: int | None = None,
) -> bytes:  # fmt: skip
    sizes, strides = list(shape), list(stride)
    numbers = struct.pack(f"<{len(sizes) + len(strides) + 1}q", *sizes, *strides, offset)
    ranks = struct.pack("<ii", len(sizes) if rank is None else rank, 0)
    return entry(key, of, made) + ranks + numbers


def contents(
    system: object, root: bytes, tensors: list[bytes], storages: list[bytes], views: Any = ()
) -> dict[str, bytes | None]:
    """The records of a file, by name."""
    return {
        "sys_info": pickle.dumps(system, 2),
        "pickle": root,
        "tensors": b"".join((pickle.dumps(len(tensors), 2), *tensors)),
        "storages": b"".join((pickle.dumps(len(storages), 2), *storages, pickle.dumps(views, 2))),
    }


def torch_tar(
    root: bytes, tensors: list[bytes], storages: list[bytes], views: Any = (), **replaced: bytes | None
) -> bytes:  # fmt: skip
    """A file of these records. `replaced` are records by name, None for one that is to be
    missing."""
    content = contents(SYSTEM, root, tensors, storages, list(views)) | replaced
    return archive(*(member(name, data) for name, data in content.items() if data is not None))


def opcodes(value: object) -> bytes:
    """Return the opcodes that make a value, without a memo: they stand beside others."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def ids(*keys: int | str) -> bytes:
    """The pickle of a list of what these keys refer to."""
    return b"\x80\x02](" + b"".join(opcodes(key) + b"Q" for key in keys) + b"e."


# As torch 0.1.1 wrote them


class _Pickler(pickle._Pickler):  # type: ignore[misc,name-defined]
    """Tensors and storages by address; the source of each class of a module where it is first
    met."""

    def __init__(self, stream: io.BytesIO, sources: bool) -> None:
        super().__init__(stream, 2)
        self.tensors: dict[int, torch.Tensor] = {}
        self.sources = sources
        self.classes: set[type] = set()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and self.sources:
            if value in self.classes:
                return None
            self.classes.add(value)
            return value, inspect.getsourcefile(value), inspect.getsource(value)
        if type(value) is torch.Tensor:
            self.tensors[id(value)] = value
            return str(id(value))
        return None

    def reducer_override(self, value: Any) -> Any:
        """Parameters were variables around tensors: their class, the tensor, and what it is to the
        gradient."""
        if isinstance(value, torch.nn.Parameter):
            return type(value), (value.data,), (value.requires_grad, False, None)
        return NotImplemented


def save(value: Any, path: Path, location: str = "cpu", sources: bool = False) -> Path:
    """Return what torch.save of that time made of `value`, without the padding."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, sources)
    pickler.dump(value)
    storages = {
        each.untyped_storage().data_ptr() or -id(each): each for each in pickler.tensors.values()
    }
    keys = {
        key: next(at for at, other in storages.items() if other is each or _shares(other, each))
        for key, each in pickler.tensors.items()
    }
    content = contents(
        {**SYSTEM, "little_endian": sys.byteorder == "little"},
        stream.getvalue(),
        [_tensor(key, keys[key], each) for key, each in pickler.tensors.items()],
        [_storage(key, each, location) for key, each in storages.items()],
        [],
    )
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as file:
        for name, data in content.items():
            assert data is not None
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1484000000.25  # a fraction: it takes records of its own
            file.addfile(info, io.BytesIO(data))
        end = file.offset
    path.write_bytes(path.read_bytes()[: end + 2 * BLOCK])
    return path


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _tensor(key: int, of: int, value: torch.Tensor) -> bytes:
    made = _typed(value).removesuffix("Storage") + "Tensor"
    return tensor(key, of, value.shape, value.stride(), int(value.storage_offset()), made)


def _storage(key: int, value: torch.Tensor, location: str) -> bytes:
    data = storage_bits(value)
    return storage(key, data, _typed(value), location, len(data) // value.element_size())


def _typed(value: torch.Tensor) -> str:
    return BY_NAME[str(value.dtype).removeprefix("torch.")].storage or ""
