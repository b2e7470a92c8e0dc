"""Processes that save or load together, without torchrun: torch is imported once and then forked.

``run_ranks(WORLD, MODULE, WORD, ...)`` calls ``MODULE.main(WORD, ...)`` in WORLD processes, with the
environment that torchrun gives them. The tests of the trainer run torchrun itself.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.forked import forked


def run_ranks(world: int, module: str, *words: object) -> None:
    """Run ``module.main(*words)`` in `world` processes; all of them must succeed."""
    done = forked(main, world, module, [*map(str, words)], cwd=Path(__file__).parent, seconds=300)
    assert done.returncode == 0, done.output[-4000:]


def main(world: int, module: str, words: list[str]) -> None:
    """Fork the ranks; when one fails, end the others, and exit with 1."""
    loaded = import_module(module)
    import_module("torch._dynamo")  # else each rank imports it
    shared = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": own_port(),
    }
    running = {
        fork(loaded, words, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(world)
    }
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = 1
            for other in running:
                os.kill(other, signal.SIGKILL)
    sys.exit(code)


def fork(loaded: ModuleType, words: list[str], environment: dict[str, object]) -> int:
    """Return the process id of a rank."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        loaded.main(*words)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # process groups of replicas are not all torn down in order


def own_port() -> int:
    """Return a port that no other process asks for: below those that the system hands out."""
    return 20_000 + os.getpid() % 10_000
