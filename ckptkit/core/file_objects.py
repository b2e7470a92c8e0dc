"""An open binary file object as a byte source."""

from __future__ import annotations

import os
import threading
from typing import BinaryIO

from ckptkit.core.bytesource import READING, ByteSource
from ckptkit.core.errors import ArgumentError, InputChangedError, InputError, UsageError


class FileObject(ByteSource):
    """An open binary file object, from its beginning; it stays the caller's to close."""

    def __init__(self, file: BinaryIO) -> None:
        given = getattr(file, "name", None)
        self.name = given if isinstance(given, str) else "<file object>"
        self._file = file
        self._lock = threading.Lock()
        try:
            is_text = not isinstance(file.read(0), bytes)
            self.size = file.seek(0, os.SEEK_END)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the file object cannot be read at any place: {error}",
                where=self.name,
                hint="ckptkit.open(file.read()) takes its bytes",
            ) from error
        if is_text:
            raise ArgumentError(
                "the file object gives text, not bytes", where=self.name, hint='open(path, "rb")'
            )
        self.identity = ("file object", id(file), self.size)

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "an open file object cannot be given to other processes",
            where=self.name,
            hint="open its path instead",
        )

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self._missing(offset, length)
        with self._lock:
            try:
                self._file.seek(offset)
                data = self._file.read(length)
                while len(data) < length and (more := self._file.read(length - len(data))):
                    data += more
            except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
                raise InputError(f"cannot be read: {error}", where=self.name) from error
        if len(data) < length:
            raise InputChangedError("became shorter while it was read", where=self.name)
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, data)
        return data
