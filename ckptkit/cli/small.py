"""The commands recover, rules, formats, env and completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.core import __version__

if TYPE_CHECKING:
    from ckptkit.cli.request import Request


@click.command("recover", cls=options.Writer)
@options.of("recover")
def recover(request: Request, unverified: bool) -> Any:
    """Save the intact tensors of a truncated or damaged file.

    `recover` writes verified tensors to DST, and lists each lost tensor with the reason. If the
    file has checksums (torch.save), tensors with a wrong checksum are lost. safetensors files and
    files of torch before 1.6 have no checksums. If a file without checksums has the wrong length,
    its tensors may be shifted. Only --unverified writes such tensors. If a file without checksums
    has the right length, `recover` cannot detect damage. If the file overwrote an older save, a
    warning names tensors that may come from the older save.

    \b
    Example: ckptkit recover cut.pth intact.pth
    """
    from ckptkit import api

    # A dry run must change no file. If an edit was interrupted, `open_place` raises an error here,
    # because `recover` would undo the edit.
    if request.options.dry_run:
        from ckptkit.formats.format import open_place

        open_place(request.sources[0]).close()
    found = api.recover(request.sources[0], unverified=unverified)
    return request.run(source=found.checkpoint, lost=found.lost)


@click.command("rules")
@click.argument("source", metavar="from-transformers", type=click.Choice(["from-transformers"]))
@click.argument("model_type", metavar="MODEL_TYPE")
@options.of("rules")
def rules(source: str, model_type: str, config: str | None) -> int:
    """Write tensor rules from the conversions of a library.

    from-transformers prints rules that convert the files of MODEL_TYPE to the model in the
    installed transformers. ckptkit reads the conversions of transformers as data, and builds the
    model without weights. For both directions, ckptkit then compares the names and shapes that the
    rules produce with the names and shapes of the model. If a rule cannot express a conversion, a
    comment describes the conversion, and the exit code is 1.

    \b
    Example: ckptkit rules from-transformers qwen3_moe > qwen3-moe.yaml
    """
    from ckptkit.edits.config_file import read
    from ckptkit.rules.from_transformers import generated, layouts_of, recipe_text

    layouts = layouts_of(model_type, None if config is None else read(config))
    found = generated(layouts)
    if not found.steps:
        why = "has one layout: there is nothing to convert"
        if found.left:
            why = f"cannot be written as rules: {found.left[0]}"
        render.note(f"{model_type} {why}")
        return 1
    render.emit(*map(render.escape, recipe_text(layouts, found).rstrip().split("\n")))
    return 1 if found.left else 0


KEEPS = {
    "always": "everything",
    "asked": "weights; --all: everything",
    "nested": "nested values",
    "never": "weights",
}


@click.command("formats")
@options.of("formats")
def formats(as_json: bool) -> None:
    """List the formats that ckptkit reads and writes.

    \b
    Example: ckptkit formats
    """
    from ckptkit.formats.table import FORMATS

    listed = [each for each in FORMATS if each.readable or each.layout is not None]
    if as_json:
        facts = [
            {
                "name": each.name,
                "title": each.title,
                "readable": each.readable,
                "writable": each.layout is not None,
                "rewritten_as": each.rewrite_as,
                "everything": each.everything if each.layout is not None else None,
                "remote": "where folders can be listed" if each.listed else "any",
                "recoverable": each.recover is not None,
                "suffixes": each.suffixes,
            }
            for each in listed
        ]
        render.emit_json({"schema": "ckptkit.formats/1", "formats": facts})
        return
    rows = []
    for each in listed:
        read, writable = "yes" if each.readable else "no", each.layout is not None
        write = "yes" if writable else "no"
        write = f"as {each.rewrite_as}" if each.rewrite_as else write
        kept = KEEPS[each.everything] if writable else ""
        remote = "not http" if each.listed else "yes"
        recover = "yes" if each.recover is not None else ""
        suffixes = " ".join(each.suffixes)
        rows.append((each.name, read, write, kept, remote, recover, suffixes, each.title))
    header = ("name", "read", "write", "keeps", "remote", "recover", "suffixes", "description")
    render.emit(*render.table(header, rows))


@click.command("env")
@options.of("env")
def env(as_json: bool) -> None:
    """Show versions of libraries and the devices of this machine.

    \b
    Example: ckptkit env
    """
    from ckptkit.loading.building import environment

    found: dict[str, Any] = {"ckptkit": __version__, **environment()}
    if as_json:
        render.emit_json({"schema": "ckptkit.env/1", **found})
        return
    devices = found.pop("devices")
    found["torch"] = found["torch"] or "not installed"
    rows = [(name, str(value)) for name, value in found.items() if value is not None]
    render.emit(*render.table(("", ""), rows))
    cells = [
        (name, each["title"], "" if each["memory"] is None else render.size(each["memory"]))
        for name, each in devices.items()
    ]
    render.emit("", *render.table(("device", "title", "memory"), cells, right=("memory",)))
    uuids = [(name, each["uuid"]) for name, each in devices.items() if each["uuid"]]
    if uuids:
        render.emit("", *render.table(("device", "uuid"), uuids))


VARIABLE = "_CKPTKIT_COMPLETE"  # name of the environment variable that click reads


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
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
