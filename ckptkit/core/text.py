"""Functions that format text: counts, lists of names, sizes, escapes, suggestions, URLs.

If names differ only in an index, `fold` joins these names into one line such as
``layers.{0..31}.attn.weight``. An index is a component of a name that is a number. A folded line
lists the indices of its names, and omits some of them if they form more than `RUNS` ranges. `fold`
joins lines along one index at a time, from the last index to the first. Two lines are joined only
if their other columns, such as dtype and shape, are equal.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

# Invisible characters for which str.isprintable() returns True: joiners, fillers and others.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)


def escape(text: str) -> str:
    """Escape invisible characters of `text`, and characters that move the cursor or reorder text.

    ``str.isprintable()`` returns False for most of these characters: control characters, line
    breaks, bidirectional marks, zero-width characters, lone surrogates and special spaces. The
    regular expression `_INVISIBLE` matches more invisible characters.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(
        c if c.isprintable() and not _INVISIBLE.match(c) else c.encode("unicode_escape").decode()
        for c in text
    )


def message(label: str, text: str, hint: str | None = None) -> list[str]:
    """Return the lines of a message: ``label: text`` and, with a hint, ``hint: ...``."""
    lines = [f"{label}: {text}", *([f"hint: {hint}"] if hint else [])]
    return [escape(line) for line in lines]


def argument(path: str) -> tuple[str, ...]:
    """Return `path` as command-line arguments. If `path` starts with a dash, ``--`` comes first."""
    return ("--", path) if path.startswith("-") else (path,)


_typed: list[bool] = []  # not empty while a ckptkit command runs


def typed(option: str, argument: str) -> str:
    """Return `option` if a command runs. Return `argument` if Python code uses ckptkit."""
    return option if _typed else argument


def typed_value(name: str, value: str) -> str:
    """Return ``--key model`` if a command runs. Return ``key='model'`` for Python code."""
    return typed(f"--{name} {shell_word(value)}", f"{name}={value!r}")


@contextmanager
def on_command_line() -> Iterator[None]:
    """Put command-line options into messages instead of Python arguments.

    Within the ``with`` block, messages contain `--all` instead of `all=True`.
    """
    _typed.append(True)
    try:
        yield
    finally:
        _typed.pop()


def shell_command(words: Iterable[str]) -> str:
    """Join words into a shell command (bash, zsh). Quote words with special characters."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """Quote a word for a shell. A word with unprintable characters becomes ``$'...'``."""
    from shlex import quote
    from string import printable

    if escape(word) == word:
        return quote(word)
    try:
        data = word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that cannot occur in a file name
        return quote(escape(word))
    plain = {ord(char) for char in printable if char.isprintable()} - {*b"\\'"}
    quoted = (chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in data)
    return f"$'{''.join(quoted)}'"


# Suffixes of the files that ckptkit writes. The suffix selects the format.
WRITTEN = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pth.tar", ".pt.tar", ".safetensors", ".npz")


def output_name(path: str, mark: str, suffix: str | None = None) -> str:
    """Return a name for an output file: ``run-cpu.pth`` for the path ``run.pth`` and mark ``cpu``.

    If `path` is a URL, the output file is in the working directory. `path` may be ``-`` for
    standard input. `suffix` replaces the suffix of `path`. If ckptkit writes no files with the
    suffix of `path` (``data.pkl``, ``model.tar.gz``), the output file has the suffix ``.pth``.
    """
    if "://" in path:
        path = path.partition("?")[0].rpartition("/")[2]
    path = "stdin" if path == "-" else path
    stem, own = os.path.splitext(path.rstrip("/"))
    folder, name = os.path.split(stem)
    if name.startswith(".") and not own:  # the user may name a DCP folder by its file .metadata
        stem = folder if os.path.basename(folder).strip(".") else "checkpoint"
    if own in (".gz", ".bz2", ".xz", ".zst"):
        stem, own = os.path.splitext(stem)
    if own == ".tar":
        stem, inner = os.path.splitext(stem)
        own = inner + own
    if own[1:2].isalpha() and own.lower() not in WRITTEN and not os.path.isdir(path):
        own = ".pth"
    return f"{stem}-{mark}{own if suffix is None else suffix}"


def size(nbytes: int) -> str:
    """Format a number of bytes in decimal units. 1,100,000 becomes ``1.1 MB``."""
    if nbytes < 1_000:
        return f"{nbytes} B"
    scaled = nbytes / 1_000 if nbytes < 1 << 100 else float("inf")
    for unit in ("kB", "MB", "GB", "TB"):
        if scaled < 999.95:
            return f"{scaled:.1f} {unit}"
        scaled /= 1_000
    return f"{scaled:,.1f} PB"


_UNITS = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def parse_size(text: str) -> int | None:
    """Return the number of bytes for ``5GB``, ``5GiB`` or digits. Return None for other strings."""
    # Imported only here, because fractions imports decimal, which is slow.
    from fractions import Fraction

    found = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,9})? ?([kmgt]i?b|b?)", text.strip().lower())
    size = int(Fraction(found[1] + (found[2] or "")) * _UNITS.get(found[3], 1)) if found else 0
    return size or None


def plural(count: int, noun: str) -> str:
    """Format a count and its noun: ``1 tensor``, ``97 tensors``, ``2 entries``."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count:,} {noun}"


NAMES = 4  # maximum number of names in a list within a sentence


def some(names: Iterable[str], most: int = NAMES) -> str:
    """List the first `most` names and count the rest: ``a, b, c, d and 93 more``."""
    listed = list(names)
    return ", ".join(listed[:most]) + and_more(len(listed) - most)


def quoted(names: Iterable[str], most: int = NAMES) -> str:
    """List names in quotes: ``'a', 'b' and 5 more``."""
    return some(map(repr, names), most)


def and_more(count: int) -> str:
    """Return `` and 93 more`` for 93 omitted names. Return "" for 0."""
    return f" and {count:,} more" if count > 0 else ""


SHOWN = 100  # maximum number of characters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value from a file. Shorten the repr for a message."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN + 2 else f"{text[: SHOWN - 3]}..."


def mismatch(what: str, seen: int, expected: int) -> str:
    """Return the message for a wrong CRC-32: `what` has the CRC-32 `seen` instead of `expected`."""
    return f"{what} is damaged: its CRC-32 is {seen:08x}, not {expected:08x}"


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tests if a name matches one of the globs. ``*`` also matches dots."""
    from fnmatch import translate

    match = re.compile("|".join(map(translate, globs))).match
    return lambda name: match(name) is not None


@lru_cache
def shape(sizes: tuple[int, ...]) -> str:
    """Format a shape as torch writes it: ``[16, 3, 3, 3]``."""
    return f"[{', '.join(str(each) if each < 1 << 63 else '...' for each in sizes)}]"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return the names most similar to `word`, at most three.

    Only the first 5,000 names of `known` are compared, except long names.
    """
    from difflib import get_close_matches  # costs 10 ms

    short = [name for name in islice(known, 5_000) if len(name) <= _COMPARED]
    return get_close_matches(word[:_COMPARED], short, n=3, cutoff=cutoff)


def meant(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean a, b? ``. Return "" if no name is similar."""
    close = nearest(word, known)
    return f"did you mean {', '.join(close)}? " if close else ""


def guess(word: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean a, b?``. Return None if no name is similar."""
    return meant(word, known).rstrip() or None


def entries(word: str, known: Sequence[str], noun: str = "entries") -> str | None:
    """Return a hint for the missing entry `word`, with similar names and the first known names."""
    listed = some(known, 12)
    return f"{meant(word, known)}the {noun} are: {listed}" if known else None


_COMPARED = 200  # maximum number of characters of a name to compare


# URLs


# The start of a URL. In fsspec, a URL can have several protocols, as in simplecache::s3://...
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")
_WEB_USER = re.compile(r"(?i)(?<=http://)[^/?#]*@|(?<=https://)[^/?#]*@")
_PASSWORD = re.compile(r"(?<=://)([^/?#@:]*):[^/?#]*@")
_HUB_PAGE = re.compile(r"(https?://(?:huggingface\.co|hf\.co)(?:/[^/]+){2,3})/(?:blob|raw)/")
_GITHUB_PAGE = re.compile(r"(https?://github\.com/[^/]+/[^/]+)/blob/")


def is_url(path: object) -> bool:
    """Return True if `path` is a URL, False if it is a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


def shown_url(path: str) -> str:
    """Return `path` for messages. Remove the password and the query from a URL."""
    if not is_url(path):
        return path
    path = _PASSWORD.sub(r"\1:***@", _WEB_USER.sub("***@", path))
    place, mark, _ = path.partition("?")
    return f"{place}{mark}***" if mark else place


def behind_page(url: str) -> str | None:
    """Return the download URL of the file whose web page or Git LFS pointer is `url`.

    Return None for other URLs. The page may be on huggingface.co or github.com.
    """
    place = without_query(url)
    if _HUB_PAGE.match(place):
        return _HUB_PAGE.sub(r"\1/resolve/", place)
    return _GITHUB_PAGE.sub(r"\1/raw/", place) if _GITHUB_PAGE.match(place) else None


def without_query(url: str) -> str:
    """Return `url` without its query."""
    return url.partition("?")[0]


def in_folder(url: str, name: str) -> str:
    """Return the URL of the file `name` in the folder `url`. Keep the query of `url`."""
    folder, mark, query = url.partition("?")
    start = _start(folder)
    rest = folder[start:].rstrip("/")
    above = f"{rest}/" if rest or folder[start:] else ""
    return f"{folder[:start]}{above}{name}{mark}{query}"


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the folder of a file, and the name of the file. Keep the query of `url`."""
    place, mark, query = url.partition("?")
    start = _start(place)
    above, slash, name = place[start:].rpartition("/")
    return f"{place[:start]}{above or slash}{mark}{query}", name


def _start(url: str) -> int:
    """Return the length of the scheme of `url`, with ``://``. Return 0 for a local path."""
    found = _URL.match(url)
    return found.end() if found else 0


# Groups of items


T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def flatten(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """Return the items of all groups in order."""
    return chain.from_iterable(groups)


def owners(groups: Iterable[tuple[T, Iterable[Key]]]) -> dict[Key, T]:
    """Map each item to its group. If groups share an item, the last group wins."""
    found: dict[Key, T] = {}
    for group, items in groups:
        found.update(dict.fromkeys(items, group))
    return found


def merge_all(mappings: Iterable[Mapping[Key, T]]) -> dict[Key, T]:
    """Merge mappings. If mappings share a key, the last mapping wins."""
    found: dict[Key, T] = {}
    for each in mappings:
        found.update(each)
    return found


def without(mapping: Mapping[Key, T], keys: Container[object]) -> dict[Key, T]:
    """Return the mapping without the given keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


# Folding


_INDEX = r"(0|[1-9][0-9]{0,17})"
_split = re.compile(rf"(?<![^.]){_INDEX}(?![^.])").split
_last_index = re.compile(rf"((?:.*\.)?){_INDEX}((?:\..*)?)", re.DOTALL).fullmatch
COUNTERS = ("num_batches_tracked", "step")
RUNS = 8  # maximum number of ranges between braces

Indices = tuple[tuple[int, ...], ...]  # for each index in a name, its values in the folded line


class Item(NamedTuple):
    label: str
    columns: Hashable  # lines join only if their columns are equal
    nbytes: int


class Folded(NamedTuple):
    label: str
    columns: Any  # Hashable
    nbytes: int  # sum of `nbytes` of the joined items
    rows: int


# Lines that are joined into one line. The tuple contains the position of the first line, the
# indices, the number of bytes and the number of lines.
_Block = tuple[int, Indices, int, int]


class Modules:
    """Classifies modules by their direct members, such as weight and bias with their shapes.

    `tensors` contains each tensor name of a checkpoint, with its dtype and shape. Calling a
    `Modules` object with a tensor name returns the sum of the hashes of all members of the tensor's
    module. Two modules are similar if these sums are equal. A set of members for each module would
    need more memory than the names of the tensors.
    """

    def __init__(self, tensors: Iterable[tuple[str, Hashable]] = ()) -> None:
        self._kinds = kinds = dict[str, int]()
        for name, what in tensors:
            module, _, last = name.rpartition(".")
            if not last.isdecimal():  # an item of a list is not a member of a module
                kinds[module] = kinds.get(module, 0) + hash((last, what))

    def __call__(self, name: str) -> int | None:
        """Return the sum of hashes for the module of the tensor `name`.

        Return None for items of lists, because a list is not a module. Also return None for
        counters of training steps and batches: `fold` joins counters even if their modules are not
        similar.
        """
        module, _, last = name.rpartition(".")
        return None if last in COUNTERS else self._kinds.get(module)


def fold(
    items: Iterable[Item | tuple[str, Hashable, int]],
    part: Callable[[Any], Hashable] | None = None,
) -> list[Folded]:
    """Join lines that differ only in an index. Joined lines take the place of their first line.

    If `part` is given, all items are tensors. Then two lines join only if their modules are similar
    (see `Modules`). `part` maps the columns of a tensor to its dtype and shape.
    """
    kind_of: Callable[[str], int | None] | None = None
    if part is not None:
        items = list(items)
        kind_of = Modules((label, part(columns)) for label, columns, _ in items)
    found: list[tuple[int, Folded]] = []
    # Lines that differ only in their last index have the same key. The value of a key is an array
    # with two numbers for each line: the position of the line, and the last index. An array needs
    # less memory than a list of a million pairs.
    runs: defaultdict[tuple[Any, ...], array[int]] = defaultdict(partial(array, "q"))
    for position, (label, columns, nbytes) in enumerate(items):
        if (last := _last_index(label)) is None:
            found.append((position, Folded(label, columns, nbytes, 1)))
            continue
        before, index, after = last.groups()
        kind = None if kind_of is None else kind_of(label)
        run = runs[before, after, columns, nbytes, kind]
        run.append(position)
        run.append(int(index))
    groups: defaultdict[tuple[Any, ...], list[_Block]] = defaultdict(list)
    for (before, after, columns, nbytes, kind), run in runs.items():
        parts = _split(before)
        texts, others = (*parts[::2], after), [(int(index),) for index in parts[1::2]]
        last_indices = tuple(run[1::2])
        count = len(last_indices)
        block = run[0], (*others, last_indices), nbytes * count, count
        groups[texts, columns, kind].append(block)
    for (texts, columns, _), blocks in groups.items():
        for dimension in reversed(range(len(texts) - 1)):
            if len(blocks) > 1:
                blocks = list(_along(blocks, dimension))
        for first, indices, nbytes, count in blocks:
            label = texts[0] + "".join(
                _ranges(values) + text for values, text in zip(indices, texts[1:], strict=True)
            )
            found.append((first, Folded(label, columns, nbytes, count)))
    return [row for _, row in sorted(found)]


def family(name: str) -> str:
    """Replace each index of a name by ``*``. Return, for example, ``layers.*.weight``."""
    return "*".join(_split(name)[::2])


def ranges(names: Iterable[str]) -> str:
    """Return the folded lines of names, such as ``{0,2}.weight``, as one string."""
    return some([row.label for row in fold(Item(name, (), 0) for name in names)])


def unfolded(items: Iterable[Item | tuple[str, Hashable, int]]) -> list[Folded]:
    """Return one line for each item. Join no lines."""
    return [Folded(label, columns, nbytes, 1) for label, columns, nbytes in items]


def _along(blocks: list[_Block], dimension: int) -> Iterator[_Block]:
    """Join blocks whose indices differ only at position `dimension`."""
    together: defaultdict[Indices, list[_Block]] = defaultdict(list)
    for block in blocks:
        indices = block[1]
        together[indices[:dimension] + indices[dimension + 1 :]].append(block)
    for same in together.values():
        if len(same) == 1:
            yield same[0]
            continue
        first, indices = min([block[0] for block in same]), same[0][1]
        values = tuple(chain.from_iterable([block[1][dimension] for block in same]))
        nbytes, rows = sum([block[2] for block in same]), sum([block[3] for block in same])
        yield first, (*indices[:dimension], values, *indices[dimension + 1 :]), nbytes, rows


def _ranges(values: tuple[int, ...]) -> str:
    """Format numbers as ``7``, ``{0..31}`` or ``{0..3,5}``. Shorten a list of many ranges."""
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return str(ordered[0])
    texts = []
    first = last = ordered[0]
    for value in (*ordered[1:], -1):  # -1 ends the last range
        if value != last + 1:
            texts.append(f"{first}..{last}" if last > first else str(first))
            first = value
        last = value
    if len(texts) > RUNS:
        texts[3:-1] = [".."]
    return "{" + ",".join(texts) + "}"
