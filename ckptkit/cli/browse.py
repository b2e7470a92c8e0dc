"""ckptkit browse"""

from __future__ import annotations

import gc
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.errors import UsageError
from ckptkit.core.text import argument, shell_command, shown_url

if TYPE_CHECKING:
    from ckptkit.core.options import Options


@click.command("browse", cls=reading.Reader)
@click.argument("file", metavar="FILE")
@options.of("browse")
def command(file: str, read: Options) -> int:
    """Browse a checkpoint in the terminal.

    Shows the tree of the file with totals and values, and the problems that prevent loading.
    `browse` reads only headers, and the values that you ask for. From a URL, `browse` reads only
    the required byte ranges. The key c quits, and prints the `ckptkit` command that shows the
    same contents.

    \b
    Example: ckptkit browse run.pth
    """
    if not (render.is_terminal(sys.stdin) and render.is_terminal(sys.stdout)):
        look = shell_command(("ckptkit", "inspect", "--tree", *argument(file)))
        raise UsageError("browse needs a terminal", hint=f"`{look}` prints the same tree")
    try:
        from ckptkit.views.browser import Browser
    except ImportError as error:
        raise UsageError("browse needs textual", hint="pip install textual") from error
    from ckptkit.api import open_checkpoint
    from ckptkit.diagnosis.diagnose import examine
    from ckptkit.views.browser import TreeContents

    with closing(open_checkpoint(file, read)) as checkpoint:
        contents = TreeContents(checkpoint, shown_url(file), read.key)
        gc.enable()  # main() disables garbage collection, but this command can run for a long time
        left = Browser(contents, lambda: examine(file, read).causes).run()
    if left is not None:
        render.emit(render.escape(left))
    return 0
