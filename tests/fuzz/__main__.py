"""See the package."""

from __future__ import annotations

import sys
import time
from pathlib import Path

FOUND = Path("fuzz-findings")


def main(arguments: list[str]) -> int:
    name, *rest = arguments or ["?"]
    if name in ("hunt", "holes", "load"):
        from tests.fuzz import hunt_commands

        return getattr(hunt_commands, name)(rest)
    if rest and rest[0] not in ("--once", "--seeded"):
        return _guided(name, rest)
    from tests.fuzz.targets import TARGETS

    if name not in TARGETS:
        print("hunts: hunt holes load\ntargets:", *TARGETS)
        return 2
    if not rest:
        return _guided(name, rest)
    if rest[0] == "--once":
        from tests.fuzz.running import attempt

        print(*attempt(TARGETS[name], Path(rest[1]).read_bytes()))
        return 0
    return _seeded(name, float(rest[1]), int(rest[2]) if rest[2:] else time.time_ns())


def _seeded(name: str, seconds: float, seed: int) -> int:
    """Try inputs for so long, and keep those that fail."""
    from tests.fuzz.running import attempt, inputs
    from tests.fuzz.targets import TARGETS

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
    print(
        f"{name}: {done:,} inputs, {failed} failed, at most {most[0]:.2f} s and {most[1] >> 20} MiB each",
        flush=True,
    )
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
