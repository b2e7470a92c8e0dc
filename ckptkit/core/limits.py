"""Limits that keep a hostile or damaged file from exhausting memory and time.

Each limit is far above the needs of real checkpoints. Fields named ``..._bytes`` are in bytes, all
other fields are counts. Environment variables change them at import, such as
``CKPTKIT_LIMIT_PICKLE_BYTES=1073741824``.
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
    pickle_bytes: int = 256 << 20  # one pickle stream, without the large byte strings (read lazily)
    pickle_stack: int = 1_000_000  # values on the stack of the pickle machine at once
    pickle_marks: int = 10_000  # MARKs open at once
    memo_entries: int = 5_000_000
    value_bytes: int = 512 << 20  # memory for the values of one pickle, estimated
    memo_sparse: int = 10_000  # memo entries set out of order
    depth: int = 1_000  # nesting of values
    key_depth: int = 100  # nesting of tuples in dict keys: CPython hashes tuples recursively
    odd_keys: int = 10_000  # dict keys whose hashes a file can choose: large ints, floats, tuples
    key_values: int = 1_000_000  # values in all tuples that are dict keys
    string_bytes: int = 64 << 20  # one text string
    line_bytes: int = 1 << 20  # the argument of a text opcode
    name_bytes: int = 64 << 10  # a module, class, record or tensor name
    int_bytes: int = 1 << 10  # a big integer
    revisits: int = 100_000  # repeated visits of values under other paths
    zip_entries: int = 1_000_000
    zip_directory_bytes: int = 256 << 20
    record_bytes: int = 256 << 20  # a zip member except storages, or bytes in a pickle
    # Bytes of all inflated records of a file, without storages. INFLATED times the size of the file
    # is allowed in addition.
    inflated_free: int = 8 << 20
    # Bytes of a decompressed file (gzip, zstd). UNPACKED times the compressed size is allowed in
    # addition.
    unpacked_free: int = 1 << 30
    inflate_ratio: int = 1_100  # deflate reaches at most 1,032
    tar_members: int = 10_000
    tar_records_bytes: int = 512  # extended headers of one member: those of torch contain a time
    npy_header_bytes: int = 64 << 10  # header of one numpy array
    safetensors_header_bytes: int = 100_000_000  # the limit of the safetensors library
    index_bytes: int = 64 << 20
    json_depth: int = 128
    json_values: int = 12_000_000  # numbers, strings, lists and objects in one JSON text
    rank: int = 64
    ranks: int = 1 << 20  # ranks, parts or mesh pieces that a file claims to have
    chunk_visits: int = 5_000_000  # comparisons to prove that the chunks cover a tensor
    optimizer_values: int = 64  # values that an optimizer keeps for a parameter: Adam has three
    trace_bytes: int = 64 << 20  # all pickles in a file that a scan traces
    scan_depth: int = 8  # files inside files
    scan_parts: int = 1_000_000  # parts of a file that a scan examines
    scan_inflated_bytes: int = 1 << 30  # inflated size of all compressed data in a file
    list_gaps: int = 100_000  # missing indices of lists that are rebuilt from flat names
    rule_bytes: int = 64 << 10  # text of one tensor rule
    rule_labels: int = 10_000  # labels of one variable of a rule
    rule_variables: int = 64  # variables in a name
    rule_terms: int = 100  # operators and ( ) of one size
    rule_steps: int = 100_000  # to match names against rules; each name adds 64
    rule_targets: int = 1_000_000  # tensors that one rule step makes
    rule_copies: int = 4_000_000  # copies that fill the targets of one rule step
    expansion: int = 4  # output bytes per storage byte, unless the caller allows more
    expansion_free: int = 64 << 20  # output bytes that are always allowed in addition


MOST = 10**18
INFLATED = 8  # bytes of inflated records per byte of the file, in addition to `inflated_free`
UNPACKED = 20  # bytes of a decompressed file per compressed byte, in addition to `unpacked_free`
# The highest values of limits that other code bounds: beyond them Python recurses or raises.
CEILINGS = {
    "key_depth": 1_000,  # hash() recurses in C
    "int_bytes": 1_780,  # str() and int() of 4,300 digits
    "json_depth": 256,  # json.loads
    "rank": 64,  # numpy
    "rule_variables": 100,  # names are matched by recursion
    "rule_terms": 200,  # a size is read and computed by recursion
}


def from_environment(environment: Mapping[str, str]) -> Limits:
    """Return the limits that the environment variables set.

    Warns about a variable that names no limit: another version of ckptkit may define it. Raises
    UsageError for a value that is not a number in range.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Limits)}
    found = {}
    for variable, text in environment.items():
        if variable in known:
            found[known[variable]] = _number(variable, text)
        elif variable.startswith(PREFIX):
            hint = guess(variable, known)
            message = f"{variable} is ignored: no limit has this name"
            warnings.warn(f"{message}; {hint}" if hint else message, stacklevel=1)
    return Limits(**found)


def _number(variable: str, text: str) -> int:
    most = CEILINGS.get(variable.removeprefix(PREFIX).lower(), MOST)
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
    if not digits or int(text) > most:
        raise UsageError(f"{variable}: expected an integer from 0 to {most:,}, got {text!r}")
    return int(text)


LIMITS = from_environment(os.environ)


def check(name: str, seen: int, what: str) -> None:
    """Raise LimitError if `seen` exceeds the limit called `name`."""
    limit: int = getattr(LIMITS, name)
    if seen > limit:
        raise LimitError(
            f"{what}: {seen:,} exceeds the limit of {limit:,} ({name})",
            hint=raise_limit_hint(name, seen),
        )


def check_inflated(seen: int, size: int) -> None:
    """Raise LimitError if a file of `size` bytes inflates to `seen` bytes, which are too many."""
    check(
        "inflated_free",
        seen - INFLATED * size,
        f"bytes of inflated records beyond {INFLATED} times the size of the file",
    )


def raise_limit_hint(name: str, seen: int) -> str | None:
    """Return a hint with the setting that raises the limit to `seen`, or at least doubles it.

    None if `seen` exceeds the highest value that the limit may have.
    """
    limit: int = getattr(LIMITS, name)
    most = CEILINGS.get(name, MOST)
    if seen > most:
        return None
    setting = f"{PREFIX}{name.upper()}={min(max(seen, 2 * limit), most)}"
    return f"if you trust the file, {setting} raises the limit"
