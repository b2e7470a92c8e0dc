"""ckptkit average"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("average", cls=options.Writer)
@options.edit_many
@click.option(
    "--weight",
    "shares",
    metavar="W",
    type=float,
    multiple=True,
    help="Weight of each SRC, in order (repeatable). Default: equal weights.",
)
@options.key
def command(request: options.Request, shares: tuple[float, ...], key: str | None) -> None:
    """Write the mean of the weights of several checkpoints.

    Elements are summed in float64 and rounded once. Integer and bool buffers (such as
    num_batches_tracked), dtypes and order are those of the last SRC. Names and shapes must be the
    same in all.

    \b
    Example: ckptkit average epoch8.pth epoch9.pth epoch10.pth mean.pth
             ckptkit average --weight 0.9 --weight 0.1 old.pth new.pth mixed.pth
    """
    from ckptkit.transforms.combine import average

    request.run(
        source=average([request.opened(each, key) for each in request.sources], shares or None)
    )
