"""The options of commands: read from words, shared by many, and the request of one that writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckptkit.cli import edit_report, render
from ckptkit.cli.edit_report import SCHEMA
from ckptkit.core.bytesource import check_is_name
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.text import is_url, shell_word, without

if TYPE_CHECKING:
    from ckptkit import edits
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.formats.format import Loss
    from ckptkit.run.workers import Pool


# The words of a command line -> values (callbacks of click)

_UNITS = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Parse the value of --shard-size."""
    return None if text is None else bytes_of(text)


def bytes_of(text: str) -> int:
    """Parse a size in bytes; ``5GB`` is 5 * 10**9, ``5GiB`` is 5 * 2**30."""
    from fractions import Fraction  # and with it decimal

    found = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,9})? ?([kmgt]i?b|b?)", text.strip().lower())
    size = int(Fraction(found[1] + (found[2] or "")) * _UNITS.get(found[3], 1)) if found else 0
    if not size:
        raise click.BadParameter(
            f"{text!r} is not a size: use 5GB, 500MB, 2GiB or a number of bytes"
        )
    return size


def _read(
    parameter: click.Parameter, given: Iterable[str], is_value: Callable[[str], object]
) -> dict[str, str]:
    """Return repeatable options of the form NAME=VALUE as a dict."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not is_value(value):
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found[name] = value
    return found


def pairs(_: click.Context, parameter: click.Parameter, given: Iterable[str]) -> dict[str, str]:
    """Parse A=B."""
    return _read(parameter, given, bool)


def named(_: click.Context, parameter: click.Parameter, given: Iterable[str]) -> dict[str, str]:
    """Parse NAME=TEXT, where the text may be empty."""
    return _read(parameter, given, lambda text: True)


def sizes(_: click.Context, parameter: click.Parameter, given: Iterable[str]) -> dict[str, int]:
    """Parse NAME=INT of rules."""
    found = _read(parameter, given, lambda text: re.fullmatch("[0-9]{1,18}", text))
    for name in found:
        if not name.isidentifier():
            raise click.BadParameter(f"{name!r} is not of the form {parameter.metavar}")
    return {name: int(text) for name, text in found.items()}


def values(_: click.Context, parameter: click.Parameter, given: Iterable[str]) -> dict[str, object]:
    """Parse NAME=JSON."""
    import json

    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(
                f"{text!r} is not of the form {parameter.metavar}: {value!r} is not JSON, in which "
                f"a text has quotes: {shell_word(f'{name}={json.dumps(value)}')}"
            ) from error
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
    return found


def casts(_: click.Context, __: click.Parameter, given: Iterable[str]) -> dict[str, str]:
    """Parse --cast into glob to dtype; a dtype alone is for all other names."""
    found: dict[str, str] = {}
    for text in given:
        glob, _equals, dtype = text.rpartition("=")
        if found.setdefault(glob or "*", dtype) != dtype:
            raise click.BadParameter(f"{glob or 'a dtype without a glob'} is given twice")
    return found


def mapping(_: click.Context, __: click.Parameter, path: str | None) -> dict[str, str]:
    """Read the JSON file of --map, a mapping of names to names."""
    if path is None:
        return {}
    import json

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise click.BadParameter(f"{path}: not a JSON object that maps names to names")
    return found


def substitutions(
    _: click.Context, parameter: click.Parameter, given: Iterable[str]
) -> list[tuple[str, str]]:
    """Parse --sub.

    Splits at the last equals sign, since expressions contain one more often than replacements.
    """
    found = []
    for text in given:
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern:
            sed = re.fullmatch(r"s([/|#,])(.+)\1(.*)\1g?", text)
            instead = f": write {shell_word(f'{sed[2]}={sed[3]}')}" if sed else ""
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}{instead}")
        found.append((pattern, replacement))
    return found


def rules(_: click.Context, __: click.Parameter, given: Sequence[str]) -> Sequence[str]:
    """Return the lines of --rule. Raises what is wrong with them before a file is opened."""
    if given:
        from ckptkit.rules.planner import RuleSet

        RuleSet.parse(given)
    return given


def config(_: click.Context, __: click.Parameter, path: str | None) -> Any:
    """Read the config.json of --config."""
    if path is None:
        return None
    from ckptkit.edits import rules

    return rules.read(path)


# How the words of an option of an edit are read: the arguments of click.Option, by `Option.kind`.
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "texts": {"multiple": True},
    "first": {},
    "flag": {"is_flag": True},
    "choice": {},
    "numbers": {"multiple": True, "type": float},
    "dtype": {"is_flag": False, "flag_value": ""},
    "pairs": {"multiple": True, "callback": pairs},
    "named": {"multiple": True, "callback": named},
    "json": {"multiple": True, "callback": values},
    "casts": {"multiple": True, "callback": casts},
    "map": {"callback": mapping},
    "substitutions": {"multiple": True, "callback": substitutions},
    "rules": {"multiple": True, "callback": rules},
    "sizes": {"multiple": True, "callback": sizes},
    "config": {"callback": config},
}


# Shared options

key = click.option(
    "--key",
    metavar="PATH",
    help="Path of the weights, if several could be meant.",
)


def weights() -> click.Option:
    """Return the option `key` as an object."""
    return click.Option(
        ["--key"],
        metavar="PATH",
        help="Path of the weights, if several could be meant.",
    )


def as_json(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --json to a command that prints an object of this schema."""
    text = f"Print one JSON object (schema {schema})."
    return click.option("--json", "as_json", is_flag=True, help=text)


model = click.option(
    "--model",
    "spec",
    metavar="MODEL",
    help="Model to compare with: package.module:Class or file.py:Class.",
)
model_arguments = click.option(
    "--arg",
    "args",
    metavar="NAME=JSON",
    multiple=True,
    callback=values,
    help="Argument NAME of the model's constructor (repeatable).",
)
stored = click.option(
    "--stored",
    is_flag=True,
    help="Show the codes and scales of quantized weights, as they are stored.",
)
dequantize = click.option(
    "--dequantize",
    metavar="[DTYPE]",
    is_flag=False,
    flag_value="",
    help="Convert quantized weights to floats: bfloat16, float16 or float32, by default that of "
    "the model.",
)


def _of_parts() -> list[click.Option]:
    """Return the options for reading folders that many processes wrote."""
    return [
        click.Option(
            ["--parts"],
            metavar="FILE",
            hidden=True,
            help="YAML table that describes how the parts in a folder were split.",
        ),
        click.Option(
            ["--check-copies"],
            is_flag=True,
            hidden=True,
            help="Read and compare the tensors of which several ranks hold copies.",
        ),
        click.Option(
            ["--copies"],
            type=click.Choice(["compare", "first"]),
            default="compare",
            hidden=True,
            help="If the copies of a tensor differ: refuse them, or take the first.",
        ),
    ]


@dataclass(frozen=True)
class Request:
    """What a command that writes was asked for: its inputs and output, and how to report it."""

    alone: ClassVar[bool] = True  # one file for a person, not one of many

    sources: tuple[str, ...]
    dst: str | None
    options: Options
    like: str | None = None
    workers: int | None = None
    scheduler: str | None = None
    as_json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.options.in_place and self.dst is not None:
            raise click.UsageError("--in-place edits SRC: leave out DST")
        if not self.options.in_place and self.dst is None:
            raise click.UsageError("Missing argument 'DST' (or --in-place)")
        check_is_name(self.dst or "")

    @property
    def src(self) -> str:
        return self.sources[-1]

    def run(
        self,
        *steps: Callable[[Checkpoint], Checkpoint],
        key: str | None = None,
        keep_format: bool = True,
        source: Checkpoint | None = None,
        lost: Sequence[Loss] = (),
    ) -> None:
        """Read, apply the steps, write, and say so.

        `source` is what has been read already, `lost` what could not be.
        """
        from ckptkit.api import convert
        from ckptkit.cli.progress import Progress

        with self.pool() as pool, Progress("writing", shown=self.alone) as progress:
            done = convert(
                self.src if source is None else source,
                self.dst,
                *steps,
                *self._checks(),
                options=replace(
                    self.options,
                    key=key,
                    keep_format=keep_format,
                    part_only=self.options.part_only and source is None,
                    executor=pool,
                    fork=self.workers is None,
                    progress=progress,
                ),
            )
        self.report(done, lost)

    def report(self, done: Conversion, lost: Sequence[Loss]) -> None:
        """Print what was done; a batch keeps it."""
        edit_report.report(
            done,
            self.sources,
            self.options,
            lost,
            as_json=self.as_json,
            quiet=self.quiet,
        )

    def _checks(self) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
        """Yield what is looked at before anything is written."""
        if self.like is None:
            return
        from ckptkit.cli.like import expected
        from ckptkit.edits.rules import check_like

        name, shapes = self.like, expected(self.like)
        yield lambda checkpoint: check_like(checkpoint, shapes, name)

    def opened(self, path: str, key: str | None) -> Checkpoint:
        """Open one of several sources; refuse a part of a checkpoint, unless --part-only."""
        from ckptkit.api import open_checkpoint

        checkpoint = open_checkpoint(path, key=key)
        if not self.options.part_only:
            return checkpoint.whole()
        from ckptkit.formats.distributed.parts import alone

        return alone(checkpoint)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Request:
        """Return this request, with a recipe's output options where the user gave none.

        A suffix says which format is wanted: DST is one file then.
        """
        from ckptkit.formats import of_suffix

        if self.dst is not None and of_suffix(self.dst) is not None:
            defaults = {**defaults, "format": None, "shard_size": None}
        given = {
            "everything" if name == "all" else name: value
            for name, value in defaults.items()
            if value is not None
        }
        if "shard_size" in given:
            given["shard_size"] = bytes_of(given["shard_size"])
        own = {name: getattr(self.options, name) for name in given}
        kept = {name for name, value in own.items() if value != getattr(DEFAULT, name)}
        return replace(self, options=replace(self.options, **without(given, kept)))

    @contextmanager
    def pool(self) -> Iterator[Pool | None]:
        """Open the pool of workers, or yield None to work in this process."""
        if self.options.dry_run or (self.workers is None and self.scheduler is None):
            yield None
            return
        from ckptkit.run import workers

        if is_url(self.dst):
            render.warn("--workers and --scheduler have no effect on an output at a URL")
            yield None
            return
        with workers.opened(self.workers, self.scheduler) as pool:
            yield pool


# The options of writing

_OUTPUT, _RUN = "Output", "How it runs"
_FLAG: dict[str, Any] = {"is_flag": True}
# Section of --help-all, names, help, arguments of click.Option. All but `_COMMON` are hidden until
# --help-all, which `ckptkit help output` explains.
_WRITING: tuple[tuple[str, tuple[str, ...], str, dict[str, Any]], ...] = (
    (_OUTPUT, ("--in-place",), "Edit SRC itself instead of writing DST.", _FLAG),
    (_OUTPUT, ("--force",), "Replace DST if it exists.", _FLAG),
    (_OUTPUT, ("--format",), "Format of DST; see `ckptkit formats`.", {"metavar": "NAME"}),
    (_RUN, ("--dry-run",), "Print what would be written; write nothing.", _FLAG),
    (_RUN, ("--json", "as_json"), f"Print one JSON object (schema {SCHEMA}).", _FLAG),
    (_OUTPUT, ("--all", "everything"),
     "Not only the weights: optimizer and values too.", _FLAG),
    (_OUTPUT, ("--shard-size",), "Split DST into shards of at most SIZE, e.g. 5GB.",
     {"metavar": "SIZE", "callback": size}),
    (_OUTPUT, ("--allow-expand",),
     "Write views out as whole tensors, even if DST becomes many times larger.", _FLAG),
    (_OUTPUT, ("--objects",),
     "What to do with pickled Python objects that are not tensors or plain values.",
     {"type": click.Choice(["keep", "drop", "error"]), "default": "keep"}),
    (_OUTPUT, ("--ties",),
     "How to write tied tensors in formats without views: as an alias in the metadata, or twice.",
     {"type": click.Choice(["alias", "duplicate"]), "default": "alias"}),
    (_OUTPUT, ("--part-only",), "Write the part of one rank alone, without the others.", _FLAG),
    (_OUTPUT, ("--ranks",), "Split the weights into N parts, one for each rank.",
     {"metavar": "N", "type": click.IntRange(1, 1 << 16)}),
    (_OUTPUT, ("--like",),
     "Expect the names and shapes of OTHER: a checkpoint, its index, or package.module:Class; "
     "write nothing else.", {"metavar": "OTHER"}),
    (_OUTPUT, ("--no-extras",), "Leave ckptkit's own entry out of the metadata of safetensors.",
     _FLAG),
    (_OUTPUT, ("--no-sidecars",),
     "From folder to folder: do not copy config.json, tokenizer and generation files.", _FLAG),
    (_OUTPUT, ("--strict",),
     "Fail, and write nothing, if a change changes nothing (such as no key to strip).", _FLAG),
    (_RUN, ("--quiet", "-q"), "Print only errors.", _FLAG),
    (_RUN, ("--verify",), "Read everything back and compare it before DST appears.", _FLAG),
    (_RUN, ("--no-check",),
     "Write damaged tensors too: do not compare SRC with the checksums in it.", _FLAG),
    (_RUN, ("--durable",), "Flush DST to the disk (fsync) before reporting success.", _FLAG),
    (_RUN, ("--workers",), "Share the work among N processes (1: this one alone).",
     {"metavar": "N", "type": click.IntRange(0)}),
    (_RUN, ("--scheduler",), "Use the workers of a Dask cluster (tcp://HOST:8786).",
     {"metavar": "URL"}),
)  # fmt: skip
_COMMON = ("--in-place", "--force", "--format", "--dry-run", "--json")
_SECTIONS = {names[0]: section for section, names, _, _ in _WRITING}


def _help_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the help with the hidden options."""
    if not wanted or ctx.resilient_parsing:
        return
    options = [each for each in ctx.command.params if isinstance(each, click.Option)]
    hidden = [each for each in options if each.hidden]
    for each in hidden:
        each.hidden = False
    try:
        render.emit(ctx.get_help())
    finally:
        for each in hidden:
            each.hidden = True
    ctx.exit()


def help_all() -> click.Option:
    """Return the option that shows all others."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="Show this message with all options.",
    )


class Dequantizing(click.Command):
    """A command whose --dequantize may be followed by a word that is not its dtype."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; --dequantize may be followed by one that is not its dtype."""
        return super().parse_args(ctx, list(dequantize_said(args)))


class Writer(Dequantizing):
    """A command that writes: with all options, its help lists its own first, then the shared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        is_short = any(each.hidden for each in options)
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], _OUTPUT: [], _RUN: []}
        for each in options:
            row = each.get_help_record(ctx)
            title = "Options" if is_short else _SECTIONS.get(each.opts[0], "Options")
            if row is not None:
                sections[title].append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def dequantize_said(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with an empty dtype where none follows --dequantize."""
    if "--dequantize" not in args:
        yield from args
        return
    from ckptkit.core import dtypes

    for each, after in zip(args, [*args[1:], ""], strict=False):
        plain = after.lower().removeprefix("torch.")
        is_dtype = plain in dtypes.BY_NAME or plain in dtypes.ALIASES
        yield "--dequantize=" if each == "--dequantize" and not is_dtype else each


def writes(
    *shown: str, several: bool = False, parts: bool = False
) -> Callable[[click.Command], click.Command]:
    """Give a command SRC, DST and the options of writing, as its argument `request`.

    `shown` are options of writing that its --help shows; with `several`, it takes SRC..., and with
    `parts`, it reads folders of many processes.
    """

    def add(command: click.Command) -> click.Command:
        run = command.callback
        assert run is not None

        @wraps(run)
        def with_request(**given: Any) -> Any:
            sources = given.pop("sources") if several else (given.pop("src"),)
            if several and len(sources) < 2:
                raise click.UsageError("give two or more SRC, and DST")
            return run(request=taken(given, sources), **given)

        command.callback = with_request
        sources = click.Argument(["src"], metavar="SRC")
        if several:
            sources = click.Argument(["sources"], metavar="SRC...", nargs=-1, required=True)
        command.params += [
            sources,
            click.Argument(["dst"], metavar="DST", required=several),
            *(
                click.Option([*names], help=text, hidden=names[0] not in (*_COMMON, *shown), **how)
                for _, names, text, how in _WRITING
                if not (several and names[0] == "--in-place")
            ),
            *(_of_parts() if parts else ()),
            help_all(),
        ]
        return command

    return add


def taken(
    given: dict[str, Any], sources: tuple[str, ...], kind: type[Request] | None = None
) -> Any:
    """Return the request in what is given, and take it out of `given`."""
    negated: dict[str, Any] = {
        name: not given.pop(f"no_{name}") for name in ("extras", "sidecars", "check")
    }
    if given.pop("check_copies", False) and given["copies"] == "compare":
        given["copies"] = "check"
    names = [field.name for field in fields(Options) if field.name in given and field.name != "key"]
    options = Options(**negated, **{name: given.pop(name) for name in names})
    names = [field.name for field in fields(Request) if field.name in given]
    made = kind or Request
    return made(sources=sources, options=options, **{name: given.pop(name) for name in names})


def reads(command: click.Command) -> click.Command:
    """Give a command that has --key the options for folders that many processes wrote.

    It gets them as its argument `read`.
    """
    run = command.callback
    assert run is not None

    @wraps(run)
    def with_read(key: str | None, parts: str | None, **given: Any) -> Any:
        copies, check = given.pop("copies"), given.pop("check_copies")
        how = "check" if check and copies == "compare" else copies
        return run(read=Options(key=key, parts=parts, copies=how), **given)

    command.callback = with_read
    command.params += [*_of_parts(), help_all()]
    return command


def only(names: tuple[str, ...]) -> str | None:
    """Return the single name given, which selects the weights; None for none or several."""
    return names[0] if len(names) == 1 else None


# The options of an edit


def of_edit(edit: edits.Edit, in_convert: bool = False) -> list[click.Option]:
    """Return the options of an edit: of its own command, or of `convert`."""
    made = []
    for option in edit.options:
        flag = _flag(option, in_convert)
        if not flag:
            continue
        how = dict(KINDS[option.kind])
        if option.kind == "choice":
            how["type"] = click.Choice(option.choices)
        if option.default is not None and not in_convert:
            how |= {"default": option.default, "show_default": True}
        made.append(
            click.Option(
                [flag, option.dest or option.parameter],
                metavar=option.metavar,
                help=(in_convert and option.convert_help) or option.help,
                required=option.required,
                hidden=option.rare,
                **how,
            )
        )
    return made


def _flag(option: edits.Option, in_convert: bool) -> str:
    return option.flag if not in_convert or option.convert is None else option.convert


def given_to(
    edit: edits.Edit, given: dict[str, Any], in_convert: bool = False
) -> dict[str, Any] | None:
    """Take the arguments of an edit out of what is given to a command; None: it is not wanted."""
    found: dict[str, Any] = {}
    wanted = False
    for option in edit.options:
        if not _flag(option, in_convert):
            continue
        value = given.pop(option.dest or option.parameter)
        if value is None or value is False or (value != "" and not value):
            continue
        wanted = True
        if option.parameter in found:
            raise click.UsageError(edit.needs)
        if option.parameter:
            found[option.parameter] = value or None if option.kind == "dtype" else value
    return found if wanted else None
