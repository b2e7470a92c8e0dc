"""Functions of the Python API that return the JSON output of commands as Python objects."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from ckptkit.analysis import digests, json_facts, summary
from ckptkit.analysis import verify as verification
from ckptkit.analysis.digests import sha256_each
from ckptkit.analysis.stats import chosen, statistics
from ckptkit.api import reading
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.options import Options
from ckptkit.core.text import matcher
from ckptkit.quantized import dequantized_view
from ckptkit.scanning.files import scan_all

if TYPE_CHECKING:
    from ckptkit.analysis.json_types import (
        DigestFile,
        InspectFile,
        ScanFailed,
        ScanFile,
        StatsFacts,
        VerifyFile,
    )

Json = dict[str, Any]


def inspect(
    source: Source,
    *,
    key: str | None = None,
    keys: str | Iterable[str] = (),
    digest: bool = False,
    stored: bool = False,
) -> InspectFile:
    """Return the contents of a checkpoint, like the object FILE of ``ckptkit inspect --json``.

    `keys` are globs of the tensors to list. With `digest`, `inspect` reads the tensors and computes
    their digests. By default, `inspect` lists a quantized weight as one tensor. With `stored`,
    `inspect` lists the codes and scales as separate tensors. ``ckptkit help --schema inspect``
    prints the schema.
    """
    arguments.flags(digest=digest, stored=stored)
    globs = arguments.texts("keys", keys)
    with reading(source, key=key) as checkpoint:
        found = summary.summarize(checkpoint if stored or digest else dequantized_view(checkpoint))
        rows = summary.matching(found.rows, globs)
        sums = list(sha256_each((row.place, row.tensor) for row in rows)) if digest else None
        facts = listed(json_facts.file(found, rows, sums, is_selection=bool(globs)))
    return cast("InspectFile", facts)


def stats(
    source: Source,
    *,
    key: str | None = None,
    keys: str | Iterable[str] = (),
    all: bool = False,
    stored: bool = False,
) -> StatsFacts:
    """Return statistics of the values of tensors, like ``ckptkit stats --json``.

    `keys` are globs of tensor names. By default, `stats` reads the weights. With `all`, `stats`
    reads all tensors of the file.
    """
    arguments.flags(all=all, stored=stored)
    globs = arguments.texts("keys", keys)
    with reading(source, key=key) as opened:
        checkpoint = opened if stored else dequantized_view(opened)
        found = statistics(chosen(checkpoint, globs, all))
        facts = json_facts.statistics(checkpoint.name, checkpoint.format, found, found.rows)
        facts = listed(facts)
    return cast("StatsFacts", facts)


def digest(
    source: Source,
    *,
    key: str | None = None,
    keys: str | Iterable[str] = (),
    all: bool = False,
) -> DigestFile:
    """Return digests of tensors, like the object FILE of ``ckptkit digest --json``.

    A tensor has the same digest in every file format.
    """
    arguments.flags(all=all)
    globs = arguments.texts("keys", keys)
    matches = matcher(globs) if globs else None
    with reading(source, key=key) as checkpoint:
        found = digests.digest(checkpoint, everything=all, matches=matches)
        facts = listed(json_facts.digests(checkpoint.name or "", checkpoint.format, found))
    return cast("DigestFile", facts)


def verify(source: Source, *, values: bool = False, key: str | None = None) -> VerifyFile:
    """Check that a file or folder is complete and undamaged, like ``ckptkit verify --json``.

    `verify` reads all bytes and returns the object FILE. With `values`, NaN and infinite elements
    are findings too.
    """
    arguments.flags(values=values)
    found = verification.verify(file_of(source), Options(key=key), values=values)
    return cast("VerifyFile", listed(json_facts.verdict(found)))


def scan(source: Source, *, trust: str | Iterable[str] = ()) -> list[ScanFile | ScanFailed]:
    """List the code that loading a file or folder would run, like ``ckptkit scan --json``.

    `scan` does not run this code. `scan` returns one object FILE for each file. For an unreadable
    file, the object has an ``error`` instead of a verdict. `trust` contains globs of classes and
    functions that you trust.
    """
    found = scan_all([file_of(source)], trust=arguments.texts("trust", trust))
    return [cast("ScanFile | ScanFailed", listed(json_facts.scanned(each))) for each in found]


def file_of(source: object) -> str:
    """Return the path or URL of `source`. Raises UsageError for a Checkpoint without a file."""
    if isinstance(source, Checkpoint) and source.name is not None:
        return source.name
    if not isinstance(source, (str, os.PathLike)):
        raise arguments.wrong("source", "a path, a URL or a Checkpoint of a file", source)
    return arguments.path("source", source)


def listed(facts: Json) -> Json:
    """Return the JSON object with lists instead of iterators."""
    return {key: _listed(value) for key, value in facts.items()}


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return listed(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    return [_listed(each) for each in value]
