"""ckptkit ema"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("ema", cls=options.Writer)
@options.edit
def command(request: options.Request) -> None:
    """Extract the averaged (EMA) weights that training kept.

    They are found under the names that training loops use (state_dict_ema, model_ema, ema,
    shadow_params...). A list of tensors without names gets the names of the trained weights in the
    same file.

    \b
    Example: ckptkit ema last.pth ema.safetensors
    """
    from ckptkit.transforms.combine import ema

    request.run(ema)
