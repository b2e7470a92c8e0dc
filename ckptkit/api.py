"""The functions of the Python API that open, save, convert and recover checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ckptkit import formats
from ckptkit.core import arguments
from ckptkit.core.bytesource import ByteSource, Folder, Memory, Range
from ckptkit.core.checkpoint import Checkpoint, NoOpWarning, Source, opened
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.plan import OutputFile, Patch, Plan
from ckptkit.core.text import (
    argument,
    in_folder,
    is_url,
    output_name,
    shell_command,
    shown_url,
    typed,
    without_query,
)
from ckptkit.core.tree import collector_paused, walk
from ckptkit.core.weights import has_tensors
from ckptkit.formats.format import RECOVER, Format, Probe, Recovered, open_place, steady

if TYPE_CHECKING:
    from ckptkit.publish.preflight import DamageError
    from ckptkit.publish.publish import Published

PathLike = str | os.PathLike[str]
T = TypeVar("T")
_OTHERS = "if no other machine is writing this file"
Step = Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """The result of a conversion: the written checkpoint and its plan."""

    checkpoint: Checkpoint
    plan: Plan | Patch
    format: str
    path: str
    published: Published | None  # None for a dry run
    copied: tuple[str, ...] = ()  # copied files, such as config.json

    def __repr__(self) -> str:
        done = "planned" if self.published is None else "written"
        return f"<Conversion {self.path}: {self.format}, {self.plan!r} {done}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the changes that the edits made."""
        return self.checkpoint.notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from reading, transforming and writing.

        `plan.notes` lists the losses of the format.
        """
        left = () if self.published is None else self.published.left
        found = [
            *self.checkpoint.warnings,
            *(f"{name} is a stale temporary file; delete it {_OTHERS}" for name in left),
        ]
        damaged = () if self.published is None else self.published.damaged
        if damaged:
            from ckptkit.formats.recovering import damaged_in

            names = damaged_in(self.checkpoint, damaged)
            found.append(
                "tensors are damaged in the input, and were copied unchanged with their old "
                f"checksums: {names}; {_way_out(damaged[0])}"
            )
        return tuple(found)


def open_checkpoint(source: Source, options: Options | None = None, **changes: Any) -> Checkpoint:
    """Open a checkpoint. Read only headers, no tensors, and do not import torch.

    `source` is the path or URL of a file or folder, the bytes of a file, a binary file object, a
    mapping in memory (a state_dict), or a Checkpoint. Pass the options as one :class:`Options`
    object or as keyword arguments. ``key`` is the path of the entry with the weights (``"model"``,
    ``"ema.generator"``). If the source is a folder with the files of several ranks, ``parts`` and
    ``copies`` control how `open` combines the files.

    ``with ckptkit.open(path) as ck`` closes the files at the end of the block. Raises InputError if
    the source is not a checkpoint. Raises MissingFileError (a FileNotFoundError) if the source does
    not exist.
    """
    options = made(options, changes)
    if isinstance(source, Checkpoint):
        checkpoint = source
    elif isinstance(source, Mapping):
        from ckptkit.pickles import from_python

        checkpoint = from_python.checkpoint(source)
    else:
        checkpoint = _read(source, partial(formats.read, options=options))
    return checkpoint if options.key is None else checkpoint.with_key(options.key)


@contextmanager
def reading(source: Source, options: Options | None = None, **changes: Any) -> Iterator[Checkpoint]:
    """Open a checkpoint to report on its content, and close it afterwards.

    Raises InputChangedError at the end if the files changed since they were opened, because the
    report may mix old and new bytes. Therefore, print the report after the ``with`` block. If
    `source` is a Checkpoint, it stays open.
    """
    checkpoint = open_checkpoint(source, options, **changes)
    kept = isinstance(source, Checkpoint)
    with nullcontext() if kept else closing(checkpoint), steady(checkpoint.source, remote=True):
        yield checkpoint


def _read(source: object, read: Callable[[ByteSource | Folder], T], *, undo: bool = False) -> T:
    """Open a file or folder, and return the result of `read`. If `read` fails, close the files.

    With `undo`, restore the original file first if an in-place edit of the file was interrupted.
    """
    place: ByteSource | Folder
    if isinstance(source, (bytes, bytearray, memoryview)):
        place = Memory(bytes(source), "<bytes>")
    elif hasattr(source, "read") and hasattr(source, "seek"):
        from ckptkit.core.bytesource import FileObject

        place = FileObject(source)  # type: ignore[arg-type]
    else:
        place = open_place(arguments.path("source", source), undo=undo)
    try:
        with collector_paused(), steady(place):
            return read(place)
    except BaseException:
        place.close()
        raise


def recover(source: Source, *, unverified: bool = False) -> Recovered:
    """Return the intact tensors of a damaged file as a checkpoint, and the list of lost entries.

    A tensor is intact if its bytes match the checksum in the file. Some formats have no checksums,
    only offsets and lengths. In such a file, `recover` cannot detect a wrong offset or length, and
    may read the bytes of a tensor from the wrong position. The warnings of the checkpoint list
    facts that `recover` cannot prove, such as whether all tensors are from the same save. With
    `unverified`, `recover` also keeps tensors that it cannot verify.

    Raises CorruptError if no tensor is intact. Raises UnsupportedError if `recover` does not
    support the format.
    """
    arguments.flags(unverified=unverified)
    return _read(source, partial(formats.recover, unverified=unverified), undo=True)


def save(
    checkpoint: Source, path: PathLike | IO[bytes], options: Options | None = None, **changes: Any
) -> Conversion:
    """Write a checkpoint to `path`.

    The option ``format`` is the name of the output format. Without ``format``, the suffix of `path`
    determines the format. `path` can also be a binary file object, such as io.BytesIO. For a file
    object, the default format is the format of `checkpoint`, and the output must be one file.

    `checkpoint` is a Checkpoint, any source that `open` accepts, or a mapping of torch tensors,
    numpy arrays, tensors of checkpoints and plain values, nested to any depth. If tensors share
    memory, they also share memory in the output. `save` plans the complete output before it writes
    the first byte. An incomplete output never appears at `path`. Pass the options as one
    :class:`Options` object or as keyword arguments, such as ``save(ck, path, force=True)``.

    Raises OutputExistsError (a FileExistsError) if `path` exists, unless ``force`` is true. Raises
    OutputError if `save` cannot write the output.
    """
    options = made(options, changes)
    checkpoint = opened(checkpoint)
    if arguments.is_stream(path):
        from shutil import copyfileobj

        stream, name = path, str(getattr(path, "name", "<stream>"))
        return streamed(
            lambda place: save(checkpoint, place, options),
            name,
            lambda file: copyfileobj(file, stream),
        )
    path = arguments.path("destination", path)
    chosen = _format(path, checkpoint.format, options)
    _check_suffix(path, checkpoint, chosen, options)
    return _publish(checkpoint, chosen, path, options)


def streamed(
    write: Callable[[str], Conversion], name: str, copy: Callable[[IO[bytes]], None]
) -> Conversion:
    """Write the output to a temporary file, then call `copy` to copy the file to a stream.

    A plan can write the beginning of its output last, so the stream cannot be written directly. If
    the output consists of several files, raises UsageError before `copy` is called.
    """
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="ckptkit-") as folder:
        path = os.path.join(folder, "output")
        try:
            done = write(path)
        except CkptkitError as error:
            error.where = name if error.where == path else error.where
            raise
        if isinstance(done.plan, Plan) and done.plan.is_folder:
            what = f"{done.format} writes a folder, but a stream is a single file"
            raise UsageError(what, where=name, hint="name a folder")
        if done.published is not None:
            with open(path, "rb") as file:
                copy(file)
    return replace(done, path=name)


def convert(
    source: Source,
    destination: PathLike | None = None,
    *steps: Step,
    options: Options | None = None,
    **changes: Any,
) -> Conversion:
    """Read `source`, apply the steps in order, and write the result to `destination`.

    Pass the options as one :class:`Options` object or as keyword arguments. With ``in_place``,
    `convert` changes the source and needs no `destination`. If `destination` is a folder, the
    output becomes a file in this folder.

    With ``keep_format`` (the default), `convert` keeps the format of the source if `destination`
    has no suffix, or the suffix of the source. If the change is small, ``keep_format``
    with ``in_place`` writes only the changed bytes. Without ``keep_format``, `convert` always
    rewrites the complete file.

    Raises UnsupportedError for a single rank's file, unless ``part_only`` is true.
    """
    options = made(options, changes)
    if options.in_place:
        return _rewrite(source, steps, options)
    checkpoint = _opened_to_write(source, options)
    if destination is None:
        raise UsageError("the destination is missing", hint="in_place=True changes the source")
    path = arguments.path("destination", destination)
    folder = checkpoint.source if isinstance(checkpoint.source, Folder) else checkpoint.folder
    own = checkpoint.format
    # A folder remains a folder.
    keep = own if options.keep_format or formats.is_folder(own) else None
    if folder is not None:
        from ckptkit.formats import sidecars
        from ckptkit.formats.distributed.training_state import beside

        checkpoint = beside(checkpoint, folder, take=options.all)
        keep = formats.in_folder(own) or keep
    chosen = _format(path, keep, options)
    path = _in_folder(path, checkpoint, chosen)
    _check_suffix(path, checkpoint, chosen, options)
    dtype = sidecars.of_weights(checkpoint) if folder is not None and steps else None
    checkpoint = _changed(checkpoint, steps, options.strict)
    copied: tuple[str, ...] = ()
    others = Plan(())
    if checkpoint.beside is not None and chosen.shards:
        from ckptkit.formats.distributed.training_state import as_files

        options = replace(options, all=False)
        checkpoint, others = as_files(checkpoint, options)
    if folder is not None and chosen.is_folder and options.sidecars:
        checkpoint, copied = sidecars.with_sidecars(checkpoint, folder)
        checkpoint = sidecars.with_dtype(checkpoint, dtype)
    copied = (*copied, *(file.name for file in others.files))
    return replace(_publish(checkpoint, chosen, path, options, others=others), copied=copied)


def _opened_to_write(source: Source, options: Options) -> Checkpoint:
    """Open `source` and check that `convert` can write the checkpoint.

    Without ``keep_format``, `source` must contain the complete checkpoint. With ``part_only``,
    `source` can be a single rank's file.
    """
    checkpoint = open_checkpoint(source, options)
    if options.key is not None:
        _ = checkpoint.selection  # raises an error for a wrong key
    if options.part_only:
        from ckptkit.formats.distributed.parts import alone

        return alone(checkpoint)
    return checkpoint if options.keep_format else checkpoint.require_complete()


def _rewrite(source: Source, steps: tuple[Step, ...], options: Options) -> Conversion:
    """Replace the source by the result of the steps. If few bytes change, write only these
    bytes."""
    if isinstance(source, (str, os.PathLike)):
        source = _read(source, formats.read, undo=not options.dry_run)
    checkpoint = _opened_to_write(source, options)
    path = _own_place(checkpoint, options.format)
    chosen = _format("", checkpoint.format, options)
    # Without keep_format, release the old checkpoint to save memory.
    before = checkpoint if options.keep_format else None
    checkpoint = _changed(checkpoint, steps, options.strict)
    patch = None if before is None else _patch(before, checkpoint, chosen, options)
    if patch is not None:
        from ckptkit.publish import in_place

        done = in_place.apply_all((patch,), options)
        written = None if options.dry_run else done
        return Conversion(checkpoint, patch, chosen.name, patch.base.name, written)
    if os.path.islink(path):
        kept = f"replaced the symlink; its target {os.readlink(path)} is unchanged"
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, kept))
    return _publish(checkpoint, chosen, path, options, replace_source=True)


def _format(path: str, keep: str | None, options: Options) -> Format:
    return formats.for_writing(path, options.format, keep, shards=options.shard_size is not None)


def _check_suffix(path: str, checkpoint: Checkpoint, chosen: Format, options: Options) -> None:
    """Raise UsageError if the output has an unknown suffix, such as ``run.txt``.

    These names are valid and do not change the output format: a name without a suffix, a name with
    the suffix of the source, and a name that contains a known suffix (``run.pth2``).
    """
    name = without_query(path).replace(os.sep, "/").rpartition("/")[2].lower()
    suffix = os.path.splitext(name)[1]
    own = os.path.splitext(without_query(checkpoint.name or ""))[1].lower()
    is_known = suffix == own or any(known in name for known in chosen.suffixes)
    if options.format is None and not chosen.is_folder and suffix[1:2].isalpha() and not is_known:
        raise formats.unknown_suffix(path)


def _in_folder(path: str, checkpoint: Checkpoint, format: Format) -> str:
    """Return the path of the output. If `path` is a folder, the output is a file in this folder
    with the name of the source, like the output of `cp`."""
    remote = is_url(path)
    is_folder = path.endswith((os.sep, "/")) or (not remote and os.path.isdir(path))
    source = without_query(checkpoint.name or "").replace(os.sep, "/")
    name = source.rstrip("/").rpartition("/")[2]
    if format.is_folder or not is_folder or name in ("", ".", "..") or name.startswith("<"):
        return path
    name = formats.named(name, format.suffixes)
    return in_folder(path, name) if remote else os.path.join(path, name)


def _own_place(checkpoint: Checkpoint, format: str | None) -> str:
    """Return the path of the file to edit in place. Raises UsageError if the source cannot be
    edited in place."""
    name = checkpoint.name
    if name is None or not os.path.isfile(name):
        why = "cannot edit a folder or a remote file in place; name a single local file"
    elif isinstance(checkpoint.source, ByteSource) and checkpoint.source.whole is not None:
        why = "cannot edit a compressed file in place"
    elif formats.holds_program(checkpoint):
        why = "cannot edit a TorchScript program in place; ckptkit writes only its weights"
    else:
        expected = formats.for_writing(name, None, checkpoint.format).name
        if format in (None, expected):
            return name
        why = f"has the suffix of {expected}, but the output format is {format}"
    raise UsageError(why, where=name, hint=typed("name another output", "name a destination"))


def _patch(before: Checkpoint, after: Checkpoint, format: Format, options: Options) -> Patch | None:
    """Return the in-place edit of the file, or None if the file must be rewritten."""
    from ckptkit.publish.in_place import can_patch, fits

    if format.name != before.format or before.name is None or not can_patch(before.name):
        return None
    with steady(before.source):
        patch = formats.patch(before, after, format, options)
    return patch if patch is not None and fits(patch) else None


def _changed(checkpoint: Checkpoint, steps: tuple[Step, ...], strict: bool) -> Checkpoint:
    """Apply the steps to the checkpoint. Error messages contain the name of the checkpoint.

    Raises UsageError if the steps drop all tensors. A step may extract an entry without tensors. If
    `strict` is true, also raises UsageError for a step that is a no-op.
    """
    name, root = checkpoint.name, checkpoint.root
    try:
        for step in steps:
            if not callable(step):
                raise arguments.wrong("a step", "a function", step)
            changed = step(checkpoint)
            if not isinstance(changed, Checkpoint):
                raise arguments.wrong("the result of a step", "a Checkpoint", changed)
            new = changed.warnings[len(checkpoint.warnings) :] if strict else ()
            if nothing := next((each for each in new if isinstance(each, NoOpWarning)), None):
                hint = f"{typed('--strict', 'strict')}: a no-op edit is an error"
                raise UsageError(nothing, hint=hint)
            checkpoint = changed
        after = checkpoint.root
        is_lost = after is not root and not has_tensors(after) and has_tensors(root)
        if is_lost and all(node is not after for _, node in walk(root)):  # not an entry
            raise UsageError(
                "the edits drop all tensors",
                hint="`ckptkit inspect {where}` lists its entries",
            )
    except CkptkitError as error:
        raise error.at(name or "") from error.__cause__
    return checkpoint


def _publish(
    checkpoint: Checkpoint,
    format: Format,
    path: PathLike,
    options: Options,
    *,
    replace_source: bool = False,
    others: Plan | None = None,
) -> Conversion:
    plan = formats.layout(checkpoint, format, options)
    if plan.is_folder:
        files = tuple(OutputFile(name, (data,)) for name, data in checkpoint.companions)
        plan = replace(plan, files=(*plan.files, *files))
    if others is not None:
        files, notes = (*plan.files, *others.files), (*plan.notes, *others.notes)
        plan = replace(plan, files=files, notes=notes)
    from ckptkit.publish.preflight import DamageError  # not needed to read files
    from ckptkit.publish.publish import publish

    try:
        published = publish(
            plan, path, options, replace_source=replace_source, origin=checkpoint.source
        )
    except DamageError as error:
        raise _explained(error, checkpoint) from None
    done = None if options.dry_run else published
    return Conversion(checkpoint, plan, format.name, shown_url(os.fspath(path)), done)


def _explained(error: DamageError, checkpoint: Checkpoint) -> DamageError:
    """Add the names of the damaged tensors and a hint to the error."""
    from ckptkit.formats.recovering import damaged_in

    if names := damaged_in(checkpoint, error.damaged):
        error.message += f" ({names})"
    error.hint = f"--no-check writes damaged tensors too; {_way_out(error.damaged[0])}"
    return error


def _way_out(damaged: Range) -> str:
    """Return a hint for a file with a damaged tensor."""
    path = damaged.source.name
    if formats.recoverable(Probe(damaged.source)) != RECOVER:
        return "download or copy the file again"
    command = shell_command(("ckptkit", "recover", *argument(path), output_name(path, "recovered")))
    return f"to save the intact tensors: {command}"
