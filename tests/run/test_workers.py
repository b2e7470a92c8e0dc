"""Processes and a Dask cluster: equal bytes whoever writes them, and what becomes of those that
die."""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.api import Step, convert
from ckptkit.core.errors import OutputError, UsageError
from ckptkit.edits.elements import cast
from ckptkit.edits.keys import strip_prefix
from ckptkit.publish import copying
from ckptkit.run import batch, workers
from tests.conftest import COMMAND, Ok, Run
from tests.run.batches import (
    Dask,
    counts,
    dask,
    deadly,
    expected,
    interrupted,
    jobs_of,
    make,
    noted,
    slow,
    states,
)

PATTERN = "runs/**/*.pth"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    with dask(tmp_path_factory.mktemp("dask"), workers=2) as running:
        yield running


@pytest.fixture(params=["processes", "cluster"])
def pool(request: pytest.FixtureRequest) -> Iterator[workers.Pool]:
    scheduler = request.getfixturevalue("cluster").url if request.param == "cluster" else None
    with workers.opened(None if scheduler else 2, scheduler) as opened:
        assert opened is not None
        yield opened


def big(path: Path) -> Path:
    """8 MiB in 9 tensors, two of which are views of one storage, with a name to strip."""
    torch.manual_seed(0)
    state = {f"module.{number}": torch.randn(1 << 18) for number in range(7)}
    both = torch.randn(1 << 18)
    state |= {"module.left": both[: 1 << 17], "module.right": both[1 << 17 :]}
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("source", "destination", "step"),
    [
        ("in.pth", "out.safetensors", strip_prefix),  # ranges, copied
        ("in.safetensors", "out.pth", strip_prefix),  # checksums, taken where the bytes are
        ("in.pth", "out.pth", partial(cast, dtypes={"*": "bfloat16"})),  # computed
        ("in.safetensors", "out.pth", partial(cast, dtypes={"*": "bfloat16"})),
    ],
)
def test_one_conversion(
    source: str,
    destination: str,
    step: Step,
    pool: workers.Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut into tasks and spread, it has the bytes that this process alone would write."""
    monkeypatch.setattr(copying, "TASK", 1 << 20)
    path = big(tmp_path / source)
    (tmp_path / "spread").mkdir()
    written: list[int] = []
    submitted: list[object] = []
    submit = pool.submit
    monkeypatch.setattr(pool, "submit", lambda *given: submitted.append(1) or submit(*given))
    spread = tmp_path / "spread" / destination
    done = convert(
        path, spread, step, executor=pool, progress=lambda count, _: written.append(count)
    )
    convert(path, tmp_path / destination, step)
    want = (tmp_path / destination).read_bytes()
    assert spread.read_bytes() == want
    assert sum(written) == len(want) == done.plan.size
    assert len(submitted) >= 4
    assert len(list((tmp_path / "spread").iterdir())) == 1


def ways(cluster: Dask) -> dict[str, list[object]]:
    return {"one": [], "two": ["--workers", 2], "dask": ["--scheduler", cluster.url]}


def test_commands(cluster: Dask, tmp_path: Path, ok: Ok) -> None:
    path = big(tmp_path / "in.safetensors")
    for name, options in ways(cluster).items():
        ok("convert", path, tmp_path / f"{name}.pth", *options)
    assert len({(tmp_path / f"{name}.pth").read_bytes() for name in ways(cluster)}) == 1


def test_a_batch(cluster: Dask, tmp_path: Path, run: Run) -> None:
    runs = make(tmp_path / "runs", 60)
    runs[7].write_bytes(b"text")
    found: dict[str, dict[str, bytes]] = {}
    for name, options in ways(cluster).items():
        words = ("strip-module", "--into", tmp_path / name, tmp_path / PATTERN, *options)
        assert counts(run, *words, code=3) == {"done": 59, "failed": 1}
        found[name] = {each.name: each.read_bytes() for each in (tmp_path / name).rglob("*.pth")}
    assert found["one"] == found["two"] == found["dask"]
    assert len(found["one"]) == 59


def test_a_worker_of_a_cluster_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    monkeypatch.setattr(workers, "FRESH", 0)
    make(tmp_path / "runs", 60)
    jobs = jobs_of(tmp_path / PATTERN, tmp_path / "out")
    with dask(tmp_path, workers=2) as cluster, workers.opened(scheduler=cluster.url) as pool:
        assert pool is not None
        while pool.workers() < 2:
            time.sleep(0.05)
        with closing(batch.run(slow, jobs, str(tmp_path / "out"), pool=pool)) as results:
            found = [next(results)[1]]
            cluster.workers[0].kill()
            found += [outcome for _, outcome in results]
    assert states(found).keys() <= {"done", "found"}
    assert len(found) == 60
    for name, data in expected(tmp_path / "runs").items():
        assert (tmp_path / "out" / name).read_bytes() == data


def test_the_scheduler_of_a_cluster_is_killed(tmp_path: Path) -> None:
    """One clear error, and none of Dask's tracebacks. The next run does the rest."""
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    make(tmp_path / "runs", 400)
    words = ["batch", "strip-module", "--into", tmp_path / "out", tmp_path / PATTERN]
    with dask(tmp_path, workers=1) as cluster:
        code, told = interrupted(
            [*COMMAND, *words, "--scheduler", cluster.url],
            lambda: noted(tmp_path / "out") >= 20,
            lambda _: cluster.end_scheduler(),
        )
    assert code == 4, told
    said = told.decode()
    first, hint = said.splitlines()
    assert first.startswith(f"error: {cluster.url}: the scheduler canceled the work")
    assert hint.startswith("hint: ")


def test_a_client_that_lost_its_scheduler() -> None:
    """Dask closes such a client after some seconds; each call then fails in another way."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")

    class Lost:
        def ncores(self) -> None:
            raise OSError

    class Closed:
        def submit(self, call: object) -> None:
            raise distributed.client.ClosedClientError

    pool: Any = workers.Cluster.__new__(workers.Cluster)
    pool.address, pool._next, pool._executor = "tcp://host:8786", 0.0, Closed()
    for pool._client in (None, Lost()):
        with pytest.raises(OutputError, match="the scheduler stopped or is unreachable"):
            pool.workers()
    with pytest.raises(OutputError, match="the scheduler stopped or is unreachable"):
        pool.submit(int)


def test_a_job_that_kills_workers_of_a_cluster(tmp_path: Path) -> None:
    """Nannies start others, until Dask takes the job for what it is."""
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    runs = make(tmp_path / "runs", 20)
    runs[5].rename(runs[5].with_name("killer.pth"))
    jobs = jobs_of(tmp_path / PATTERN, tmp_path / "out")
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with (
        dask(tmp_path, 2, env, ("--nanny",)) as cluster,
        workers.opened(scheduler=cluster.url) as pool,
    ):
        results = batch.run(deadly, jobs, str(tmp_path / "out"), pool=pool)
        found = {job.output: outcome for job, outcome in results}
    assert "its worker was killed twice" in str(found.pop("0000/killer.pth").error)
    assert states(found.values()).keys() <= {"done", "found"}
    assert len(list((tmp_path / "out").rglob("*.pth"))) == 19


def test_the_client_of_a_cluster_is_killed(cluster: Dask, tmp_path: Path, run: Run) -> None:
    """Workers may end what they are at; the next run finds that, and does the rest."""
    make(tmp_path / "runs", 250)
    words = ("strip-module", "--into", tmp_path / "out", tmp_path / PATTERN)
    words = (*words, "--scheduler", cluster.url)
    interrupted(
        [*COMMAND, "batch", *words],
        lambda: noted(tmp_path / "out") >= 20,
        lambda client: client.kill(),
    )
    found = counts(run, *words)
    assert found.pop("skipped") > 0
    assert found.keys() <= {"found", "done"}
    first, last = (tmp_path / "out" / name for name in ("0000/0.pth", "0024/249.pth"))
    alone = expected(tmp_path / "runs")["0024/249.pth"]
    assert first.read_bytes() != last.read_bytes() == alone
    assert len(list((tmp_path / "out").rglob("*.pth"))) == 250


class TestProcesses:
    def test_a_dead_one_is_replaced(self) -> None:
        with workers.Processes(1) as pool:
            first = pool.submit(os.getpid).result()
            with pytest.raises(BrokenExecutor):
                pool.submit(os._exit, 3).result()
            assert pool.submit(os.getpid).result() not in (first, os.getpid())

    def test_one_is_this_process(self) -> None:
        for count in (None, 0, 1):
            with workers.opened(count) as pool:
                assert pool is None

    def test_nothing_is_imported_from_the_working_directory(self, tmp_path: Path, run: Run) -> None:
        """A checkpoint's folder may hold a ``multiprocessing.py``."""
        make(tmp_path / "runs", 4)
        for name in ("multiprocessing", "torch", "numpy", "pickle"):
            (tmp_path / f"{name}.py").write_text("open('executed', 'w')\n")
        done = run(
            "batch", "strip-module", "--workers", 2, "--into", "out", "runs/**/*.pth", cwd=tmp_path
        )
        assert (done.code, (tmp_path / "executed").exists()) == (0, False), done.stderr

    def test_stopping_undoes_what_is_half_done(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), workers.opened(2) as pool:
            assert pool is not None
            future = pool.submit(wait_and_tell, str(tmp_path))
            while not (tmp_path / "begun").exists():
                assert not future.done()
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert (tmp_path / "undone").exists()

    def test_the_keyboard_is_the_clients(self, tmp_path: Path) -> None:
        with workers.opened(2) as pool:
            assert pool is not None
            os.kill(pool.submit(os.getpid).result(), signal.SIGINT)
            assert pool.submit(os.getpid).result()


def wait_and_tell(folder: str) -> None:
    try:
        Path(folder, "begun").touch()
        time.sleep(60)
    finally:
        Path(folder, "undone").touch()


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'ckptkit'")


class TestRefusals:
    def test_both(self) -> None:
        said = "either --workers or --scheduler"
        with pytest.raises(UsageError, match=said), workers.opened(2, "tcp://x:1"):
            pass

    def test_no_dask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "distributed", None)
        with pytest.raises(UsageError) as refused, workers.opened(scheduler="tcp://127.0.0.1:1"):
            pass
        assert refused.value.hint == "pip install distributed"

    def test_no_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
        monkeypatch.setattr(workers, "ANSWER", 1)
        pool = workers.opened(scheduler="tcp://127.0.0.1:9")
        with pytest.raises(OutputError, match="no scheduler answers"), pool:
            pass

    def test_no_workers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
        monkeypatch.setattr(workers, "PATIENCE", 1)
        with dask(tmp_path, workers=0) as cluster:
            pool = workers.opened(scheduler=cluster.url)
            with pytest.raises(OutputError, match="has no workers"), pool:
                pass

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [("__version__", "0", "has ckptkit"), ("_version", missing, "cannot run ckptkit")],
    )
    def test_other_versions(
        self, name: str, value: object, said: str, cluster: Dask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workers, name, value)
            with pytest.raises(OutputError, match=said), workers.opened(scheduler=cluster.url):
                pass

    def test_a_url_is_one_stream(self, tmp_path: Path, run: Run) -> None:
        (path,) = make(tmp_path, 1)
        done = run("strip-module", path, "memory://out.pth", "--workers", 2)
        assert (done.code, "--workers and --scheduler do not apply" in done.stderr) == (0, True)


def test_a_killed_worker_reads_as_a_broken_executor() -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    from distributed.scheduler import KilledWorker

    error = KilledWorker("task", last_worker=Namespace(address="tcp://x:1"), allowed_failures=3)
    inner: Future[None] = Future()
    seen = workers._Remote(inner, "tcp://x:2")
    inner.set_exception(error)
    assert isinstance(seen.exception(timeout=0), BrokenExecutor)
