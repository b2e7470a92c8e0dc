"""The interface of a format, and `Probe`, an opened file or folder.

If another process edits a file in place while ckptkit reads it, `steady` raises InputChangedError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptkit.core.bytesource import (
    STREAM,
    ByteSource,
    Folder,
    LocalFile,
    Record,
    has_journal,
    standard_input,
)
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, InputChangedError, InputError
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.plan import Patch, Plan
from ckptkit.core.text import is_url, typed
from ckptkit.formats.zip_reader import MAGIC, ZipDirectory, read_directory

if TYPE_CHECKING:
    from ckptkit.pickles.streams import Found


# Commands that recover a damaged file. Hints and `formats.recoverable` use these constants.
RECOVER = "recover"
UNVERIFIED = "recover --unverified"


class Probe:
    """An opened file or folder. Caches the headers that `matches` and `read` of a format need."""

    def __init__(self, place: ByteSource | Folder, options: Options = DEFAULT) -> None:
        self.place = place
        self.name = place.name
        self.options = options
        self.is_folder = isinstance(place, Folder)
        self.kept: dict[object, object] = {}  # results that `matches` stores for `read`

    @property
    def source(self) -> ByteSource:
        assert isinstance(self.place, ByteSource)
        return self.place

    @property
    def folder(self) -> Folder:
        assert isinstance(self.place, Folder)
        return self.place

    @cached_property
    def head(self) -> bytes:
        """Return the first 512 bytes of a file, or the complete file if it is shorter.

        For a folder, return b"".
        """
        return b"" if self.is_folder else self.source.read(0, min(512, self.source.size))

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of the files in a folder. Return no names for a file."""
        return frozenset(self.folder.list() if self.is_folder else ())

    @cached_property
    def zip(self) -> ZipDirectory | None:
        """Return the directory of a zip file. Return None for other files.

        Raises the errors of `read_directory`.
        """
        return read_directory(self.source) if self.head.startswith(MAGIC) else None


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry that could not be recovered: its dotted path, what it is, and why it is lost."""

    path: str
    what: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Recovered:
    """A recovered checkpoint, and the entries that are lost."""

    checkpoint: Checkpoint
    lost: tuple[Loss, ...]

    def __repr__(self) -> str:
        return f"<Recovered {self.checkpoint.heading}; {len(self.lost):,} lost>"


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """Bytes to verify. If ``crc32`` is None, `verify` only reads and decompresses the bytes.

    ``what`` names the bytes in messages. If the checkpoint is a folder, ``file`` is the name of the
    file that contains the bytes.
    """

    what: str
    record: Record
    crc32: int | None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect that `check` found: the message, the file name, the affected tensors and a hint."""

    what: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Lazy:
    """A function named ``"module:function"``; the first call imports the module.

    If `endings` is not empty, a call returns None for a file whose name has none of these endings.
    """

    place: str
    endings: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if self.endings and not args[0].name.endswith(self.endings):
            return None
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"ckptkit.formats.{module}"), name)(*args)


@dataclass(frozen=True, slots=True)
class Format:
    """One on-disk format.

    If the format lacks a capability, the field of this capability is None. Generic code tests the
    field, never the name of the format.

    ``matches`` returns whether a file has this format.
    ``read`` reads a file that matched, and reuses the headers that the probe has parsed.
    ``layout`` plans the output and writes nothing.
    ``readable`` is False if ckptkit recognizes the format but cannot read it. If ``readable`` is
    False, `read` raises an error with a hint.
    ``pickles`` yields the pickles for `scan`, or returns None if the file has another format.
    ``recover`` returns the intact tensors of a damaged file, or None if the file has another
    format. If its second argument is True, the result includes tensors that cannot be verified.
    ``recoverable`` begins like ``recover``, but reads only headers. If it is None, ``recover``
    reads only headers.
    ``check`` reads headers only, and yields each byte range that has a checksum, and each defect.
    For a defective file, `read` raises the first defect.
    ``patch`` plans an in-place edit of a local file, or returns None if many bytes differ. `patch`
    and `layout` return equal notes for equal checkpoints.
    """

    name: str
    title: str  # description of the format in output for users
    matches: Callable[[Probe], bool]
    read: Callable[[Probe], Checkpoint]
    # Suffixes of the format's files. If the format has a `layout`, an output path with one of these
    # suffixes gets this format.
    suffixes: tuple[str, ...] = ()
    is_folder: bool = False
    loaded_by_torch: bool = False  # torch.load or torch.jit.load reads files of this format
    layout: Callable[[Checkpoint, Options], Plan] | None = None
    readable: bool = True
    # ckptkit recognizes the format by the list of files in a folder. Web servers do not list files.
    listed: bool = False
    shards: bool = False  # `layout` writes a folder of files of at most `shard_size` bytes
    # Whether the format stores the whole tree: "always", "asked" (only with --all), "nested"
    # (always, but without ties) or "never".
    everything: str = "never"
    # Files of the format contain a program. No other format can store a program. ckptkit does not
    # edit such files in place.
    program: bool = False
    folder_as: str | None = None  # name of the format of a folder whose shards have this format
    # Name of the format of an edited copy, if this format has no `layout`.
    rewrite_as: str | None = None
    distributed: bool = False  # several ranks wrote the files
    chooses: bool = False  # `read` reads a checkpoint of another format inside the file or folder
    # `ckptkit doctor` calls the file by this noun if torch.load rejects the file or needs an
    # argument.
    noun: str = ""
    unwritten: str = ""  # if `layout` is None: the program that writes this format
    # The error that torch.load raises for files of this format (with weights_only=True, if
    # `loaded_by_torch`).
    torch_error: str = ""
    recover: Callable[[Probe, bool], Recovered | None] | None = None
    recoverable: Callable[[Probe, bool], object] | None = None
    check: Callable[[Probe], Iterator[CheckedPart | Defect]] | None = None
    patch: Callable[[Checkpoint, Checkpoint, Options], Patch | None] | None = None
    pickles: Callable[[Probe], Iterator[Found] | None] | None = None


# Opening


PathLike = str | os.PathLike[str]


def open_place(path: PathLike, *, undo: bool = False) -> ByteSource | Folder:
    """Open the file or folder at `path`.

    If an in-place edit of the file was interrupted, `undo` restores the original. For the index of
    a folder of shards, `undo` restores the files of the folder. Without `undo`, an interrupted edit
    raises an InputError. Raises PathError if `path` is neither a file nor a folder.
    """
    edited = os.fspath(path)
    if edited.endswith(".index.json"):
        edited = os.path.dirname(edited) or os.curdir
    if not is_url(path) and has_journal(edited):
        from ckptkit.publish import in_place

        in_place.check_journals(edited, undo)
    return open_unchecked(path)


def open_unchecked(path: PathLike) -> ByteSource | Folder:
    """Open the file or folder at `path`, even after an interrupted in-place edit.

    Raises PathError if `path` is neither a file nor a folder.
    """
    if is_url(path):
        from ckptkit.remote.files import open_url  # imported only for URLs

        return open_url(os.fspath(path))
    if path == STREAM and typed("here", ""):
        return standard_input()
    return Folder(path) if os.path.isdir(path) else LocalFile(path)


@contextmanager
def steady(place: ByteSource | Folder | None, *, remote: bool = False) -> Iterator[None]:
    """Raise InputChangedError if the files of `place` changed while the `with` body read them.

    Another process can write a file while ckptkit reads it. The body may then have read a mix of
    old and new bytes. If `remote` is true, also check files at URLs. Skip a file if every read of
    the file already detects changes. For a checkpoint in memory, `place` is None.
    """
    try:
        yield
    except Exception as error:
        if changed := _changing(place, remote):
            raise changed from error
        raise
    if changed := _changing(place, remote):
        raise changed


def _changing(place: ByteSource | Folder | None, remote: bool) -> CkptkitError | None:
    sources = place.opened() if isinstance(place, Folder) else filter(None, (place,))
    for each in sources:
        if each.compares_answers or (each.remote and not remote):
            continue
        try:
            each.check_unchanged()
            if isinstance(each, LocalFile) and has_journal(each.path):
                from ckptkit.publish import in_place

                in_place.check_journals(each.path)
        except InputChangedError:
            hint = "run the command again when no other program writes to the file"
            return InputChangedError("changed while it was read", where=each.name, hint=hint)
        except InputError as error:
            return error
    return None
