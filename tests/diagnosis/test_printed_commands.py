"""Every command that doctor prints does what it promises, on the file for which it is printed.

The files are the fixtures, whole and damaged, those that CKPTKIT_CORPUS and CKPTKIT_VECTORS name,
and odd ones that are made here with the libraries that write such.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import struct
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from ckptkit.cli import main
from ckptkit.diagnosis.cause import ERROR
from ckptkit.diagnosis.diagnose import examine
from tests.conftest import ROOT
from tests.hints import Ran, commands_in, run_each

LOOKS = ("scan", "doctor", "diff")  # commands that exit with 1 for what they find
NO_CHECKPOINTS = (".json", ".md", ".tsv", ".txt", ".py", ".yaml", ".yml")
ROOTS = {
    "fixtures": ROOT / "fixtures",
    "corpus": Path(os.environ.get("CKPTKIT_CORPUS", "/nowhere")),
    "vectors": Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "parallel",
    "quantized": Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "quantized",
}
ENTRIES = [
    pytest.param(entry, id=f"{name}/{entry.name}")
    for name, root in ROOTS.items()
    if root.is_dir()
    for entry in sorted(root.iterdir())
    if not entry.name.endswith(NO_CHECKPOINTS)
]


def places(entry: Path) -> Iterator[Path]:
    """Yield a file, or a folder with everything in it that may be a checkpoint.

    Of files whose names differ only in a rank or a device, yield two; of versions of torch, all.
    """
    yield entry
    alike: Counter[str] = Counter()
    for path in sorted(entry.rglob("*")):
        kind = re.sub(r"\d+", "#", str(path))
        alike[kind] += "/torch#.#" not in kind
        if not path.name.endswith(NO_CHECKPOINTS) and alike[kind] <= 2:
            yield path


def examined(place: str, folder: Path, scratch: Path) -> int:
    """Run doctor on a place in a folder, and each command that it prints in a copy of the folder.

    Each command succeeds, and torch loads what it writes unless doctor finds errors in that.
    Return the number of commands.
    """
    with chdir(folder):
        said = CliRunner().invoke(main, ["doctor", place])
    assert said.exit_code in (0, 1, 3), (place, said.output, said.exception)
    assert said.exit_code or not is_file(folder / place) or loads(folder / place), said.output
    commands = [words for words in commands_in(said.output) if len(words) > 2]
    for ran in run_each(commands, folder, scratch):
        looks = "--fix" not in ran.words and ran.words[1] in LOOKS
        assert ran.code in expected(ran), (place, str(ran))
        assert looks or ran.made, (place, str(ran))
        for made in filter(is_file, ran.made):
            assert loads(made) or has_errors(made), (place, str(ran))
    return len(commands)


def expected(ran: Ran) -> tuple[int, ...]:
    """Return the exit codes of a command: 1 for findings, and for losses or causes that remain."""
    return (0, 1) if ran.words[1] in (*LOOKS, "recover") else (0,)


def is_file(path: Path) -> bool:
    return path.is_file() and not path.name.endswith((*NO_CHECKPOINTS, ".jsonl"))


def has_errors(path: Path) -> bool:
    return any(cause.level == ERROR for cause in examine(path).causes)


def loads(path: Path) -> bool:
    """Return whether torch or safetensors loads a file as people do, onto the CPU."""
    try:
        if path.suffix == ".safetensors":
            load_file(path)
        else:
            with warnings.catch_warnings(action="ignore"):
                torch.load(path, weights_only=True, map_location="cpu")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("entry", ENTRIES)
def test_files_of_the_test_set(entry: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    copy = shutil.copytree if entry.is_dir() else shutil.copyfile
    copy(entry, work / entry.name)
    for place in places(work / entry.name):
        examined(str(place.relative_to(work)), work, tmp_path)


DAMAGED = [
    path for path in sorted((ROOT / "fixtures").rglob("*")) if path.suffix in (".pth", ".pt")
]


@pytest.mark.parametrize("path", DAMAGED, ids=lambda path: path.name)
def test_damaged_files(path: Path, tmp_path: Path) -> None:
    """Cut each file in half or at its end, or change four bytes at one of seven places."""
    data = path.read_bytes()
    work = tmp_path / "work"
    work.mkdir()
    part = DAMAGED.index(path) % 9
    if part < 2:
        made = data[: (len(data) // 2, -10)[part]]
    else:
        at = len(data) * (part - 1) // 8
        made = data[:at] + bytes(byte ^ 0x55 for byte in data[at : at + 4]) + data[at + 4 :]
    (work / "damaged.pth").write_bytes(made)
    with chdir(work):
        said = CliRunner().invoke(main, ["doctor", "damaged.pth"])
    assert said.exit_code in (0, 1, 3), (said.output, said.exception)
    for ran in run_each(commands_in(said.output), work, tmp_path):
        assert ran.code in expected(ran), (said.output, str(ran))


# Files that libraries other than torch write, or torch in other ways.

Make = Callable[[Path], str]
MADE: dict[str, Make] = {}
NOT_FIXED = (
    "plain_zip",
    "odd_row_of_4_bits",
    "six_bits_named_as_a_file_of_torch",
    "protocol_0",  # whose references to storages are texts, which torch cannot read either
)


def odd(make: Make) -> Make:
    """Add a function that makes a file or folder in a folder, and returns its name."""
    MADE[make.__name__] = make
    return make


def state() -> dict[str, Any]:
    return {f"module.{name}": value for name, value in nn.Linear(4, 3).state_dict().items()}


def packed(compress: Callable[[bytes], bytes], name: str, folder: Path) -> str:
    held = io.BytesIO()
    torch.save(state(), held)
    (folder / name).write_bytes(compress(held.getvalue()))
    return name


MADE |= {
    "gz": partial(packed, gzip.compress, "run.pth.gz"),
    "bz": partial(packed, bz2.compress, "run.pth.tar.bz2"),
    "xz_with_the_name_of_a_file_of_torch": partial(packed, lzma.compress, "run.pth"),
}


@odd
def tar_gz(folder: Path) -> str:
    packed(bytes, "weights.th", folder)
    with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
        archive.add(folder / "weights.th", "weights.th")
    return "model.tar.gz"


@odd
def safetensors_gz(folder: Path) -> str:
    data = (ROOT / "fixtures/safetensors/net.safetensors").read_bytes()
    (folder / "net.safetensors.gz").write_bytes(gzip.compress(data))
    return "net.safetensors.gz"


@odd
def plain_zip(folder: Path) -> str:
    packed(bytes, "run.pth", folder)
    with zipfile.ZipFile(folder / "run.zip", "w") as archive:
        archive.write(folder / "run.pth", "run.pth")
    return "run.zip"


@odd
def unpacked_by_hand(folder: Path) -> str:
    packed(bytes, "run.pth", folder)
    zipfile.ZipFile(folder / "run.pth").extractall(folder)
    return "archive"


@odd
def pickle_of_an_unpacked_archive(folder: Path) -> str:
    return f"{unpacked_by_hand(folder)}/data.pkl"


def protocol(number: int, folder: Path) -> str:
    """Write data.pkl of a file of torch.save in another protocol, some of which it refuses."""
    held = {"weights": state(), "epoch": 300, "lr": 0.1}
    torch.save(held, folder / "two.pth")
    with zipfile.ZipFile(folder / "two.pth") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}

    class Stored(pickle.Pickler):
        numbers: dict[int, str] = {}

        def persistent_id(self, value: object) -> object:
            if not isinstance(value, torch.storage.TypedStorage):
                return None
            key = self.numbers.setdefault(value._cdata, str(len(self.numbers)))
            return "storage", torch.FloatStorage, key, "cpu", value.nbytes() // 4

    pickled = io.BytesIO()
    Stored(pickled, number).dump(held)
    with zipfile.ZipFile(folder / "run.pth", "w") as archive:
        for name, data in records.items():
            archive.writestr(name, pickled.getvalue() if name.endswith("data.pkl") else data)
    return "run.pth"


MADE |= {f"protocol_{number}": partial(protocol, number) for number in (0, 1, 4, 5)}


@odd
def legacy_protocol_4(folder: Path) -> str:
    torch.save(state(), folder / "run.pth", _use_new_zipfile_serialization=False, pickle_protocol=4)
    return "run.pth"


@odd
def deflated_protocol_4(folder: Path) -> str:
    torch.save(state(), folder / "stored.pth", pickle_protocol=4)
    with (
        zipfile.ZipFile(folder / "stored.pth") as archive,
        zipfile.ZipFile(folder / "run.pth", "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for info in archive.infolist():
            out.writestr(info.filename, archive.read(info))
    return "run.pth"


def hand_made(tensors: dict[str, tuple[str, list[int], int]], name: str, folder: Path) -> str:
    """Write a safetensors file by its specification: a length, a JSON header, bytes."""
    header, at = {}, 0
    for key, (dtype, shape, nbytes) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return name


FOUR_BITS = {"t": ("F4", [8, 3], 12), "u": ("U8", [1], 1)}
SIX_BITS = {"t": ("F6_E2M3", [4, 4], 12)}
MADE |= {
    "odd_row_of_4_bits": partial(hand_made, FOUR_BITS, "f4.safetensors"),
    "six_bits_named_as_a_file_of_torch": partial(hand_made, SIX_BITS, "f6.pth"),
}


@odd
def lightning(folder: Path) -> str:
    names = {name.replace("module.", "net."): value for name, value in state().items()}
    held = {"pytorch-lightning_version": "2.5", "state_dict": names, "epoch": 1}
    torch.save(held, folder / "run.ckpt")
    return "run.ckpt"


@odd
def module_of_quantization_aware_training(folder: Path) -> str:
    from torch.ao.quantization import default_qconfig

    model = nn.Sequential(nn.Linear(4, 3))
    vars(model)["qconfig"] = default_qconfig
    (folder / "run.pth").write_bytes(pickle.dumps(model))
    return "run.pth"


@odd
def one_shard_of_several(folder: Path) -> str:
    torch.save(state(), folder / "pytorch_model-00001-of-00003.bin")
    return "pytorch_model-00001-of-00003.bin"


@pytest.mark.parametrize("name", MADE)
def test_odd_files(name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    place = MADE[name](work)
    examined(place, work, tmp_path)
    command = ["ckptkit", "doctor", place, "--fix", "fixed.pth"]
    (fixed,) = run_each([command], work, tmp_path)
    assert fixed.code in (0, 1, 3) and bool(fixed.made) is (name not in NOT_FIXED), str(fixed)
    assert all(map(loads, fixed.made)), str(fixed)
