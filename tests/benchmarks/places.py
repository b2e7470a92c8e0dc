"""Where files are moved: file systems, each in a file that is mounted, and beside busy cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SPARE = 4.0  # GiB beyond the files: the log, and what removed files hold for some seconds


class Place(NamedTuple):
    """A file system that is made for the measuring, or the folder itself; and who else runs."""

    name: str
    make: tuple[str, ...] = ()  # the command that makes the file system, () for the folder itself
    busy: int = 0  # processes that count


AT_HAND = Place("")
PLACES = (
    Place("ext4", ("mkfs.ext4", "-q", "-F", "-m", "0")),
    Place("xfs", ("mkfs.xfs", "-q", "-f")),
    Place("btrfs", ("mkfs.btrfs", "-q", "-f")),
    Place("one core idle", busy=max(1, (os.cpu_count() or 1) - 1)),
)


class UnavailableError(Exception):
    """A place that cannot be had here: why."""


@contextmanager
def prepared(place: Place, folder: Path, gib: float) -> Iterator[Path]:
    """Give the folder of a place in which there is room for so many GiB; afterwards it is gone.

    Raises UnavailableError where this machine cannot make the file system, or may not mount it.
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(place.busy)]
    try:
        if place.make:
            with _mounted(place.make, folder, gib + SPARE) as mounted:
                yield mounted
        else:
            yield folder
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def _mounted(make: tuple[str, ...], folder: Path, gib: float) -> Iterator[Path]:
    there = os.statvfs(folder)
    if there.f_bavail * there.f_frsize < gib * 2**30:
        raise UnavailableError(f"it needs {gib:g} GiB in {folder.parent}")
    image, disk = folder / "image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(int(gib * 2**30))
    disk.mkdir()
    try:
        _permitted(*make, str(image))
        _permitted("mount", "-o", "loop", str(image), str(disk))
        try:
            files = disk / "files"
            files.mkdir()
            yield files
        finally:
            _unmount(disk)
    finally:
        image.unlink()
        disk.rmdir()


def _permitted(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        raise UnavailableError(f"there is no {command[0]} here") from None
    if done.returncode:
        raise UnavailableError(f"{command[0]} is not permitted here: {done.stderr.strip()}")


def _unmount(disk: Path) -> None:
    """Unmount, when the last process that uses the disk has let go of it."""
    for _ in range(50):
        done = subprocess.run(["umount", str(disk)], capture_output=True, encoding="utf-8")
        if not done.returncode:
            return
        time.sleep(0.1)
    raise UnavailableError(done.stderr)
