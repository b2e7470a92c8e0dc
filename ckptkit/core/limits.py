"""Limits that keep a hostile or damaged file from exhausting memory and time.

Each limit is far above the needs of real checkpoints. A field named ``..._bytes`` is a number of
bytes. Every other field is a count. An environment variable such as
``CKPTKIT_LIMIT_PICKLE_BYTES=1073741824`` changes a limit. ckptkit reads these variables when it is
imported.
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
    # Size of one pickle stream. Large byte strings do not count.
    pickle_bytes: int = 256 << 20
    pickle_stack: int = 1_000_000  # number of values on the stack of a pickle at one time
    pickle_marks: int = 10_000  # number of open MARK opcodes in a pickle
    memo_entries: int = 5_000_000
    value_bytes: int = 512 << 20  # estimated memory for all values of one pickle
    memo_sparse: int = 10_000  # number of memo entries of a pickle with out-of-order indices
    depth: int = 1_000  # nesting of values
    key_depth: int = 100  # nesting of tuples in dict keys: CPython hashes tuples recursively
    # Number of floats, tuples and large integers among dict keys. A hostile file can choose such
    # keys with equal hashes.
    odd_keys: int = 10_000
    key_values: int = 1_000_000  # number of values in all tuples that are dict keys
    string_bytes: int = 64 << 20  # size of one string
    line_bytes: int = 1 << 20  # size of an opcode argument that ends with a newline
    name_bytes: int = 64 << 10  # size of the name of a module, class, zip member or tensor
    int_bytes: int = 1 << 10  # size of one integer
    revisits: int = 100_000  # number of repeated visits of values that occur at several paths
    zip_entries: int = 1_000_000
    zip_directory_bytes: int = 256 << 20
    # Size of a zip member other than a storage, and of a byte string in a pickle.
    record_bytes: int = 256 << 20
    # Decompressed size of all zip members except storages. In addition, ckptkit allows INFLATED
    # times the size of the file.
    inflated_free: int = 8 << 20
    # Decompressed size of a gzip or zstd file. In addition, ckptkit allows UNPACKED times the
    # compressed size.
    unpacked_free: int = 1 << 30
    inflate_ratio: int = 1_100  # decompressed bytes per compressed byte; deflate reaches 1,032
    tar_members: int = 10_000
    tar_records_bytes: int = 512  # size of the extended headers of one tar member
    npy_header_bytes: int = 64 << 10  # size of the header of one numpy array
    safetensors_header_bytes: int = 100_000_000  # the safetensors library has the same limit
    index_bytes: int = 64 << 20
    json_depth: int = 128
    json_values: int = 12_000_000  # number of numbers, strings, lists and objects in a JSON file
    rank: int = 64
    ranks: int = 1 << 20  # number of ranks or shards that a file claims to have
    chunk_visits: int = 5_000_000  # number of comparisons that prove that chunks cover a tensor
    optimizer_values: int = 64  # number of optimizer values for one parameter; Adam has three
    trace_bytes: int = 64 << 20  # size of all pickles that a scan traces in one file
    scan_depth: int = 8  # nesting of files inside files
    scan_parts: int = 1_000_000  # number of parts of a file that a scan examines
    scan_inflated_bytes: int = 1 << 30  # decompressed size of all compressed data in a file
    list_gaps: int = 100_000  # number of missing indices in lists that are rebuilt from flat names
    rule_bytes: int = 64 << 10  # length of one tensor rule
    rule_labels: int = 10_000  # number of labels of one variable in a rule
    rule_variables: int = 64  # number of variables in a tensor name
    rule_terms: int = 100  # number of operators, and depth of parentheses, in a size in a rule
    # Number of steps of the search that matches tensor names against rules. Each tensor name adds
    # 64 to the limit.
    rule_steps: int = 100_000
    rule_targets: int = 1_000_000  # number of tensors that one rule step creates
    rule_copies: int = 4_000_000  # number of copies that fill the target tensors of a rule step
    expansion: int = 4  # output bytes per input byte, unless the caller allows more
    expansion_free: int = 64 << 20  # output bytes allowed beyond `expansion` times the input


MOST = 10**18
# Decompressed bytes of zip members per byte of the file, in addition to `inflated_free`.
INFLATED = 8
# Bytes of a decompressed file per compressed byte, in addition to `unpacked_free`.
UNPACKED = 20
# Maximum values of some limits. Above the maximum, Python or numpy would raise an error.
CEILINGS = {
    "key_depth": 1_000,  # CPython's hash() recurses.
    "int_bytes": 1_780,  # Python limits str() and int() to 4,300 digits.
    "json_depth": 256,  # json.loads
    "rank": 64,  # numpy
    "rule_variables": 100,  # The function that matches names recurses.
    "rule_terms": 200,  # The functions that parse and compute a size recurse.
}


def from_environment(environment: Mapping[str, str]) -> Limits:
    """Return the limits that the environment variables set.

    If no limit has the name of a variable, warn: another version of ckptkit may define that limit.
    Raise UsageError for a value that is not an integer in range.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Limits)}
    found = {}
    for variable, text in environment.items():
        if variable in known:
            name = known[variable]
            most = CEILINGS.get(name, MOST)
            digits = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
            if not digits or int(text) > most:
                expected = f"expected an integer from 0 to {most:,}"
                raise UsageError(f"{variable}: {expected}, got {text!r}")
            found[name] = int(text)
        elif variable.startswith(PREFIX):
            hint = guess(variable, known)
            message = f"{variable} is ignored: no limit has this name"
            warnings.warn(f"{message}; {hint}" if hint else message, stacklevel=1)
    return Limits(**found)


LIMITS = from_environment(os.environ)


def check(name: str, seen: int, what: str) -> None:
    """Raise LimitError if `seen` exceeds the limit `name`."""
    limit: int = getattr(LIMITS, name)
    if seen > limit:
        most = CEILINGS.get(name, MOST)
        setting = f"{PREFIX}{name.upper()}={min(max(seen, 2 * limit), most)}"
        hint = f"if you trust the file, {setting} raises the limit"
        raise LimitError(
            f"{what}: {seen:,} exceeds the limit of {limit:,} ({name})",
            hint=hint if seen <= most else None,
        )


def check_inflated(seen: int, size: int) -> None:
    """Raise LimitError if `seen` decompressed bytes are too many for a file of `size` bytes."""
    check(
        "inflated_free",
        seen - INFLATED * size,
        f"decompressed bytes of zip members beyond {INFLATED} times the size of the file",
    )
