"""Pickles that were found, and what loading them would do: facts, without a verdict.

Found by formats, filled in by the tracer (:mod:`ckptkit.scanning.trace`), judged by
:mod:`ckptkit.scanning.verdict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.tree import Global
from ckptkit.pickles import judge

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # the first pickle of a legacy stream
TORCH_LOAD = "torch.load"
PICKLE = "pickle.load"
TORCHSCRIPT = "torch.jit.load"
NUMPY = "numpy.load(allow_pickle=True)"
NOT_TORCH = "not a file of torch.save"


@dataclass(frozen=True, slots=True)
class PickleStream:
    """Bytes that some loader hands to a pickle machine.

    ``where`` is their place inside the file, ``""`` for the file itself. They are `length` bytes,
    `packed` by a method of compression if that is not None; where they end is not known if
    `open_end`. ``count`` pickles follow each other, and then come other bytes if there are more
    than one; with None there are some, with other bytes between them. ``no_weights_only`` says why
    `torch.load(weights_only=True)` does not read the container, None if it does. ``weak``: only how
    it begins says that it is a pickle.
    """

    where: str
    source: ByteSource
    offset: int
    length: int
    loader: str = PICKLE
    no_weights_only: str | None = NOT_TORCH
    count: int | None = 1
    packed: str | None = None
    open_end: bool = False
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Inner:
    """Bytes inside a file that may be a file of their own. ``likely``: its name says that it is a
    pickle."""

    where: str
    source: ByteSource
    likely: bool = False
    packed: str | None = None
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """A place that could not be read, or that two readers see differently."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Program:
    """Source text of TorchScript: compiled when it is loaded, run when it is called. ``files``:
    what it reads, writes or loads, by the operators that do."""

    where: str
    functions: int
    files: tuple[str, ...]


Found = PickleStream | Inner | Remark | Program


class Call(NamedTuple):
    """A call that loading would make, the first of its `kind` for this callable.

    Kinds are those of :mod:`ckptkit.pickles.judge`.
    """

    name: str  # what is called
    opcode: str
    kind: str
    args: str  # shortened
    offset: int  # of the opcode, in the stream's source
    times: int


class Nested(NamedTuple):
    """A byte string that looks like a file.

    It is loaded by the user of the value, or by the pickle itself (`loaded`).
    """

    offset: int  # of the opcode
    source: ByteSource
    loaded: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The names and calls of one pickle, as far as a machine would run it.

    ``error`` is where and why it stops before STOP, ``goes_on`` whether CPython's machines may run
    what follows; ``may_be_legacy`` whether its value may be the magic number, so that torch.load
    loads the four pickles that follow; ``doubts`` are what different machines
    understand differently. ``refused`` is what else than a name `torch.load(weights_only=True)`
    refuses, None if nothing.
    """

    protocol: int
    size: int  # bytes that were read, without large byte strings
    stop: int  # offset in the source of the first byte after STOP, or of the opcode that fails
    globals: tuple[Global, ...]
    values: tuple[
        Global, ...
    ]  # those that are not only called, but kept as values or handed to calls
    calls: tuple[Call, ...]
    nested: tuple[Nested, ...]
    doubts: tuple[str, ...]
    refused: str | None
    error: str | None
    goes_on: bool
    may_be_legacy: bool

    @property
    def is_proved(self) -> bool:
        """Return whether every step is one that may be written back, files inside aside."""
        steps = all(call.kind in (*judge.WRITTEN, judge.LOADS) for call in self.calls)
        whole = self.error is None and not self.doubts
        return steps and whole and all(judge.out_of_place(name) is None for name in self.values)


@dataclass(frozen=True, slots=True)
class Traced:
    """A pickle that was found, and what it would do.

    ``nested``: in a byte string that nothing in the file loads.
    """

    where: str
    offset: int  # in the archive's member, or whatever else `where` says
    base: int | None  # where that begins in the file, None if it was unpacked
    loader: str
    no_weights_only: str | None
    trace: Trace
    nested: bool = False
