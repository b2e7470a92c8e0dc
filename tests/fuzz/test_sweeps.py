"""Small files cut at every byte, and with every bit flipped: they are refused, or what they hold is
the same.

All of it takes some minutes, with CKPTKIT_SWEEP=all; here is a part of it, another in each file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from ckptkit import formats
from ckptkit.analysis.digests import summed
from ckptkit.core.bytesource import Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.format import CheckedPart, Probe
from tests.fuzz import seeds
from tests.fuzz.driving import quietly, scan, tensors

STEP = 1 if os.environ.get("CKPTKIT_SWEEP") == "all" else 61  # of the places that are tried

GOLDEN: dict[str, Callable[[], bytes]] = {
    "zip": lambda: seeds.zips()[0], "zip-without-checksums": lambda: seeds.zips()[1],
    "zip-deflated": lambda: seeds.zips()[3], "zip64": lambda: seeds.zips()[4],
    "zip-strides": partial(seeds.fixture, "torch-zip/strides.pth"),
    "zip-scalars": partial(seeds.fixture, "torch-zip/empty_and_scalar.pth"),
    "legacy": lambda: seeds.legacy()[0],
    "legacy-types": partial(seeds.fixture, "torch-legacy/dtypes_and_ties.pth"),
    "tar": lambda: seeds.tar()[0], "safetensors": lambda: seeds.safetensors()[0],
    "safetensors-whole": lambda: seeds.safetensors()[2], "npy": lambda: seeds.numpys()[0],
    "npz": lambda: seeds.numpys()[4], "pickle": partial(seeds.fixture, "pickle/arrays.pkl"),
    "bin": partial(seeds.fixture, "sharded-bin/net/pytorch_model-00003-of-00003.bin"),
}  # fmt: skip
# Where a flipped bit is seen by nobody, unless it is of what the format looks at: no checksums.
UNSUMMED = (
    "zip-without-checksums", "legacy", "legacy-types", "tar", "safetensors", "safetensors-whole",
    "npy", "pickle",
)  # fmt: skip


def opened(data: bytes) -> Checkpoint:
    """Return what is read of a file, all checksums compared."""
    source = Memory(data, "made")
    checkpoint = formats.read(source)
    parts = [each for each in formats.check(Probe(source)) if isinstance(each, CheckedPart)]
    if any(why for _, why in summed(parts, lambda count: None)):
        raise formats.UnsupportedError("is damaged")
    return checkpoint


@pytest.mark.parametrize("name", GOLDEN)
def test_PK_14_ZP_23_LG_05_ST_11_TR_02_cut_at_every_byte(name: str) -> None:
    data = GOLDEN[name]()
    assert len(data) < 10 << 10
    whole = tensors(opened(data))
    for cut in _part(range(len(data)), name):
        scan(Memory(data[:cut], "made"))
        with pytest.raises(CkptkitError):
            pytest.fail(
                f"cut at {cut} of {len(data)}, {len(tensors(opened(data[:cut])))} of {len(whole)} tensors are left"
            )


@pytest.mark.parametrize("name", GOLDEN)
def test_PK_15_ZP_04_every_bit_flipped(name: str) -> None:
    data = GOLDEN[name]()
    whole = tensors(opened(data))
    for bit in _part(range(8 * len(data)), name):
        flipped = _flipped(data, bit)
        scan(Memory(flipped, "made"))
        checkpoint = quietly(opened, flipped)
        if checkpoint is not None and name not in UNSUMMED:
            assert tensors(checkpoint) == whole, (
                f"bit {bit % 8} of byte {bit // 8} changes a tensor"
            )


def _flipped(data: bytes, bit: int) -> bytes:
    at = bit // 8
    return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


def _part(places: Sequence[int], name: str) -> Sequence[int]:
    """Every so many of them; which, the name decides."""
    return places[sum(name.encode()) % STEP :: STEP]
