"""Read, transform, plan, publish: the program in one function."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from ckptkit import formats
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.format import Format, Salvaged, WriteOptions
from ckptkit.plan import Plan
from ckptkit.remote import urls

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Unpack

    from ckptkit.publish import Published

PathLike = str | os.PathLike[str]
Step = Callable[[Checkpoint], Checkpoint]


class Publishing(TypedDict, total=False):
    """How to write, whatever the format."""

    force: bool  # replace an existing destination
    durable: bool  # wait for the disk
    verify: bool  # read back what was written before it appears
    allow_expand: bool  # output may be many times larger than the storages it comes from
    executor: Executor | None  # where the work is done; its workers must see the same files
    progress: Callable[[int, int], None] | None  # told bytes written since the last time, and bytes in all


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done: the checkpoint as it was written, and the plan."""

    checkpoint: Checkpoint
    plan: Plan
    format: str
    path: str
    published: Published | None  # None: a dry run

    @property
    def notes(self) -> tuple[str, ...]:
        """What transforms did."""
        return self.checkpoint.notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What reading and transforming noticed. What the format could not keep is in `plan.notes`."""
        return self.checkpoint.warnings


def open_checkpoint(path: PathLike | Checkpoint, *, key: str | None = None) -> Checkpoint:
    """The checkpoint in a file or folder: headers are read, no tensor is, and torch is not imported.

    `key` names the entry to take as the weights (``"model"``, ``"ema.generator"``). Raises an InputError for what is
    not a checkpoint, PathError for what is not there.
    """
    checkpoint = path if isinstance(path, Checkpoint) else formats.read(formats.open_place(path))
    return checkpoint if key is None else checkpoint.with_key(key)


def recover(path: PathLike) -> Salvaged:
    """What is whole of a cut or damaged file: a checkpoint without the tensors whose bytes are gone, and their list.

    Reads what has checksums. Raises CorruptError if no tensor is whole, UnsupportedError for a format that has no
    way of telling.
    """
    return formats.salvage(formats.open_place(path))


def save(
    checkpoint: Checkpoint,
    path: PathLike,
    *,
    format: str | None = None,
    options: WriteOptions | None = None,
    dry_run: bool = False,
    **publishing: Unpack[Publishing],
) -> Conversion:
    """Write a checkpoint to `path`, in `format` or in the one that the suffix says.

    Nothing is written before the plan is complete, and `path` appears whole or not at all. Further arguments, all off
    by default: ``force``, ``durable``, ``verify``, ``allow_expand``, ``executor``, ``progress``
    (:class:`Publishing`). Raises OutputExistsError without ``force``, OutputError where it cannot be written.
    """
    chosen = formats.for_writing(path, format, keep=checkpoint.format, shards=_in_shards(options))
    return _publish(checkpoint, chosen, path, options, dry_run, publishing, replace_source=False)


def convert(
    source: PathLike | Checkpoint,
    destination: PathLike | None,
    *steps: Step,
    in_place: bool = False,
    keep_format: bool = True,
    key: str | None = None,
    format: str | None = None,
    options: WriteOptions | None = None,
    dry_run: bool = False,
    **publishing: Unpack[Publishing],
) -> Conversion:
    """Read `source`, apply the steps in order, write `destination`, or the source itself if `in_place`.

    With `keep_format`, a destination of unknown suffix gets the format of the source. The rest is as for `save`.
    """
    checkpoint = open_checkpoint(source, key=key)
    name = checkpoint.name
    if in_place and (name is None or not os.path.isfile(name)):
        raise UsageError("only a single file on this machine can be changed in place", where=name, hint="name a DST")
    if in_place and formats.holds_program(checkpoint):
        raise UsageError("is a program, of which only the weights can be written", where=name, hint="name a DST")
    path = name if in_place and name is not None else destination
    if path is None:
        raise UsageError("there is no destination")
    keep = checkpoint.format if keep_format or in_place else None
    chosen = formats.for_writing("" if in_place else path, format, keep, shards=_in_shards(options))
    checkpoint = _changed(checkpoint, steps)
    return _publish(checkpoint, chosen, path, options, dry_run, publishing, replace_source=in_place)


def _in_shards(options: WriteOptions | None) -> bool:
    return options is not None and options.shard_size is not None


def _changed(checkpoint: Checkpoint, steps: tuple[Step, ...]) -> Checkpoint:
    """What the steps make of a checkpoint. Every error says of which."""
    name = checkpoint.name
    try:
        for step in steps:
            checkpoint = step(checkpoint)
    except CkptkitError as error:
        raise error.at(name or "") from error.__cause__
    return checkpoint


def _publish(
    checkpoint: Checkpoint,
    format: Format,
    path: PathLike,
    options: WriteOptions | None,
    dry_run: bool,
    publishing: Publishing,
    replace_source: bool,
) -> Conversion:
    plan = formats.layout(checkpoint, format, options or WriteOptions())
    published = None
    if not dry_run:
        from ckptkit.publish import publish  # not needed by those who only read

        if replace_source:
            publishing["force"] = True
        published = publish(plan, path, replace_source=replace_source, **publishing)
    return Conversion(checkpoint, plan, format.name, urls.shown(os.fspath(path)), published)
