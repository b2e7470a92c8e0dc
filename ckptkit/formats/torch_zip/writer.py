"""Plan a torch zip archive that every torch since 1.6 reads, and 2.1 and later memory-map.

<top> is ``archive``; data.pkl, byteorder, the storages in the order in which the pickle meets them,
version, and ckptkit's own record for what torch cannot hold. No .format_version: with it torch
computes where the storages are instead of looking them up. A storage keeps the checksum that its
source had.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckptkit.core.bytesource import Derived, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import UINT8, DType
from ckptkit.core.errors import TensorError, UnsupportedError
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.tree import Node
from ckptkit.formats.containers.zip_writer import ZipMember, lay_out
from ckptkit.formats.format import WriteOptions
from ckptkit.formats.torch_zip import extra_records
from ckptkit.pickles.storages import storage_class
from ckptkit.pickles.writer import write_pickle

TOP = "archive"
_UNTYPED = storage_class(None)


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """Plan one file with the whole tree and the storages that it refers to.

    Raises what the pickle writer raises, and TensorError for a storage that torch could not read
    back.
    """
    numbering = Numbering()
    pickled = write_pickle(checkpoint.root, numbering, numbering.another, objects=options.objects)
    big_endian = numbering.all_big_endian()
    first = [
        ZipMember(f"{TOP}/data.pkl", pickled.data),
        ZipMember(f"{TOP}/byteorder", b"big" if big_endian else b"little"),
    ]
    last = [ZipMember(f"{TOP}/version", b"3\n")]
    if (record := extra_records.write(checkpoint.extras)) is not None:
        last.append(ZipMember(f"{TOP}/{extra_records.NAME}", record))
    segments = lay_out(chain(first, numbering.members(big_endian), last))
    return Plan(
        (OutputFile("", tuple(segments), keeps_sums=True),), pickled.notes, numbering.tensors
    )


class Numbering:
    """Assigns keys to storages, in the order in which the pickle meets them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.dtypes: list[
            DType | None
        ] = []  # of each storage, as its persistent ids say; None: untyped
        self.tensors = 0  # views of storages that were numbered, one for each tensor of the pickle
        self._numbers: dict[Storage, int] = {}

    def __call__(self, typed: TypedStorage) -> tuple[Node, ...]:
        self.tensors += 1
        storage, dtype = typed.storage, typed.dtype
        made = storage_class(dtype)
        if made is _UNTYPED:
            dtype = None
        number = self._number(storage, dtype)
        numel, rest = divmod(storage.nbytes, 1 if dtype is None else dtype.itemsize)
        if rest:
            raise TensorError(
                f"a storage of {storage.nbytes:,} bytes is not a whole number of {dtype} elements"
            )
        if typed.stop is not None and (typed.start, typed.stop) != (0, numel):
            raise UnsupportedError(
                "a part of a storage is a value of its own, which torch cannot save since 0.4"
            )
        return "storage", made, self.key(number), storage.device, numel

    def another(self, storage: Storage, dtype: DType | None) -> str | None:
        """Return the key of a storage as one before, of as many bytes; None if it was met before.

        `dtype` is that of its elements as its persistent id says.
        """
        number = len(self.storages)
        if self._numbers.setdefault(storage, number) != number:
            return None
        self.tensors += 1
        self.storages.append(storage)
        self.dtypes.append(dtype)
        return self.key(number)

    def key(self, number: int) -> str:
        """Return the name of a storage's record in its folder."""
        return str(number)

    def _number(self, storage: Storage, dtype: DType | None) -> int:
        number = self._numbers.setdefault(storage, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
            self.dtypes.append(dtype)
        elif self.dtypes[number] is not dtype and storage.nbytes:
            if {self.dtypes[number], dtype} != {UINT8, None}:
                raise TensorError(
                    f"torch cannot read one storage as {self.dtypes[number]} and as {dtype}"
                )
            self.dtypes[number] = None
        return number

    def _units(self) -> Iterator[tuple[Storage, int]]:
        """Yield each storage with its byte order's unit: 1 for none, 0 for unknown."""
        for storage, dtype in zip(self.storages, self.dtypes, strict=True):
            if not storage.nbytes:
                yield storage, 1
            else:
                yield storage, 0 if dtype is None else dtype.component

    def all_big_endian(self) -> bool:
        """Return whether all storages with a byte order are big-endian: then they stay so."""
        return {storage.big_endian for storage, unit in self._units() if unit != 1} == {True}

    def members(self, big_endian: bool) -> Iterator[ZipMember]:
        folder, key = f"{TOP}/data/", self.key
        for number, (storage, unit) in enumerate(self._units()):
            extent = storage.record.locate()
            crc = storage.crc32 if isinstance(extent, Range) else None
            if storage.big_endian and not big_endian and unit != 1:
                if not unit:
                    raise UnsupportedError(
                        "big-endian bytes of an unknown element type, among little-endian ones"
                    )
                extent, crc = Derived("byteswap", (extent,), (unit,), storage.nbytes), None
            yield ZipMember(folder + key(number), extent, crc)
