"""Processes and a Dask cluster: equal bytes whoever writes them, and what becomes of those that
die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
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
from tests.conftest import COMMAND, ENVIRONMENT, Run
from tests.run.batches import Dask, dask, deadly, make, noted, slow, strip


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
    counts: list[int] = []
    submitted: list[object] = []
    monkeypatch.setattr(
        pool, "submit", lambda *given, call=pool.submit: submitted.append(1) or call(*given)
    )
    done = convert(
        path,
        tmp_path / "spread" / destination,
        step,
        executor=pool,
        progress=lambda count, _: counts.append(count),
    )
    convert(path, tmp_path / destination, step)
    want = (tmp_path / destination).read_bytes()
    assert (tmp_path / "spread" / destination).read_bytes() == want
    assert sum(counts) == len(want) == done.plan.size
    assert len(submitted) >= 4
    assert len(list((tmp_path / "spread").iterdir())) == 1


def test_commands(cluster: Dask, tmp_path: Path, run: Run) -> None:
    path = big(tmp_path / "in.safetensors")
    for name, options in {
        "one": [],
        "two": ["--workers", 2],
        "dask": ["--scheduler", cluster.url],
    }.items():
        done = run("convert", path, tmp_path / f"{name}.pth", *options)
        assert done.code == 0, done.stderr
    assert len({(tmp_path / f"{name}.pth").read_bytes() for name in ("one", "two", "dask")}) == 1


def test_a_batch(cluster: Dask, tmp_path: Path, run: Run) -> None:
    runs = make(tmp_path / "runs", 60)
    runs[7].write_bytes(b"text")
    found: dict[str, dict[str, bytes]] = {}
    for name, options in {
        "one": [],
        "two": ["--workers", 2],
        "dask": ["--scheduler", cluster.url],
    }.items():
        done = run(
            "batch",
            "strip-module",
            "--json",
            "--into",
            tmp_path / name,
            tmp_path / "runs/**/*.pth",
            *options,
        )
        assert done.code == 3, done.stderr
        counts = json.loads(done.stdout)["counts"]
        assert (counts["done"], counts["failed"]) == (59, 1)
        found[name] = {each.name: each.read_bytes() for each in (tmp_path / name).rglob("*.pth")}
    assert found["one"] == found["two"] == found["dask"]
    assert len(found["one"]) == 59


def test_a_worker_of_a_cluster_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    monkeypatch.setattr(workers, "FRESH", 0)
    make(tmp_path / "runs", 60)
    jobs = batch.plan(batch.find([str(tmp_path / "runs/**/*.pth")], str(tmp_path / "out")), "slow")
    with dask(tmp_path, workers=2) as cluster, workers.opened(scheduler=cluster.url) as pool:
        assert pool is not None
        while pool.workers() < 2:
            time.sleep(0.05)
        with closing(batch.run(slow, jobs, str(tmp_path / "out"), pool=pool)) as results:
            found = [next(results)[1]]
            cluster.workers[0].kill()
            found += [outcome for _, outcome in results]
    assert Counter(outcome.state for outcome in found).keys() <= {"done", "found"}
    assert len(found) == 60
    for job in jobs:
        alone = tmp_path / "alone.pth"
        strip(job.input.path, str(alone), force=True, dry_run=False)
        assert (tmp_path / "out" / job.output).read_bytes() == alone.read_bytes()


def test_the_scheduler_of_a_cluster_is_killed(tmp_path: Path) -> None:
    """One clear error, and none of Dask's tracebacks. The next run does the rest."""
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    make(tmp_path / "runs", 400)
    words = ["batch", "strip-module", "--into", tmp_path / "out", tmp_path / "runs/**/*.pth"]
    with dask(tmp_path, workers=1) as cluster:
        client = subprocess.Popen(
            [*COMMAND, *map(str, words), "--scheduler", cluster.url],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        while noted(tmp_path / "out") < 20:
            assert client.poll() is None
            time.sleep(0.005)
        cluster.end_scheduler()
        _, said = client.communicate(timeout=60)
    assert client.returncode == 4
    first, hint = said.splitlines()
    assert first.startswith(f"error: {cluster.url}: the scheduler canceled the work")
    assert hint.startswith("hint: ")


def test_a_job_that_kills_workers_of_a_cluster(tmp_path: Path) -> None:
    """Nannies start others, until Dask takes the job for what it is."""
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    runs = make(tmp_path / "runs", 20)
    runs[5].rename(runs[5].with_name("killer.pth"))
    jobs = batch.plan(
        batch.find([str(tmp_path / "runs/**/*.pth")], str(tmp_path / "out")), "deadly"
    )
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with (
        dask(tmp_path, 2, env, ("--nanny",)) as cluster,
        workers.opened(scheduler=cluster.url) as pool,
    ):
        found = {
            job.output: outcome
            for job, outcome in batch.run(deadly, jobs, str(tmp_path / "out"), pool=pool)
        }
    assert "its worker was killed twice" in str(found.pop("0000/killer.pth").error)
    assert Counter(outcome.state for outcome in found.values()).keys() <= {"done", "found"}
    assert len(list((tmp_path / "out").rglob("*.pth"))) == 19


def test_the_client_of_a_cluster_is_killed(cluster: Dask, tmp_path: Path, run: Run) -> None:
    """Workers may end what they are at; the next run finds that, and does the rest."""
    make(tmp_path / "runs", 250)
    args = (
        "batch",
        "strip-module",
        "--json",
        "--into",
        tmp_path / "out",
        tmp_path / "runs/**/*.pth",
    )
    command = [*COMMAND, *map(str, args), "--scheduler", cluster.url]
    client = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while noted(tmp_path / "out") < 20:
        assert time.monotonic() < deadline and client.poll() is None
        time.sleep(0.005)
    client.kill()
    client.wait()
    done = run(*args, "--scheduler", cluster.url)
    assert done.code == 0, done.stderr
    counts = json.loads(done.stdout)["counts"]
    assert counts["skipped"] > 0
    assert counts["skipped"] + counts["found"] + counts["done"] == 250
    first, last = (
        (tmp_path / "out/0000/0.pth").read_bytes(),
        (tmp_path / "out/0024/249.pth").read_bytes(),
    )
    strip(
        str(tmp_path / "runs/0024/249.pth"), str(tmp_path / "alone.pth"), force=True, dry_run=False
    )
    assert first != last == (tmp_path / "alone.pth").read_bytes()
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


class TestRefusals:
    def test_both(self) -> None:
        with (
            pytest.raises(UsageError, match="either --workers or --scheduler"),
            workers.opened(2, "tcp://x:1"),
        ):
            pass

    def test_no_dask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "distributed", None)
        with pytest.raises(UsageError) as refused, workers.opened(scheduler="tcp://127.0.0.1:1"):
            pass
        assert refused.value.hint == "pip install distributed"

    def test_no_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
        monkeypatch.setattr(workers, "ANSWER", 1)
        with (
            pytest.raises(OutputError, match="no scheduler answers"),
            workers.opened(scheduler="tcp://127.0.0.1:9"),
        ):
            pass

    def test_no_workers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
        monkeypatch.setattr(workers, "PATIENCE", 1)
        with (
            dask(tmp_path, workers=0) as cluster,
            pytest.raises(OutputError, match="has no workers"),
            workers.opened(scheduler=cluster.url),
        ):
            pass

    @pytest.mark.parametrize(
        "versions", [("0", "has ckptkit"), ("ckptkit.missing", "cannot run ckptkit")]
    )
    def test_other_versions(
        self, versions: tuple[str, str], cluster: Dask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version, said = versions
        with monkeypatch.context() as patch:
            if version == "0":
                patch.setattr(workers, "__version__", "0")
            else:
                patch.setattr(workers, "_version", missing)
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


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'ckptkit'")
