"""The members of a tar file, as any reader sees them, damaged or not.

Names and kinds do not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.bytesource import ByteSource, Section
from ckptkit.core.limits import LIMITS
from ckptkit.formats.tar import BLOCK, is_tar, lenient_number
from ckptkit.formats.whats_inside import PICKLES
from ckptkit.pickles.streams import Found, Inner, Remark


def pickles(source: ByteSource) -> Iterator[Found]:
    """Yield every member that has bytes.

    An invalid header ends the file for some readers, and is skipped here.
    """
    at = count = 0
    while at + BLOCK <= source.size and count < LIMITS.tar_members:
        block = source.read(at, BLOCK)
        at += BLOCK
        if not is_tar(block):
            continue
        count += 1
        size = lenient_number(block[124:136]) or 0
        name = block[:100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
        if 0 < size <= source.size - at:
            yield Inner(name, Section(source, at, size), name.lower().endswith(PICKLES))
            at += -(-size // BLOCK) * BLOCK
        elif size > 0:
            yield Remark(name, "the tar file ends inside this member")
            if at < source.size:
                yield Inner(name, Section(source, at, source.size - at), open_end=True)
