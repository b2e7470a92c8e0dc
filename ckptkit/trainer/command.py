"""ckptkit train, and ``python -m ckptkit.trainer``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import click

from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import escape
from ckptkit.trainer.config import DATA, FORMS, MODELS, PARALLEL, Config, Files

Option = Callable[[Callable[..., None]], Callable[..., None]]

FILE = click.Path(dir_okay=False, path_type=Path)


def choice(name: str, values: tuple[str, ...], help: str) -> Option:
    return click.option(
        name, type=click.Choice(values), default=_default(name), show_default=True, help=help
    )


def number(name: str, help: str, least: float = 0, strictly: bool = False) -> Option:
    default = _default(name)
    kind = (
        click.IntRange(int(least))
        if isinstance(default, int)
        else click.FloatRange(least, min_open=strictly)
    )
    return click.option(name, type=kind, default=default, show_default=True, help=help)


def flag(name: str, help: str) -> Option:
    return click.option(name, is_flag=True, help=help)


def _default(name: str) -> Any:
    return getattr(Config, name.removeprefix("--").replace("-", "_"))


def _devices(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


@click.command("train")
@click.argument("out", type=click.Path(path_type=Path), required=False)
@choice("--model", MODELS, "Model to train.")
@click.option(
    "--data", default=Config.data, show_default=True, metavar="DATA", help=f"Data set: {DATA}."
)
@number("--width", "Factor on the number of channels.", strictly=True)
@click.option(
    "--devices",
    default="",
    show_default=False,
    metavar="A,B",
    callback=_devices,
    help="Devices, comma-separated; the model is held by the first. Default: all GPUs, or the CPU.",
)
@choice(
    "--parallel", PARALLEL, "Parallelism over several devices; ddp and fsdp run under torchrun."
)
@number("--epochs", "Number of epochs in total, those before --resume included.", 1)
@number("--batch-size", "Images per batch.", 1)
@number("--accumulate", "Batches whose gradients are accumulated for each step.", 1)
@number(
    "--segments", "Segments of an mlp or generator to recompute in the backward pass (0: none)."
)
@flag("--memory-efficient", "Recompute the bottlenecks of a densenet in the backward pass.")
@number("--clip-norm", "Clip the norm of the gradients to this value (0: no clipping).")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    help="Learning rate. Default: depends on the model.",
)
@number("--momentum", "Momentum of SGD.")
@number("--lr-step", "Epochs between changes of the learning rate (0: no change).")
@number("--lr-gamma", "Factor of each change of the learning rate.", strictly=True)
@flag("--amp", "Compute in bfloat16 where that is safe.")
@number("--seed", "Seed of all random number generators.")
@flag("--deterministic", "Refuse nondeterministic algorithms.")
@choice(
    "--save-form",
    FORMS,
    "Contents: the state_dict, with its epoch, or everything that --resume needs.",
)
@flag("--keep-module-prefix", "Keep the prefix 'module.' of the wrapper in the keys.")
@number("--save-every", "Also save every N epochs, as OUT with .epochN (0: only at the end).")
@click.option(
    "--resume", type=FILE, metavar="FILE", help="Resume from a checkpoint of --save-form full."
)
@click.option("--metrics", type=FILE, metavar="FILE", help="Write metrics as JSON lines.")
@click.option("--plot", type=FILE, metavar="FILE", help="Write a plot of loss and accuracy (PNG).")
@click.option(
    "--memory-report",
    type=FILE,
    metavar="FILE",
    help="Write the memory use of each step as JSON lines.",
)
@flag("--trace-shapes", "Print how batches are split over devices.")
@click.option(
    "--evaluate", type=FILE, metavar="FILE", help="Do not train; print the accuracy of FILE."
)
@flag("--force", "Replace OUT if it exists.")
@flag("--quiet", "Do not print a line per epoch.")
def command(
    out: Path | None,
    resume: Path | None,
    metrics: Path | None,
    plot: Path | None,
    memory_report: Path | None,
    trace_shapes: bool,
    evaluate: Path | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Train a small reference model and save it to OUT.

    It makes the checkpoints of the tests and examples. For DDP and FSDP, run under torchrun:
    torchrun --nproc-per-node 2 -m ckptkit.trainer OUT --parallel ddp

    \b
    Example: ckptkit train run.pth
             ckptkit train run.pth --parallel dp --keep-module-prefix
             ckptkit train --evaluate run.pth
    """
    import gc

    gc.enable()  # other commands end soon and need none
    config = Config(**options)
    from ckptkit.trainer import loop

    if evaluate is not None:
        loop.evaluate(config, evaluate, _say)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT' (or --evaluate FILE)")
    files = Files(resume, metrics, plot, memory_report)
    loop.check_output(out, files, config.parallel, force)
    loop.train(
        config, out, files, trace_shapes=trace_shapes, say=_silent if quiet else _say, bar=_bar
    )


def _say(line: str) -> None:
    click.echo(escape(line))


def _silent(line: str) -> None:
    """Print nothing (--quiet)."""


def _bar(steps: Iterable[Any], title: str) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(steps, desc=title, leave=False, disable=not sys.stderr.isatty(), delay=1)


def main() -> NoReturn:
    """Run as the main program, with the messages and exit codes of ``ckptkit train``."""
    try:
        command.main(prog_name="python -m ckptkit.trainer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CkptkitError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        click.echo(escape(f"ckptkit: {error}") + hint, err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(0)
