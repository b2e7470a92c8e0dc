"""The conformance suite for each format, with torch, safetensors or numpy as the maker."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import pickletools
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file

from ckptkit.core.dtypes import BY_NAME, BY_NUMPY, BY_STORAGE, TABLE
from ckptkit.core.options import Options
from tests.formats.conformance import FormatConformance, State
from tests.formats.containers import tars
from tests.formats.gguf_files import Entry, ends, infos
from tests.formats.gguf_files import made as gguf
from tests.formats.torchscript import scripts
from tests.torch_equality import bits

TYPED = [row.name for row in TABLE if row.storage]
NUMPY = [row.name for row in BY_NUMPY.values()]
GGUF_TYPES = {
    "float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27, "float64": 28,
    "bfloat16": 30,
}  # fmt: skip
UNTYPED = [
    row.name for row in TABLE if not row.storage and row.kind != "int" and hasattr(torch, row.name)
]


class TestTorchZip(FormatConformance):
    name = "torch-zip"
    suffix = ".pth"
    dtypes = [*TYPED, *UNTYPED, "uint16", "uint32", "uint64"]

    def make(self, folder: Path, state: State) -> Path:
        torch.save(state, folder / "made.pth")
        return folder / "made.pth"

    def boundaries(self, data: bytes) -> Iterable[int]:
        return zip_boundaries(data)


def zip_boundaries(data: bytes) -> Iterable[int]:
    """Local headers, the directory, each of its entries, the end records: three of torch, one of
    numpy."""
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


class TestTorchTar(FormatConformance):
    name = "torch-tar"
    suffix = ".pth"
    dtypes = [name for name in TYPED if BY_NAME[name].kind not in ("quantized", "complex")]

    def make(self, folder: Path, state: State) -> Path:
        return tars.save(state, folder / "made.tar")

    def oracle(self, path: Path) -> State:
        loaded: State = torch.load(path, weights_only=False)  # for a file that this test has made
        return loaded

    def boundaries(self, data: bytes) -> Iterable[int]:
        """Headers, the data behind them, and in that every pickle and what follows it."""
        with tarfile.open(fileobj=BytesIO(data)) as file:
            members = file.getmembers()
        for member in members:
            yield from (member.offset, member.offset_data, member.offset_data + member.size)
            stream = BytesIO(data[: member.offset_data + member.size])
            stream.seek(member.offset_data)
            for _ in range(
                StorageSizes(stream).load() if member.name in ("tensors", "storages") else 0
            ):
                _, second, made = StorageSizes(stream).load()
                yield stream.tell()
                (numel,) = struct.unpack("<q", stream.read(8))
                sizes = 8 * (2 * numel + 1) if isinstance(second, int) else numel * made.itemsize
                stream.seek(sizes, 1)
                yield stream.tell()


class TestGguf(FormatConformance):
    name = "gguf"
    suffix = ".gguf"
    views = False
    dtypes = [*GGUF_TYPES]

    def state(self) -> State:
        """Booleans are no type of GGUF."""
        return {name: each for name, each in super().state().items() if each.dtype != torch.bool}

    def make(self, folder: Path, state: State) -> Path:
        tensors = [
            Entry(name, each.shape, GGUF_TYPES[str(each.dtype).partition(".")[2]], bits(each))
            for name, each in state.items()
        ]
        values = [("general.name", "x"), ("tokens", ["a", "bc"]), ("general.alignment", 64)]
        (folder / "made.gguf").write_bytes(gguf(values, tensors, alignment=64, padded=False))
        return folder / "made.gguf"

    def oracle(self, path: Path) -> State:
        """The tensors by struct and torch, from the offsets in the header."""
        data = path.read_bytes()
        start = -(-ends(data)[-1] // 64) * 64
        found: State = {}
        kinds = {number: getattr(torch, name) for name, number in GGUF_TYPES.items()}
        for name, shape, number, offset in infos(data):
            count = math.prod(shape)
            body = bytearray(data[start + offset :][: count * kinds[number].itemsize])
            flat = torch.frombuffer(body, dtype=kinds[number]) if count else torch.empty(0)
            found[name] = flat.to(kinds[number]).reshape(shape)
        return found

    def boundaries(self, data: bytes) -> Iterable[int]:
        places = ends(data)
        start = -(-places[-1] // 64) * 64
        yield from places
        yield from (start + offset for _, _, _, offset in infos(data))


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


class Sharded(FormatConformance):
    """Two shards and an index; what is in a shard is as the class beside it says."""

    suffix = ""
    options = Options(shard_size=64)
    title: tuple[str, str]
    save: Callable[[State, Path], object]

    def make(self, folder: Path, state: State) -> Path:
        return make_sharded(folder / "made", *self.title, state, self.save)

    def oracle(self, path: Path) -> State:
        return oracle_sharded(path, super().oracle)

    def boundaries(self, data: bytes) -> Iterable[int]:
        return range(0, len(data), 16) if data.startswith(b"{") else super().boundaries(data)


class TestSharded(Sharded, TestSafetensors):
    name = "sharded"
    title = ("model", "safetensors")
    save = staticmethod(save_file)


class TestShardedBin(Sharded, TestTorchZip):
    name = "sharded-bin"
    title = ("pytorch_model", "bin")
    save = staticmethod(torch.save)


class TestPickle(FormatConformance):
    """A plain pickle of numpy arrays."""

    name = "pickle"
    suffix = ".pkl"
    views = False
    dtypes = NUMPY
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


class TestNpz(FormatConformance):
    name = "npz"
    suffix = ".npz"
    views = False
    dtypes = NUMPY
    save: Callable[..., None] = staticmethod(np.savez)

    def make(self, folder: Path, state: State) -> Path:
        self.save(folder / "made.npz", **{name: tensor.numpy() for name, tensor in state.items()})
        return folder / "made.npz"

    def oracle(self, path: Path) -> State:
        with np.load(path) as arrays:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def boundaries(self, data: bytes) -> Iterable[int]:
        yield from zip_boundaries(data)
        with zipfile.ZipFile(BytesIO(data)) as file:
            for member in file.infolist():
                start = (
                    member.header_offset
                    + 30
                    + sum(struct.unpack_from("<2H", data, member.header_offset + 26))
                )
                yield from (start, start + 6, start + 8, start + 10, start + 128)


class TestCompressedNpz(TestNpz):
    save = staticmethod(np.savez_compressed)


class TestTorchScript(TestTorchZip):
    pytestmark = scripts.QUIET
    name = "torchscript"
    dtypes = [name for name in TestTorchZip.dtypes if BY_NAME[name].bits >= 8]

    def make(self, folder: Path, state: State) -> Path:
        return scripts.script(scripts.module_of(state), folder / "made.pt")

    def oracle(self, path: Path) -> State:
        return scripts.by_torch(path)


class TestPt2(TestTorchScript):
    """An exported program."""

    name = "pt2"
    dtypes = [
        name
        for name in TestTorchScript.dtypes
        if BY_NAME[name].safetensors and BY_NAME[name].packed == 1
    ]
    dtypes += ["complex32", "complex128"]

    def make(self, folder: Path, state: State) -> Path:
        return scripts.export(scripts.module_of(state), folder / "made.pt2")

    def oracle(self, path: Path) -> State:
        return {
            name: tensor.detach() for name, tensor in torch.export.load(path).state_dict.items()
        }


class TestCompressed(TestTorchZip):
    """A file of torch.save in gzip: there is no part of it that is not needed."""

    name = "compressed"
    inside = "torch-zip"
    suffix = ".gz"
    compress: Callable[[bytes], bytes] = staticmethod(gzip.compress)

    def make(self, folder: Path, state: State) -> Path:
        plain = super().make(folder, state)
        made = folder / "packed" / f"made.pth{self.suffix}"
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(self.compress(plain.read_bytes()))
        return made

    def oracle(self, path: Path) -> State:
        return super().oracle(path.parent.parent / "made.pth")

    def boundaries(self, data: bytes) -> Iterable[int]:
        return (10, len(data) - 8, len(data) - 4)


class TestCompressedByZstd(TestCompressed):
    suffix = ".zst"
    compress = staticmethod(zstandard.ZstdCompressor().compress)


class TestCompressedTar(TestCompressed):
    suffix = ".tar.gz"

    @staticmethod
    def compress(data: bytes) -> bytes:
        members = {"model/config.json": b"{}", "model/made.pth": data}
        return gzip.compress(tars.archive(*(tars.member(*each) for each in members.items())))


def make_sharded(
    folder: Path, stem: str, suffix: str, state: State, save: Callable[[State, Path], object]
) -> Path:
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
    (folder / f"{stem}.{suffix}.index.json").write_text(
        json.dumps(index, ensure_ascii=False), encoding="utf-8"
    )
    return folder


def oracle_sharded(folder: Path, read: Callable[[Path], State]) -> State:
    """The shards in the order of the index."""
    places = json.loads(next(folder.glob("*.index.json")).read_text(encoding="utf-8"))["weight_map"]
    shards = {name: read(folder / name) for name in sorted(set(places.values()))}
    return {name: shards[place][name] for name, place in places.items()}
