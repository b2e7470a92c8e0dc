"""Commands in one new process, one after the other, and what the process did meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ENVIRONMENT

SPY = """
import json, os, sys
there = {*sys.modules}
unpicklers = []
sys.addaudithook(lambda event, args: unpicklers.append(args) if event == "pickle.find_class" else None)
def leave(code):
    raise SystemExit(code)
os._exit = leave  # how the program ends: we have something to say first
def counted():
    if not os.path.exists("/proc/self/io"):
        return 0, 0
    with open("/proc/self/io") as file:
        facts = dict(line.split(": ") for line in file.read().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])
from ckptkit.cli import main
def report(words):
    sys.argv[1:] = words
    unpicklers.clear()
    read, written = counted()
    try:
        code = main()
    except SystemExit as done:
        code = done.code
    more_read, more_written = counted()
    modules = sorted({*sys.modules} - there)
    return code or 0, modules, len(unpicklers), more_read - read, more_written - written
print(json.dumps([report(words) for words in json.load(sys.stdin)]), file=sys.stderr)
"""


class Spied(NamedTuple):
    """What a command did."""

    code: int
    modules: list[str]  # imported by this command or an earlier one
    unpicklers: int  # how often pickle looked for a class
    read: int  # bytes that the kernel counted; 0 if it counts none
    written: int


def spied(folder: Path, *commands: list[str | Path]) -> list[Spied]:
    """Run commands in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", SPY],
        input=json.dumps([list(map(str, command)) for command in commands]),
        capture_output=True,
        encoding="utf-8",
        cwd=folder,
        env={**ENVIRONMENT, "TMPDIR": str(folder)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [Spied(*each) for each in json.loads(done.stderr.splitlines()[-1])]
