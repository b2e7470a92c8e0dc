"""Judge names: what a checkpoint may hold, what is the user's own, what belongs to packages."""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING

from ckptkit.core.tree import Global
from ckptkit.pickles.allowlist import rows as table
from ckptkit.pickles.allowlist.classes import CLASSES, KEPT, PACKAGES
from ckptkit.pickles.allowlist.rows import ROWS, WEIGHTS_ONLY

# The effect of a step on the process that loads the file, from harmless to harmful.
ACCEPTED = "accepted"  # torch.load(weights_only=True) makes it
HARMLESS = "harmless"  # in the allowlist, with arguments that its row takes: it makes a value
CLASS = "class"  # an object of a class, through __new__: its package's code sets it up
LOADS = "loads"  # a file inside: what that would do
ALLOCATES = "allocates"  # memory, as much as the file says
UNSURE = "unsure"  # not proved: arguments that the row does not take, a class of a package
# a function of another package, or a class through __init__, with arguments of the file's choosing
UNKNOWN = "unknown"
HARMFUL = "harmful"
LEVELS = (ACCEPTED, HARMLESS, CLASS, LOADS, ALLOCATES, UNSURE, UNKNOWN, HARMFUL)
WRITTEN = (ACCEPTED, HARMLESS, CLASS)  # what may be written back

# Whose calls are harmful unless they are in the allowlist: the standard libraries of Python 3.11 to
# 3.14, of Python 2 (protocol 2 maps its names to today's), and of the versions in between; and
# those whose files these are.
STANDARD = sys.stdlib_module_names | {name for name in IMPORT_MAPPING if "." not in name} | {
    "_android_support", "_apple_support", "_ast_unparse", "_bootsubprocess", "_colorize", "_crypt",
    "_hmac", "_interpchannels", "_interpqueues", "_interpreters", "_ios_support", "_msi",
    "_opcode_metadata", "_py_warnings", "_pydatetime", "_pylong", "_pyrepl", "_remote_debugging",
    "_sha2", "_sha256", "_sha512", "_suggestions", "_sysconfig", "_types", "_wmi",
    "_xxinterpchannels", "_xxsubinterpreters", "_zstd", "aifc", "annotationlib", "asynchat",
    "asyncore", "audioop", "cgi", "cgitb", "chunk", "compression", "crypt", "distutils",
    "exceptions", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "os2emxpath",
    "ossaudiodev", "pipes", "popen2", "sets", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib",
    "test", "uu", "xdrlib",
}  # fmt: skip
TORCH = {"functorch", "numpy", "torch", "torchgen"}
_SCRIPT = "__torch__"  # classes of a TorchScript archive, which has their code in it


def refused_by_weights_only(name: Global) -> bool:
    """Return whether `torch.load(weights_only=True)` refuses a file that names this."""
    return (name.module, name.name) not in WEIGHTS_ONLY


def is_known(name: Global) -> bool:
    """Return whether the name may be called: accepted by weights_only, in the allowlist, or what
    loads a file."""
    key = (name.module, name.name)
    return key in ROWS or key in WEIGHTS_ONLY or key in table.SPECIAL


def out_of_place(name: Global) -> str | None:
    """Return why a checkpoint may not hold this name as a value, even if nothing calls it; None if
    it may."""
    if _is_listed(name) or _is_own(name):
        return None
    if top_of(name) in STANDARD | TORCH:
        return "is not in the allowlist"
    if _is_package(top_of(name)):
        return "belongs to a package and is not in the allowlist"
    return "is not the name of a class"


def top_of(name: Global) -> str:
    return name.module.partition(".")[0]


def _is_listed(name: Global) -> bool:
    key = (name.module, name.name)
    if key in table.SPECIAL:  # as a value it would call or fetch whatever it is given
        return False
    if key in WEIGHTS_ONLY or key in KEPT or key in CLASSES or key in table.ENUMS:
        return True
    if key in ROWS and key not in table.CALLED_ONLY:
        return True
    if any(key in names for names in table.ARGUMENTS.values()):
        return True
    outer, _, last = name.name.rpartition(".")
    return ((name.module, outer) in table.ENUMS and not _is_special(last)) or (
        name.module == "torch" and key[1] in _DTYPES
    )


_DTYPES = frozenset(table.DTYPES.split())


def _is_own(name: Global) -> bool:
    """Return whether this may be a class or function of the user's own code, by its spelling and
    its package."""
    top = top_of(name)
    if top == _SCRIPT:
        return True
    *outer, last = name.name.split(".")
    parts = (*name.module.split("."), *outer, last)
    if not all(map(str.isidentifier, parts)) or any(map(_is_special, (*outer, last))):
        return False
    if not all(each.lstrip("_")[:1].isupper() for each in outer):
        return False
    return top not in STANDARD and top not in TORCH and not _is_package(top)


def _is_special(part: str) -> bool:
    return part.startswith("__") and part.endswith("__")


def _is_package(top: str) -> bool:
    """Return whether code of this name is a package that people install, or no name at all."""
    return top in PACKAGES or not top.isidentifier()


def class_kind(name: Global) -> str:
    """Return the kind of making an empty object of a class: one of CLASS, UNSURE, HARMFUL."""
    if (name.module, name.name) in CLASSES or _is_own(name):
        return CLASS
    return HARMFUL if top_of(name) in STANDARD else UNSURE


def is_guarded(name: str) -> bool:
    """Return whether a full name is of Python, torch or numpy, which cannot be trusted as a whole;
    or no name at all."""
    top = name.partition(".")[0]
    return top in STANDARD or top in TORCH or not top.isidentifier()


def is_foreign(name: Global) -> bool:
    """Return whether no checkpoint names this: of Python itself, or a function of torch or numpy,
    and not listed."""
    last = name.name.rpartition(".")[2]
    function = top_of(name) in TORCH and not last.lstrip("_")[:1].isupper()
    return not _is_listed(name) and (function or top_of(name) in STANDARD)
