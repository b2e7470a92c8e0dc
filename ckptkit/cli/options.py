"""Options of commands: parsers, the table of options, and the class of commands that write."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache, partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import render
from ckptkit.core.options import Options
from ckptkit.core.text import parse_size, shell_word

if TYPE_CHECKING:
    from ckptkit.cli.request import Request

# Commands that `batch` can run on many files.
BATCHABLE = (
    "strip-module", "add-module", "remap", "convert", "rename", "extract", "wrap", "resize", "ema",
    "run", "recover",
)  # fmt: skip
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# Parsers of option values


def size(text: str) -> int:
    """Parse a size in bytes. ``5GB`` is 5 * 10**9, and ``5GiB`` is 5 * 2**30."""
    size = parse_size(text)
    if size is None:
        what = f"{text!r} is not a size: use 5GB, 500MB, 2GiB or a number of bytes"
        raise click.BadParameter(what)
    return size


def _named(
    read: Callable[[str, str], Any], _: object, parameter: click.Parameter, given: Iterable[str]
) -> dict[str, Any]:
    """Parse repeated NAME=VALUE options into a dict.

    ``read(name, text)`` returns the value. If `read` raises ValueError, raise click.BadParameter
    with the message of the ValueError.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = read(name, value)
            if not name or not equals:
                raise ValueError
        except ValueError as error:
            what = f"{text!r} is not of the form {parameter.metavar}{error}"
            raise click.BadParameter(what) from error
    return found


def _word(_: str, text: str) -> str:
    if not text:
        raise ValueError
    return text


def _size(name: str, text: str) -> int:
    if not name.isidentifier() or not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError
    return int(text)


_PYTHON = {"True": True, "False": False, "None": None}


def _json(name: str, text: str) -> Any:
    import json

    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if re.fullmatch(r"[^\W\d][\w./-]*", text):  # accept an unquoted word as a string
            return text
        quoted = shell_word(f"{name}={json.dumps(text)}")
        what = f": {text!r} is not JSON; quote a string: {quoted}"
        raise ValueError(what) from error


def _casts(_: object, __: object, given: Iterable[str]) -> dict[str, str]:
    """Parse --cast into a dict from glob to dtype. A dtype without a glob gets the glob ``*``."""
    found: dict[str, str] = {}
    for text in given:
        glob, _equals, dtype = text.rpartition("=")
        if found.setdefault(glob or "*", dtype) != dtype:
            raise click.BadParameter(f"{glob or 'a dtype without a glob'} was given twice")
    return found


def _mapping(path: str) -> dict[str, str]:
    """Read the JSON file of --map, which maps names to names."""
    import json

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise click.BadParameter(f"{path} does not contain a JSON object that maps names to names")
    return found


def _substitution(text: str) -> tuple[str, str]:
    """Parse --sub. Split at the last equals sign.

    Regular expressions contain equals signs more often than replacements do.
    """
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise click.BadParameter(f"{text!r} is not of the form REGEX=REPLACEMENT")
    return pattern, replacement


def _rules(_: object, __: object, given: Sequence[str]) -> Sequence[str]:
    """Return the lines of --rule. Raise RuleError for an invalid rule, before any file is
    opened."""
    if given:
        from ckptkit.rules.planner import RuleSet

        RuleSet.parse(given)
    return given


def _config(path: str) -> Any:
    from ckptkit.edits import config_file

    return config_file.read(path)


def _settings(
    _: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> tuple[float | dict[str, float], ...]:
    """Parse settings such as ``0.5`` or ``0.5,*.mlp.*=0.3``.

    The first number is for all tensors. A number after a glob is for the tensors that match the
    glob.
    """
    found: list[float | dict[str, float]] = []
    for text in texts:
        number, *globs = text.split(",")
        try:
            others = float(number)
            pairs = [each.rpartition("=") for each in globs]
            named = {glob: float(value) for glob, equals, value in pairs if glob and equals}
            if len(named) < len(globs):
                raise ValueError
        except ValueError:
            what = f"{text!r} is neither a number nor NUMBER,GLOB=NUMBER"
            raise click.BadParameter(what, param=option) from None
        found.append({"*": others, **named} if named else others)
    return tuple(found)


def expanded(_: object, __: object, given: Sequence[str]) -> tuple[str, ...]:
    """Return the files, with quoted patterns replaced by their matches."""
    found: list[str] = []
    for place in given:
        matches = sorted(glob(place, recursive=True)) if has_magic(place) else []
        found += [place] if os.path.lexists(place) or not matches else matches
    return tuple(found)


# Maps each kind in `options.txt`, and each `Option.kind`, to the arguments of click.Option.
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "strings": {"multiple": True},
    "first": {},
    "flag": {"is_flag": True},
    "choice": {},
    "number": {"type": float},
    "count": {"type": click.IntRange(0)},
    "switch": {"default": None},
    "settings": {"multiple": True, "callback": _settings},
    "dtype": {"is_flag": False, "flag_value": ""},
    "pairs": {"multiple": True, "callback": partial(_named, _word)},
    "named": {"multiple": True, "callback": partial(_named, lambda _, text: text)},
    "json": {"multiple": True, "callback": partial(_named, _json)},
    "casts": {"multiple": True, "callback": _casts},
    "map": {"type": _mapping},
    "substitutions": {"multiple": True, "type": _substitution},
    "rules": {"multiple": True, "callback": _rules},
    "sizes": {"multiple": True, "callback": partial(_named, _size)},
    "config": {"type": _config},
    "int": {"type": int},
    "numbers": {"multiple": True, "type": float},
    "fraction": {"type": click.FloatRange(min=0)},
    "positive": {"type": click.IntRange(1)},
    "workers": {"type": click.IntRange(1, 64)},
    "ranks": {"type": click.IntRange(1, 1 << 16)},
    "size": {"type": size},
    "on": {"default": True},
    "help": {"is_flag": True, "expose_value": False},
}


# The table of options


@cache
def _sections() -> dict[str, list[tuple[str, str]]]:
    """Read `options.txt`. Map each section to its rows: the first line, and the help."""
    found: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for line in Path(__file__).with_name("options.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = found[line.strip("[]")] = []
        elif line.startswith("-"):
            rows.append((line, ""))
        elif line.startswith(" "):
            first, text = rows[-1]
            rows[-1] = first, f"{text} {line.strip()}".strip()
    return found


def table(section: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the names of each option in a section of `options.txt`, and its arguments of
    click.Option."""
    shared = {first.split()[0]: (first, text) for first, text in _sections()["shared"]}
    for first, text in _sections()[section]:
        if not text:
            first, text = shared[first]
        names: list[str] = []
        metavar: list[str] = []
        how: dict[str, Any] = {}
        for word in first.split():
            before, equals, value = word.partition("=")
            if word.startswith("-"):
                names.append(word)
            elif equals and before == "name":
                names.append(value)
            elif equals and before == "default":
                how["default"] = value
            elif word == "required":
                how["required"] = True
            elif word.startswith("{"):
                how["type"] = click.Choice(word.strip("{}").split("|"))
            elif word.startswith(":"):
                how |= KINDS[word[1:]]
            else:
                metavar.append(word)
        if metavar:
            how["metavar"] = " ".join(metavar)
        yield names, {**(how or {"is_flag": True}), "help": text}


def of(section: str) -> Decorator:
    """Return a decorator that adds the options of a section of `options.txt`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for names, how in reversed([*table(section)]):
            function = click.option(*names, **how)(function)
        return function

    return decorate


_OUTPUT, _RUN = "Output", "Execution"
# The output options that --help shows for every command that writes
_COMMON = ("--in-place", "--force", "--format", "--dry-run", "--json", "--help-all")
# The output options in the section "Execution" of --help-all
_EXECUTION = (
    "--dry-run", "--json", "--quiet", "--verify", "--no-check", "--durable", "--workers",
    "--scheduler",
)  # fmt: skip


# Commands


class Command(click.Command):
    """A command with --help-all, and with an optional dtype after --dequantize.

    `check` runs before the command. `check` raises UsageError for contradicting parameters.
    """

    def __init__(self, *, check: Callable[[click.Context], None] | None = None, **given: Any):
        super().__init__(**given)
        self.check = check

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        if "--help-all" in options and not ctx.resilient_parsing:
            hidden = [each for each in self.params if getattr(each, "hidden", False)]
            for each in hidden:
                each.hidden = False  # type: ignore[attr-defined]
            text = ctx.get_help()
            for each in hidden:
                each.hidden = True  # type: ignore[attr-defined]
            render.emit(text)
            ctx.exit()
        if "--dequantize" in options:
            args = list(dequantize_said(args))
        rest = super().parse_args(ctx, args)
        if self.check is not None and not ctx.resilient_parsing:
            with click.core.augment_usage_errors(ctx):
                self.check(ctx)
        return rest


def missing(ctx: click.Context, name: str, text: str = "") -> click.MissingParameter:
    """Return the error for a missing argument."""
    parameter = next(each for each in ctx.command.params if each.name == name)
    return click.MissingParameter(text, ctx, parameter)


def is_dtype(word: str) -> bool:
    from ckptkit.core import dtypes

    plain = word.lower().removeprefix("torch.")
    return plain in dtypes.BY_NAME or plain in dtypes.ALIASES


def dequantize_said(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments. If no dtype follows --dequantize, insert an empty dtype."""
    for each, after in zip(args, [*args[1:], ""], strict=False):
        yield "--dequantize=" if each == "--dequantize" and not is_dtype(after) else each


class Writer(Command):
    """A command that writes. The parameter `request` contains SRC, DST and the output options.

    - `shown`: output options that --help shows in addition to the common options
    - `several`: true if the command takes SRC... instead of SRC
    - `in_place`: true if the command has --in-place (default: the opposite of `several`)
    - `parts`: true if the command has the options for folders of several ranks
    - `only`: names of the output options that the command has (default: all)
    """

    def __init__(
        self,
        *,
        callback: Callable[..., Any],
        params: list[Any],
        shown: tuple[str, ...] = (),
        several: bool = False,
        in_place: bool | None = None,
        parts: bool = False,
        only: Collection[str] = (),
        **given: Any,
    ) -> None:
        self.run, self.several = callback, several
        in_place = not several if in_place is None else in_place
        if several:
            params.append(
                click.Argument(
                    ["sources"], metavar="SRC...", nargs=-1, required=True, callback=expanded
                )
            )
        else:
            params.append(click.Argument(["src"], metavar="SRC"))
        params.append(click.Argument(["dst"], metavar="DST", required=not in_place))
        sections = ("write", *(["parts"] if parts else []), "help-all")
        for names, how in chain.from_iterable(map(table, sections)):
            if only and names[0] not in (*only, "--help-all"):
                continue
            if in_place or names[0] != "--in-place":
                hidden = names[0] not in (*_COMMON, *shown)
                params.append(click.Option(names, hidden=hidden, **how))
        super().__init__(callback=self._called, params=params, check=self._check_output, **given)

    def _check_output(self, ctx: click.Context) -> None:
        """Raise UsageError unless there is exactly one output: DST, or SRC in place."""
        given = ctx.params
        if "dst" not in given:  # `batch` has --into
            return
        if self.several and given.get("in_place"):
            own = (*given["sources"], *filter(None, [given["dst"]]))
            given["sources"], given["dst"] = own, None
        if self.several and len(given["sources"]) < 2:
            raise click.UsageError("name two or more SRC, and DST")
        if given.get("in_place") and given["dst"] is not None:
            raise click.UsageError("--in-place edits SRC; remove DST")
        if not given.get("in_place") and given["dst"] is None:
            raise missing(ctx, "dst", "--in-place edits SRC itself.")

    def _called(self, **given: Any) -> None:
        from ckptkit.cli.request import report

        sources = given.pop("sources") if self.several else (given.pop("src"),)
        request = taken(given, sources)
        done, lost = self.run(request=request, **given)
        report(done, request, lost)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the command's own options first. With --help-all, list the shared options below."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        is_short = any(each.hidden for each in options)
        shared = {names[0]: _OUTPUT for names, _ in table("write")}
        shared |= dict.fromkeys(_EXECUTION, _RUN)
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], _OUTPUT: [], _RUN: []}
        for each in options:
            row = each.get_help_record(ctx)
            title = "Options" if is_short else shared.get(each.opts[0], "Options")
            if row is not None:
                sections[title].append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def taken(
    given: dict[str, Any], sources: tuple[str, ...], kind: type[Request] | None = None
) -> Any:
    """Build the request from `given`, and remove the values of the request from `given`.

    Raises UsageError for an invalid value.
    """
    from ckptkit.cli.request import Request

    negated: dict[str, Any] = {
        name: not given.pop(f"no_{name}", False) for name in ("extras", "sidecars", "check")
    }
    if given.pop("check_copies", False) and given["copies"] == "compare":
        given["copies"] = "check"
    names = [field.name for field in fields(Options) if field.name in given and field.name != "key"]
    options = Options(**negated, **{name: given.pop(name) for name in names})
    names = [field.name for field in fields(Request) if field.name in given]
    return (kind or Request)(
        sources=sources, options=options, **{name: given.pop(name) for name in names}
    )
