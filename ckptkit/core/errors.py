"""What can go wrong, one class per kind of answer that a caller may want to give.

Every failure that ckptkit foresees is a :class:`CkptkitError`: a sentence, the file or place it is
about, a hint (what to type next) and the exit code of the command line. Anything else that escapes
is a bug.
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
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def at(self, where: str) -> CkptkitError:
        """This error, about `where` unless it already says what it is about."""
        if self.where is None:
            self.where = where
        return self


class UsageError(CkptkitError):
    """The request cannot be carried out as typed: a bad option, DST is SRC, an unknown key or
    suffix."""

    code = "usage"
    exit_code = 2


class MissingPackageError(UsageError):
    """The request needs a package that is not installed."""

    code = "missing-package"


class OutputExistsError(UsageError):
    """DST is there already and nobody said that it may be replaced."""

    code = "output-exists"


class InputError(CkptkitError):
    """The input is refused."""

    code = "input"


class PathError(InputError):
    """No regular file there, or a name that leads out of its folder."""

    code = "path"


class FormatError(InputError):
    """Malformed: the bytes break a rule of their format, or are in no format that ckptkit knows."""

    code = "format"


class TruncatedError(FormatError):
    """The bytes end before the format says that they do."""

    code = "truncated"


class CorruptError(FormatError):
    """A checksum, a length or a count contradicts the bytes."""

    code = "corrupt"


class AmbiguousError(InputError):
    """Two readers could understand this differently, or more than one part could be meant."""

    code = "ambiguous"


class CollisionError(AmbiguousError):
    """An edit would give two entries the same name."""

    code = "collision"


class UnsafeGlobalError(InputError):
    """Writing this would keep a call that is not in the allowlist."""

    code = "unsafe-global"


class UnsupportedError(InputError):
    """Recognised, and deliberately not handled."""

    code = "unsupported"


class LimitError(InputError):
    """A limit of :mod:`ckptkit.core.limits` is exceeded."""

    code = "limit"


class TensorError(InputError):
    """A tensor's geometry does not fit its storage, or its bytes have no plain meaning for what is
    asked."""

    code = "tensor"


class DeviceError(InputError):
    """A device that is not on this machine."""

    code = "device"


class ModelError(InputError):
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
    """What was written is not what was read."""

    code = "verify"


_PROJECTS = {"yaml": "pyyaml"}  # that are not called as the package that they install


def foreseen(error: BaseException) -> BaseException:
    """`error` as a CkptkitError where it is one of Python's that says no more than "not here".

    Running out of memory, and a package that is not installed: those that only some requests need
    are imported when they do.
    """
    if isinstance(error, MemoryError):
        return InputError("needs more memory than there is")
    package = (getattr(error, "name", None) or "ckptkit").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package != "ckptkit":
        project = _PROJECTS.get(package, package)
        lacks = f"this needs {project}, which is not installed"
        return MissingPackageError(lacks, hint=f"pip install {project}")
    return error
