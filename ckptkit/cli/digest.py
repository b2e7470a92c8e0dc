"""ckptkit digest"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Digests, Matches
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.digest/2"
DIFFERENT = 1


@options.reads
@click.command("digest", cls=options.Dequantizing)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--output", "-o", metavar="OUT", help="Output file: the manifest, instead of printing it."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--check", "expected", metavar="MANIFEST", help="Compare FILE with this manifest.")
@click.option(
    "--keys",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="Only tensors whose names match (repeatable).",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Not only the weights: all tensors of the file, by their paths.",
)
@options.as_json(SCHEMA)
@click.option("--quiet", "-q", is_flag=True, help="Print only what differs, with --check.")
@options.dequantize
@options.key
def command(
    files: tuple[str, ...],
    output: str | None,
    force: bool,
    expected: str | None,
    globs: tuple[str, ...],
    everything: bool,
    as_json: bool,
    quiet: bool,
    dequantize: str | None,
    read: Options,
) -> int:
    """Print SHA-256 digests of tensors; compare with a manifest.

    Prints the SHA-256 of each tensor's dtype, shape and elements, and one digest of all of them.
    Equal tensors have equal digests in every format. --check compares FILE with a manifest printed
    before; exit code 1 if they differ.

    \b
    Example: ckptkit digest run.pth -o run.manifest
             ckptkit digest --check run.manifest run.safetensors
    """
    _check_options(files, output, expected, as_json)
    matches = render.matcher(globs) if globs else None
    failures: list[CkptkitError] = []
    found = _each(files, read, everything, matches, failures, dequantize)
    if expected is not None:
        ((path, _, digests),) = _readable(found)
        return _compare(path, digests, expected, matches, as_json, quiet)
    if output is not None:
        _write(next(_readable(found))[2], output, force)
    elif as_json:
        found = chain(list(islice(found, 1)), found)  # a single file raises before any output
        render.emit_json({"schema": SCHEMA, "files": starmap(_facts, found)})
    else:
        for path, _, digests in _readable(found):
            render.write(f"{line}\n" for line in _lines(digests, path if len(files) > 1 else None))
    return InputError.exit_code if failures else 0


def _check_options(
    files: Sequence[str], output: str | None, expected: str | None, as_json: bool
) -> None:
    """Raise UsageError for options that contradict each other."""
    if len(files) > 1 and (output is not None or expected is not None):
        raise click.UsageError("--output and --check take one FILE")
    if output is not None and (expected is not None or as_json):
        raise click.UsageError("--output cannot be combined with --check or --json")


def _each(
    files: Sequence[str],
    read: Options,
    everything: bool,
    matches: Matches | None,
    failures: list[CkptkitError],
    dequantize: str | None,
) -> Iterator[tuple[str, str, Digests | CkptkitError]]:
    """Yield path, format and digests, or the error, of each file.

    A single file raises its error; of several, the error is printed and the others go on.
    """
    from ckptkit.analysis.digests import digest
    from ckptkit.api import reading
    from ckptkit.cli.progress import Progress

    for file in files:
        try:
            with (
                reading(file, read) as checkpoint,
                Progress(f"reading {shown_url(file)}") as progress,
            ):
                seen = _seen(checkpoint, dequantize, file)
                found = digest(seen, everything=everything, matches=matches, progress=progress)
        except CkptkitError as error:
            error.at(shown_url(file))
            if len(files) == 1:
                raise
            render.error(str(error), error.hint)
            failures.append(error)
            yield file, "", error
            continue
        for name, why in found.without.items():
            render.warn(f"{shown_url(file)}: left out: {name}: {why}")
        if not found.tensors and matches is not None:
            render.warn(f"{shown_url(file)}: no tensor name matches --keys")
        yield checkpoint.name or "", checkpoint.format, found


def _readable(
    found: Iterator[tuple[str, str, Digests | CkptkitError]],
) -> Iterator[tuple[str, str, Digests]]:
    """Yield the files that could be read."""
    for path, format, digests in found:
        if not isinstance(digests, CkptkitError):
            yield path, format, digests


def _seen(checkpoint: Checkpoint, dtype: str | None, file: str) -> Checkpoint:
    """Return the checkpoint with quantized weights as floats, if --dequantize is given."""
    if dtype is not None:
        from ckptkit.edits.quantized import dequantize

        return dequantize(checkpoint, dtype or None)
    from ckptkit import quantized

    if quantized.find(checkpoint):
        hint = "--dequantize bfloat16 gives those of the weights"
        render.note(
            f"{shown_url(file)}: the digests are of codes and scales, as they are stored", hint
        )
    return checkpoint


def _lines(digests: Digests, path: str | None = None) -> Iterator[str]:
    """Yield the lines of the manifest, the first one with `path` if given."""
    from ckptkit.analysis.digests import manifest_lines

    first, *others = manifest_lines(digests.ids, render.escape)
    yield first if path is None else render.escape(f"{first}  {path}")
    yield from others


def _write(digests: Digests, path: str, force: bool) -> None:
    from ckptkit.core.plan import OutputFile, Plan
    from ckptkit.publish.publish import publish

    data = "".join(f"{line}\n" for line in _lines(digests)).encode()
    publish(Plan((OutputFile("", (data,)),)), path, force=force, allow_expand=True)
    count = render.plural(len(digests.ids), "tensor")
    render.emit_text(f"wrote {shown_url(path)}: {count}, {digests.whole}")


def _compare(
    path: str, digests: Digests, expected: str, matches: Matches | None, as_json: bool, quiet: bool
) -> int:
    from ckptkit.analysis.digests import compare_ids, read_manifest
    from ckptkit.cli.verify import finding_text

    known = read_manifest(expected)
    names = compare_ids(digests.ids, known, matches)
    found = list(names.findings())
    if as_json:
        render.emit_json(
            {
                "schema": SCHEMA,
                "file": path,
                "manifest": expected,
                "equal": not found,
                **{kind: list(names) for kind, names in names._asdict().items()},
            }
        )
    elif found:
        number = render.plural(len(found), "difference")
        render.emit_text(
            f"{path}: {number} from the {len(known):,} tensors of the manifest",
            *(f"  {finding_text(each)}" for each in found),
        )
    elif not quiet:
        count = render.plural(len(digests.ids), "tensor")
        render.emit_text(f"{path}: ok: {count} as in the manifest")
    return DIFFERENT if found else 0


def _facts(path: str, format: str, digests: Digests | CkptkitError) -> dict[str, Any]:
    """Return FILE of the JSON schema, its tensors as an iterator."""
    from ckptkit.analysis import json_facts

    if isinstance(digests, CkptkitError):
        return json_facts.failure(digests, path)
    return json_facts.digests(path, format, digests)
