"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

FOUND = Path("fuzz-findings")


def main(arguments: list[str]) -> int:
    name, *rest = arguments or ["?"]
    if name in COMMANDS:
        return COMMANDS[name](rest)
    if rest and rest[0] not in ("--once", "--seeded"):
        return _guided(name, rest)
    from tests.fuzz.targets import TARGETS, attempt

    if name not in TARGETS:
        print("hunts:", *COMMANDS, "\ntargets:", *TARGETS)
        return 2
    if not rest:
        return _guided(name, rest)
    if rest[0] == "--once":
        print(*attempt(TARGETS[name], Path(rest[1]).read_bytes()))
        return 0
    return _seeded(name, float(rest[1]), int(rest[2]) if rest[2:] else time.time_ns())


def _seeded(name: str, seconds: float, seed: int) -> int:
    """Try inputs for so long, and keep those that fail."""
    from tests.fuzz.targets import TARGETS, attempt, inputs

    done = failed = 0
    most = (0.0, 0)
    start = time.monotonic()
    for data in inputs(name, seed):
        try:
            used = attempt(TARGETS[name], data)
            most = max(most[0], used[0]), max(most[1], used[1])
        except Exception as error:
            failed += 1
            _keep(name, data, error)
        done += 1
        if time.monotonic() - start > seconds:
            break
    worst = f"at most {most[0]:.2f} s and {most[1] >> 20} MiB each"
    print(f"{name}: {done:,} inputs, {failed} failed, {worst}", flush=True)
    return 1 if failed else 0


def _keep(name: str, data: bytes, error: Exception) -> None:
    """The smallest input for each kind of failure, in a file named after where it was raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = f"{Path(at.tb_frame.f_code.co_filename).stem}-{at.tb_lineno}" if at else "nowhere"
    path = FOUND / f"{name}-{type(error).__name__}-{place}"
    FOUND.mkdir(exist_ok=True)
    if not path.exists() or path.stat().st_size > len(data):
        path.write_bytes(data)
        print(f"{path}: {str(error)[:300]}", flush=True)


def _guided(name: str, options: list[str]) -> int:
    """libFuzzer chooses the inputs by what they reach."""
    import atheris

    with atheris.instrument_imports(include=["ckptkit"]):
        from tests.fuzz.targets import TARGETS
    corpus = Path("fuzz-corpus", name)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(data)
    atheris.Setup([name, *options, str(corpus)], lambda data: TARGETS[name].run(bytes(data)))
    atheris.Fuzz()
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz hunt|holes")
    parser.add_argument("names", nargs="*", help="of holes; all by default")
    parser.add_argument(
        "--seconds", type=float, default=600, help="of processor time, for each hole"
    )
    parser.add_argument("--count", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--about", default="", help="only trees with a name that has this in it")
    parser.add_argument("--few", action="store_true", help="of torch, only what it imports itself")
    parser.add_argument("--writers", action="store_true", help="write files, and load the outputs")
    return parser.parse_args(arguments)


def hunt(arguments: list[str]) -> int:
    """Hunt as the options say, and print what is found: 1 if that is anything."""
    from tests.fuzz.hunting import Hunt
    from tests.fuzz.writers import Writers

    options = _options(arguments)
    kind = Writers if options.writers else Hunt
    made = kind(options.seed, options.about, not options.few)
    start = time.process_time()
    for finding in made.run(options.seconds, options.count):
        print(f"{time.process_time() - start:.0f} s {finding.text()}", flush=True)
    print(
        f"{made.summary()}; {made.tried / (time.process_time() - start):,.0f} a second of it",
        flush=True,
    )
    return 1 if made.kinds else 0


def holes(arguments: list[str]) -> int:
    """Put each hole back, and print how long it takes to find it: 1 if one is not found."""
    from tests.fuzz.holes import HOLES, found
    from tests.fuzz.hunting import Hunt

    options = _options(arguments)
    made = Hunt(options.seed, options.about, not options.few)
    missed = []
    for name in options.names or HOLES:
        start, before = time.process_time(), made.tried
        for finding, hidden in found(made, HOLES[name], options.seconds, options.count):
            took = f"{time.process_time() - start:.0f} s, {made.tried - before:,} files"
            print(f"{name if hidden else 'without a hole'}: {took}: {finding.text()}", flush=True)
            if hidden:
                break
        else:
            missed.append(name)
            print(f"{name}: not found in {made.tried - before:,} files", flush=True)
    return 1 if missed else 0


def load(arguments: list[str]) -> int:
    """Load files in the sandbox; print what each did, and what scan says: 1 if these differ."""
    from tests.fuzz.hunting import attempts

    bad = 0
    paths = list(map(Path, arguments))
    for path, (clean, outcome) in zip(paths, attempts(paths), strict=True):
        bad += clean and bool(outcome.events)
        told = {"file": path.stem, "clean": clean, "end": outcome.end, "events": outcome.events}
        print(json.dumps(told), flush=True)
    return 1 if bad else 0


COMMANDS = {"hunt": hunt, "holes": holes, "load": load}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
