"""ckptkit delta"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import render
from ckptkit.cli.options import Writer, of
from ckptkit.core.text import without

if TYPE_CHECKING:
    from ckptkit.deltas.make import Made

SCHEMA = "ckptkit.delta/1"
DIFFERENT = 1


@click.group("delta")
def command() -> None:
    """Make, apply, squash and check deltas of checkpoints.

    A delta contains only the bytes that a training step changed, and the new checksum of each
    changed tensor. `make` writes the format of slime, miles and SGLang. `apply` also reads deltas
    of SkyRL and TRL.

    \b
    Example: ckptkit delta make old.safetensors new.safetensors weight_v000001
             ckptkit delta apply old.safetensors weight_v000001 new.safetensors
             ckptkit delta apply --in-place model weight_v000001 weight_v000002
    """


@command.command("make")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.argument("delta", metavar="DELTA")
@of("delta make")
def make(old: str, new: str, delta: str, as_json: bool, **given: Any) -> None:
    """Write the folder DELTA, which changes the weights of OLD into those of NEW.

    OLD and NEW must have the same names, dtypes and shapes.
    """
    import ckptkit

    made = ckptkit.delta(old, new, delta, **given)
    if as_json:
        _emit_made(made)
        return
    render.emit_text(f"wrote {made.path}: version {made.version:06d}: {made}")


def _emit_made(made: Made) -> None:
    """Print a new delta as one JSON object."""
    facts = {"delta": made.path, "tensor_count": made.tensors, **asdict(made)}
    render.emit_json({"schema": SCHEMA, "made": without(facts, ["path", "tensors"])})


@command.command("apply", cls=Writer, several=True, in_place=True)
@of("delta apply")
def apply(
    request: Any, to: int | None, base_version: int | None, unchecked: bool
) -> tuple[Any, Any]:
    """Apply deltas to a checkpoint.

    The first SRC is BASE. Each further SRC is a DELTA, in order. A DELTA can be a folder of
    version folders (weight_v000001...). Before `apply` writes anything, it checks each changed
    tensor against the checksum in the delta. With --in-place, `apply` changes all files of BASE
    or none, even if it is interrupted. In safetensors files, `apply` writes only the changed
    bytes.
    """
    import ckptkit

    base, *deltas = request.sources
    done = ckptkit.apply_delta(
        base, deltas, request.dst, to=to, base_version=base_version, unchecked=unchecked,
        options=request.options,
    )  # fmt: skip
    return done, ()


@command.command("inspect")
@click.argument("deltas", metavar="DELTA...", nargs=-1, required=True)
@of("delta inspect")
def inspect(deltas: tuple[str, ...], as_json: bool) -> None:
    """Print the version of each delta, and the number of bytes that each delta changes."""
    from ckptkit.deltas import read_all

    found = read_all(deltas)
    if as_json:
        rows = [
            {
                "delta": each.name, "form": each.form, "encoding": each.encoding,
                "version": each.version, "base_version": each.base_version,
                "tensors": [
                    {"name": name, "changed": change.changed(), "size": change.nbytes}
                    for name, change in each.changes.items()
                ],
            }
            for each in found
        ]  # fmt: skip
        render.emit_json({"schema": SCHEMA, "deltas": rows})
        return
    for each in found:
        count = render.plural(len(each.changes), "tensor")
        render.emit_text(f"{each.name}: {each.title}: {count}, {render.size(each.nbytes)}")
        changes = each.changes.items()
        cells = [[name, f"{one.changed():,}", render.size(one.nbytes)] for name, one in changes]
        if cells:
            right = ["bytes changed", "size"]
            render.emit_text("", *render.table(["name", *right], cells, right), "")


@command.command("squash")
@click.argument("deltas", metavar="DELTA...", nargs=-1, required=True)
@click.argument("out", metavar="OUT")
@of("delta squash")
def squash(deltas: tuple[str, ...], out: str, base: str | None, as_json: bool) -> None:
    """Combine several consecutive deltas into one delta."""
    import ckptkit

    made = ckptkit.squash_delta(deltas, out, base=base)
    if as_json:
        _emit_made(made)
        return
    count = render.plural(len(made.changed), "tensor")
    versions = f"version {made.version:06d}, from version {made.base_version:06d}"
    render.emit_text(f"wrote {made.path}: {versions}: {count}, {render.size(made.written)}")


@command.command("verify")
@click.argument("base", metavar="BASE")
@click.argument("deltas", metavar="DELTA...", nargs=-1, required=True)
@of("delta verify")
def verify(base: str, deltas: tuple[str, ...], as_json: bool) -> int:
    """Find the version of a checkpoint by comparing checksums.

    The exit code is 1 unless all changed tensors have the same version.
    """
    import ckptkit

    found = ckptkit.verify_delta(base, deltas)
    code = 0 if found.version is not None else DIFFERENT
    if as_json:
        facts = {"version": found.version, "recorded": found.recorded, "versions": found.versions}
        render.emit_json({"schema": SCHEMA, "position": facts})
        return code
    if found.version is not None:
        count = render.plural(len(found.versions), "tensor")
        odd = found.recorded not in (None, found.version)
        but = f", and its folder records version {found.recorded:06d}" if odd else ""
        render.emit_text(f"{base}: at version {found.version:06d}: {count} compared{but}")
        return code
    render.emit_text(f"{base}: tensors have no common version:")
    for name, versions in found.versions.items():
        where = ", ".join(f"{each:06d}" for each in versions) or "no matching version"
        render.emit_text(f"  {name}: {where}")
    return code
