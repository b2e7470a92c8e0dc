"""The contract of a format, and the probe that identifies a file.

Files may be edited in place while they are read: `steady` reports it if reading fails.
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


# The commands that recover a damaged file.
RECOVER = "recover"
UNVERIFIED = "recover --unverified"


class Probe:
    """A file or folder to be identified; the formats and the reader share what has been parsed."""

    def __init__(self, place: ByteSource | Folder, options: Options = DEFAULT) -> None:
        self.place = place
        self.name = place.name
        self.options = options
        self.is_folder = isinstance(place, Folder)
        self.kept: dict[
            object, object
        ] = {}  # what a family of readers shares, by whatever they agree on

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
        """The first 512 bytes, fewer in a short file; empty for a folder."""
        return b"" if self.is_folder else self.source.read(0, min(512, self.source.size))

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in a folder; empty for a file."""
        return frozenset(self.folder.list() if self.is_folder else ())

    @cached_property
    def zip(self) -> ZipDirectory | None:
        """The directory of a zip file, None if it is not one. Raises what is wrong with it."""
        return read_directory(self.source) if self.head.startswith(MAGIC) else None


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry that could not be recovered: its dotted path, its kind, and the reason."""

    path: str
    what: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Recovered:
    """A recovered checkpoint, and the list of losses."""

    checkpoint: Checkpoint
    lost: tuple[Loss, ...]

    def __repr__(self) -> str:
        return f"<Recovered {self.checkpoint.heading}; {len(self.lost):,} lost>"


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """Bytes to be verified: by their CRC-32 if it is known, else by reading and inflating them.

    ``what`` names them in messages, ``file`` is the file in a folder that they are in.
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
    """A function of this room by its place, ``"module:function"``, imported at the first call."""

    place: str

    def __call__(self, *args: Any) -> Any:
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"ckptkit.formats.{module}"), name)(*args)


@dataclass(frozen=True)
class LazyByName(Lazy):
    """A lazy function that returns None for files whose names have none of the endings."""

    endings: tuple[str, ...]

    def __call__(self, probe: Probe) -> Any:
        return super().__call__(probe) if probe.name.endswith(self.endings) else None


@dataclass(frozen=True, slots=True)
class Format:
    """One on-disk format.

    What it cannot do is None; generic code asks for the capability, never for the name.

    ``matches`` identifies a file and does not raise for one of another format; after a match, every
    failure of `read` is an error. `read` takes the probe, so that what identification parsed is not
    parsed twice. ``layout`` is pure: it plans and writes nothing. A format that is not ``readable``
    is recognized all the same; its `read` raises an error with the advice. ``pickles`` finds what
    `scan` traces, None if the file is of another format. Raises what is wrong with it. ``recover``
    recovers the intact part of a damaged file, None if the file is of another format; with
    ``True``, also what cannot be verified. ``recoverable`` reads no tensor and returns the command
    that may recover something: `RECOVER`, `UNVERIFIED`, or "". ``check`` yields what can be checked
    beyond reading: every part with a checksum, and all findings, where `read` raises the first. It
    reads headers alone. ``patch`` plans the edit in place of a local file, as it was read, if few
    bytes differ; None if many do. It is as pure as `layout`, and gives the same notes.
    """

    name: str
    title: str  # for people
    matches: Callable[[Probe], bool]
    read: Callable[[Probe], Checkpoint]
    # suffixes of its files; with a layout, those that choose it for writing
    suffixes: tuple[str, ...] = ()
    is_folder: bool = False
    loaded_by_torch: bool = False  # torch.load or torch.jit.load reads it
    layout: Callable[[Checkpoint, Options], Plan] | None = None
    readable: bool = True
    # found by listing a folder's files, which a web server does not offer
    listed: bool = False
    shards: bool = False  # its layout is a folder of files of at most `shard_size`
    # keeps the whole tree: "always", when "asked", "nested" (but not ties), "never"
    everything: str = "never"
    # holds a program, which no other format keeps: it is not changed in place
    program: bool = False
    folder_as: str | None = None  # the format of a folder of such files
    # the format of an edited copy, if it has no layout of its own
    rewrite_as: str | None = None
    distributed: bool = False  # it is the parts that several processes wrote
    chooses: bool = False  # it stands for one of the checkpoints in it
    noun: str = ""  # its name in a diagnosis, where torch.load does not take it as it is
    unwritten: str = ""  # without a layout, what makes such files
    torch_error: str = ""  # how torch.load refuses it; weights_only=True, if it is loaded_by_torch
    recover: Callable[[Probe, bool], Recovered | None] | None = None
    recoverable: Callable[[Probe], str] | None = None
    check: Callable[[Probe], Iterator[CheckedPart | Defect]] | None = None
    patch: Callable[[Checkpoint, Checkpoint, Options], Patch | None] | None = None
    pickles: Callable[[Probe], Iterator[Found] | None] | None = None


# Opening


PathLike = str | os.PathLike[str]


def open_place(path: PathLike, *, undo: bool = False) -> ByteSource | Folder:
    """Open the file or folder at `path`, which must not be in the middle of an edit in place.

    With `undo` an interrupted edit is undone; without, it is an error. An index stands for the
    files of its folder. Raises PathError, InputError.
    """
    edited = os.fspath(path)
    if edited.endswith(".index.json"):
        edited = os.path.dirname(edited) or os.curdir
    if not is_url(path) and has_journal(edited):
        from ckptkit.publish import in_place

        in_place.check_journals(edited, undo)
    return open_unchecked(path)


def open_unchecked(path: PathLike) -> ByteSource | Folder:
    """Open what is at `path` as it is, even in the middle of an edit in place.

    Raises PathError for what is neither a file nor a folder.
    """
    if is_url(path):
        from ckptkit.remote.files import open_url  # local files do not pay for it

        return open_url(os.fspath(path))
    if path == STREAM and typed("here", ""):
        return standard_input()
    return Folder(path) if os.path.isdir(path) else LocalFile(path)


@contextmanager
def steady(place: ByteSource | Folder | None, *, remote: bool = False) -> Iterator[None]:
    """Raise InputChangedError at the end, or for another error, if the files changed meanwhile.

    Writers do not wait for a reader: bytes from before and after a change may have been read
    together. With `remote`, files at URLs are looked at again, unless each answer of their server
    has been compared already. None is a checkpoint in memory.
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
            hint = "run the command again when it is no longer written to"
            return InputChangedError("was changed while it was read", where=each.name, hint=hint)
        except InputError as error:
            return error
    return None
