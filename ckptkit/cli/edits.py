"""`ckptkit convert`, and one command for each edit.

The list `ckptkit.edits.EDITS` defines the options of these commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import cleandoc
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from ckptkit import edits
from ckptkit.cli import options
from ckptkit.cli.request import Request
from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from ckptkit.api import Conversion
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.formats.format import Loss

CONVERT = """Convert to another format, and apply transforms.

--format, or the suffix of DST, chooses the format. `ckptkit formats` lists the formats. If SRC is a
folder, and you give neither --format nor a suffix, `convert` writes a folder with the same
configuration files.

`convert` always applies transforms in this order: drop-entry, optimizer-keys, set-metadata,
dequantize, keep and drop (by names in SRC), strip, add, map and sub, rule, cast, quantize, to and
device, compact.

\b
Example: ckptkit convert run.pth half.pth --strip module. --cast bfloat16 --to cpu"""


def command(name: str) -> click.Command:
    """Return `convert`, or the command of one edit."""
    run: Callable[..., Any] = _convert
    made: dict[str, Any] = {"help": CONVERT, "shown": ("--all", "--shard-size"), "parts": True}
    has_key, chosen = True, [each for each in edits.EDITS if each.in_convert]
    if name != "convert":
        edit = edits.BY_COMMAND[name]
        first, *others = (f"ckptkit {name} {each}" for each in edit.examples)
        examples = "\n".join([f"\b\nExample: {first}", *(" " * 9 + each for each in others)])
        text = "\n\n".join(filter(None, (edit.about, cleandoc(edit.help), examples)))
        made = {"help": text, "several": bool(edit.several), "parts": edit.reads_parts}
        run, has_key, chosen = partial(_edit, edit), edit.has_key, [edit]
    params: list[click.Parameter] = []
    for option in chain.from_iterable(edit.options for edit in chosen):
        flag, text, how = option.flag, option.help, dict(options.KINDS.get(option.kind, {}))
        if option.choices:
            how["type"] = click.Choice(option.choices)
        if name == "convert":
            flag = option.flag if option.convert is None else option.convert
            text = option.convert_help or option.help
        elif option.default is not None:
            how |= {"default": option.default, "show_default": True}
        if flag:
            words, how["metavar"] = [flag, option.dest or option.parameter], option.metavar
            how |= {"required": option.required, "hidden": option.rare}
            params.append(click.Option(words, help=text, **how))
    if has_key:
        params += [click.Option(names, **how) for names, how in options.table("weights")]
    return options.Writer(name=name, callback=run, params=params, **made)


def _arguments(edit: edits.Edit, given: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the arguments of an edit from `given` and return them.

    Return None if the command line does not request the edit.
    """
    found: dict[str, Any] = {}
    wanted = False
    for option in edit.options:
        value = given.pop(option.dest or option.parameter, None)
        is_unset = value is False and option.kind == "flag"
        if value is None or is_unset or (isinstance(value, (tuple, dict)) and not value):
            continue
        wanted = True
        if option.parameter in found:
            raise click.UsageError(edit.needs)
        if option.parameter:
            found[option.parameter] = value or None if option.kind == "dtype" else value
    return found if wanted else None


def _convert(request: Request, key: str | None, **given: Any) -> Any:
    steps = []
    for edit in edits.EDITS:
        arguments = _arguments(edit, given) if edit.in_convert else None
        if arguments is None:
            continue
        if edit.word == "rules":
            args, lines = arguments.get("args", {}), arguments.get("rules", ())
            if not lines:
                raise click.UsageError("--config and --arg set sizes for --rule; add --rule")
            from ckptkit.rules.planner import RuleSet, unused_argument

            known = RuleSet.parse(lines).words() if args else ()
            for word in args:
                if word not in known:
                    raise unused_argument(word, known)
            arguments |= {"keep": "rest", "reports": request.options.dry_run}
        steps.append(edits.step(edit.word, **arguments))
    if request.like is not None and (request.dst or "").lower().endswith(".gguf"):
        return _into_gguf(request, key, steps)
    return request.run(*steps, key=key, keep_format=False)


def _into_gguf(
    request: Request, key: str | None, steps: list[edits.Step]
) -> tuple[Conversion, Sequence[Loss]]:
    """Write the weights of SRC into a copy of the GGUF file that --like names."""
    from ckptkit import api
    from ckptkit.publish.publish import publish
    from ckptkit.run.gguf_names import written_into

    assert request.dst is not None and request.like is not None
    if os.path.realpath(request.dst) == os.path.realpath(request.like):
        raise click.UsageError(
            "--like and DST are the same file; write to another DST, then rename it"
        )
    with ExitStack() as stack:
        ck = stack.enter_context(api.reading(request.sources[-1], request.options, key=key))
        skeleton = stack.enter_context(api.reading(request.like))
        for step in steps:
            ck = step(ck)
        try:
            ck, plan = written_into(ck.require_complete(), skeleton)
        except CkptkitError as error:
            raise error.at(ck.name or "") from error.__cause__
        options = stack.enter_context(request.prepared(request.options))
        done = publish(plan, request.dst, options, origin=ck.source)
        published = None if options.dry_run else done
    return api.Conversion(ck, plan, skeleton.format, request.dst, published), ()


def _edit(edit: edits.Edit, request: Request, **given: Any) -> Any:
    key, keys = None, given.get("keys", ())
    if edit.has_key:
        key = given.pop("key")
    elif len(keys) == 1:  # a single --key selects the weights
        (key,) = keys
    arguments = _arguments(edit, given) or {}
    values = [each.parameter for each in edit.options if each.kind != "flag"]
    if edit.needs and not any(name in arguments for name in values):
        raise click.UsageError(edit.needs)
    if edit.several:
        found = [_opened(each, key, request) for each in request.sources]
        return request.run(source=edit.function(found, **arguments))
    if edit.word == "wrap":
        _check_wrapped(request)

    def step(ck: Checkpoint) -> Checkpoint:
        done = edit.function(ck, **arguments)
        if edit.word == "strip" and request.alone and done.root is ck.root:
            _check_stripped(ck, done, request, **arguments)
        return done

    return request.run(step, key=key)


def _opened(path: str, key: str | None, request: Request) -> Checkpoint:
    """Open one of several sources. Refuse a single rank's file unless --part-only is given."""
    from ckptkit.api import open_checkpoint

    checkpoint = open_checkpoint(path, key=key)
    if not request.options.part_only:
        return checkpoint.require_complete()
    from ckptkit.formats.distributed.parts import alone

    return alone(checkpoint)


def _check_stripped(
    ck: Checkpoint,
    done: Checkpoint,
    request: Request,
    prefix: tuple[str, ...] = (),
    key: tuple[str, ...] = (),
) -> None:
    """Raise NothingToDoError, because no key has the prefix to strip.

    If the user gave no prefix and the keys have no wrapper prefix, raise no error.

    The hint is a command that strips another prefix of the keys: a wrapper prefix such as
    ``module.``, or the first component of all names. If the keys have no such prefix, the hint is a
    command that lists the keys.
    """
    from ckptkit.analysis.advice import prefix_options, wrappers
    from ckptkit.core.errors import NothingToDoError
    from ckptkit.core.text import shell_command

    ck = ck.require_complete()
    try:
        names = list((ck.with_key(key[0]) if key else ck).required.nodes)
    except CkptkitError:  # --key selects dicts that contain no weights
        names = []
    found = wrappers(names)
    if not found and not prefix:
        return
    firsts = {name.partition(".")[0] for name in names}
    if not found and len(firsts) == 1 and any(name.count(".") > 1 for name in names):
        found = [f"{first}." for first in firsts]
    chosen = list(chain.from_iterable(("--key", each) for each in key))
    places = [request.sources[-1], *([] if request.dst is None else [request.dst])]
    dash = ["--"] if any(each.startswith("-") for each in places) else []
    words = ["ckptkit", "inspect", *chosen[:2], *dash, places[0]]
    hint = f"`{shell_command(words)}` lists the keys"
    if found:
        options = [*prefix_options(found), *chosen, *dash, *places]
        words = ["ckptkit", "strip-module", *["--in-place"] * (request.dst is None), *options]
        hint = f"the keys begin with {''.join(found)!r}: {shell_command(words)}"
    raise NothingToDoError(done.warnings[len(ck.warnings)], where=ck.name, hint=hint)


def _check_wrapped(request: Request) -> None:
    """Raise UsageError if the output format cannot store an entry around the weights."""
    from ckptkit import formats
    from ckptkit.core.errors import UsageError
    from ckptkit.formats.table import TORCH_ZIP

    asked, place = request.options, request.dst or request.sources[-1]
    shards = asked.shard_size is not None
    chosen = formats.for_writing(place, asked.format, keep=TORCH_ZIP.name, shards=shards)
    if chosen.everything in ("never", "asked") and not asked.all:
        hint = "--all keeps the entry" if chosen.everything == "asked" else "write a .pth"
        what = f"{chosen.name} cannot store an entry around the weights"
        raise UsageError(what, where=request.dst, hint=hint)
