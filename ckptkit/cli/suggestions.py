"""Make the hint after an error: the corrected command, with the files of the user.

ckptkit imports this module only after an error. The module replaces words of the command line
according to the tables in `suggestions.toml`, until the command line is valid. If a dry run
succeeds, the corrected command line becomes the hint.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from glob import glob, has_magic
from io import StringIO
from itertools import pairwise
from pathlib import Path

import click

from ckptkit.cli.options import BATCHABLE, Writer, dequantize_said, is_dtype
from ckptkit.cli.reading import is_model
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

_TABLES = tomllib.loads(Path(__file__).with_name("suggestions.toml").read_text("utf-8"))
WORDS: dict[str, str] = _TABLES["commands"]
SUBWORDS: dict[str, str] = _TABLES["subcommands"]
OPTIONS: dict[str, str] = _TABLES["options"]
AS_CONVERT: dict[str, str] = _TABLES["as-convert"]
LACKING: dict[str, str] = _TABLES["lacking"]
NEEDED: dict[str, list[str]] = _TABLES["needed"]
OUTPUT: dict[str, str] = _TABLES["output"]
DST, ARGUMENT, MULTIPLE = "DST", "ARGUMENT", "MULTIPLE"  # values in OPTIONS with a meaning
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


# Maps an option to a function that returns whether a word is a value of the option.
VALUES: dict[str, Callable[[str], object]] = {
    "--cast": is_dtype,
    "--shard-size": lambda word: not word.isdigit() and parse_size(word),
    "--sub": lambda word: "=" in word,
    "--device": lambda word: "=" in word and all(map(_DEVICE.fullmatch, word.split("="))),
    "--prefix": lambda word: word.endswith("."),
}
Words = list[str]
# Corrected command lines, best first, and fallback hints
Fixes = Iterator["Line | str | None"]


def improve(error: BaseException, words: Sequence[str], main: click.Group) -> None:
    """Set a better hint for an error, if possible. `words` are the arguments of ``ckptkit``."""
    line, hint = Line(main, [*words]), None
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
        self.context = click.Context(main, info_name="ckptkit", **main.context_settings)
        self.at = next((n for n, word in enumerate(words) if not word.startswith("-")), 0)
        name = words[self.at] if words else ""
        self.command = main.get_command(self.context, name) or main
        self.name = "" if self.command is main else name
        self.end = self.at + 1 + isinstance(self.command, click.Group)  # after the command
        self.path = " ".join(words[self.at : self.end])

    def with_words(self, *words: str) -> Line:
        return Line(self.main, [*words])

    def plus(self, *words: str) -> Line:
        """Add words at the end."""
        return self.with_words(*self.words, *words)

    def replaced(self, old: str, *new: str) -> Line | None:
        """Replace the word `old` by `new`. Return None if the line does not contain `old`."""
        if old not in self.words:
            return None
        at = self.words.index(old)
        return self.with_words(*self.words[:at], *new, *self.words[at + 1 :])

    def swapped(self, one: str, other: str) -> Line:
        """Exchange two words after the command."""
        swap = {one: other, other: one}
        words = (swap.get(word, word) for word in self.words[self.end :])
        return self.with_words(*self.words[: self.end], *words)

    def without(self, *words: str) -> Line:
        """Remove the first occurrence of each of `words`."""
        left = [*self.words]
        for word in words:
            left.remove(word)
        return self.with_words(*left)

    def __str__(self) -> str:
        return f"`{shell_command(('ckptkit', *self.words))}`"

    def works(self) -> bool:
        """Return True if all inputs exist. If the command writes, also do a dry run.

        Raises UsageError if the command line is invalid. Raises MissingFileError if an input is
        missing. If the dry run fails, raises the error of the dry run.
        """
        done = suppress(click.exceptions.Exit)  # --help and other options print and exit
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), on_command_line(), done:
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
                how = {"dry_run": True, "quiet": True, "as_json": False, "force": True}
                context.params |= how
                with context:
                    return not command.invoke(context)
        return True

    def parts(self) -> tuple[Words, Words]:
        """Return two lists of words.

        The first list contains the arguments of the command, such as files, without the recipe of
        `run`. The second list contains all other words after the command.
        """
        command, own = self.command, list(dequantize_said(self.words[self.at + 1 :]))
        while isinstance(command, click.Group) and own:
            found = command.get_command(self.context, own[0])
            if found is None:
                break
            command, own = found, own[1:]
        context = click.Context(command, parent=self.context)
        values, extra, _ = command.make_parser(context).parse_args([*own])
        arguments = (p.name or "" for p in command.params if isinstance(p, click.Argument))
        given: Words = []
        for each in (*map(values.get, arguments), *extra):
            if isinstance(each, str):
                given.append(each)
            elif isinstance(each, tuple):
                given += each
        for each in given:
            own.remove(each)
        recipe = given[: self.name == "run"]
        return given[len(recipe) :], [*recipe, *(each for each in own if each != "--")]

    @property
    def places(self) -> Words:
        """The arguments of the command."""
        return self.parts()[0]

    def of_many(self, into: str, sources: Sequence[str]) -> Line:
        """Return the `batch` command line for `sources`."""
        options = self.parts()[1]
        needed = () if {"--to", "--device"} & {*options} else NEEDED.get(self.name, ())
        return self.with_words("batch", self.name, *options, *needed, "--into", into, *sources)


def _has(command: click.Command, option: str) -> bool:
    return any(option in (*each.opts, *each.secondary_opts) for each in command.params)


def _takes_value(command: click.Command, option: str) -> bool:
    found = (each for each in command.params if option in each.opts)
    return any(isinstance(each, click.Option) and not each.is_flag for each in found)


def _meant(error: click.UsageError, line: Line) -> str | None:
    """Return a hint with the corrected command line. If the correction fails, return a fallback
    hint."""
    hint, said, refused, last = _solve(line, error)
    if hint is None and refused is None:
        with suppress(click.UsageError):
            hint = _first(_of_options(last, last.places))
    elif refused is not None:
        also = f"{refused}; {refused.hint}" if refused.hint else str(refused)
        return _first(_others(refused, last)) or said or f"a second error: {also}"
    return hint or said


def _first(fixes: Fixes) -> str | None:
    """Return a hint with the first command line that works."""
    return next(filter(None, (_solve(each)[0] for each in fixes if isinstance(each, Line))), None)


def _solve(
    line: Line, error: click.UsageError | None = None
) -> tuple[str | None, str | None, CkptkitError | None, Line]:
    """Correct a command line until it works.

    Returns a hint with the command line, a fallback hint, the error of the dry run, and the last
    command line. Each of the first three may be None.
    """
    said = None
    for _ in range(STEPS):
        try:
            if error is None:
                return f"did you mean {line}?" if line.works() else None, said, None, line
        except CkptkitError as refused:
            return None, said, refused, line
        except click.UsageError as another:
            error = another
        new = line
        for each in _corrections(error, line):
            if isinstance(each, Line):
                new = each
                break
            said = said or each
        if new.words == line.words:
            break
        line, error = new, None
    return None, said, None, line


def _corrections(error: click.UsageError, line: Line) -> Fixes:
    context = error.ctx
    if context is None and isinstance(error, click.BadOptionUsage):  # an option without its value
        context = click.Context(line.command, parent=line.context, info_name=line.name)
        yield from _of_value(error, line, context)
    elif context is None:
        return
    elif isinstance(error, click.NoSuchOption):
        yield from _option(error.option_name, line, context)
    elif isinstance(error, click.MissingParameter):
        yield from _missing(error.param, line)
    elif error.message.startswith("No such command"):
        yield from _command(line) if context.command is line.main else _subcommand(line)
    else:
        yield from _of_value(error, line, context)
        yield from _of_message(error, line, context.command)


def _of_message(error: click.UsageError, line: Line, command: click.Command) -> Fixes:
    message = error.message
    if message.startswith("name two or more SRC"):
        yield from _several(line)
    elif message.startswith("give either B"):
        yield _beside(line)
    for word, after in pairwise([*line.words, ""]):
        if sed := _SED.fullmatch(word):
            is_said = "--sub" in line.words or not _has(line.command, "--sub")
            yield line.replaced(word, *[] if is_said else ["--sub"], f"{sed[2]}={sed[3]}")
        is_wrong = "REGEX=" in message and repr(word) in message
        if is_wrong and after and "=" not in after:  # `--sub OLD NEW`
            yield line.without(after).replaced(word, _regex(word, after))
    if "is not of the form A=B" in message:  # the user gave one device for all tensors
        yield line.replaced("--device", "--to")
    elif "unexpected extra argument" in message:
        yield from _extra(line, command)
    elif line.name in NEEDED and not isinstance(error, click.BadParameter):
        yield line.plus(*NEEDED[line.name])


def _regex(old: str, new: str) -> str:
    """Return the value of --sub. `old` is a prefix that ends with a dot, or a pattern."""
    return f"^{re.escape(old)}={new}" if old.endswith(".") else f"{old}={new}"


def _of_value(error: click.UsageError, line: Line, context: click.Context) -> Fixes:
    """Correct a value that is not one of the choices of its option.

    For other values, replace the option if OPTIONS contains it for this command.
    """
    param = getattr(error, "param", None)
    bad = _NOT_A_CHOICE.search(error.message)
    if bad is not None and param is not None and isinstance(param.type, click.Choice):
        plain = bad[1].lower().replace("_", "-").strip(".")
        choices = list(map(str, param.type.choices))
        near = nearest(plain, choices, CLOSE) or filter(plain.startswith, choices)
        yield from (line.replaced(bad[1], each) for each in near)
    for option in (getattr(error, "option_name", ""), *(param.opts if param is not None else ())):
        if f"{line.name} {option}" in OPTIONS:
            yield from _option(option, line, context)


def _command(line: Line) -> Fixes:
    """Replace an unknown command."""
    word, rest = line.words[line.at], line.words[line.at + 1 :]
    commands = line.main.list_commands(line.context)
    known = WORDS.get(word.lower().replace("_", "-"))
    near = [name for name in commands if name.startswith(word)] or nearest(word, commands, CLOSE)
    if len(rest) > 1 and rest[0] in commands and not os.path.exists(rest[0]):
        yield line.without(word)  # a word before the command
    elif word in LACKING:
        yield LACKING[word]
    elif known is not None:
        name, *options = known.split()
        command = line.main.get_command(line.context, name) or line.main
        is_value_last = len(rest) > 2 and os.path.exists(rest[0]) and rest[-1][:1] != "-"
        if options and is_value_last and _takes_value(command, options[-1]):
            options, rest = options[:-1], [*rest[:-1], options[-1], rest[-1]]
        yield f"did you mean {known}? see `ckptkit {name} --help`"
        yield line.with_words(*line.words[: line.at], name, *options, *rest)
    else:
        meant = f"did you mean {', '.join(near)}? " if near else ""
        yield f"{meant}see `ckptkit --help`"
        yield from (line.replaced(word, each) for each in near)


def _subcommand(line: Line) -> Fixes:
    """Correct or insert the word after the name of a group of commands."""
    before, (word, *rest) = line.words[: line.at], line.words[line.at + 1 :]
    if (meant := SUBWORDS.get(f"{line.name} {word}")) is not None:
        yield line.with_words(*before, *meant.split(), *rest)
    if word in line.main.list_commands(line.context):  # the command takes many files without batch
        yield line.with_words(*before, word, *rest)
    assert isinstance(line.command, click.Group)
    near = nearest(word, line.command.list_commands(line.context), CLOSE)
    yield from (line.replaced(word, each) for each in near)
    if (meant := SUBWORDS.get(f"{line.name} FILE")) is not None and os.path.exists(word):
        yield line.replaced(line.name, *meant.split())


def _several(line: Line) -> Fixes:
    """Add the missing DST, or replace a folder of checkpoints by a pattern."""
    from ckptkit.api import open_checkpoint

    first = line.places[0]
    if all(map(os.path.exists, line.places)):
        yield line.plus(output_name(first, "new"))
    elif first.endswith(_RECIPES):
        run = line.replaced(line.name, "run")
        yield run and run.replaced(first, first, ".")
    elif os.path.isdir(first):
        with suppress(CkptkitError), open_checkpoint(first):  # one checkpoint of several files
            yield line.replaced(line.name, "convert")
        yield line.replaced(first, os.path.join(first, "*"))


def _beside(line: Line) -> Line | None:
    """Add the missing B of `diff`: the checkpoint beside A with the most similar name."""
    from ckptkit.api import open_checkpoint

    (place, *_) = line.places
    others = {*glob(os.path.join(os.path.dirname(place), f"*{os.path.splitext(place)[1]}"))}
    for near in nearest(place, sorted(others - {place}), 0) if os.path.isfile(place) else ():
        with suppress(CkptkitError), open_checkpoint(near):
            return line.plus(near)
    return None


def _option(wrong: str, line: Line, context: click.Context) -> Fixes:
    """Replace an unknown option by its correct name, or by a command that has the option."""
    command, see = context.command, f"see `{context.command_path} --help`"
    near = nearest(wrong, [o for p in command.params for o in p.opts if o[:2] == "--"], CLOSE)
    own = OPTIONS.get(f"{line.name} {wrong}")
    known = own or OPTIONS.get(wrong, near[0] if near else "")
    convert = line.main.get_command(line.context, "convert")
    if not known and line.name in AS_CONVERT and convert is not None and _has(convert, wrong):
        known = f"convert {wrong}"
    is_of_model = _has(command, "--arg") and any(map(is_model, line.words))
    at = next((n for n, each in enumerate(line.words) if each.partition("=")[0] == wrong), None)
    lacking = LACKING.get(f"{line.name} {wrong}", LACKING.get(wrong))
    if lacking is not None or at is None or not (known or is_of_model):  # -qv may be two options
        yield lacking or see
        return
    before, after = line.words[:at], line.words[at + 1 :]
    value = list(filter(None, [line.words[at].partition("=")[2]]))
    if known in (DST, MULTIPLE, ""):
        value = value or [after.pop(0) for _ in after[:1]]
    if known in (DST, MULTIPLE, ARGUMENT):
        yield f"the destination is the last argument: {see}" if known == DST else see
        value = _rounded(line, value) if known == MULTIPLE else value
        yield line.with_words(*before, *(after + value if known == DST else value + after))
    elif not known:  # an argument of the model's constructor
        argument = "=".join((wrong.lstrip("-").replace("-", "_"), *value))
        yield f"use --arg: {see}"
        yield line.with_words(*before, "--arg", argument, *after)
    else:
        owner, dashes, name = known.rpartition("--") if "--" in known else (known, "", "")
        words, owner = (dashes + name).split(), owner.strip()
        if not words:  # another command does what the option asks for
            yield f"use {owner}: see `ckptkit {owner} --help`"
            before[line.at : line.end] = owner.split()
        elif _has(command, words[0]) or not owner:
            yield f"use {' '.join(words)}: {see}"
        else:
            yield f"{owner} has {' '.join(words)}: see `ckptkit {owner} --help`"
            if owner == "convert" and line.name not in AS_CONVERT and own is None:
                return
            before[line.at : line.end] = [*owner.split(), *AS_CONVERT.get(line.name, "").split()]
        if words and _takes_value(command, words[0]):
            before = _without_default(before, words[0])
            words, value = _repeated(command, words, value, after)
        yield line.with_words(*before, *words, *value, *after)


def _without_default(words: Words, option: str) -> Words:
    """Remove `option` if its value is a default value from `WORDS`."""
    at = words.index(option) if option in words else len(words)
    given = " ".join(words[at : at + 2])
    is_default = given and any(given in known for known in WORDS.values())
    return words[:at] + words[at + 2 :] if is_default else words


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
    value = value or [after.pop(0) for _ in after[:1]]
    numbers = ",".join(value).split(",")
    if not all(map(_NUMBER.fullmatch, numbers)):
        return words, value
    while after and _NUMBER.fullmatch(after[0]):
        numbers.append(after.pop(0))
    return words, [each for number in numbers for each in (words[0], number)][1:]


def _missing(param: click.Parameter | None, line: Line) -> Fixes:
    """Add a missing argument or option: a name from the file, or a name for the output."""
    name = None if param is None else param.name
    if name == "files" and "--fix" in line.words[:-1]:  # `doctor --fix FILE`
        file = line.words[line.words.index("--fix") + 1]
        yield line.without("--fix", file).plus(file, "--fix", output_name(file, "fixed"))
        return
    places, options = line.parts() if line.name else ([], [])
    if line.name == "run" and name in ("recipe", "src", "dst"):
        recipe = "".join(options[:1])
        if recipe.endswith(_RECIPES):  # a configuration of mergekit names its models
            yield line.replaced(recipe, recipe, ".")
        elif not recipe or os.path.exists(recipe):
            yield "name a recipe before SRC; `ckptkit run --list` lists the recipes"
            if recipe.endswith(".gguf"):
                yield line.replaced(recipe, "gguf", recipe)
        return
    if name in ("into", "dst"):
        yield from _output(name, line, places)
    if not places:
        return
    if isinstance(param, click.Option):
        yield from _required(param, line, places)
    if line.path == "delta verify":  # verify takes one file
        yield line.without("delta")
    elif name == "delta":
        yield line.plus(output_name(places[1], "delta", ""))
    elif name == "key" and line.name == "wrap":
        yield line.replaced(places[2], "--key", places[2]) if places[2:] else None
        yield line.plus("--key", "model")
    elif name in ("key", "name") and os.path.exists(places[0]):
        yield from _in_file(name, line, places)


def _output(name: str, line: Line, places: Words) -> Fixes:
    """Add --into or DST. The value of --into is the last argument, or INTO if the argument is an
    existing file. The suffix of DST is that of the format."""
    end, mark = (".html", "report") if line.name == "report" else (None, "new")
    for option, value in pairwise(line.words):
        if option in ("--to", "--format") and f".{value}" in WRITTEN:
            end, mark = f".{value}", "new"
            if option == "--to" and name == "dst":
                line = line.without(option, value)
            else:
                line = line.replaced(option, "--format") or line
    if name == "into":
        last = next((each for each in places[-1:] if not os.path.lexists(each)), "*")
        yield None if has_magic(last) else line.replaced(last, "--into", last)
        yield line.plus("--into", INTO)
    elif places:
        yield line.plus(output_name(places[0], mark, end))


def _required(option: click.Option, line: Line, places: Words) -> Fixes:
    """Add a required option. Its value is one of the arguments, or a default value."""
    for word in places:
        with suppress(click.BadParameter):
            if isinstance(option.type, (click.Choice, click.types.IntParamType)):
                option.type.convert(word, option, None)  # type: ignore[arg-type]
                yield line.replaced(word, option.opts[0], word)
    if option.name == "keys" and line.name == "resize":
        yield line.plus(*flatten(("--keys", name) for name in _vocabulary(places[0])))
    needed = NEEDED.get(line.path, ())
    yield line.plus(*needed) if needed[:1] == option.opts[:1] else None


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


def _in_file(name: str, line: Line, places: Words) -> Fixes:
    """Add the missing name of a tensor (`name`) or path of an entry (`key`), from the file."""
    from ckptkit.api import open_checkpoint

    with suppress(CkptkitError), open_checkpoint(places[0]) as checkpoint:
        if name == "name":
            for option, value in pairwise(line.words):
                if option == "--key" and value in checkpoint.weights:  # a tensor, not an entry
                    yield line.replaced(option)
            yield line.plus(*list(checkpoint.weights)[:1])
            return
        entries = list(map(str, checkpoint))
        yield f"--key is the path of one of these entries: {some(entries, 12)}"
        for each in places[1:]:  # the user named the entry without --key, or a part of its name
            found = [entry for entry in entries if each == entry] or entries * (each in places[2:])
            yield from (line.replaced(each, "--key", entry) for entry in found if each in entry)
        path = checkpoint.selection.path if checkpoint.selection is not None else ()
        yield line.plus("--key", join(path) or next(iter(entries), ""))


def _extra(line: Line, command: click.Command) -> Fixes:
    """Correct a command line with too many arguments for `command`.

    One of the arguments may be the value of an option, or the user may have given several files.
    """
    places = line.places
    if any(map(is_model, places)) and line.name == "check":
        yield line.replaced("check", "diff")
    new = [word for word in places if not os.path.lexists(word)]
    for word in new:
        for option, is_value in VALUES.items():
            if _has(line.command, option) and is_value(word):
                at = len(line.words) - 1 - line.words[::-1].index(word)
                before, after = line.words[:at], line.words[at + 1 :]
                if option in before:  # the argument replaces the given value
                    before[before.index(option) + 1] = word
                    yield line.with_words(*before, *after)
                yield line.with_words(*before, option, word, *after)
    devices = list(filter(_DEVICE.fullmatch, new))
    if len(devices) == 2 and _has(line.command, "--device"):
        yield line.without(*devices).plus("--device", "=".join(devices))
    if len(places) == 4 and line.name == "rename":
        yield line.without(*places[2:]).plus("--sub", _regex(*places[2:]))
    taken = sum(each.nargs for each in command.params if isinstance(each, click.Argument))
    if _has(command, "--base") and os.path.exists(places[taken]):
        yield line.replaced(places[taken], "--base", places[taken])
    if line.name not in BATCHABLE:  # the command takes a fixed number of files
        yield line.without(*places[taken:])
        return
    *sources, last = places
    if os.path.isfile(last):
        sources, last = [*sources, last], INTO
    if sources and all(map(os.path.exists, sources)) and "--in-place" not in line.words:
        suffix = os.path.splitext(sources[0])[1]
        pattern = os.path.join(os.path.dirname(sources[0]), f"*{suffix}")
        yield line.of_many(last, [pattern] if sorted(glob(pattern)) == sorted(sources) else sources)


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
        for first, *others in [sorted(glob(place, recursive=True))] * bool(glob(place)):
            return f"name one of the {1 + len(others):,} files, such as {shell_word(first)}"
        return "no file matches this pattern"
    return None


def _others(error: CkptkitError, line: Line) -> Fixes:
    """Yield corrected command lines for an input that ckptkit refused."""
    place, is_usage = error.where, isinstance(error, UsageError)
    if line.name == "inspect" and line.words[line.at + 1] in WORDS:  # a file named like a command
        yield from _command(line.without("inspect"))
    needed = NEEDED.get(line.name, ())
    if needed and is_usage and needed[0] not in line.words:
        yield line.plus(*needed)
    sources = line.places if line.name else []
    if not any(map(is_url, line.words)) and "--like" not in line.words:  # a dry run is possible
        yield from _of_options(line, sources)
    if place is None or is_url(place):
        return
    if line.name in ("average", "join", "merge") and sources:
        # SRC may be an adapter, or the inputs are shards.
        yield line.replaced(line.name, "lora", "merge")
        yield line.replaced(line.name, "join")
    if line.name == "lora" and len(sources) > 2:  # the adapter may stand before the base model
        yield line.swapped(*sources[:2])
    patterns = [place] if has_magic(place) and not os.path.lexists(place) else []
    if isinstance(error, SeveralError):
        suffixes = {os.path.splitext(each)[1] for each in error.files}
        patterns = [os.path.join(place, f"*{each}") for each in suffixes] * (len(suffixes) == 1)
    if patterns and line.name in BATCHABLE:
        yield line.of_many(next(iter(sources[1:]), INTO), patterns)
    is_missing = isinstance(error, MissingFileError)
    if is_missing and _HUB.fullmatch(place) and not os.path.isdir(os.path.dirname(place)):
        yield line.replaced(place, f"hf://{place}")
    if is_missing and not isinstance(line.command, Writer) and place in line.words:
        yield from _of_no_file(place, line)
    if is_usage and not isinstance(error, OutputExistsError) and sources:
        yield from _of_output(place, line, sources)
    is_gguf = place.endswith(".gguf") and sources[:1] == [place]
    if line.name == "convert" and is_gguf and "--dequantize" not in line.words:
        yield line.plus("--dequantize", "bfloat16")
    if line.name == "show" and os.path.exists(place):  # the user may have named an entry
        inspect = line.replaced("show", "inspect")
        yield from (_selected(word, inspect) for word in sources[1:] if inspect is not None)
    if line.name == "convert" and "--key" in line.words:
        yield line.replaced("convert", "extract")


def _of_output(place: str, line: Line, sources: Words) -> Fixes:
    """Yield command lines with another name of the output, or with another command for the file."""
    stem, suffix = os.path.splitext(place.rstrip("/"))
    source_suffix = os.path.splitext(sources[0])[1]
    if place in sources[1:]:
        if f".{place}" in WRITTEN:
            yield line.replaced(place, output_name(sources[0], "new", f".{place}"))
        for end in [source_suffix, "", ".safetensors"] if suffix not in WRITTEN else [""]:
            yield line.replaced(place, stem + end)
    if line.name == "run" and sources[:-1] == [place]:  # SRC may have another layout
        yield line.with_words("doctor", place, "--fix", *sources[1:])


def _of_options(line: Line, sources: Words) -> Fixes:
    """Yield command lines with another option for the same value.

    Replace SRC:WEIGHT by SRC and --weight.
    """
    is_linear = line.name == "merge" and "--method" not in line.words
    method = NEEDED["merge"] if is_linear else ()
    for option, value in pairwise(line.words):
        new, is_number = line.without(option, value), _NUMBER.fullmatch(value)
        if option == "--to" and is_dtype(value):
            yield new.plus("--cast", value)
        elif option == "--to" and not _DEVICE.fullmatch(value):
            yield new.plus("--format", value)
            yield line.replaced("convert", "lora", "convert")
            gguf = new.replaced("convert", "run", "gguf")
            yield gguf and gguf.plus("--dequantize", "bfloat16")
        elif option == "--scale" and len(sources) == 3 and is_number:
            shares = f"{1 - float(value):g}", f"{float(value):g}"  # linear interpolation
            yield new.plus(*method, *flatten(("--weight", each) for each in shares))
        elif option == "--cast":  # the weights may be quantized
            yield line.replaced(option, "--dequantize")
        elif option == "--format":
            yield line.replaced(value, value.strip("."))
        elif option in ("--drop", "--keep"):
            wider = () if has_magic(value) else (f"{value}*", f"*{value}*")
            yield from (line.replaced(value, each) for each in wider)
            extract = new.replaced("convert", "extract")
            if value.startswith("optim") and extract is not None:  # writes only the weights
                yield from _in_file("key", extract, extract.places)
        elif option in ("--weight", "--density") and is_number:
            for number in range(1, len(sources) - 1):  # repeat the value for each SRC
                yield line.plus(*(option, value) * number)
    if line.name == "rename" and not {"--sub", "--map"} & {*line.words}:
        yield line.replaced("rename", "convert")  # DST may have another format
    if "--method" in line.words and "--base" not in line.words and len(sources) > 3:
        yield line.replaced(sources[0], "--base", sources[0])
    pairs = {each: found for each in sources if (found := _WEIGHTED.fullmatch(each))}
    if pairs:
        words = (pairs[each][1] if each in pairs else each for each in line.words)
        weights = flatten(("--weight", pair[2]) for pair in pairs.values())
        yield line.with_words(*words, *weights, *method)


def _of_no_file(place: str, line: Line) -> Fixes:
    """Yield corrected command lines for an argument that is not a file."""
    yield _selected(place, line)
    if line.name in ("diff", "doctor"):
        for file in sorted(glob("*.py")):
            with suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as source:
                if re.search(rf"^class {re.escape(place)}\b", source.read(), re.M):
                    yield line.replaced(place, f"{file}:{place}")
    module, _, name = place.rpartition(".")
    if os.path.isfile(file := f"{module.replace('.', os.sep)}.py"):
        yield line.replaced(place, f"{file}:{name}")
    if is_model(place) and _has(line.command, "--model"):
        yield line.replaced(place, "--model", place)
    is_last = line.places[1:] == [place]
    # If `digest` and `doctor` write an output, they take one FILE. `digest` writes text, and
    # `doctor` writes a checkpoint.
    is_output = (os.path.splitext(place)[1] in WRITTEN) == (line.name == "doctor")
    if line.name in OUTPUT and is_output and is_last:
        yield line.replaced(place, OUTPUT[line.name], place)
    for word in filter(os.path.isfile, line.words):  # the user may have swapped two arguments
        yield line.swapped(word, place)
    if line.name == "diff" and is_last:
        yield _beside(line.without(place))


def _selected(place: str, line: Line) -> Line | None:
    """Replace the name of a tensor or entry by the option that selects it.

    `place` is the name. The user wrote the name in place of a file.
    """
    from ckptkit.api import open_checkpoint

    for file in filter(os.path.isfile, line.places):
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
