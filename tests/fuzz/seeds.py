"""Whole files to begin with, each of a few kilobytes: of torch, of others where they are the
writers, and fixtures."""

from __future__ import annotations

import io
import json
import logging
import struct
import tempfile
import warnings
import zlib
from collections import OrderedDict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from ckptkit.api import open_checkpoint, save
from ckptkit.core.options import Options
from ckptkit.core.plan import Edit
from ckptkit.publish.in_place import Journal, JournalSpan
from tests.conftest import ROOT
from tests.formats.containers import tars
from tests.formats.containers.zips import Member, build
from tests.formats.dcp import making
from tests.formats.torch_zip import archives
from tests.pickles.making import saved
from tests.scanning.hostile_pickles import CASES

FIXTURES = ROOT / "fixtures"
BREAK = b"\n=====\n"  # between the files of a folder that is written as one run of bytes


def state() -> dict[str, Any]:
    """Ties, views, several types, and what is beside them."""
    base = torch.arange(12.0).reshape(3, 4)
    weights = OrderedDict(
        {"module.a.weight": base, "module.a.tied": base, "module.b": base.t()[1:3].half()}
    )
    weights._metadata = OrderedDict({"": {"version": 1}})
    return {
        "model": weights, "epoch": 3, "args": ("x", None, -1.5, 1 << 70, {1: b"\0"}),
        "lr": [0.1, True],
    }  # fmt: skip


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


@cache
def zips() -> list[bytes]:
    deflated = [
        Member("a/data.pkl", archives.pickle_of(archives.tensor(archives.storage())), deflated=True)
    ]
    deflated += [Member("a/data/0", archives.FLOATS, deflated=True), Member("a/version", b"3\n")]
    return [
        saved(state()), saved(state(), crc=False), saved(torch.nn.Linear(2, 2), crc=False),
        build(*deflated), build(*deflated, zip64={}, end={"count": 0xFFFF, "here": 0xFFFF}),
        fixture("torch-zip/strides.pth"), fixture("torchscript/traced.pt"),
        CASES["place-zip-in-zip"].data,
    ]  # fmt: skip


@cache
def pickles() -> list[bytes]:
    """As they are in archives, and hostile ones."""
    objects = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return [
        *(_pickle_in(saved(value)) for value in (state(), objects, torch.randn(2, 2).to_sparse())),
        _pickle_in(saved(state(), pickle_protocol=4)),
        archives.pickle_of(archives.tensor(archives.storage(key=archives.text("2")))),
        fixture("pickle/arrays.pkl"),
        *(case.data for name, case in CASES.items() if name.startswith(("call-", "unclear-"))),
    ]


def _pickle_in(archive: bytes) -> bytes:
    with torch.serialization._open_zipfile_reader(io.BytesIO(archive)) as reader:
        data: bytes = reader.get_record("data.pkl")
    return data


@cache
def legacy() -> list[bytes]:
    made = [
        saved(state(), _use_new_zipfile_serialization=False),
        saved(torch.nn.Linear(2, 2), _use_new_zipfile_serialization=False, pickle_protocol=4),
        fixture("torch-legacy/dtypes_and_ties.pth"),
    ]
    return [*made, CASES["place-legacy"].data]


@cache
def tar() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = tars.save(state()["model"], Path(folder) / "made.tar", "cuda:1")
        return [path.read_bytes(), CASES["place-tar"].data]


@cache
def safetensors() -> list[bytes]:
    header = json.dumps({
        "__metadata__": {"format": "pt", "b": "a"},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "é.b": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [8, 11]},
        "none": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [11, 11]},
    }).encode()  # fmt: skip
    made = [struct.pack("<Q", len(header)) + header + bytes(range(11))]
    return [*made, fixture("sharded/net/model-00001-of-00003.safetensors"), _whole()]


def _whole() -> bytes:
    """With the whole tree beside the tensors; only ckptkit writes such files."""
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "in.pth", Path(folder) / "out.safetensors"
        source.write_bytes(saved(state()))
        save(open_checkpoint(source), path, options=Options(all=True))
        return path.read_bytes()


@cache
def numpys() -> list[bytes]:
    arrays = [
        np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.ones((2, 2))), np.array(3j),
        np.zeros((0, 2)),
    ]  # fmt: skip
    made = []
    for array in arrays:
        buffer = io.BytesIO()
        np.save(buffer, array)
        made.append(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=arrays[0], b=arrays[1])
    return [*made, buffer.getvalue(), CASES["place-npy"].data, CASES["place-npz"].data]


def packed(folder: Path) -> bytes:
    """The files of a folder one after another, each behind its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return BREAK.join(
        f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes() for path in files
    )


@cache
def sharded() -> list[bytes]:
    return [packed(FIXTURES / "sharded/net"), packed(FIXTURES / "sharded-bin/net")]


@cache
def dcp() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        made = making.save(
            Path(folder) / "made",
            {"model": {"a": torch.arange(6.0), "b": torch.ones(2, 2)}, "epoch": 3},
        )
        return [packed(made)]


@cache
def deepspeed() -> list[bytes]:
    return [
        packed(FIXTURES / f"deepspeed/{name}")
        for name in ("zero1-bf16-2ranks", "zero3-bf16-3ranks")
    ]


@cache
def journals() -> list[bytes]:
    """Of changes of EDITED; the inode is put in later."""
    spans = JournalSpan(4, EDITED[4:20], b"x" * 16), JournalSpan(60, EDITED[60:], b"longer " * 3)
    shorter = JournalSpan(4, EDITED[4:8], b"y" * 4), JournalSpan(40, EDITED[40:], b"")
    return [
        Journal(0, len(EDITED), 81, Edit(0, b"broken"), spans).dump(),
        Journal(0, len(EDITED), 40, Edit(20, b"b"), shorter).dump(),
    ]


EDITED = bytes(range(64))


@cache
def packed_others() -> list[bytes]:
    """Files of formats that are only searched through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)
    return [
        zlib.compress(pickles()[0]),
        *(CASES[name].data for name in CASES if name.startswith("place-")),
    ]


@cache
def noise() -> list[bytes]:
    """For what draws its choices from bytes."""
    return [Random(seed).randbytes(1 << 4 + seed % 8) for seed in range(64)]
