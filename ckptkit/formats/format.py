"""The contract of a format, and what a sniffer may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptkit.containers.zip_reader import MAGIC, ZipDirectory, read_directory
from ckptkit.core.bytesource import ByteSource, Folder, Record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Patch, Plan

if TYPE_CHECKING:
    from ckptkit.pickles.streams import Found


RECOVER, UNVERIFIED = (
    "recover",
    "recover --unverified",
)  # commands that save what is left of a damaged file


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reader is told about files of many processes.

    ``copies`` of one tensor are compared as far as checksums tell (``compare``), read and compared
    (``check``), or those that differ are passed over (``first``); ``table`` is a file that says how
    the parts were cut.
    """

    copies: str = "compare"
    table: str | None = None


class Probe:
    """A file or folder about to be identified; what one sniffer finds out, the others and the
    reader share."""

    def __init__(self, place: ByteSource | Folder, asked: Asked | None = None) -> None:
        self.place = place
        self.name = place.name
        self.asked = asked or Asked()
        self.kept: dict[
            object, object
        ] = {}  # what a family of readers shares, by whatever they agree on

    @property
    def is_folder(self) -> bool:
        return isinstance(self.place, Folder)

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
        """The first 512 bytes, fewer if there are fewer; none of a folder."""
        return b"" if self.is_folder else self.source.read(0, min(512, self.source.size))

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in a folder; none of a file."""
        return frozenset(self.folder.list() if self.is_folder else ())

    @cached_property
    def zip(self) -> ZipDirectory | None:
        """The directory of a zip file, None if it is not one. Raises what is wrong with it."""
        return read_directory(self.source) if self.head.startswith(MAGIC) else None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write, as far as a format has a choice.

    ``objects``: what becomes of values that only their own code could make: ``keep``, ``drop`` or
    ``error``. ``ties``: tensors with equal bytes in a format without views: ``alias`` (stored once
    and noted) or ``duplicate``. ``shard_size``: bytes that a file of a format with several may
    have, one large tensor aside; None: its own choice. ``ranks``: the parts that a format of
    model-parallel parts cuts the weights into. ``everything``: the whole tree, not only what the
    format is made for; see `Format.everything`.
    """

    objects: str = "keep"
    ties: str = "alias"
    everything: bool = False
    shard_size: int | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry that could not be saved: its dotted path, what it was, and why."""

    path: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is left, and what is not."""

    checkpoint: Checkpoint
    lost: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that say whether they are whole: by their CRC-32 if that is known, else by being there,
    and inflating.

    ``what`` they are is for messages, ``file`` is the name in a folder of the file that they are
    in.
    """

    what: str
    record: Record
    crc32: int | None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, the name of the file in a folder that it is about, the tensors that
    it hits, and what to do about it."""

    what: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Lazy:
    """A function of this room by its place, ``"module:function"``, imported when it is first
    called."""

    place: str

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        module, _, name = self.place.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"ckptkit.formats.{module}"), name)
        return function


@dataclass(frozen=True, slots=True)
class Format:
    """One on-disk format. What it cannot do is None; generic code asks for the capability, never
    for the name.

    ``matches`` answers "mine or not" and does not raise for what is not; once it said yes, every
    failure of `read` is an error. `read` takes the probe, so that what identification parsed is not
    parsed twice. ``layout`` is pure: it plans and writes nothing. A format that is not ``readable``
    is recognised all the same, and its `read` says what to do instead. ``pickles`` finds what
    `scan` traces, None if the file is of another format. Raises what is wrong with it. ``salvage``
    gives what is whole of a damaged file, None if the file is of another format; told ``True``,
    also what nothing proves to be whole. ``salvageable`` reads no tensor and says which command may
    find something: `RECOVER`, `UNVERIFIED`, or an empty text. ``check`` gives what can be checked
    beyond reading: everything that has a checksum, and everything that is wrong, where `read` says
    the first of it. It reads headers alone. ``patch`` makes of a local file, as it was read, what
    it is to be, by the few bytes that differ; None if they are not few. It is as pure as `layout`,
    and notes what that would.
    """

    name: str
    title: str  # for people
    matches: Callable[[Probe], bool]
    read: Callable[[Probe], Checkpoint]
    suffixes: tuple[
        str, ...
    ] = ()  # of its files; for a format with a layout, those that choose it for writing
    is_folder: bool = False
    loaded_by_torch: bool = False  # whether torch.load or torch.jit.load reads it
    layout: Callable[[Checkpoint, WriteOptions], Plan] | None = None
    readable: bool = True
    listed: bool = (
        False  # whether it is found in a list of a folder's files, which a web server does not give
    )
    shards: bool = False  # whether its layout is a folder of files of at most `shard_size`
    everything: str = (
        "never"  # whether it keeps the whole tree: always, when asked, nested (but not ties), never
    )
    program: bool = (
        False  # whether it holds a program, which no other format keeps: it is not changed in place
    )
    rewrite_as: str | None = (
        None  # the format that an edited copy is written in, if it has no layout of its own
    )
    distributed: bool = False  # whether it is the parts that several processes wrote
    chooses: bool = False  # whether it stands for one of the checkpoints in it
    noun: str = ""  # what a diagnosis calls it, where torch.load does not take it as it is
    torch_error: str = ""  # how torch.load refuses it; weights_only=True, if it is loaded_by_torch
    salvage: Callable[[Probe, bool], Salvaged | None] | None = None
    salvageable: Callable[[Probe], str] | None = None
    check: Callable[[Probe], Iterator[Part | Finding]] | None = None
    patch: Callable[[Checkpoint, Checkpoint, WriteOptions], Patch | None] | None = None
    pickles: Callable[[Probe], Iterator[Found] | None] | None = None
