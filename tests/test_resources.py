"""The cost of a file: commands in processes with little memory, little time, few files.

The work for a small file is bounded by its size: elements, opcodes, inflated bytes, other files.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import ckptkit
import ckptkit.api
import ckptkit.formats
from ckptkit.analysis.digests import digest
from ckptkit.api import convert, open_checkpoint
from ckptkit.cli import COMMANDS
from ckptkit.compute import tallies
from ckptkit.compute.arranged import once, place, repeated
from ckptkit.compute.compare import compare
from ckptkit.compute.tallies import Tally, nonfinite, numbers, parts
from ckptkit.core.errors import CkptkitError, LimitError, OutputError, PathError, TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.run import batch
from ckptkit.scanning.files import scan
from tests.conftest import COMMAND, ENVIRONMENT, ROOT, Run
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import archive, pickle_of
from tests.narrow import Child, deflated, narrow
from tests.scanning.hostile_pickles import CASES

pytest.importorskip("resource", reason="this system limits no processes")

MEMORY = 300 << 20  # bytes in use at once, of any hostile file
MORE = {  # but of these, whose limits allow as much
    # A record is inflated as a whole: record_bytes, and once more while that grows.
    "zeros-as-pickle": 560 << 20,
    "memo": 420 << 20,  # memo_entries, of 80 bytes each when they are traced
}


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


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for number, name in enumerate(BOMBS)
        for command in ("inspect", ("scan", "verify")[number % 2])
    ],
)
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
    assert (child.code, child.stderr) == (0, "")
    assert (tmp_path / "out.pth").stat().st_size > 300_000_000
    assert child.memory < 150 << 20


def test_RS_04_no_memory_is_an_error_of_the_input(tmp_path: Path) -> None:
    """In one line, with an output that is not there."""
    path = tmp_path / "in.pth"
    path.write_bytes(pth(pickle.dumps(list(range(1 << 20, (1 << 20) + 3_000_000)), 2)))
    child = narrow("convert", path, tmp_path / "out.pth", DATA=60 << 20)
    assert child.code in (3, 4), child
    assert "memory" in child.stderr and len(child.stderr.splitlines()) <= 2
    assert os.listdir(tmp_path) == ["in.pth"]


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit the address space")
@pytest.mark.parametrize("mebibytes", [40, 64, 80, 96, 112])
def test_a_small_address_space(mebibytes: int, tmp_path: Path) -> None:
    """numpy's libraries crash where they cannot be loaded, or end the process."""
    shutil.copy(ROOT / "fixtures/torch-zip/dp_wrapped_cuda1.pth", tmp_path / "in.pth")
    limit = mebibytes << 20
    assert narrow("inspect", tmp_path / "in.pth", AS=limit).code == 0
    words = ("convert", "--cast", "float16", tmp_path / "in.pth", tmp_path / "o.pth")
    child = narrow(*words, AS=limit)
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


MATCHING = ("diff", "strip-module -o", r"rename --sub ^(.*)\.(.*)$=\2 -o", "convert -o")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        pytest.param(command, names, id=f"{command.split()[0]}-{name}")
        for number, (name, names) in enumerate(NAMES.items())
        for command in ("inspect", MATCHING[number % 4])
    ],
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
        expected = (0, 1) if empty and command in ("scan", "verify") else (3,)
        assert child.code in expected, (name, child)
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
    assert child.code == 4 and "free" in child.stderr, child
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_SH_08_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    count = 700
    text = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    places = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        (tmp_path / name).write_bytes(header(text.replace('"a"', f'"t{number}"').encode(), 1))
        places[f"t{number}"] = name
    index = json.dumps({"metadata": {}, "weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert narrow("inspect", tmp_path).code == 0
    child = narrow("inspect", tmp_path, NOFILE=256)
    assert child.code in (0, 3) and "Traceback" not in child.stderr
    if child.code:
        assert "ulimit -n" in child.stderr and len(child.stderr.splitlines()) == 2


# Every command on small hostile files: one process imports the command line, and forks for each
# case, within 1 GiB of addresses and 20 s of a processor. The files are those of `hostile_pickles`,
# one of each kind of bomb, and what `CKPTKIT_REPRO` names (a folder), if it is set.

LARGEST = 1 << 20
# These take no checkpoint, or a terminal.
SILENT = {"browse", "completion", "train", "formats", "env", "help", "rules"}
OUT = ["F", "O.pth"]
CALLS = {
    "inspect": ["F"], "strip-module": OUT, "add-module": OUT, "remap": [*OUT, "--to", "cpu"],
    "diff": ["F", "F", "--values"], "convert": ["F", "O.safetensors"], "rename": [*OUT, "--sub", "a=b"],
    "extract": [*OUT, "--key", "a"], "wrap": [*OUT, "--key", "a"], "average": ["F", *OUT], "join": ["F", *OUT], "resize": [*OUT, "--keys", "a", "--rows", "2"], "merge": ["F", *OUT, "--method", "linear"],
    "ema": OUT, "run": ["F", *OUT], "recover": OUT, "doctor": ["F"], "scan": ["F"], "stats": ["F"],
    "show": ["F", "w", "--stats"], "report": ["F", "-o", "O.html", "--values"], "verify": ["F", "--values"],
    "check": ["F", "--expect", "a exists"], "digest": ["F", "--all"], "delta": ["make", "F", "F", "O"], "lora": ["merge", "F", "F", "O"], "batch": ["convert", "--format", "safetensors", "--into", "O", "F"],
}  # fmt: skip

DRIVER = """
import json, os, resource, sys, time
from ckptkit.cli import main
import ckptkit.api, ckptkit.formats, click
null = os.open(os.devnull, os.O_RDWR)
for line in sys.stdin:
    words = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(null, 0); os.dup2(null, 1); os.dup2(write, 2)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        try:
            main(words)
        except SystemExit as done:
            os._exit(done.code or 0)
        os._exit(70)
    os.close(write)
    said = b""
    while piece := os.read(read, 65536):
        said = (said + piece)[-2000:]
    os.close(read)
    _, status, used = os.wait4(child, 0)
    code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    print(json.dumps([code, seconds, said.decode("utf-8", "replace")]))
    sys.stdout.flush()
"""


def bombs(folder: Path) -> None:
    """One of each kind that took a machine's memory or time."""
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, folder / "expanded.pth")
    windows = torch.zeros(40_000).as_strided((1 << 14, 1 << 14), (1, 1))
    torch.save({"w": windows}, folder / "windows.pth")
    torch.save({f"w{n}": torch.zeros(1).expand(1 << 30) for n in range(500)}, folder / "many.pth")
    tied = torch.zeros(100_000)
    torch.save({f"w{n}": tied[n:] for n in range(3_000)}, folder / "views.pth")
    deflated(folder / "dicts.pth", b"\x80\x02]" + b"}a" * 30_000_000 + b".", version=b"3\n")
    deflated(folder / "nops.pth", b"\x80\x02" + b"N0" * 30_000_000 + b"N.", version=b"3\n")
    deflated(folder / "scans.zip", *[b"\x80\x02" + b"N0" * 9_000_000 + b"N."] * 10)
    (folder / "deep.json.safetensors").write_bytes(
        (900_000).to_bytes(8, "little") + b"{" + b'"a":{' * 180_000
    )
    laughs = "\n".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20))
    (folder / "laughs.yaml").write_text(
        f"a0: &a0 [x]\n{laughs}\nabout: *a19\nsteps: [{{weights: true}}]\n"
    )
    (folder / "base60.yaml").write_text("about: 1" + ":59" * 60_000 + "\n")
    (folder / "lists.yaml").write_text("steps: [" + "[a]," * 40_000 + "]\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("hostile")
    for name, case in CASES.items():
        (folder / f"{name}{case.suffix}").write_bytes(case.data)
    bombs(folder)
    found = sorted(folder.iterdir())
    if more := os.environ.get("CKPTKIT_REPRO"):
        found += sorted(path for path in Path(more).rglob("*") if path.is_file())
    return [path for path in found if path.stat().st_size < LARGEST]


def test_every_command_is_tried() -> None:
    assert {*COMMANDS} - SILENT == CALLS.keys()


@pytest.mark.parametrize("command", CALLS)
def test_a_gigabyte_and_twenty_seconds(command: str, files: list[Path], tmp_path: Path) -> None:
    chosen = [path for path in files if command != "run" or path.suffix == ".yaml"]
    if command not in ("inspect", "convert", "scan", "run"):  # each file with each third command
        chosen = chosen[[*CALLS].index(command) % 3 :: 3]
    program = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin is not None and program.stdout is not None
    with program:
        for number, path in enumerate(chosen):
            out = str(tmp_path / f"out{number}")
            words = [
                word.replace("O", out, 1) if word[0] == "O" else word for word in CALLS[command]
            ]
            words = [command, *(str(path) if word == "F" else word for word in words)]
            program.stdin.write(json.dumps(words) + "\n")
            program.stdin.flush()
            code, seconds, said = json.loads(program.stdout.readline())
            assert code in (0, 1, 2, 3, 4), (path.name, code, seconds, said)
            assert seconds < 20, (path.name, seconds)
        program.stdin.close()


def opened(folder: Path, tensor: torch.Tensor, name: str = "in.pth") -> Tensor:
    torch.save({"w": tensor}, folder / name)
    return ckptkit.open(folder / name).weights["w"]


# Elements


EXPANDED = [
    torch.tensor([1.0, math.nan, 0.0, 5.0]).reshape(1, 4).expand(3, 4),
    torch.tensor([[1.0], [math.inf], [-2.5]]).expand(3, 5),
    torch.tensor(2).expand(2, 3, 4),
    torch.arange(6).reshape(2, 1, 3).expand(2, 7, 3),
]


@pytest.mark.parametrize("tensor", EXPANDED)
def test_repeated_elements_count_as_often_as_they_are_there(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    ours = opened(tmp_path, tensor)
    assert once(ours, repeated(ours)).numel < ours.numel
    tally = Tally()
    for part in parts(ours):
        tally.add(tallies.tally(part))
    finite = tensor[torch.isfinite(tensor)].double()
    assert tally.count == tensor.numel()
    assert (tally.nan, tally.infinite) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))
    assert tally.zeros == int((tensor == 0).sum())
    assert tally.std == pytest.approx(finite.std().item())
    assert tally.norm == pytest.approx(finite.norm().item())
    assert sum(tally.histogram.counts) == len(finite)
    assert torch.equal(torch.tensor(numbers(ours).copy()).nan_to_num(), tensor.nan_to_num())
    if tensor.is_floating_point():
        assert nonfinite(ours) == (tally.nan, tally.infinite)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_differences_of_expanded_tensors(tolerance: float | None, tmp_path: Path) -> None:
    a, b = torch.arange(6.0).reshape(2, 1, 3), torch.arange(6.0).reshape(2, 1, 3)
    b[1, 0, 1] += 1
    wide = [each.expand(2, 4, 3) for each in (a, b)]
    ours = [opened(tmp_path, each, f"{n}.pth") for n, each in enumerate(wide)]
    found = compare(*ours, atol=tolerance)
    differing = (wide[0] != wide[1]).flatten()
    assert found is not None
    assert (found.count, found.first) == (int(differing.sum()), int(differing.nonzero()[0]))
    plain = [opened(tmp_path, each.contiguous(), f"{n}.pth") for n, each in enumerate(wide)]
    assert found == compare(*plain, atol=tolerance)


def test_places_in_expanded_tensors() -> None:
    full = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    corner = full[:, :1, :, :1].flatten().tolist()
    assert [place(n, (2, 3, 4, 5), (1, 3)) for n in range(len(corner))] == corner


def test_digests_are_of_every_element_or_none(tmp_path: Path) -> None:
    wide = torch.tensor([[1.0], [2.0]]).expand(2, 50)
    torch.save({"w": wide}, tmp_path / "wide.pth")
    torch.save({"w": wide.contiguous()}, tmp_path / "plain.pth")
    assert digest(tmp_path / "wide.pth").ids == digest(tmp_path / "plain.pth").ids
    many = {f"{n}": torch.zeros(1).expand(1 << 22) for n in range(9)}  # 16 MiB each
    torch.save(many, tmp_path / "many.pth")
    found = digest(tmp_path / "many.pth")
    assert len(found.ids) == 4
    assert all("times the storage" in why for why in found.without.values())


def test_windows_that_overlap_are_not_read_without_end(tmp_path: Path) -> None:
    ours = opened(tmp_path, torch.zeros(20_000).as_strided((10_000, 10_000), (1, 1)))
    for read in (lambda: list(parts(ours)), lambda: nonfinite(ours), lambda: compare(ours, ours)):
        with pytest.raises(TensorError, match="EXPANSION"):
            read()


# Inflated bytes, opcodes


def test_a_pickle_that_is_inflated_to_millions_of_values(tmp_path: Path, run: Run) -> None:
    path = deflated(tmp_path / "a.pth", b"\x80\x02]" + b"}a" * 20_000_000 + b".")
    started = time.monotonic()
    done = run("inspect", path)
    assert done.code == 3
    assert "inflated_free" in done.stderr
    assert time.monotonic() - started < 20


def test_the_pickles_of_a_file_share_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = deflated(tmp_path / "a.zip", *[b"\x80\x02" + b"N0" * 10_000 + b"N."] * 5)
    assert scan(path).verdict == "harmless"
    from tests.core.test_limits import limited

    limited(monkeypatch, trace_bytes=50_000)
    found = scan(path)
    assert found.verdict == "unknown"
    errors = [each.found.trace.error for each in found.pickles]
    assert "trace_bytes" in str((errors, found.remarks))


# Files beside


@pytest.mark.parametrize("reading", [True, False])
def test_a_manifest_that_is_none(reading: bool, tmp_path: Path) -> None:
    path = tmp_path / batch.MANIFEST
    for said in ("manifest", "not a regular file"):
        if said == "manifest":
            path.touch()
            os.truncate(path, 3 << 30)
        else:
            path.unlink()
            os.mkfifo(path)
        found = batch.manifest(str(tmp_path), reading=reading)
        with pytest.raises(OutputError, match=said), found:
            pass


# Two at once

EDITING = """
import sys
from ckptkit.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.edits.keys import add_prefix, strip_prefix
steps = [lambda ck: add_prefix(ck, "b."), lambda ck: strip_prefix(ck, "b.")]
edits = 0
for number in range(int(sys.argv[2])):
    try:
        convert(sys.argv[1], None, steps[number % 2], in_place=True)
        edits += 1
    except CkptkitError as error:
        assert error.exit_code in (2, 3, 4), error
        assert "again" in str(error.hint) or "key" in str(error) or "prefix" in str(error), (str(error), error.hint)
print(edits)
"""


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A file of 300 tensors."""
    path = tmp_path / "run.pth"
    torch.save({f"layer.{n}.weight": torch.full((50,), float(n)) for n in range(300)}, path)
    return path


def test_two_edit_and_others_read(edited: Path) -> None:
    """Whole answers, or that it is being changed: no bug, no advice to download it again."""
    program = [sys.executable, "-c", EDITING, str(edited), "60"]
    editors = [
        subprocess.Popen(program, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "ab"
    ]
    said = set()
    while any(each.poll() is None for each in editors):
        for words in (("scan",), ("inspect", "--json"), ("verify",), ("digest",), ("stats",)):
            done = subprocess.run(
                [*COMMAND, *words, str(edited)], env=ENVIRONMENT, capture_output=True, text=True
            )
            said.add(done.returncode)
            if done.returncode:
                assert done.returncode == 3, (words, done)
                assert re.search("chang|edited in place", done.stderr + done.stdout), (words, done)
                assert "download" not in done.stderr + done.stdout
    assert said <= {0, 3}
    ended = [each.communicate(timeout=60) for each in editors]
    assert [each.returncode for each in editors] == [0, 0], ended
    assert sum(int(out) for out, _ in ended) > 2  # edits; the others were refused
    with closing(ckptkit.open(edited)) as left:
        assert len(left.weights) == 300


def test_a_huge_pickle_is_refused_by_recover_too(tmp_path: Path) -> None:
    path = deflated(tmp_path / "a.pth", b"\x80\x02]" + b"Na" * 10_000_000 + b".")
    with pytest.raises(LimitError, match="inflated"):
        ckptkit.recover(path)


def test_a_pickle_that_deflates_well_is_read(tmp_path: Path) -> None:
    path = deflated(tmp_path / "a.pth", pickle.dumps({"epochs": [0] * 100_000}, 2), b"")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/version", "3\n")
    assert len(ckptkit.open(path).root["epochs"]) == 100_000
