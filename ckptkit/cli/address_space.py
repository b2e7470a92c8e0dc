"""Guard imports of NumPy and torch, which crash in limited address spaces (``ulimit -v``)."""

from __future__ import annotations

import os
import sys

# Maps each module to the number of bytes of address space that it requires: the bytes measured
# during an import with one thread, plus working memory.
NEEDED = {"numpy": 96 << 20, "torch": 704 << 20}


class _Guard:
    """An import hook that raises MemoryError if too little address space is left for a module."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in NEEDED and self.limit - _used() < NEEDED[name]:
            raise MemoryError


def guard(limit: int) -> None:
    """Make an import of NumPy or torch raise MemoryError if too little address space is left.

    `limit` is the size of the address space in bytes.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each OpenBLAS thread takes 40 MiB
    sys.meta_path.insert(0, _Guard(limit))


def _used() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0
