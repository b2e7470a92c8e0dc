"""A checkpoint of any other format inside gzip, bzip2, xz or zstd, in a tar file, or in both.

    run.pth.gz, model.safetensors.zst     one file
    model.tar.gz, model.nemo              an archive of files, one of which is a checkpoint

A tar file is read where it lies. What is compressed is decompressed once, into a temporary file
without a name (in ``TMPDIR``), and read from there: a compressed stream cannot be read from the
middle. Memory does not grow with the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from ckptkit import formats
from ckptkit.core.bytesource import ByteSource, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.core.limits import LIMITS, UNPACKED
from ckptkit.core.limits import check as check_limit
from ckptkit.core.text import quoted
from ckptkit.formats.common.folder_names import best, candidates
from ckptkit.formats.containers.tar import read_members
from ckptkit.formats.containers.unpacking import method_of, spool
from ckptkit.formats.format import CheckedPart, Finding, Probe
from ckptkit.formats.torch_tar import is_archive


def matches(probe: Probe) -> bool:
    return method_of(probe.head) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the checkpoint inside, in its own format.

    Raises LimitError for a file that grows too much, and what the format inside raises.
    """
    method = method_of(probe.head)
    checkpoint = formats.read(_inside(probe), probe.asked)
    return replace(
        checkpoint, about=f"decompressed ({method}) to be read" if method else "in a tar file"
    )


def check(probe: Probe) -> Iterator[CheckedPart | Finding]:
    """Yield the parts to check inside. Raises like `read`."""
    return formats.check(Probe(_inside(probe)))


def _inside(probe: Probe) -> ByteSource:
    """Decompress a file; of an archive, return the member that is a checkpoint."""
    if is_archive(probe):
        return _member(probe.source)
    source, method = probe.source, method_of(probe.head)
    assert method is not None
    free = UNPACKED * source.size
    inner, failure = spool(source, method, free + LIMITS.unpacked_free + 1)
    check_limit(
        "unpacked_free", inner.size - free, f"bytes inside, {UNPACKED} times the file aside"
    )
    if failure is not None:
        raise failure
    within = Probe(inner)
    if is_archive(within):
        return _member(inner)
    if matches(within):
        raise UnsupportedError(
            "is compressed twice", hint="decompress it once: gunzip -c, unzstd -c"
        )
    return inner


def _member(archive: ByteSource) -> ByteSource:
    """Return the only checkpoint in a tar file, as a folder of its files would be read."""
    files = {
        name: each.data
        for name, each in read_members(archive, here=True).items()
        if each.kind == "file"
    }
    chosen = best(files)
    if chosen is not None and chosen.form == "file":
        _, offset, length = files[chosen.files[0]]
        inner = Section(archive, offset, length)
        inner.name = os.path.join(archive.name, chosen.files[0])
        return inner
    hint = "unpack it first: `tar -xf {where}`"
    if chosen is not None:
        raise UnsupportedError(
            f"is an archive of a checkpoint of several files: {quoted(chosen.files)}", hint=hint
        )
    if found := [each.files[0] for each in candidates(files)]:
        raise AmbiguousError(
            f"is an archive of {len(found)} checkpoints: {quoted(found)}", hint=hint
        )
    raise UnsupportedError("is an archive without a checkpoint", hint="`tar -tf {where}` lists it")
