"""Disks that fill up, may not be written, or lose their power: small file systems of their own, for
root on Linux."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.api import convert
from ckptkit.core.errors import OutputError
from tests.conftest import COMMAND, ENVIRONMENT, Run
from tests.safety.injection import calls, injected, leftovers, needs_strace, snapshot
from tests.safety.works import OLD, WORKS, outcomes

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN; source: linux/fs/ext4/ext4.h
NO_LOG_FLUSH = 2  # what is only in memory is lost, as in a power cut


def permitted(*command: object) -> None:
    """Run what only root may, on Linux; skips the test where that fails."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} here")
    if done.returncode:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


class Disk:
    """A file system of a few MB at `place`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.place = folder / "disk"
        self.place.mkdir()
        self._options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"]
        if kind == "ext4":
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(8 << 20)
            permitted(
                "mkfs.ext4", "-q", "-F", "-b", "1024", "-m", "0", "-N", "512", "-J", "size=1", image
            )
            self._options = ["-o", "loop", str(image)]
        self.mount()

    def mount(self) -> None:
        permitted("mount", *self._options, self.place)

    def unmount(self) -> None:
        """Wait for processes that may still use the file system."""
        for _ in range(50):
            done = subprocess.run(
                ["umount", str(self.place)], capture_output=True, encoding="utf-8"
            )
            if not done.returncode:
                return
            time.sleep(0.1)
        raise AssertionError(done.stderr)

    def fill(self, spare: int = 0) -> None:
        """Leave about `spare` bytes free."""
        info = os.statvfs(self.place)
        with open(self.place / "ballast", "ab") as file:
            try:
                file.write(bytes(max(0, info.f_bavail * info.f_frsize - spare)))
                file.flush()
            except OSError:
                os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size)

    def power_cut(self) -> None:
        """Lose what has not been brought to the disk, and start again."""
        fd = os.open(self.place, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(fd)
        self.unmount()
        self.mount()


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(getattr(request, "param", "ext4"), tmp_path)
    yield made
    subprocess.run(["chattr", "-i", str(made.place)], capture_output=True)
    made.unmount()


each_disk = pytest.mark.parametrize("disk", ["tmpfs", "ext4"], indirect=True)


@each_disk
@pytest.mark.parametrize("options", [{}, {"shard_size": 60_000}], ids=["file", "folder"])
def test_DS_04_somebody_else_fills_the_disk_meanwhile(
    options: dict[str, int], disk: Disk, small: Path
) -> None:
    from ckptkit.core.options import Options

    out = disk.place / "out.pth"
    if not options:
        out.write_bytes(OLD)

    def meanwhile(written: int, of: int) -> None:
        disk.fill()

    with pytest.raises(
        OutputError, match=r"No space left on device: needs [0-9,]+ bytes, but [0-9,]+ are free"
    ):
        kind = "sharded-bin" if options else None
        made = Options(**options)
        convert(small, out, force=True, progress=meanwhile, options=made, format=kind)
    assert leftovers(disk.place) == []
    assert not out.exists() if options else out.read_bytes() == OLD


@each_disk
def test_DS_04_no_room_for_a_longer_file_in_place(disk: Disk, small: Path, run: Run) -> None:
    path = disk.place / "run.pth"
    path.write_bytes(small.read_bytes())
    disk.fill(spare=8192)
    for name in ("branches.", "g" * 100_000 + "."):
        before = path.read_bytes()
        done = run("add-module", "--prefix", name, "--in-place", path)
        room = len(name) < 10
        assert (done.code, path.read_bytes() == before) == ((0, False) if room else (4, True)), (
            done.stderr
        )
        assert leftovers(disk.place) == [] and sorted(os.listdir(disk.place))[-2:] in (
            ["ballast", "run.pth"],
            ["lost+found", "run.pth"],
        )


@pytest.mark.parametrize("how", ["read-only", "immutable"])
def test_DS_11_nothing_may_be_written(how: str, disk: Disk, small: Path, run: Run) -> None:
    path = disk.place / "run.pth"
    path.write_bytes(small.read_bytes())
    if how == "read-only":
        permitted("mount", "-o", "remount,ro", disk.place)
    else:
        permitted("chattr", "+i", disk.place)
    before = snapshot(disk.place)
    for arguments in (["run.pth", "out.pth"], ["run.pth", "--in-place"]):
        done = run("strip-module", *arguments, cwd=disk.place)
        assert done.code == 4 and "cannot be written: " in done.stderr
    assert run("inspect", path).code == 0
    assert snapshot(disk.place) == before


@pytest.mark.parametrize("name", ["durable", "replaced", "patched", "rewritten"])
def test_DS_03_power_cut_after_success(name: str, disk: Disk, small: Path, tmp_path: Path) -> None:
    """After success has been reported, the file is on the disk."""
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    folder = work.prepare(disk.place / "files", small)
    os.sync()
    done = subprocess.run(
        [*COMMAND, *work.arguments], cwd=folder, env=ENVIRONMENT, capture_output=True
    )
    assert done.returncode == 0
    disk.power_cut()
    assert expected.check(folder, killed=False) == "new"


@pytest.mark.parametrize("name", ["replaced", "patched"])
def test_DS_03_power_cut_at_every_step(name: str, disk: Disk, small: Path, tmp_path: Path) -> None:
    """The old file or the new one, wherever the power fails; a temporary may come back with it."""
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    seen = calls(work.arguments, work.prepare(disk.place / "watched", small))
    found = []
    for at, call in enumerate(
        each for each in seen if each.name in ("write", "fsync", "rename", "unlink")
    ):
        folder = work.prepare(disk.place / str(at), small)
        os.sync()
        injected(work.arguments, folder, call, "signal=KILL")
        disk.power_cut()
        found.append(expected.check(folder, killed=True))
    assert found[0] == "old" and ("new" in found) == (
        name == "patched"
    )  # a new name is on the disk at the very end
