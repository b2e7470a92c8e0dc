"""Temporaries: where an output is written before it is renamed, and removal of stale ones.

    .<name of the output>.ckptkit-<process>-<context, 8 hex digits><random, 8 hex digits>.tmp

A process id identifies a live process only on one machine, within one boot and one PID namespace;
the context is a checksum of these. So the next run that writes the same output can tell that the
process is gone, and removes its temporary. One left on another machine, in another container or
before a restart is reported, and left to the user.
"""

from __future__ import annotations

import os
import re
import stat
import time
import zlib
from contextlib import suppress
from functools import lru_cache

from ckptkit.core.paths import JOURNAL

NAME_MAX = 255  # bytes of a file name
SETTLED = 3600  # seconds without a write, after which a temporary seems to be stale

_NAME = re.compile(r"\..*(\.ckptkit-([0-9]{1,7})-([0-9a-f]{8})[0-9a-f]{8}\.tmp)", re.DOTALL)


def temporary_name(path: str) -> str:
    """Return a unique temporary name beside `path`, with its (possibly truncated) file name."""
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
    """Return a checksum of boot id and PID namespace; None if the system does not expose them."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        return f"{zlib.crc32(boot + os.readlink(b'/proc/self/ns/pid')):08x}"
    except OSError:
        return None


def new_file(path: str) -> int:
    """Create a file that does not exist, also not as a link, and open it for writing."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def sweep(path: str) -> list[str]:
    """Remove temporaries that killed runs left for the output `path` and for journals of its edits.

    Returns the names of those that may be stale too, but were made elsewhere.
    """
    folder, name = os.path.split(path)
    names = (name, f".{name}{JOURNAL}")
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
    """Return the temporaries in `folder`, cached so that a batch lists each folder once."""
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

        rmtree(place)  # follows no link, even if one is swapped in
    else:
        os.unlink(place)
