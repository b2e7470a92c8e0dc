"""Errors: one class for each kind of failure that a caller may want to handle differently.

Every error that ckptkit raises on purpose is a :class:`CkptkitError`. Such an error consists of a
message, the name of the file, a hint (such as a command to run next) and the exit code of the
command line. Any other exception that reaches the user is a bug. Many classes also derive from the
builtin exception that Python code expects for such a failure.

A warning with a stable code is a :class:`Notice`: a string with a code and facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

NEWER_TORCH = "newer-torch"  # code of an UnsupportedError: only a newer torch can read the file


class CkptkitError(Exception):
    """Base class of every error that ckptkit raises on purpose.

    ``where`` is the file and ``hint`` is the advice. Callers may set both attributes while the
    exception propagates. In a hint, ckptkit replaces ``{where}`` with the name of the file, and
    ``{new}`` with the name of an output file. ``code`` identifies the failure for programs. The
    default is the ``code`` of the class.
    """

    exit_code = 3
    code = "failed"
    part: str | None = None  # rule that failed, such as "rule 2"; the message begins with `part`

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
        """The name of the file in which the failure occurred."""
        return self._where

    @where.setter
    def where(self, where: str | None) -> None:
        self._where = where
        self._note()

    @property
    def hint(self) -> str | None:
        """Advice for the user. Python prints the hint too, as the first note of the exception."""
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
        """Set `where` unless this error already has a `where`. Return this error."""
        if self.where is None:
            self.where = where
        return self


@contextmanager
def placed(where: str | None, what: str = "") -> Iterator[None]:
    """Add the prefix `what` to the message of an error that the body of the `with` raises.

    If `where` is given, also set the name of the file, unless the error has one.
    """
    try:
        yield
    except CkptkitError as error:
        error.message = f"{what}{error.message}"
        error.where = error.where or where
        raise


def _filled(hint: str, where: str | None) -> str:
    """Insert `where` and a new file name into the hint, and return the hint.

    If `where` is unknown, shorten each command in the hint: `ckptkit inspect {where}` becomes
    `inspect`.
    """
    if "{where}" not in hint:
        return hint
    if not where:
        return hint.replace(" {where}", "").replace(" {new}", "").replace("`ckptkit ", "`")
    from ckptkit.core.text import output_name, shell_word

    where = f"./{where}" if where.startswith("-") else where  # a command reads "-x" as an option
    new = shell_word(output_name(where, "new"))
    return hint.replace("{where}", shell_word(where)).replace("{new}", new)


class UsageError(CkptkitError, ValueError):
    """The request is invalid: a bad option, equal SRC and DST, or an unknown key or suffix."""

    code = "usage"
    exit_code = 2


class ArgumentError(UsageError, TypeError):
    """An argument of a function has the wrong type."""

    code = "argument"


class NothingToDoError(CkptkitError):
    """A command would be a no-op."""

    code = "nothing-to-do"
    exit_code = 1


class UnknownNameError(UsageError, KeyError):
    """The checkpoint has no entry with the requested name."""

    code = "unknown-name"


class PositionError(UsageError, IndexError):
    """An index is outside the bounds of a tensor."""

    code = "position"


class MissingPackageError(UsageError, ImportError):
    """The request needs a package that is not installed."""

    code = "missing-package"


class OutputExistsError(UsageError, FileExistsError):
    """The destination exists and `force` was not given."""

    code = "output-exists"


class InputError(CkptkitError):
    """ckptkit cannot read the input."""

    code = "input"


class PathError(InputError):
    """The path is not a regular file, or points outside its folder."""

    code = "path"


class MissingFileError(PathError, FileNotFoundError):
    """The file or folder does not exist."""

    code = "missing-file"


class FormatError(InputError, ValueError):
    """The bytes are malformed, or their format is not supported."""

    code = "format"


class TruncatedError(FormatError):
    """The file is truncated: it ends before the last byte that its header describes."""

    code = "truncated"


class CorruptError(FormatError):
    """A checksum, a length or a count does not match the bytes."""

    code = "corrupt"


class AmbiguousError(InputError, ValueError):
    """The input has two possible interpretations, or the request matches several entries."""

    code = "ambiguous"


class SeveralError(AmbiguousError):
    """A folder contains several checkpoints. The attribute `files` lists the checkpoints."""

    code = "several-checkpoints"
    files: tuple[str, ...] = ()


class CollisionError(AmbiguousError):
    """An edit would give two entries the same name."""

    code = "collision"


class UnsafeGlobalError(InputError):
    """The output would call a class or function that is not allowlisted."""

    code = "unsafe-global"


class UnsupportedError(InputError):
    """ckptkit recognizes the input, but does not support it."""

    code = "unsupported"


class LimitError(InputError):
    """The input exceeds a limit of :mod:`ckptkit.core.limits`."""

    code = "limit"


class TensorError(InputError, ValueError):
    """A tensor exceeds its storage, or the operation is not defined for the tensor's dtype."""

    code = "tensor"


class DeviceError(InputError, RuntimeError):
    """This machine does not have the requested device."""

    code = "device"


class ModelError(InputError, RuntimeError):
    """ckptkit cannot import or build a model class, or the weights do not fit the model."""

    code = "model"


class OutputError(CkptkitError):
    """ckptkit could not write the output. The destination is unchanged."""

    code = "output"
    exit_code = 4


class InputChangedError(OutputError, InputError):
    """The input changed while ckptkit read it. Nothing is written."""

    code = "input-changed"
    exit_code = InputError.exit_code


class VerifyError(OutputError):
    """The output was read back, and its bytes differ from the bytes of the input."""

    code = "verify"


def address_space() -> int | None:
    """Return the memory limit in bytes that ``ulimit -v`` sets, or None without such a limit."""
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


_PROJECTS = {"yaml": "pyyaml"}  # names on PyPI of packages that are imported by another name


# Parts of error messages of Python and the dynamic loader that mean "out of memory".
_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't start new thread")


def foreseen(error: BaseException) -> BaseException:
    """Convert an error of the environment to a CkptkitError. Return other errors unchanged.

    An error of the environment is a lack of memory, a missing optional package, or a removed
    working directory.
    """
    text = str(error) if isinstance(error, (ImportError, RuntimeError)) else ""
    if isinstance(error, MemoryError) or any(each in text for each in _NO_MEMORY):
        limit = address_space()
        hint = limit and f"`ulimit -v` limits this process to {limit >> 20:,} MiB"
        return InputError("needs more memory than this process can get", hint=hint or None)
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


# Stable codes of warnings. Other modules look for warnings with these codes.
ADAPTER = "adapter"  # a note that names the merged adapter
DELTA = "delta"  # the file contains a delta instead of weights
LLAMA_CPP = "llama-cpp"  # llama.cpp rejects this GGUF file, or reads wrong values
NO_CHECKSUM = "no-checksum"  # ckptkit cannot verify some storages, because they have no checksum
NO_VERSION = "no-version"  # torch rejects the zip file, because it contains no version
RUNS_CODE = "runs-code"  # to load a value, a program would call a function outside the allowlist
WRONG_TOTAL = "wrong-total"  # the total size in a shard index does not match the tensors


class Notice(str):
    """A warning with a stable `code` and its `facts`.

    A Notice is a string. Copies and pickles of a Notice contain its code and facts.
    """

    code: str
    facts: dict[str, Any]

    def __new__(cls, code: str, text: str, **facts: Any) -> Notice:
        made = super().__new__(cls, text)
        made.code = code
        made.facts = facts
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Notice, self.code, str(self), **self.facts), ()


def within(place: str, warning: str) -> str:
    """Return `warning` with the prefix "`place`: ". A Notice keeps its code and facts."""
    text = f"{place}: {warning}"
    return Notice(warning.code, text, **warning.facts) if isinstance(warning, Notice) else text


def coded(warnings: Iterable[str], code: str) -> list[Notice]:
    """Return the warnings with the code `code`, in the same order."""
    return [each for each in warnings if isinstance(each, Notice) and each.code == code]
