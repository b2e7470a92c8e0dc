"""Options shared by several commands, and `Edit`: what all commands that write have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckptkit.cli import render
from ckptkit.remote import urls

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.plan import Patch, Plan
    from ckptkit.formats.format import Asked, Loss
    from ckptkit.rules.applying import Asked as RulesAsked
    from ckptkit.rules.applying import Report
    from ckptkit.run.workers import Pool

SCHEMA = "ckptkit.edit/1"
SHOWN = 20  # lines of what was lost

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
    help="Edit the mapping at this path instead of the weights (repeatable).",
)


@dataclass(frozen=True)
class Edit:
    """Source, destination and options of a command that writes."""

    watched: ClassVar[bool] = True  # whether a person may see a bar

    src: str
    dst: str | None
    in_place: bool
    force: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    verify: bool
    durable: bool
    allow_expand: bool
    format: str | None
    objects: str
    ties: str
    everything: bool
    part_only: bool
    shard_size: int | None
    ranks: int | None
    workers: int | None
    scheduler: str | None
    like: str | None = None

    def __post_init__(self) -> None:
        if self.in_place and self.dst is not None:
            raise click.UsageError("--in-place edits SRC: leave out DST")
        if not self.in_place and self.dst is None:
            raise click.UsageError("Missing argument 'DST' (or --in-place)")

    def run(
        self,
        *steps: Callable[[Checkpoint], Checkpoint],
        key: str | None = None,
        keep_format: bool = True,
        source: Checkpoint | None = None,
        asked: Asked | None = None,
        lost: Sequence[Loss] = (),
        ruled: RulesAsked | None = None,
    ) -> None:
        """Read, apply the steps, write, and say so.

        `source` is what has been read already, `lost` what could not be; `asked` says how the files
        of many processes are read, `ruled` what the steps of rules are asked for: it holds their
        reports.
        """
        from ckptkit.api import convert
        from ckptkit.cli.progress import Progress
        from ckptkit.formats.format import WriteOptions

        with self.pool() as pool, Progress("writing", shown=self.watched) as progress:
            done = convert(
                self.src if source is None else source,
                self.dst,
                *steps,
                *self._checks(),
                in_place=self.in_place,
                keep_format=keep_format,
                key=key,
                format=self.format,
                options=WriteOptions(
                    self.objects,
                    self.ties,
                    everything=self.everything,
                    shard_size=self.shard_size,
                    ranks=self.ranks,
                ),
                force=self.force,
                durable=self.durable,
                verify=self.verify,
                allow_expand=self.allow_expand,
                dry_run=self.dry_run,
                part_only=self.part_only and source is None,
                asked=asked,
                progress=progress,
                executor=pool,
            )
        self.report(done, lost, () if ruled is None else ruled.reports)

    def _checks(self) -> Iterator[Callable[[Checkpoint], Checkpoint]]:
        """Yield what is looked at before anything is written."""
        if self.like is None:
            return
        from ckptkit.cli.like import expected
        from ckptkit.rules.likeness import check_like

        name, shapes = self.like, expected(self.like)
        yield lambda checkpoint: check_like(checkpoint, shapes, name)

    def opened(self, path: str, key: str | None) -> Checkpoint:
        """One of several sources; a part of a checkpoint only if it is meant as it is."""
        from ckptkit.api import open_checkpoint

        checkpoint = open_checkpoint(path, key=key)
        return checkpoint.alone() if self.part_only else checkpoint.whole()

    def with_defaults(self, defaults: Mapping[str, Any]) -> Edit:
        """Return this Edit, with a recipe's output options where the user gave none."""
        size = bytes_of(defaults["shard_size"]) if "shard_size" in defaults else None
        return replace(
            self,
            format=self.format or defaults.get("format"),
            objects=self.objects if self.objects != "keep" else defaults.get("objects", "keep"),
            ties=self.ties if self.ties != "alias" else defaults.get("ties", "alias"),
            everything=self.everything or defaults.get("all", False),
            shard_size=self.shard_size or size,
        )

    @contextmanager
    def pool(self) -> Iterator[Pool | None]:
        """Open the pool of workers, or yield None to work in this process."""
        if self.dry_run or (self.workers is None and self.scheduler is None):
            yield None
            return
        from ckptkit.run import workers

        if urls.is_url(self.dst):
            render.warn("--workers and --scheduler have no effect on an output at a URL")
            yield None
            return
        with workers.opened(self.workers, self.scheduler) as pool:
            yield pool

    def report(self, done: Conversion, lost: Sequence[Loss], rules: Sequence[Report] = ()) -> None:
        count = _tensors(done.checkpoint, done.plan)
        if self.as_json:
            facts = _facts(self, done, count)
            if lost:
                facts["lost"] = list(map(asdict, lost))
            if rules:
                from ckptkit.cli.rules_report import facts_of

                facts.update(facts_of(rules))
            render.emit_json(facts)
        elif not self.quiet:
            sentence = "; ".join(
                (f"{render.plural(count, 'tensor')}, {_sizes(done.plan)}", *done.notes)
            )
            render.emit(render.escape(f"{_verb(done.plan, self.dry_run)} {done.path}: {sentence}"))
            if self.dry_run and rules:
                from ckptkit.cli.rules_report import lines_of

                for each in rules:
                    render.emit(*map(render.escape, lines_of(each)))
            if self.dry_run:
                render.emit(*map(render.escape, str(done.plan).split("\n")))
        if not self.quiet:
            for line in (*what_was_lost(lost), *done.plan.notes, *done.warnings):
                render.warn(line)


def _verb(plan: Plan | Patch, dry_run: bool) -> str:
    from ckptkit.core.plan import Patch

    if not isinstance(plan, Patch):
        return "would write" if dry_run else "wrote"
    if dry_run:
        return "would change"
    return "kept" if plan.seal is None else "changed"


def _sizes(plan: Plan | Patch) -> str:
    from ckptkit.core.plan import Plan

    if isinstance(plan, Plan):
        return render.size(plan.size)
    return f"{render.size(plan.written)} of {render.size(plan.size)} rewritten"


def what_was_lost(lost: Sequence[Loss]) -> list[str]:
    lines = [f"lost: {each.path or '(root)'} ({each.what}): {each.why}" for each in lost[:SHOWN]]
    return lines + (
        [f"lost: {len(lost) - SHOWN:,} more, which --json lists"] if len(lost) > SHOWN else []
    )


def _tensors(checkpoint: Checkpoint, plan: Plan | Patch) -> int:
    """The tensors that are written: what the plan counts, and names of one tensor; else the
    weights, or every tensor where it is not clear which they are."""
    from ckptkit.core.errors import AmbiguousError
    from ckptkit.core.plan import Plan

    written = plan.tensors if isinstance(plan, Plan) else None
    try:
        if checkpoint.selection is not None:
            nodes = checkpoint.selection.nodes.values()
            again = len(nodes) - len({id(node) for node in nodes})
            return len(nodes) if written is None else written + again
    except AmbiguousError:
        pass
    if written is not None:
        return written
    from ckptkit.analysis.summary import summarize

    return summarize(checkpoint).totals.tensors


def _facts(edit: Edit, done: Conversion, count: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "source": urls.shown(edit.src),
        "destination": done.path,
        "format": done.format,
        "in_place": edit.in_place,
        "dry_run": edit.dry_run,
        "tensors": count,
        "size": done.plan.size,
        "done": list(done.notes),
        "left_out": list(done.plan.notes),
        "warnings": list(done.warnings),
    }


_UNITS = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Parse the value of --shard-size (click callback)."""
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


_EDIT = (
    click.argument("src", metavar="SRC"),
    click.argument("dst", metavar="DST", required=False),
    click.option("--in-place", is_flag=True, help="Edit SRC itself instead of writing DST."),
    click.option("--force", is_flag=True, help="Replace DST if it exists."),
    click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing."),
    click.option(
        "--json", "as_json", is_flag=True, help=f"Report as one JSON object (schema {SCHEMA})."
    ),
    click.option("--quiet", "-q", is_flag=True, help="Print errors only."),
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
        help="Take one part of a checkpoint of several processes as it is.",
    ),
    click.option(
        "--shard-size",
        metavar="SIZE",
        callback=size,
        help="Split DST into a folder of shards of at most SIZE (e.g. 5GB).",
    ),
    click.option(
        "--ranks",
        metavar="N",
        type=click.IntRange(1, 1 << 16),
        help="Cut the weights into N parts.",
    ),
    click.option(
        "--workers", metavar="N", type=click.IntRange(0), help="Share the work among N processes."
    ),
    click.option(
        "--scheduler",
        metavar="URL",
        help="Use the workers of a Dask cluster (tcp://HOST:8786).",
    ),
    click.option(
        "--like",
        metavar="OTHER",
        help="Write only what has the names and shapes of OTHER: a checkpoint, its index, or "
        "package.module:Class.",
    ),
    click.option(
        "--all",
        "everything",
        is_flag=True,
        help="Keep everything (optimizer, values), also in formats that normally hold only "
        "weights.",
    ),
)


stored = click.option(
    "--stored", is_flag=True, help="Codes and scales of quantized weights, as they are stored."
)
dequantize = click.option(
    "--dequantize",
    metavar="[DTYPE]",
    is_flag=False,
    flag_value="",
    help="Make floats of quantized weights: bfloat16, float16 or float32, by default that of "
    "the model.",
)


_OUTPUT = "force format objects ties shard_size ranks part_only like everything"
_OUTPUT += " allow_expand in_place into"
_RUNNING = "dry_run as_json quiet verify durable workers scheduler"
_SECTIONS = {
    **dict.fromkeys(_OUTPUT.split(), "Output"),
    **dict.fromkeys(_RUNNING.split(), "How it runs"),
}


class Writer(click.Command):
    """A command that writes: its help lists its own options first, then those of `Edit`."""

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
        return super().parse_args(ctx, list(_dequantize_said(args)))


def _dequantize_said(args: Sequence[str]) -> Iterator[str]:
    """The arguments, with an empty dtype where none follows the option."""
    from ckptkit.core import dtypes

    for each, after in zip(args, [*args[1:], ""], strict=False):
        plain = after.lower().removeprefix("torch.")
        is_dtype = plain in dtypes.BY_NAME or plain in dtypes.ALIASES
        yield "--dequantize=" if each == "--dequantize" and not is_dtype else each


def edit(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SRC, DST and the options of `Edit` to a command, as its argument `edit`."""

    @wraps(command)
    def with_edit(**given: Any) -> Any:
        common = {each.name: given.pop(each.name) for each in fields(Edit)}
        return command(edit=Edit(**common), **given)

    return _decorated(with_edit, _EDIT)


def edit_many(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SRC..., DST and the options of `Edit` to a command.

    It gets them as its arguments `edit` and `sources`.
    """

    @wraps(command)
    def with_edit(sources: tuple[str, ...], dst: str, **given: Any) -> Any:
        if len(sources) < 2:
            raise click.UsageError("give two or more SRC, and DST")
        common = {each.name: given.pop(each.name) for each in fields(Edit) if each.name in given}
        edit = Edit(src=sources[-1], dst=dst, in_place=False, **common)
        return command(edit=edit, sources=sources, **given)

    sources = click.argument("sources", metavar="SRC...", nargs=-1, required=True)
    destination = click.argument("dst", metavar="DST")
    return _decorated(with_edit, (sources, destination, *_EDIT[3:]))


def _decorated(
    command: Callable[..., Any], options: Iterable[Callable[..., Any]]
) -> Callable[..., Any]:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def asked(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options about folders that many processes wrote; it gets them as its
    argument `asked`."""

    @wraps(command)
    def with_asked(*, table: str | None, check_copies: bool, copies: str, **given: Any) -> Any:
        from ckptkit.formats.format import Asked

        is_given = table is not None or check_copies or copies != "compare"
        how = "check" if check_copies and copies == "compare" else copies
        return command(asked=Asked(how, table) if is_given else None, **given)

    return _decorated(with_asked, _ASKED)


_ASKED = (
    click.option(
        "--parts",
        "table",
        metavar="FILE",
        help="A YAML table that says how the parts in SRC were cut.",
    ),
    click.option(
        "--check-copies",
        is_flag=True,
        help="Read and compare all that several processes hold alike.",
    ),
    click.option(
        "--copies",
        type=click.Choice(["compare", "first"]),
        default="compare",
        help="Of copies that differ, refuse them or take the first.",
    ),
)


def pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse repeatable options of the form A=B (click callback)."""
    found = {}
    for text in given:
        left, equals, right = text.partition("=")
        if not equals or not left or not right:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found[left] = right
    return found


def arguments(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, object]:
    """Parse --arg NAME=JSON into a dict of name to value (click callback)."""
    import json

    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(
                f"{text!r} is not of the form {parameter.metavar}: {error}"
            ) from error
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
    return found


def casts(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse --cast into glob to dtype; a dtype alone applies to every name (click callback)."""
    return {glob or "*": dtype for glob, _, dtype in (text.rpartition("=") for text in given)}


def only(names: tuple[str, ...]) -> str | None:
    """Return the single name given, which selects the weights; None for none or several."""
    return names[0] if len(names) == 1 else None


def _mapping(_: click.Context, __: click.Parameter, path: str | None) -> dict[str, str]:
    """Read the JSON file of --map, a mapping of names to names (click callback)."""
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


def _substitutions(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Parse --sub (click callback).

    Splits at the last equals sign, since expressions contain one more often than replacements.
    """
    found = []
    for text in given:
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found.append((pattern, replacement))
    return found


mapping = click.option(
    "--map",
    "mapping",
    metavar="FILE",
    callback=_mapping,
    help="JSON file that maps old names to new ones.",
)
substitutions = click.option(
    "--sub",
    "substitutions",
    metavar="REGEX=REPLACEMENT",
    multiple=True,
    callback=_substitutions,
    help="Replace matches in names, as re.sub does (repeatable).",
)
