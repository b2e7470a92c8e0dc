"""ckptkit lora"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ckptkit.cli import render
from ckptkit.cli.options import KEY, KINDS, Writer
from ckptkit.cli.reading import as_json, value

CHECK = "ckptkit.lora-check/1"


@click.group("lora")
def command() -> None:
    """Merge, check, convert and extract LoRA adapters.

    \b
    Example: ckptkit lora check adapter --base base
             ckptkit lora merge base adapter merged
    """


def _merge(
    request: Any,
    key: str | None,
    weights: tuple[float, ...],
    cast: dict[str, str],
    quantize: str | None,
    **given: Any,
) -> Any:
    from ckptkit import edits, formats
    from ckptkit.api import open_checkpoint
    from ckptkit.formats.table import SHARDED_BIN, TORCH_ZIP
    from ckptkit.lora.merge import merge_lora

    base, *adapters = request.sources
    if weights and len(weights) != len(adapters):
        raise click.UsageError(f"give --weight once for each of {len(adapters)} adapters")
    given |= {"weight": weights or None, "strict": request.options.strict}
    later = (("cast", "dtypes", cast), ("quantize", "kind", quantize))
    source = open_checkpoint(base, request.options, key=key)
    is_named = request.options.format is not None or formats.of_suffix(request.dst) is not None
    if source.folder is not None and source.format == TORCH_ZIP.name and not is_named:
        # If the base is a folder, the output is a folder with the configuration.
        options = replace(request.options, format=SHARDED_BIN.name)
        request = replace(request, options=options)
    return request.run(
        lambda checkpoint: merge_lora(checkpoint, adapters, **given),
        *(edits.step(word, **{name: value}) for word, name, value in later if value),
        source=source,
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
                help="If an adapter changes one of two tied matrices (embedding and head): give "
                "the head its own matrix, or change both.",
            ),
            click.Option(
                ["--base-is"], type=click.Choice(["residual"]),
                help="BASE is the residual that an initialization such as PiSSA left of a model.",
            ),
            click.Option(
                ["--component"], metavar="NAME",
                help="Merge only the modules of one component: unet, transformer, text_encoder...",
            ),
            click.Option(
                ["--alpha"], metavar="A", type=float, help="Alpha, if the files record no scale.",
            ),
            click.Option(
                ["--sub"], metavar="REGEX=REPL", **KINDS["substitutions"],
                help="Replace matches in the names of modules, like re.sub (repeatable).",
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
        help="""Merge adapters into a base model: SRC is BASE, then each ADAPTER in order.

        An ADAPTER is a folder of peft, or a file of kohya, diffusers or ComfyUI. If BASE lacks a
        tensor that it changes, nothing is written. From folder to folder, ckptkit copies the
        configuration and tokenizer files of BASE.

        \b
        Example: ckptkit lora merge llama adapter merged
                 ckptkit lora merge --weight 0.8 sd15.safetensors style.safetensors out""",
    )
)  # fmt: skip


# Options of the commands that write an adapter. The format of adapters is fixed.
_WRITES = "--force", "--dry-run", "--json", "--quiet", "--verify", "--no-check", "--durable"


def _convert(request: Any, **given: Any) -> Any:
    import ckptkit

    (adapter,) = request.sources
    return ckptkit.convert_lora(adapter, request.dst, options=request.options, **given), ()


command.add_command(
    Writer(
        name="convert",
        callback=_convert,
        in_place=False,
        only=_WRITES,
        params=[
            click.Option(
                ["--to"], type=click.Choice(["peft", "diffusers", "kohya", "comfy"]), required=True,
                help="Layout of DST: peft (a folder), or another one (a safetensors file).",
            ),
            click.Option(
                ["--base"], metavar="BASE",
                help="Find the dots that kohya wrote as underscores in the names of BASE.",
            ),
            click.Option(
                ["--component"], metavar="NAME",
                help="Convert one component: unet, transformer, text_encoder... For an adapter of "
                "peft: the component that it changes.",
            ),
            click.Option(
                ["--alpha"], metavar="A", type=float, help="Alpha, if the files record no scale.",
            ),
            click.Option(
                ["--bake"], is_flag=True,
                help="Multiply the scale into the matrices, for programs that ignore metadata.",
            ),
        ],
        help="""Convert an adapter for another program: SRC is a folder of peft, or a file.

        Names change, tensors keep their bytes, and scales go where the layout has them. The q, k
        and v of Flux are joined or split as the layout needs. Ambiguous names are refused.

        \b
        Example: ckptkit lora convert --to diffusers kohya.safetensors new.safetensors
                 ckptkit lora convert --to peft style.safetensors folder""",
    )
)  # fmt: skip


def _extract(request: Any, **given: Any) -> Any:
    import ckptkit

    if len(request.sources) != 2:
        raise click.UsageError("give TUNED, BASE and DST")
    tuned, base = request.sources
    report = ckptkit.extract_lora(tuned, base, request.dst, options=request.options, **given)
    return _shown(report, request)


def _resize(request: Any, rank: int) -> Any:
    import ckptkit

    (adapter,) = request.sources
    report = ckptkit.resize_lora(adapter, request.dst, rank=rank, options=request.options)
    return _shown(report, request)


def _shown(report: Any, request: Any) -> Any:
    """Print the rank and the error of each module; return the conversion for the summary."""
    done = report.conversion
    rows = [[name, str(rank), f"{error:.3g}"] for name, (rank, error) in report.modules.items()]
    if request.as_json:
        notes = (f"{name}: rank {rank}, relative error {error}" for name, rank, error in rows)
        done = replace(done, checkpoint=replace(done.checkpoint, notes=(*done.notes, *notes)))
    elif not request.quiet and rows:
        right = ["rank", "relative error"]
        render.emit_text(*render.table(["module", *right], rows, right), "")
    return done, ()


_RANK: dict[str, Any] = {"metavar": "N", "type": click.IntRange(1), "required": True}
command.add_command(
    Writer(
        name="extract",
        callback=_extract,
        several=True,
        only=_WRITES,
        params=[
            click.Option(["--rank"], help="Largest rank of a matrix.", **_RANK),
            click.Option(
                ["--conv-rank"], metavar="N", type=click.IntRange(1),
                help="Rank of convolutions with kernels larger than 1. Default: --rank.",
            ),
            click.Option(
                ["--save-module", "save_modules"], metavar="NAME", multiple=True,
                help="Store the complete tensors of this module (repeatable).",
            ),
        ],
        help="""Extract an adapter from two models: SRC... is TUNED, then BASE.

        DST is a folder of peft. Each matrix that differs is approximated with rank N; ckptkit
        prints the remaining error. Vectors that differ are dropped with a warning; tensors with
        another shape are refused. --save-module stores the complete tensors of a module.

        \b
        Example: ckptkit lora extract --rank 16 tuned base adapter""",
    )
)  # fmt: skip
command.add_command(
    Writer(
        name="resize",
        callback=_resize,
        in_place=False,
        only=_WRITES,
        params=[click.Option(["--rank"], help="Largest rank of a matrix.", **_RANK)],
        help="""Reduce the rank of an adapter, in the same layout.

        \b
        Example: ckptkit lora resize --rank 8 adapter smaller""",
    )
)  # fmt: skip


@command.command("check")
@click.argument("adapter", metavar="ADAPTER")
@value("--base", "BASE", "Compare names, shapes and norms with this base model.")
@value("--component", "NAME", "Check only the modules of one component: unet, text_encoder...")
@click.option(
    "--for",
    "target",
    type=click.Choice(["vllm"]),
    help="Also list what this program does not load.",
)
@click.option(
    "--fail-on", "level", type=click.Choice(["error", "warning", "note", "never"]),
    default="warning", help="Exit with 1 for a finding of this level or a more severe one.",
)  # fmt: skip
@as_json(CHECK)
def check(adapter: str, level: str, as_json: bool, **given: Any) -> int:
    """Find out why an adapter does not load, or changes nothing, and how to fix it.

    Lists all findings, each with a command or the next step. Without --base, only the files of the
    adapter are checked. Exit code 1 for an error or a warning (see --fail-on), 3 if a file cannot
    be read.

    \b
    Example: ckptkit lora check adapter --base llama
             ckptkit lora check adapter --for vllm
    """
    from ckptkit.lora.check import check_lora

    report = check_lora(adapter, **given)
    if as_json:
        render.emit_json({"schema": CHECK, **report.as_json()})
    else:
        read, found = report.adapter, report.findings
        ranks = f", ranks {', '.join(map(str, read.ranks))}" if read.ranks else ""
        count = render.plural(len(read.modules), "module")
        line = f"{read.layout}, {read.method}, {count}{ranks}: "
        line += render.plural(len(found), "finding") if found else "no findings"
        render.emit(*render.wrapped(f"{render.escape(adapter)}: {line}", whole=True))
        for each in found:
            render.emit(
                "", *render.wrapped(f"{each.level} ({each.code}): {render.escape(each.title)}")
            )
            if each.command:
                render.emit(f"  {render.escape(each.command)}")
            elif each.hint:
                render.emit(
                    *map(render.labelled, render.wrapped(f"hint: {render.escape(each.hint)}"))
                )
        if given["base"] is None:
            note = "note: --base BASE compares names and shapes with the base model"
            render.emit("", *map(render.labelled, render.wrapped(note)))
    fails = {"error": ("error",), "warning": ("error", "warning"), "never": ()}
    fails["note"] = "error", "warning", "note"
    return int(any(each.level in fails[level] for each in report.findings))
