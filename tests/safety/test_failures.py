"""The system fails at any call: the output is as it was, nothing is left, and one line says what
went wrong."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tests.conftest import Done
from tests.safety.injection import READS, Call
from tests.safety.works import Bench

FAILED = 4
UNREADABLE = 3
FILES = ("write", "fsync")


def said(done: Done) -> str:
    """Return the only line on standard error."""
    line, *hint = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and len(hint) <= 1 and "Traceback" not in line
    return line


@pytest.mark.parametrize("name", ["replaced", "patched"])
def test_DS_05_DS_06_an_error_of_any_call(name: str, small: Path, tmp_path: Path) -> None:
    """Only what comes when the new output has its name already leaves the new one, and says so
    too."""
    bench, found = Bench(name, small, tmp_path), []
    read_only = f"<{bench.watched}>", f"3<{bench.watched}/run.pth>"
    for call in bench.calls():
        if call.name == "close" and any(part in call.shown for part in read_only):
            continue
        code = "ENOSPC" if call.name == "fsync" else "EIO"
        done, state = bench.disturbed(call, f"error={code}", killed=call.name == "unlink")
        assert done.code == FAILED and os.strerror(getattr(errno, code)) in said(done), (call, done)
        found.append(state)
    assert found == sorted(found, key=["old", "new"].index)
    # removing the journal, bringing the folder to the disk, closing the file
    assert found.count("new") <= 4


@pytest.mark.parametrize("name", ["replaced", "patched"])
def test_DS_05_a_file_system_that_syncs_no_folders(name: str, small: Path, tmp_path: Path) -> None:
    """As on some network shares: the file is on the disk, and its name is up to them."""
    bench = Bench(name, small, tmp_path)
    for call in bench.calls(("fsync",)):
        done, state = bench.disturbed(call, "error=EINVAL")
        is_folder = f"<{bench.watched}>" in call.shown
        assert (done.code, state) == ((0, "new") if is_folder else (FAILED, "old"))


@pytest.mark.parametrize("name", ["new", "folder"])
@pytest.mark.parametrize(
    ("code", "says"), [("ENOSPC", "are free"), ("EDQUOT", "are free"), ("EFBIG", "too large")]
)
def test_DS_04_DS_10_no_room(name: str, code: str, says: str, small: Path, tmp_path: Path) -> None:
    bench = Bench(name, small, tmp_path)
    seen = [each for each in bench.calls(FILES) if f"<{bench.watched}>" not in each.shown]
    for call in (seen[0], seen[1], seen[-1]):
        done, state = bench.disturbed(call, f"error={code}")
        assert done.code == FAILED and says in said(done) and state == "old"


def test_DS_07_an_input_that_cannot_be_read(small: Path, tmp_path: Path) -> None:
    bench = Bench("durable", small, tmp_path)
    reads = bench.calls(READS)
    assert len({call.name for call in reads}) == 2
    for call in {*reads[:: len(reads) // 5], reads[-1]}:
        done, state = bench.disturbed(call, "error=EIO")
        assert (done.code, state) == (UNREADABLE, "old")
        assert "run.pth: cannot be read: Input/output error" in said(done)


@pytest.mark.parametrize(("name", "more"), [("new", []), ("patched", ["--verify"])])
def test_DS_08_a_write_that_is_said_to_be_shorter_than_it_was(
    name: str, more: list[str], small: Path, tmp_path: Path
) -> None:
    """The lost bytes are missed: by the length of a new file, by reading back what was changed in
    place."""
    bench = Bench(name, small, tmp_path, *more)
    found: list[Call] = []
    for call in bench.calls(FILES[:1]):
        if "journal" in call.shown:
            continue
        done, state = bench.disturbed(call, "retval=1")
        if state == "new":  # it was a byte of what breaks the file, before it is changed
            assert (name, done.code) == ("patched", 0) and not found
        else:
            assert done.code == FAILED
            assert re.search("instead of|differs from the plan", said(done))
            found.append(call)
    assert len(found) > 2


def test_DS_09_interrupted_calls_are_made_again(small: Path, tmp_path: Path) -> None:
    bench = Bench("durable", small, tmp_path)
    first = {call.name: call for call in reversed(bench.calls((*FILES, "pread64")))}
    assert set(first) == {*FILES, "pread64"}
    for call in first.values():
        done, state = bench.disturbed(call, "error=EINTR")
        assert (done.code, state) == (0, "new")


@pytest.mark.parametrize(
    ("name", "call", "ends"), [("new", "link", 0), ("replaced", "rename", FAILED)]
)
def test_DS_16_another_file_system(
    name: str, call: str, ends: int, small: Path, tmp_path: Path
) -> None:
    """The temporary is beside the output, so that a rename is one; where links are
    refused there is a way."""
    done, state = Bench(name, small, tmp_path).disturbed(Call(call, 1, ""), "error=EXDEV")
    assert (done.code, state) == (ends, "old" if ends else "new"), done


@pytest.mark.parametrize("name", ["new", "replaced", "durable", "patched"])
def test_DS_03_the_order_in_which_things_reach_the_disk(
    name: str, small: Path, tmp_path: Path
) -> None:
    """All of the bytes before the name, the folder after it, and nothing is written after its
    fsync."""
    bench = Bench(name, small, tmp_path)
    quiet = ("openat", "close", "chmod")
    seen = [each.shown for each in bench.calls() if each.name not in quiet]
    steps = [f"{shown.partition('(')[0]} {kind_of(shown, bench.watched)}" for shown in seen]
    steps = [step for at, step in enumerate(steps) if step != steps[at - 1] or not at]
    written = ["write temporary"]
    file = ["write file", "fsync file"]
    assert steps == {
        "new": [*written, "link temporary", "unlink temporary"],
        "replaced": [*written, "fsync temporary", "rename temporary", "fsync folder"],
        "durable": [*written, "fsync temporary", "link temporary", "unlink temporary", "fsync folder"],
        "patched": [
            *("fchmod temporary", "write temporary", "fsync temporary", "rename temporary", "fsync folder"),
            *(*file, "write file", "ftruncate file", "fsync file", *file, "unlink journal", "fsync folder"),
        ],
    }[name]  # fmt: skip


def kind_of(shown: str, folder: Path) -> str:
    """Return the kind of a call, by the last path that it shows but the input's."""
    if ".tmp" in shown:
        return "temporary"
    if "ckptkit-journal" in shown:
        return "journal"
    return "folder" if f"<{folder}>" in shown else "file"
