"""A progress bar on standard error: on a terminal, after one second; with --progress anywhere."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli.render import is_terminal

if TYPE_CHECKING:
    from tqdm import tqdm

PATIENCE = 1.0  # seconds


class Progress:
    """``with Progress("copying", total) as progress: progress(nbytes)`` after each part.

    A total that is only known later may be passed with the parts.
    """

    def __init__(self, title: str, total: int | None = None, *, shown: bool = True) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.started = monotonic()
        self.asked = _asked()
        self.shown = shown and (self.asked or is_terminal(sys.stderr))
        self.bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def name(self, title: str) -> None:
        """Change the title, as to the file that is read."""
        self.title = title
        if self.bar is not None:
            self.bar.set_description(title, refresh=False)

    def clear(self) -> None:
        """Erase the bar, for lines that are printed; the next part draws it again."""
        if self.bar is not None:
            self.bar.clear()

    def __call__(self, nbytes: int, total: int | None = None) -> None:
        self.done += nbytes
        self.total = self.total if total is None else total
        if self.bar is not None:
            self.bar.update(nbytes)
        elif self.shown and (self.asked or monotonic() - self.started > PATIENCE):
            self.bar = self._start()

    def _start(self) -> tqdm[Any]:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread that looks after bars: it would keep us from forking
        return tqdm(
            desc=self.title,
            total=self.total,
            initial=self.done,
            unit="B",
            unit_scale=True,
            leave=self.asked,
        )


def _asked() -> bool:
    """Return whether --progress is given."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("progress"))
