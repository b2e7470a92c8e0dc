"""The cost of a file, in processes with little memory, little time, few files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ckptkit.api import convert, open_checkpoint
from ckptkit.core.errors import CkptkitError, PathError
from tests.conftest import COMMAND, ENVIRONMENT, ROOT
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import archive, pickle_of
from tests.scanning.hostile_pickles import CASES

resource = pytest.importorskip("resource", reason="this system limits no processes")

MEMORY = 300 << 20  # bytes in use at once, of any hostile file
MORE = {  # but of these, whose limits allow as much
    "zeros-as-pickle": 560
    << 20,  # a record is inflated as a whole: record_bytes, and once more while that grows
    "memo": 420 << 20,  # memo_entries, of 80 bytes each when they are traced
}
SECONDS = 60  # of a processor: far more than any takes


class Child(NamedTuple):
    """The result of a command with limited memory."""

    code: int
    stdout: str
    stderr: str
    memory: int  # bytes


# Starts the command from a small process: one that is started by a large one counts as large as
# that.
LAUNCHER = """
import json, os, resource, subprocess, sys
for name, value in json.loads(sys.argv[1]).items():
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (value, value))
process = subprocess.Popen(sys.argv[3:])
_, status, usage = os.wait4(process.pid, 0)
open(sys.argv[2], "w").write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss << 10}")
"""


def narrow(*arguments: object, **limits: int) -> Child:
    """A command with limits; they are of `resource`, by their last words."""
    everything = json.dumps({"CPU": SECONDS, "CORE": 0, **limits})
    with tempfile.NamedTemporaryFile("r") as report:
        command = [
            sys.executable,
            "-c",
            LAUNCHER,
            everything,
            report.name,
            *COMMAND,
            *map(str, arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        code, memory = map(int, report.read().split())
    return Child(code, done.stdout, done.stderr, memory)


def tidy(child: Child, memory: int = MEMORY) -> None:
    """It ended by itself, with a line or two that can be printed, and did not take much."""
    assert child.code in (0, 1, 3), child
    lines = child.stderr.splitlines()
    assert len(lines) <= 4 and all(map(str.isprintable, lines)), child.stderr
    assert child.memory < memory, child


def pth(code: bytes) -> bytes:
    return archive(code, records={})


def header(text: bytes, rest: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(rest)


BOMBS: dict[str, Callable[[], bytes]] = {
    "deep-value": lambda: pth(b"\x80\x02N" + b"\x85" * 1_000_000 + b"."),
    "deep-key": lambda: pth(b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns."),
    "deep-argument": lambda: pth(b"\x80\x02cm\nf\nN" + b"\x85" * 1_000_000 + b"R."),
    "deep-lists": lambda: pth(b"\x80\x02" + b"]" * 900_000 + b"a" * 899_999 + b"."),
    "deep-objects": lambda: pth(b"\x80\x02cm\nf\n" + b")Rcm\nf\n\x86" * 1000 + b"."),
    "values": lambda: pth(b"\x80\x02(" + b"N" * 20_000_000 + b"l."),
    "dropped": lambda: pth(b"\x80\x02" + b"N0" * 2_000_000 + b"N."),
    "marks": lambda: pth(b"\x80\x02" + b"(" * 20_000_000 + b"."),
    "memo": lambda: pth(b"\x80\x04N" + b"\x94" * 5_000_001 + b"."),
    "laughs": lambda: pth(b"\x80\x02N" + b"2\x86" * 100_000 + b"."),
    "equal-hashes": lambda: pth(b"\x80\x02}(" + b"".join(
        b"\x8a\x0b" + (n * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for n in range(200_000)) + b"u."),
    "big-integer": lambda: pth(b"\x80\x02\x8b" + struct.pack("<i", 8 << 20) + b"\x7f" * (8 << 20) + b"."),
    "digits": lambda: pth(b"I" + b"1" * 900_000 + b"\n."),
    "text": lambda: pth(b"X" + struct.pack("<I", 60 << 20) + b"\xff" * (60 << 20) + b"."),
    "lies": lambda: pth(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"."),
    "zeros-as-pickle": lambda: build(Member("a/data.pkl", bytes(200 << 20), deflated=True), Member("a/version", b"3")),
    "zeros-as-nothing": lambda: build(
        Member("a/data.pkl", pickle_of(b"N")), Member("a/data/0", bytes(200 << 20), deflated=True),
        Member("a/version", b"3")),
    "json-depth": lambda: header(b"[" * 2_000_000),
    "json-spaces": lambda: header(b" " * 50_000_000),
    "json-numbers": lambda: header(b'{"a":[' + b"1," * 10_000_000 + b"1]}"),
    "json-digits": lambda: header(b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}', 1),
    "json-name": lambda: header(b'{"' + b"a" * 20_000_000 + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "npy-header": lambda: b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 24) + b"(" * (1 << 24),
    "headers-of-nothing": lambda: build(*(Member(f"a/{n}", b"") for n in range(20_000))),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("command", ["inspect", "scan", "verify"])
def test_RS_01_RS_02_RS_05_bombs(name: str, command: str, tmp_path: Path) -> None:
    """Little memory and time for everything that only looks."""
    path = tmp_path / ("made.safetensors" if name.startswith("json") else "made.pth")
    path.write_bytes(BOMBS[name]())
    child = narrow(command, path)
    assert len(child.stdout) < 1 << 20
    tidy(child, MORE.get(name, MEMORY))


@pytest.mark.parametrize("pieces", [1, 4])
def test_RS_04_more_in_a_file_than_memory(pieces: int, tmp_path: Path) -> None:
    """300 MB are converted in a process that may not have 200 of them."""
    size = 300_000_000 // pieces
    entries = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(pieces)
    }
    path = tmp_path / "in.safetensors"
    with path.open("wb") as file:
        file.write(header(json.dumps(entries).encode()))
        file.truncate(file.tell() + pieces * size)
    child = narrow("convert", path, tmp_path / "out.pth", DATA=180 << 20)
    assert (child.code, child.stderr) == (0, "") and (
        tmp_path / "out.pth"
    ).stat().st_size > 300_000_000
    assert child.memory < 150 << 20


def test_RS_04_no_memory_is_an_error_of_the_input(tmp_path: Path) -> None:
    """In one line, with an output that is not there."""
    path = tmp_path / "in.pth"
    path.write_bytes(pth(pickle.dumps(list(range(1 << 20, (1 << 20) + 3_000_000)), 2)))
    child = narrow("convert", path, tmp_path / "out.pth", DATA=60 << 20)
    assert (
        child.code in (3, 4) and "memory" in child.stderr and len(child.stderr.splitlines()) <= 2
    ), child
    assert os.listdir(tmp_path) == ["in.pth"]


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit the address space")
@pytest.mark.parametrize("mebibytes", [40, 64, 80, 96, 112])
def test_a_small_address_space(mebibytes: int, tmp_path: Path) -> None:
    """numpy's libraries crash where they cannot be loaded, or end the process."""
    shutil.copy(ROOT / "fixtures/torch-zip/dp_wrapped_cuda1.pth", tmp_path / "in.pth")
    limit = mebibytes << 20
    assert narrow("inspect", tmp_path / "in.pth", AS=limit).code == 0
    child = narrow(
        "convert", "--cast", "float16", tmp_path / "in.pth", tmp_path / "o.pth", AS=limit
    )
    assert child.code == 3 and child.stderr.startswith("error: needs more memory"), child
    assert f"{mebibytes} MiB" in child.stderr
    assert os.listdir(tmp_path) == ["in.pth"]


def test_RS_03_nothing_stays_open(tmp_path: Path) -> None:
    """After a thousand files that were refused, there are no more files, threads and temporaries
    than before."""
    cases = [
        (tmp_path / f"{number}.pth", data) for number, (_, data, _) in enumerate(CASES.values())
    ]
    for path, data in cases:
        path.write_bytes(data[: 3 * len(data) // 4])

    def attempts(times: int) -> None:
        for path, _ in cases * times:
            for work in (open_checkpoint, lambda path: convert(path, tmp_path / "out" / "x.pth")):
                try:
                    work(path)
                except CkptkitError:
                    continue

    before = set(os.listdir(tmp_path))
    attempts(1)
    counted = len(os.listdir("/proc/self/fd")), threading.active_count()
    attempts(1 + 1000 // len(cases) // 2)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == counted
    assert set(os.listdir(tmp_path)) == before


NAMES = {
    "long": ["a" * 1_000_000],
    "numbers": ["0." * 400_000, "layers." + "1" * 400_000],
    "prefixes": ["module." * 100_000 + "w", "module.a"],
    "nested": [f"{'a.' * 300_000}{n}.w" for n in range(2)],
    "signs": ["{" * 100_000, "}" * 100_000, "[" * 100_000, "*" * 100_000, "\\" * 100_000],
    "spaces": [" " * 500_000 + "x", "\t\n" * 200_000],
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(
    "command",
    ["inspect", "strip-module -o", "rename --sub ^(.*)\\.(.*)$=\\2 -o", "diff", "convert -o"],
)
def test_RS_06_names_that_are_hard_to_match(names: list[str], command: str, tmp_path: Path) -> None:
    """No expression of ours goes back and forth on them."""
    import torch

    path = tmp_path / "in.pth"
    torch.save(dict.fromkeys(names, torch.ones(1)), path)
    first, *rest = command.split()
    out = [tmp_path / "out.pth"] if "-o" in rest else [path] if first == "diff" else []
    child = narrow(first, *(each for each in rest if each != "-o"), path, *out, CPU=30)
    assert child.code in (0, 1, 2, 3), child.stderr[:500]


# What is not a file


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    paths = {name: Path(name) for name in ("/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem")}
    os.mkfifo(tmp_path / "fifo.pth")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket.pth"))
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    (tmp_path / "gone.pth").symlink_to("nowhere")
    return paths | {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize("command", ["inspect", "scan", "verify", "digest", "convert"])
def test_FS_01_what_is_no_file_is_refused_at_once(
    odd: dict[str, Path], command: str, tmp_path: Path
) -> None:
    for name, path in odd.items():
        if not os.path.lexists(path):
            continue
        out = [tmp_path / "out.pth"] if command == "convert" else []
        child = narrow(command, path, *out, CPU=10)
        empty = name in ("empty.pth", "/proc/self/mem")  # the latter says that it is
        assert child.code in ((0, 1) if empty and command in ("scan", "verify") else (3,)), (
            name,
            child,
        )
        assert not (tmp_path / "out.pth").exists()


def test_FS_01_each_kind_is_told(odd: dict[str, Path]) -> None:
    for name in ("/dev/zero", "fifo.pth", "loop.pth", "gone.pth", "socket.pth"):
        with pytest.raises(PathError):
            open_checkpoint(odd[name])


def test_FS_02_a_file_of_fifteen_terabytes_that_takes_no_room(tmp_path: Path) -> None:
    path, size = tmp_path / "in.safetensors", 15 << 40
    text = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(header(text))
        try:
            file.truncate(8 + len(text) + size)
        except OSError as error:
            pytest.skip(f"no such file here: {error.strerror}")
    child = narrow("inspect", path, CPU=10)
    tidy(child)
    assert "16.5 TB" in child.stdout and child.memory < 60 << 20
    child = narrow("convert", path, tmp_path / "out.pth", CPU=10)
    assert (
        child.code == 4 and "free" in child.stderr and os.listdir(tmp_path) == ["in.safetensors"]
    ), child


def test_SH_08_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    count = 700
    text = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    places = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        (tmp_path / name).write_bytes(header(text.replace('"a"', f'"t{number}"').encode(), 1))
        places[f"t{number}"] = name
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    assert narrow("inspect", tmp_path).code == 0
    child = narrow("inspect", tmp_path, NOFILE=256)
    assert child.code in (0, 3) and "Traceback" not in child.stderr
    if child.code:
        assert "ulimit -n" in child.stderr and len(child.stderr.splitlines()) == 2
