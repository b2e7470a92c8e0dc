"""Options shared by several commands, and the request of a command that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckptkit.cli import edit_report, parsing, render
from ckptkit.cli.edit_report import SCHEMA
from ckptkit.core.bytesource import check_is_name
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.text import is_url, without

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.formats.format import Loss
    from ckptkit.rules.applying import Asked as RulesAsked
    from ckptkit.rules.applying import Report
    from ckptkit.run.workers import Pool


key = click.option(
    "--key",
    metavar="PATH",
    help="Path of the weights in the file, if several entries could be meant.",
)
keys = click.option(
    "--key",
    "keys",
    metavar="PATH",
    multiple=True,
    help="Path of the weights to edit, or of another mapping (repeatable).",
)


def as_json(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --json to a command that prints an object of this schema."""
    text = f"Print one JSON object (schema {schema})."
    return click.option("--json", "as_json", is_flag=True, help=text)


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
        ruled: RulesAsked | None = None,
    ) -> None:
        """Read, apply the steps, write, and say so.

        `source` is what has been read already, `lost` what could not be; `ruled` what the steps of
        rules are asked for: it holds their reports.
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
        self.report(done, lost, () if ruled is None else ruled.reports)

    def report(self, done: Conversion, lost: Sequence[Loss], rules: Sequence[Report] = ()) -> None:
        """Print what was done; a batch keeps it."""
        edit_report.report(
            done,
            self.sources,
            self.options,
            lost,
            rules,
            as_json=self.as_json,
            quiet=self.quiet,
        )

    def _checks(self) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
        """Yield what is looked at before anything is written."""
        if self.like is None:
            return
        from ckptkit.cli.like import expected
        from ckptkit.rules.likeness import check_like

        name, shapes = self.like, expected(self.like)
        yield lambda checkpoint: check_like(checkpoint, shapes, name)

    def opened(self, path: str, key: str | None) -> Checkpoint:
        """Open one of several sources; refuse a part of a checkpoint, unless --part-only."""
        from ckptkit.api import open_checkpoint

        checkpoint = open_checkpoint(path, key=key)
        return checkpoint.alone() if self.options.part_only else checkpoint.whole()

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
            given["shard_size"] = parsing.bytes_of(given["shard_size"])
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


_EDIT = (
    click.argument("src", metavar="SRC"),
    click.argument("dst", metavar="DST", required=False),
    click.option("--in-place", is_flag=True, help="Edit SRC itself instead of writing DST."),
    click.option("--force", is_flag=True, help="Replace DST if it exists."),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Check and print what would be written; write nothing.",
    ),
    as_json(SCHEMA),
    click.option("--quiet", "-q", is_flag=True, help="Print only errors."),
    click.option(
        "--verify", is_flag=True, help="Read everything back and compare it before DST appears."
    ),
    click.option(
        "--durable", is_flag=True, help="Flush DST to the disk (fsync) before reporting success."
    ),
    click.option(
        "--allow-expand",
        is_flag=True,
        help="Write views out as whole tensors, even if DST becomes many times larger.",
    ),
    click.option("--format", metavar="NAME", help="Format of DST; see `ckptkit formats`."),
    click.option(
        "--objects",
        type=click.Choice(["keep", "drop", "error"]),
        default="keep",
        help="What to do with pickled Python objects that are not tensors or plain values.",
    ),
    click.option(
        "--ties",
        type=click.Choice(["alias", "duplicate"]),
        default="alias",
        help="How to write tied tensors in formats without views: as an alias in the "
        "metadata, or twice.",
    ),
    click.option(
        "--part-only",
        is_flag=True,
        help="Write the part of one rank alone, without the others.",
    ),
    click.option(
        "--shard-size",
        metavar="SIZE",
        callback=parsing.size,
        help="Split DST into a folder of shards of at most SIZE (e.g. 5GB).",
    ),
    click.option(
        "--ranks",
        metavar="N",
        type=click.IntRange(1, 1 << 16),
        help="Split the weights into N parts, one for each rank.",
    ),
    click.option(
        "--workers",
        metavar="N",
        type=click.IntRange(0),
        help="Share the work among N processes (1: this one alone).",
    ),
    click.option(
        "--scheduler",
        metavar="URL",
        help="Use the workers of a Dask cluster (tcp://HOST:8786).",
    ),
    click.option(
        "--like",
        metavar="OTHER",
        help="Expect the names and shapes of OTHER: a checkpoint, its index, or "
        "package.module:Class; write nothing else.",
    ),
    click.option(
        "--no-extras",
        is_flag=True,
        help="Leave ckptkit's own entry out of the metadata of safetensors.",
    ),
    click.option(
        "--no-sidecars",
        is_flag=True,
        help="From folder to folder: do not copy config.json, tokenizer and generation files.",
    ),
    click.option(
        "--no-check",
        is_flag=True,
        help="Write damaged tensors too: do not compare SRC with the checksums in it.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Fail, and write nothing, if a change changes nothing (such as no key to strip).",
    ),
    click.option(
        "--all",
        "everything",
        is_flag=True,
        help="Not only the weights: keep optimizer and values too, also in formats that normally "
        "hold only weights.",
    ),
)


devices = click.option(
    "--device",
    "devices",
    metavar="A=B",
    multiple=True,
    callback=parsing.pairs,
    help="Change the device tag A to B (repeatable).",
)
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
    callback=parsing.arguments,
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


_OUTPUT = "force format objects ties shard_size ranks part_only like everything"
_OUTPUT += " allow_expand in_place into no_extras no_sidecars strict"
_RUNNING = "dry_run as_json quiet verify no_check durable workers scheduler"
_SECTIONS = {
    **dict.fromkeys(_OUTPUT.split(), "Output"),
    **dict.fromkeys(_RUNNING.split(), "How it runs"),
}


class Writer(click.Command):
    """A command that writes: its help lists its own options first, then the shared ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            "Options": [],
            "Output": [],
            "How it runs": [],
        }
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                sections[_SECTIONS.get(parameter.name or "", "Options")].append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class WithDequantize(Writer):
    """A command whose --dequantize may be followed by an argument that is not its dtype."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(dequantize_said(args)))


def dequantize_said(args: Sequence[str]) -> Iterator[str]:
    """The arguments, with an empty dtype where none follows the option."""
    from ckptkit.core import dtypes

    for each, after in zip(args, [*args[1:], ""], strict=False):
        plain = after.lower().removeprefix("torch.")
        is_dtype = plain in dtypes.BY_NAME or plain in dtypes.ALIASES
        yield "--dequantize=" if each == "--dequantize" and not is_dtype else each


def edit(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SRC, DST and the options of writing to a command, as its argument `request`."""

    @wraps(command)
    def with_request(src: str, **given: Any) -> Any:
        return command(request=taken(given, (src,)), **given)

    return _decorated(with_request, _EDIT)


def taken(given: dict[str, Any], sources: tuple[str, ...], kind: type[Request] = Request) -> Any:
    """Return the request in what is given, and take it out of `given`."""
    negated: dict[str, Any] = {
        name: not given.pop(f"no_{name}") for name in ("extras", "sidecars", "check")
    }
    if given.pop("check_copies", False) and given["copies"] == "compare":
        given["copies"] = "check"
    names = [field.name for field in fields(Options) if field.name in given and field.name != "key"]
    options = Options(**negated, **{name: given.pop(name) for name in names})
    names = [field.name for field in fields(Request) if field.name in given]
    return kind(sources=sources, options=options, **{name: given.pop(name) for name in names})


def edit_many(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SRC..., DST and the options of writing to a command, as its argument `request`."""

    @wraps(command)
    def with_request(sources: tuple[str, ...], **given: Any) -> Any:
        if len(sources) < 2:
            raise click.UsageError("give two or more SRC, and DST")
        return command(request=taken(given, sources), **given)

    sources = click.argument("sources", metavar="SRC...", nargs=-1, required=True)
    destination = click.argument("dst", metavar="DST")
    return _decorated(with_request, (sources, destination, *_EDIT[3:]))


def _decorated(
    command: Callable[..., Any], options: Iterable[Callable[..., Any]]
) -> Callable[..., Any]:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def parts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that writes the options for folders that many processes wrote."""
    return _decorated(command, _PARTS)


def reads(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --key, if it has none, and the options for folders that many processes wrote.

    It gets them as its argument `read`.
    """

    @wraps(command)
    def with_read(key: str | None, parts: str | None, **given: Any) -> Any:
        copies = given.pop("copies")
        if given.pop("check_copies") and copies == "compare":
            copies = "check"
        return command(read=Options(key=key, parts=parts, copies=copies), **given)

    return _decorated(with_read, _PARTS)


_PARTS = (
    click.option(
        "--parts",
        metavar="FILE",
        help="YAML table that describes how the parts in a folder were split.",
    ),
    click.option(
        "--check-copies",
        is_flag=True,
        help="Read and compare the tensors of which several ranks hold copies.",
    ),
    click.option(
        "--copies",
        type=click.Choice(["compare", "first"]),
        default="compare",
        help="If the copies of a tensor differ: refuse them, or take the first.",
    ),
)


def only(names: tuple[str, ...]) -> str | None:
    """Return the single name given, which selects the weights; None for none or several."""
    return names[0] if len(names) == 1 else None


mapping = click.option(
    "--map",
    "mapping",
    metavar="FILE",
    callback=parsing.mapping,
    help="JSON file that maps old names to new ones.",
)
substitutions = click.option(
    "--sub",
    "substitutions",
    metavar="REGEX=REPLACEMENT",
    multiple=True,
    callback=parsing.substitutions,
    help="Replace matches in names, as re.sub does (repeatable).",
)
