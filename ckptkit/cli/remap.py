"""ckptkit remap"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("remap", cls=options.Writer)
@options.edit
@click.option(
    "--to", "device", metavar="DEVICE", help="Change all device tags to DEVICE: cpu, cuda:0, mps..."
)
@options.devices
@click.option(
    "--device-values",
    "values",
    is_flag=True,
    help="Also change torch.device values that are not part of a tensor.",
)
def command(
    request: options.Request, device: str | None, devices: dict[str, str], values: bool
) -> None:
    """Change device tags (such as cuda:1 to cpu), without a GPU.

    torch.load then puts the tensors on those devices, as with map_location.

    \b
    Example: ckptkit remap run.pth cpu.pth --to cpu
             ckptkit remap run.pth moved.pth --device cuda:1=cuda:0
    """
    if (device is None) == (not devices):
        raise click.UsageError("give either --to DEVICE or --device A=B")
    from ckptkit.transforms.devices import remap

    request.run(lambda ck: remap(ck, device or devices, values=values))
