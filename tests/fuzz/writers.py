"""A hunt for what writing makes of hostile files: nothing that does something is written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Any

from ckptkit.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.edits import EDITS, step
from tests.fuzz.hunting import Composition, Hunt
from tests.fuzz.material import TENSOR
from tests.fuzz.trees import const, mapping

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
# The arguments with which each edit changes the files below; the others want files or more weights.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "drop-entry": {"paths": ["c"], "missing_ok": True}, "weights": {}, "extract": {"key": "b"}, "wrap": {"key": "k"},
    "select": {"keep": ["*"]}, "strip": {}, "add": {}, "rename": {"sub": [("a", "c")]}, "cast": {"dtypes": "float16"},
    "remap": {"devices": "meta"}, "compact": {}, "set-metadata": {"metadata": {"a": "b"}}, "tie": {"names": {"t": "module.a"}},
}  # fmt: skip
EDITED = [each.word for each in EDITS if each.word in ARGUMENTS]
FORMATS = (
    ("torch-zip", ".pth"), ("safetensors", ".safetensors"), ("sharded-bin", ""), ("dcp", ""),
)  # fmt: skip


class Writers(Hunt):
    """Writes files, harmless or not, in every format and by every edit, and loads what was written."""

    folder = tempfile.TemporaryDirectory(dir=MEMORY)

    def offered(self, made_: Composition) -> bytes | None:
        """Return what is written of a file with a tensor beside what was composed, or what is written of that."""
        format, suffix = self.random.choice(FORMATS)
        word = self.random.choice(EDITED)
        folder = Path(self.folder.name)
        source, to, back = folder / "made.pth", folder / f"written{suffix}", folder / "back.pth"
        both = mapping(const("module.a"), TENSOR, const("b"), made_.node)
        try:
            source.write_bytes(made_._replace(node=both, container="zip").data())
            steps = [step(word, **ARGUMENTS[word])] if self.random.random() < 0.7 else []
            whole = suffix == ".safetensors"
            convert(source, to, *steps, format=format, all=whole, force=True, keep_format=False)
            if suffix == ".pth":
                return to.read_bytes()
            convert(to, back, force=True, keep_format=False)
            return back.read_bytes()
        except (CkptkitError, IndexError, ValueError, RecursionError):
            return None
        finally:
            if to.is_dir():
                rmtree(to)
