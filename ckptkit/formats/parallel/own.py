"""A table of one's own, in YAML (``--parts FILE``).

``files`` is an expression for names below the folder, whose groups are the axes: tp is the one that
cuts. ``root`` is the entry that holds the state_dict. ``layers`` are numbers that begin anew along
other axes. Of ``rules``, the first whose expression matches a whole name counts; there is no
other. `ckptkit help parallel` shows one.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import FormatError, PathError, UsageError
from ckptkit.core.tree import Node, find
from ckptkit.formats.common.rank_files import Reader
from ckptkit.formats.format import Probe
from ckptkit.formats.parallel import yaml_text
from ckptkit.formats.parallel.copies import Copies
from ckptkit.formats.parallel.joining import Joiner
from ckptkit.formats.parallel.tables import (
    TP,
    Offset,
    RankFile,
    Table,
    check_grid,
    flattened,
    merge,
    rule,
)
from ckptkit.formats.parallel.verbs import Cut, Drop, Mean, Same, Sum, Verb

_KEYS = {"files", "root", "layers", "rules"}
_BLOCKS = re.compile(r"cut ([0-9])(?: blocks ([0-9]{1,4}))?")
_SIZES = re.compile(r"cut ([0-9]) sizes ([0-9 ]{1,200})")
_PLAIN: dict[str, Verb] = {"same": Same(), "sum": Sum(), "mean": Mean()}


class OwnTable:
    """The content of a table file. Raises UsageError."""

    def __init__(self, path: str) -> None:
        self.path = path
        content = self._content()
        if (
            not isinstance(content, dict)
            or not set(content) <= _KEYS
            or not {"files", "rules"} <= set(content)
        ):
            raise self._wrong(
                "is not a table with files and rules", f"it may have {', '.join(sorted(_KEYS))}"
            )
        self.files = self._pattern(content["files"])
        self.root = content.get("root")
        if TP not in self.files.groupindex:
            raise self._wrong(
                "names no rank in files", r"write (?P<tp>[0-9]+) in place of its number"
            )
        self.table = Table(
            tuple(map(self._rule, self._list(content["rules"]))),
            self._offsets(content.get("layers")),
        )

    def _content(self) -> Any:
        try:
            with open(self.path, "rb") as file:
                data = file.read((1 << 20) + 1)
        except OSError as error:
            raise PathError(f"cannot be read: {error.strerror}", where=self.path) from error
        return yaml_text.parse(data, self.path)

    def _wrong(self, message: str, hint: str | None = None) -> UsageError:
        return UsageError(
            message, where=self.path, hint=hint or "`ckptkit help parallel` shows a table"
        )

    def _pattern(self, text: Any) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except (re.error, TypeError) as error:
            raise self._wrong(f"{text!r} is not a regular expression: {error}") from error

    def _list(self, node: Any) -> list[Any]:
        if not isinstance(node, list):
            raise self._wrong("rules are no list")
        return node

    def _rule(self, node: Any) -> Any:
        if not isinstance(node, dict) or len(node) != 1:
            raise self._wrong(f"{node!r} is not a rule", "a rule is `- 'expression': verb`")
        ((pattern, word),) = node.items()
        return rule(self._pattern(pattern).pattern, self._verb(str(word)))

    def _verb(self, word: str) -> Verb:
        if word in _PLAIN:
            return _PLAIN[word]
        if word.startswith("drop"):
            return Drop(word.removeprefix("drop").strip() or "as the table says")
        if found := _BLOCKS.fullmatch(word):
            return Cut(int(found[1]), int(found[2] or 1) or 1)
        if found := _SIZES.fullmatch(word):
            return Cut(int(found[1]), tuple(map(int, found[2].split())), exact=True)
        raise self._wrong(
            f"{word!r} is no verb",
            "cut DIM, cut DIM blocks N, cut DIM sizes A B C, same, sum, mean, drop REASON",
        )

    def _offsets(self, node: Any) -> tuple[Offset, ...]:
        if node is None:
            return ()
        if not isinstance(node, dict) or not isinstance(node.get("by"), list):
            raise self._wrong("layers are not {pattern: ..., by: [axis]}")
        pattern = self._pattern(node.get("pattern"))
        axes = tuple(map(str, node["by"]))
        if not pattern.groups or not set(axes) <= set(self.files.groupindex):
            raise self._wrong(
                "layers count along axes that files do not name, or their pattern has no group"
            )
        return (Offset(pattern, axes),)


def read(probe: Probe, format: str) -> Checkpoint:
    """The state_dict that the files make by the table that was asked for."""
    assert probe.options.parts is not None
    own = OwnTable(probe.options.parts)
    reader, joiner = Reader(probe.folder), Joiner(Copies(probe.options.copies))
    parts = [
        RankFile(place, _at(found), _entries(reader, folder, name, own))
        for place, folder, name in _files(probe.folder)
        if (found := own.files.fullmatch(place))
    ]
    if not parts:
        raise UsageError(
            f"no file in {probe.name} has a name like {own.files.pattern!r}", where=own.path
        )
    axes = {axis: 1 + max(part.at[axis] for part in parts) for axis in own.files.groupindex}
    check_grid(parts, axes, {})
    merged = merge(parts, axes, own.table, joiner)
    detail = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    return Checkpoint(
        merged.tensors, format, probe.folder, globals=tuple(reader.globals),
        warnings=(*merged.warnings, *joiner.copies.warnings(), *reader.warnings),
        about=f"{os.path.basename(own.path)}: {detail}",
    )  # fmt: skip


def _files(folder: Folder) -> list[tuple[str, Folder, str]]:
    """The files in the folder and in those below it: the path with slashes, the folder, and the
    name there."""
    below = set(folder.folders())
    found = [(name, folder, name) for name in folder.list() if name not in below]
    for each in sorted(below):
        inner = folder.sub(each)
        deeper = set(inner.folders())
        found += [(f"{each}/{name}", inner, name) for name in inner.list() if name not in deeper]
    return found


def _at(found: re.Match[str]) -> dict[str, int]:
    try:
        return {axis: int(number or 0) for axis, number in found.groupdict().items()}
    except ValueError as error:
        raise UsageError(
            f"the groups of files match something else than numbers: {found[0]!r}"
        ) from error


def _entries(reader: Reader, folder: Folder, name: str, own: OwnTable) -> dict[str, Node]:
    root = reader.read(name, folder).root
    if own.root:
        _, root = find(root, str(own.root))
    if not isinstance(root, dict):
        raise FormatError("holds no state_dict", where=name)
    return dict(flattened(root))
