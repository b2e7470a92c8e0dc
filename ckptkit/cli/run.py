"""ckptkit run"""

from __future__ import annotations

import click

from ckptkit.cli import options, render


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ckptkit.run import recipes

        known = [(name, recipes.load(name).about) for name in recipes.names()]
        render.emit(*render.table(("recipe", "description"), known))
        ctx.exit()


@click.command("run", cls=options.Writer)
@click.argument("recipe", metavar="RECIPE")
@options.edit
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="List the built-in recipes and exit.",
)
@options.key
def command(recipe: str, edit: options.Edit, key: str | None) -> None:
    """Apply the steps of a recipe in one pass.

    RECIPE is a YAML or TOML file, or the name of a built-in recipe (--list). Steps apply in the
    order of the recipe. Options on the command line override the output options of the recipe.

    \b
    Example: ckptkit run lightning epoch=9.ckpt net.pth
             ckptkit run my-recipe.yaml run.pth out.safetensors --dry-run
    """
    from ckptkit.run import recipes

    found = recipes.load(recipe)
    edit.with_defaults(found.output).run(*found.steps, key=key, keep_format=False)
