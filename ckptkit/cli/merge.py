"""ckptkit merge"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("merge", cls=options.Writer)
@options.edit_many
@click.option(
    "--last-wins",
    is_flag=True,
    help="On duplicate names, keep the last instead of failing.",
)
@options.key
def command(request: options.Request, last_wins: bool, key: str | None) -> None:
    """Merge the weights of several checkpoints into one.

    For models saved in parts: an encoder and a decoder, or the stages of a pipeline.

    \b
    Example: ckptkit merge stage0.pt stage1.pt model.safetensors
    """
    from ckptkit.transforms.combine import merge

    request.run(
        source=merge([request.opened(each, key) for each in request.sources], last_wins=last_wins)
    )
