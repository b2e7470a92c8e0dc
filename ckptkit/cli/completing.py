"""Shell completion of values: files, and the names inside the file typed before.

Only headers of local files are read, for two seconds at most, and any error completes to nothing. A
name with a character that a shell could act on is not offered, so that a file cannot make a user
run a command with Tab and Enter.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ckptkit.core.text import flatten

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint

SECONDS = 2.0
MOST = 500  # candidates; of more, their common beginnings
DEVICES = ("cpu", "cuda", "cuda:0", "mps", "meta")

_harmless = re.compile(r"[A-Za-z0-9_.][\w./:@%+,=-]*", re.ASCII).fullmatch

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Candidates = Iterable[tuple[str, str | None]]  # and what is said beside each


class Completed(click.types.StringParamType):
    """A value type whose completions are computed by `complete`."""

    def __init__(self, complete: Completer) -> None:
        self.complete = complete

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            with _deadline():
                return self.complete(ctx, param, incomplete)
        except (Exception, KeyboardInterrupt):
            return []


def attach(command: click.Command) -> None:
    """Attach completions to the parameters of a command, by their names and metavars."""
    for parameter in command.params:
        completed = completed_type(parameter)
        if completed is not None:
            parameter.type = completed


def completed_type(parameter: click.Parameter) -> Completed | click.Path | None:
    """Return the type that completes a parameter.

    None for free text, and for what click completes itself (numbers, choices).
    """
    if type(parameter.type) is not click.types.StringParamType or parameter.name in _FREE:
        return None
    kind = (parameter.metavar or "").strip("[].")
    if kind in _FILES:
        return _FILE
    completer = _BY_NAME.get(parameter.name or "") or _BY_METAVAR.get(kind)
    return None if completer is None else Completed(completer)


def _recipes(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ckptkit.run.recipes import names

    return [
        *_matching(((name, None) for name in names()), incomplete),
        *_FILE.shell_complete(ctx, parameter, incomplete),
    ]


def _formats(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ckptkit.formats import writable

    return _matching(((format.name, format.title) for format in writable()), incomplete)


def _dtypes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ckptkit.core.dtypes import TABLE

    return _matching(((row.name, None) for row in TABLE if row.kind == "float"), incomplete)


def _targets(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ckptkit.quantized.quantization import TARGETS

    return _matching(((name, None) for name in TARGETS), incomplete)


def _kinds(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ckptkit.edits.quantized import KINDS

    return _matching(((name, None) for name in KINDS), incomplete)


def _devices(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(((name, None) for name in DEVICES), incomplete)


def _tags(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Yield ``cuda:1=`` for each device in the file."""
    with _opened(ctx, parameter) as checkpoint:
        devices = {tensor.device: None for tensor in checkpoint.weights.values()}
        return _matching(((f"{device}=", None) for device in devices), incomplete)


def _names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Yield the names of the weights."""
    from ckptkit.core.text import shape

    with _opened(ctx, parameter) as checkpoint:
        named = (
            (name, f"{each.dtype} {shape(each.shape)}") for name, each in checkpoint.weights.items()
        )
        return _matching(named, incomplete)


def _entries(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Yield the paths of mappings and lists, down to two levels."""
    from ckptkit.core.tree import children, key_text

    def below(node: object, before: str, levels: int) -> Iterator[tuple[str, str | None]]:
        for key, child in children(node):
            inside = sum(1 for _ in children(child))
            if inside:
                path = before + key_text(key)
                yield path, f"{inside:,} entries"
                if levels > 1:
                    yield from below(child, f"{path}.", levels - 1)

    with _opened(ctx, parameter) as checkpoint:
        return _matching(below(checkpoint.root, "", 2), incomplete)


def _prefixes(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Yield the dotted prefixes that at least half of the names share."""
    with _opened(ctx, parameter) as checkpoint:
        names = list(checkpoint.weights)
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".", 4)[:-1]
        counts.update(".".join(parts[:end]) + "." for end in range(1, len(parts) + 1))
    often = (prefix for prefix, count in counts.most_common(8) if 2 * count >= len(names))
    return _matching(((prefix, None) for prefix in often), incomplete)


def _matching(candidates: Candidates, incomplete: str) -> list[CompletionItem]:
    """Return the candidates that start with `incomplete`; if too many, their next components."""
    found = {
        name: text for name, text in candidates if name.startswith(incomplete) and _harmless(name)
    }
    if len(found) > MOST:
        ends = zip(min(found), max(found), strict=False)
        start = next((place for place, (a, b) in enumerate(ends) if a != b), 0)
        found = dict.fromkeys((_up_to_dot(name, start) for name in found), None)
    return [CompletionItem(name, help=text) for name, text in list(found.items())[:MOST]]


def _up_to_dot(name: str, start: int) -> str:
    end = name.find(".", start)
    return name if end < 0 else name[: end + 1]


@contextmanager
def _opened(ctx: click.Context, parameter: click.Parameter) -> Iterator[Checkpoint]:
    """Open the file given before `parameter` on the command line."""
    from ckptkit.api import open_checkpoint

    second = parameter.name in ("key_b", "name_b")
    named = [ctx.params.get(name) for name in (_SECOND if second else _FIRST)]
    words = list(flatten([each] if isinstance(each, str) else each or () for each in named))
    path = next(iter([*words, *ctx.args[second:]]))
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    key = None if parameter.name in ("key", "keys", "key_b") else _key(ctx.params)
    with closing(open_checkpoint(path, key=key)) as checkpoint:
        yield checkpoint


def _key(given: dict[str, object]) -> str | None:
    key = given.get("key")
    return key if isinstance(key, str) else None


@contextmanager
def _deadline() -> Iterator[None]:
    """Raise an interrupt after `SECONDS`, if the program handles SIGALRM that way."""
    heard = (
        hasattr(signal, "SIGALRM")
        and signal.getsignal(signal.SIGALRM) is signal.default_int_handler
    )
    if heard:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        if heard:
            signal.setitimer(signal.ITIMER_REAL, 0)


# The parameters that hold the file, and the other file.
_FIRST: Sequence[str] = ("file", "src", "a", "files", "sources")
_SECOND: Sequence[str] = ("b", "other")

_BY_NAME: dict[str, Completer] = {"format": _formats, "name": _names, "name_b": _names}
# Files are completed by the shell, as click asks it to; nothing is checked when they are parsed.
_FILE = click.Path(readable=False)
_FILES = {"A", "B", "DATA", "DIR", "DST", "FILE", "MANIFEST", "MODEL", "OTHER", "OUT", "SRC"}
_FREE = {"trust"}  # and what has no entry in any table
_BY_METAVAR: dict[str, Completer] = {
    "A=B": _tags,
    "DEVICE": _devices,
    "GLOB": _names,
    "DTYPE": _targets,
    "GLOB=]DTYPE": _dtypes,
    "KIND": _kinds,
    "P": _prefixes,
    "PATH": _entries,
    "RECIPE": _recipes,
}
