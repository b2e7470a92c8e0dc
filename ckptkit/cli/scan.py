"""ckptkit scan"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from os.path import basename, isdir
from typing import Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.errors import CkptkitError, InputError

SCHEMA = "ckptkit.scan/1"
FOUND = 1


@click.command("scan")
@reading.files
@options.of("scan")
def command(
    files: tuple[str, ...],
    trust: tuple[str, ...],
    strict: bool,
    workers: int | None,
    as_json: bool,
    as_sarif: bool,
    quiet: bool,
) -> int:
    """Report the code that loading files would run.

    Runs no code of a file. Examines every pickle in files and folders, also in places that loaders
    ignore. For a folder, prints the findings, the chat templates of GGUF files and a summary.

    Exit code 0: every pickle is "safe for weights_only" or "harmless". In a harmless pickle, all
    classes, functions and calls are allowlisted, including the form of arguments and states.
    Therefore Python, torch and numpy run no callable that the file chooses.

    Exit code 1: a pickle would run code, ckptkit cannot judge a pickle, or a pickle "needs these
    classes". Such classes are not allowlisted and run their own code. --trust accepts classes by
    name. With --strict, files that torch.load(weights_only=True) refuses are findings too (exit
    code 1).

    The tests of ckptkit compare `scan` with the unpicklers of CPython, and load generated pickles.
    The tests do not prove how accepted values affect the C++ code of torch.

    \b
    Example: ckptkit scan run.pth
             ckptkit scan --quiet models/
             ckptkit scan --trust 'mynet.*' whole_module.pth
    """
    from ckptkit.cli import scan_text
    from ckptkit.scanning.files import Failure, scan_all
    from ckptkit.scanning.verdict import CLASSES, LABELS, VERDICTS, counts

    if as_json and as_sarif:
        raise click.UsageError("--json and --sarif cannot be combined")
    verdicts: Counter[str] = Counter()
    failed = found = 0
    now = ""  # the current file

    def reads(path: str, nbytes: int) -> None:
        nonlocal now
        if path != now:
            now = path
            progress.name(f"scanning {render.escape(path)}")
        progress(nbytes)

    def watched() -> Iterator[Any]:
        """Yield results in the order of completion, and print errors of unreadable files."""
        nonlocal failed, found
        report = reads if progress.shown else None
        for each in scan_all(files, trust=trust, workers=workers, progress=report):
            if isinstance(each, Failure):
                failed += 1
                progress.clear()
                render.error(str(each.error.at(each.path)), each.error.hint)
            else:
                verdicts[each.verdict] += 1
                found += counts(each, strict)
            yield each

    pieces_on_terminal = (as_json or as_sarif) and render.is_terminal(sys.stdout)
    findings_only = quiet or any(map(isdir, files))
    with render.Progress("scanning", shown=not pieces_on_terminal) as progress:
        if as_json:
            from ckptkit.analysis import json_facts

            facts = map(json_facts.scanned, watched())
            render.emit_json({"schema": SCHEMA, "files": facts})
        elif as_sarif:
            render.emit_json(scan_text.sarif(watched(), strict))
        else:
            for each in watched():
                is_remarked = not (quiet or isinstance(each, Failure)) and each.remarks
                if not findings_only or is_remarked or counts(each, strict):
                    progress.clear()
                    render.emit(*scan_text.painted(each), *_adapter(each.path, findings_only))
    total = verdicts.total() + failed
    if not (as_json or as_sarif or quiet) and (total > 1 or findings_only):
        words = {**LABELS, CLASSES: "with classes to review"}
        parts = [f"{verdicts[v]:,} {words[v]}" for v in reversed(VERDICTS) if verdicts[v]]
        parts += [f"{failed:,} could not be read"] if failed else []
        render.emit_text(f"{render.plural(total, 'file')}: {', '.join(parts)}")
    if not total:
        raise InputError("no files to scan")
    if found:  # findings take precedence over unreadable files
        return FOUND
    return InputError.exit_code if failed else 0


def _adapter(path: str, findings_only: bool) -> Iterator[str]:
    """Yield a line about the adapter in a file. Yield nothing if the file has no adapter, or if
    `findings_only` is true."""
    is_likely = path.endswith(".safetensors") or basename(path).startswith("adapter_model.")
    if findings_only or not is_likely:
        return
    from ckptkit.analysis.view_model import adapter_line
    from ckptkit.api import open_checkpoint
    from ckptkit.lora.reading import adapter_of

    try:
        with open_checkpoint(path) as checkpoint:
            adapter = adapter_of(checkpoint)
    except CkptkitError:  # the verdict does not depend on this line
        return
    if adapter is not None:
        line = f"  {adapter_line(adapter, command=False)}"
        yield from render.wrapped(render.escape(line))
