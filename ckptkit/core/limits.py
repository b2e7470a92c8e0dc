"""Limits that keep a hostile or damaged file from exhausting the machine.

Each is far above what real checkpoints need. Fields named ``..._bytes`` are in bytes, the others
are counts. Each can be changed by an environment variable, which is read once, when a checkpoint is
first opened: ``CKPTKIT_LIMIT_PICKLE_BYTES=1073741824``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ckptkit.core.errors import LimitError, UsageError
from ckptkit.core.text import guess

PREFIX = "CKPTKIT_LIMIT_"


@dataclass(frozen=True, slots=True)
class Limits:
    pickle_bytes: int = 256 << 20  # one pickle stream, large byte strings (read lazily) not counted
    pickle_stack: int = 1_000_000  # values on the pickle machine's stack at once
    pickle_marks: int = 10_000  # MARKs open at once
    memo_entries: int = 5_000_000
    value_bytes: int = 512 << 20  # memory for the values of one pickle, estimated
    memo_sparse: int = 10_000  # memo entries set out of order
    depth: int = 1_000  # nesting of values
    key_depth: int = 100  # nesting of tuples used as dict keys: CPython hashes them recursively
    odd_keys: int = 10_000  # dict keys with hashes a file can choose: large ints, floats, tuples
    key_values: int = 1_000_000  # values in all tuples used as dict keys
    string_bytes: int = 64 << 20  # one text string
    line_bytes: int = 1 << 20  # one line of a text opcode
    name_bytes: int = 64 << 10  # a module, class, record or tensor name
    int_bytes: int = 1 << 10  # a big integer
    revisits: int = 100_000  # values shown again at a second path
    zip_entries: int = 1_000_000
    zip_directory_bytes: int = 256 << 20
    record_bytes: int = 256 << 20  # a record other than a storage, inflated
    # Bytes of all inflated records of a file (storages aside), in addition to INFLATED times the
    # size of the file.
    inflated_free: int = 8 << 20
    # Bytes of a decompressed file (gzip, zstd), in addition to UNPACKED times the compressed one.
    unpacked_free: int = 1 << 30
    inflate_ratio: int = 1_100  # deflate cannot do better than 1,032
    tar_members: int = 10_000
    tar_records_bytes: int = 512  # of the records about one member: torch's files hold a time
    npy_header_bytes: int = 64 << 10  # of one array of numpy
    safetensors_header_bytes: int = 100_000_000  # the safetensors library's own
    index_bytes: int = 64 << 20
    json_depth: int = 128
    json_values: int = 12_000_000  # numbers, strings, lists and objects in one JSON text
    rank: int = 64
    ranks: int = (
        1 << 20
    )  # that a file says to be of: processes, parts, or pieces that a mesh is split into
    chunk_visits: int = 5_000_000  # looks at the chunks of a tensor, to prove that they cover it
    optimizer_values: int = 64  # values that an optimizer keeps for a parameter: Adam has three
    trace_bytes: int = 64 << 20  # of all pickles of a file, when it is scanned
    scan_depth: int = 8  # files inside files
    scan_parts: int = 1_000_000  # places in a file that are looked at
    scan_inflated_bytes: int = 1 << 30  # of everything compressed in a file
    list_gaps: int = 100_000  # places of lists that nothing fills
    rule_bytes: int = 64 << 10  # of one tensor rule
    rule_labels: int = 10_000  # of one variable of a rule
    rule_variables: int = 64  # of a name
    rule_terms: int = 100  # operators and ( ) of one size
    rule_steps: int = 100_000  # of matching names against rules, beside 64 for each name
    rule_targets: int = 1_000_000  # tensors that one step of rules makes
    rule_copies: int = 4_000_000  # pieces that these are put together from
    expansion: int = 4  # output bytes per storage byte, unless the caller allows more
    expansion_free: int = 64 << 20  # and what is always allowed on top


MOST = 10**18
INFLATED = 8  # bytes of inflated records for each byte of the file, besides `inflated_free`
UNPACKED = (
    20  # bytes of a decompressed file for each of the compressed one, besides `unpacked_free`
)
# Limits that may only be lowered, or raised this far: beyond, Python recurses or refuses.
CEILINGS = {
    "key_depth": 1_000,  # hash(), in C
    "int_bytes": 1_780,  # str() and int() of 4,300 digits
    "json_depth": 256,  # json.loads
    "rank": 64,  # numpy
    "rule_variables": 100,  # names are matched by recursion
    "rule_terms": 200,  # a size is read and computed by recursion
}


def from_environment(environment: Mapping[str, str]) -> Limits:
    """Return the limits that the environment variables set.

    Warns of a variable that names no limit: another version of ckptkit may have it. Raises
    UsageError for a value that is not a number in range.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Limits)}
    found = {}
    for variable, text in environment.items():
        if variable in known:
            found[known[variable]] = _number(variable, text)
        elif variable.startswith(PREFIX):
            hint = guess(variable, known)
            message = f"{variable} is ignored: there is no such limit"
            warnings.warn(f"{message}; {hint}" if hint else message, stacklevel=1)
    return Limits(**found)


def _number(variable: str, text: str) -> int:
    most = CEILINGS.get(variable.removeprefix(PREFIX).lower(), MOST)
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
    if not digits or int(text) > most:
        raise UsageError(f"{variable} is {text!r}, not a whole number from 0 to {most:,}")
    return int(text)


LIMITS = from_environment(os.environ)


def check(name: str, seen: int, what: str) -> None:
    """Raise LimitError if `seen` exceeds the limit called `name`."""
    limit: int = getattr(LIMITS, name)
    if seen > limit:
        raise LimitError(
            f"{what}: {seen:,} exceeds the limit of {limit:,} ({name})", hint=raised(name, seen)
        )


def check_inflated(seen: int, size: int) -> None:
    """Raise LimitError if `seen` bytes of inflated records are too much for a file of `size`."""
    check(
        "inflated_free",
        seen - INFLATED * size,
        f"bytes of inflated records, {INFLATED} times the file aside",
    )


def raised(name: str, seen: int) -> str | None:
    """Return the environment setting that raises this limit enough for `seen`, at least to double.

    None if `seen` is above the limit's ceiling.
    """
    limit: int = getattr(LIMITS, name)
    most = CEILINGS.get(name, MOST)
    if seen > most:
        return None
    setting = f"{PREFIX}{name.upper()}={min(max(seen, 2 * limit), most)}"
    return f"if you trust the file, {setting} raises the limit"
