"""ckptkit lora"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.options import KEY, KINDS, Writer


@click.group("lora")
def command() -> None:
    """Merge, check, convert and extract adapters: LoRA and its relatives.

    \b
    Example: ckptkit lora merge base adapter merged
    """


def _merge(
    request: Any,
    key: str | None,
    weights: tuple[float, ...],
    cast: dict[str, str],
    quantize: str | None,
    **given: Any,
) -> Any:
    from ckptkit import edits
    from ckptkit.api import open_checkpoint
    from ckptkit.lora.merge import merge_lora

    base, *adapters = request.sources
    if weights and len(weights) != len(adapters):
        raise click.UsageError(f"give --weight once for each of {len(adapters)} adapters")
    given |= {"weights": weights or None, "strict": request.options.strict}
    later = (("cast", "dtypes", cast), ("quantize", "kind", quantize))
    return request.run(
        lambda checkpoint: merge_lora(checkpoint, adapters, **given),
        *(edits.step(word, **{name: value}) for word, name, value in later if value),
        source=open_checkpoint(base, request.options, key=key),
        key=key,
    )


command.add_command(
    Writer(
        name="merge",
        callback=_merge,
        several=True,
        params=[
            click.Option(
                ["--weight", "weights"], metavar="W", multiple=True, type=float,
                help="Weight of each ADAPTER, in order (repeatable). Default: 1.",
            ),
            click.Option(
                ["--tied"], type=click.Choice(["untie", "keep"]),
                help="If the embedding is the head too, and one is changed: give the head a matrix "
                "of its own, or change both.",
            ),
            click.Option(
                ["--base-is"], type=click.Choice(["residual"]),
                help="BASE is what an initialization such as PiSSA left of a model.",
            ),
            click.Option(
                ["--component"], metavar="NAME",
                help="Merge the modules of one component alone: unet, transformer, text_encoder...",
            ),
            click.Option(
                ["--alpha"], metavar="A", type=float, help="Alpha of files that record no scale.",
            ),
            click.Option(
                ["--sub"], metavar="REGEX=REPL", **KINDS["substitutions"],
                help="Replace matches in names of modules, as re.sub does (repeatable).",
            ),
            click.Option(
                ["--dtype"], metavar="DTYPE", help="Cast BASE to this dtype, then merge.",
            ),
            click.Option(
                ["--cast"], metavar="[GLOB=]DTYPE", **KINDS["casts"],
                help="Cast the result: weights that match, or all others (repeatable).",
            ),
            click.Option(
                ["--quantize"], metavar="KIND", help="Quantize the result: fp8-block or mxfp4.",
            ),
            click.Option(["--key"], metavar="PATH", help=KEY),
        ],
        help="""Add the changes of adapters to a base model: SRC is BASE, then ADAPTER... in order.

        An ADAPTER is a folder of peft, or a file of kohya, diffusers or ComfyUI. Nothing is written
        unless each tensor of it has its place in BASE. From folder to folder, configuration and
        tokenizer files come along.

        \b
        Example: ckptkit lora merge llama adapter merged
                 ckptkit lora merge --weight 0.8 sd15.safetensors style.safetensors out""",
    )
)  # fmt: skip
