"""The command line: words and options only. A command parses, calls the library once, and prints.

Commands are imported when they are run, and the library inside their bodies, so that no command
pays for the imports of another. Exit codes: 0 fine, 1 differences, 2 usage, 3 input refused, 4
output failed, 5 a bug, 130 interrupted, 141 broken pipe.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import click

from ckptkit.cli import render
from ckptkit.core import __version__
from ckptkit.core.errors import CkptkitError, InputError, UsageError, address_space, foreseen
from ckptkit.core.text import merge_all, on_command_line, shell_command

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# The commands, in the groups and the order in which --help lists them, each with its topic of the
# manual.
GROUPS = {
    "Look": {
        "inspect": "json", "doctor": "diagnosis", "diff": "diagnosis", "stats": "values",
        "show": "values", "report": "pictures", "browse": "pictures",
    },
    "Change": {
        "strip-module": "commands", "add-module": "commands", "remap": "commands",
        "convert": "formats", "rename": "diagnosis", "extract": "fidelity", "wrap": "fidelity",
        "run": "recipes", "rules": "rules",
    },
    "Combine": {"average": "recipes", "merge": "recipes", "ema": "recipes"},
    "Check": {
        "scan": "security", "verify": "integrity", "check": "rules", "digest": "integrity",
        "recover": "integrity",
    },
    "Many files": {"batch": "many-files"},
    "Other": {
        "train": "trainer", "completion": "shell", "formats": "formats", "env": "library",
        "help": "commands",
    },
}  # fmt: skip
TOPICS = merge_all(GROUPS.values())
COMMANDS = tuple(TOPICS)
ELSEWHERE = {"train": "ckptkit.trainer.command"}  # commands in another room
ERROR_SCHEMA = "ckptkit.error/1"
USAGE, BUG, INTERRUPTED, CLOSED_PIPE = 2, 5, 130, 141

ANYWHERE = ("--progress", "--traceback")  # options that may be typed anywhere


class CommandLine(click.Group):
    """The group of all commands; it prints errors and chooses exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        from ckptkit.edits import BY_COMMAND

        if name == "convert" or name in BY_COMMAND:
            from ckptkit.cli import edits

            command = edits.command(name)
        else:
            command = import_module(ELSEWHERE.get(name, f"ckptkit.cli.{name}")).command
        command.epilog = f"Manual: ckptkit help {TOPICS[name]}"
        if ctx.resilient_parsing:
            from ckptkit.cli import completing

            completing.attach(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in their groups."""
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append(
                    (name.ljust(width), command.get_short_help_str(formatter.width - width - 6))
                )
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; raise UnknownCommand for any other word."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            raise UnknownCommand(word, args, ctx)
        return super().resolve_command(ctx, args)

    def __call__(self) -> NoReturn:
        """Run as the main program: no garbage collection, and no cleanup at exit.

        Both would only cost time in a process that ends soon.
        """
        gc.disable()
        _secure_streams()
        _interruptible()
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        if (limit := address_space()) is not None:
            from ckptkit.cli.address_space import guard

            guard(limit)
        try:
            self.main(prog_name="ckptkit")
        except SystemExit as done:
            _leave(done.code if isinstance(done.code, int) else BUG)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command, print its error if it fails, and exit with the matching code."""
        words = list(sys.argv[1:] if args is None else args)
        render.begun = False
        try:
            words = _anywhere_first(words)
            with on_command_line():
                code = (
                    super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
                    or 0
                )
            _flush()
        except SystemExit as left:  # click answered itself: a completion, or a pipe that is closed
            code = CLOSED_PIPE if left.code else 0
        except (Exception, KeyboardInterrupt) as error:
            _advise(error, words)
            code = _failed(error, words)
            if "--json" in words:
                _say_as_json(error)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            if ctx.params["traceback"]:
                import traceback

                traceback.print_exc()
            raise


def _anywhere_first(words: list[str]) -> list[str]:
    """Return the words, with the options that may be typed anywhere before the command."""
    options = words[: words.index("--")] if "--" in words else words
    given = [option for option in ANYWHERE if option in options]
    others = [word for word in options if word not in ANYWHERE]
    return [*given, *others, *words[len(options) :]]


class UnknownCommand(click.UsageError):
    """`word` is not a command; ``hint`` says what is probably meant."""

    def __init__(self, word: str, args: Sequence[str], ctx: click.Context) -> None:
        super().__init__(f"No such command {word!r}.", ctx)
        from ckptkit.cli import suggestions

        self.hint = suggestions.command(word, args[1:], COMMANDS)


@click.group(
    "ckptkit",
    cls=CommandLine,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 120,  # the terminal's width up to this; lines of help are read
    },
)
@click.option(
    "--traceback",
    is_flag=True,
    envvar="CKPTKIT_TRACEBACK",
    help="Show the Python traceback of an error.",
)
@click.option(
    "--progress",
    is_flag=True,
    help="Show progress at once, also where standard error is not a terminal.",
)
@click.version_option(__version__, "--version", "-V", prog_name="ckptkit")
@click.pass_context
def main(ctx: click.Context, traceback: bool, progress: bool) -> int:
    """Inspect, change and convert PyTorch checkpoints, without running them and without a GPU.

    \b
    Example: ckptkit inspect run.pth
             ckptkit strip-module run.pth plain.pth
    """
    if ctx.invoked_subcommand is None:
        render.emit(ctx.get_help())
        return USAGE
    return 0


def _leave(code: int) -> NoReturn:
    """End the process at once with os._exit.

    Freeing hundreds of thousands of objects one by one would take a tenth of the run time.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            pass  # reported already, if it was standard output
    os._exit(code)


def _failed(error: BaseException, words: Sequence[str]) -> int:
    """Print the error and its hint; return the exit code."""
    if (
        isinstance(error, click.exceptions.UsageError)
        and error.ctx is not None
        and error.message == error.ctx.get_help()
    ):
        render.emit(error.message)  # of a group that was given no command
        return USAGE
    if isinstance(error, click.ClickException):
        render.error(_message_of(error), _hint_of(error))
        return error.exit_code
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        render.error("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _mute()
        return CLOSED_PIPE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # the help, printed by click
        error = render.stdout_failed(error)
    error = foreseen(error)
    if isinstance(error, CkptkitError):
        render.error(str(error), error.hint)
        if error.where == render.STDOUT:
            _mute()
        return error.exit_code
    again = shell_command(("ckptkit", "--traceback", *words))
    hint = f"`{again}` shows where it is; please report it"
    render.error(f"a bug in ckptkit: {type(error).__name__}: {error}", hint)
    return BUG


def _advise(error: BaseException, words: Sequence[str]) -> None:
    """Give errors of what was typed a better hint, if there is one."""
    if isinstance(error, (click.UsageError, InputError)) and not isinstance(error, UnknownCommand):
        from ckptkit.cli import suggestions

        with suppress(click.ClickException, ValueError, OSError):  # the error is the other one
            suggestions.improve(error, words, main)


def _message_of(error: click.ClickException) -> str:
    """Return the message on one line; what is spelled alike is not named beside a better hint."""
    is_known = isinstance(error, click.NoSuchOption) and hasattr(error, "hint")
    return (error.message if is_known else error.format_message()).replace("\n\t", " ")


def _hint_of(error: click.ClickException) -> str:
    """Return the hint of an error in the words of a command."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ckptkit"
    return getattr(error, "hint", None) or f"see `{command} --help`"


def _say_as_json(error: BaseException) -> None:
    """Print the error as one JSON object, unless output has begun."""
    error = foreseen(error)
    if render.begun or not isinstance(error, (CkptkitError, click.ClickException)):
        return
    from ckptkit.analysis.json_facts import failure

    if isinstance(error, click.ClickException):
        error = UsageError(_message_of(error), hint=_hint_of(error))
    try:
        render.emit_json({"schema": ERROR_SCHEMA, **failure(error)})
        _flush()
    except (OSError, CkptkitError):
        pass  # standard output is closed or full, and the error is on standard error


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise render.stdout_failed(error) from error


def _mute() -> None:
    """Redirect standard output to the null device.

    Python would otherwise try again to write what is left in the buffer, and print an error.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    *others: Any,
) -> None:
    """Print a warning of the library as one of a command; `show` prints those of others."""
    if filename.startswith(_PACKAGE):
        render.warn(str(message))
    else:
        show(message, category, filename, *others)


def _interruptible() -> None:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that temporaries are removed.

    Signals that are ignored stay ignored.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = _again


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    """Deliver an interrupt again, a millisecond later, that Python dropped in a destructor."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(unraisable)


def _secure_streams() -> None:
    """Keep descriptors 0 to 2 occupied, and make standard output accept any character.

    A file opened later can then never become standard output or error.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
