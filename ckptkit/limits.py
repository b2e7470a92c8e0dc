"""The limits that keep a hostile or damaged file from using up the machine, in one place.

Each is far above what real checkpoints need. Bytes are bytes, counts are counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.errors import LimitError


@dataclass(frozen=True, slots=True)
class Limits:
    pickle_bytes: int = 256 << 20  # one pickle stream, large byte strings (read lazily) not counted
    pickle_stack: int = 1_000_000  # values on the pickle machine's stack at once
    pickle_marks: int = 10_000  # MARKs open at once
    memo_entries: int = 5_000_000
    memo_sparse: int = 10_000  # memo entries set out of order
    depth: int = 1_000  # nesting of values
    key_depth: int = 100  # nesting of tuples used as dict keys: CPython hashes them recursively
    odd_keys: int = 10_000  # dict keys whose hashes a file can choose: large integers, floats, tuples
    key_values: int = 1_000_000  # values in all tuples used as dict keys
    string_bytes: int = 64 << 20  # one text string
    line_bytes: int = 1 << 20  # one line of a text opcode
    name_bytes: int = 64 << 10  # a module, class, record or tensor name
    int_bytes: int = 1 << 10  # a big integer
    revisits: int = 100_000  # values shown again at a second path
    zip_entries: int = 1_000_000
    zip_directory_bytes: int = 256 << 20
    record_bytes: int = 256 << 20  # a record other than a storage, inflated
    inflate_ratio: int = 1_100  # deflate cannot do better than 1,032
    tar_members: int = 10_000
    tar_records_bytes: int = 512  # about one member: torch's files have a time there
    npy_header_bytes: int = 64 << 10  # of one array of numpy
    safetensors_header_bytes: int = 100_000_000  # the safetensors library's own
    index_bytes: int = 64 << 20
    json_depth: int = 128
    json_values: int = 12_000_000  # numbers, strings, lists and objects in one JSON text
    rank: int = 64
    chunk_visits: int = 5_000_000  # looks at the chunks of a tensor, to prove that they cover it
    list_gaps: int = 100_000  # places of lists that nothing fills
    expansion: int = 4  # output bytes per storage byte, unless the caller allows more
    expansion_free: int = 64 << 20  # and what is always allowed on top


LIMITS = Limits()


def check(name: str, seen: int, what: str) -> None:
    """Raise LimitError if `seen` exceeds the limit called `name`."""
    limit: int = getattr(LIMITS, name)
    if seen > limit:
        raise LimitError(f"{what}: {seen:,} exceeds the limit of {limit:,} ({name})")
