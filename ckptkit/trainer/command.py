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
@choice("--model", MODELS, "What to train.")
@click.option(
    "--data", default=Config.data, show_default=True, metavar="DATA", help=f"What on: {DATA}."
)
@number("--width", "A factor on the channels of the model.", strictly=True)
@click.option(
    "--devices",
    default="",
    metavar="A,B",
    callback=_devices,
    help="The one that holds the model first.",
)
@choice("--parallel", PARALLEL, "How to use several; ddp and fsdp under torchrun.")
@number("--epochs", "Times through the data, those of --resume included.", 1)
@number("--batch-size", "Images in a batch.", 1)
@number("--accumulate", "Batches before each step.", 1)
@number("--segments", "Parts of an mlp or generator that are recomputed, 0: none.")
@flag("--memory-efficient", "Recompute the bottlenecks of a densenet.")
@number("--clip-norm", "The largest norm of the gradients, 0: any.")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    help="Learning rate.  [default: what suits the model]",
)
@number("--momentum", "Momentum of SGD.")
@number("--lr-step", "Epochs between two changes of the learning rate, 0: none.")
@number("--lr-gamma", "The factor of such a change.", strictly=True)
@flag("--amp", "Compute in bfloat16 where that is safe.")
@number("--seed", "Of every random number.")
@flag("--deterministic", "Refuse algorithms that are not.")
@choice("--save-form", FORMS, "State_dict alone; with its epoch; or all that --resume needs.")
@flag("--keep-module-prefix", "Save what the wrapper calls it: module.*")
@number("--save-every", "Also save each so many epochs, as OUT with .epochN, 0: not.")
@click.option(
    "--resume", type=FILE, metavar="FILE", help="Go on from a checkpoint of --save-form full."
)
@click.option("--metrics", type=FILE, metavar="FILE", help="Write them as JSON lines.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw loss and accuracy (PNG).")
@click.option(
    "--memory-report", type=FILE, metavar="FILE", help="Write what each step needs as JSON lines."
)
@flag("--trace-shapes", "Show how batches are split.")
@click.option(
    "--evaluate", type=FILE, metavar="FILE", help="Train nothing: print the accuracy of FILE."
)
@flag("--force", "Replace OUT if it is there.")
@flag("--quiet", "Print no line per epoch.")
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
    """Train a small model and save it to OUT.

    It is how the checkpoints of these tests and examples come to be. Under torchrun: torchrun --nproc-per-node 2 -m
    ckptkit.trainer OUT --parallel ddp

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
    """What --quiet makes of a line."""


def _bar(steps: Iterable[Any], title: str) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(steps, desc=title, leave=False, disable=not sys.stderr.isatty(), delay=1)


def main() -> NoReturn:
    """Run as a program of its own, with the messages and exit codes of ``ckptkit train``."""
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
