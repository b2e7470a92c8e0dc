"""Checks that do not end well, for processes that import them by name."""

from __future__ import annotations

import os
import subprocess
import sys
from time import sleep
from typing import Any

from ckptkit.trainer.checking import GpuMachine


def hangs(on: GpuMachine) -> dict[str, Any]:
    """Start a process that would outlive this one, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (on.folder.parent / "child").write_text(str(child.pid))
    sleep(600)
    return {}


def breaks(on: GpuMachine) -> dict[str, Any]:
    os._exit(9)
