"""The source code that torch 0.1 to 1.5 kept for each class of a pickled module.

Shown as metadata, never executed.

A persistent id names the class where the pickle first needs it: ``(class, source file, source
text)`` in tar files, the same after ``'module'`` in legacy streams. Both texts are None where
Python did not find them.
"""

from __future__ import annotations

from ckptkit.core.errors import FormatError
from ckptkit.core.limits import check
from ckptkit.core.tree import ByteString, Global, Node, StoredBytes


class ModuleSources:
    """The classes of one pickle, and their source code."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, made: Node, text: Node) -> Global:
        """Return the class, and keep its source.

        Raises FormatError for what is no class or no text.
        """
        if not isinstance(made, Global):
            raise FormatError("a module's source is recorded for something that is not a class")
        if isinstance(text, StoredBytes):  # a str of Python 2
            check("string_bytes", text.extent.length, f"bytes of the source of {made}")
            from ckptkit.compute.operation import stream

            text = ByteString(b"".join(stream(text.extent)))
        if not isinstance(text, (str, ByteString, type(None))):
            raise FormatError(f"the source of {made} is not text")
        self._texts[str(made)] = "" if text is None else str(text)
        check("memo_sparse", len(self._texts), "classes with their source")
        return made

    @property
    def metadata(self) -> dict[str, str]:
        return {f"module_source:{name}": text for name, text in self._texts.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._texts:
            return ()
        return (
            f"the source code of {len(self._texts)} classes is in the file; it is kept as metadata",
        )


def endian_warning(system: Node) -> tuple[str, ...]:
    """Return warnings about the machine that a file describes."""
    if isinstance(system, dict) and system.get("little_endian") is False:
        return (
            "written on a big-endian machine; its data is read as little-endian, as torch does",
        )
    return ()
