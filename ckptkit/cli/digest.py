"""ckptkit digest"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.cli.verify import finding_text
from ckptkit.core.errors import InputError
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Digests
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options


SCHEMA = "ckptkit.digest/1"
DIFFERENT = 1


@click.command("digest", cls=reading.Reader)
@reading.files
@options.of("digest")
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

    Prints the SHA-256 of each tensor's dtype, shape and elements, and one digest of all tensors.
    Equal tensors have equal digests in every format. --check compares FILE with an earlier
    manifest. The exit code is 1 if a digest differs.

    \b
    Example: ckptkit digest run.pth -o run.manifest
             ckptkit digest --check run.manifest run.safetensors
    """
    from ckptkit import api
    from ckptkit.analysis import json_facts
    from ckptkit.analysis.digests import digest as digests_of

    if len(files) > 1 and (output is not None or expected is not None):
        raise click.UsageError("--output and --check take one FILE")
    if output is not None and (expected is not None or as_json):
        raise click.UsageError("--output cannot be combined with --check or --json")
    matches = render.matcher(globs) if globs else None

    code = 0

    def look(file: str) -> dict[str, Any] | None:
        nonlocal code
        name = shown_url(file)
        with (
            api.reading(file, read) as checkpoint,
            render.Progress(f"reading {name}") as progress,
        ):
            seen = _seen(checkpoint, dequantize, name)
            found = digests_of(seen, everything=everything, matches=matches, progress=progress)
        for left, why in found.without.items():
            render.warn(f"{name}: no digest of {left}: {why}")
        if not found.tensors and matches is not None:
            render.warn(f"{name}: no tensor name matches --keys")
        path = checkpoint.name or ""
        if expected is not None:
            code = _compare(path, found, expected, matches, as_json, quiet)
        elif as_json:
            return json_facts.digests(path, checkpoint.format, found)
        elif output is not None:
            data = "".join(f"{line}\n" for line in _manifest(found)).encode()
            render.publish(data, output, force)
            count = render.plural(len(found.ids), "tensor")
            render.emit_text(f"wrote {shown_url(output)}: {count}, {found.whole}")
        else:
            lines = _manifest(found, None if files == (file,) else path)
            render.write(f"{line}\n" for line in lines)
        return None

    walks = output is None and expected is None  # a manifest describes a single file
    schema = SCHEMA if as_json and walks else ""
    failures = reading.each_of(files, look, schema=schema, walks=walks)
    return InputError.exit_code if failures else code


def _seen(checkpoint: Checkpoint, dtype: str | None, name: str) -> Checkpoint:
    """Return the checkpoint with dequantized weights if --dequantize is given."""
    from ckptkit import quantized

    if dtype is not None:
        from ckptkit.edits.quantized import dequantize

        return dequantize(checkpoint, dtype or None)
    if quantized.find(checkpoint):
        what = f"{name}: these are digests of the stored codes and scales"
        render.note(what, "--dequantize bfloat16 digests the dequantized weights")
    return checkpoint


def _manifest(digests: Digests, path: str | None = None) -> Iterator[str]:
    """Yield the lines of the manifest. The first line contains `path` if given."""
    from ckptkit.analysis.digests import manifest_lines

    first, *others = manifest_lines(digests.ids, render.escape)
    yield first if path is None else render.escape(f"{first}  {path}")
    yield from others


def _compare(
    path: str, digests: Digests, expected: str, matches: Any, as_json: bool, quiet: bool
) -> int:
    from ckptkit.analysis.digests import compare_ids, read_manifest

    known = read_manifest(expected)
    names = compare_ids(digests.ids, known, matches)
    found = list(names.findings())
    if as_json:
        facts = {kind: list(names) for kind, names in names._asdict().items()}
        about = {"file": path, "manifest": expected, "equal": not found}
        render.emit_json({"schema": SCHEMA, **about, **facts})
    elif found:
        number = render.plural(len(found), "difference")
        what = f"{path}: {number} from the {len(known):,} tensors of the manifest"
        render.emit_text(what, *(f"  {finding_text(each)}" for each in found))
    elif not quiet:
        count = render.plural(len(digests.ids), "tensor")
        render.emit_text(f"{path}: ok: {count} match the manifest")
    return DIFFERENT if found else 0
