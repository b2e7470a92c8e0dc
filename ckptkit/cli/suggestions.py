"""The next step after an error: what was probably meant, as a command or an option that works.

Imported after an error only. Each function returns a hint, or None where it has nothing to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from glob import glob, has_magic

import click

from ckptkit.cli.options import dequantize_said
from ckptkit.core.errors import AmbiguousError, CkptkitError, MissingFileError
from ckptkit.core.text import is_url, nearest, shell_command, shell_word, some

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


def improve(error: BaseException, words: Sequence[str], main: click.Group) -> None:
    """Give an error a better hint, if there is one. `words` are those typed after ``ckptkit``."""
    typed, hint = Typed(main, words), None
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption):
        hint = _option(error)
    elif isinstance(error, CkptkitError):
        hint = _file(error, typed)
    elif isinstance(error, click.UsageError) and context is not None:
        if error.message.startswith("No such command") and context.command is main:
            word = next(each for each in words if not each.startswith("-"))
            hint = command(word, words[words.index(word) + 1 :], main.list_commands(context))
        elif "unexpected extra argument" in error.message:
            hint = _batch(typed)
        elif isinstance(error, click.MissingParameter) and context.info_name == "extract":
            hint = next(map(_entries, typed.parts()[0]), None)
    if hint is not None:
        error.hint = hint  # type: ignore[attr-defined]


def command(word: str, rest: Sequence[str], known_commands: Sequence[str]) -> str:
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
        return f"what is in it: {shell_command(('ckptkit', 'inspect', word, *rest))}"
    near = [name for name in known_commands if name.startswith(word)]
    near = near or nearest(word, known_commands)
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}see `ckptkit --help`"


def _option(error: click.NoSuchOption) -> str | None:
    """Return a hint for an option that has another name, or that another command has."""
    if error.ctx is None:
        return None
    see = f"see `{error.ctx.command_path} --help`"
    if (new := RENAMED.get((error.ctx.info_name or "", error.option_name))) is not None:
        return f"it is {new}: {see}"
    if (known := OPTIONS.get(error.option_name)) is None:
        return None
    other, _, new = known.partition(" ")
    if any(new.split()[0] in option.opts for option in error.ctx.command.params):
        return f"it is {new}: {see}"
    return f"{other} has {new}: see `ckptkit {other} --help`"


class Typed:
    """A command line, taken apart."""

    def __init__(self, main: click.Group, words: Sequence[str]) -> None:
        context = click.Context(main)
        self.words = words
        self.name = next((each for each in words if each in main.list_commands(context)), "")
        self._command = main.get_command(context, self.name) or main
        batch = main.get_command(context, "batch")
        names = batch.list_commands(context) if isinstance(batch, click.Group) else ()
        self.is_batchable = self.name in names  # whether `batch` runs it over many files

    def parts(self) -> tuple[list[str], list[str]]:
        """Return the arguments that are files or folders, and the options with a recipe."""
        own = list(dequantize_said(self.words[self.words.index(self.name) + 1 :]))
        context = click.Context(self._command)
        values, extra, _ = self._command.make_parser(context).parse_args(list(own))
        each_argument = (p for p in self._command.params if isinstance(p, click.Argument))
        found = [values.get(each.name or "") for each in each_argument]
        given = [*(each for each in found if isinstance(each, str)), *extra]
        for each in given:
            own.remove(each)
        recipe = given[: self.name == "run"]
        return given[len(recipe) :], [*recipe, *(each for each in own if each != "--")]

    def batch(self, into: str, sources: Sequence[str]) -> str:
        """Return the command for many files."""
        words = ("ckptkit", "batch", self.name, *self.parts()[1], "--into", into, *sources)
        return shell_command(words)


def _batch(typed: Typed) -> str | None:
    """Return the command for several files where a command takes one: the last is perhaps DST."""
    if not typed.is_batchable or "--in-place" in typed.words:
        return None
    *sources, last = typed.parts()[0]
    if os.path.isfile(last):
        sources, last = [*sources, last], INTO
    if not sources or not all(map(os.path.exists, sources)):
        return None
    suffix = os.path.splitext(sources[0])[1]
    pattern = os.path.join(os.path.dirname(sources[0]), f"*{suffix}")
    sources = [pattern] if sorted(glob(pattern)) == sorted(sources) else sources
    return f"of several files: `{typed.batch(last, sources)}`"


def _entries(path: str) -> str | None:
    """Return the entries of the checkpoint at `path`, for --key."""
    from ckptkit.api import open_checkpoint

    try:
        with open_checkpoint(path) as checkpoint:
            names = [str(each) for each in checkpoint]
    except CkptkitError:
        return None
    return f"--key names one of its entries: {some(names, 12)}" if names else None


def _file(error: CkptkitError, typed: Typed) -> str | None:
    """Return a hint for an input that is no single file."""
    place = error.where
    if place is None or is_url(place):
        return None
    if isinstance(error, AmbiguousError) and os.path.isdir(place):
        from ckptkit.formats import of_suffix

        files = sorted(each for each in os.listdir(place) if of_suffix(each) is not None)
        suffixes = {os.path.splitext(each)[1] for each in files}
        is_for_many = typed.name in MANY or typed.is_batchable
        if len(files) < 2 or len(suffixes) != 1 or not is_for_many:
            return None
        return f"{error.hint}; {_pattern(os.path.join(place, f'*{suffixes.pop()}'), typed)}"
    if not isinstance(error, MissingFileError) or os.path.lexists(place):
        return None
    if has_magic(place):
        return _pattern(place, typed)
    if typed.name == "diff" and _MODEL.fullmatch(place):
        at = typed.words.index(place)
        words = ("ckptkit", *typed.words[:at], "--model", *typed.words[at:])
        return f"a model is compared by `{shell_command(words)}`"
    if _HUB.fullmatch(place) and not os.path.isdir(os.path.dirname(place)):
        return f"{error.hint}; a model on the Hugging Face hub is hf://{place}"
    return None


def _pattern(pattern: str, typed: Typed) -> str:
    """Return a hint for a pattern where a command takes files."""
    found = sorted(glob(pattern, recursive=True))
    if not found:
        return "no file matches this pattern"
    if typed.name in MANY:
        files = shell_command(found)
        if len(found) > LISTED:  # the pattern, quoted but for its stars
            files = "*".join(shell_word(part) if part else "" for part in pattern.split("*"))
        return f"all {len(found):,}: `ckptkit {typed.name} {files}`"
    if typed.is_batchable:
        into = next(iter(typed.parts()[0][1:]), INTO)
        return f"all {len(found):,}: `{typed.batch(into, [pattern])}`"
    return f"name one of the {len(found):,} files, such as {shell_word(found[0])}"
