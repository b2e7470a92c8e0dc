"""ckptkit merge"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("merge")
@options.edit_many
@click.option(
    "--last-wins",
    is_flag=True,
    help="Of a name that several have, take the last instead of refusing.",
)
@options.key
def command(edit: options.Edit, sources: tuple[str, ...], last_wins: bool, key: str | None) -> None:
    """Write the weights of several checkpoints as one state_dict.

    For models that were saved in parts: an encoder and a decoder, the stages of a pipeline.

    \b
    Example: ckptkit merge stage0.pt stage1.pt model.safetensors
    """
    from ckptkit.transforms.combine import merge

    edit.run(source=merge([edit.opened(each, key) for each in sources], last_wins=last_wins))
