"""Temporaries: where an output is made before it gets its name, and what becomes of those whose
makers were killed.

    .<name of the output>.ckptkit-<process>-<where that number counts, 8 hex digits><random, 8 hex digits>.tmp

A number of a process says who is alive only on one machine, between two starts of it, in one
namespace of processes; a digest of these is in the name. So the next run that writes the same
output knows whose maker is gone, and removes it; what was left on another machine, in another
container or before a restart is named, and left to people.
"""

from __future__ import annotations

import os
import re
import stat
import time
import zlib
from contextlib import suppress
from functools import lru_cache

from ckptkit.publish.journal import SUFFIX

NAME_MAX = 255  # bytes of a file name
SETTLED = 3600  # seconds without a write, after which nobody seems to be at work

_NAME = re.compile(r"\..*(\.ckptkit-([0-9]{1,7})-([0-9a-f]{8})[0-9a-f]{8}\.tmp)", re.DOTALL)


def temporary_name(path: str) -> str:
    """A name beside `path` that nobody has, the output's own in it cut where it would get too
    long."""
    folder, name = os.path.split(path)
    where = _where() or os.urandom(4).hex()
    return os.path.join(
        folder, _joined(name, f".ckptkit-{os.getpid()}-{where}{os.urandom(4).hex()}.tmp")
    )


def _joined(name: str, ending: str) -> str:
    while len(os.fsencode(f".{name}{ending}")) > NAME_MAX:
        name = name[:-1]
    return f".{name}{ending}"


@lru_cache
def _where() -> str | None:
    """This start of the machine and our namespace of processes; None where a system does not
    say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        return f"{zlib.crc32(boot + os.readlink(b'/proc/self/ns/pid')):08x}"
    except OSError:
        return None


def new_file(path: str) -> int:
    """Make a file that is not there, also not as a link, and open it for writing."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def sweep(path: str) -> list[str]:
    """Remove what killed runs have left of the output `path` and of journals of its edits; the
    names of what may be left too, and is not ours to judge."""
    folder, name = os.path.split(path)
    names = (name, f".{name}{SUFFIX}")
    unknown = []
    for entry in _temporaries(folder):
        found = _NAME.fullmatch(entry)
        if found is None or entry not in [_joined(each, found[1]) for each in names]:
            continue
        with suppress(OSError):
            info = os.lstat(os.path.join(folder, entry))
            if found[3] == _where():
                if not _is_alive(int(found[2])) and info.st_uid == os.geteuid():
                    _remove(os.path.join(folder, entry), info)
            elif info.st_mtime < time.time() - SETTLED:
                unknown.append(entry)
    return unknown


@lru_cache(maxsize=64)
def _temporaries(folder: str) -> tuple[str, ...]:
    """Those in a folder when this process first wrote there: thousands of outputs list it once."""
    with suppress(OSError):
        return tuple(
            sorted(
                name
                for name in os.listdir(folder)
                if name.endswith(".tmp") and _NAME.fullmatch(name)
            )
        )
    return ()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(place: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        from shutil import rmtree

        rmtree(place)  # follows no link, whoever exchanges what
    else:
        os.unlink(place)
