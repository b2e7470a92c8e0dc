"""The conformance suite for each format, with torch, safetensors or numpy as the maker."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ckptkit.dtypes import BY_NUMPY, BY_STORAGE, TABLE
from tests.formats.conformance import FormatConformance, State

TYPED = [row.name for row in TABLE if row.storage]
UNTYPED = [row.name for row in TABLE if not row.storage and row.kind != "int" and hasattr(torch, row.name)]


class TestTorchZip(FormatConformance):
    name = "torch-zip"
    suffix = ".pth"
    dtypes = [*TYPED, *UNTYPED, "uint16", "uint32", "uint64"]

    def make(self, folder: Path, state: State) -> Path:
        torch.save(state, folder / "made.pth")
        return folder / "made.pth"

    def boundaries(self, data: bytes) -> Iterable[int]:
        """Local headers, the directory, each of its entries, the three end records."""
        with zipfile.ZipFile(BytesIO(data)) as file:
            members = file.infolist()
            yield from (member.header_offset for member in members)
            yield file.start_dir
        at = file.start_dir
        for _ in members:
            yield at
            at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
        yield from (at, at + 56, at + 56 + 20)


class TestTorchLegacy(FormatConformance):
    name = "torch-legacy"
    suffix = ".pth"
    dtypes = TYPED

    def make(self, folder: Path, state: State) -> Path:
        torch.save(state, folder / "made.pth", _use_new_zipfile_serialization=False)
        return folder / "made.pth"

    def boundaries(self, data: bytes) -> Iterable[int]:
        """The five pickles, then a length and the bytes of each storage."""
        stream = BytesIO(data)
        for _ in range(3):
            pickle.load(stream)
            yield stream.tell()
        root = StorageSizes(stream)
        root.load()
        yield stream.tell()
        for key in pickle.load(stream):
            yield stream.tell()
            stream.seek(8 + root.sizes[key], 1)


class StorageSizes(pickle.Unpickler):
    """Reads the object of a legacy file for nothing but the bytes of its storages, by key."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream)
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return BY_STORAGE.get(name, lambda *args: None)

    def persistent_load(self, pid: Any) -> None:
        _, dtype, key, _, elements, _ = pid
        self.sizes[key] = elements * dtype.itemsize


class TestSafetensors(FormatConformance):
    name = "safetensors"
    suffix = ".safetensors"
    views = False
    dtypes = [row.name for row in TABLE if row.safetensors and hasattr(torch, row.name)]

    def make(self, folder: Path, state: State) -> Path:
        save_file(state, folder / "made.safetensors", metadata={"format": "pt"})
        return folder / "made.safetensors"

    def oracle(self, path: Path) -> State:
        return load_file(path)

    def boundaries(self, data: bytes) -> Iterable[int]:
        start = 8 + int.from_bytes(data[:8], "little")
        yield from (8, start)
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        yield from (start + end for entry in header.values() for end in entry["data_offsets"])


class TestSharded(TestSafetensors):
    name = "sharded"

    def make(self, folder: Path, state: State) -> Path:
        return make_sharded(folder / "made", "model", "safetensors", state, save_file)

    def oracle(self, path: Path) -> State:
        return oracle_sharded(path, super().oracle)

    def boundaries(self, data: bytes) -> Iterable[int]:
        return range(0, len(data), 16) if data.startswith(b"{") else super().boundaries(data)


class TestShardedBin(TestTorchZip):
    name = "sharded"
    views = False

    def make(self, folder: Path, state: State) -> Path:
        return make_sharded(folder / "made", "pytorch_model", "bin", state, torch.save)

    def oracle(self, path: Path) -> State:
        return oracle_sharded(path, super().oracle)

    def boundaries(self, data: bytes) -> Iterable[int]:
        return range(0, len(data), 16) if data.startswith(b"{") else super().boundaries(data)


class TestPickle(FormatConformance):
    """A plain pickle of numpy arrays."""

    name = "pickle"
    suffix = ".pkl"
    views = False
    dtypes = [row.name for row in BY_NUMPY.values()]
    header_bytes = 1 << 30  # the arrays are inside the pickle

    def make(self, folder: Path, state: State) -> Path:
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        (folder / "made.pkl").write_bytes(pickle.dumps(arrays, protocol=4))
        return folder / "made.pkl"

    def oracle(self, path: Path) -> State:
        arrays = pickle.loads(path.read_bytes())
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def boundaries(self, data: bytes) -> Iterable[int]:
        return [position or 0 for _, _, position in pickletools.genops(data)]


def make_sharded(folder: Path, stem: str, suffix: str, state: State, save: Callable[[State, Path], object]) -> Path:
    """Two shards and an index, as on the Hugging Face hub."""
    folder.mkdir()
    items = list(state.items())
    halves = dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])
    places: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        name = f"{stem}-{number:05}-of-00002.{suffix}"
        save(half, folder / name)
        places |= dict.fromkeys(half, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    return folder


def oracle_sharded(folder: Path, read: Callable[[Path], State]) -> State:
    """The shards in the order of the index."""
    places = json.loads(next(folder.glob("*.index.json")).read_text(encoding="utf-8"))["weight_map"]
    shards = {name: read(folder / name) for name in sorted(set(places.values()))}
    return {name: shards[place][name] for name, place in places.items()}
