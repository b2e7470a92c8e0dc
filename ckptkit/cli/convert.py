"""ckptkit convert"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint


@click.command("convert", cls=options.Writer)
@options.edit
@click.option(
    "--dequantize", is_flag=True, help="Convert quantized weights to float32, packed ones too."
)
@click.option(
    "--keep",
    metavar="GLOB",
    multiple=True,
    help="Keep only weights whose names match (repeatable).",
)
@click.option(
    "--drop",
    metavar="GLOB",
    multiple=True,
    help="Leave out weights whose names match (repeatable).",
)
@click.option(
    "--strip", metavar="P", multiple=True, help="Remove this prefix from the keys (repeatable)."
)
@click.option("--add", metavar="P", help="Add this prefix to each key.")
@options.mapping
@options.substitutions
@click.option(
    "--cast",
    metavar="[GLOB=]DTYPE",
    multiple=True,
    callback=options.casts,
    help="Cast floating-point weights to DTYPE, all or those whose names match (repeatable).",
)
@click.option("--to", "device", metavar="DEVICE", help="Change all device tags to DEVICE.")
@click.option(
    "--device-map",
    "devices",
    metavar="A=B",
    multiple=True,
    callback=options.pairs,
    help="Change the device tag A to B (repeatable).",
)
@click.option("--compact", is_flag=True, help="Leave out bytes of storages that no tensor uses.")
@options.key
def command(edit: options.Edit, key: str | None, **transforms: Any) -> None:
    """Convert to another format, and transform on the way.

    Any readable format becomes any writable one. The suffix of DST, or --format, chooses the output
    format; `ckptkit formats` lists them.

    Transforms are applied in this order, whatever the order of the options: dequantize, keep and
    drop (by names in SRC), strip, add, map and sub, cast, to and device-map, compact.

    \b
    Example: ckptkit convert run.pth run.safetensors
             ckptkit convert run.pth half.pth --strip module. --cast bfloat16 --to cpu
    """
    edit.run(*_steps(**transforms), key=key, keep_format=False)


def _steps(
    dequantize: bool,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    strip: tuple[str, ...],
    add: str | None,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
    cast: dict[str, str],
    device: str | None,
    devices: dict[str, str],
    compact: bool,
) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
    """Yield the requested transforms, in the documented order."""
    from ckptkit.transforms import devices as places
    from ckptkit.transforms import elements, keys

    if device is not None and devices:
        raise click.UsageError("give either --to DEVICE or --device-map A=B")
    if dequantize:
        from ckptkit.transforms import quantized

        yield quantized.dequantize
    if keep or drop:
        yield lambda ck: keys.select(ck, keep, drop)
    if strip:
        yield lambda ck: keys.strip_prefix(ck, *strip)
    if add is not None:
        yield lambda ck: keys.add_prefix(ck, add)
    if mapping or substitutions:
        yield lambda ck: keys.rename(ck, mapping, substitutions)
    if cast:
        yield lambda ck: elements.cast(ck, cast)
    if device is not None or devices:
        yield lambda ck: places.remap(ck, device or devices)
    if compact:
        yield elements.compact
