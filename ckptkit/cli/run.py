"""ckptkit run"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ckptkit.cli import options, render


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ckptkit.run import recipes

        known = list(map(recipes.load, recipes.names()))
        rows = [(each.name, each.about) for each in known if not each.source]
        render.emit(*render.table(("recipe", "what it makes"), rows))
        layouts = [
            (each.name, each.about, each.source, each.checked or "not checked")
            for each in known
            if each.source
        ]
        render.emit(
            "", *render.table(("layout", "from, to", "facts from", "checked against"), layouts)
        )
        ctx.exit()


@options.writes("--all", "--shard-size", parts=True)
@click.command("run", cls=options.Writer)
@click.argument("recipe", metavar="RECIPE")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="List the built-in recipes and exit.",
)
@click.option("--reverse", is_flag=True, help="Undo the recipe: SRC has the layout that it makes.")
@click.option(
    "--config",
    metavar="FILE",
    callback=options.config,
    help="Sizes of the model, for rules; without it, config.json beside SRC.",
)
@click.option(
    "--arg",
    "args",
    metavar="NAME=INT",
    multiple=True,
    callback=options.sizes,
    help="Argument NAME of the rules: a size (repeatable).",
)
@options.key
def command(
    recipe: str,
    request: options.Request,
    key: str | None,
    reverse: bool,
    config: Mapping[str, Any] | None,
    args: dict[str, int],
) -> None:
    """Carry out the steps of a recipe, as one plan.

    RECIPE is a YAML or TOML file, or the name of a built-in recipe (--list). Steps apply in the
    order of the recipe. Options on the command line override the output options of the recipe.

    \b
    Example: ckptkit run lightning epoch=9.ckpt net.pth
             ckptkit run my-recipe.yaml run.pth out.safetensors --dry-run
             ckptkit run mixtral model out --reverse --arg h=32
    """
    from ckptkit.edits.rules import RuleOptions
    from ckptkit.run import recipes

    rules = RuleOptions(args, config, reverse, reports=request.options.dry_run)
    found = recipes.load(recipe, rules)
    output = {} if reverse else found.output  # which is that of the other layout
    request.with_defaults(output).run(*found.steps, key=key, keep_format=False)
