"""Errors: one class for each kind of failure that a caller may want to handle differently.

Every failure that ckptkit foresees is a :class:`CkptkitError`: a sentence, the file or place it is
about, a hint (what to type next) and the exit code of the command line. Any other exception that
escapes is a bug. Many are also the builtin error that Python code catches for such a failure.
"""

from __future__ import annotations

NEWER_TORCH = "newer-torch"  # UnsupportedError: of a format that only a newer torch reads


class CkptkitError(Exception):
    """Base of every error that ckptkit raises on purpose.

    ``where`` is the file, ``hint`` the advice; both may be filled in on the way up. ``code`` says
    which failure it is, for code that must tell: it is that of the class unless one is given.
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
        self.where = where
        self._hint: str | None = None
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """The advice. It is also the first note of the exception, which Python prints."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        notes: list[str] = getattr(self, "__notes__", [])
        others = notes[1:] if self._hint else notes
        self._hint = hint
        self.__notes__ = [f"hint: {hint}", *others] if hint else others

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def at(self, where: str) -> CkptkitError:
        """Return this error with `where` filled in, unless it already names a place."""
        if self.where is None:
            self.where = where
        return self


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


class InputChangedError(OutputError):
    """The input changed while it was read."""

    code = "input-changed"


class VerifyError(OutputError):
    """The bytes written differ from the bytes read."""

    code = "verify"


_PROJECTS = {"yaml": "pyyaml"}  # projects whose name differs from that of their package


def foreseen(error: BaseException) -> BaseException:
    """Convert an out-of-memory or missing-package error to a CkptkitError; return others as is.

    Packages that only some requests need are imported when they are needed.
    """
    if isinstance(error, MemoryError):
        return InputError("needs more memory than there is")
    package = (getattr(error, "name", None) or "ckptkit").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package != "ckptkit":
        project = _PROJECTS.get(package, package)
        message = f"this needs {project}, which is not installed"
        return MissingPackageError(message, hint=f"pip install {project}")
    return error
