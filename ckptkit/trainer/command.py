"""ckptkit train, and ``python -m ckptkit.trainer``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import click

from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import escape, message, on_command_line
from ckptkit.trainer.config import (
    ADAM_LR,
    DATA,
    FORMS,
    MODELS,
    OPTIMIZERS,
    PARALLEL,
    Config,
    Files,
)

Option = Callable[[Callable[..., None]], Callable[..., None]]

INTERRUPTED = 130  # exit code
FILE = click.Path(dir_okay=False, path_type=Path)
CHECKPOINT = click.Path(path_type=Path)  # a file, or a folder of shards


def choice(name: str, values: tuple[str, ...], help: str) -> Option:
    return click.option(
        name, type=click.Choice(values), default=_default(name), show_default=True, help=help
    )


def number(
    name: str, help: str, least: float = 0, most: float | None = None, strictly: bool = False
) -> Option:
    """Return an option for a number from `least`, or above it if `strictly`, to below `most`."""
    default = _default(name)
    kind: Any = click.FloatRange(least, most, min_open=strictly, max_open=True)
    if isinstance(default, int):
        kind = click.IntRange(int(least))
    return click.option(name, type=kind, default=default, show_default=True, help=help)


def flag(name: str, help: str) -> Option:
    return click.option(name, is_flag=True, default=bool(_default(name)), help=help)


def switch(name: str, help: str) -> Option:
    """Return an option that --resume may take from a checkpoint, and that can be turned off."""
    names = f"{name}/--no-{name.removeprefix('--')}"
    return click.option(names, default=_default(name), show_default=True, help=help)


def _default(name: str) -> Any:
    return getattr(Config, name.removeprefix("--").replace("-", "_"), None)


def _devices(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _resume(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Take the options that are not typed from the checkpoint."""
    if path is not None and not ctx.resilient_parsing:
        from ckptkit.trainer import saving

        ctx.default_map = saving.settings(path)
    return path


@click.command("train")
@click.argument("out", type=click.Path(path_type=Path), required=False)
@choice("--model", MODELS, "Model to train.")
@click.option(
    "--data", default=Config.data, show_default=True, metavar="DATA", help=f"Data set: {DATA}."
)
@number("--width", "Factor on the number of channels.", strictly=True)
@number("--dropout", "Dropout probability of a densenet.", most=1)
@click.option(
    "--devices",
    default="",
    show_default=False,
    metavar="A,B",
    callback=_devices,
    help="Devices, comma-separated; the model is held by the first. Default: all GPUs, or the CPU. "
    "cpu,cpu simulates two for dp.",
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
@switch("--memory-efficient", "Recompute the bottlenecks of a densenet in the backward pass.")
@switch("--preserve-rng", "Restore the random state for what is recomputed; dropout needs it.")
@number("--clip-norm", "Clip the norm of the gradients to this value (0: no clipping).")
@choice("--optimizer", OPTIMIZERS, "Optimizer.")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    help=f"Learning rate. Default: {ADAM_LR} for Adam; for SGD it depends on the model.",
)
@number("--momentum", "Momentum of SGD; first beta of Adam.")
@click.option(
    "--weight-decay", type=click.FloatRange(0), help="Weight decay. Default: as torch has it."
)
@number("--lr-step", "Epochs between changes of the learning rate (0: no change).")
@number("--lr-gamma", "Factor of each change of the learning rate.", strictly=True)
@flag("--amp", "Compute in bfloat16 where that is safe.")
@number("--seed", "Seed of all random number generators.")
@flag("--deterministic", "Refuse nondeterministic algorithms.")
@number("--eval-every", "Also evaluate every N steps (0: only after each epoch).")
@choice(
    "--save-form",
    FORMS,
    "Contents: the state_dict, with its epoch, or everything that --resume needs.",
)
@switch("--keep-module-prefix", "Keep the prefix 'module.' of the wrapper in the keys.")
@number("--save-every", "Also save every N epochs, as OUT with .epochN (0: only at the end).")
@switch("--save-best", "Also save the checkpoint with the best accuracy, as OUT with .best.")
@click.option(
    "--resume",
    type=CHECKPOINT,
    metavar="FILE",
    is_eager=True,
    callback=_resume,
    help="Resume from a checkpoint of --save-form full, with its options.",
)
@click.option("--metrics", type=FILE, metavar="FILE", help="Write metrics as JSON lines.")
@click.option("--plot", type=FILE, metavar="FILE", help="Write a plot of loss and accuracy (PNG).")
@click.option(
    "--memory-report",
    type=FILE,
    metavar="FILE",
    help="Write the memory and the seconds of each step as JSON lines.",
)
@flag("--trace-shapes", "Print how batches are split over devices.")
@click.option(
    "--evaluate",
    type=CHECKPOINT,
    metavar="FILE",
    help="Do not train; print the accuracy of a file or folder.",
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
        loop.evaluate(config, evaluate, _log)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT' (or --evaluate FILE)")
    files = Files(resume, metrics, plot, memory_report)
    loop.check_output(out, files, config, force)
    loop.train(
        config, out, files, trace_shapes=trace_shapes, log=_silent if quiet else _log, bar=_bar
    )


def _log(line: str) -> None:
    click.echo(escape(line))


def _silent(line: str) -> None:
    """Print nothing (--quiet)."""


def _bar(steps: Iterable[Any], title: str) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(steps, desc=title, leave=False, disable=not sys.stderr.isatty(), delay=1)


def main() -> NoReturn:
    """Run as the main program, with the messages and exit codes of ``ckptkit train``."""
    try:
        with on_command_line():
            command.main(prog_name="python -m ckptkit.trainer", standalone_mode=False)
    except click.ClickException as error:
        _leave(error.format_message(), "see `python -m ckptkit.trainer --help`", error.exit_code)
    except CkptkitError as error:
        _leave(str(error), error.hint, error.exit_code)
    except click.Abort:
        _leave("interrupted", None, INTERRUPTED)
    sys.exit(0)


def _leave(text: str, hint: str | None, code: int) -> NoReturn:
    """Print an error and its hint, as `ckptkit` prints them, and exit."""
    click.echo("\n".join(message("error", text, hint)), err=True)
    sys.exit(code)
