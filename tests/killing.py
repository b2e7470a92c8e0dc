"""Work in a forked process that kills itself at one of its calls."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

CALLS = ("write", "fsync", "ftruncate", "rename", "unlink")


def killed(work: Callable[[], object], last: int, half: bool) -> bool:
    """Run `work` in a child that kills itself at its call number `last`, perhaps in its middle.

    Return False if it has fewer calls; it must succeed then.
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code != 0
    count = 0

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                if half and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, deadly(name, getattr(os, name)))
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
