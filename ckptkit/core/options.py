"""Options for reading and writing checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ckptkit.core import arguments
from ckptkit.core.errors import ArgumentError
from ckptkit.core.text import guess, parse_size, some

if TYPE_CHECKING:
    from concurrent.futures import Executor

_WORDS = {
    "copies": ("compare", "check", "first"),
    "objects": ("keep", "drop", "error"),
    "ties": ("alias", "duplicate"),
}
_COUNTS = {"shard_size": 1 << 62, "ranks": 1 << 16}  # maximum values of integer options
# The options that affect the bytes of an output file.
LAYOUT = ("objects", "ties", "all", "shard_size", "ranks", "extras", "sidecars", "check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `open`, `save` and `convert`. Each option has a default.

    Options for reading:

    * ``key``: path of the entry that contains the weights.
    * ``part_only``: accept a single rank's file.
    * ``parts``: path of a file that describes how the tensors of a folder are sharded.
    * ``copies``: treatment of replicated tensors. The values ``compare`` and ``check`` compare the
      checksums of all copies. If checksums are missing, ``compare`` compares up to 16 MiB of bytes,
      and ``check`` compares all bytes. The value ``first`` uses the first copy, even if the copies
      differ.

    Options for the output:

    * ``format``: name of the output format. If None, the suffix of the destination selects the
      format.
    * ``keep_format``: keep the format of the source if the destination has the suffix of the source
      or no suffix. If the change is small, ``keep_format`` with ``in_place`` writes only the
      changed bytes.
    * ``in_place``: overwrite the source.
    * ``objects``: treatment of Python objects other than tensors and plain values. The value is
      ``keep``, ``drop`` or ``error``.
    * ``ties``: treatment of tensors that share memory, if the output format cannot store shared
      memory. The value ``alias`` stores one tensor and records the other names. The value
      ``duplicate`` stores a copy for each name.
    * ``all``: write the complete tree, not only the weights.
    * ``shard_size``: maximum size of a shard, in bytes or as "5GB". A larger tensor gets a separate
      shard. If None, the format selects the size.
    * ``ranks``: number of ranks in a model-parallel output.
    * ``extras``: if safetensors cannot express a value, store the value in ckptkit's own metadata
      entry.
    * ``sidecars``: copy configuration and tokenizer files from the source folder to the output
      folder.
    * ``strict``: raise UsageError if a step is a no-op.

    Options for writing:

    * ``force``: replace an existing destination.
    * ``dry_run``: plan the output and write nothing.
    * ``check``: compare tensors with the checksums in their file. Raise CorruptError for a damaged
      tensor.
    * ``verify``: read input and output again and compare the bytes, before the output gets its
      final name.
    * ``durable``: flush the output to disk.
    * ``allow_expand``: allow an output that is many times larger than its source.
    * ``executor``: a concurrent.futures.Executor that runs the parts into which ckptkit splits the
      work. The workers of the executor must have access to the same files.
    * ``fork``: allow ckptkit to compute bytes in forked processes.
    * ``progress``: a function with two arguments: the number of bytes written since the last call,
      and the total number of bytes.
    """

    key: str | None = None
    part_only: bool = False
    parts: str | None = None
    copies: str = "compare"
    format: str | None = None
    keep_format: bool = True
    in_place: bool = False
    objects: str = "keep"
    ties: str = "alias"
    all: bool = False
    shard_size: int | None = None
    ranks: int | None = None
    extras: bool = True
    sidecars: bool = True
    strict: bool = False
    force: bool = False
    dry_run: bool = False
    check: bool = True
    verify: bool = False
    durable: bool = False
    allow_expand: bool = False
    executor: Executor | None = None
    fork: bool = False
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shard_size, str) and (size := parse_size(self.shard_size)) is not None:
            object.__setattr__(self, "shard_size", size)
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                meant = " or ".join(map(repr, words))
                raise arguments.wrong(name, meant, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), (int, type(None))):
                raise arguments.wrong(name, "True or False", getattr(self, name))
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_whole and 1 <= value <= most):
                raise arguments.wrong(name, f"an integer from 1 to {most:,}", value)
        for name in ("key", "parts", "format"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise arguments.wrong(name, "a string", getattr(self, name))
        if self.executor is not None and not hasattr(self.executor, "submit"):
            raise arguments.wrong("executor", "a concurrent.futures.Executor", self.executor)
        if self.progress is not None and not callable(self.progress):
            raise arguments.wrong("progress", "a function", self.progress)

    @property
    def words(self) -> tuple[str, ...]:
        """The command-line options that are equivalent to `parts` and `copies`."""
        parts = () if self.parts is None else ("--parts", self.parts)
        return (*parts, *(("--copies", "first") if self.copies == "first" else ()))


# Hints for command-line options that have no Python argument of the same name.
_OPTIONS_OF_COMMANDS = {
    "cast": "ckptkit.convert(source, destination, lambda ck: ckptkit.cast(ck, 'float16'))",
    "dequantize": "ckptkit.convert(source, destination, ckptkit.dequantize)",
    "drop": "ckptkit.convert(source, destination, lambda ck: ckptkit.select(ck, drop='head.*'))",
    "keep": "ckptkit.convert(source, destination, lambda ck: ckptkit.select(ck, 'head.*'))",
    "no_check": "use check=False",
    "no_extras": "use extras=False",
    "no_sidecars": "use sidecars=False",
    "strip": "ckptkit.convert(source, destination, ckptkit.strip_prefix)",
    "to": "ckptkit.convert(source, destination, lambda ck: ckptkit.remap(ck, 'cpu'))",
}
_NAMES = tuple(field.name for field in fields(Options))
_FLAGS = tuple(field.name for field in fields(Options) if isinstance(field.default, bool))
DEFAULT = Options()


def made(options: Options | None, changes: dict[str, Any]) -> Options:
    """Return `options`, or the defaults, with the keyword arguments `changes` applied.

    Raise ArgumentError for an unknown name.
    """
    if not isinstance(options, (Options, type(None))):
        error = arguments.wrong("options", "ckptkit.Options", options)
        if isinstance(options, str):
            error.hint = f"pass key={options!r} to select the entry that contains the weights"
        raise error
    for name in changes:
        if name not in _NAMES:
            hint = _OPTIONS_OF_COMMANDS.get(name) or guess(name, _NAMES) or some(_NAMES, 9)
            raise ArgumentError(f"there is no argument {name!r}", hint=hint)
    return replace(options or DEFAULT, **changes) if changes else options or DEFAULT
