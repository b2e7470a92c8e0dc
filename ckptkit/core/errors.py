"""Errors: one class for each kind of failure that a caller may want to handle differently.

Every failure that ckptkit foresees is a :class:`CkptkitError`: a sentence, the file or place it is
about, a hint (what to type next) and the exit code of the command line. Any other exception that
escapes is a bug. Many are also the builtin error that Python code catches for such a failure.

A warning that other code asks about is a :class:`Notice`, a text with a code and facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

NEWER_TORCH = "newer-torch"  # UnsupportedError: of a format that only a newer torch reads


class CkptkitError(Exception):
    """Base of every error that ckptkit raises on purpose.

    ``where`` is the file, ``hint`` the advice; both may be filled in on the way up. In a hint,
    ``{where}`` is the file, and ``{new}`` a name for a new one beside it. ``code`` says which
    failure it is, for code that must tell: it is that of the class unless one is given.
    """

    exit_code = 3
    code = "failed"
    part: str | None = None  # the part of a request that it is about, which begins its message

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.message = message
        self._where, self._hint, self._noted = where, hint, False
        self._note()

    @property
    def where(self) -> str | None:
        """The file or place that it is about."""
        return self._where

    @where.setter
    def where(self, where: str | None) -> None:
        self._where = where
        self._note()

    @property
    def hint(self) -> str | None:
        """The advice. It is also the first note of the exception, which Python prints."""
        return self._hint and _filled(self._hint, self._where)

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        self._note()

    def _note(self) -> None:
        others = getattr(self, "__notes__", [])[self._noted :]
        self._noted = bool(self._hint)
        self.__notes__ = [f"hint: {self.hint}", *others] if self._hint else others

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def at(self, where: str) -> CkptkitError:
        """Return this error with `where` filled in, unless it already names a place."""
        if self.where is None:
            self.where = where
        return self


def _filled(hint: str, where: str | None) -> str:
    """Return the hint with the names of its files; where they are not known, name its commands."""
    if "{where}" not in hint:
        return hint
    if not where:
        return hint.replace(" {where}", "").replace(" {new}", "").replace("`ckptkit ", "`")
    from ckptkit.core.text import output_name, shell_word

    where = f"./{where}" if where.startswith("-") else where  # else it is an option
    new = shell_word(output_name(where, "new"))
    return hint.replace("{where}", shell_word(where)).replace("{new}", new)


class UsageError(CkptkitError, ValueError):
    """The request is invalid as typed: a bad option, DST is SRC, an unknown key or suffix."""

    code = "usage"
    exit_code = 2


class ArgumentError(UsageError, TypeError):
    """An argument of a function is of the wrong type."""

    code = "argument"


class NothingToDoError(CkptkitError):
    """A command would change nothing, and has nothing else to do."""

    code = "nothing-to-do"
    exit_code = 1


class UnknownNameError(UsageError, KeyError):
    """The checkpoint has no entry of that name."""

    code = "unknown-name"


class PositionError(UsageError, IndexError):
    """An index is outside of a tensor."""

    code = "position"


class MissingPackageError(UsageError, ImportError):
    """The request needs a package that is not installed."""

    code = "missing-package"


class OutputExistsError(UsageError, FileExistsError):
    """The destination exists and `force` was not given."""

    code = "output-exists"


class InputError(CkptkitError):
    """The input is refused."""

    code = "input"


class PathError(InputError):
    """No regular file at the path, or a name that leads out of its folder."""

    code = "path"


class MissingFileError(PathError, FileNotFoundError):
    """There is no file or folder at the path."""

    code = "missing-file"


class FormatError(InputError, ValueError):
    """Malformed: the bytes break a rule of their format, or are in no format that ckptkit knows."""

    code = "format"


class TruncatedError(FormatError):
    """The bytes end before the format says that they do."""

    code = "truncated"


class CorruptError(FormatError):
    """A checksum, a length or a count contradicts the bytes."""

    code = "corrupt"


class AmbiguousError(InputError, ValueError):
    """Two readers could understand the input differently, or more than one part could be meant."""

    code = "ambiguous"


class SeveralError(AmbiguousError):
    """A folder holds several checkpoints, in `files`."""

    code = "several-checkpoints"
    files: tuple[str, ...] = ()


class CollisionError(AmbiguousError):
    """An edit would give two entries the same name."""

    code = "collision"


class UnsafeGlobalError(InputError):
    """The output would contain a call to a global that is not in the allowlist."""

    code = "unsafe-global"


class UnsupportedError(InputError):
    """The input is recognized, and deliberately not handled."""

    code = "unsupported"


class LimitError(InputError):
    """A limit of :mod:`ckptkit.core.limits` is exceeded."""

    code = "limit"


class TensorError(InputError, ValueError):
    """A tensor's geometry does not fit its storage, or the operation is undefined for its dtype."""

    code = "tensor"


class DeviceError(InputError, RuntimeError):
    """The device is not on this machine."""

    code = "device"


class ModelError(InputError, RuntimeError):
    """A model class cannot be imported or built, or the weights do not fit it."""

    code = "model"


class OutputError(CkptkitError):
    """The output could not be written; the destination is as it was."""

    code = "output"
    exit_code = 4


class InputChangedError(OutputError, InputError):
    """The input changed while it was read; nothing is written."""

    code = "input-changed"
    exit_code = InputError.exit_code


class VerifyError(OutputError):
    """The bytes written differ from the bytes read."""

    code = "verify"


def address_space() -> int | None:
    """Return the bytes of memory that ``ulimit -v`` allows, None if there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


_PROJECTS = {"yaml": "pyyaml"}  # projects whose name differs from that of their package


# What the loader of libraries and Python say where memory is missing.
_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't start new thread")


def foreseen(error: BaseException) -> BaseException:
    """Convert an error of the environment to a CkptkitError; return others as they are.

    These are missing memory, missing packages (only some requests need them), and a working
    directory that was removed.
    """
    text = str(error) if isinstance(error, (ImportError, RuntimeError)) else ""
    if isinstance(error, MemoryError) or any(each in text for each in _NO_MEMORY):
        limit = address_space()
        hint = limit and f"`ulimit -v` limits this process to {limit >> 20:,} MiB"
        return InputError("needs more memory than there is", hint=hint or None)
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        hint = "cd into a folder that exists"
        return MissingFileError("the working directory was removed", hint=hint)
    package = (getattr(error, "name", None) or "ckptkit").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package != "ckptkit":
        project = _PROJECTS.get(package, package)
        message = f"this needs {project}, which is not installed"
        return MissingPackageError(message, hint=f"pip install {project}")
    return error


# Warnings


# Codes: stable, one for each kind of warning that other code asks about.
ADAPTER = "adapter"  # a note: what was merged of one
DELTA = "delta"  # the frames of a delta, and no weights
LLAMA_CPP = "llama-cpp"  # what llama.cpp refuses in a GGUF file, and ckptkit reads
NO_CHECKSUM = "no-checksum"  # storages without one: damage to them cannot be seen
NO_VERSION = "no-version"  # an archive without a version record, which torch refuses
RUNS_CODE = "runs-code"  # a value whose loading would call what it should not
WRONG_TOTAL = "wrong-total"  # the index of shards contradicts the bytes of their tensors


class Notice(str):
    """A warning with a stable `code` and its `facts`.

    It is a text like any other: printed, compared, hashed and written as JSON as such. Pickling
    and copying keep the code and the facts.
    """

    code: str
    facts: dict[str, Any]

    def __new__(cls, code: str, text: str, **facts: Any) -> Notice:
        made = super().__new__(cls, text)
        made.code = code
        made.facts = facts
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.code, str(self), self.facts)


def _made(code: str, text: str, facts: dict[str, Any]) -> Notice:
    return Notice(code, text, **facts)


def within(place: str, warning: str) -> str:
    """Return `warning` with the place that it is about before it; a Notice keeps its code."""
    text = f"{place}: {warning}"
    return Notice(warning.code, text, **warning.facts) if isinstance(warning, Notice) else text


def coded(warnings: Iterable[str], code: str) -> list[Notice]:
    """Return the warnings with this code, in order."""
    return [each for each in warnings if isinstance(each, Notice) and each.code == code]
