"""Shared code of commands that read: options, and a loop that continues after a failed file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import click

from ckptkit.cli import render
from ckptkit.cli.options import Command, expanded, table
from ckptkit.core.errors import CkptkitError, MissingFileError, SeveralError
from ckptkit.core.options import Options
from ckptkit.core.text import shown_url

T = TypeVar("T")


files = click.argument("files", metavar="FILE...", nargs=-1, required=True, callback=expanded)


def is_model(place: str) -> bool:
    """Return whether `place` names a model class (file.py:Class, package.module:Class)."""
    return _MODEL.fullmatch(place) is not None and not os.path.lexists(place)


_MODEL = re.compile(r"(.+\.py|[A-Za-z_]\w+(\.\w+)*):[A-Za-z_][\w.]*")


class Reader(Command):
    """A command that reads. The parameter `read` of `callback` contains the values of --key and of
    the section [read] of `options.txt`."""

    def __init__(self, *, callback: Callable[..., Any], params: list[Any], **given: Any) -> None:
        def with_read(key: str | None, parts: str | None, part_only: bool, **given: Any) -> Any:
            copies, check = given.pop("copies"), given.pop("check_copies")
            how = "check" if check and copies == "compare" else copies
            read = Options(key=key, parts=parts, part_only=part_only, copies=how)
            return callback(read=read, **given)

        for names, how in table("read"):
            params.append(click.Option(names, hidden=names != ["--help-all"], **how))
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
