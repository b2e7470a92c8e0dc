"""ckptkit convert"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, parsing, rule_options

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.rules.applying import Asked as RulesAsked


@click.command("convert", cls=options.WithDequantize)
@options.edit
@options.parts
@options.dequantize
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
@click.option(
    "--rule",
    "rules",
    metavar="'LEFT -> RIGHT'",
    multiple=True,
    help="Rearrange tensors by a rule; other tensors are kept (repeatable; see `ckptkit help "
    "rules`).",
)
@rule_options.with_sizes
@options.mapping
@options.substitutions
@click.option(
    "--cast",
    metavar="[GLOB=]DTYPE",
    multiple=True,
    callback=parsing.casts,
    help="Cast floating-point weights to DTYPE: those whose names match, or all others "
    "(repeatable).",
)
@click.option(
    "--quantize", metavar="KIND", help="Quantize the matrices of layers: fp8-block or mxfp4."
)
@click.option("--to", "device", metavar="DEVICE", help="Change all device tags to DEVICE.")
@options.devices
@click.option(
    "--drop-entry",
    "entries",
    metavar="PATH",
    multiple=True,
    help="Leave out the entry at PATH, such as optimizer, and keep the rest (repeatable).",
)
@click.option(
    "--set-metadata",
    "metadata",
    metavar="NAME=TEXT",
    multiple=True,
    callback=parsing.texts,
    help="Set an entry of the metadata of safetensors (repeatable).",
)
@click.option(
    "--optimizer-keys",
    type=click.Choice(["names", "numbers"]),
    help="Key the state of the optimizer by names (FSDP, DCP) or by numbers (torch.optim).",
)
@click.option("--compact", is_flag=True, help="Leave out bytes of storages that no tensor uses.")
@options.key
def command(
    request: options.Request,
    key: str | None,
    rules: tuple[str, ...],
    config: str | None,
    args: dict[str, int],
    **transforms: Any,
) -> None:
    """Convert to another format, and transform on the way.

    Any readable format becomes any writable one. The suffix of DST, or --format, chooses the output
    format; `ckptkit formats` lists them. Without either, a folder is written when a folder is read.
    From a folder with config.json into a folder, the configuration, tokenizer and generation files
    are copied along.

    Transforms apply in this order, whatever the order of the options: drop-entry, optimizer-keys
    and set-metadata, dequantize, keep and drop (by names in SRC), strip, add, map and sub, rule,
    cast, quantize, to and device, compact.

    \b
    Example: ckptkit convert run.pth run.safetensors
             ckptkit convert run.pth half.pth --strip module. --cast bfloat16 --to cpu
             ckptkit convert run.pth model.pth --drop-entry optimizer
    """
    ruled = rule_options.asked(request, config, args) if rules else None
    if ruled is None and (config is not None or args):
        raise click.UsageError("--config and --arg are sizes for --rule")
    steps = _steps(rules=_ruled(rules, ruled), **transforms)
    request.run(*steps, key=key, keep_format=False, ruled=ruled)


def _ruled(
    lines: tuple[str, ...], ruled: RulesAsked | None
) -> Callable[[Checkpoint], Checkpoint] | None:
    """Return the step that applies the rules of --rule, None without any."""
    if ruled is None:
        return None
    from ckptkit.rules.applying import step
    from ckptkit.rules.planner import REST, Rules, unused_argument

    rules = Rules.parse(lines)
    for word in ruled.args:
        if word not in rules.words():
            raise unused_argument(word, rules.words())
    return lambda ck: step(ck, rules, REST, ruled)


def _steps(
    dequantize: str | None,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    strip: tuple[str, ...],
    add: str | None,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
    rules: Callable[[Checkpoint], Checkpoint] | None,
    cast: dict[str, str],
    quantize: str | None,
    device: str | None,
    devices: dict[str, str],
    compact: bool,
    entries: tuple[str, ...],
    metadata: dict[str, str],
    optimizer_keys: str | None,
) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
    """Yield the requested transforms, in the documented order; no other is imported."""
    if device is not None and devices:
        raise click.UsageError("say either --to DEVICE or --device A=B")
    yield from _entries(entries, metadata, optimizer_keys)
    if dequantize is not None:
        from ckptkit.transforms import quantized

        yield lambda ck: quantized.dequantize(ck, dequantize or None)
    yield from _names(keep, drop, strip, add, mapping, substitutions)
    if rules is not None:
        yield rules
    if cast:
        from ckptkit.transforms import elements

        yield lambda ck: elements.cast(ck, cast)
    if quantize is not None:
        from ckptkit.transforms import quantizing

        yield lambda ck: quantizing.quantize(ck, quantize)
    if device is not None or devices:
        from ckptkit.transforms import devices as places

        yield lambda ck: places.remap(ck, device or devices)
    if compact:
        from ckptkit.transforms import elements

        yield elements.compact


def _entries(
    entries: tuple[str, ...], metadata: dict[str, str], optimizer_keys: str | None
) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
    """Yield the transforms of what is beside the weights."""
    if entries or metadata:
        from ckptkit.transforms import structure
    for entry in entries:
        yield partial(structure.without, path=entry)
    if optimizer_keys is not None:
        from ckptkit.transforms.optimizer_keys import key_optimizer

        yield lambda ck: key_optimizer(ck, optimizer_keys)
    if metadata:
        yield lambda ck: structure.with_extras(ck, metadata)


def _names(
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    strip: tuple[str, ...],
    add: str | None,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
    """Yield the requested transforms of names."""
    if keep or drop or strip or add is not None or mapping or substitutions:
        from ckptkit.transforms import keys
    if keep or drop:
        yield lambda ck: keys.select(ck, keep, drop)
    if strip:
        yield lambda ck: keys.strip_prefix(ck, *strip)
    if add is not None:
        yield lambda ck: keys.add_prefix(ck, add)
    if mapping or substitutions:
        yield lambda ck: keys.rename(ck, mapping, substitutions)
