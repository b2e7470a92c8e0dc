"""The system fails at any call: the output is as it was, nothing is left, and one line says what
went wrong."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tests.conftest import Done
from tests.safety.injection import READS, Call, calls, injected, needs_strace
from tests.safety.works import WORKS, outcomes

FAILED = 4
UNREADABLE = 3
FILES = ("write", "fsync")


def said(done: Done) -> str:
    """Return the only line on standard error."""
    line, *hint = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and len(hint) <= 1 and "Traceback" not in line
    return line


def has(shown: str, parts: tuple[str, ...]) -> bool:
    return any(part in shown for part in parts)


@pytest.mark.parametrize("name", ["replaced", "patched"])
def test_DS_05_DS_06_an_error_of_any_call(name: str, small: Path, tmp_path: Path) -> None:
    """Only what comes when the new output has its name already leaves the new one, and says so
    too."""
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    found = []
    watched = work.prepare(tmp_path / "watched", small)
    read_only = f"<{watched}>", f"3<{watched}/run.pth>"
    seen = [
        each
        for each in calls(work.arguments, watched)
        if each.name != "close" or not has(each.shown, read_only)
    ]
    for at, call in enumerate(seen):
        folder = work.prepare(tmp_path / str(at), small)
        code = "ENOSPC" if call.name == "fsync" else "EIO"
        done = injected(work.arguments, folder, call, f"error={code}")
        assert done.code == FAILED and os.strerror(getattr(errno, code)) in said(done), (call, done)
        found.append(expected.check(folder, killed=call.name == "unlink"))
    assert found == sorted(found, key=["old", "new"].index)
    assert (
        found.count("new") <= 4
    )  # removing the journal, bringing the folder to the disk, closing the file


@pytest.mark.parametrize("name", ["replaced", "patched"])
def test_DS_05_a_file_system_that_syncs_no_folders(name: str, small: Path, tmp_path: Path) -> None:
    """As on some network shares: the file is on the disk, and its name is up to them."""
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    watched = work.prepare(tmp_path / "watched", small)
    for call in calls(work.arguments, watched, ("fsync",)):
        folder = work.prepare(tmp_path / str(call.number), small)
        done = injected(work.arguments, folder, call, "error=EINVAL")
        assert done.code == (0 if f"<{watched}>" in call.shown else FAILED)
        assert expected.check(folder, killed=False) == ("old" if done.code else "new")


@pytest.mark.parametrize("name", ["new", "folder"])
@pytest.mark.parametrize(
    ("code", "says"), [("ENOSPC", "are free"), ("EDQUOT", "are free"), ("EFBIG", "too large")]
)
def test_DS_04_DS_10_no_room(name: str, code: str, says: str, small: Path, tmp_path: Path) -> None:
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    watched = work.prepare(tmp_path / "watched", small)
    seen = [
        each for each in calls(work.arguments, watched, FILES) if f"<{watched}>" not in each.shown
    ]
    for at, call in enumerate((seen[0], seen[1], seen[-1])):
        folder = work.prepare(tmp_path / str(at), small)
        done = injected(work.arguments, folder, call, f"error={code}")
        assert done.code == FAILED and says in said(done)
        assert expected.check(folder, killed=False) == "old"


def test_DS_07_an_input_that_cannot_be_read(small: Path, tmp_path: Path) -> None:
    needs_strace()
    work = WORKS["durable"]
    expected = outcomes(work, tmp_path / "whole", small)
    reads = calls(work.arguments, work.prepare(tmp_path / "watched", small), READS)
    assert len({call.name for call in reads}) == 2
    for at, call in enumerate([*reads[:: len(reads) // 5], reads[-1]]):
        folder = work.prepare(tmp_path / str(at), small)
        done = injected(work.arguments, folder, call, "error=EIO")
        assert done.code == UNREADABLE and "run.pth: cannot be read: Input/output error" in said(
            done
        )
        assert expected.check(folder, killed=False) == "old"


def test_DS_08_a_write_that_is_said_to_be_shorter_than_it_was(small: Path, tmp_path: Path) -> None:
    """The lost bytes are missed: by the length of a new file, by reading back what was changed in
    place."""
    needs_strace()
    for name, more in (("new", []), ("patched", ["--verify"])):
        work = WORKS[name]
        arguments = [*work.arguments, *more]
        expected = outcomes(work, tmp_path / f"{name}-whole", small)
        seen = calls(arguments, work.prepare(tmp_path / f"{name}-watched", small), FILES[:1])
        found: list[Call] = []
        for at, call in enumerate(each for each in seen if "journal" not in each.shown):
            folder = work.prepare(tmp_path / f"{name}-{at}", small)
            done = injected(arguments, folder, call, "retval=1")
            state = expected.check(folder, killed=False)
            if state == "new":  # it was a byte of what breaks the file, before it is changed
                assert (name, done.code) == ("patched", 0) and not found
            else:
                assert done.code == FAILED and re.search(
                    "instead of|differs from the plan", said(done)
                )
                found.append(call)
        assert len(found) > 2


def test_DS_09_interrupted_calls_are_made_again(small: Path, tmp_path: Path) -> None:
    needs_strace()
    work = WORKS["durable"]
    expected = outcomes(work, tmp_path / "whole", small)
    seen = calls(work.arguments, work.prepare(tmp_path / "watched", small), (*FILES, "pread64"))
    first = {call.name: call for call in reversed(seen)}
    assert set(first) == {*FILES, "pread64"}
    for name, call in first.items():
        folder = work.prepare(tmp_path / name, small)
        assert injected(work.arguments, folder, call, "error=EINTR").code == 0
        assert expected.check(folder, killed=False) == "new"


@pytest.mark.parametrize(
    ("name", "call", "ends"), [("new", "link", 0), ("replaced", "rename", FAILED)]
)
def test_DS_16_another_file_system(
    name: str, call: str, ends: int, small: Path, tmp_path: Path
) -> None:
    """The temporary is beside the output, so that a rename is one; where links are
    refused there is a way."""
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    folder = work.prepare(tmp_path / "out", small)
    done = injected(work.arguments, folder, Call(call, 1, ""), "error=EXDEV")
    assert done.code == ends, done
    assert expected.check(folder, killed=False) == ("old" if ends else "new")


@pytest.mark.parametrize("name", ["new", "replaced", "durable", "patched"])
def test_DS_03_the_order_in_which_things_reach_the_disk(
    name: str, small: Path, tmp_path: Path
) -> None:
    """All of the bytes before the name, the folder after it, and nothing is written after its
    fsync."""
    needs_strace()
    work = WORKS[name]
    folder = work.prepare(tmp_path / "watched", small)
    seen = [
        each.shown
        for each in calls(work.arguments, folder)
        if each.name not in ("openat", "close", "chmod")
    ]
    steps = [f"{shown.partition('(')[0]} {kind_of(shown, folder)}" for shown in seen]
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
