"""ckptkit rules"""

from __future__ import annotations

import click

from ckptkit.cli import options, render


@click.command("rules")
@click.argument("source", metavar="from-transformers", type=click.Choice(["from-transformers"]))
@click.argument("model_type", metavar="MODEL_TYPE")
@options.of("rules")
def command(source: str, model_type: str, config: str | None) -> int:
    """Write tensor rules from the conversions of a library.

    from-transformers prints rules that convert the files of MODEL_TYPE to the model in the
    installed transformers. ckptkit reads the conversions of transformers as data, and builds the
    model without weights. For both directions, ckptkit then compares the names and shapes that the
    rules produce with the names and shapes of the model. If a rule cannot express a conversion, a
    comment describes the conversion, and the exit code is 1.

    \b
    Example: ckptkit rules from-transformers qwen3_moe > qwen3-moe.yaml
    """
    from ckptkit.edits.config_file import read
    from ckptkit.rules.from_transformers import generated, layouts_of, recipe_text

    layouts = layouts_of(model_type, None if config is None else read(config))
    found = generated(layouts)
    if not found.steps:
        why = "has one layout: there is nothing to convert"
        if found.left:
            why = f"cannot be written as rules: {found.left[0]}"
        render.note(f"{model_type} {why}")
        return 1
    render.emit(*map(render.escape, recipe_text(layouts, found).rstrip().split("\n")))
    return 1 if found.left else 0
