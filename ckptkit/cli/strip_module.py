"""ckptkit strip-module"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint


@click.command("strip-module", cls=options.Writer)
@options.edit
@click.option(
    "--prefix",
    "prefixes",
    metavar="P",
    multiple=True,
    help="Prefix to remove instead of 'module.' (repeatable).",
)
@options.keys
def command(request: options.Request, prefixes: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Remove the leading 'module.' from the keys.

    DataParallel and DistributedDataParallel add it. Only a leading prefix is removed, once, and
    _metadata is renamed with it. A prefix without its dot means the same: _orig_mod is _orig_mod.

    Exit code 1, with nothing written, if no key begins with the prefix of --prefix, or if the keys
    begin with that of another wrapper. Keys without any are copied as they are, with a warning.

    \b
    Example: ckptkit strip-module run.pth plain.pth
             ckptkit strip-module --in-place --prefix _orig_mod. run.pth
    """
    from ckptkit.transforms.keys import strip_prefix

    def strip(ck: Checkpoint) -> Checkpoint:
        done = strip_prefix(ck, *prefixes, keys=keys)
        if request.alone and done.root is ck.root:
            from ckptkit.analysis.advice import wrappers

            names = _names(ck.whole(), keys)
            if prefixes or wrappers(names):
                raise _nothing(ck, done, request, keys, names)
        return done

    request.run(strip, key=options.only(keys))


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
