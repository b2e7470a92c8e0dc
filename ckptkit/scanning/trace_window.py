"""The bytes of a stream that is traced, read in pieces."""

from __future__ import annotations

from ckptkit.core.bytesource import ByteSource, Section
from ckptkit.core.limits import check

WINDOW = 1 << 20
FIRST_WINDOW = 1 << 14


class Stop(Exception):
    """The machine stops here: STOP, or an opcode that fails, with the reason."""


class Window:
    """The bytes of the stream, read in pieces."""

    def __init__(self, source: ByteSource, start: int, stop: int) -> None:
        self.source = source
        self.base = start  # offset in the source of data[0]
        self.end = stop
        self.data = b""
        self.at = 0
        self.skipped = 0

    @property
    def offset(self) -> int:
        return self.base + self.at

    def take(self, n: int) -> bytes:
        end = self.at + n
        if end > len(self.data):
            self._fill(n)
            end = self.at + n
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _fill(self, n: int) -> None:
        if self.offset + n > self.end:
            raise Stop("ends before it is complete")
        check("string_bytes", n, "bytes of one value in a pickle")
        rest = self.data[self.at :]
        size = max(n, min(WINDOW, max(FIRST_WINDOW, 4 * len(self.data))))
        self.base, self.at = self.offset, 0
        self.data = rest + self.source.read(
            self.base + len(rest), min(size, self.end - self.base) - len(rest)
        )

    def line(self) -> bytes:
        """The bytes up to the next newline, which is passed over."""
        found = self.data.find(b"\n", self.at)
        while found < 0:
            have = len(self.data) - self.at
            check("line_bytes", have, "bytes of a line in a pickle")
            self._fill(have + 1)
            found = self.data.find(b"\n", self.at + have)
        line = self.data[self.at : found]
        self.at = found + 1
        return line

    def skip(self, n: int) -> ByteSource:
        """Pass over `n` bytes, which are not read."""
        at = self.offset
        if n > self.end - at:
            raise Stop("ends inside a byte string")
        if self.at + n <= len(self.data):
            self.at += n
        else:
            self.base, self.data, self.at = at + n, b"", 0
        self.skipped += n
        return Section(self.source, at, n)
