"""Keep the memory of one block for the next: new pages cost as much as what is computed in them."""

from __future__ import annotations

from functools import cache

KEPT = 16 << 20  # bytes


@cache
def keep_memory() -> None:
    """Let the C library keep up to some `KEPT` bytes of freed memory, from now on.

    glibc gives blocks of 128 KiB and more back to the system, unless larger ones have been freed
    before (mallopt(3), "dynamic mmap threshold"); other libraries keep them anyway. The pages of
    the one that is freed here are never touched.
    """
    bytes(KEPT)
