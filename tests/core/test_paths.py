"""The file systems of open files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ckptkit.core.bytesource import file_system


def test_the_kind_is_that_of_stat(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for path in (str(tmp_path / "a"), "/dev/shm", "/proc/self/status"):
        if not os.path.exists(path):
            continue
        said = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
        if said.returncode or not os.path.exists("/proc/self/mountinfo"):
            pytest.skip("this is not Linux")
        fd = os.open(path, os.O_RDONLY)
        try:
            kind = {"ext2/ext3": "ext4", "overlayfs": "overlay"}.get(said.stdout.strip())
            assert file_system(fd) == (kind or said.stdout.strip())
        finally:
            os.close(fd)


def test_what_is_not_open_is_not_known() -> None:
    assert file_system(1 << 20) == ""
    assert file_system(-1) == ""
