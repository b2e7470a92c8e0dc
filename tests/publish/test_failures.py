"""Rare failures of publishing: disks that fail at the very end, folders that cannot be synced."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptkit.core.bytesource import journal_path
from ckptkit.core.errors import OutputError
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.publish import publish as publishing
from ckptkit.publish.publish import publish

PLAN = Plan((OutputFile("", (b"new",)),))


def failing(monkeypatch: pytest.MonkeyPatch, number: int, folders: bool) -> None:
    """From now on fsync fails so, for folders or for files."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == folders:
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_name_that_may_not_be_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there, whole, and the error says so."""
    failing(monkeypatch, errno.EIO, folders=True)
    with pytest.raises(
        OutputError, match="is written, but may not survive a power failure: Input/output error"
    ) as found:
        publish(PLAN, tmp_path / "out.pt", durable=True)
    assert found.value.where == str(tmp_path / "out.pt")
    assert os.listdir(tmp_path) == ["out.pt"] and (tmp_path / "out.pt").read_bytes() == b"new"


def test_bytes_that_may_not_be_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.EIO, folders=False)
    with pytest.raises(OutputError, match="cannot be written: Input/output error"):
        publish(PLAN, tmp_path / "out.pt", durable=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EBADF])
def test_a_file_system_that_cannot_sync_folders(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, number, folders=True)
    publish(PLAN, tmp_path / "out.pt", durable=True)
    folder = Plan((OutputFile("a", (b"1",)), OutputFile("b", (b"2",))))
    publish(folder, tmp_path / "out", durable=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.pt"] and sorted(
        os.listdir(tmp_path / "out")
    ) == ["a", "b"]


def test_nothing_is_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        publishing.sync(str(tmp_path / "missing"))
    monkeypatch.setattr(publishing, "os", SimpleNamespace(name="nt"))
    publishing.sync(str(tmp_path / "missing"))


def test_the_journal_of_a_file_that_is_replaced_goes_with_it(tmp_path: Path) -> None:
    """The edit that it would undo is gone with the file; the journal of another file stays."""
    for name in ("out.pt", "other.pt"):
        (tmp_path / name).write_bytes(b"old")
        Path(journal_path(tmp_path / name)).write_bytes(b"ckptkit journal 1\n")
    publish(PLAN, tmp_path / "out.pt", force=True)
    assert (tmp_path / "out.pt").read_bytes() == b"new"
    assert not os.path.lexists(journal_path(tmp_path / "out.pt"))
    assert os.path.lexists(journal_path(tmp_path / "other.pt"))


def test_a_journal_that_somebody_else_began_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.pt"
    journal = Path(journal_path(path))
    path.write_bytes(b"old")
    journal.write_bytes(b"one")

    def begin(count: int, total: int) -> None:
        (tmp_path / "another").write_bytes(b"two")
        (tmp_path / "another").replace(journal)

    publish(PLAN, path, force=True, progress=begin)
    assert path.read_bytes() == b"new" and journal.read_bytes() == b"two"
