"""Batches of objects in a bucket: moto's S3 server on this machine, for inputs, for outputs, for
both."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.errors import PathError, UsageError
from ckptkit.run import batch, workers
from tests.conftest import COMMAND, ENVIRONMENT, Run
from tests.remote.servers import s3_server
from tests.run.batches import counts, dask, expected, interrupted, make, states, strip

s3fs = pytest.importorskip("s3fs")

BUCKET = "runs"
OUT = f"s3://{BUCKET}/out"
PATTERN = f"s3://{BUCKET}/in/**/*.pth"


@pytest.fixture(scope="module")
def account() -> Iterator[dict[str, str]]:
    """The environment that leads to a server of our own."""
    with s3_server() as environment:
        yield environment


@pytest.fixture
def store(
    account: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """The file system, with a bucket of 12 inputs."""
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    fs = s3fs.S3FileSystem()
    fs.mkdir(BUCKET)
    for path in make(tmp_path / "in", 12):
        name = path.relative_to(tmp_path / "in").as_posix()
        fs.pipe_file(f"{BUCKET}/in/{name}", path.read_bytes())
    yield fs
    fs.invalidate_cache()
    fs.rm(BUCKET, recursive=True)
    fs.invalidate_cache()


def counted(run: Run, account: dict[str, str], *args: object, code: int = 0) -> dict[str, int]:
    return counts(run, "strip-module", *args, code=code, env=account)


def objects(store: Any) -> dict[str, bytes]:
    """Every output, by name."""
    store.invalidate_cache()
    found = [path for path in store.find(f"{BUCKET}/out") if not path.endswith(batch.MANIFEST)]
    return {path.removeprefix(f"{BUCKET}/out/"): store.cat_file(path) for path in found}


@pytest.mark.parametrize("options", [(), ("--workers", 2)])
def test_both_ends(
    options: tuple[object, ...], store: Any, account: dict[str, str], run: Run, tmp_path: Path
) -> None:
    assert counted(run, account, "--into", OUT, PATTERN, *options) == {"done": 12}
    assert objects(store) == expected(tmp_path / "in")
    weights = torch.load(io.BytesIO(objects(store)["0001/10.pth"]), weights_only=True)
    assert weights["weight"][0] == 10
    assert counted(run, account, "--into", OUT, PATTERN, *options) == {"skipped": 12}


def test_on_a_cluster(store: Any, account: dict[str, str], run: Run, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (extra cluster)")
    with dask(tmp_path, workers=2, env=account) as cluster:
        words = ("--into", OUT, PATTERN, "--scheduler", cluster.url)
        assert counted(run, account, *words) == {"done": 12}
    assert objects(store) == expected(tmp_path / "in")


def test_one_end(store: Any, account: dict[str, str], run: Run, tmp_path: Path) -> None:
    assert counted(run, account, "--into", tmp_path / "here", PATTERN) == {"done": 12}
    assert (tmp_path / "here/0001/11.pth").read_bytes() == expected(tmp_path / "in")["0001/11.pth"]
    assert counted(run, account, "--into", f"{OUT}/", tmp_path / "in/**/*.pth") == {"done": 12}
    assert objects(store) == expected(tmp_path / "in")
    assert counted(run, account, "--into", OUT, tmp_path / "in/**/*.pth") == {"skipped": 12}


def test_skipping(store: Any, account: dict[str, str], run: Run, tmp_path: Path) -> None:
    counted(run, account, "--into", OUT, PATTERN)
    store.rm(f"{BUCKET}/out/0000/1.pth")
    store.pipe_file(f"{BUCKET}/in/0000/2.pth", (tmp_path / "in/0000/3.pth").read_bytes())
    store.pipe_file(f"{BUCKET}/out/0000/4.pth", b"mine")
    found = counted(run, account, "--into", OUT, PATTERN, code=2)
    assert found == {"skipped": 9, "done": 2, "failed": 1}
    assert objects(store)["0000/4.pth"] == b"mine"
    assert objects(store)["0000/2.pth"] == objects(store)["0000/3.pth"]
    store.rm(f"{BUCKET}/out/{batch.MANIFEST}")
    store.pipe_file(f"{BUCKET}/in/0000/0.pth", b"text")
    assert counted(run, account, "--into", OUT, PATTERN, code=3) == {"found": 10, "failed": 2}


def test_the_client_is_killed(
    store: Any, account: dict[str, str], run: Run, tmp_path: Path
) -> None:
    """Its manifest may be behind: what nobody noted is compared, byte for byte."""
    args = ["--into", OUT, PATTERN]
    interrupted(
        [*COMMAND, "batch", "strip-module", *args],
        lambda: store.find(f"{BUCKET}/out", refresh=True),
        lambda client: client.kill(),
        env={**ENVIRONMENT, **account},
    )
    left = objects(store)
    assert left.items() <= expected(tmp_path / "in").items()
    assert counted(run, account, *args) == {"found": len(left), "done": 12 - len(left)}
    assert objects(store) == expected(tmp_path / "in")


def test_the_manifest_is_written_on_the_way(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PAUSE", 0.0)
    monkeypatch.setattr(batch, "SHARE", 0)
    jobs = batch.plan(batch.find([PATTERN], OUT), ["strip"])
    results = batch.run(strip, jobs, OUT)
    for _ in range(3):
        next(results)
    noted = store.cat_file(f"{BUCKET}/out/{batch.MANIFEST}").splitlines()
    assert len(noted) == 3
    results.close()
    with workers.opened(2) as pool:
        found = states(outcome for _, outcome in batch.run(strip, jobs, OUT, pool=pool))
    assert found == {"skipped": 3, "done": 9}


def test_keys_that_lead_elsewhere(store: Any, tmp_path: Path) -> None:
    """S3 takes any key, a path does not."""
    store.pipe_file(f"{BUCKET}/in/../../x.pth", b"x")
    with pytest.raises(PathError, match="is not a valid output name"):
        batch.find([PATTERN], str(tmp_path / "out"))


def test_refusals(store: Any, tmp_path: Path) -> None:
    for source, into, error, said in (
        (f"s3://{BUCKET}/in/*.bin", str(tmp_path), UsageError, "nothing matches"),
        ("s3://*/in/*.bin", str(tmp_path), UsageError, "wildcard in its host"),
        (PATTERN, f"s3://{BUCKET}/in/", UsageError, "in the output folder"),
        ("https://127.0.0.1:9/in/*.bin", str(tmp_path), PathError, "HTTP servers do not list"),
    ):
        with pytest.raises(error, match=said):
            batch.find([source], into)
    (absent,) = batch.find([f"s3://{BUCKET}/in/absent.pth"], str(tmp_path))
    assert (absent.mark, absent.name) == (None, "absent.pth")
