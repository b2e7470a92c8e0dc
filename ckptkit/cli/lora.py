"""ckptkit lora"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ckptkit.cli import render
from ckptkit.cli.options import Writer, of

CHECK = "ckptkit.lora-check/1"
LEVELS = ("error", "warning", "note")  # levels of findings, most severe first


@click.group("lora")
def command() -> None:
    """Merge, check, convert and extract LoRA adapters.

    \b
    Example: ckptkit lora check adapter --base base
             ckptkit lora merge base adapter merged
    """


# Output options of the commands that write an adapter. --format is missing, because the format of
# an adapter is fixed.
_WRITES = "--force", "--dry-run", "--json", "--quiet", "--verify", "--no-check", "--durable"


@command.command("merge", cls=Writer, several=True)
@of("lora merge")
def merge(
    request: Any,
    key: str | None,
    weights: tuple[float, ...],
    cast: dict[str, str],
    quantize: str | None,
    **given: Any,
) -> Any:
    """Merge adapters into a base model.

    The first SRC is BASE. Each further SRC is an ADAPTER, in order. An ADAPTER is a folder of peft,
    or a file of kohya, diffusers or ComfyUI. If an ADAPTER changes a tensor that BASE lacks,
    ckptkit writes nothing. If BASE and DST are folders, ckptkit copies the configuration and
    tokenizer files of BASE.

    \b
    Example: ckptkit lora merge llama adapter merged
             ckptkit lora merge --weight 0.8 sd15.safetensors style.safetensors out
    """
    from ckptkit import edits, formats
    from ckptkit.api import open_checkpoint
    from ckptkit.formats.table import SHARDED_BIN, TORCH_ZIP
    from ckptkit.lora.merge import merge_lora

    base, *adapters = request.sources
    if weights and len(weights) != len(adapters):
        raise click.UsageError(f"give --weight once for each of {len(adapters)} adapters")
    given |= {"weights": weights or None, "strict": request.options.strict}
    later = (("cast", "dtypes", cast), ("quantize", "kind", quantize))
    source = open_checkpoint(base, request.options, key=key)
    is_named = request.options.format is not None or formats.of_suffix(request.dst) is not None
    if source.folder is not None and source.format == TORCH_ZIP.name and not is_named:
        # If BASE is a folder and DST names no format, write a folder with the configuration files.
        options = replace(request.options, format=SHARDED_BIN.name)
        request = replace(request, options=options)
    return request.run(
        lambda checkpoint: merge_lora(checkpoint, adapters, **given),
        *(edits.step(word, **{name: value}) for word, name, value in later if value),
        source=source,
        key=key,
    )


@command.command("convert", cls=Writer, in_place=False, only=_WRITES)
@of("lora convert")
def convert(request: Any, **given: Any) -> Any:
    """Convert an adapter for another program.

    SRC is a folder of peft, or a file. ckptkit renames tensors and keeps their bytes. ckptkit
    stores scales where the new layout expects scales. For Flux, ckptkit joins or splits q, k and v
    as the new layout requires. `convert` refuses ambiguous names.

    \b
    Example: ckptkit lora convert --to diffusers kohya.safetensors new.safetensors
             ckptkit lora convert --to peft style.safetensors folder
    """
    import ckptkit

    (adapter,) = request.sources
    return ckptkit.convert_lora(adapter, request.dst, options=request.options, **given), ()


@command.command("extract", cls=Writer, several=True, only=_WRITES)
@of("lora extract")
def extract(request: Any, **given: Any) -> Any:
    """Extract an adapter from two models.

    The first SRC is TUNED, the second is BASE. DST is a folder of peft. ckptkit approximates the
    difference of each matrix with rank N, and prints the remaining error. ckptkit drops the
    differences of vectors, with a warning. `extract` refuses tensors whose shapes differ.
    --save-module stores the complete tensors of a module.

    \b
    Example: ckptkit lora extract --rank 16 tuned base adapter
    """
    import ckptkit

    if len(request.sources) != 2:
        raise click.UsageError("give TUNED, BASE and DST")
    tuned, base = request.sources
    report = ckptkit.extract_lora(tuned, base, request.dst, options=request.options, **given)
    return _shown(report, request)


@command.command("resize", cls=Writer, in_place=False, only=_WRITES)
@of("lora resize")
def resize(request: Any, rank: int) -> Any:
    """Reduce the rank of an adapter, in the same layout.

    \b
    Example: ckptkit lora resize --rank 8 adapter smaller
    """
    import ckptkit

    (adapter,) = request.sources
    report = ckptkit.resize_lora(adapter, request.dst, rank=rank, options=request.options)
    return _shown(report, request)


def _shown(report: Any, request: Any) -> Any:
    """Print the rank and the error of each module. Return the conversion for the summary."""
    done = report.conversion
    rows = [[name, str(rank), f"{error:.3g}"] for name, (rank, error) in report.modules.items()]
    if request.as_json:
        notes = (f"{name}: rank {rank}, relative error {error}" for name, rank, error in rows)
        done = replace(done, checkpoint=replace(done.checkpoint, notes=(*done.notes, *notes)))
    elif not request.quiet and rows:
        right = ["rank", "relative error"]
        render.emit_text(*render.table(["module", *right], rows, right), "")
    return done, ()


@command.command("check")
@click.argument("adapter", metavar="ADAPTER")
@of("lora check")
def check(adapter: str, level: str, as_json: bool, **given: Any) -> int:
    """Explain why an adapter does not load or has no effect.

    Lists all findings, each with a command or the next step. Without --base, `check` reads only the
    files of the adapter. The exit code is 1 for an error or a warning (see --fail-on), and 3 if a
    file is unreadable.

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
            title = f"{each.level} ({each.code}): {each.title}"
            render.emit("", *render.wrapped(render.escape(title)))
            if each.command:
                render.emit(f"  {render.escape(each.command)}")
            elif each.hint:
                render.emit(*render.remark(f"hint: {each.hint}"))
        if given["base"] is None:
            note = "note: --base BASE compares names and shapes with the base model"
            render.emit("", *render.remark(note))
    fails = LEVELS[: LEVELS.index(level) + 1] if level in LEVELS else ()
    return int(any(each.level in fails for each in report.findings))
