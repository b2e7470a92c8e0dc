"""Every command on small hostile files: within 1 GiB of addresses and 20 s of a processor, and
never by a bug.

One process imports the command line, and forks for each case, so that hundreds of cases cost
seconds. The files are those of `hostile_pickles`, one of each kind of bomb, and what
`CKPTKIT_REPRO` names (a folder), if it is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ckptkit.cli import COMMANDS
from tests.conftest import ENVIRONMENT
from tests.scanning.hostile_pickles import CASES

LARGEST = 1 << 20
SILENT = {
    "browse",
    "completion",
    "train",
    "formats",
    "env",
    "help",
    "rules",
}  # take no checkpoint, or a terminal
OUT = ["F", "O.pth"]
CALLS = {
    "inspect": ["F"], "strip-module": OUT, "add-module": OUT, "remap": [*OUT, "--to", "cpu"],
    "diff": ["F", "F", "--values"], "convert": ["F", "O.safetensors"], "rename": [*OUT, "--sub", "a=b"],
    "extract": [*OUT, "--key", "a"], "wrap": [*OUT, "--key", "a"], "average": ["F", *OUT], "merge": ["F", *OUT],
    "ema": OUT, "run": ["F", *OUT], "recover": OUT, "doctor": ["F"], "scan": ["F"], "stats": ["F"],
    "show": ["F", "w", "--stats"], "report": ["F", "-o", "O.html", "--values"], "verify": ["F", "--values"],
    "check": ["F", "--expect", "a exists"], "digest": ["F", "--all"], "batch": ["convert", "--format", "safetensors", "--into", "O", "F"],
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


def deflated(path: Path, **records: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(f"a/{name}", data)


def bombs(folder: Path) -> None:
    """One of each kind that took a machine's memory or time."""
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, folder / "expanded.pth")
    torch.save(
        {"w": torch.zeros(40_000).as_strided((1 << 14, 1 << 14), (1, 1))}, folder / "windows.pth"
    )
    torch.save({f"w{n}": torch.zeros(1).expand(1 << 30) for n in range(500)}, folder / "many.pth")
    tied = torch.zeros(100_000)
    torch.save({f"w{n}": tied[n:] for n in range(3_000)}, folder / "views.pth")
    deflated(
        folder / "dicts.pth",
        **{"data.pkl": b"\x80\x02]" + b"}a" * 30_000_000 + b".", "version": b"3\n"},
    )
    deflated(
        folder / "nops.pth",
        **{"data.pkl": b"\x80\x02" + b"N0" * 30_000_000 + b"N.", "version": b"3\n"},
    )
    deflated(
        folder / "scans.zip",
        **{f"{n}.pkl": b"\x80\x02" + b"N0" * 9_000_000 + b"N." for n in range(10)},
    )
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
    program = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None and program.stdout is not None
    with program:
        for number, path in enumerate(chosen):
            out = str(tmp_path / f"out{number}")
            words = [
                command,
                *(word.replace("O", out, 1) if word[0] == "O" else word for word in CALLS[command]),
            ]
            words = [str(path) if word == "F" else word for word in words]
            program.stdin.write(json.dumps(words) + "\n")
            program.stdin.flush()
            code, seconds, said = json.loads(program.stdout.readline())
            assert code in (0, 1, 2, 3, 4), (path.name, code, seconds, said)
            assert seconds < 20, (path.name, seconds)
        program.stdin.close()
