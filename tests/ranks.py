"""Processes that save or load together, without torchrun: torch is imported once and then forked.

    python -m tests.ranks WORLD MODULE WORD...

calls ``MODULE.main(WORD...)`` in WORLD processes, with the environment that torchrun gives them.
The tests of the trainer run torchrun itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from types import ModuleType

from tests.conftest import ENVIRONMENT, ROOT


def run_ranks(world: int, module: str, *words: object) -> None:
    """Run ``module.main(*words)`` in `world` processes; all of them must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks", str(world), module, *map(str, words)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def main(world: int, module: str, words: list[str]) -> int:
    """Fork the ranks; when one fails, end the others."""
    loaded = import_module(module)
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
    return code


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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
