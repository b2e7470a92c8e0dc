"""The model of cost: what each command reads and writes, as formulas, checked against what the
kernel counted.

The formulas are the table of ckptkit/help/cost.md. They are upper limits; for files that are mostly tensors
they must also be close, for headers within a factor of four.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.api import convert
from tests.formats.dcp.making import save
from tests.narrow import narrow
from tests.remote.servers import Misbehaving, misbehaving, s3_server
from tests.spy import spied

KIB, MIB = 1 << 10, 1 << 20
TAIL = 64 * KIB  # where a zip file's end record may be
LOCAL = 512  # bytes read for a local header, at least
SHORT = 32 * KIB  # shorter storages are read with what lies between them
WINDOW = MIB  # of reading ahead, where they follow each other
NEARBY = 4 * KIB  # where they do not
PIECE = 4 * MIB  # of a request
PART = 16 * MIB  # of an upload
FIXED = 16 * KIB  # whatever the file: the first bytes, small records, lines that are printed
PRINTED = 512  # bytes that inspect --json prints for each tensor, at most

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Anatomy:
    """A file or folder: its bytes, those of its tensors, their number, and the bytes that tell what
    is in it."""

    format: str
    size: int
    data: int
    tensors: int
    header: int  # read by whoever opens it
    pickle: int = 0  # of a torch file
    directory: int = 0  # of a zip file
    sums: bool = False  # whether it has the checksums that a torch file needs
    scattered: bool = False  # whether its tensors lie in another order than they have in an output

    @property
    def located(self) -> int:
        """Bytes read to find the chunks of a DCP folder, each of which is a small zip file."""
        each = min(TAIL + 6 * KIB, 2 * self.size // self.tensors)
        return self.tensors * each if self.format == "dcp" else 0

    @property
    def checksums(self) -> int:
        """Bytes read again for the checksums that new bytes are compared with."""
        return self.directory if self.sums else 0

    @property
    def elements(self) -> int:
        """Bytes read to have every tensor, one after another."""
        return self.data + self.located

    @property
    def ranges(self) -> int:
        """Bytes read to copy them. Short ones are read with what lies between them, the last one of
        a window twice; scattered ones with what follows them too."""
        each = self.data // self.tensors
        if each >= SHORT:
            return self.elements
        together = self.size + self.size * SHORT // WINDOW
        apart = self.tensors * max(NEARBY, 4 * each) if self.scattered else 0
        return self.located + together + apart


class Cost(NamedTuple):
    """Bytes."""

    read: int
    written: int = 0


# Of the input, and of the output (of the input, if there is none).
Formula = Callable[[Anatomy, Anatomy], Cost]


def _copied(src: Anatomy, dst: Anatomy) -> Cost:
    """Everything once; the headers of a torch file twice where its checksums are only known at the
    end."""
    known = src.sums or dst.format != "torch-zip"
    read = src.header + src.ranges + (0 if dst.format == "torch-zip" else src.checksums)
    return Cost(read, dst.size + (0 if known else dst.size - dst.data))


def _cast(src: Anatomy, dst: Anatomy) -> Cost:
    return Cost(src.header + src.elements + src.checksums, dst.size + dst.size - dst.data)


def _recovered(src: Anatomy, dst: Anatomy) -> Cost:
    """Checksums, where there are any, are compared first; the directory is read to its beginning,
    piece by piece."""
    checked = src.elements + 2 * src.directory if src.sums else 0
    return Cost(src.header + checked + src.ranges, dst.size + dst.size - dst.data)


def _verified(src: Anatomy, dst: Anatomy) -> Cost:
    once = _copied(src, dst)
    return Cost(once.read + src.ranges + dst.size, once.written)


def _in_place(src: Anatomy, dst: Anatomy) -> Cost:
    """The journal keeps what is overwritten; the new header is as long as the old, or shorter.

    A zip file's directory is read once more for its entries, and again as it lies there.
    """
    if src.format == "torch-zip":
        return Cost(2 * src.header - src.pickle + src.directory, 2 * (src.pickle + src.directory))
    return Cost(2 * src.header, 3 * src.header)


MODEL: dict[str, Formula] = {
    "inspect --json SRC": lambda src, dst: Cost(src.header, PRINTED * src.tensors),
    "inspect --json --digest SRC": lambda src, dst: Cost(
        src.header + src.elements, PRINTED * src.tensors
    ),
    "diff --no-values SRC TWIN": lambda src, dst: Cost(2 * src.header),
    "diff SRC TWIN": lambda src, dst: Cost(2 * (src.header + src.elements)),
    "convert --dry-run -q SRC DST.safetensors": lambda src, dst: Cost(src.header + src.located),
    "strip-module -q SRC DST.pth": _copied,
    "remap -q SRC DST.pth --to cpu": _copied,
    "convert -q SRC DST.safetensors": _copied,
    "convert -q SRC DST.pth --cast bfloat16": _cast,
    "strip-module -q --verify SRC DST.pth": _verified,
    "recover -q SRC DST.pth": _recovered,
    "strip-module -q --in-place FRESH": _in_place,
    "rename -q --in-place FRESH --sub ^module=m": _in_place,
}
EDITS_IN_PLACE = ("torch-zip", "safetensors")
RECOVERED = ("torch-zip", "safetensors")

# Peak memory of a process: so many MiB, and KiB for each tensor.
MEMORY = {
    "inspect SRC": (40, 2.5),
    "strip-module -q SRC DST.pth": (40, 3.5),
    "convert -q SRC DST.safetensors": (40, 3.5),
    "inspect --json --digest SRC": (60, 2.5),
    "diff SRC TWIN": (60, 4),
}


# the inputs


def _state(tensors: int, rows: int, columns: int) -> State:
    torch.manual_seed(0)
    return {f"module.layers.{i:05}.weight": torch.randn(rows, columns) for i in range(tensors)}


SHAPES = {"large": (6, 512, 1024), "medium": (300, 64, 64), "small": (1_500, 2, 2)}


def _zip(state: State, path: Path) -> Anatomy:
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        sizes = {each.filename.rpartition("/")[2]: each.file_size for each in archive.infolist()}
        size, directory = path.stat().st_size, path.stat().st_size - archive.start_dir
    pickled = sizes["data.pkl"]
    header = TAIL + directory + 2 * pickled + min(LOCAL * len(sizes), size)
    more = {"pickle": pickled, "directory": directory, "sums": True}
    return _anatomy("torch-zip", path, state, header, **more)


def _safetensors(state: State, path: Path) -> Anatomy:
    save_file(state, path)
    return _anatomy("safetensors", path, state, int.from_bytes(path.read_bytes()[:8], "little"))


def _legacy(state: State, path: Path) -> Anatomy:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    header = 3 * (path.stat().st_size - _bytes(state)) + TAIL + FIXED
    return _anatomy("torch-legacy", path, state, header, scattered=True)


def _npz(state: State, path: Path) -> Anatomy:
    with path.open("wb") as file:
        np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})  # type: ignore[arg-type]
    with zipfile.ZipFile(path) as archive:
        directory = path.stat().st_size - archive.start_dir
    header = TAIL + directory + 2 * LOCAL * len(state)
    return _anatomy("npz", path, state, header, directory=directory, sums=True)


def _dcp(state: State, path: Path) -> Anatomy:
    save(path, {"model": state})
    return _anatomy("dcp", path, state, 7 * (path / ".metadata").stat().st_size // 2)


def _shards(state: State, path: Path) -> Anatomy:
    path.mkdir()
    names = list(state)
    parts = [names[at::3] for at in range(3)]
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: state[name] for name in part}, path / file)
    where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return _anatomy("sharded", path, state, _size(path) - _bytes(state), scattered=True)


MAKERS = {
    "pth": _zip,
    "safetensors": _safetensors,
    "legacy.pth": _legacy,
    "npz": _npz,
    "dcp": _dcp,
    "shards": _shards,
}


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def _anatomy(format: str, path: Path, state: State, header: int, **more: Any) -> Anatomy:
    return Anatomy(format, _size(path), _bytes(state), len(state), header, **more)


def _output(path: Path, src: Anatomy) -> Anatomy:
    """Return the bytes that a command wrote; half the bytes of tensors if they were cast."""
    if not path.exists():
        return src
    size = _size(path)
    data = src.data if size > src.data else src.data // 2
    format = "torch-zip" if path.suffix == ".pth" else "safetensors"
    return Anatomy(format, size, data, src.tensors, size - data)


# what is counted

needs_counts = pytest.mark.skipif(
    not os.path.exists("/proc/self/io"), reason="this system does not count bytes"
)


def _words(command: str, src: Path, folder: Path, run: int) -> list[str | Path]:
    """The command with its files: an output or a fresh copy of its own for each run."""
    fresh = folder / f"fresh{run}{src.suffix}"
    if "FRESH" in command:
        shutil.copy(src, fresh)
    files = {"SRC": str(src), "TWIN": str(_twin(src)), "FRESH": str(fresh)}
    return [
        files.get(word, word) if not word.startswith("DST") else str(folder / f"out{run}{word[3:]}")
        for word in command.split()
    ]


def _twin(path: Path) -> Path:
    return path.with_name(f"twin-{path.name}")


def _counts(src: Path, folder: Path, commands: list[str]) -> dict[str, tuple[Cost, Path]]:
    """Return what the kernel counted of each command, and where its output is. Each command runs
    twice, the first time for the imports."""
    twice: list[list[list[str | Path]]] = []
    for number, command in enumerate(commands):
        (own := folder / str(number)).mkdir()
        twice.append([_words(command, src, own, run) for run in (1, 2)])
    found = {}
    done = spied(folder, *(words for both in twice for words in both))[1::2]
    for number, (command, each) in enumerate(zip(commands, done, strict=True)):
        assert not each.code, f"{command}: {each.code}"
        outs = sorted((folder / str(number)).glob("out2*"))
        found[command] = Cost(each.read, each.written), outs[0] if outs else folder / "none"
    return found


def _applies(command: str, format: str) -> bool:
    if "--in-place" in command:
        return format in EDITS_IN_PLACE
    return "recover" not in command or format in RECOVERED


@needs_counts
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes(kind: str, shape: str, tmp_path: Path) -> None:
    state = _state(*SHAPES[shape])
    src = tmp_path / f"in.{kind}"
    anatomy = MAKERS[kind](state, src)
    (shutil.copytree if src.is_dir() else shutil.copy)(src, _twin(src))
    commands = [command for command in MODEL if _applies(command, anatomy.format)]
    for command, (counted, out) in _counts(src, tmp_path, commands).items():
        model = MODEL[command](anatomy, _output(out, anatomy))
        said = f"{command}: {counted}, the model says {model}"
        assert counted.read <= model.read + FIXED, said
        assert counted.written <= model.written + FIXED, said
        nearly = 0.95 if shape == "large" and model.read > anatomy.data else 1 / 4
        least = MODEL[command](replace(anatomy, scattered=False), _output(out, anatomy))
        assert counted.read >= nearly * least.read - FIXED, said
        if "SRC DST" in command and "--dry-run" not in command:
            assert counted.written >= out.stat().st_size, said


# memory


@pytest.mark.skipif(
    not hasattr(os, "wait4"), reason="this system does not tell the peak memory of a process"
)
@pytest.mark.parametrize("command", MEMORY)
@pytest.mark.parametrize("shape", ["large", "small"])
def test_memory(command: str, shape: str, tmp_path: Path) -> None:
    """The peak of a process of its own, whose parent is small."""
    state = _state(*SHAPES[shape])
    src = tmp_path / "in.pth"
    _zip(state, src)
    shutil.copy(src, _twin(src))
    base, each = MEMORY[command]
    done = narrow(*_words(command, src, tmp_path, 1))
    assert done.code in (0, 1), done.stderr
    assert done.memory / MIB <= base + each * len(state) / 1024


# requests


def _requests_to_open(src: Anatomy) -> int:
    """The end and the beginning of the file, its pickle or header in pieces that grow from 64 KiB
    to 4 MiB, and what is not near them."""
    return 6 + ceil(src.header / PIECE)


def _requests_to_copy(src: Anatomy) -> int:
    """All of the file in pieces. A storage in a zip file costs one or two requests, unless it is
    short."""
    each = 2 * src.tensors if src.format == "torch-zip" and src.data // src.tensors >= SHORT else 0
    growing = 6  # pieces, until they are as large as they get
    return _requests_to_open(src) + growing + each + ceil(2 * src.size / PIECE)


def _fetched_to_copy(src: Anatomy) -> int:
    """Bytes: headers of members that lie near each other are fetched with what is between them."""
    return src.size + (src.size if src.format == "torch-zip" else 0) + TAIL + LOCAL * src.tensors


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests(kind: str, shape: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    path = tmp_path / f"in.{kind}"
    anatomy = MAKERS[kind](_state(*SHAPES[shape]), path)
    with misbehaving(path.read_bytes()) as served:
        ckptkit.open(served.url).close()
        assert len(served.requests) <= _requests_to_open(anatomy)
        if anatomy.data > anatomy.size / 2:
            assert _sent(served) <= max(anatomy.header, 8 * TAIL)
        served.requests.clear()
        convert(
            served.url, tmp_path / f"out.{kind}", lambda ck: ckptkit.strip_prefix(ck, "module.")
        )
        assert len(served.requests) <= _requests_to_copy(anatomy)
        assert anatomy.data <= _sent(served) <= _fetched_to_copy(anatomy)


def _sent(served: Misbehaving) -> int:
    return sum(request.stop - request.start for request in served.requests)


def test_calls_of_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each 16 MiB; one call to look whether the name is free, one to begin and one to
    complete."""
    _safetensors(_state(20, 512, 1024), tmp_path / "in.safetensors")
    with s3_server() as account:
        for name, value in account.items():
            monkeypatch.setenv(name, value)
        pytest.importorskip("s3fs").S3FileSystem().mkdir("costs")
        calls = _spied_calls(monkeypatch)
        done = convert(tmp_path / "in.safetensors", "s3://costs/out.safetensors")
    assert calls.pop("UploadPart") == ceil(done.plan.size / PART)
    assert calls.pop("CreateMultipartUpload") == calls.pop("CompleteMultipartUpload") == 1
    assert sum(calls.values()) <= 3, calls  # whether there is such a file, or such a folder


def _spied_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of the S3 API from now on."""
    client = import_module("aiobotocore.client").AioBaseClient
    calls: dict[str, int] = {}
    call = client._make_api_call

    async def counted(self: Any, operation: str, parameters: Any) -> Any:
        calls[operation] = calls.get(operation, 0) + 1
        return await call(self, operation, parameters)

    monkeypatch.setattr(client, "_make_api_call", counted)
    return calls
