"""Histograms as text: one row of characters, or one bar per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(counts: Sequence[int]) -> str:
    """Return one block character per count, scaled to the largest; '' if they cannot be encoded."""
    if not counts or not _are_shown():
        return ""
    largest = max(counts) or 1
    return "".join(_EIGHTHS[-(-8 * count // largest)] for count in counts)


def horizontal_bars(counts: Sequence[int], width: int) -> Iterator[str]:
    """Yield a horizontal bar of at most `width` characters for each count."""
    largest = max(counts, default=0) or 1
    shown = _are_shown()
    for count in counts:
        whole, eighths = divmod(8 * width * count // largest, 8)
        yield (
            "█" * whole + "▏▎▍▌▋▊▉"[eighths - 1 : eighths] if shown else "#" * max(whole, count > 0)
        )


def _are_shown() -> bool:
    try:
        _EIGHTHS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
