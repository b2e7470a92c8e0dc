"""Shared code of commands that read: options, and a loop that continues after a failed file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import click

from ckptkit.cli import render
from ckptkit.cli.options import Command, expanded, table
from ckptkit.core.errors import CkptkitError, MissingFileError, SeveralError
from ckptkit.core.options import Options
from ckptkit.core.text import shown_url

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
    look: Callable[[str], Any],
    *,
    schema: str = "",
    alone: bool | None = None,
    stops: type[CkptkitError] | tuple[()] = (),
    walks: bool = True,
) -> list[CkptkitError]:
    """Call ``look(file)`` for each file. Print the errors of failed files, and return the errors.

    `look` prints its results. If `schema` is given, `look` returns JSON facts, and this function
    prints one object of the schema with the facts and the errors.

    If there is a single file (`alone`), raise its error before anything is printed. If the class of
    an error is in `stops`, always raise the error. If `walks` is true, look at each checkpoint of a
    folder.
    """
    from ckptkit.analysis.json_facts import failure

    raises = len(files) == 1 if alone is None else alone
    waiting, failures = list(files), list[CkptkitError]()

    def results() -> Iterator[Any]:
        nonlocal raises
        while waiting:
            file = waiting.pop(0)
            try:
                done = look(file)
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
                error = error.at(shown_url(file))
                render.error(str(error), error.hint)
                failures.append(error)
                yield failure(error) if schema else None
            else:
                yield done

    found = results()
    found = chain(list(islice(found, 1)), found)
    if schema:
        render.emit_json({"schema": schema, "files": found})
    for _ in found:
        pass
    return failures
