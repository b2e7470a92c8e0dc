"""Shared by the tests of batches: many small checkpoints, work that dies, a Dask cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.api import Conversion, convert
from ckptkit.edits.keys import strip_prefix
from ckptkit.publish.publish import temporary_name
from ckptkit.run import batch

if TYPE_CHECKING:
    from tests.conftest import Run

# Not from tests.conftest, which imports torch: workers import this file.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def make(folder: Path, count: int) -> list[Path]:
    """`count` checkpoints that differ, in folders of ten; torch makes one, the number is put into
    its bytes, and their checksum."""
    import torch  # not at once: workers import this file

    folder.mkdir(parents=True, exist_ok=True)
    first = {"module.weight": torch.full((4,), -1.0), "module.bias": torch.zeros(2)}
    torch.save(first, folder / "first.pth")
    data = (folder / "first.pth").read_bytes()
    (folder / "first.pth").unlink()
    elements = torch.full((4,), -1.0).numpy().tobytes()
    paths = [folder / f"{number // 10:04}" / f"{number}.pth" for number in range(count)]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        changed = torch.tensor([float(number), -1, -1, -1]).numpy().tobytes()
        made = data.replace(elements, changed).replace(checksum(elements), checksum(changed))
        path.write_bytes(made)
    return paths


def checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def without_sum(path: Path) -> dict[str, list[float]]:
    """The weights in one of these, as torch reads them: it does not look at checksums."""
    import torch

    return {name: tensor.tolist() for name, tensor in torch.load(path, weights_only=True).items()}


def strip(source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
    return convert(source, destination, strip_prefix, force=force, dry_run=dry_run)


def expected(folder: Path) -> dict[str, bytes]:
    """Return what `strip` makes of each checkpoint below a folder, by its path."""
    found, alone = {}, folder.parent / "alone.pth"
    for path in folder.rglob("*.pth"):
        strip(str(path), str(alone), force=True, dry_run=False)
        found[path.relative_to(folder).as_posix()] = alone.read_bytes()
    return found


def jobs_of(pattern: object, into: object, **options: Any) -> list[batch.Job]:
    return batch.plan(batch.find([str(pattern)], str(into)), ["strip"], **options)


def states(outcomes: Iterable[batch.Outcome]) -> dict[str, int]:
    return dict(Counter(outcome.state for outcome in outcomes))


def answered(run: Run, *args: object, code: int = 0, **given: Any) -> dict[str, Any]:
    """What `batch --json` prints."""
    done = run("batch", *args, "--json", **given)
    assert done.code == code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["schema"] == "ckptkit.batch/1"
    return answer


def counts(run: Run, *args: object, **given: Any) -> dict[str, int]:
    """The counts of `batch --json` that are not 0."""
    found = answered(run, *args, **given)["counts"]
    return {state: count for state, count in found.items() if count}


def interrupted(
    command: Iterable[object],
    is_begun: Callable[[], object],
    act: Callable[[subprocess.Popen[bytes]], object],
    **more: Any,
) -> tuple[int, bytes]:
    """Start a client and `act` when it has begun. Return its exit code and what it said, which ends
    when its workers, which inherit its standard error, are gone."""
    given = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more}
    client = subprocess.Popen([*map(str, command)], **given)
    deadline = time.monotonic() + 240
    while not is_begun():
        assert time.monotonic() < deadline and client.poll() is None, client.poll()
        time.sleep(0.005)
    act(client)
    _, said = client.communicate(timeout=120)
    return client.returncode, said


def slow(source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
    time.sleep(0.05)
    return strip(source, destination, force=force, dry_run=dry_run)


def deadly(source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
    """Ends the process, half-written output and all: for ``killer`` always, for ``once`` the first
    time."""
    name = Path(source).stem
    once = Path(source).with_suffix(".was-here")
    if name == "killer" or (name == "once" and not once.exists()):
        once.touch()
        Path(temporary_name(destination)).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return strip(source, destination, force=force, dry_run=dry_run)


def suicidal(source: str, destination: str, *, force: bool, dry_run: bool) -> Conversion:
    os._exit(1)


class _Interrupted:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # the handler runs here


def interrupted_in_destructor() -> str:
    """Receive the signal of an exiting parent process in a destructor, and go on."""
    _Interrupted()
    return "went on"


def noted(into: Path) -> int:
    """Count the jobs that the manifest of a batch reports as done."""
    path = into / batch.MANIFEST
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Dask:
    """A scheduler at `url` and its workers, processes of this machine."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._env = {**ENVIRONMENT, **env}
        self._folder = folder
        self._file = folder / "scheduler.json"
        self._log = (folder / "log").open("wb")
        self._all = [self._start("scheduler", "--host", "127.0.0.1", "--port", "0")]
        self.workers: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + 60
        while not self._file.exists() or not self._file.read_text().strip():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        self.url: str = json.loads(self._file.read_text())["address"]

    def end_scheduler(self) -> None:
        self._all[0].kill()

    def add(self, count: int, *options: str) -> None:
        options = ("--nthreads", "1", "--local-directory", str(self._folder), *options)
        self.workers += [self._start("worker", *options) for _ in range(count)]

    def _start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        module = f"distributed.cli.dask_{what}"
        command = [sys.executable, "-m", module, "--scheduler-file", str(self._file), *options]
        return subprocess.Popen(
            [*command, "--no-dashboard"],
            cwd=self._folder,
            env=self._env,
            stdout=self._log,
            stderr=self._log,
        )

    def stop(self) -> None:
        """End them: nannies gently, for they end their workers."""
        for process in (*self.workers, *self._all):
            process.terminate() if "--nanny" in process.args else process.kill()  # type: ignore[operator]
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()


@contextmanager
def dask(
    folder: Path,
    workers: int,
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = ("--no-nanny",),
) -> Iterator[Dask]:
    cluster = Dask(folder, env or {})
    try:
        cluster.add(workers, *options)
        yield cluster
    finally:
        cluster.stop()
