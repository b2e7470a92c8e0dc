"""Changes of bytes, each drawn from a Random: equal seeds give equal inputs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

LONGEST = 1 << 16  # bytes of an input
NUMBERS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 255, 256, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1,
           1 << 63, (1 << 64) - 1)  # fmt: skip
DIGITS = [*b"0 -1 1 9 64 65 1e9 18446744073709551616 00 007777777777".split(), b"9" * 40]
# The ways, the common ones twice.
WAYS = (
    "flip", "flip", "byte", "number", "number", "nudge", "cut", "end", "copy", "splice", "token",
    "token", "digits",
)  # fmt: skip


def mutated(random: Random, seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """One of the seeds, changed in one to eight places."""
    data = random.choice(seeds)
    for _ in range(random.choice((1, 1, 1, 2, 2, 4, 8))):
        start, stop, new = _change(random, data, seeds, tokens)
        data = (data[:start] + new + data[stop:])[:LONGEST]
    return data


def _change(
    random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]
) -> tuple[int, int, bytes]:
    """Return a place, where it ends, and what comes there instead."""
    way = random.choice(WAYS)
    at = random.randrange(len(data) + 1)
    width = random.choice((1, 2, 4, 8))
    if way == "flip" and data:
        at = random.randrange(len(data))
        return at, at + 1, bytes([data[at] ^ 1 << random.randrange(8)])
    if way == "digits":
        places = [place for place, byte in enumerate(data) if 0x30 <= byte <= 0x39]
        if places:
            start = stop = random.choice(places)
            while stop < len(data) and 0x30 <= data[stop] <= 0x39:
                stop += 1
            return start, stop, random.choice(DIGITS)
    if way == "nudge":  # add a little to a number
        at = random.randrange(max(1, len(data) - width))
        value = int.from_bytes(data[at : at + width], "little")
        value += random.choice((-1, 1, -8, 8, 64))
        return at, at + width, (value % (1 << 8 * width)).to_bytes(width, "little")
    if way == "cut":
        return at, at + random.choice((width, random.randrange(len(data) + 1))), b""
    if way == "end":
        return at, len(data), b""
    if way == "copy":  # a part once more elsewhere, or often
        start = random.randrange(len(data) + 1)
        length = random.choice((1, 8, 30, 64, 512, random.randrange(len(data) + 1)))
        part = data[start : start + length] * random.choice((1, 1, 1, 2, 100))
        return at, at + random.choice((0, length)), part
    if way == "splice":
        other = random.choice(seeds)
        start = random.randrange(len(other) + 1)
        if random.random() < 0.5:
            return at, len(data), other[start:]
        part = other[start : start + random.randrange(1, 200)]
        return at, at + len(part), part
    if way == "token" and tokens:  # a word of the format, or in place of another
        new, old = random.choice(tokens), random.choice(tokens)
        found = data.find(old, random.randrange(len(data) + 1)) if random.random() < 0.5 else -1
        return (at, at, new) if found < 0 else (found, found + len(old), new)
    if way in ("number", "token"):
        value = random.choice((*NUMBERS, len(data), random.randrange(len(data) + 2)))
        order = "big" if random.random() < 0.1 else "little"
        return at, at + width, (value % (1 << 8 * width)).to_bytes(width, order)
    return at, at + 1, bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))])
