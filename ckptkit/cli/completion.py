"""ckptkit completion"""

from __future__ import annotations

import click

from ckptkit.cli import render

VARIABLE = "_CKPTKIT_COMPLETE"  # name of the environment variable that click reads


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    SHELL is bash (4.4 or later), zsh or fish. The script completes commands, options and files. It
    also completes names of tensors and entries, from the header of the file on the command line. To
    enable completion only in the current session, run eval "$(ckptkit completion bash)", or ckptkit
    completion fish | source.

    \b
    Example: ckptkit completion bash > ~/.local/share/bash-completion/completions/ckptkit
             ckptkit completion zsh >> ~/.zshrc
             ckptkit completion fish > ~/.config/fish/completions/ckptkit.fish
    """
    from click.shell_completion import get_completion_class

    from ckptkit.cli import main

    completer = get_completion_class(shell)
    assert completer is not None
    render.emit(completer(main, {}, "ckptkit", VARIABLE).source())
