"""ckptkit verify"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import CkptkitError, InputError, UsageError
from ckptkit.core.text import shown_url, some

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Matches
    from ckptkit.analysis.verify import Verdict
    from ckptkit.core.options import Options
    from ckptkit.formats.format import Defect

SCHEMA = "ckptkit.verify/2"
FINDINGS = 1
SHOWN = 20  # findings about one file
NAMED = 3  # tensors of a finding


@options.reads
@click.command("verify")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--values",
    is_flag=True,
    help="Read the values of tensors too: find NaN, infinities, and scales that are zero.",
)
@click.option(
    "--manifest", metavar="FILE", help="Compare the weights with a manifest of `ckptkit digest`."
)
@click.option(
    "--keys",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="Only tensors whose names match, with --manifest (repeatable).",
)
@options.as_json(SCHEMA)
@click.option("--quiet", "-q", is_flag=True, help="Print only what is wrong.")
@options.key
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

    Reads each file to its last byte and checks structure, lengths, all checksums it has, and that
    the files of a folder agree with each other. Exit code 1 if something is wrong, 3 if a file
    cannot be read at all.

    \b
    Example: ckptkit verify run.pth model/
             ckptkit verify --values --manifest net.manifest net.safetensors
    """
    from ckptkit.analysis.digests import read_manifest

    if manifest is not None and len(files) > 1:
        raise click.UsageError("--manifest takes one FILE")
    if globs and manifest is None:
        raise click.UsageError("--keys needs --manifest")
    expected = None if manifest is None else read_manifest(manifest)
    failures: list[CkptkitError] = []
    shown = _Shown(as_json, quiet, len(files) == 1)
    matches = render.matcher(globs) if globs else None
    verdicts = _verdicts(
        files, expected, matches, values, read, failures, alone=len(files) == 1 and not as_json
    )
    shown.print(verdicts)
    if failures:
        return InputError.exit_code
    return FINDINGS if shown.wrong else 0


def _verdicts(
    files: Sequence[str],
    expected: Mapping[str, str] | None,
    matches: Matches | None,
    values: bool,
    read: Options,
    failures: list[CkptkitError],
    alone: bool,
) -> Iterator[Verdict | CkptkitError]:
    """Yield the verdict on each file, or its error. A single file (`alone`) raises its error."""
    from ckptkit.analysis.verify import verify
    from ckptkit.cli.progress import Progress

    for file in files:
        try:
            with Progress(f"verifying {shown_url(file)}") as progress:
                verdict = verify(
                    file,
                    read,
                    expected=expected,
                    matches=matches,
                    values=values,
                    progress=progress,
                )
        except UsageError:
            raise
        except CkptkitError as error:
            if alone:
                raise
            error.at(shown_url(file))
            render.error(str(error), error.hint)
            failures.append(error)
            yield error
        else:
            yield verdict


class _Shown:
    """The findings to print."""

    def __init__(self, as_json: bool, quiet: bool, alone: bool) -> None:
        self.as_json, self.quiet, self.alone = as_json, quiet, alone
        self.wrong = False

    def print(self, verdicts: Iterator[Verdict | CkptkitError]) -> None:
        if self.as_json:
            render.emit_json({"schema": SCHEMA, "files": map(self._facts, verdicts)})
            return
        for each in verdicts:
            if isinstance(each, CkptkitError):
                continue
            self.wrong |= not each.ok
            if each.findings or not self.quiet:
                render.emit_text(*lines(each))

    def _facts(self, found: Verdict | CkptkitError) -> dict[str, Any]:
        from ckptkit.analysis import json_facts

        if isinstance(found, CkptkitError):
            return json_facts.failure(found)
        self.wrong |= not found.ok
        return json_facts.verdict(found)


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield one line if all is well; else the findings, notes and hints."""
    notes = verdict.notes
    if verdict.ok:
        looked = render.plural(verdict.tensors, "tensor")
        if verdict.records:
            looked = (
                f"{render.plural(verdict.records, 'record')}, {render.size(verdict.nbytes)} checked"
            )
        elif notes:
            looked, notes = f"{looked}; {notes[0]}", notes[1:]
        yield f"{verdict.path}: ok: {looked}"
    elif len(verdict.findings) == 1:
        yield f"{verdict.path}: {finding_text(verdict.findings[0])}"
    else:
        yield f"{verdict.path}: {len(verdict.findings):,} findings"
        yield from (f"  {finding_text(each)}" for each in verdict.findings[:SHOWN])
        if len(verdict.findings) > SHOWN:
            yield f"  and {len(verdict.findings) - SHOWN:,} more, which --json lists"
    yield from (f"note: {note}" for note in notes)
    if verdict.damaged:
        yield from (f"hint: {hint}" for hint in _hints(verdict))


def finding_text(finding: Defect) -> str:
    """Format one finding: the file in a folder, what is wrong, and the affected tensors."""
    names = some(finding.tensors, NAMED)
    place = f"{finding.file}: " if finding.file else ""
    return f"{place}{finding.what}" + (f" ({names})" if names else "")


def _hints(verdict: Verdict) -> Iterable[str]:
    from ckptkit.analysis.advice import recover
    from ckptkit.formats.format import UNVERIFIED

    again = "fetch it again from where it came from"
    if verdict.recoverable:
        unverified = verdict.recoverable == UNVERIFIED
        saves = (
            "to save what is there, possibly garbage"
            if unverified
            else "to save the intact tensors"
        )
        return (f"{again}; {saves}: {recover(verdict.path, unverified)}",)
    return dict.fromkeys(each.hint for each in verdict.findings[:SHOWN] if each.hint) or (again,)
