"""No command writes a file that `scan` reports, and the tricks that a list of harmless names does
not see."""

from __future__ import annotations

import gzip
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptkit.cli import main
from ckptkit.scanning.files import scan, scan_all
from ckptkit.scanning.verdict import FileVerdict, counts
from tests.conftest import ENVIRONMENT
from tests.formats.containers.zips import Member
from tests.scanning.hostile_pickles import (
    CALLS,
    CASES,
    DISGUISED,
    EVIL,
    PLAIN,
    STANDARD,
    UNCLEAR,
    Case,
    archive,
    beside_a_tensor,
    call,
    pickle4,
    raw,
    text,
)

# A pickle of hostile_pickles that is nothing but opcodes for one value can stand beside a tensor.
_BODIES = {
    name: data[2:-1] for name, data in CALLS.items() if data[:1] == b"\x80" and data[-1:] == b"."
}
REPORTED: dict[str, Case] = {
    **{name: case for name, case in CASES.items() if case.verdict in ("code", "unknown")},
    **{f"disguised-{name}": beside_a_tensor(body) for name, body in DISGUISED.items()},
    **{f"beside-{name}": beside_a_tensor(body) for name, body in _BODIES.items()},
    **{
        f"uncalled-{name}": beside_a_tensor(data[2:-1])
        for name, data in UNCLEAR.items()
        if name == "uncalled"
    },
}
FIX, ALL, DROP = "doctor --fix", "convert --all", ("--objects", "drop")


def commands(src: Path, folder: Path) -> Iterator[tuple[str, list[list[object]]]]:
    """Yield what may write a file: a name, and commands that follow each other."""
    out, whole, back = folder / "out.pth", folder / "all.safetensors", folder / "back.pth"
    yield "convert", [["convert", src, out]]
    yield "convert --objects drop", [["convert", src, out, *DROP]]
    yield ALL, [["convert", "--all", src, whole], ["convert", whole, back]]
    yield (
        f"{ALL} --objects drop",
        [["convert", "--all", *DROP, src, whole], ["convert", whole, back]],
    )
    yield (
        "sharded",
        [["convert", src, folder / "out", "--format", "sharded-bin", "--shard-size", "5GB"]],
    )
    yield "dcp", [["convert", src, folder / "out", "--format", "dcp"]]
    yield "add-module", [["add-module", src, out]]
    yield "add-module --in-place", [["add-module", src, "--in-place"]]
    yield "remap", [["remap", src, out, "--to", "cpu"]]
    yield "rename", [["rename", src, out, "--sub", "w=v"]]
    yield "extract", [["extract", src, out, "--key", "extra"]]
    yield "wrap", [["wrap", src, out, "--key", "state_dict"]]
    yield "join", [["join", src, src, out]]
    yield "resize", [["resize", src, out, "--keys", "*", "--rows", "3"]]
    yield "merge", [["merge", src, src, out, "--method", "linear"]]
    yield FIX, [["doctor", src, "--fix", out]]
    yield "recover", [["recover", src, out]]
    yield "batch", [["batch", "convert", "--into", folder / "out", "--format", "torch-zip", src]]


COMMANDS = [name for name, _ in commands(Path(), Path())]


# These try every file. Each other command tries a third, and its neighbours the other two.
IN_FULL = "convert", ALL, f"{ALL} --objects drop", FIX


def cases_of(command: str) -> list[tuple[str, Case]]:
    cases, at = [*REPORTED.items()], COMMANDS.index(command)
    return cases if command in IN_FULL else cases[at % 3 :: 3]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_writes_what_scan_reports(command: str, tmp_path: Path) -> None:
    for name, case in cases_of(command):
        folder = tmp_path / name
        folder.mkdir()
        src = folder / f"file{case.suffix}"
        src.write_bytes(case.data)
        assert counts(scan(src), strict=False), name
        codes = {invoke(line) for line in dict(commands(src, folder))[command]}
        assert codes <= {0, 1, 2, 3}, (name, codes)
        if src.read_bytes() == case.data:
            src.unlink()
        for found in scan_all([folder]):
            assert isinstance(found, FileVerdict) and not counts(found, strict=False), (
                name,
                found.path,
            )
        shutil.rmtree(folder)


def invoke(line: list[object]) -> int:
    """Run a command; its exit code."""
    return CliRunner().invoke(main, list(map(str, line))).exit_code


@pytest.mark.parametrize("name", DISGUISED)
def test_what_is_refused_and_what_drop_leaves(name: str, tmp_path: Path) -> None:
    src, out, whole = tmp_path / "src.pth", tmp_path / "out.pth", tmp_path / "all.safetensors"
    src.write_bytes(beside_a_tensor(DISGUISED[name]).data)
    assert invoke(["scan", src]) == 1
    for line in (["convert", src, out], ["convert", "--all", src, whole], ["add-module", src, out]):
        assert invoke([*line]) in (2, 3) and not out.exists() and not whole.exists()
    assert invoke(["convert", src, out, *DROP]) == 0
    assert loaded(out) == [1.0, 1.0]


FILES = {
    "bytes": raw(EVIL), "bytearray": call("builtins.bytearray", raw(EVIL)),
    "python2": b"T" + struct.pack("<I", len(EVIL)) + EVIL, "text": text(EVIL.decode("latin-1")),
    "zip": raw(archive(EVIL)), "gzip": raw(gzip.compress(EVIL)),
    "long": raw(archive(PLAIN, Member("archive/data/0", bytes(1 << 17)), Member("x.pkl", EVIL))),
    "list": b"](N" + raw(EVIL) + b"K\1e", "tuple": b"N" + raw(EVIL) + b"K\1\x87",
    "key": b"}" + raw(EVIL) + b"K\1s", "text-as-key": b"}" + text(EVIL.decode("latin-1")) + b"K\1s",
    "set": call("builtins.set", b"](" + raw(EVIL) + b"e"),
    "attribute": call("collections.Counter", b"}" + raw(EVIL) + b"K\1s"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("everything", [False, True])
def test_drop_leaves_out_byte_strings_that_are_files(
    name: str, everything: bool, tmp_path: Path
) -> None:
    """Whoever reads the checkpoint may load them; what stands beside them stays."""
    src, out, back = tmp_path / "src.pth", tmp_path / "out.pth", tmp_path / "back.pth"
    src.write_bytes(beside_a_tensor(FILES[name]).data)
    assert invoke(["scan", src]) == 1 and invoke(["convert", src, out]) == 3
    if everything:
        between = tmp_path / "all.safetensors"
        assert invoke(["convert", "--all", src, between]) == 3
        assert invoke(["convert", "--all", *DROP, src, between]) == 0
        done = CliRunner().invoke(main, ["convert", str(between), str(back)])
    else:
        done = CliRunner().invoke(main, ["convert", str(src), str(back), *DROP])
        assert "dropped 1 " in done.output and "extra" in done.output
    assert done.exit_code == 0 and not counts(scan(back), strict=False)
    found = torch.load(back, weights_only=True)
    assert found["w"].tolist() == [1.0, 1.0]
    kept = {"list": [None, None, 1], "tuple": (None, None, 1), "key": {}, "text-as-key": {}}
    assert found.get("extra") == kept.get(name)


def loaded(path: Path) -> list[float]:
    """Load what is left with torch's own weights_only."""
    found = torch.load(path, weights_only=True)
    assert list(found) in (["w"], ["w", "extra"])
    return list(found["w"].tolist())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="operator.call is new in Python 3.11")
@pytest.mark.parametrize("name", STANDARD)
def test_the_tricks_are_none_that_python_would_refuse(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.pkl").write_bytes(pickle4(STANDARD[name]))
    line = "import pickle; pickle.load(open('file.pkl', 'rb'))"
    subprocess.run(
        [sys.executable, "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=60
    )
    assert (tmp_path / "canary").exists()
