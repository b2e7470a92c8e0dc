"""The command line. A command parses its arguments, calls the library once, and prints.

The module of a command is imported when the command runs. Commands import the library inside
functions. So a command never waits for the imports of other commands. `ckptkit help exit-codes`
lists the exit codes.
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
from itertools import dropwhile
from typing import Any, NoReturn

import click

from ckptkit.cli import render
from ckptkit.core import __version__
from ckptkit.core.errors import CkptkitError, UsageError, address_space, foreseen
from ckptkit.core.text import merge_all, on_command_line, shell_command

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Commands by group, in the order of --help, each with the manual topic that explains the command.
GROUPS = {
    "Look": {
        "inspect": "json", "doctor": "diagnosis", "diff": "diagnosis", "stats": "values",
        "show": "values", "report": "pictures", "browse": "pictures",
    },
    "Change": {
        "strip-module": "commands", "add-module": "commands", "remap": "commands",
        "convert": "formats", "rename": "diagnosis", "extract": "fidelity", "wrap": "fidelity",
        "resize": "merging", "run": "recipes", "rules": "rules",
    },
    "Combine": {
        "average": "recipes", "join": "recipes", "merge": "merging", "ema": "recipes",
        "delta": "deltas", "lora": "lora",
    },
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
ERROR_SCHEMA = "ckptkit.error/1"
USAGE, BUG, INTERRUPTED, CLOSED_PIPE = 2, 5, 130, 141


ANYWHERE = ("--progress", "--traceback")  # options accepted at any position


def _given_everywhere(_: click.Context, option: click.Parameter, wanted: bool | str | None) -> None:
    """Store the value of an option of every command."""
    if option.name == "table":
        render.table_format = str(wanted or "").replace("latex", "latex_booktabs")
    elif option.name == "quiet":
        render.quiet = bool(wanted)
    elif wanted:
        main.traceback = render.progress_asked = True


def _add_everywhere(command: click.Command) -> None:
    """Add the options of every command to a command, or to each command of a group.

    Skip an option that the command already has.
    """
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _add_everywhere(each)
        return
    from ckptkit.cli import options

    taken = {option for each in command.params for option in each.opts}
    for names, how in options.table("everywhere"):
        free = [name for name in names if name not in taken]
        if free[:1] == names[:1]:
            how |= {"expose_value": False, "hidden": True, "callback": _given_everywhere}
            command.params.append(click.Option(free, **how))


class CommandLine(click.Group):
    """The group of all commands. It prints errors and sets the exit code."""

    traceback = False  # whether to print the traceback of an error
    words: Sequence[str] = ()  # the arguments of the running command line

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
            module = "ckptkit.trainer.command" if name == "train" else f"ckptkit.cli.{name}"
            command = import_module(module).command
        _add_everywhere(command)
        command.epilog = f"Manual: ckptkit help {TOPICS[name]}"
        if ctx.resilient_parsing:
            from ckptkit.cli import completing

            completing.attach(command)
        return command

    def improve(self, error: BaseException) -> None:
        """Set a better hint for an error, if possible."""
        # If the search for a hint fails, keep the original error.
        with suppress(click.ClickException, CkptkitError, ValueError, OSError):
            from ckptkit.cli import suggestions

            suggestions.improve(error, self.words, self)

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

    def __call__(self) -> NoReturn:
        """Run as the main program. Disable garbage collection, and skip cleanup at exit.

        Garbage collection and cleanup only cost time in a short-lived process.
        """
        gc.disable()
        # Open the null device until descriptors 0 to 2 are in use. Otherwise a file that is opened
        # later could become standard output.
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(fd)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        # SIGTERM and SIGHUP raise KeyboardInterrupt, so the command removes its temporary files. If
        # the parent process ignores a signal, ckptkit ignores the signal too.
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            sys.unraisablehook = _again
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        if (limit := address_space()) is not None:
            from ckptkit.cli.address_space import guard

            guard(limit)
        try:
            self.main(prog_name="ckptkit")
        except SystemExit as done:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # ckptkit already reported that standard output failed
                    if stream is not None:
                        stream.flush()
            # Skip the cleanup of Python: freeing hundreds of thousands of objects would take 10 %
            # of the run time.
            os._exit(done.code if isinstance(done.code, int) else BUG)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command. If the command fails, print the error. Exit with the exit code of the
        command or error."""
        words = list(sys.argv[1:] if args is None else args)
        before = words[: words.index("--")] if "--" in words else words
        anywhere = [option for option in ANYWHERE if option in before]
        if anywhere:  # click accepts the options in ANYWHERE only before the command
            others = [word for word in before if word not in ANYWHERE]
            words = [*anywhere, *others, *words[len(before) :]]
        own = {option for each in self.params for option in (*each.opts, "--help", "-h")}
        rest = list(dropwhile(own.__contains__, words))
        # `ckptkit FILE` means `ckptkit inspect FILE`. An option of `inspect` may precede FILE.
        named = [word for word in rest if not word.startswith("-")]
        named = named if rest[:1] != named[:1] else named[:1]
        is_file = any(os.path.lexists(word) or {*"./*:"} & {*word} for word in named)
        if is_file and not {*COMMANDS} & {*named}:
            words.insert(len(words) - len(rest), "inspect")
        self.words = words
        self.traceback = render.begun = render.progress_asked = render.quiet = False
        render.table_format = ""
        code: Any = 0
        try:
            with on_command_line():
                code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
            try:
                if sys.stdout is not None:
                    sys.stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise render.stdout_failed(error) from error
        except SystemExit as left:  # click exits after a completion or a closed pipe
            code = CLOSED_PIPE if left.code else 0
        except (Exception, KeyboardInterrupt) as error:
            code = _failed(error, words)
        sys.exit(code or 0)


@click.group(
    "ckptkit",
    cls=CommandLine,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 120,  # maximum width of help text, in characters
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
    help="Show progress at once, even if standard error is not a terminal.",
)
@click.version_option(__version__, "--version", "-V", prog_name="ckptkit")
@click.pass_context
def main(ctx: click.Context, traceback: bool, progress: bool) -> int:
    """Inspect, change and convert PyTorch checkpoints. Runs no code of a file and needs no GPU.

    \b
    Example: ckptkit inspect run.pth
             ckptkit strip-module run.pth plain.pth
    """
    main.traceback, render.progress_asked = traceback, progress
    if ctx.invoked_subcommand is None:
        render.emit(ctx.get_help())
        return USAGE
    return 0


def _failed(error: BaseException, words: Sequence[str]) -> int:
    """Print an error with its hint. With --json, also print a JSON object. Return the exit code."""
    if main.traceback and not isinstance(error, (click.ClickException, KeyboardInterrupt)):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        render.error("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _mute()
        return CLOSED_PIPE
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context and error.message == context.get_help():
        render.emit(error.message)  # a group such as `ckptkit lora` without a command
        return USAGE
    if isinstance(error, (click.UsageError, CkptkitError)):
        main.improve(error)
    code = BUG
    if isinstance(error, click.ClickException):
        code = error.exit_code
        hint = getattr(error, "hint", None)
        # format_message() also lists options with a similar spelling. If ckptkit has a hint, the
        # hint replaces this list.
        plain = isinstance(error, click.NoSuchOption) and hint is not None
        text = error.message if plain else error.format_message()
        see = f"see `{context.command_path if context else 'ckptkit'} --help`"
        error = UsageError(text.replace("\n\t", " "), hint=hint or see)
    # click failed to print a help text
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        error = render.stdout_failed(error)
    error = foreseen(error)
    if not isinstance(error, CkptkitError):
        again = shell_command(("ckptkit", "--traceback", *words))
        hint = f"`{again}` shows the traceback; please report it"
        render.error(f"a bug in ckptkit: {type(error).__name__}: {error}", hint)
        return BUG
    render.error(str(error), error.hint)
    if error.where == render.STDOUT:
        _mute()
    if "--json" in words and not render.begun:
        from ckptkit.analysis.json_facts import failure

        with suppress(OSError, CkptkitError):  # standard output may be closed or full
            render.emit_json({"schema": ERROR_SCHEMA, **failure(error)})
            if sys.stdout is not None:
                sys.stdout.flush()
    return error.exit_code if code == BUG else code


def _mute() -> None:
    """Redirect standard output to the null device.

    Otherwise, at exit, Python would write the rest of the buffer again, and print an error.
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
    """Print a warning of ckptkit as ``warning: ...``. `show` prints the warnings of other
    libraries."""
    if filename.startswith(_PACKAGE):
        render.warn(str(message))
    else:
        show(message, category, filename, *others)


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    """If Python ignored a KeyboardInterrupt in a destructor, raise KeyboardInterrupt again after a
    millisecond."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(unraisable)
