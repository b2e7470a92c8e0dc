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
    flatten,
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
    "add": "merge --method linear --no-normalize", "add-prefix": "add-module", "allclose": "diff",
    "apply": "delta apply", "bf16": "convert --cast bfloat16", "cast": "convert --cast float16",
    "cat": "inspect", "checksum": "digest", "clean": "convert --objects drop", "clone": "convert",
    "cmp": "diff", "compact": "convert --compact", "compare": "diff", "concat": "join",
    "consolidate": "convert", "convert-lora": "lora convert", "copy": "convert",
    "count": "inspect --brief", "cp": "convert", "cpu": "remap --to cpu", "cuda": "remap --to cuda",
    "dare": "merge --method dare-ties", "dcp-to-torch": "convert", "delete": "convert --drop",
    "dequant": "convert --dequantize", "dequantize": "convert --dequantize", "diagnose": "doctor",
    "drop": "convert --drop", "dtype": "convert --cast float16", "du": "inspect --brief",
    "equal": "diff", "export": "convert", "extract-ema": "ema", "extract-lora": "lora extract",
    "find-nan": "verify --values", "fix": "doctor", "float16": "convert --cast float16",
    "fp16": "convert --cast float16", "get": "inspect", "gguf": "inspect",
    "gguf2safetensors": "convert", "half": "convert --cast float16", "hash": "digest",
    "head": "inspect", "histogram": "stats", "inf": "verify --values", "info": "inspect",
    "is-safe": "scan", "keys": "inspect --names", "list": "inspect", "list-keys": "inspect --names",
    "load": "inspect", "load-into": "diff", "ls": "inspect", "malware": "scan", "man": "help",
    "mean": "average", "merge-lora": "lora merge", "merge-shards": "convert", "metadata": "inspect",
    "module": "strip-module", "names": "inspect --names", "nan": "verify --values",
    "nans": "verify --values", "open": "inspect", "optimizer": "inspect --flat", "pad": "resize",
    "params": "inspect --brief", "patch": "delta apply", "plot": "report", "prefix": "add-module",
    "print": "inspect", "prune": "extract", "quantize": "convert --quantize fp8-block",
    "recipe": "run --list", "recipes": "run --list", "remove": "convert --drop",
    "remove-module": "strip-module", "remove-optimizer": "extract", "remove-prefix": "strip-module",
    "rename-keys": "rename", "repair": "recover", "resize-embeddings": "resize",
    "resize-lora": "lora resize", "resize-vocab": "resize", "safe": "scan",
    "safetensors": "convert --format safetensors", "sanitize": "convert --objects drop",
    "save": "convert", "security": "scan", "sed": "rename --sub", "select": "convert --keep",
    "set-metadata": "convert --set-metadata", "sha256": "digest",
    "shard": "convert --shard-size 5GB", "size": "inspect --brief", "slerp": "merge --method slerp",
    "soup": "average", "split": "convert --shard-size 5GB", "strip-optimizer": "extract",
    "strip-prefix": "strip-module",
    "subtract": "merge --method linear --no-normalize --weight 1 --weight -1", "sum": "average",
    "summary": "inspect --brief", "swa": "average", "test": "verify", "ties": "merge --method ties",
    "to": "remap --to", "to-cpu": "remap --to cpu",
    "to-safetensors": "convert --format safetensors", "torch-to-dcp": "convert --format dcp",
    "tree": "inspect --tree", "union": "join", "unshard": "convert", "unwrap": "strip-module",
    "validate": "verify", "version": "env", "view": "inspect", "zero-to-fp32": "convert",
}  # fmt: skip
# Maps a group of commands and a wrong word to the command that the user probably means.
SUBWORDS = {
    "delta build": "delta make", "delta check": "delta verify", "delta compare": "delta make",
    "delta create": "delta make", "delta diff": "delta make", "delta merge": "delta squash",
    "delta patch": "delta apply", "lora apply": "lora merge", "lora info": "inspect",
    "lora subtract": "lora merge --weight -1", "lora svd": "lora extract",
    "lora unmerge": "lora merge --weight -1",
}  # fmt: skip
DST, ARGUMENT, MULTIPLE = "DST", "ARGUMENT", "MULTIPLE"
# Maps option names of other tools to ckptkit options. A key may start with the command of the
# option. `DST` means that the value of the option becomes the argument DST. `ARGUMENT` means that
# the value becomes an argument at the same position. `MULTIPLE` means that the number of rows
# becomes divisible by the value.
OPTIONS = {
    "--add": "--prefix", "--bf16": "convert --cast bfloat16", "--cast-to": "convert --cast",
    "--destination": DST, "--device-map": "--device", "--dst": DST, "--dtype": "convert --cast",
    "--exact": "diff --values", "--exclude": "convert --drop", "--fp16": "convert --cast float16",
    "--half": "convert --cast float16", "--include": "convert --keep",
    "--keys-only": "diff --no-values", "--manifest": "--output", "--map-device": "--device",
    "--map-location": "remap --to", "--max-shard-size": "convert --shard-size",
    "--nan": "verify --values", "--only": "convert --keep", "--only-keys": "diff --no-values",
    "--out": DST, "--output": DST, "--output-dir": DST, "--overwrite": "convert --force",
    "--pattern": "rename --sub", "--regex": "rename --sub", "--remove": "convert --drop",
    "--replace": "convert --force", "--resize": "resize --rows", "--select": "convert --keep",
    "--strip": "--prefix", "--strip-prefix": "strip-module --prefix",
    "--summary": "inspect --brief", "--tol": "diff --atol", "--tolerance": "diff --atol",
    "--weights": "--weight", "--yes": "convert --force", "-e": "rename --sub",
    "-f": "convert --force", "-k": "extract --key", "-n": "convert --dry-run", "-o": DST,
    "-p": "strip-module --prefix", "-s": "inspect --brief", "-y": "convert --force",
    "batch --out": "--into", "batch --output": "--into", "batch --suffix": "--format",
    "batch -o": "--into", "browse --json": "inspect --json", "check --model": "diff --model",
    "convert --ema": "ema", "convert --keys": "--keep", "convert --metadata": "--set-metadata",
    "convert --no-optimizer": "extract", "convert --only-model": "extract",
    "convert --prefix": "--strip", "convert --remove-optimizer": "extract",
    "convert --size": "--shard-size", "convert --strip-prefix": "--strip",
    "convert --weights-only": "extract", "diff --optimizer": "--all", "diff --save": "delta make",
    "doctor --base": "lora check --base", "doctor --out": "--fix", "doctor --output": "--fix",
    "doctor -o": "--fix", "extract --ema": "ema", "extract --keys": "convert --keep",
    "inspect --all": "--tree", "inspect --full": "--flat", "inspect --keys-only": "--names",
    "inspect --list": "--names", "inspect --metadata": "inspect", "inspect --optimizer": "--flat",
    "inspect --quantization": "inspect", "inspect --shapes": "--flat", "lora --base": ARGUMENT,
    "lora --dtype": "convert --cast", "lora --format": "--to", "lora --scale": "--weight",
    "lora --subtract": "--weight -1", "lora -r": "--rank", "merge --alpha": "--scale",
    "merge --dare": "--method dare-ties", "merge --linear": "--method linear",
    "merge --ratio": "--scale", "merge --slerp": "--method slerp", "merge --t": "--scale",
    "merge --task-arithmetic": "--method task", "merge --ties": "--method ties",
    "remap --map": "--device", "remap --values": "--device-values",
    "rename --add-prefix": "add-module --prefix", "rename --from": "--sub",
    "rename --prefix": "--sub", "rename --rename": "--sub", "rename --replace": "--sub",
    "rename --to": ARGUMENT, "resize --multiple": MULTIPLE, "resize --multiple-of": MULTIPLE,
    "resize --num-tokens": "--rows", "resize --pad-to-multiple-of": MULTIPLE,
    "resize --rank": "lora resize --rank", "resize --size": "--rows", "resize --to": "--rows",
    "resize --vocab": "--rows", "resize --vocab-size": "--rows",
    "scan --fix": "convert --objects drop",
}  # fmt: skip
# For each command that `convert` can replace: the options with which `convert` has the same effect.
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
UNTIED = "with DST of safetensors, `--ties duplicate` of convert writes tied tensors twice"
IN_PYTHON = """in Python: ckptkit.save(ckptkit.open("run.pth").with_value("epoch", 3), "new.pth")"""
# Hints for options and commands that ckptkit does not have.
LACKING = {
    "--legacy": "ckptkit writes the format of torch 1.6 and later. torch.save(..., "
    "_use_new_zipfile_serialization=False) writes the older format",
    "--set": IN_PYTHON, "edit": IN_PYTHON, "set": IN_PYTHON,
    "--untie": UNTIED, "untie": UNTIED,
}  # fmt: skip
# Maps a group of commands to one of its commands. If a user gives a file in place of a command, the
# hint contains this command.
GROUPS = {"lora": "check", "delta": "make"}
# Maps a command to its required option and a default value.
NEEDED = {
    "remap": ("--to", "cpu"), "merge": ("--method", "linear"), "lora extract": ("--rank", "16"),
    "lora resize": ("--rank", "8"), "lora convert": ("--to", "peft"),
}  # fmt: skip
OUTPUT = {"doctor": "--fix", "digest": "--output"}  # maps a command to the option for its output
# Names of parameters for input files.
INPUTS = ("src", "sources", "file", "files", "a", "b", "base")
CLOSE = 0.75  # minimum similarity of a misspelled word and its correction
STEPS = 8  # maximum number of corrections of one command line
INTO = "out"
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_SED = re.compile(r"s([/|#,])(.+)\1(.*)\1g?")
_COMMAND = re.compile(r"`(ckptkit [^`]+)`")
_DEVICE = re.compile(r"(cpu|meta|mps|cuda(:\d+)?)")
_RECIPES = (".yaml", ".yml", ".toml")
_NUMBER = re.compile(r"-?\d*\.?\d+")
_WEIGHTED = re.compile(rf"(.+)[:@=]({_NUMBER.pattern})")
_NOT_A_CHOICE = re.compile(r"'([^']*)' is not one of")


def _is_dtype(word: str) -> bool:
    plain = word.lower().removeprefix("torch.")
    return plain in dtypes.BY_NAME or plain in dtypes.ALIASES


# Maps an option to a function that returns whether a word is a value of the option.
VALUES: dict[str, Callable[[str], bool]] = {
    "--cast": _is_dtype,
    "--shard-size": lambda word: not word.isdigit() and parse_size(word) is not None,
    "--sub": lambda word: "=" in word and not os.path.lexists(word),
    "--device": lambda word: all(map(_DEVICE.fullmatch, word.split("="))) and "=" in word,
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
        self.path = " ".join(words[self.at : self.at + 1 + isinstance(self.command, click.Group)])
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
            with suppress(click.UsageError):
                said = _first(_of_options(found, found.parts()[0])) or said
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
    for first in lines:
        line: Line | None = first
        for _ in range(STEPS):
            try:
                if line is not None and line.works():
                    return f"did you mean {line}?"
                break
            except click.UsageError as error:
                line = _step(error, line)[1] if line is not None else None
            except CkptkitError:
                break
    return None


def _step(error: click.UsageError, line: Line) -> Step:
    """Return a fallback hint, and the command line with the next correction. Each may be None."""
    context = error.ctx
    if context is None and isinstance(error, click.BadOptionUsage):  # an option without its value
        context = click.Context(line.command, parent=line.context, info_name=line.name)
        return _of_value(error, line, context) or (None, None)
    if context is None:
        return None, None
    if isinstance(error, click.NoSuchOption):
        return _option(error, line)
    if isinstance(error, click.MissingParameter):
        return _missing(error, line)
    if error.message.startswith("No such command"):
        return _command(line) if context.command is line.main else (None, _subcommand(line))
    if (known := _of_value(error, line, context)) is not None:
        return known
    if error.message.startswith("name two or more SRC"):
        return None, _several(line)
    if error.message.startswith("give either B"):
        return None, _beside(line)
    for word in line.words:
        if (sed := _SED.fullmatch(word)) is not None:
            is_said = {"--sub"} & {*line.words} or not _has(line.command, "--sub")
            return None, line.replaced(word, *[] if is_said else ["--sub"], f"{sed[2]}={sed[3]}")
        pair = [word, next(iter(line.words[line.words.index(word) + 1 :]), "")]
        if "REGEX=" in error.message and repr(word) in error.message and "=" not in pair[1]:
            new = line.replaced(pair[1])
            return None, new and new.replaced(word, _regex(*pair))  # `--sub OLD NEW`
    if "is not of the form A=B" in error.message:  # the user gave one device for all tensors
        return None, line.replaced("--device", "--to")
    if "unexpected extra argument" in error.message:
        return None, _extra(line, context.command)
    if line.name in NEEDED and not isinstance(error, click.BadParameter):
        return None, line.with_words([*line.words, *NEEDED[line.name]])
    return None, None


def _regex(old: str, new: str) -> str:
    """Return the value of --sub. `old` is a prefix that ends with a dot, or a pattern."""
    return f"^{re.escape(old)}={new}" if old.endswith(".") else f"{old}={new}"


def _of_value(error: click.UsageError, line: Line, context: click.Context) -> Step | None:
    """Correct a value that is not one of the choices of its option.

    For other values, replace the option if OPTIONS contains it for this command.
    """
    param = getattr(error, "param", None)
    options = [getattr(error, "option_name", ""), *(param.opts if param is not None else ())]
    bad = _NOT_A_CHOICE.search(error.message)
    if bad is not None and param is not None and isinstance(param.type, click.Choice):
        plain = bad[1].lower().replace("_", "-").strip(".")
        choices = list(map(str, param.type.choices))
        near = [plain] if plain in choices else [each for each in choices if plain.startswith(each)]
        if near := near or nearest(plain, choices, CLOSE):
            return None, line.replaced(bad[1], near[0])
    for option in options:
        if option and f"{line.name} {option}" in OPTIONS:
            return _option(click.NoSuchOption(option, ctx=context), line)
    return None


def _command(line: Line) -> Step:
    """Replace an unknown command."""
    word, rest = line.words[line.at], line.words[line.at + 1 :]
    commands = line.main.list_commands(click.Context(line.main))
    if len(rest) > 1 and rest[0] in commands and not os.path.exists(rest[0]):
        return None, line.without(word)  # a word before the command
    if word in LACKING:
        return LACKING[word], None
    if (known := WORDS.get(word.lower().replace("_", "-"))) is not None:
        name, *options = known.split()
        if options and len(rest) > 2 and os.path.exists(rest[0]) and not rest[-1].startswith("-"):
            found = line.main.get_command(line.context, name)
            if found is not None and _takes_value(found, options[-1]):
                options, rest = options[:-1], [*rest[:-1], options[-1], rest[-1]]
        new = line.with_words([*line.words[: line.at], name, *options, *rest])
        return f"did you mean {known}? see `ckptkit {name} --help`", new
    near = [name for name in commands if name.startswith(word)]
    near = near or nearest(word, commands, CLOSE)
    if not near:
        return "see `ckptkit --help`", None
    return f"did you mean {', '.join(near)}? see `ckptkit --help`", line.replaced(word, near[0])


def _subcommand(line: Line) -> Line | None:
    """Correct or insert the word after the name of a group of commands."""
    before, (word, *rest) = line.words[: line.at], line.words[line.at + 1 :]
    known = line.main.list_commands(line.context)
    if (meant := SUBWORDS.get(f"{line.name} {word}")) is not None:
        return line.with_words([*before, *meant.split(), *rest])
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
    if os.path.splitext(places[0])[1] in _RECIPES:
        words = ["run" if each == line.name else each for each in line.words]
        return line.with_words(words).replaced(places[0], places[0], ".")
    if os.path.isdir(places[0]):
        from ckptkit.api import open_checkpoint

        with suppress(CkptkitError), open_checkpoint(places[0]):  # one checkpoint of several files
            return line.replaced(line.name, "convert")
        return line.replaced(places[0], os.path.join(places[0], "*"))
    return None


def _beside(line: Line) -> Line | None:
    """Add the missing B of `diff`: the checkpoint beside A with the most similar name."""
    from ckptkit.api import open_checkpoint

    (place, *_) = line.parts()[0]
    others = {*glob(os.path.join(os.path.dirname(place), f"*{os.path.splitext(place)[1]}"))}
    for near in nearest(place, sorted(others - {place}), 0) if os.path.isfile(place) else ():
        with suppress(CkptkitError), open_checkpoint(near):
            return line.with_words([*line.words, near])
    return None


def _takes_value(command: click.Command, option: str) -> bool:
    found = (each for each in command.params if option in each.opts)
    return any(isinstance(each, click.Option) and not each.is_flag for each in found)


def _has(command: click.Command, option: str) -> bool:
    return any(option in (*each.opts, *each.secondary_opts) for each in command.params)


def _without_default(words: Words, option: str) -> Words:
    """Remove `option` if its value is a default value from `WORDS`."""
    at = words.index(option) if option in words else len(words)
    is_default = any(" ".join(words[at : at + 2]) in known for known in WORDS.values())
    return words[:at] + words[at + 2 :] if is_default and at < len(words) else words


def _repeated(
    command: click.Command, words: Words, value: Words, after: Words
) -> tuple[Words, Words]:
    """Return the words of an option, and the words of its value.

    A user may give several numbers after one option. This function removes these numbers from
    `after`.
    """
    if len(words) > 1:  # `--slerp 0.3`
        is_scaled = after and _NUMBER.fullmatch(after[0]) and _has(command, "--scale")
        return [*words, *(["--scale"] if is_scaled else [])], value
    value = value or after[:1]
    del after[: len(value) and after[:1] == value]
    numbers = ",".join(value).split(",")
    if not all(map(_NUMBER.fullmatch, numbers)):
        return words, value
    while after and _NUMBER.fullmatch(after[0]):
        numbers.append(after.pop(0))
    return words, [each for number in numbers for each in (words[0], number)][1:]


def _option(error: click.NoSuchOption, line: Line) -> Step:
    """Replace an unknown option by its correct name, or by a command that has the option."""
    assert error.ctx is not None
    wrong, command = error.option_name, error.ctx.command
    see = f"see `{error.ctx.command_path} --help`"
    if wrong == "--json" and line.name in WITHOUT_JSON:
        return WITHOUT_JSON[line.name], None
    if wrong in LACKING:
        return LACKING[wrong], None
    options = [each for p in command.params for each in p.opts if each.startswith("--")]
    near = nearest(wrong, options, CLOSE)
    own = OPTIONS.get(f"{line.name} {wrong}")
    known = own or OPTIONS.get(wrong, near[0] if near else "")
    convert = line.main.get_command(click.Context(line.main), "convert")
    if not known and line.name in AS_CONVERT and convert is not None and _has(convert, wrong):
        known = f"convert {wrong}"
    is_of_model = _has(command, "--arg") and any(map(is_model, line.words))
    at = next((n for n, each in enumerate(line.words) if each.partition("=")[0] == wrong), None)
    if at is None or not (known or is_of_model):  # -qv may be two options
        return see, None
    before, after = line.words[:at], line.words[at + 1 :]
    value = list(filter(None, [line.words[at].partition("=")[2]]))
    if known == MULTIPLE:
        value = value or ([after.pop(0)] if after else [])
        return see, line.with_words([*before, *_rounded(line, value), *after])
    if not known:  # an argument of the model's constructor
        argument = "=".join((wrong.lstrip("-").replace("-", "_"), *(value or after[:1])))
        after = after if value else after[1:]
        return f"use --arg: {see}", line.with_words([*before, "--arg", argument, *after])
    if known == ARGUMENT:
        return see, line.with_words([*before, *value, *after])
    if known == DST:
        value = value or [after.pop(0)] if after else []
        new = line.with_words([*before, *after, *value])
        return f"the destination is the last argument: {see}", new
    owner, dashes, name = known.rpartition("--") if "--" in known else (known, "", "")
    words, owner = (dashes + name).split(), owner.strip()
    said = f"use {' '.join(words)}: {see}"
    end = line.at + len(line.path.split())
    if not words:  # another command does what the option asks for
        said = f"use {owner}: see `ckptkit {owner} --help`"
        before[line.at : end] = owner.split()
    elif not _has(command, words[0]) and owner:
        said = f"{owner} has {' '.join(words)}: see `ckptkit {owner} --help`"
        if owner == "convert" and line.name not in AS_CONVERT and own is None:
            return said, None
        before[line.at : end] = [*owner.split(), *AS_CONVERT.get(line.name, "").split()]
    if words and _takes_value(command, words[0]):
        before = _without_default(before, words[0])
        words, value = _repeated(command, words, value, after)
    return said, line.with_words([*before, *words, *value, *after])


def _missing(error: click.MissingParameter, line: Line) -> Step:
    """Add the missing argument: a name from the file, or a name for the output."""
    name = None if error.param is None else error.param.name
    if name == "into":
        return None, _into(line)
    if name == "files" and "--fix" in line.words[:-1]:  # `doctor --fix FILE`
        at = line.words.index("--fix")
        file, rest = line.words[at + 1], line.words[at + 2 :]
        words = [*line.words[:at], *rest, file, "--fix", output_name(file, "fixed")]
        return None, line.with_words(words)
    places, options = line.parts() if line.name else ([], [])
    if line.name == "run" and name in ("recipe", "src", "dst"):
        return _recipe(line, "".join(options[:1]))
    if not places:
        return None, None
    if isinstance(error.param, click.Option) and (step := _required(error.param, line, places)):
        return None, step
    if line.path == "delta verify":  # verify takes one file
        return None, line.without("delta")
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


def _into(line: Line) -> Line:
    """Add --into. If no file has the name of the last argument, this argument becomes the value of
    --into. Otherwise, the value is INTO."""
    for option, value in pairwise(line.words):
        if option == "--to" and f".{value}" in WRITTEN:
            line = line.replaced(option, "--format") or line
    for last in line.parts()[0][-1:]:
        if not (os.path.lexists(last) or has_magic(last)):
            return line.replaced(last, "--into", last) or line
    return line.with_words([*line.words, "--into", INTO])


def _recipe(line: Line, recipe: str) -> Step:
    """Add the missing recipe, or the missing SRC of `recipe`."""
    if os.path.splitext(recipe)[1] in _RECIPES:  # a configuration of mergekit names its models
        return None, line.replaced(recipe, recipe, ".")
    if recipe and not os.path.exists(recipe):
        return None, None
    new = line.replaced(recipe, "gguf", recipe) if recipe.endswith(".gguf") else None
    return "name a recipe before SRC; `ckptkit run --list` lists the recipes", new


def _required(option: click.Option, line: Line, places: Words) -> Line | None:
    """Add a required option. Its value is one of the arguments, or a default value."""
    for word in places:
        with suppress(click.BadParameter):
            if isinstance(option.type, (click.Choice, click.types.IntParamType)):
                option.type.convert(word, option, None)  # type: ignore[arg-type]
                return line.replaced(word, option.opts[0], word)
    if option.name == "keys" and line.name == "resize":
        named = flatten(("--keys", name) for name in _vocabulary(places[0]))
        return line.with_words([*line.words, *named])
    needed = NEEDED.get(line.path, ())
    return line.with_words([*line.words, *needed]) if needed[:1] == (option.opts[0],) else None


def _vocabulary(place: str) -> dict[str, int]:
    """Map the names of the embedding and the head in a file to their numbers of rows."""
    from ckptkit.analysis.config_check import vocabulary
    from ckptkit.api import open_checkpoint

    with suppress(CkptkitError), open_checkpoint(place) as checkpoint:
        return {name: checkpoint.weights[name].shape[0] for name in vocabulary(checkpoint.weights)}
    return {}


def _rounded(line: Line, value: Words) -> Words:
    """Return --rows with the size of the vocabulary, rounded up to be divisible by `value`."""
    step = int(value[0]) if value and value[0].isdigit() else 0
    rows = next((rows for place in line.words for rows in _vocabulary(place).values()), 0)
    return ["--rows", str(-(-rows // step) * step)] if step and rows else []


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


def _extra(line: Line, command: click.Command) -> Line | None:
    """Correct a command line with too many arguments for `command`.

    One of the arguments may be the value of an option, or the user may have given several files.
    """
    places = line.parts()[0]
    if any(map(is_model, places)) and line.name == "check":
        return line.replaced("check", "diff")
    for word in places[2:]:
        for option, is_value in VALUES.items():
            if _has(line.command, option) and is_value(word):
                at = len(line.words) - 1 - line.words[::-1].index(word)
                before, after = line.words[:at], line.words[at + 1 :]
                if option in before:
                    old = before.index(option) + 1
                    return line.with_words([*before[:old], word, *before[old + 1 :], *after])
                return line.with_words([*before, option, word, *after])
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
        return new.with_words([*new.words, "--sub", _regex(*places[2:])])
    taken = sum(each.nargs for each in command.params if isinstance(each, click.Argument))
    if _has(command, "--base") and os.path.exists(places[taken]):
        return line.replaced(places[taken], "--base", places[taken])
    if not line.is_batchable:  # the command takes a fixed number of files
        return line.without(*places[taken:])
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
        command, known = new.split("`")[1], _COMMAND.findall(own or "")
        if own and len(known) == 1 and known[0].split()[:3] == command.split()[:3]:
            return own.replace(known[0], command)  # the same command, with the output of the user
        is_path = (own or "").startswith("did you mean")  # `own` suggests only a path
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
    if line.name == "inspect" and line.words[line.at + 1] in WORDS:  # a file named like a command
        yield from filter(None, [_command(line.without("inspect"))[1]])
    needed = NEEDED.get(line.name, ())
    if needed and isinstance(error, UsageError) and needed[0] not in line.words:
        yield line.with_words([*line.words, *needed])
    sources = line.parts()[0] if line.name else []
    if not any(map(is_url, line.words)) and "--like" not in line.words:  # a dry run is possible
        yield from _of_options(line, sources)
    if place is not None and not is_url(place):
        yield from _of_place(error, place, line, sources)


def _of_place(error: CkptkitError, place: str, line: Line, sources: Words) -> Iterator[Line]:
    """Yield corrected command lines for the input `place`."""
    if line.name in ("average", "join", "merge") and sources:
        # SRC may be an adapter.
        yield from filter(None, [line.replaced(line.name, "lora", "merge")])
        if len(sources) == 2:  # the only input may be a folder of shards
            yield from filter(None, [line.replaced(line.name, "convert")])
        yield from filter(None, [line.replaced(line.name, "join")])  # the inputs may be shards
    if line.name == "lora" and len(sources) > 2:  # the adapter may stand before the base model
        swap, end = {sources[0]: sources[1], sources[1]: sources[0]}, line.at + 2
        yield line.with_words([*line.words[:end], *(swap.get(w, w) for w in line.words[end:])])
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
    is_wrong = isinstance(error, UsageError) and not isinstance(error, OutputExistsError)
    if is_wrong and sources:
        yield from _of_output(place, line, sources)
    is_gguf = place.endswith(".gguf") and sources[:1] == [place]
    if line.name == "convert" and is_gguf and "--dequantize" not in line.words:
        yield line.with_words([*line.words, "--dequantize", "bfloat16"])
    if line.name == "show" and os.path.exists(place):  # the user may have named an entry
        inspect = line.with_words(["inspect" if each == "show" else each for each in line.words])
        yield from filter(None, [_selected(word, inspect) for word in sources[1:]])
    if line.name == "convert" and "--key" in line.words:
        yield from filter(None, [line.replaced("convert", "extract")])


def _of_output(place: str, line: Line, sources: Words) -> Iterator[Line]:
    """Yield command lines with another name of the output, or with another command for the file."""
    stem, suffix = os.path.splitext(place.rstrip("/"))
    source_suffix = os.path.splitext(sources[0])[1]
    if f".{place}" in WRITTEN and place in sources[1:]:
        yield from filter(None, [line.replaced(place, output_name(sources[0], "new", f".{place}"))])
    if place in sources[1:]:
        ends = [source_suffix, "", ".safetensors"] if suffix not in WRITTEN else [""]
        for new in filter(None, (line.replaced(place, stem + end) for end in ends)):
            yield new
            if line.name == "convert" and source_suffix == ".gguf":
                yield new.with_words([*new.words, "--dequantize", "bfloat16"])
    if line.name == "run" and sources[:-1] == [place]:  # SRC may have another layout
        yield line.with_words(("doctor", place, "--fix", *sources[1:]))


def _of_options(line: Line, sources: Words) -> Iterator[Line]:
    """Yield command lines with another option for the same value.

    Replace SRC:WEIGHT by SRC and --weight.
    """
    is_linear = line.name == "merge" and "--method" not in line.words
    method = NEEDED["merge"] if is_linear else ()
    for option, value in pairwise(line.words):
        new = line.without(option, value)
        if option == "--to" and _is_dtype(value):
            yield new.with_words([*new.words, "--cast", value])
        elif option == "--to" and not _DEVICE.fullmatch(value):
            yield new.with_words([*new.words, "--format", value])
            yield from filter(None, [line.replaced("convert", "lora", "convert")])
            if (gguf := new.replaced("convert", "run", "gguf")) is not None:
                yield gguf.with_words([*gguf.words, "--dequantize", "bfloat16"])
        elif option == "--scale" and len(sources) == 3 and _NUMBER.fullmatch(value):
            shares = f"{1 - float(value):g}", f"{float(value):g}"  # linear interpolation
            numbers = flatten(("--weight", each) for each in shares)
            yield new.with_words([*new.words, *method, *numbers])
        elif option == "--cast":  # the weights may be quantized
            yield from filter(None, [line.replaced(option, "--dequantize")])
        elif option == "--format":
            yield from filter(None, [line.replaced(value, value.strip("."))])
        elif option in ("--drop", "--keep"):
            wider = () if has_magic(value) else (f"{value}*", f"*{value}*")
            yield from filter(None, (line.replaced(value, each) for each in wider))
            if value.startswith("optim"):  # `extract` writes the weights without the optimizer
                yield from _extracting(new)
        elif option in ("--weight", "--density") and _NUMBER.fullmatch(value):
            for number in range(1, len(sources) - 1):  # repeat the value for each SRC
                yield line.with_words([*line.words, *(option, value) * number])
    if line.name == "rename" and not {"--sub", "--map"} & {
        *line.words
    }:  # DST may have another format
        yield from filter(None, [line.replaced("rename", "convert")])
    if "--method" in line.words and "--base" not in line.words and len(sources) > 3:
        yield from filter(None, [line.replaced(sources[0], "--base", sources[0])])
    pairs = [_WEIGHTED.fullmatch(each) for each in sources]
    if any(pairs):
        words = [_WEIGHTED.sub(r"\1", each) if each in sources else each for each in line.words]
        weights = [each for pair in pairs if pair for each in ("--weight", pair[2])]
        yield line.with_words([*words, *weights, *method])


def _extracting(line: Line) -> Iterator[Line]:
    """Replace `convert` by `extract`, and add --key with the path of the weights."""
    if (new := line.replaced("convert", "extract")) is None:
        return
    yield from filter(None, [_in_file("key", new, new.parts()[0])[1]])


def _of_no_file(place: str, line: Line) -> Iterator[Line]:
    """Yield corrected command lines for an argument that is not a file."""
    yield from filter(None, [_selected(place, line)])
    if line.name in ("diff", "doctor"):
        for file in sorted(glob("*.py")):
            with suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as source:
                if re.search(rf"^class {re.escape(place)}\b", source.read(), re.M):
                    yield from filter(None, [line.replaced(place, f"{file}:{place}")])
    module, _, name = place.rpartition(".")
    if os.path.isfile(file := f"{module.replace('.', os.sep)}.py"):
        yield from filter(None, [line.replaced(place, f"{file}:{name}")])
    if is_model(place) and _has(line.command, "--model"):
        yield from filter(None, [line.replaced(place, "--model", place)])
    # If `digest` and `doctor` write an output, they take one FILE. `digest` writes text, and
    # `doctor` writes a checkpoint.
    is_output = (os.path.splitext(place)[1] in WRITTEN) == (line.name == "doctor")
    if line.name in OUTPUT and is_output and line.parts()[0][1:] == [place]:
        yield from filter(None, [line.replaced(place, OUTPUT[line.name], place)])
    for word in filter(os.path.isfile, line.words):  # the user may have swapped two arguments
        swap = {word: place, place: word}
        yield line.with_words([swap.get(each, each) for each in line.words])
    if line.name == "diff" and line.parts()[0][1:] == [place]:
        yield from filter(None, [_beside(line.without(place))])


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
                if _has(line.command, "--keys"):  # the entry contains no weights
                    return line.replaced(place, "--keys", f"{place}*")
    return None
