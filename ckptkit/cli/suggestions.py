"""The next step after an error: what was probably meant, as a command or an option that works.

Imported after an error only. Each function returns a hint, or None where it has nothing to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from glob import glob, has_magic

import click

from ckptkit.cli import COMMANDS
from ckptkit.core.errors import AmbiguousError, CkptkitError, MissingFileError
from ckptkit.core.text import nearest, shell_command, shell_word
from ckptkit.core.urls import is_url

# Other words for which people look, and the command that does it, with options.
WORDS = {
    "bf16": "convert --cast bfloat16", "cast": "convert --cast float16", "cat": "show",
    "checksum": "digest", "compare": "diff", "copy": "convert", "count": "inspect",
    "cp": "convert", "delete": "convert --drop", "dequantize": "convert --dequantize",
    "drop": "convert --drop", "dtype": "convert --cast float16", "du": "inspect --sort size",
    "equal": "diff --values", "fix": "doctor", "float16": "convert --cast float16",
    "fp16": "convert --cast float16", "half": "convert --cast float16", "hash": "digest",
    "histogram": "stats", "inf": "verify --values", "info": "inspect", "keys": "inspect --names",
    "list": "inspect", "ls": "inspect", "man": "help", "mean": "average",
    "names": "inspect --names", "nan": "verify --values", "nans": "verify --values",
    "params": "inspect", "plot": "report", "print": "inspect",
    "quantize": "convert --quantize fp8-block", "remove": "convert --drop", "repair": "recover",
    "save": "convert", "security": "scan", "select": "convert --keep", "sha256": "digest",
    "shard": "convert --shard-size 5GB", "size": "inspect --sort size",
    "split": "convert --shard-size 5GB", "summary": "inspect", "unwrap": "extract",
    "validate": "verify", "view": "inspect",
}  # fmt: skip
# Options that have another name in a command.
RENAMED = {
    ("remap", "--map"): "--device", ("convert", "--map-device"): "--device",
    ("convert", "--device-map"): "--device", ("remap", "--values"): "--device-values",
    ("convert", "--prefix"): "--strip", ("strip-module", "--strip"): "--prefix",
    ("add-module", "--add"): "--prefix", ("convert", "--keys"): "--keep",
    ("digest", "--manifest"): "--output",
}  # fmt: skip
# Other words for options, and the command that has it; any command that has it is as good.
OPTIONS = {
    "--bf16": "convert --cast bfloat16", "--dtype": "convert --cast float16",
    "--exclude": "convert --drop", "--fp16": "convert --cast float16",
    "--half": "convert --cast float16", "--include": "convert --keep",
    "--map-location": "remap --to cpu", "--max-shard-size": "convert --shard-size 5GB",
    "--nan": "verify --values", "--overwrite": "convert --force", "--regex": "rename --sub",
    "--remove": "convert --drop", "--yes": "convert --force", "-f": "convert --force",
    "-y": "convert --force",
}  # fmt: skip
MANY = ("inspect", "scan", "verify", "digest")  # they take FILE...
WRITING = ("convert", "recover")
FILES = {"stats": 1, "doctor": 1, "diff": 2, "convert": 2, "recover": 2}
OPEN = ("--drop", "--keep", "--dequantize", "fp8-block", "5GB")  # not right for every file
LISTED = 4  # files; of more, a pattern
INTO = "out"
_MODEL = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def improve(error: BaseException, words: Sequence[str]) -> None:
    """Give an error a better hint, if there is one. `words` are those typed after ``ckptkit``."""
    hint = None
    if isinstance(error, click.NoSuchOption):
        hint = _option(error)
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        hint = _usage(error, error.ctx, words)
    elif isinstance(error, CkptkitError):
        hint = _file(error, words)
    if hint is not None:
        error.hint = hint  # type: ignore[attr-defined]


def command(word: str, rest: Sequence[str]) -> str:
    """Return the hint for a word that is no command; `rest` are those after it."""
    if (known := WORDS.get(word)) is not None:
        name = known.partition(" ")[0]
        files = [each for each in rest if not each.startswith("-")]
        is_whole = files and (name in MANY or len(files) == FILES.get(name))
        inputs = files[: 1 if name in WRITING else None]
        if is_whole and all(map(os.path.exists, inputs)) and not known.endswith(OPEN):
            return f"did you mean `ckptkit {known} {shell_command(rest)}`?"
        return f"did you mean {known}? see `ckptkit {name} --help`"
    if os.path.exists(word):
        return f"what is in it: `{shell_command(('ckptkit', 'inspect', word, *rest))}`"
    near = [name for name in COMMANDS if name.startswith(word)] or nearest(word, COMMANDS)
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}see `ckptkit --help`"


def _option(error: click.NoSuchOption) -> str | None:
    """Return a hint for an option that has another name, or that another command has."""
    if error.ctx is None:
        return None
    name, path = error.ctx.info_name or "", error.ctx.command_path
    if (new := RENAMED.get((name, error.option_name))) is not None:
        return f"it is {new}: see `{path} --help`"
    if (known := OPTIONS.get(error.option_name)) is None:
        return None
    other, _, new = known.partition(" ")
    own = {each for option in error.ctx.command.params for each in option.opts}
    if new.split()[0] in own:
        return f"it is {new}: see `{path} --help`"
    return f"{other} has {new}: see `ckptkit {other} --help`"


def _usage(error: click.UsageError, ctx: click.Context, words: Sequence[str]) -> str | None:
    """Return a hint for arguments that are too many or missing."""
    name = ctx.info_name or ""
    if "unexpected extra argument" in error.message:
        typed, options = _typed(ctx, words)
        return _batch(name, typed, options)
    if isinstance(error, click.MissingParameter) and name == "extract":
        typed, _ = _typed(ctx, words)
        return _entries(typed[0]) if typed else None
    return None


def _typed(ctx: click.Context, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command as they were typed, and its options."""
    own = list(words[words.index(ctx.info_name or "") + 1 :])
    values, extra, _ = ctx.command.make_parser(ctx).parse_args(list(own))
    names = [each.name for each in ctx.command.params if isinstance(each, click.Argument)]
    given = [values[name] for name in names if isinstance(values.get(name), str)]
    given += extra
    for each in given:
        own.remove(each)
    return given, [each for each in own if each != "--"]


def _batch(name: str, typed: list[str], options: list[str]) -> str | None:
    """Return the command for several files where a command takes one: the last is perhaps DST."""
    from ckptkit.cli import batch

    if name not in batch.COMMANDS or "--in-place" in options:
        return None
    if name == "run":
        options, typed = [*typed[:1], *options], typed[1:]
    into = INTO if os.path.isfile(typed[-1]) else typed.pop()
    if not typed or not all(map(os.path.exists, typed)):
        return None
    suffix = os.path.splitext(typed[0])[1]
    pattern = os.path.join(os.path.dirname(typed[0]), f"*{suffix}")
    sources = [pattern] if sorted(glob(pattern)) == sorted(typed) else typed
    return f"of several files: `{_batch_command(name, options, into, sources)}`"


def _batch_command(
    name: str, options: Sequence[str], into: str | None, sources: Sequence[str]
) -> str:
    return shell_command(("ckptkit", "batch", name, *options, "--into", into or INTO, *sources))


def _entries(path: str) -> str | None:
    """Return the entries of the checkpoint at `path`, for --key."""
    from ckptkit.api import open_checkpoint
    from ckptkit.core.text import some

    try:
        with open_checkpoint(path) as checkpoint:
            names = [str(each) for each in checkpoint]
    except CkptkitError:
        return None
    return f"--key names one of its entries: {some(names, 12)}" if names else None


def _file(error: CkptkitError, words: Sequence[str]) -> str | None:
    """Return a hint for an input that is no single file."""
    name = next((each for each in words if each in COMMANDS), "")
    place = error.where
    if place is None or is_url(place):
        return None
    if isinstance(error, AmbiguousError) and os.path.isdir(place):
        return _several(name, place, words, error.hint)
    if not isinstance(error, MissingFileError) or os.path.lexists(place):
        return None
    if has_magic(place):
        return _pattern(name, place, words)
    if name == "diff" and _MODEL.fullmatch(place):
        others = ["--model" if each == place else each for each in words]
        others.insert(others.index("--model") + 1, place)
        return f"a model is compared by `{shell_command(('ckptkit', *others))}`"
    if _HUB.fullmatch(place) and not os.path.isdir(os.path.dirname(place)):
        return f"{error.hint}; a model on the Hugging Face hub is hf://{place}"
    return None


def _several(name: str, folder: str, words: Sequence[str], hint: str | None) -> str | None:
    """Return a hint for a folder that holds several checkpoints."""
    from ckptkit.cli import batch
    from ckptkit.formats import of_suffix

    files = sorted(each for each in os.listdir(folder) if of_suffix(each) is not None)
    suffixes = {os.path.splitext(each)[1] for each in files}
    if len(files) < 2 or len(suffixes) != 1 or name not in (*MANY, *batch.COMMANDS):
        return None
    return f"{hint}; {_pattern(name, os.path.join(folder, f'*{suffixes.pop()}'), words)}"


def _pattern(name: str, pattern: str, words: Sequence[str]) -> str:
    """Return a hint for a pattern where a command takes files."""
    from ckptkit.cli import batch

    found = sorted(glob(pattern, recursive=True))
    if not found:
        return "no file matches this pattern"
    if name in MANY:
        files = shell_command(found) if len(found) <= LISTED else _unquoted(pattern)
        return f"all {len(found):,}: `ckptkit {name} {files}`"
    if name in batch.COMMANDS:
        context = click.Context(_command(name), info_name=name)
        typed, options = _typed(context, words)
        if name == "run":
            options, typed = [*typed[:1], *options], typed[1:]
        into = typed[1] if len(typed) > 1 else None
        return f"all {len(found):,}: `{_batch_command(name, options, into, [pattern])}`"
    return f"name one of the {len(found):,} files, such as {shell_word(found[0])}"


def _command(name: str) -> click.Command:
    from ckptkit.cli import main

    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def _unquoted(pattern: str) -> str:
    """Quote a pattern for a shell, but for its stars."""
    return "*".join(shell_word(part) if part else "" for part in pattern.split("*"))
