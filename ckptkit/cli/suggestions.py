"""Make the hint after an error: the corrected command, with the files of the user.

ckptkit imports this module only after an error. The module replaces words of the command line
according to its tables, until the command line is valid. If a dry run succeeds, the corrected
command line becomes the hint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from glob import glob, has_magic
from io import StringIO
from itertools import pairwise

import click

from ckptkit.cli.options import Writer, dequantize_said
from ckptkit.cli.reading import is_model
from ckptkit.core import dtypes
from ckptkit.core.errors import (
    CkptkitError,
    MissingFileError,
    OutputExistsError,
    SeveralError,
    UsageError,
)
from ckptkit.core.text import (
    WRITTEN,
    is_url,
    matcher,
    nearest,
    on_command_line,
    output_name,
    parse_size,
    shell_command,
    shell_word,
    some,
)
from ckptkit.core.tree import join

# Maps commands of other tools to the ckptkit command that does the same.
WORDS = {
    "add-prefix": "add-module", "allclose": "diff", "bf16": "convert --cast bfloat16",
    "cast": "convert --cast float16", "cat": "inspect", "checksum": "digest", "cmp": "diff",
    "compare": "diff", "concat": "join", "consolidate": "convert", "copy": "convert",
    "count": "inspect --brief", "cp": "convert", "cpu": "remap --to cpu",
    "cuda": "remap --to cuda", "delete": "convert --drop", "dequantize": "convert --dequantize",
    "diagnose": "doctor", "drop": "convert --drop", "dtype": "convert --cast float16",
    "du": "inspect --brief", "equal": "diff", "export": "convert", "extract-ema": "ema",
    "fix": "doctor", "float16": "convert --cast float16", "fp16": "convert --cast float16",
    "get": "inspect", "gguf": "convert --like", "gguf2safetensors": "convert",
    "half": "convert --cast float16", "hash": "digest", "head": "inspect", "histogram": "stats",
    "inf": "verify --values", "info": "inspect", "is-safe": "scan", "keys": "inspect --names",
    "list": "inspect", "list-keys": "inspect --names", "load": "inspect", "load-into": "diff",
    "ls": "inspect", "man": "help", "mean": "average", "merge-lora": "lora merge",
    "merge-shards": "convert", "module": "strip-module", "names": "inspect --names",
    "nan": "verify --values", "nans": "verify --values", "open": "inspect",
    "params": "inspect --brief", "plot": "report", "prefix": "add-module", "print": "inspect",
    "prune": "convert --drop", "quantize": "convert --quantize fp8-block",
    "remove": "convert --drop", "remove-module": "strip-module", "remove-optimizer": "extract",
    "remove-prefix": "strip-module", "rename-keys": "rename", "repair": "recover", "safe": "scan",
    "safetensors": "convert --format safetensors", "save": "convert", "security": "scan",
    "sed": "rename --sub", "select": "convert --keep", "sha256": "digest",
    "shard": "convert --shard-size 5GB", "size": "inspect --brief", "soup": "average",
    "split": "convert --shard-size 5GB", "strip-optimizer": "extract",
    "strip-prefix": "strip-module", "sum": "average", "summary": "inspect --brief",
    "swa": "average", "test": "verify", "to": "remap --to",
    "to-safetensors": "convert --format safetensors", "tree": "inspect --tree", "union": "join",
    "unwrap": "extract", "validate": "verify", "version": "env", "view": "inspect",
    "zero-to-fp32": "convert",
}  # fmt: skip
DST = "DST"
# Maps option names of other tools to ckptkit options. A key may start with the command of the
# option. `DST` means that the value of the option becomes the argument DST.
OPTIONS = {
    "--add": "--prefix", "--bf16": "convert --cast bfloat16", "--cast-to": "convert --cast",
    "--destination": DST, "--device-map": "--device", "--dst": DST, "--dtype": "convert --cast",
    "--exact": "diff --values", "--exclude": "convert --drop", "--fp16": "convert --cast float16",
    "--half": "convert --cast float16", "--include": "convert --keep",
    "--keys-only": "diff --no-values", "--manifest": "--output", "--map-device": "--device",
    "--map-location": "remap --to", "--max-shard-size": "convert --shard-size",
    "--nan": "verify --values", "--only-keys": "diff --no-values", "--out": DST, "--output": DST,
    "--output-dir": DST, "--overwrite": "convert --force", "--pattern": "rename --sub",
    "--regex": "rename --sub", "--remove": "convert --drop", "--replace": "convert --force",
    "--resize": "resize --rows", "--select": "convert --keep", "--strip": "--prefix",
    "--strip-prefix": "strip-module --prefix",
    "--summary": "inspect --brief", "--tol": "diff --atol", "--tolerance": "diff --atol",
    "--yes": "convert --force", "-e": "rename --sub",
    "-f": "convert --force", "-k": "extract --key", "-n": "convert --dry-run", "-o": DST,
    "-p": "strip-module --prefix", "-s": "inspect --brief", "-y": "convert --force",
    "batch -o": "--into", "batch --output": "--into", "batch --out": "--into",
    "browse --json": "inspect --json", "check --model": "diff --model",
    "convert --ema": "ema", "convert --no-optimizer": "extract", "convert --only-model": "extract",
    "convert --remove-optimizer": "extract", "convert --strip-prefix": "--strip",
    "convert --weights-only": "extract", "extract --ema": "ema",
    "inspect --full": "--flat", "inspect --keys-only": "--names", "inspect --list": "--names",
    "inspect --shapes": "--flat", "rename --replace": "--sub", "rename --rename": "--sub",
    "convert --keys": "--keep", "doctor --out": "--fix", "doctor --output": "--fix",
    "doctor -o": "--fix", "extract --keys": "convert --keep", "convert --prefix": "--strip",
    "inspect --all": "--tree",
    "remap --map": "--device", "remap --values": "--device-values",
}  # fmt: skip
# Commands that `convert` can replace, and the options of `convert` that do the same.
AS_CONVERT = {
    "strip-module": "--strip module.", "add-module": "--add module.", "remap": "", "rename": "",
    "extract": "",
}  # fmt: skip
# Commands without --json, and the hint if a user gives --json.
WITHOUT_JSON = {
    "completion": "completion prints a shell script; `ckptkit help json` lists the JSON schemas",
    "help": "help prints text; `ckptkit help json` lists the JSON schemas, --schema prints one",
    "rules": "rules prints a YAML recipe; `ckptkit run` reads it",
    "train": "train writes checkpoints; `ckptkit inspect --json` prints their contents",
}
# Maps a group of commands to one of its commands. If a user gives a file in place of a command, the
# hint contains this command.
GROUPS = {"lora": "check", "delta": "make"}
# Maps a command to its required option and a default value.
NEEDED = {"remap": ("--to", "cpu"), "merge": ("--method", "linear")}
OUTPUT = {"doctor": "--fix", "digest": "--output"}  # maps a command to the option for its output
# Names of parameters for input files.
INPUTS = ("src", "sources", "file", "files", "a", "b", "base")
CLOSE = 0.75  # minimum similarity of a misspelled word
STEPS = 8  # maximum number of replacements
INTO = "out"
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_SED = re.compile(r"s([/|#,])(.+)\1(.*)\1g?")
_DEVICE = re.compile(r"(cpu|meta|mps|cuda(:\d+)?)")


def _is_dtype(word: str) -> bool:
    plain = word.lower().removeprefix("torch.")
    return plain in dtypes.BY_NAME or plain in dtypes.ALIASES


# Maps an option to a function that returns whether a word is a value of the option.
VALUES: dict[str, Callable[[str], bool]] = {
    "--cast": _is_dtype,
    "--shard-size": lambda word: not word.isdigit() and parse_size(word) is not None,
    "--sub": lambda word: "=" in word and not os.path.lexists(word),
}
Words = list[str]
Step = tuple[str | None, "Line | None"]  # the fallback hint, and the corrected command line


def improve(error: BaseException, words: Sequence[str], main: click.Group) -> None:
    """Set a better hint for an error, if possible. `words` are the arguments of ``ckptkit``."""
    line = Line(main, [*words])
    hint = None
    if isinstance(error, click.UsageError):
        hint = _meant(error, line)
    elif isinstance(error, CkptkitError):
        hint = _of_input(error, line)
    if hint is None and getattr(error, "ctx", ...) is None and line.name:
        hint = f"see `ckptkit {line.name} --help`"  # click lost the name of the command
    if hint is not None:
        error.hint = hint  # type: ignore[attr-defined]


class Line:
    """A command line: its words and its command."""

    def __init__(self, main: click.Group, words: Words) -> None:
        self.main, self.words = main, words
        self.context = context = click.Context(main, info_name="ckptkit", **main.context_settings)
        self.at = next((n for n, word in enumerate(words) if not word.startswith("-")), 0)
        name = words[self.at] if words else ""
        self.name = name if name in main.list_commands(context) else ""
        self.command = main.get_command(context, name) or main
        batch = main.get_command(context, "batch")
        names = batch.list_commands(context) if isinstance(batch, click.Group) else ()
        self.is_batchable = self.name in names  # whether `batch` can run the command

    def with_words(self, words: Sequence[str]) -> Line:
        return Line(self.main, [*words])

    def __str__(self) -> str:
        return f"`{shell_command(('ckptkit', *self.words))}`"

    def replaced(self, old: str, *new: str) -> Line | None:
        """Replace the word `old` by `new`. Return None if the line does not contain `old`."""
        if old not in self.words:
            return None
        at = self.words.index(old)
        return self.with_words([*self.words[:at], *new, *self.words[at + 1 :]])

    def without(self, *words: str) -> Line:
        """Remove the first occurrence of each of `words`."""
        left = [*self.words]
        for word in words:
            left.remove(word)
        return self.with_words(left)

    def works(self) -> bool:
        """Return True if all inputs exist. If the command writes, also do a dry run.

        Raises UsageError if the command line is invalid. Raises MissingFileError if an input is
        missing. If the dry run fails, raises the error of the dry run.
        """
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), on_command_line():
            try:
                return self._is_right()
            except click.exceptions.Exit:  # --help and other options that print and exit
                return True

    def _is_right(self) -> bool:
        command: click.Command = self.main
        context, rest = self.context, [*self.words]
        while isinstance(command, click.Group):
            name, found, rest = command.resolve_command(context, rest)
            assert found is not None  # otherwise click raises an error
            command = found
            if isinstance(command, click.Group):
                context = click.Context(command, info_name=name, parent=context)
            else:
                context = command.make_context(name, rest, parent=context)
        arguments = (p.name for p in command.params if isinstance(p, click.Argument))
        for value in (context.params[name] for name in arguments if name in INPUTS):
            for place in (value,) if isinstance(value, str) else value or ():
                if not os.path.exists(place) and not is_url(place) and not glob(place):
                    raise MissingFileError("does not exist", where=place)
        # Dry-run only commands that read local files and run no code of a model.
        is_local = not any(map(is_url, self.words)) and not context.params.get("like")
        if isinstance(command, Writer) and is_local:
            context.params |= {"dry_run": True, "quiet": True, "as_json": False, "force": True}
            with context:
                return not command.invoke(context)
        return True

    def parts(self) -> tuple[Words, Words]:
        """Return two lists of words.

        The first list contains the arguments of the command, such as files, without the recipe of
        `run`. The second list contains all other words after the command.
        """
        command, own = self.command, list(dequantize_said(self.words[self.at + 1 :]))
        context = click.Context(command, parent=self.context)
        while isinstance(command, click.Group) and own:
            found = command.get_command(context, own[0])
            if found is None:
                break
            command, own = found, own[1:]
            context = click.Context(command, parent=context)
        values, extra, _ = command.make_parser(context).parse_args(list(own))
        each_argument = (p for p in command.params if isinstance(p, click.Argument))
        given: Words = []
        for each in (*(values.get(each.name or "") for each in each_argument), *extra):
            if isinstance(each, str):
                given.append(each)
            elif isinstance(each, tuple):
                given += each
        for each in given:
            own.remove(each)
        recipe = given[: self.name == "run"]
        return given[len(recipe) :], [*recipe, *(each for each in own if each != "--")]

    def of_many(self, into: str, sources: Sequence[str]) -> Line:
        """Return the `batch` command line for `sources`."""
        options = self.parts()[1]
        needed = () if {"--to", "--device"} & {*options} else NEEDED.get(self.name, ())
        return self.with_words(("batch", self.name, *options, *needed, "--into", into, *sources))


def _meant(error: click.UsageError, line: Line) -> str | None:
    """Return a hint with the corrected command line. If the correction fails, return a fallback
    hint."""
    said, found = None, line
    for _ in range(STEPS):
        step, new = _step(error, found)
        said = said or step
        if new is None or new.words == found.words:
            return said
        found = new
        try:
            return f"did you mean {found}?" if found.works() else said
        except click.UsageError as another:
            error = another
        except CkptkitError as refused:
            also = f"{refused}; {refused.hint}" if refused.hint else str(refused)
            return _first(_others(refused, found)) or said or f"a second error: {also}"
    return said


def _first(lines: Iterable[Line]) -> str | None:
    """Return a hint with the first command line that works."""
    for line in lines:
        with suppress(click.UsageError, CkptkitError):
            if line.works():
                return f"did you mean {line}?"
    return None


def _step(error: click.UsageError, line: Line) -> Step:
    """Return a fallback hint, and the command line with the next correction. Each may be None."""
    context = error.ctx
    if context is None:
        return None, None
    if isinstance(error, click.NoSuchOption):
        return _option(error, line)
    if isinstance(error, click.MissingParameter):
        return _missing(error, line)
    if error.message.startswith("No such command"):
        return _command(line) if context.command is line.main else (None, _subcommand(line))
    if error.message.startswith("name two or more SRC"):
        return None, _several(line)
    if error.message.startswith("give either B"):
        return None, _beside(line)
    for word in line.words:
        if (sed := _SED.fullmatch(word)) is not None:
            known = {"--sub"} & {*line.words} or not _has(line.command, "--sub")
            return None, line.replaced(word, *[] if known else ["--sub"], f"{sed[2]}={sed[3]}")
        pair = [word, next(iter(line.words[line.words.index(word) + 1 :]), "")]
        if "REGEX=" in error.message and repr(word) in error.message and "=" not in pair[1]:
            new = line.replaced(pair[1])
            return None, new and new.replaced(word, "=".join(pair))  # `--sub OLD NEW`
    if "is not of the form A=B" in error.message:  # the user gave one device for all tensors
        return None, line.replaced("--device", "--to")
    if "unexpected extra argument" in error.message:
        return None, _extra(line)
    if line.name in NEEDED and not isinstance(error, click.BadParameter):
        return None, line.with_words([*line.words, *NEEDED[line.name]])
    return None, None


def _command(line: Line) -> Step:
    """Replace an unknown command."""
    word, rest = line.words[line.at], line.words[line.at + 1 :]
    if (known := WORDS.get(word.lower().replace("_", "-"))) is not None:
        name, *options = known.split()
        new = line.with_words([*line.words[: line.at], name, *options, *rest])
        return f"did you mean {known}? see `ckptkit {name} --help`", new
    commands = line.main.list_commands(click.Context(line.main))
    near = [name for name in commands if name.startswith(word)]
    near = near or nearest(word, commands, CLOSE)
    if not near:
        return "see `ckptkit --help`", None
    return f"did you mean {', '.join(near)}? see `ckptkit --help`", line.replaced(word, near[0])


def _subcommand(line: Line) -> Line | None:
    """Correct or insert the word after the name of a group of commands."""
    before, (word, *rest) = line.words[: line.at], line.words[line.at + 1 :]
    known = line.main.list_commands(line.context)
    if word in known:  # the command takes many files without `batch`
        return line.with_words([*before, word, *rest])
    assert isinstance(line.command, click.Group)
    near = nearest(word, line.command.list_commands(line.context), CLOSE)
    if near:
        return line.replaced(word, near[0])
    if line.name in GROUPS and os.path.exists(word):
        return line.replaced(line.name, line.name, GROUPS[line.name])
    return None


def _several(line: Line) -> Line | None:
    """Add the missing DST, or replace a folder of checkpoints by a pattern."""
    places = line.parts()[0]
    if all(map(os.path.exists, places)):
        return line.with_words([*line.words, output_name(places[0], "new")])
    if os.path.isdir(places[0]):
        return line.replaced(places[0], os.path.join(places[0], "*"))
    return None


def _beside(line: Line) -> Line | None:
    """Add the missing B of `diff`: the file beside A with the most similar name."""
    (place, *_) = line.parts()[0]
    others = {*glob(os.path.join(os.path.dirname(place), f"*{os.path.splitext(place)[1]}"))}
    near = nearest(place, sorted(others - {place}), 0)
    return line.with_words([*line.words, near[0]]) if near and os.path.isfile(place) else None


def _has(command: click.Command, option: str) -> bool:
    return any(option in (*each.opts, *each.secondary_opts) for each in command.params)


def _option(error: click.NoSuchOption, line: Line) -> Step:
    """Replace an unknown option by its correct name, or by a command that has the option."""
    assert error.ctx is not None
    wrong, command = error.option_name, error.ctx.command
    see = f"see `{error.ctx.command_path} --help`"
    if wrong == "--json" and line.name in WITHOUT_JSON:
        return WITHOUT_JSON[line.name], None
    options = [each for p in command.params for each in p.opts if each.startswith("--")]
    near = nearest(wrong, options, CLOSE)
    known = OPTIONS.get(f"{line.name} {wrong}", OPTIONS.get(wrong, near[0] if near else ""))
    convert = line.main.get_command(click.Context(line.main), "convert")
    if not known and line.name in AS_CONVERT and convert is not None and _has(convert, wrong):
        known = f"convert {wrong}"
    at = next((n for n, each in enumerate(line.words) if each.partition("=")[0] == wrong), None)
    if not known or at is None:  # short options typed as one word, such as -qv, have no suggestions
        return see, None
    before, after = line.words[:at], line.words[at + 1 :]
    value = list(filter(None, [line.words[at].partition("=")[2]]))
    if known == DST:
        value = value or [after.pop(0)] if after else []
        new = line.with_words([*before, *after, *value])
        return f"the destination is the last argument: {see}", new
    owner, dashes, name = known.rpartition("--") if "--" in known else (known, "", "")
    words, owner = (dashes + name).split(), owner.strip()
    said = f"use {' '.join(words)}: {see}"
    if not words:  # another command does what the option asks for
        said = f"use {owner}: see `ckptkit {owner} --help`"
        before[line.at] = owner
    elif not _has(command, words[0]) and owner:
        said = f"{owner} has {' '.join(words)}: see `ckptkit {owner} --help`"
        if owner == "convert" and line.name not in AS_CONVERT:
            return said, None
        before[line.at : line.at + 1] = [owner, *AS_CONVERT.get(line.name, "").split()]
    return said, line.with_words([*before, *words, *value, *after])


def _missing(error: click.MissingParameter, line: Line) -> Step:
    """Add the missing argument: a name from the file, or a name for the output."""
    name = None if error.param is None else error.param.name
    if name == "into":
        last = line.words[-1]
        named = last in line.parts()[0] and not last.startswith("-")
        if named and not (os.path.lexists(last) or has_magic(last)):
            return None, line.with_words([*line.words[:-1], "--into", last])
        return None, line.with_words([*line.words, "--into", INTO])
    if name == "files" and "--fix" in line.words[:-1]:  # `doctor --fix FILE`
        at = line.words.index("--fix")
        file, rest = line.words[at + 1], line.words[at + 2 :]
        words = [*line.words[:at], *rest, file, "--fix", output_name(file, "fixed")]
        return None, line.with_words(words)
    places, options = line.parts() if line.name else ([], [])
    if line.name == "run" and options and os.path.isfile(options[0]):
        return "name a recipe before SRC; `ckptkit run --list` lists the recipes", None
    if not places:
        return None, None
    if name == "delta":
        return None, line.with_words([*line.words, output_name(places[1], "delta", "")])
    if name == "dst":
        end = (".html", "report") if line.name == "report" else (None, "new")
        for option, value in pairwise(line.words):
            if option in ("--to", "--format") and f".{value}" in WRITTEN:
                end = (f".{value}", "new")
                line = (option == "--to" and line.without(option, value)) or line
        return None, line.with_words([*line.words, output_name(places[0], end[1], end[0])])
    if name == "key" and line.name == "wrap":
        return None, _wrapped(line, places)
    if name not in ("key", "name") or not os.path.exists(places[0]):
        return None, None
    return _in_file(name, line, places)


def _in_file(name: str, line: Line, places: Words) -> Step:
    """Add the missing name of a tensor (`name`) or path of an entry (`key`), from the file."""
    from ckptkit.api import open_checkpoint

    with suppress(CkptkitError), open_checkpoint(places[0]) as checkpoint:
        if name == "name":
            for option, value in pairwise(line.words):
                if option == "--key" and value in checkpoint.weights:  # a tensor, not an entry
                    return None, line.replaced(option)
            return None, line.with_words([*line.words, *list(checkpoint.weights)[:1]])
        entries = list(map(str, checkpoint))
        path = checkpoint.selection.path if checkpoint.selection is not None else ()
        said = f"--key is the path of one of these entries: {some(entries, 12)}"
        for each in places[1:]:  # the user named the entry without --key
            if each in entries:
                return said, line.replaced(each, "--key", each)
        for each in places[2:]:  # the user named a part of the entry
            for entry in entries:
                if each in entry:
                    return said, line.replaced(each, "--key", entry)
        chosen = join(path) or next(iter(entries), "")
        return said, line.with_words([*line.words, "--key", chosen])
    return None, None


def _wrapped(line: Line, places: Words) -> Line | None:
    """Add --key to a `wrap` line. The key is the third argument, or `model`."""
    if len(places) > 2:
        return line.replaced(places[2], "--key", places[2])
    return line.with_words([*line.words, "--key", "model"])


def _extra(line: Line) -> Line | None:
    """Correct a command line with too many arguments.

    An argument may be the value of an option, or the user gave several files.
    """
    places = line.parts()[0]
    if any(map(is_model, places)) and line.name == "check":
        return line.replaced("check", "diff")
    for word in places[2:]:
        for option, is_value in VALUES.items():
            if _has(line.command, option) and is_value(word):
                new = line.replaced(word)
                for old, value in pairwise(line.words):
                    if old == option and new is not None:
                        return new.replaced(value, word)
                return line.replaced(word, option, word)
    devices = [word for word in places if _DEVICE.fullmatch(word)]
    if len(devices) == 2 and _has(line.command, "--device"):
        words = [word for word in line.words if word not in devices]
        return line.with_words([*words, "--device", "=".join(devices)])
    if devices and _has(line.command, "--to"):
        return line.replaced(devices[0], "--to", devices[0])
    prefixes = [word for word in places if word.endswith(".") and not os.path.lexists(word)]
    if prefixes and _has(line.command, "--prefix"):
        return line.replaced(prefixes[0], "--prefix", prefixes[0])
    if len(places) == 4 and line.name == "rename":
        new = line.with_words([word for word in line.words if word not in places[2:]])
        return new.with_words([*new.words, "--sub", f"^{re.escape(places[2])}={places[3]}"])
    if not line.is_batchable:  # the command takes a single file
        return line.with_words([word for word in line.words if word not in places[1:]])
    if "--in-place" in line.words:
        return None
    *sources, last = places
    if os.path.isfile(last):
        sources, last = [*sources, last], INTO
    if not sources or not all(map(os.path.exists, sources)):
        return None
    suffix = os.path.splitext(sources[0])[1]
    pattern = os.path.join(os.path.dirname(sources[0]), f"*{suffix}")
    sources = [pattern] if sorted(glob(pattern)) == sorted(sources) else sources
    return line.of_many(last, sources)


def _of_input(error: CkptkitError, line: Line) -> str | None:
    """Return a hint for an input that ckptkit refused or did not find."""
    place, own = error.where, error.hint
    if (new := _first(_others(error, line))) is not None:
        is_path = own is not None and own.startswith("did you mean")  # `own` suggests only a path
        return new if is_path else "; ".join(filter(None, [own, new]))
    is_missing = isinstance(error, MissingFileError) and not os.path.lexists(place or "")
    if is_missing and place is not None and has_magic(place):
        found = sorted(glob(place, recursive=True))
        one = (
            f"name one of the {len(found):,} files, such as {shell_word(found[0])}" if found else ""
        )
        return one or "no file matches this pattern"
    return None


def _others(error: CkptkitError, line: Line) -> Iterator[Line]:
    """Yield corrected command lines for an input that ckptkit refused."""
    place = error.where
    needed = NEEDED.get(line.name, ())
    if needed and isinstance(error, UsageError) and needed[0] not in line.words:
        yield line.with_words([*line.words, *needed])
    if place is None or is_url(place):
        return
    if line.name in ("average", "join", "merge"):  # an adapter among whole models
        yield from filter(None, [line.replaced(line.name, "lora", "merge")])
    patterns = [place] if has_magic(place) and not os.path.lexists(place) else []
    if isinstance(error, SeveralError):
        suffixes = {os.path.splitext(each)[1] for each in error.files}
        patterns = [os.path.join(place, f"*{each}") for each in suffixes] * (len(suffixes) == 1)
    if patterns and line.is_batchable:
        yield line.of_many(next(iter(line.parts()[0][1:]), INTO), patterns)
    is_missing = isinstance(error, MissingFileError)
    if is_missing and _HUB.fullmatch(place) and not os.path.isdir(os.path.dirname(place)):
        yield from filter(None, [line.replaced(place, f"hf://{place}")])
    if is_missing and not isinstance(line.command, Writer) and place in line.words:
        yield from _of_no_file(place, line)
    for before, word in pairwise(line.words):
        if before in ("--drop", "--keep") and not has_magic(word):
            yield from filter(None, [line.replaced(word, f"{word}*")])
            if word.startswith("optim"):  # `extract` writes the weights without the optimizer
                new = line.without(before, word)
                yield from _extracting(new)
    stem, suffix = os.path.splitext(place.rstrip("/"))
    sources = line.parts()[0] if line.name else []
    is_wrong = isinstance(error, UsageError) and not isinstance(error, OutputExistsError)
    source_suffix = os.path.splitext(sources[0])[1] if sources else ""
    if is_wrong and f".{place}" in WRITTEN and place in sources[1:]:
        yield from filter(None, [line.replaced(place, output_name(sources[0], "new", f".{place}"))])
    if is_wrong and source_suffix and suffix not in WRITTEN and place in sources[1:]:
        yield from filter(None, [line.replaced(place, stem + source_suffix)])
    if line.name == "convert" and "--key" in line.words:
        yield from filter(None, [line.replaced("convert", "extract")])


def _extracting(line: Line) -> Iterator[Line]:
    """Replace `convert` by `extract`, and add --key with the path of the weights."""
    if (new := line.replaced("convert", "extract")) is None:
        return
    yield from filter(None, [_in_file("key", new, new.parts()[0])[1]])


def _of_no_file(place: str, line: Line) -> Iterator[Line]:
    """Yield corrected command lines for an argument that is not a file."""
    yield from filter(None, [_selected(place, line)])
    module, _, name = place.rpartition(".")
    if os.path.isfile(file := f"{module.replace('.', os.sep)}.py"):
        yield from filter(None, [line.replaced(place, f"{file}:{name}")])
    if is_model(place) and _has(line.command, "--model"):
        yield from filter(None, [line.replaced(place, "--model", place)])
    # With an output, both commands take one FILE. `digest` writes text, `doctor` a checkpoint.
    is_output = (os.path.splitext(place)[1] in WRITTEN) == (line.name == "doctor")
    if line.name in OUTPUT and is_output and line.parts()[0][1:] == [place]:
        yield from filter(None, [line.replaced(place, OUTPUT[line.name], place)])
    for word in filter(os.path.isfile, line.words):  # two arguments in the wrong order
        swap = {word: place, place: word}
        yield line.with_words([swap.get(each, each) for each in line.words])


def _selected(place: str, line: Line) -> Line | None:
    """Replace the name of a tensor or entry by the option that selects it.

    `place` is the name. The user wrote the name in place of a file.
    """
    from ckptkit.api import open_checkpoint

    for file in filter(os.path.isfile, line.parts()[0]):
        with suppress(CkptkitError), open_checkpoint(file) as checkpoint:
            names = list(checkpoint.weights)
            wide = place if has_magic(place) or place in names else f"*{place}*"
            if _has(line.command, "--keys") and any(map(matcher([wide]), names)):
                return line.replaced(place, "--keys", wide)
            if _has(line.command, "--key") and place in map(str, checkpoint):
                with suppress(CkptkitError):
                    if checkpoint.with_key(place).selection is not None:
                        return line.replaced(place, "--key", place)
                return line.replaced(place, "--keys", f"{place}*")  # an entry without weights
    return None
