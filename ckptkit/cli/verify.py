"""The commands verify, digest and check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.errors import InputError, UsageError
from ckptkit.core.text import argument, shell_command, shown_url, some

if TYPE_CHECKING:
    from ckptkit.analysis.digests import Digests
    from ckptkit.analysis.verify import Verdict
    from ckptkit.core.checkpoint import Checkpoint
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


DIGEST_SCHEMA = "ckptkit.digest/1"
DIFFERENT = 1


@click.command("digest", cls=reading.Reader)
@reading.files
@options.of("digest")
def digest(
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
    schema = DIGEST_SCHEMA if as_json and walks else ""
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
        render.emit_json({"schema": DIGEST_SCHEMA, **about, **facts})
    elif found:
        number = render.plural(len(found), "difference")
        what = f"{path}: {number} from the {len(known):,} tensors of the manifest"
        render.emit_text(what, *(f"  {finding_text(each)}" for each in found))
    elif not quiet:
        count = render.plural(len(digests.ids), "tensor")
        render.emit_text(f"{path}: ok: {count} match the manifest")
    return DIFFERENT if found else 0


CHECK_SCHEMA = "ckptkit.check/1"


@click.command("check")
@click.argument("file", metavar="FILE")
@options.of("check")
def check(
    file: str,
    lines: tuple[str, ...],
    like: str | None,
    config: str | None,
    as_json: bool,
    quiet: bool,
    key: str | None,
) -> int:
    """Compare tensors with expectations and config.json.

    FILE is a checkpoint, or a folder with a checkpoint and its config.json. `check` compares
    config.json with the number of layers, experts and heads, the vocabulary size, the tied head and
    the dtype. For diffusers models, it also compares channels and blocks. `check` reads only
    headers, unless a condition is `finite` or `equal`. The exit code is 1 if tensors differ from an
    expectation or from config.json. The exit code is 2 if there is nothing to compare.

    \b
    Example: ckptkit check model/
             ckptkit check run.pth --expect 'fc.* dtype=float32' --expect '* finite'
    """
    from ckptkit import api
    from ckptkit.analysis.config_check import compare
    from ckptkit.cli.model_class import expected
    from ckptkit.edits import config_file, rules
    from ckptkit.edits.expect import Expectations

    with api.reading(file, key=key) as checkpoint:
        place = checkpoint.source
        sizes = config_file.find(place) if config is None else config_file.read(config)
        compared = [] if sizes is None else compare(sizes, checkpoint.weights)
        fields = list(dict.fromkeys(each.field for each in compared))
        if not (fields or lines or like):
            what = "config.json has no field that ckptkit can compare with the tensors"
            if sizes is None:
                what = "no config.json beside it"
            what = f"nothing to check: {what}, and no --expect or --like was given"
            words = ("ckptkit", "check", "--expect", "* finite", *argument(file))
            raise UsageError(what, where=file, hint=shell_command(words))
        failures = Expectations(list(lines), sizes).failures(checkpoint)
        found = [{"code": "expectation", "text": text} for text in failures]
        wrong = [each for each in compared if each.found is not None]
        found += [{"code": each.code, "text": str(each)} for each in wrong]
        if like is not None:
            try:
                rules.check_like(checkpoint, expected(like), like)
            except rules.UnlikeError as error:
                found.append({"code": "like", "text": error.message})
    if as_json:
        facts = {"checked_config": sizes is not None, "compared": fields, "findings": found}
        render.emit_json({"schema": CHECK_SCHEMA, "file": file, **facts})
    elif found:
        render.emit_text(*(f"{file}: {each['text']}" for each in found))
    elif not quiet:
        agrees = [f"matches config.json ({some(fields, len(fields))})"] if fields else []
        agrees += [f"names and shapes equal those of {like}"] if like is not None else []
        met = f"passes {render.plural(len(lines), 'expectation')}"
        agrees.append(met if lines else "no expectations given")
        render.emit_text(f"{file}: {'; '.join(agrees)}")
    return FINDINGS if found else 0
