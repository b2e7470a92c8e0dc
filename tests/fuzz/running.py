"""Runs targets over seeded inputs, and says what each input cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, Target

SECONDS = 20.0  # of a processor, for an input of at most 64 KiB; the slowest known takes a tenth
MEMORY = 512 << 20  # bytes more than before
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def inputs(name: str, seed: int, count: int | None = None) -> Iterator[bytes]:
    """The seeds of a target as they are, then mutations without end, or up to `count`."""
    target = TARGETS[name]
    seeds = target.seeds()
    yield from seeds[:count]
    number = len(seeds)
    while count is None or number < count:
        yield mutated(Random(f"{name}/{seed}/{number}"), seeds, target.tokens)
        number += 1


def attempt(target: Target, data: bytes) -> tuple[float, int]:
    """Seconds and bytes of memory that an input took. Raises what is wrong."""
    before = _reset_peak()
    start = time.process_time()
    target.run(data)
    seconds, nbytes = time.process_time() - start, _peak() - before
    assert seconds < SECONDS, f"took {seconds:.1f} s"
    assert nbytes < MEMORY, f"took {nbytes:,} bytes"
    return seconds, nbytes


def _reset_peak() -> int:
    """The bytes in use, from which the peak is counted; 0 where the system does not say."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return 0
    return _kilobytes("VmRSS")


def _peak() -> int:
    return _kilobytes("VmHWM") if _CLEAR.exists() else 0


def _kilobytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
