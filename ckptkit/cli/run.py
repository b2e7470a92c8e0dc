"""ckptkit run"""

from __future__ import annotations

import click

from ckptkit.cli import options, render


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ckptkit.run import recipes

        known = [(name, recipes.load(name).about) for name in recipes.names()]
        render.emit(*render.table(("recipe", "what it makes"), known))
        ctx.exit()


@click.command("run")
@click.argument("recipe", metavar="RECIPE")
@options.edit
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Say which there are.",
)
@options.key
def command(recipe: str, edit: options.Edit, key: str | None) -> None:
    """Carry out the steps of a recipe, as one plan.

    RECIPE is a YAML or TOML file, or the name of one that comes with ckptkit. Its steps apply in the order in which
    it has them. What it says of the output holds where no option says something else.

    \b
    Example: ckptkit run lightning epoch=9.ckpt net.pth
             ckptkit run my-recipe.yaml run.pth out.safetensors --dry-run
    """
    from ckptkit.run import recipes

    found = recipes.load(recipe)
    edit.with_defaults(found.output).run(*found.steps, key=key, keep_format=False)
