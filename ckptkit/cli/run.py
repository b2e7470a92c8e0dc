"""ckptkit run"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from ckptkit.cli import options, render
from ckptkit.cli.request import Request
from ckptkit.core.options import DEFAULT
from ckptkit.core.text import without


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ckptkit.run import recipes

        known = list(map(recipes.load, recipes.names()))
        made = [(each.name, each.about) for each in known if not each.source]
        render.emit(*render.table(("recipe", "description"), made))
        facts = ((each, each.checked or "not checked") for each in known if each.source)
        layouts = [(each.name, each.about, each.source, checked) for each, checked in facts]
        heads = ("layout", "from, to", "facts from", "checked against")
        render.emit("", *render.table(heads, layouts))
        ctx.exit()


@click.command("run", cls=options.Writer, shown=("--all", "--shard-size"), parts=True)
@click.argument("recipe", metavar="RECIPE")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
    help="List the built-in recipes and exit.",
)  # fmt: skip
@options.of("run")
def command(
    recipe: str,
    request: Request,
    key: str | None,
    reverse: bool,
    config: Mapping[str, Any] | None,
    args: dict[str, int],
    dequantize: str | None,
) -> Any:
    """Run the steps of a recipe as one plan.

    RECIPE is a YAML or TOML file, or the name of a built-in recipe (--list). Steps apply in the
    order of the recipe. Options on the command line override the output options of the recipe.
    RECIPE can also be a configuration of mergekit. SRC is then the folder with the models that the
    configuration names.

    \b
    Example: ckptkit run lightning epoch=9.ckpt net.pth
             ckptkit run my-recipe.yaml run.pth out.safetensors --dry-run
             ckptkit run mixtral model out --reverse --arg h=32
    """
    from ckptkit.edits.rules import RuleOptions
    from ckptkit.formats import suffixed
    from ckptkit.run import recipes

    rules = RuleOptions(
        args, config, reverse, request.options.dry_run, dequantize=dequantize or None
    )
    found = recipes.load(recipe, rules)
    if found.merge is not None:
        from ckptkit.edits.merging import merge_config

        return request.run(source=merge_config(found.merge, request.sources[0]), key=key)
    # A reversed recipe ignores its output options, because it writes the other layout. If DST has a
    # known suffix, DST is one file in the format of the suffix.
    given = {} if reverse else dict(found.output)
    if request.dst is not None and suffixed(request.dst) is not None:
        given = without(given, ("format", "shard_size"))
    if "shard_size" in given:
        given["shard_size"] = options.size(given["shard_size"])
    own = [name for name in given if getattr(request.options, name) != getattr(DEFAULT, name)]
    request = replace(request, options=replace(request.options, **without(given, own)))
    return request.run(*found.steps, key=key, keep_format=False)
