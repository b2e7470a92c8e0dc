"""Hook for notebook display, so that values need not know the views above them."""

from __future__ import annotations

from collections.abc import Callable

# Set by the package; None leaves notebooks with the repr.
render_html: Callable[[object], str] | None = None


def html(value: object) -> str | None:
    """Return `value` as HTML for a notebook, None if nothing renders it."""
    return None if render_html is None else render_html(value)
