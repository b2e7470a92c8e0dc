"""A hunt for what writing commands make of hostile files: nothing that does something is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ckptkit.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.edits.keys import strip_prefix
from tests.fuzz.hunting import Composition, Finding, Hunt
from tests.fuzz.material import TENSOR
from tests.fuzz.trees import const, mapping

Way = Callable[[Path, Path], object]


def _there_and_back(source: Path, to: Path) -> None:
    between = to.with_suffix(".safetensors")
    convert(source, between, everything=True, force=True)
    convert(between, to, force=True)


WAYS: tuple[Way, ...] = (
    lambda source, to: convert(source, to, force=True),
    lambda source, to: convert(source, to, strip_prefix, force=True, keep_format=False),
    _there_and_back,
)


class Writers(Hunt):
    """Converts files, harmless or not, and loads what was written."""

    way = 0

    def offered(self, made_: Composition) -> bytes | None:
        """Return what is written of a file with a tensor beside what was composed."""
        source, to = self.path, self.path.with_name("written.pth")
        whole = mapping(const("a.weight"), TENSOR, const("b"), made_.node)
        try:
            source.write_bytes(made_._replace(node=whole, container="zip").data())
            WAYS[self.way % len(WAYS)](source, to)
        except (CkptkitError, IndexError, ValueError, RecursionError):
            return None
        return to.read_bytes()

    def _load(self) -> Iterator[Finding]:
        yield from super()._load()
        self.way += 1
