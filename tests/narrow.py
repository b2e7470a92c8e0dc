"""Commands in processes with little memory, little time, few files."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests.conftest import COMMAND, ENVIRONMENT

SECONDS = 60  # of a processor: far more than any takes


class Child(NamedTuple):
    """The result of a command with limited memory."""

    code: int
    stdout: str
    stderr: str
    memory: int  # bytes


# Starts the command from a small process: one that is started by a large one counts as large as
# that.
LAUNCHER = """
import json, os, resource, subprocess, sys
for name, value in json.loads(sys.argv[1]).items():
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (value, value))
process = subprocess.Popen(sys.argv[3:])
_, status, usage = os.wait4(process.pid, 0)
open(sys.argv[2], "w").write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss << 10}")
"""


def narrow(*arguments: object, **limits: int) -> Child:
    """A command with limits; they are of `resource`, by their last words."""
    everything = json.dumps({"CPU": SECONDS, "CORE": 0, **limits})
    with tempfile.NamedTemporaryFile("r") as report:
        launched = (*COMMAND, *map(str, arguments))
        command = [sys.executable, "-c", LAUNCHER, everything, report.name, *launched]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        code, memory = map(int, report.read().split())
    return Child(code, done.stdout, done.stderr, memory)


def deflated(path: Path, *pickles: bytes, **records: bytes) -> Path:
    """A zip file whose bytes take much less room than what they are inflated to."""
    numbered = {f"{n}.pkl" if n else "data.pkl": data for n, data in enumerate(pickles)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**numbered, **records}.items():
            archive.writestr(f"a/{name}", data)
    return path
