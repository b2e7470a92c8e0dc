"""ckptkit ema"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("ema")
@options.edit
def command(edit: options.Edit) -> None:
    """Take out the averaged weights that training kept.

    They stand beside those that were trained, and are found under the names that training loops use (state_dict_ema,
    model_ema, ema, shadow_params...). A list of tensors gets the names of the weights beside it.

    \b
    Example: ckptkit ema last.pth ema.safetensors
    """
    from ckptkit.transforms.combine import ema

    edit.run(ema)
