"""ckptkit scan"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from os.path import isdir
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import render
from ckptkit.core.errors import InputError

if TYPE_CHECKING:
    from ckptkit.cli.progress import Progress
    from ckptkit.scanning.files import Failure
    from ckptkit.scanning.verdict import FileVerdict

SCHEMA = "ckptkit.scan/2"
FOUND = 1


@click.command("scan")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--trust",
    metavar="GLOB",
    multiple=True,
    help="Trust classes and functions whose names match, such as 'mynet.*', or all of a module or "
    "package (repeatable).",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Fail (exit code 1) for everything that torch.load(weights_only=True) refuses.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Share the work among N processes. Default: one per core, if there are many files.",
)
@click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object (schema {SCHEMA}).")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print the findings as SARIF 2.1.0.")
@click.option("--quiet", "-q", is_flag=True, help="Print only findings.")
def command(
    files: tuple[str, ...],
    trust: tuple[str, ...],
    strict: bool,
    workers: int | None,
    as_json: bool,
    as_sarif: bool,
    quiet: bool,
) -> int:
    """Report what loading files would run, without running it.

    Examines every pickle in files and folders, also in places that loaders ignore. Of a
    folder, prints the findings and a summary.

    \b
    Exit code 0: every pickle is safe for weights_only, or harmless: each
      name and call is in the allowlist, with arguments and states of the
      shapes that the list gives. Python's, torch's and numpy's own code then
      finds no callable of the file to run.
    Exit code 1: a pickle would run code; or cannot be judged; or makes objects
      of classes outside the allowlist, whose own code decides ("needs these
      classes"). --trust accepts these by name. With --strict, also
      everything that torch.load(weights_only=True) refuses.

    Proven by comparison with CPython's unpicklers and by loading composed
    pickles. Not proven: torch's C++ code on the values that it accepts.

    \b
    Example: ckptkit scan run.pth
             ckptkit scan --quiet models/
             ckptkit scan --trust 'mynet.*' whole_module.pth
    """
    from ckptkit.cli.progress import Progress
    from ckptkit.scanning.files import scan_all

    if as_json and as_sarif:
        raise click.UsageError("give either --json or --sarif")
    outcome = Outcome(strict)
    pieces_on_terminal = (as_json or as_sarif) and render.is_terminal(sys.stdout)
    with Progress("scanning", shown=not pieces_on_terminal) as progress:
        found = scan_all(files, trust=trust, workers=workers, progress=_reading(progress))
        results = outcome.watch(found, progress)
        if as_json:
            render.emit_json(_json(results))
        elif as_sarif:
            render.emit_json(_sarif(results, strict))
        else:
            _print(results, progress, strict, quiet or any(map(isdir, files)))
    if not (as_json or as_sarif or quiet) and (len(outcome) > 1 or any(map(isdir, files))):
        render.emit_text(outcome.summary())
    return outcome.code


def _json(results: Iterable[FileVerdict | Failure]) -> dict[str, Any]:
    from ckptkit.analysis import json_facts

    return {"schema": SCHEMA, "files": map(json_facts.scanned, results)}


def _sarif(results: Iterable[FileVerdict | Failure], strict: bool) -> dict[str, Any]:
    from ckptkit.cli import scan_sarif

    return scan_sarif.log(results, strict)


def _reading(progress: Progress) -> Callable[[str, int], None]:
    """Return the function that shows which file is read, and the bytes that were."""
    now = ""

    def read(path: str, nbytes: int) -> None:
        nonlocal now
        if path != now:
            now = path
            progress.name(f"scanning {render.escape(path)}")
        progress(nbytes)

    return read


def _print(
    results: Iterable[FileVerdict | Failure], progress: Progress, strict: bool, findings_only: bool
) -> None:
    """Print a verdict on each file, or on those whose verdict is a finding."""
    from ckptkit.cli import scan_text
    from ckptkit.scanning.verdict import counts

    for each in results:
        if not findings_only or counts(each, strict):
            progress.clear()
            render.emit(*scan_text.painted(each))


class Outcome:
    """The verdicts on all files, counted."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.failed = self.found = 0
        self.verdicts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.verdicts.total() + self.failed

    def watch(
        self, results: Iterable[FileVerdict | Failure], progress: Progress
    ) -> Iterator[FileVerdict | Failure]:
        """Yield the results as they come; print files that could not be read on standard error."""
        from ckptkit.scanning.verdict import FileVerdict, counts

        for each in results:
            if isinstance(each, FileVerdict):
                self.verdicts[each.verdict] += 1
                self.found += counts(each, self.strict)
            else:
                self.failed += 1
                progress.clear()
                render.error(str(each.error.at(each.path)), each.error.hint)
            yield each

    def summary(self) -> str:
        from ckptkit.scanning.verdict import LABELS, VERDICTS

        counts_found = [
            f"{self.verdicts[each]:,} {LABELS[each]}"
            for each in reversed(VERDICTS)
            if self.verdicts[each]
        ]
        counts_found += [f"{self.failed:,} could not be read"] if self.failed else []
        return f"{render.plural(len(self), 'file')}: {', '.join(counts_found)}"

    @property
    def code(self) -> int:
        """Return the exit code; findings take precedence over unreadable files."""
        if not len(self):
            raise InputError("there are no files to scan")
        if self.found:
            return FOUND
        return InputError.exit_code if self.failed else 0
