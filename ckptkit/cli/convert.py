"""ckptkit convert"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.formats.format import Asked


@click.command("convert", cls=options.WithDequantize)
@options.edit
@options.asked
@options.dequantize
@click.option("--keep", metavar="GLOB", multiple=True, help="Keep only such weights (repeatable).")
@click.option("--drop", metavar="GLOB", multiple=True, help="Leave such weights out (repeatable).")
@click.option(
    "--strip", metavar="P", multiple=True, help="Remove this leading prefix (repeatable)."
)
@click.option("--add", metavar="P", help="Put this before each key.")
@options.mapping
@options.substitutions
@click.option(
    "--cast", metavar="[GLOB=]DTYPE", multiple=True, callback=options.casts, help="Cast the floats."
)
@click.option(
    "--quantize", metavar="KIND", help="Quantize the matrices of layers: fp8-block or mxfp4."
)
@click.option("--to", "device", metavar="DEVICE", help="Retag everything for this device.")
@click.option(
    "--device-map",
    "devices",
    metavar="A=B",
    multiple=True,
    callback=options.pairs,
    help="Retag A as B.",
)
@click.option("--compact", is_flag=True, help="Leave out what storages hold beyond their tensors.")
@options.key
def command(edit: options.Edit, asked: Asked | None, key: str | None, **transforms: Any) -> None:
    """Convert to another format, changed on the way.

    Any format that can be read becomes any that can be written.

    The suffix of DST or --format says which; see `ckptkit formats`. Transforms apply in this order, whatever the
    order of the options: dequantize, keep and drop (by names in SRC), strip, add, map and sub, cast, quantize,
    to and device-map, compact.

    \b
    Example: ckptkit convert run.pth run.safetensors
             ckptkit convert run.pth half.pth --strip module. --cast bfloat16 --to cpu
    """
    edit.run(*_steps(**transforms), key=key, keep_format=False, asked=asked)


def _steps(
    dequantize: str | None,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    strip: tuple[str, ...],
    add: str | None,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
    cast: dict[str, str],
    quantize: str | None,
    device: str | None,
    devices: dict[str, str],
    compact: bool,
) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
    """The transforms that are asked for, in the documented order."""
    from ckptkit.transforms import devices as places
    from ckptkit.transforms import elements, keys

    if device is not None and devices:
        raise click.UsageError("say either --to DEVICE or --device-map A=B")
    if dequantize is not None:
        from ckptkit.transforms import quantized

        yield lambda ck: quantized.dequantize(ck, dequantize or None)
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
    if quantize is not None:
        from ckptkit.transforms import quantizing

        yield lambda ck: quantizing.quantize(ck, quantize)
    if device is not None or devices:
        yield lambda ck: places.remap(ck, device or devices)
    if compact:
        yield elements.compact
