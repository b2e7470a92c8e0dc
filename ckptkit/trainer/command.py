"""Define the command ``ckptkit train``, and run it for ``python -m ckptkit.trainer``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import escape, message, on_command_line
from ckptkit.trainer.config import CHANGEABLE, PREFIXED, Config, RunFiles, choices, table

INTERRUPTED = 130  # exit code of an interrupted run (Ctrl-C)
FILE = click.Path(dir_okay=False, path_type=Path)
FILES = tuple(each.name for each in fields(RunFiles))
CHECKPOINT = click.Path(path_type=Path)  # a file or a folder of shards


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of Config and of RunFiles."""
    for each in reversed((*fields(Config), *fields(RunFiles))):
        function = _option(each)(function)
    return function


def _option(of: Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag, (kind, text) = f"--{of.name.replace('_', '-')}", table()[of.name]
    words: dict[str, Any] = {"default": of.default, "help": text, "show_default": True}
    if kind[:1].isupper():
        words["metavar"] = kind
    if of.name == "resume":
        words |= {"type": CHECKPOINT, "is_eager": True, "callback": _resume}
    elif of.name in FILES:
        words["type"] = FILE
    elif of.name == "devices":
        words |= {"default": "", "show_default": False, "callback": _devices}
    elif isinstance(of.default, bool):
        # --resume may set a flag from a checkpoint, so there must be an option that clears the
        # flag.
        if of.name in CHANGEABLE:
            flag += f"/--no-{flag[2:]}"
        words["is_flag"] = True
    elif kind.startswith("{"):
        words["type"] = click.Choice(choices(of.name))
    elif isinstance(of.default, int) or kind.startswith(">="):
        words["type"] = click.IntRange(int(kind.removeprefix(">=") or 0))
    elif not isinstance(of.default, str):
        most = int(kind[1:]) if kind.startswith("<") else None
        words["type"] = click.FloatRange(0, most, min_open=kind == ">0", max_open=True)
    return click.option(flag, **words)


def _devices(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _resume(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Use the options of the checkpoint as defaults."""
    if path is not None and not ctx.resilient_parsing:
        from ckptkit.trainer import saving

        ctx.default_map = saving.settings(path)
    return path


@click.command("train")
@click.argument("out", type=click.Path(path_type=Path), required=False)
@_options
@click.option("--trace-shapes", is_flag=True, help="Print how batches are split over devices.")
@click.option(
    "--evaluate",
    type=CHECKPOINT,
    metavar="FILE",
    help="Do not train. Print the accuracy of the weights in a file or folder.",
)
@click.option("--force", is_flag=True, help="Replace checkpoints that exist.")
@click.option("--quiet", "-q", is_flag=True, help="Do not print a line per epoch.")
def command(
    out: Path | None,
    trace_shapes: bool,
    evaluate: Path | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Train a small reference model and save it to OUT.

    The tests and examples of ckptkit use such checkpoints. For DDP and FSDP, run under torchrun:
    torchrun --nproc-per-node 2 -m ckptkit.trainer OUT --parallel ddp

    \b
    Example: ckptkit train run.pth
             ckptkit train run.pth --parallel dp --keep-module-prefix
             ckptkit train --evaluate run.pth
    """
    # The command line disables garbage collection, and garbage would fill memory in a long run.
    gc.enable()
    source = click.get_current_context().get_parameter_source("keep_module_prefix")
    if source is ParameterSource.DEFAULT_MAP and options["parallel"] not in PREFIXED:
        # The checkpoint had a prefix, but this run has no wrapper.
        options["keep_module_prefix"] = False
    files = RunFiles.of(options)
    config = Config(**options)
    from ckptkit.trainer import loop, saving

    def log(line: str) -> None:
        click.echo(escape(line))

    if evaluate is not None:
        loop.evaluate(config, evaluate, log)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT' (or --evaluate FILE)")
    after = saving.finished_epochs(files.resume) if files.resume else 0
    saving.check_output(out, files, config, force, after)
    log = loop.silent if quiet else log
    loop.train(config, out, files, trace_shapes=trace_shapes, log=log, bar=_bar)


def _bar(steps: Iterable[Any], title: str) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(steps, desc=title, leave=False, disable=not sys.stderr.isatty(), delay=1)


def main() -> NoReturn:
    """Run the command with the messages and exit codes of ``ckptkit train``."""
    text, hint, code = "interrupted", None, INTERRUPTED
    try:
        with on_command_line():
            command.main(prog_name="python -m ckptkit.trainer", standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        text, code = error.format_message(), error.exit_code
        hint = "see `python -m ckptkit.trainer --help`"
    except CkptkitError as error:
        text, hint, code = str(error), error.hint, error.exit_code
    except click.Abort:
        pass
    click.echo("\n".join(message("error", text, hint)), err=True)
    sys.exit(code)
