"""Guard imports of NumPy and torch, which crash in limited address spaces (``ulimit -v``)."""

from __future__ import annotations

import os
import sys

# Measured bytes that importing each module takes with one thread, plus working memory.
NEEDED = {"numpy": 96 << 20, "torch": 704 << 20}


class _Guard:
    """Raise MemoryError if the remaining address space is too small for an import."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in NEEDED and self.limit - _used() < NEEDED[name]:
            raise MemoryError


def guard(limit: int) -> None:
    """Make imports fail if the limit of the address space is too small for the module."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each OpenBLAS thread takes 40 MiB
    sys.meta_path.insert(0, _Guard(limit))


def _used() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0
