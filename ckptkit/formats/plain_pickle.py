"""A pickle that is no torch file: dicts of numpy arrays, mostly (`.pkl`, `.npy` aside).

One pickle of protocol 0 to 5, from the first byte of the file to the last. Protocols 2 and later begin with 0x80 and
their number; earlier ones have no signature, so they are tried: a file is one if it ends with STOP (".") and runs.
Arrays stay where they are in the file, whatever their size.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, UnsupportedError
from ckptkit.formats import table
from ckptkit.formats.format import Probe
from ckptkit.pickles.machine import Unpickled, unpickle
from ckptkit.pickles.streams import Found, PickleStream

TEXT_LIMIT = 64 << 20  # bytes of a protocol 0 or 1 pickle that is tried
_FIRST = b"(]}lctdNIJKMLFGSTUVX"  # opcodes that a pickle of protocol 0 or 1 may begin with


def matches(probe: Probe) -> bool:
    head = probe.head
    if len(head) < 2:
        return False
    if head[0] == 0x80:
        return 2 <= head[1] <= 5
    return head[0] in _FIRST and probe.source.size <= TEXT_LIMIT and _runs(probe)


def _runs(probe: Probe) -> bool:
    source = probe.source
    try:
        return source.read(source.size - 1, 1) == b"." and unpickle(source).stop == source.size
    except CkptkitError:
        return False


def read(probe: Probe) -> Checkpoint:
    """The tree of the pickle."""
    source = probe.source
    pickled = _unpickled(probe)
    if pickled.stop != source.size:
        raise AmbiguousError(
            f"{source.size - pickled.stop:,} bytes follow the pickle: other readers may take them for something else"
        )
    return Checkpoint(pickled.root, table.PICKLE.name, source, globals=pickled.globals, warnings=pickled.warnings)


def _unpickled(probe: Probe) -> Unpickled:
    try:
        return unpickle(probe.source)
    except FormatError as error:
        if b"NumpyArrayWrapper" in probe.source.read(0, min(probe.source.size, 1 << 20)):
            raise UnsupportedError(
                "is a joblib file: its arrays lie between the opcodes of a pickle",
                hint="if you trust it, load it with joblib, and save its arrays with numpy.savez",
            ) from error
        error.hint = error.hint or "the file begins like a pickle; if it is something else, ckptkit cannot read it"
        raise


def pickles(probe: Probe) -> Iterator[Found] | None:
    """It alone; what may follow is for whoever looks for it."""
    return iter((PickleStream("", probe.source, 0, probe.source.size, weak=True),)) if matches(probe) else None
