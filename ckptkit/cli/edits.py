"""`ckptkit convert`, and the commands that are one edit each: all made of the list of edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import click

from ckptkit import edits
from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint


def command(name: str) -> click.Command:
    """Return `convert`, or the command of one edit."""
    return convert if name == "convert" else _of(edits.BY_COMMAND[name])


def _of(edit: edits.Edit) -> click.Command:
    def run(request: options.Request, **given: Any) -> None:
        key = given.pop("key") if edit.has_key else options.only(given.get("keys", ()))
        arguments = options.given_to(edit, given) or {}
        values = [each.parameter for each in edit.options if each.kind != "flag"]
        if edit.needs and not any(name in arguments for name in values):
            raise click.UsageError(edit.needs)
        if edit.several:
            found = [request.opened(each, key) for each in request.sources]
            request.run(source=edit.function(found, **arguments))
            return
        step = edits.step(edit.word, **arguments)
        if (around := _AROUND.get(edit.word)) is not None:
            step = around(step, request, arguments)
        request.run(step, key=key)

    lines = [f"ckptkit {edit.command} {each}" for each in edit.examples]
    examples = "\n".join(["\b", f"Example: {lines[0]}", *(" " * 9 + line for line in lines[1:])])
    paragraphs = (edit.about, cleandoc(edit.help), examples)
    made = options.Writer(
        edit.command,
        callback=run,
        params=[*options.of_edit(edit), *([options.weights()] if edit.has_key else [])],
        help="\n\n".join(filter(None, paragraphs)),
    )
    return options.writes(several=bool(edit.several), parts=edit.reads_parts)(made)


@options.writes("--all", "--shard-size", parts=True)
@click.command("convert", cls=options.Writer)
@options.key
def convert(request: options.Request, key: str | None, **given: Any) -> None:
    """Convert to another format, and transform on the way.

    The suffix of DST, or --format, chooses the format; `ckptkit formats` lists them. Without
    either, a folder is written when a folder is read, with its configuration files.

    Transforms apply in this order, whatever the order of the options: drop-entry, optimizer-keys,
    set-metadata, dequantize, keep and drop (by names in SRC), strip, add, map and sub, rule, cast,
    quantize, to and device, compact.

    \b
    Example: ckptkit convert run.pth half.pth --strip module. --cast bfloat16 --to cpu
    """
    steps = []
    for edit in edits.EDITS:
        if not edit.in_convert:
            continue
        arguments = options.given_to(edit, given, in_convert=True)
        if arguments is None:
            continue
        if edit.word == "rules":
            _check_sizes(**arguments)
            arguments |= {"keep": "rest", "reports": request.options.dry_run}
        steps.append(edits.step(edit.word, **arguments))
    request.run(*steps, key=key, keep_format=False)


convert.params[:0] = [
    option
    for edit in edits.EDITS
    if edit.in_convert
    for option in options.of_edit(edit, in_convert=True)
]


def _check_sizes(
    rules: Sequence[str] = (), config: Any = None, args: dict[str, int] | None = None
) -> None:
    """Raise UsageError for sizes without rules, and for those that no rule uses."""
    if not rules:
        raise click.UsageError("--config and --arg are sizes for --rule")
    from ckptkit.rules.planner import RuleSet, unused_argument

    known = RuleSet.parse(rules).words() if args else ()
    for word in args or ():
        if word not in known:
            raise unused_argument(word, known)


# What the command says that the edit does not know


def _strip(step: edits.Step, request: options.Request, arguments: dict[str, Any]) -> edits.Step:
    """Return a step that refuses a file without the prefix, and says which it has."""
    prefixes, keys = arguments.get("prefixes", ()), arguments.get("keys", ())

    def strip(ck: Checkpoint) -> Checkpoint:
        done = step(ck)
        if request.alone and done.root is ck.root:
            from ckptkit.analysis.advice import wrappers

            names = _names(ck.whole(), keys)
            if prefixes or wrappers(names):
                raise _nothing(ck, done, request, keys, names)
        return done

    return strip


def _nothing(
    ck: Checkpoint,
    done: Checkpoint,
    request: options.Request,
    keys: tuple[str, ...],
    names: list[str],
) -> Exception:
    """Return the error for a file without the prefix; its hint is the command for one that it has.

    That is the prefix of a wrapper, or the first part of all names.
    """
    from ckptkit.analysis.advice import prefix_options, wrappers
    from ckptkit.core.errors import NothingToDoError
    from ckptkit.core.text import shell_command

    found = wrappers(names)
    firsts = {name.partition(".")[0] for name in names}
    if not found and len(firsts) == 1 and any(name.count(".") > 1 for name in names):
        found = [f"{first}." for first in firsts]
    chosen = [word for key in keys for word in ("--key", key)]
    places = [request.src] if request.dst is None else [request.src, request.dst]
    dash = ["--"] if any(each.startswith("-") for each in places) else []
    words = ["inspect", *chosen[:2], *dash, request.src]
    hint = f"`{shell_command(['ckptkit', *words])}` lists the keys"
    if found:
        where = ["--in-place"] if request.dst is None else []
        words = ["strip-module", *where, *prefix_options(found), *chosen, *dash, *places]
        hint = f"they begin with {''.join(found)!r}: {shell_command(['ckptkit', *words])}"
    return NothingToDoError(done.warnings[len(ck.warnings)], where=ck.name, hint=hint)


def _names(ck: Checkpoint, keys: tuple[str, ...]) -> list[str]:
    from ckptkit.core.errors import CkptkitError

    try:
        return list((ck.with_key(keys[0]) if keys else ck).required.nodes)
    except CkptkitError:  # the keys name other mappings
        return []


def _wrap(step: edits.Step, request: options.Request, _: dict[str, Any]) -> edits.Step:
    """Refuse a format that holds only weights, without an entry around them."""
    from ckptkit import formats
    from ckptkit.core.errors import UsageError
    from ckptkit.formats.table import TORCH_ZIP

    asked = request.options
    shards = asked.shard_size is not None
    chosen = formats.for_writing(
        request.dst or request.src, asked.format, keep=TORCH_ZIP.name, shards=shards
    )
    if chosen.everything in ("never", "asked") and not asked.everything:
        hint = "--all keeps it" if chosen.everything == "asked" else "name a .pth"
        what = f"{chosen.name} holds only weights, without an entry around them"
        raise UsageError(what, where=request.dst, hint=hint)
    return step


_AROUND: dict[str, Callable[[edits.Step, options.Request, dict[str, Any]], edits.Step]] = {
    "strip": _strip,
    "wrap": _wrap,
}
