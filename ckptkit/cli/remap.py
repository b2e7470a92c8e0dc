"""ckptkit remap"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("remap")
@options.edit
@click.option("--to", "device", metavar="DEVICE", help="Retag everything: cpu, cuda:0, mps...")
@click.option(
    "--map", "devices", metavar="A=B", multiple=True, callback=options.pairs, help="Retag A as B."
)
@click.option("--values", is_flag=True, help="Change torch.device values in configurations too.")
def command(edit: options.Edit, device: str | None, devices: dict[str, str], values: bool) -> None:
    """Retag devices, no GPU needed.

    The tensors are then loaded to those devices, as with map_location.

    \b
    Example: ckptkit remap run.pth cpu.pth --to cpu
             ckptkit remap run.pth moved.pth --map cuda:1=cuda:0
    """
    if (device is None) == (not devices):
        raise click.UsageError("say either --to DEVICE or --map A=B")
    from ckptkit.transforms.devices import remap

    edit.run(lambda ck: remap(ck, device or devices, values=values))
