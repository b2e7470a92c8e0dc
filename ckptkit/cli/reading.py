"""Shared code of commands that read: options, and a loop that continues after a failed file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import click

from ckptkit.cli import render
from ckptkit.cli.options import ALONE, HELP_ALL, KEY, KINDS, PARTS, Command, expanded
from ckptkit.core.errors import CkptkitError, MissingFileError, SeveralError
from ckptkit.core.options import Options
from ckptkit.core.text import shown_url

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def flag(words: str, text: str) -> Decorator:
    """Return a decorator that adds a flag.

    `words` contains the names of the option, and optionally the name of its parameter.
    """
    return click.option(*words.split(), is_flag=True, help=text)


def value(words: str, metavar: str, text: str, **how: Any) -> Decorator:
    """Return a decorator that adds an option with a value."""
    return click.option(*words.split(), metavar=metavar, help=text, **how)


def globs(text: str = "Select tensors whose names or paths match (repeatable).") -> Decorator:
    return value("--keys globs", "GLOB", text, multiple=True)


def as_json(schema: str) -> Decorator:
    """Return a decorator that adds --json. With --json, the command prints an object of
    `schema`."""
    return flag("--json as_json", f"Print one JSON object (schema {schema}).")


def sorting(*orders: str, text: str) -> Decorator:
    """Return a decorator that adds --sort with these orders. The first order is the default."""
    return click.option("--sort", type=click.Choice(orders), default=orders[0], help=text)


files = click.argument("files", metavar="FILE...", nargs=-1, required=True, callback=expanded)


def is_model(place: str) -> bool:
    """Return whether `place` names a model class (file.py:Class, package.module:Class)."""
    return _MODEL.fullmatch(place) is not None and not os.path.lexists(place)


_MODEL = re.compile(r"(.+\.py|[A-Za-z_]\w+(\.\w+)*):[A-Za-z_][\w.]*")
key = value("--key", "PATH", KEY)
folded = click.option(
    "--fold/--flat",
    default=None,
    help="Print one row for tensors whose names differ only in an index (layers.{0..31}.weight), "
    "or (--flat) a row for each tensor. Default: --fold, but --flat in JSON and CSV. "
    "Only `stats` folds JSON.",
)
model = value(
    "--model spec", "MODEL", "Model to compare with: package.module:Class or file.py:Class."
)
model_arguments = value(
    "--arg args",
    "NAME=JSON",
    "Argument NAME of the model's constructor (repeatable).",
    **KINDS["json"],
)
stored = flag("--stored", "Show the stored codes and scales of quantized weights.")


class Reader(Command):
    """A command that reads. The parameter `read` of `callback` contains the values of --key and of
    the options in PARTS and ALONE."""

    def __init__(self, *, callback: Callable[..., Any], params: list[Any], **given: Any) -> None:
        def with_read(key: str | None, parts: str | None, part_only: bool, **given: Any) -> Any:
            copies, check = given.pop("copies"), given.pop("check_copies")
            how = "check" if check and copies == "compare" else copies
            read = Options(key=key, parts=parts, part_only=part_only, copies=how)
            return callback(read=read, **given)

        for _, words, text, how in (*PARTS, *ALONE, *HELP_ALL):
            hidden = words != "--help-all"
            params.append(click.Option(words.split(), help=text, hidden=hidden, **how))
        super().__init__(callback=with_read, params=params, **given)


def each_of(
    files: Sequence[str],
    work: Callable[[str], T],
    failures: list[CkptkitError],
    *,
    alone: bool | None = None,
    stops: type[CkptkitError] | tuple[()] = (),
    walks: bool = True,
) -> Iterator[tuple[str, T | CkptkitError]]:
    """Yield each file with the result of `work`.

    If there are several files, print the error of a failed file, and yield the error instead of a
    result. If there is a single file (`alone`), raise the error before anything is printed. If the
    class of an error is in `stops`, always raise the error. If `walks` is true, yield each
    checkpoint of a folder.
    """
    raises = len(files) == 1 if alone is None else alone
    waiting = list(files)

    def results() -> Iterator[tuple[str, T | CkptkitError]]:
        nonlocal raises
        while waiting:
            file = waiting.pop(0)
            try:
                done = work(file)
            except CkptkitError as error:
                if walks and isinstance(error, SeveralError) and os.path.isdir(file):
                    waiting[:0] = [os.path.join(file, name) for name in error.files]
                    raises = False
                    continue
                if raises or isinstance(error, stops):
                    raise
                if isinstance(error, MissingFileError):
                    root: Any = click.get_current_context().find_root().command
                    root.improve(error)
                render.error(str(error.at(shown_url(file))), error.hint)
                failures.append(error)
                yield file, error
            else:
                yield file, done

    found = results()
    return chain(list(islice(found, 1)), found)
