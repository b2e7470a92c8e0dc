"""Damage to saves of chance sizes, with and without checksums, and to files that hold parts of two.

    python -m tests.fuzz.saves COUNT [SEED]

torch and safetensors write two saves of a state_dict, `new` and `old`. Each round damages the file
of `new` in one of the ways of `tests.fuzz.damage`, converts its line ends, or writes it over the
file of `old` and stops somewhere. torch reads what `recover` writes of it. Each tensor is

    new, old    as in that save;
    changed     in a format without checksums: the bytes that lie at its own place in the file, if
                the damage moved nothing. Nobody can see that, and a warning says so;
    wrong       anything else: shifted, or of another tensor. There must be none.

Tensors of both saves need a warning, too. Prints counts.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import safetensors.torch
import torch

from ckptkit.api import convert, open_checkpoint, recover
from ckptkit.core.errors import CkptkitError
from tests.fuzz import damage
from tests.pickles.making import saved

State = dict[str, torch.Tensor]
MOVES = {
    *("bytes inserted", "bytes deleted", "appended", "block doubled", "cut", "line ends"),
    *("records deleted", "records doubled"),
}
TELLS = ("one save", "no checksums", "older")  # of warnings


class Save(NamedTuple):
    data: bytes
    state: State
    places: Mapping[str, tuple[int, int]]  # of the bytes in the file
    sums: bool  # whether the file has checksums


FORMATS: Mapping[str, Callable[[State], bytes]] = {
    "zip": saved,
    "zip without checksums": partial(saved, crc=False),
    "safetensors": safetensors.torch.save,
}


def state(random: Random, shapes: list[int]) -> State:
    torch.manual_seed(random.randrange(1 << 30))
    return {f"layer{i}.weight": torch.randn(n) for i, n in enumerate(shapes)}


def save(name: str, weights: State, folder: Path) -> Save:
    data = FORMATS[name](weights)
    path = folder / "whole"
    path.write_bytes(data)
    records = {key: each.storage for key, each in open_checkpoint(path).weights.items()}
    found = {key: each.record.locate() for key, each in records.items() if each is not None}
    places = {key: (at.offset, at.length) for key, at in found.items()}
    return Save(data, weights, places, name == "zip")


def line_ends(random: Random, data: bytes, _: bytes) -> bytes:
    """As a transfer in text mode leaves them."""
    if random.random() < 0.5:
        return data.replace(b"\n", b"\r\n")
    return data.replace(b"\r\n", b"\n")


def over(random: Random, data: bytes, older: bytes) -> bytes:
    """Written over an older file, up to anywhere, to a block's end, or whole; perhaps cut."""
    stop = random.choice(
        (random.randrange(len(data)), random.randrange(len(data)) & ~511, len(data))
    )
    both = data[:stop] + older[stop:]
    return both[: random.choice((len(both), len(both), random.randrange(stop, len(both) + 1)))]


def _records(random: Random, data: bytes) -> tuple[int, int]:
    """Return as many bytes as are between two records, from any byte on, and off by one or not."""
    places = [match.start() for match in re.finditer(b"PK\3\4", data)] or [0, len(data) // 2]
    first, last = sorted(random.sample(places, 2))
    length = last - first + random.choice((0, 0, 0, 1, -1, 64))
    start = random.randrange(max(1, len(data) - length))
    return start, start + length


def without_records(random: Random, data: bytes, _: bytes) -> bytes:
    start, stop = _records(random, data)
    return data[:start] + data[stop:]


def twice_records(random: Random, data: bytes, _: bytes) -> bytes:
    start, stop = _records(random, data)
    return data[:stop] + data[start:]


KINDS = {
    **damage.KINDS, "records deleted": without_records, "records doubled": twice_records, "line ends": line_ends,
    "over an older save": over,
}  # fmt: skip


def damaged(random: Random, kind: str, new: Save, old: Save) -> bytes:
    """Damage a file; what a format without checksums says of its tensors stays as it was, or moves."""
    if kind == "over an older save":
        return over(random, new.data, old.data)
    keep = 0 if new.sums or kind in MOVES else min(at for at, _ in new.places.values())
    if kind == "headers damaged" and new.data[:2] != b"PK":
        kind = "bits flipped"
    return new.data[:keep] + KINDS[kind](random, new.data[keep:], old.data[keep:])


def judge(data: bytes, kind: str, new: Save, old: Save, folder: Path) -> Counter[str]:
    """Recover a damaged file, and count its tensors by what they are."""
    path, out = folder / "damaged", folder / "out.pth"
    path.write_bytes(data)
    try:
        found = recover(path)
        convert(found.checkpoint, out, force=True)
    except CkptkitError:
        return Counter(refused=1)
    count = Counter(files=1, lost=len(found.lost))
    told = any(word in warning for warning in found.checkpoint.warnings for word in TELLS)
    for name, tensor in torch.load(out, weights_only=True).items():
        bytes_ = tensor.numpy().tobytes()
        places = [each.places[name] for each in (new, old) if name in each.places]
        if name in new.state and torch.equal(tensor, new.state[name]):
            count["new"] += 1
        elif name in old.state and torch.equal(tensor, old.state[name]):
            count["old"] += 1
        elif (
            told
            and not new.sums
            and kind not in MOVES
            and any(bytes_ == data[at : at + length] for at, length in places)
        ):
            count["changed"] += 1
        else:
            count["wrong"] += 1
    if count["new"] and count["old"]:
        count["mixed, told" if told else "mixed, not told"] += 1
    return count


def rounds(seed: int, count: int) -> Iterator[tuple[str, str, Counter[str]]]:
    """Yield format, kind of damage and counts, `count` times for each format."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for format in FORMATS:
            for number in range(count):
                random = Random(f"{seed}/{format}/{number}")
                most = random.choice((8, 300, 5000))
                shapes = [random.randrange(1, most) for _ in range(random.randrange(2, 40))]
                if random.random() < 0.3:
                    shapes = [shapes[0]] * len(shapes)  # as layers have them
                shapes.append(300)
                longer = shapes + [most] * random.choice((0, 0, 7))
                new = save(format, state(random, shapes), folder)
                old = save(format, state(random, longer), folder)
                kind = [*KINDS, "over an older save"][number % (len(KINDS) + 1)]
                data = damaged(random, kind, new, old)
                yield format, kind, judge(data, kind, new, old, folder)


def main(arguments: list[str]) -> int:
    """Print what became of the tensors of so many files of each format."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    seed = int(arguments[1]) if arguments[1:] else 0
    for format, kind, count in rounds(seed, int(arguments[0])):
        for key in ((format, kind), (format, "all")):
            totals.setdefault(key, Counter()).update(count)
    for (format, kind), total in sorted(totals.items()):
        print(f"{format}, {kind}:", ", ".join(f"{n:,} {what}" for what, n in sorted(total.items())))
    return int(any(total["wrong"] or total["mixed, not told"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
