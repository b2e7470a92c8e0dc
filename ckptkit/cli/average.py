"""ckptkit average"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("average")
@options.edit_many
@click.option(
    "--weight",
    "shares",
    metavar="W",
    type=float,
    multiple=True,
    help="One for each SRC, in their order.",
)
@options.key
def command(
    edit: options.Edit, sources: tuple[str, ...], shares: tuple[float, ...], key: str | None
) -> None:
    """Write the mean of the weights of several checkpoints.

    Elements are added up as float64 and rounded once. Integer and bool buffers, such as the number of batches, are
    those of the last SRC, and so are dtypes and order. Names and shapes must be the same.

    \b
    Example: ckptkit average epoch8.pth epoch9.pth epoch10.pth mean.pth
             ckptkit average --weight 0.9 --weight 0.1 old.pth new.pth mixed.pth
    """
    from ckptkit.transforms.combine import average

    edit.run(source=average([edit.opened(each, key) for each in sources], shares or None))
