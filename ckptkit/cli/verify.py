"""ckptkit verify"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.errors import InputError, UsageError
from ckptkit.core.text import shown_url, some

if TYPE_CHECKING:
    from ckptkit.analysis.verify import Verdict
    from ckptkit.core.options import Options
    from ckptkit.formats.format import Defect

SCHEMA = "ckptkit.verify/1"
FINDINGS = 1
SHOWN = 20  # maximum number of printed findings of a file
NAMED = 3  # maximum number of tensor names printed for a finding


@click.command("verify", cls=reading.Reader)
@reading.files
@options.of("verify")
def command(
    files: tuple[str, ...],
    values: bool,
    manifest: str | None,
    globs: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    read: Options,
) -> int:
    """Check that checkpoints are complete and undamaged.

    Reads each file completely. Checks structure, lengths and all checksums, and that the files of a
    folder agree with each other. The exit code is 1 if a check fails, and 3 if a file is
    unreadable.

    \b
    Example: ckptkit verify run.pth model/
             ckptkit verify --values --manifest net.manifest net.safetensors
    """
    from ckptkit.analysis import json_facts
    from ckptkit.analysis.digests import read_manifest
    from ckptkit.analysis.verify import verify

    if manifest is not None and len(files) > 1:
        raise click.UsageError("--manifest takes one FILE")
    if globs and manifest is None:
        raise click.UsageError("--keys needs --manifest")
    expected = None if manifest is None else read_manifest(manifest)
    matches = render.matcher(globs) if globs else None

    wrong: list[bool] = []

    def look(file: str) -> dict[str, Any] | None:
        with render.Progress(f"verifying {shown_url(file)}") as progress:
            found = verify(
                file, read, expected=expected, matches=matches, values=values, progress=progress
            )
        wrong.append(not found.ok)
        if as_json:
            return json_facts.verdict(found)
        if found.findings or not quiet:
            render.emit_text(*_lines(found))
        return None

    schema, alone = SCHEMA if as_json else "", len(files) == 1 and not as_json
    if reading.each_of(files, look, schema=schema, alone=alone, stops=UsageError):
        return InputError.exit_code
    return FINDINGS if any(wrong) else 0


def _lines(verdict: Verdict) -> Iterator[str]:
    """Yield one line if all checks passed. Otherwise, yield the findings, notes and hints."""
    notes, found = verdict.notes, verdict.findings
    if verdict.ok:
        looked = render.plural(verdict.tensors, "tensor")
        if verdict.records:
            records = render.plural(verdict.records, "record")
            looked = f"{records}, {render.size(verdict.nbytes)} checked"
        elif notes:
            looked, notes = f"{looked}; {notes[0]}", notes[1:]
        yield f"{verdict.path}: ok: {looked}"
    elif len(found) == 1:
        yield f"{verdict.path}: {finding_text(found[0])}"
    else:
        yield f"{verdict.path}: {len(found):,} findings"
        yield from (f"  {finding_text(each)}" for each in found[:SHOWN])
        if len(found) > SHOWN:
            yield f"  and {len(found) - SHOWN:,} more (--json lists them)"
    yield from (f"note: {note}" for note in notes)
    if verdict.damaged:
        yield from (f"hint: {hint}" for hint in _hints(verdict))


def finding_text(finding: Defect) -> str:
    """Format one finding: the damage and the affected tensors. For a folder, also name the file."""
    names = some(finding.tensors, NAMED)
    place = f"{finding.file}: " if finding.file else ""
    return f"{place}{finding.what}" + (f" ({names})" if names else "")


def _hints(verdict: Verdict) -> Iterable[str]:
    from ckptkit.analysis.advice import recover
    from ckptkit.formats.format import UNVERIFIED

    again = "download or copy the file again"
    if not verdict.recoverable:
        hints = dict.fromkeys(each.hint for each in verdict.findings[:SHOWN] if each.hint)
        return hints or (again,)
    unverified = verdict.recoverable == UNVERIFIED
    saves = "the remaining bytes, possibly garbage" if unverified else "the intact tensors"
    return (f"{again}; to save {saves}: {recover(verdict.path, unverified)}",)
