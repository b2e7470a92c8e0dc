"""Objects in a bucket: moto's S3 server on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    InputChangedError,
    InputError,
    OutputError,
    OutputExistsError,
    PathError,
    UsageError,
)
from ckptkit.core.options import Options
from ckptkit.formats.distributed.llama import PARAMS
from tests.conftest import COMMAND, Run
from tests.remote.servers import s3_server

s3fs = pytest.importorskip("s3fs")

BUCKET = "models"
SHARDS = Options(shard_size=6_000_000)


@pytest.fixture(scope="module")
def account() -> Iterator[dict[str, str]]:
    """The environment that leads to the server."""
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3_run(run: Run, account: dict[str, str]) -> Run:
    return partial(run, env=account)


@pytest.fixture
def store(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system, with an empty bucket."""
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    fs = s3fs.S3FileSystem()
    fs.mkdir(BUCKET)
    yield fs
    fs.invalidate_cache()
    fs.rm(BUCKET, recursive=True)
    fs.invalidate_cache()


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"module.weight": torch.randn(300, 1_000), "module.bias": torch.arange(7.0)}


def put(store: Any, path: Path, key: str = "run.pth") -> str:
    store.put(str(path), f"{BUCKET}/{key}")
    return f"s3://{BUCKET}/{key}"


@pytest.fixture
def url(store: Any, tmp_path: Path) -> str:
    torch.save({"state_dict": state(), "epoch": 3}, tmp_path / "run.pth")
    return put(store, tmp_path / "run.pth")


def test_commands(url: str, store: Any, s3_run: Run, tmp_path: Path) -> None:
    done = s3_run("inspect", "--json", url)
    assert json.loads(done.stdout)["files"][0]["totals"]["tensor_count"] == 2, done.stderr
    for out in ("out.safetensors", f"s3://{BUCKET}/out.safetensors"):
        done = s3_run("strip-module", url, out, cwd=tmp_path)
        assert done.code == 0 and f"wrote {out}" in done.stdout, done.stderr
    assert torch.equal(load_file(tmp_path / "out.safetensors")["weight"], state()["module.weight"])
    store.invalidate_cache()
    assert store.cat(f"{BUCKET}/out.safetensors") == (tmp_path / "out.safetensors").read_bytes()


def test_few_bytes_are_fetched(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({f"layer.{i}": torch.zeros(1 << 18) for i in range(20)}, tmp_path / "run.pth")
    url = put(store, tmp_path / "run.pth")
    asked: list[int] = []
    call = s3fs.S3FileSystem._call_s3

    async def counted(fs: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "get_object":
            start, stop = options["Range"].removeprefix("bytes=").split("-")
            asked.append(int(stop) + 1 - int(start))
        return await call(fs, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    assert len(ckptkit.open(url).weights) == 20
    assert 0 < len(asked) <= 4
    assert sum(asked) <= 1 << 20


def test_a_folder_of_shards(store: Any, tmp_path: Path, s3_run: Run) -> None:
    ckptkit.save(state(), tmp_path / "shards", format="sharded", shard_size=9_000)
    store.put(str(tmp_path / "shards"), f"{BUCKET}/shards", recursive=True)
    for end in ("", "/", "/model.safetensors.index.json"):
        loaded = ckptkit.load(f"s3://{BUCKET}/shards{end}")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())
    done = s3_run("inspect", f"s3://{BUCKET}/shards")
    assert done.code == 0, done.stderr


def test_a_changed_object(url: str, store: Any, tmp_path: Path) -> None:
    ck = ckptkit.open(url)
    torch.save({"state_dict": state(), "epoch": 4}, tmp_path / "run.pth")
    put(store, tmp_path / "run.pth")
    with pytest.raises(InputChangedError):
        ckptkit.save(ck, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_refusals(url: str, store: Any, alone: Run, account: dict[str, str]) -> None:
    with pytest.raises(PathError, match="the bucket nowhere does not exist"):
        ckptkit.open("s3://nowhere/run.pth")
    with pytest.raises(PathError, match="does not exist"):
        ckptkit.open(f"s3://{BUCKET}/nothing.pth")
    with pytest.raises(InputError, match="is a folder without a checkpoint"):
        store.pipe(f"{BUCKET}/notes/readme", b"hello")
        ckptkit.open(f"s3://{BUCKET}/notes")
    done = alone(
        "inspect", url, env={**account, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    )
    assert done.code == 3
    assert "requires credentials" in done.stderr


WRITES = (
    "create_multipart_upload", "upload_part", "complete_multipart_upload", "put_object",
    "delete_object", "delete_objects",
)  # fmt: skip


def die_after(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request that writes arrive after so many, as if the process were dead by then."""
    left = [last]

    def count(method: str) -> None:
        left[0] -= method in WRITES
        if left[0] < 0:
            raise ConnectionError("this process is dead")

    def counted(call: Any) -> Any:
        def counting(fs: Any, method: str, *args: Any, **options: Any) -> Any:
            count(method)
            return call(fs, method, *args, **options)

        return counting

    for name in ("call_s3", "_call_s3"):
        monkeypatch.setattr(s3fs.S3FileSystem, name, counted(getattr(s3fs.S3FileSystem, name)))


def said(url: str, ck: ckptkit.Checkpoint) -> str:
    """Return "whole" for a checkpoint with all tensors of `ck`, else the error of reading it."""
    try:
        found = ckptkit.load(url)
    except CkptkitError as error:
        return error.message
    want = ckptkit.load(ck)
    assert {*found} == {*want}
    assert all(torch.equal(found[name].contiguous(), tensor) for name, tensor in want.items())
    return "whole"


class TestUpload:
    def test_checksums_come_first(self, store: Any, tmp_path: Path) -> None:
        """A .pth out of a file without checksums: they stand before the bytes that they are of."""
        save_file(state(), tmp_path / "in.safetensors")
        ckptkit.save(ckptkit.open(tmp_path / "in.safetensors"), f"s3://{BUCKET}/out.pth")
        store.get(f"{BUCKET}/out.pth", str(tmp_path / "out.pth"))
        with zipfile.ZipFile(tmp_path / "out.pth") as archive:
            assert archive.testzip() is None
        loaded = torch.load(tmp_path / "out.pth")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())

    def test_in_several_parts(
        self, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptkit.publish.upload.PART", 5 << 20)  # the least that S3 takes
        big = {f"layer.{i}": torch.randn(1 << 18) for i in range(13)}
        torch.save(big, tmp_path / "in.pth")
        counts: list[int] = []
        ck = ckptkit.open(tmp_path / "in.pth")
        ckptkit.save(
            ck, f"s3://{BUCKET}/out.pth", progress=lambda count, total: counts.append(count)
        )
        assert sum(counts) == store.size(f"{BUCKET}/out.pth")
        store.get(f"{BUCKET}/out.pth", str(tmp_path / "out.pth"))
        assert all(
            torch.equal(tensor, big[name])
            for name, tensor in torch.load(tmp_path / "out.pth").items()
        )

    @pytest.mark.parametrize("size", [1_000, 3 << 20])
    def test_a_failure_leaves_nothing(
        self, size: int, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptkit.publish.upload.PART", 5 << 20)
        torch.save({"a": torch.zeros(size)}, tmp_path / "in.pth")
        ck = ckptkit.open(tmp_path / "in.pth")
        torch.save({"a": torch.ones(size)}, tmp_path / "in.pth")
        store.pipe(f"{BUCKET}/out.pth", b"what was there")
        with pytest.raises(OutputError):
            ckptkit.save(ck, f"s3://{BUCKET}/out.pth", force=True)
        assert store.cat(f"{BUCKET}/out.pth") == b"what was there"
        store.rm(f"{BUCKET}/out.pth")
        assert_nothing(store)

    def test_refusals(self, url: str, store: Any, tmp_path: Path, s3_run: Run) -> None:
        ck = ckptkit.open(url)
        with pytest.raises(OutputExistsError):
            store.pipe(f"{BUCKET}/there.pth", b"x")
            ckptkit.save(ck, f"s3://{BUCKET}/there.pth")
        with pytest.raises(UsageError, match="is the input file"):
            ckptkit.save(ck, url, force=True)
        with pytest.raises(OutputError, match=r"bucket .* does not exist"):
            ckptkit.save(ck, "s3://nowhere/out.pth")
        with pytest.raises(UsageError, match="cannot verify"):
            ckptkit.save(ck, f"s3://{BUCKET}/other.pth", verify=True)
        assert s3_run("remap", "--to", "cpu", url, f"s3://{BUCKET}/there.pth").code == 2


def save_shards(ck: ckptkit.Checkpoint, name: str = "out", **options: Any) -> None:
    ckptkit.save(ck, f"s3://{BUCKET}/{name}", format="sharded", options=SHARDS, **options)


def assert_nothing(store: Any) -> None:
    """No object, and no upload that is not finished."""
    store.invalidate_cache()
    assert not store.find(BUCKET)
    assert not store.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")


class TestFolders:
    """Folders of files: the index appears last, and all of it or nothing."""

    @pytest.fixture
    def shards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("ckptkit.publish.upload.SHARED", 5 << 20)  # the least that S3 takes
        torch.save({f"layer.{i}": torch.randn(700_000) for i in range(6)}, tmp_path / "in.pth")
        return tmp_path / "in.pth"

    @pytest.mark.parametrize(
        ("format", "index"), [("sharded", "model.safetensors.index.json"), ("dcp", ".metadata")]
    )
    def test_what_arrives_is_what_a_local_folder_holds(
        self, format: str, index: str, shards: Path, store: Any, tmp_path: Path
    ) -> None:
        ck = ckptkit.open(shards)
        told: list[int] = []
        url = f"s3://{BUCKET}/out"
        given = SHARDS if format == "sharded" else Options()
        options = replace(given, format=format, progress=lambda count, total: told.append(count))
        ckptkit.save(ck, url, options)
        ckptkit.save(ck, tmp_path / "local", replace(options, progress=None))
        store.invalidate_cache()
        local = {str(path.relative_to(tmp_path / "local")): path.read_bytes()
                 for path in (tmp_path / "local").rglob("*") if path.is_file()}  # fmt: skip
        found = {
            name.removeprefix(f"{BUCKET}/out/"): store.cat(name)
            for name in store.find(f"{BUCKET}/out")
        }
        assert index in found
        assert found == local
        assert sum(told) == sum(map(len, local.values()))
        assert ckptkit.open(url).weights["layer.5"].numpy().tobytes() == (
            torch.load(shards)["layer.5"].numpy().tobytes()
        )

    def test_the_index_is_finished_last(
        self, shards: Path, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finished: list[str] = []
        commit = s3fs.S3File.commit

        def noted(file: Any) -> None:
            finished.append(file.path.rpartition("/")[2])
            assert len(finished) > 1 or not store.find(file.path.rpartition("/")[0])
            commit(file)

        monkeypatch.setattr(s3fs.S3File, "commit", noted)
        ck = ckptkit.open(shards)
        ckptkit.save(ck, f"s3://{BUCKET}/out", format="dcp")
        assert finished[-1] == ".metadata"
        finished.clear()
        save_shards(ck, "o2")
        assert len(finished) == 4
        assert finished[-1] == "model.safetensors.index.json"

    @pytest.mark.parametrize(
        ("method", "after"),
        [*(("_upload_chunk", n) for n in (0, 1, 5, 6)), *(("commit", n) for n in range(4))],
    )
    def test_a_failure_leaves_nothing(
        self, method: str, after: int, shards: Path, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After some parts of some files, or some finished files: no object, and no upload that is
        not finished."""
        ck = ckptkit.open(shards)
        left = iter(range(after))
        real = getattr(s3fs.S3File, method)

        def failing(file: Any, *args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise ConnectionError("cut")
            return real(file, *args, **options)

        monkeypatch.setattr(s3fs.S3File, method, failing)
        with pytest.raises(OutputError):
            save_shards(ck)
        assert_nothing(store)

    def test_an_input_that_changes_leaves_nothing(self, shards: Path, store: Any) -> None:
        ck = ckptkit.open(shards)
        os.utime(shards, ns=(1, 1))
        with pytest.raises(InputChangedError):
            save_shards(ck)
        assert_nothing(store)

    @pytest.mark.parametrize("format", ["sharded", "sharded-bin", "dcp", "llama-parts"])
    def test_a_kill_at_any_request_leaves_nothing_or_all(
        self, format: str, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader says that files are missing; --force replaces what is there."""
        layers = {f"layers.{i}.attention.wo.weight": torch.randn(66, 66) for i in range(3)}
        torch.save({**layers, "norm.weight": torch.ones(66)}, tmp_path / "in.pth")
        ck = ckptkit.open(tmp_path / "in.pth")
        ck = replace(ck, extras={**ck.extras, PARAMS: '{"dim": 66, "vocab_size": -1}'})
        sharded = Options(shard_size=20_000)
        options = {"dcp": Options(), "llama-parts": Options(ranks=3)}.get(format, sharded)
        self.kill(format, options, ck, 2 if format == "dcp" else 4, store, monkeypatch)

    def test_a_kill_during_uploads_of_several_parts(
        self, shards: Path, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.kill("sharded", SHARDS, ckptkit.open(shards), 4, store, monkeypatch)

    def kill(
        self,
        format: str,
        options: Options,
        ck: ckptkit.Checkpoint,
        files: int,
        store: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Save at one URL after another: no request arrives after the first, the second..."""
        states: list[str] = []
        left: list[int] = []
        while not left or left[-1] < files:
            url = f"s3://{BUCKET}/{len(left)}"
            with monkeypatch.context() as patch, suppress(OutputError):
                die_after(len(left), patch)
                ckptkit.save(ck, url, format=format, options=options)
            store.invalidate_cache()
            left.append(len(store.find(url)))
            states.append(said(url, ck))
            if 0 < left[-1] < files:
                with pytest.raises(OutputExistsError, match="of an interrupted upload"):
                    ckptkit.save(ck, url, format=format, options=options)
                ckptkit.save(ck, url, format=format, options=options, force=True)
                assert said(url, ck) == "whole"
                assert len(store.find(url)) == files
        assert left == sorted(left)
        assert {*range(files + 1)} <= {*left}  # each file is finished by a request of its own
        first = states.index("whole")
        assert {*states[:first]} <= {"does not exist"} | {
            each
            for each in states
            if re.search("of 3 (shards|rank files) are missing|no .metadata", each)
        }
        assert {*states[first:]} == {"whole"}

    def test_only_what_was_cut_off_is_replaced(self, shards: Path, store: Any) -> None:
        """With --force: not a whole output, nor files that this output would not have."""
        ck = ckptkit.open(shards)
        index = f"{BUCKET}/out/model.safetensors.index.json"
        save_shards(ck)
        with pytest.raises(OutputExistsError, match="exists"):
            save_shards(ck, force=True)
        store.rm(index)
        store.pipe(f"{BUCKET}/out/notes", b"mine")
        with pytest.raises(OutputExistsError, match="exists"):
            save_shards(ck, force=True)
        store.rm(f"{BUCKET}/out/notes")
        with pytest.raises(
            OutputExistsError, match="contains 3 of 4 files of an interrupted upload"
        ) as caught:
            save_shards(ck)
        assert caught.value.hint == "force=True replaces them"
        save_shards(ck, force=True)
        store.invalidate_cache()
        assert store.exists(index)

    @pytest.mark.parametrize("delay", [0.0, 0.2, 0.5, 0.9, 1.4])
    def test_a_kill_leaves_nothing_or_all(
        self, delay: float, shards: Path, store: Any, account: dict[str, str]
    ) -> None:
        words = ("convert", str(shards), f"s3://{BUCKET}/out", "--shard-size", "6MB")
        process = subprocess.Popen([*COMMAND, *words], env={**os.environ, **account})
        time.sleep(0.6 + delay)
        process.kill()
        process.wait()
        store.invalidate_cache()
        found = store.find(BUCKET)
        assert len(found) in (0, 4) or not any("index" in name for name in found)


def test_a_bucket_that_keeps_versions(store: Any, s3_run: Run, tmp_path: Path) -> None:
    """Listings do not say which version a file is, and requests for the file do."""
    store.mkdir("kept")
    store.call_s3(
        "put_bucket_versioning", Bucket="kept", VersioningConfiguration={"Status": "Enabled"}
    )
    torch.save(state(), tmp_path / "run.pth")
    ckptkit.save(ckptkit.open(tmp_path / "run.pth"), tmp_path / "shards", format="sharded")
    store.put(str(tmp_path / "shards"), "kept/shards", recursive=True)
    store.invalidate_cache()
    assert store.info("kept/shards/model.safetensors")["VersionId"]
    done = s3_run("convert", "s3://kept/shards", tmp_path / "out.pth")
    assert done.code == 0, done.stderr
    assert torch.equal(
        torch.load(tmp_path / "out.pth", weights_only=True)["module.bias"], state()["module.bias"]
    )
