"""The commands of hunts: each returns 1 if something was found that should not be there."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tests.fuzz.holes import HOLES, found
from tests.fuzz.hunting import Hunt, attempts
from tests.fuzz.writers import Writers


def _options(command: str, *names: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz {command}")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--about", default="", help="only trees with a name that has this in it")
    parser.add_argument(
        "--few", action="store_true", help="only classes of modules of torch that are imported"
    )
    for name in names:
        parser.add_argument(name, nargs="*")
    return parser


def hunt(arguments: list[str]) -> int:
    """Hunt as the options say, and print what is found."""
    parser = _options("hunt")
    parser.add_argument("--count", type=float, default=float("inf"))
    parser.add_argument(
        "--writers", action="store_true", help="convert files, and load what is written"
    )
    options = parser.parse_args(arguments)
    kind = Writers if options.writers else Hunt
    made = kind(options.seed, options.about, not options.few)
    start = time.monotonic()
    for finding in made.run(options.seconds, options.count):
        print(f"{time.monotonic() - start:.0f} s {finding.text()}", flush=True)
    print(f"{made.summary()}; {made.tried / (time.monotonic() - start):,.0f} a second", flush=True)
    return 1 if made.kinds else 0


def holes(arguments: list[str]) -> int:
    """Put each hole back, and print how long it takes to find it."""
    options = _options("holes", "names").parse_args(arguments)
    made = Hunt(options.seed, options.about, not options.few)
    missed = []
    for name in options.names or HOLES:
        start, before = time.monotonic(), made.tried
        for finding, hidden in found(made, HOLES[name], options.seconds):
            took = f"{time.monotonic() - start:.0f} s, {made.tried - before:,} files"
            if hidden:
                print(f"{name}: {took}: {finding.text()}", flush=True)
                break
            print(f"without a hole: {finding.text()}", flush=True)
        else:
            missed.append(name)
            print(f"{name}: not found", flush=True)
    return 1 if missed else 0


def load(arguments: list[str]) -> int:
    """Load files in the sandbox; print a line of JSON for each: what it did, and what scan says."""
    bad = 0
    paths = list(map(Path, arguments))
    for path, (clean, outcome) in zip(paths, attempts(paths), strict=True):
        bad += clean and bool(outcome.events)
        print(
            json.dumps(
                {"file": path.stem, "clean": clean, "end": outcome.end, "events": outcome.events}
            ),
            flush=True,
        )
    return 1 if bad else 0
