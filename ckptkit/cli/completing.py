"""Complete values in the shell: file names, and tensor names of a file on the command line.

Completion reads only headers of local files, for at most two seconds. After any error, completion
offers no values. Completion never offers a name that contains special characters of the shell.
Otherwise a malicious file could make a user run a command with Tab and Enter.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ckptkit.core.text import flatten

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint

SECONDS = 2.0
MOST = 500  # maximum number of values; if more match, offer common prefixes
DEVICES = ("cpu", "cuda", "cuda:0", "mps", "meta")
# Maps the metavar or name of a parameter to the kind of its values.
KINDS = {
    "A=B": "tags", "DEVICE": "devices", "GLOB": "names", "DTYPE": "targets",
    "GLOB=]DTYPE": "dtypes", "KIND": "quantizations", "P": "prefixes", "PATH": "entries",
    "RECIPE": "recipes", "format": "formats", "name": "names", "name_b": "names",
}  # fmt: skip
# A type for which the shell completes file names. click does not check that the file exists.
FILE = click.Path(readable=False)
FILES = {"A", "B", "BASE", "DATA", "DIR", "DST", "FILE", "MANIFEST", "MODEL", "OTHER", "OUT", "SRC"}
FREE = {"trust"}  # parameters that are never completed

_harmless = re.compile(r"[A-Za-z0-9_.][\w./:@%+,=-]*", re.ASCII).fullmatch


class Completed(click.types.StringParamType):
    """The type of a string parameter. The shell completes values of one kind: `kind`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        # `cli.main` sets a handler of SIGALRM that raises KeyboardInterrupt. With this handler, a
        # timer stops the completion after SECONDS.
        alarm = getattr(signal, "SIGALRM", None)
        heard = alarm is not None and signal.getsignal(alarm) is signal.default_int_handler
        if heard:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            files = FILE.shell_complete(ctx, param, incomplete) if self.kind == "recipes" else []
            return [*_matching(_candidates(self.kind, ctx, param), incomplete), *files]
        except (Exception, KeyboardInterrupt):
            return []
        finally:
            if heard:
                signal.setitimer(signal.ITIMER_REAL, 0)


def attach(command: click.Command) -> None:
    """Set the type of each parameter whose values ckptkit completes."""
    for parameter in command.params:
        completed = completed_type(parameter)
        if completed is not None:
            parameter.type = completed


def completed_type(parameter: click.Parameter) -> Completed | click.Path | None:
    """Return the type that completes a parameter.

    Returns None for free text, and for values that click itself completes (numbers, choices).
    """
    if type(parameter.type) is not click.types.StringParamType or parameter.name in FREE:
        return None
    metavar = (parameter.metavar or "").strip("[].")
    if metavar in FILES:
        return FILE
    kind = KINDS.get(parameter.name or "") or KINDS.get(metavar)
    return None if kind is None else Completed(kind)


def _candidates(
    kind: str, ctx: click.Context, parameter: click.Parameter
) -> Iterator[tuple[str, str | None]]:
    """Yield (candidate, description) for each value of a kind."""
    names: Iterable[str] = ()
    if kind == "devices":
        names = DEVICES
    elif kind == "formats":
        from ckptkit.formats import writable

        yield from ((each.name, each.title) for each in writable())
    elif kind == "dtypes":
        from ckptkit.core.dtypes import TABLE

        names = [row.name for row in TABLE if row.kind == "float"]
    elif kind == "targets":
        from ckptkit.quantized import quantization

        names = quantization.TARGETS
    elif kind == "quantizations":
        from ckptkit.edits import quantized

        names = quantized.KINDS
    elif kind == "recipes":
        from ckptkit.run import recipes

        names = recipes.names()
    else:
        with closing(_opened(ctx, parameter)) as checkpoint:
            yield from _inside(kind, checkpoint)
    yield from ((name, None) for name in names)


def _inside(kind: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """Yield (candidate, description) for each value of a kind that `checkpoint` contains."""
    if kind == "tags":
        devices = dict.fromkeys(tensor.device for tensor in checkpoint.weights.values())
        yield from ((f"{device}=", None) for device in devices)
    elif kind == "names":
        from ckptkit.core.text import shape

        for name, each in checkpoint.weights.items():
            yield name, f"{each.dtype} {shape(each.shape)}"
    elif kind == "prefixes":  # prefixes that at least half of the names share
        names = list(checkpoint.weights)
        counts: Counter[str] = Counter()
        for name in names:
            parts = name.split(".", 4)[:-1]
            counts.update(".".join(parts[:end]) + "." for end in range(1, len(parts) + 1))
        for prefix, count in counts.most_common(8):
            if 2 * count >= len(names):
                yield prefix, None
    else:  # dicts and lists on the first two levels
        from ckptkit.core.tree import children, key_text

        for key, child in children(checkpoint.root):
            below = list(children(child))
            if below:
                yield key_text(key), f"{len(below):,} entries"
            for inner, value in below:
                if inside := sum(1 for _ in children(value)):
                    yield f"{key_text(key)}.{key_text(inner)}", f"{inside:,} entries"


def _matching(
    candidates: Iterator[tuple[str, str | None]], incomplete: str
) -> list[CompletionItem]:
    """Return the candidates that start with `incomplete`.

    If there are more than MOST candidates, cut each candidate at the first dot after the prefix
    that all candidates share.
    """
    found = {
        name: text for name, text in candidates if name.startswith(incomplete) and _harmless(name)
    }
    if len(found) > MOST:
        ends = zip(min(found), max(found), strict=False)
        start = next((place for place, (a, b) in enumerate(ends) if a != b), 0)
        dots = {name: name.find(".", start) for name in found}
        found = {name[: dot + 1] if dot >= 0 else name: None for name, dot in dots.items()}
    return [CompletionItem(name, help=text) for name, text in list(found.items())[:MOST]]


def _opened(ctx: click.Context, parameter: click.Parameter) -> Checkpoint:
    """Open the file given before `parameter` on the command line."""
    from ckptkit.api import open_checkpoint

    second = parameter.name in ("key_b", "name_b")
    holders = ("b", "other") if second else ("file", "src", "a", "files", "sources")
    named = [ctx.params.get(name) for name in holders]
    words = list(flatten([each] if isinstance(each, str) else each or () for each in named))
    path = next(iter([*words, *ctx.args[second:]]))
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    key = ctx.params.get("key")
    if parameter.name in ("key", "keys", "key_b") or not isinstance(key, str):
        key = None
    return open_checkpoint(path, key=key)
