"""Options: how to read, what to write and how, in one record that is made once at the edge."""

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
_COUNTS = {"shard_size": 1 << 62, "ranks": 1 << 16}  # the most of each
# What decides the bytes of an output, besides the checkpoint and the format.
LAYOUT = ("objects", "ties", "everything", "shard_size", "ranks", "extras", "sidecars", "check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `open`, `save` and `convert`; each has a default.

    Reading. ``key``: the entry to take as the weights. ``part_only``: take a file of one rank as it
    is. ``parts``: a file that describes how the parts in a folder were split. ``copies``: compare
    the copies of a tensor as far as checksums tell (``compare``), read and compare them
    (``check``), or take the first where they differ (``first``).

    Output. ``format``: its name; None: that of the suffix. ``keep_format``: a destination without a
    suffix, or with that of the source, gets the format of the source, and a file is changed in
    place by the few bytes that differ, if they are few. ``in_place``: write the source itself.
    ``objects``: ``keep``, ``drop`` or ``error`` for Python objects that are not tensors or plain
    values. ``ties``: ``alias`` (store once and note) or ``duplicate`` for tensors with equal bytes
    in a format without views. ``everything``: write the whole tree, not only what the format is
    made for. ``shard_size``: the most bytes in a file of a sharded format, a single larger tensor
    aside, as a number or as "5GB"; None: the default. ``ranks``: the number of parts of a
    model-parallel format. ``extras``: keep in safetensors' metadata what their header cannot
    express. ``sidecars``: copy configuration and tokenizer files from folder to folder. ``strict``:
    raise UsageError for a step that changes nothing.

    Writing. ``force``: replace an existing destination. ``dry_run``: plan, and write nothing.
    ``check``: compare tensors with the checksums in their file, and raise CorruptError for a
    damaged one. ``verify``: read the output back and compare it before it appears. ``durable``:
    flush it to the disk. ``allow_expand``: write an output that is many times larger than its
    source. ``executor``: where the work is done; its workers must see the same files. ``fork``:
    processes may be forked for what is computed. ``progress``: called with the bytes written since
    the last call, and the total.
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
    everything: bool = False
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
                raise arguments.wrong(name, f"a whole number from 1 to {most:,}", value)
        for name in ("key", "parts", "format"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise arguments.wrong(name, "a string", getattr(self, name))
        if self.executor is not None and not hasattr(self.executor, "submit"):
            raise arguments.wrong("executor", "a concurrent.futures.Executor", self.executor)
        if self.progress is not None and not callable(self.progress):
            raise arguments.wrong("progress", "a function", self.progress)

    def changed(self, changes: dict[str, Any]) -> Options:
        """Return these options with others in `changes`. Raises ArgumentError for unknown ones."""
        for name in changes:
            if name not in _NAMES:
                other = _OPTIONS_OF_COMMANDS.get(name)
                hint = other or guess(name, _NAMES) or some(_NAMES, 9)
                raise ArgumentError(f"there is no argument {name!r}", hint=hint)
        return replace(self, **changes) if changes else self

    @property
    def words(self) -> tuple[str, ...]:
        """The options of a command that reads the same folder alike."""
        parts = () if self.parts is None else ("--parts", self.parts)
        return (*parts, *(("--copies", "first") if self.copies == "first" else ()))


# Options of commands that are no argument of this name.
_OPTIONS_OF_COMMANDS = {
    "all": "it is everything=True",
    "cast": "ckptkit.convert(source, destination, lambda ck: ckptkit.cast(ck, 'float16'))",
    "no_check": "it is check=False",
    "no_extras": "it is extras=False",
    "no_sidecars": "it is sidecars=False",
}
_NAMES = tuple(field.name for field in fields(Options))
_FLAGS = tuple(field.name for field in fields(Options) if isinstance(field.default, bool))
DEFAULT = Options()


def made(options: Options | None, changes: dict[str, Any]) -> Options:
    """Return the options that a caller gave, with the changes that were named beside them."""
    if not isinstance(options, (Options, type(None))):
        error = arguments.wrong("options", "of class Options", options)
        if isinstance(options, str):
            error.hint = f"key={options!r} names the entry of the weights"
        raise error
    return (options or DEFAULT).changed(changes)
