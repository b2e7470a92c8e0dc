"""ckptkit check"""

from __future__ import annotations

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import UsageError
from ckptkit.core.text import argument, shell_command, some

FINDINGS = 1
SCHEMA = "ckptkit.check/1"


@click.command("check")
@click.argument("file", metavar="FILE")
@options.of("check")
def command(
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
        render.emit_json({"schema": SCHEMA, "file": file, **facts})
    elif found:
        render.emit_text(*(f"{file}: {each['text']}" for each in found))
    elif not quiet:
        agrees = [f"matches config.json ({some(fields, len(fields))})"] if fields else []
        agrees += [f"names and shapes equal those of {like}"] if like is not None else []
        met = f"passes {render.plural(len(lines), 'expectation')}"
        agrees.append(met if lines else "no expectations given")
        render.emit_text(f"{file}: {'; '.join(agrees)}")
    return FINDINGS if found else 0
