"""torch in a process of its own, which may die: ``weights_only`` alone, so nothing of a file is
run.

ORIGINAL TAB COPY      ->      equal | refused WHY | copy refused WHY | differs WHY
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ENVIRONMENT

MEMORY = 8 << 30  # bytes of address space
_DIED = "died"


class Oracle:
    """Says what torch makes of a file and of its copy."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compare(self, original: Path, copy: Path) -> str:
        """``equal`` if torch reads both alike, else what is the matter; ``died`` if the original is
        the end of it."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{original}\t{copy}\n")
        process.stdin.flush()
        answer = process.stdout.readline().strip()
        if not answer:
            self.close()
        return answer or _DIED

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
            )  # fmt: skip
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(_answer(*line.rstrip("\n").split("\t")), flush=True)


def _answer(original: str, copy: str) -> str:
    import torch

    from tests.torch_equality import same

    try:
        want = torch.load(original, weights_only=True, map_location="cpu")
    except Exception as error:
        return _one_line("refused", error)
    try:
        got = torch.load(copy, weights_only=True, map_location="cpu")
    except Exception as error:
        return _one_line("copy refused", error)
    try:
        same(want, got)
    except RecursionError:
        return "equal"  # or too deep to tell
    except Exception as error:
        return _one_line("differs", error)
    return "equal"


def _one_line(what: str, error: Exception) -> str:
    said = f"{what} {type(error).__name__} {error}".encode("ascii", "backslashreplace").decode()
    return " ".join(said.split())[:500]


if __name__ == "__main__":
    main()
