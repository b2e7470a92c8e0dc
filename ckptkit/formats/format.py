"""The interface of a format, and `Probe`, the opened file or folder that formats recognize.

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


# The commands that recover a damaged file. Hints and `Format.recoverable` use these constants.
RECOVER = "recover"
UNVERIFIED = "recover --unverified"


class Probe:
    """An opened file or folder, with the headers that recognition and reading both need."""

    def __init__(self, place: ByteSource | Folder, options: Options = DEFAULT) -> None:
        self.place = place
        self.name = place.name
        self.options = options
        self.is_folder = isinstance(place, Folder)
        self.kept: dict[object, object] = {}  # cache that related readers share

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
        """Return the first 512 bytes of a file (fewer if it is shorter); b"" for a folder."""
        return b"" if self.is_folder else self.source.read(0, min(512, self.source.size))

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names in a folder; empty for a file."""
        return frozenset(self.folder.list() if self.is_folder else ())

    @cached_property
    def zip(self) -> ZipDirectory | None:
        """Return the directory of a zip file, None for other files. Raises CorruptError."""
        return read_directory(self.source) if self.head.startswith(MAGIC) else None


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry that could not be recovered: its dotted path, its kind, and the reason."""

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
    """Bytes to verify. If the file records no CRC-32, `verify` only reads and inflates the bytes.

    ``what`` names the bytes in messages. If the checkpoint is a folder, ``file`` is the file that
    contains the bytes.
    """

    what: str
    record: Record
    crc32: int | None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect found by `check`: message, file in the folder, affected tensors, hint."""

    what: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Lazy:
    """A function named ``"module:function"``; the first call imports the module."""

    place: str

    def __call__(self, *args: Any) -> Any:
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"ckptkit.formats.{module}"), name)(*args)


@dataclass(frozen=True)
class LazyByName(Lazy):
    """A lazy function that returns None if the file name has none of the endings."""

    endings: tuple[str, ...]

    def __call__(self, probe: Probe) -> Any:
        return super().__call__(probe) if probe.name.endswith(self.endings) else None


@dataclass(frozen=True, slots=True)
class Format:
    """One on-disk format.

    If the format lacks a capability, the field is None. Generic code tests the field, never the
    name of the format.

    ``matches`` returns whether a file has this format. If not, it returns False without raising.
    ``read`` reads a file that matched. It reuses the headers that the probe has parsed.
    ``layout`` plans the output and writes nothing.
    ``readable`` is False if ckptkit recognizes the format but cannot read it. `read` then raises an
    error whose hint is the advice.
    ``pickles`` yields the pickles for `scan`; it returns None if the file has another format.
    ``recover`` returns the intact tensors of a damaged file, or None if the file has another
    format. If the second argument is True, the result includes tensors that cannot be verified.
    ``recoverable`` reads headers only. It returns the command that may recover tensors:
    `RECOVER`, `UNVERIFIED` or "".
    ``check`` reads headers only. It yields each byte range that has a checksum, and each defect;
    `read` raises the first defect.
    ``patch`` plans an in-place edit of a local file, or returns None if many bytes differ. Like
    `layout`, it writes nothing. Both return the same notes.
    """

    name: str
    title: str  # name in output for users
    matches: Callable[[Probe], bool]
    read: Callable[[Probe], Checkpoint]
    # suffixes of its files; if it has a layout, they select it as the output format
    suffixes: tuple[str, ...] = ()
    is_folder: bool = False
    loaded_by_torch: bool = False  # torch.load or torch.jit.load reads it
    layout: Callable[[Checkpoint, Options], Plan] | None = None
    readable: bool = True
    # recognized by listing a folder; web servers do not list files
    listed: bool = False
    shards: bool = False  # its layout writes a folder of files of at most `shard_size`
    # stores the whole tree: "always", if "asked", "nested" (without ties), "never"
    everything: str = "never"
    # contains a program, which no other format can store; never edited in place
    program: bool = False
    folder_as: str | None = None  # name of the format for a folder of shards in this format
    # the format of an edited copy, if this one has no layout
    rewrite_as: str | None = None
    distributed: bool = False  # several ranks wrote its files
    chooses: bool = False  # a container: reads one inner checkpoint, which has its own format
    noun: str = ""  # name in a diagnosis, if torch.load rejects the file or needs an argument
    unwritten: str = ""  # if there is no layout: the program that writes this format
    torch_error: str = ""  # error of torch.load (with weights_only=True, if loaded_by_torch)
    recover: Callable[[Probe, bool], Recovered | None] | None = None
    recoverable: Callable[[Probe], str] | None = None
    check: Callable[[Probe], Iterator[CheckedPart | Defect]] | None = None
    patch: Callable[[Checkpoint, Checkpoint, Options], Patch | None] | None = None
    pickles: Callable[[Probe], Iterator[Found] | None] | None = None


# Opening


PathLike = str | os.PathLike[str]


def open_place(path: PathLike, *, undo: bool = False) -> ByteSource | Folder:
    """Open the file or folder at `path`.

    If an in-place edit of the file, or of the folder of an index, was interrupted: `undo` restores
    the original; without `undo`, raises an InputError. Raises PathError.
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
    """Raise InputChangedError if the files of `place` changed while the body read them.

    Writers do not wait for readers, so the body may have combined old and new bytes. `remote` also
    checks files at URLs, unless every response of the server has already been compared. For a
    checkpoint in memory, `place` is None.
    """
    if place is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if changed := _changing(place, remote):
            raise changed from error
        raise
    if changed := _changing(place, remote):
        raise changed


def _changing(place: ByteSource | Folder, remote: bool) -> CkptkitError | None:
    for each in place.opened() if isinstance(place, Folder) else (place,):
        if each.compares_answers or (each.remote and not remote):
            continue
        try:
            each.check_unchanged()
            if isinstance(each, LocalFile) and has_journal(each.path):
                from ckptkit.publish import in_place

                in_place.check_journals(each.path)
        except InputChangedError:
            hint = "run the command again when no program writes to it"
            return InputChangedError("changed while it was read", where=each.name, hint=hint)
        except InputError as error:
            return error
    return None
