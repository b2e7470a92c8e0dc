"""Changes of bytes, each drawn from a Random: equal seeds give equal inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

LONGEST = 1 << 16  # bytes of an input
NUMBERS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 255, 256, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1,
           1 << 63, (1 << 64) - 1)  # fmt: skip
DIGITS = (
    b"0",
    b"-1",
    b"1",
    b"9",
    b"64",
    b"65",
    b"1e9",
    b"18446744073709551616",
    b"9" * 40,
    b"00",
    b"007777777777",
)


def mutated(random: Random, seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """One of the seeds, changed in one to eight places."""
    data = random.choice(seeds)
    for _ in range(random.choice((1, 1, 1, 2, 2, 4, 8))):
        data = random.choice(CHANGES)(random, data, seeds, tokens)[:LONGEST]
    return data


def _flip(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at, bit = divmod(random.randrange(8 * len(data)), 8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _byte(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    return (
        data[:at]
        + bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))])
        + data[at + 1 :]
    )


def _number(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    width = random.choice((1, 2, 4, 8))
    value = random.choice((*NUMBERS, len(data), random.randrange(len(data) + 2)))
    at = random.randrange(len(data) + 1)
    order = "big" if random.random() < 0.1 else "little"
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, order) + data[at + width :]


def _nudge(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Add a little to a number."""
    width = random.choice((1, 2, 4, 8))
    at = random.randrange(max(1, len(data) - width))
    value = int.from_bytes(data[at : at + width], "little") + random.choice((-1, 1, -8, 8, 64))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


def _cut(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data) + 1)
    return (
        data[:start] + data[start + random.choice((1, 2, 4, 8, random.randrange(len(data) + 1))) :]
    )


def _end(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _copy(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Put a part elsewhere once more, or often."""
    start, to = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    part = data[start : start + random.choice((1, 8, 30, 64, 512, random.randrange(len(data) + 1)))]
    times = random.choice((1, 1, 1, 2, 100))
    return (
        data[:to] + part * times + data[to:]
        if random.random() < 0.5
        else data[:to] + part + data[to + len(part) :]
    )


def _splice(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    other = random.choice(seeds)
    at, start = random.randrange(len(data) + 1), random.randrange(len(other) + 1)
    if random.random() < 0.5:
        return data[:at] + other[start:]
    part = other[start : start + random.randrange(1, 200)]
    return data[:at] + part + data[at + len(part) :]


def _token(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Put in a word of the format, or in place of another."""
    if not tokens:
        return _number(random, data, seeds, tokens)
    new, old = random.choice(tokens), random.choice(tokens)
    places = (
        [at for at in range(len(data)) if data.startswith(old, at)] if random.random() < 0.5 else []
    )
    at = random.choice(places) if places else random.randrange(len(data) + 1)
    return data[:at] + new + data[at + (len(old) if places else 0) :]


def _digits(random: Random, data: bytes, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """Another number where one is written out."""
    places = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if not places:
        return _byte(random, data, seeds, tokens)
    start = stop = random.choice(places)
    while stop < len(data) and 0x30 <= data[stop] <= 0x39:
        stop += 1
    return data[:start] + random.choice(DIGITS) + data[stop:]


Change = Callable[[Random, bytes, Sequence[bytes], Sequence[bytes]], bytes]
CHANGES: tuple[Change, ...] = (
    _flip, _flip, _byte, _number, _number, _nudge, _cut, _end, _copy, _splice, _token, _token, _digits,
)  # fmt: skip
