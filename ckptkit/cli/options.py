"""Options that several commands share, and `Edit`: what all commands that write have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import render

if TYPE_CHECKING:
    from ckptkit.checkpoint import Checkpoint
    from ckptkit.convert import Conversion

SCHEMA = "ckptkit.edit/1"

key = click.option("--key", metavar="PATH", help="The entry that holds the weights, where several could be meant.")
keys = click.option(
    "--key", "keys", metavar="PATH", multiple=True, help="Edit the mapping at this path instead (repeatable)."
)


@dataclass(frozen=True)
class Edit:
    """Where from, where to, and how: the arguments of every command that writes."""

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

    def __post_init__(self) -> None:
        if self.in_place and self.dst is not None:
            raise click.UsageError("--in-place changes SRC: there is no DST then")
        if not self.in_place and self.dst is None:
            raise click.UsageError("Missing argument 'DST' (or --in-place)")

    def run(
        self,
        *steps: Callable[[Checkpoint], Checkpoint],
        key: str | None = None,
        keep_format: bool = True,
    ) -> None:
        """Read, apply the steps, write, and say so."""
        from ckptkit.cli.progress import Progress
        from ckptkit.convert import convert
        from ckptkit.formats.format import WriteOptions

        with Progress("writing") as progress:
            done = convert(
                self.src,
                self.dst,
                *steps,
                in_place=self.in_place,
                keep_format=keep_format,
                key=key,
                format=self.format,
                options=WriteOptions(self.objects, self.ties),
                force=self.force,
                durable=self.durable,
                verify=self.verify,
                allow_expand=self.allow_expand,
                dry_run=self.dry_run,
                progress=progress,
            )
        self._report(done)

    def _report(self, done: Conversion) -> None:
        count = _tensors(done.checkpoint)
        if self.as_json:
            render.emit_json(_facts(self, done, count))
        elif not self.quiet:
            verb = "would write" if self.dry_run else "wrote"
            said = "; ".join((f"{render.plural(count, 'tensor')}, {render.size(done.plan.size)}", *done.notes))
            render.emit(render.escape(f"{verb} {done.path}: {said}"))
            if self.dry_run:
                render.emit(*map(render.escape, str(done.plan).split("\n")))
        if not self.quiet:
            for line in (*done.plan.notes, *done.warnings):
                render.warn(line)


def _tensors(checkpoint: Checkpoint) -> int:
    """The weights, or every tensor where it is not clear which they are."""
    from ckptkit.errors import AmbiguousError

    try:
        if checkpoint.selection is not None:
            return len(checkpoint.selection.nodes)
    except AmbiguousError:
        pass
    from ckptkit.reports.summary import summarize

    return summarize(checkpoint).totals.tensors


def _facts(edit: Edit, done: Conversion, count: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "source": edit.src,
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


_EDIT = (
    click.argument("src", metavar="SRC"),
    click.argument("dst", metavar="DST", required=False),
    click.option("--in-place", is_flag=True, help="Change SRC itself instead of writing DST."),
    click.option("--force", is_flag=True, help="Replace DST if it exists."),
    click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
    click.option("--json", "as_json", is_flag=True, help=f"Report as one JSON object (schema {SCHEMA})."),
    click.option("--quiet", "-q", is_flag=True, help="Print errors only."),
    click.option("--verify", is_flag=True, help="Read everything back and compare before DST appears."),
    click.option("--durable", is_flag=True, help="Wait until DST is on the disk, not only in its cache."),
    click.option("--allow-expand", is_flag=True, help="Write views out even if DST becomes many times larger."),
    click.option("--format", metavar="NAME", help="Format of DST; see `ckptkit formats`."),
    click.option(
        "--objects",
        type=click.Choice(["keep", "drop", "error"]),
        default="keep",
        help="Values that only their own code could make.",
    ),
    click.option(
        "--ties",
        type=click.Choice(["alias", "duplicate"]),
        default="alias",
        help="Tensors with the same bytes, in a format without views.",
    ),
)


def edit(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command SRC, DST and every option of `Edit`; it gets them as its argument `edit`."""

    @wraps(command)
    def with_edit(**given: Any) -> Any:
        common = {name: given.pop(name) for name in Edit.__dataclass_fields__}
        return command(edit=Edit(**common), **given)

    decorated: Callable[..., Any] = with_edit
    for option in reversed(_EDIT):
        decorated = option(decorated)
    return decorated


def pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Callback for repeatable options of the form A=B."""
    found = {}
    for text in given:
        left, equals, right = text.partition("=")
        if not equals or not left or not right:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found[left] = right
    return found


def arguments(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, object]:
    """Callback of --arg: name to the value that the JSON text says."""
    import json

    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}: {error}") from error
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
    return found


def casts(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Callback of --cast: glob to dtype; a dtype alone is for every name."""
    return {glob or "*": dtype for glob, _, dtype in (text.rpartition("=") for text in given)}


def only(names: tuple[str, ...]) -> str | None:
    """The entry that counts as the weights where just one is named."""
    return names[0] if len(names) == 1 else None


def _mapping(_: click.Context, __: click.Parameter, path: str | None) -> dict[str, str]:
    """Callback of --map: the names that a JSON file maps to others."""
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


def _substitutions(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    """Callback of --sub: split at the last equals sign, which a replacement needs less often than an expression."""
    found = []
    for text in given:
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found.append((pattern, replacement))
    return found


mapping = click.option("--map", "mapping", metavar="FILE", callback=_mapping, help="A JSON object: old name to new.")
substitutions = click.option(
    "--sub",
    "substitutions",
    metavar="REGEX=REPLACEMENT",
    multiple=True,
    callback=_substitutions,
    help="Replace what matches, as re.sub does (repeatable).",
)
