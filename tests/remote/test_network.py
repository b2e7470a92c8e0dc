"""A network and a server on which things go wrong."""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import CkptkitError, InputChangedError, InputError, OutputError, PathError
from ckptkit.formats.format import open_place
from ckptkit.remote import files, transport
from tests.conftest import ENVIRONMENT, Run
from tests.remote.servers import Misbehaving, Reply, Request, misbehaving

pytest.importorskip("aiohttp")

SIZE = 1 << 20
NOISE = random.Random(0).randbytes(SIZE)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.001)


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with misbehaving(NOISE) as served:
        yield served


def opened(server: Misbehaving) -> ByteSource:
    source = open_place(server.url)
    assert isinstance(source, ByteSource)
    return source


def after_the_first(reply: Reply) -> Callable[[Request], Reply]:
    return lambda request: reply if request.number else Reply()


FAULTS = {
    "500": (Reply(status=500), "HTTP status 500"),
    "503": (Reply(status=503), "HTTP status 503"),
    "429": (Reply(status=429), "HTTP status 429"),
    "cut": (Reply(cut=1_000), "the connection broke"),
    "cut without length": (Reply(cut=1_000, length=False), "broke: .*the response is too short"),
    "stalled": (Reply(stall=1_000), "the connection broke: the server stopped sending"),
    "not HTTP": (Reply(raw=b"x" * 5_000), "the connection broke: the response is not valid HTTP"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_request_is_sent_again(
    fault: str, server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, some times."""
    monkeypatch.setattr(transport, "SILENCE", 0.2)
    source, (reply, said) = opened(server), FAULTS[fault]
    server.behave = lambda request: reply if request.number < transport.TRIES else Reply()
    assert source.read(SIZE - 9_000, 9_000) == NOISE[-9_000:]
    assert len({request.start for request in server.requests[1:]}) == 1
    server.requests.clear()
    server.behave = lambda request: reply
    with pytest.raises(InputError, match=said) as caught:
        source.read(SIZE // 2, 9_000)
    assert "try again later" in str(caught.value.hint)
    assert len(server.requests) == transport.TRIES
    server.requests.clear()
    if fault != "cut without length":  # which is a short answer
        with pytest.raises(InputError, match=said):
            opened(server)
        assert len(server.requests) == transport.TRIES


def test_a_busy_server_says_when(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked more often than one that says nothing, and waited for as long as it says."""
    waits: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", waits.append)
    source = opened(server)
    busy = range(1, 10)
    server.behave = lambda request: (
        Reply(status=503, retry_after="7") if request.number in busy else Reply()
    )
    assert source.read(SIZE - 9, 9) == NOISE[-9:]
    assert waits == [7] * len(busy)
    server.behave = lambda request: Reply(status=503, retry_after="99999")
    with pytest.raises(InputError, match="HTTP status 503"):
        source.read(0, SIZE)
    assert max(waits) == transport.LONGEST


def test_a_store_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library would wait for minutes, several times."""
    asyn = pytest.importorskip("fsspec.asyn")

    class Stalling(asyn.AsyncFileSystem):  # type: ignore[name-defined, misc]
        protocol = "stalling"

        async def _info(self, path: str, **_: object) -> dict[str, object]:
            return {"name": path, "size": SIZE, "type": "file"}

        async def _cat_file(self, path: str, start: int, end: int, **_: object) -> bytes:
            await asyncio.sleep(60)
            return NOISE[start:end]

    for name, value in (("SILENCE", 0), ("SLOWEST_STORED", 1 << 30), ("PATIENCE", 0.5)):
        monkeypatch.setattr(transport, name, value)
    fs = Stalling()
    source = files.RemoteFile(
        "stalling://x", transport.Stored(fs, "x", "stalling://x", fs.info("x"))
    )
    begun = time.monotonic()
    with pytest.raises(InputError, match="the connection broke: the server stopped sending"):
        source.read(0, 9)
    assert time.monotonic() - begun < 20


def test_rules_for_a_file_in_the_root_of_a_store(tmp_path: Path, run: Run) -> None:
    """Its config.json would be beside it."""
    fsspec = pytest.importorskip("fsspec")
    torch.save({"w": torch.ones(9)}, tmp_path / "a.pth")
    fsspec.filesystem("memory").pipe("/rooted.pth", (tmp_path / "a.pth").read_bytes())
    (tmp_path / "r.yaml").write_text("steps: [{rules: ['w -> v']}]")
    done = run("run", tmp_path / "r.yaml", "memory://rooted.pth", tmp_path / "out.pth")
    assert done.code == 0, done.stderr
    assert list(torch.load(tmp_path / "out.pth")) == ["v"]


def test_an_object_that_changes_is_not_reported_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store does not say with each answer what it is of."""
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    saved = io.BytesIO()
    torch.save({"w": torch.ones(9)}, saved)
    fs.pipe("/changing.pth", saved.getvalue())
    assert ckptkit.digest("memory://changing.pth")["tensors"]
    fetch = transport.Stored._fetch

    def changing(self: transport.Stored, start: int, stop: int) -> bytes:
        fs.pipe("/changing.pth", saved.getvalue())
        return fetch(self, start, stop)

    monkeypatch.setattr(transport.Stored, "_fetch", changing)
    with pytest.raises(InputChangedError):
        ckptkit.digest("memory://changing.pth")


@pytest.mark.parametrize("status", [400, 403, 404, 405])
def test_a_refusal_is_not_argued_with(status: int, server: Misbehaving) -> None:
    server.behave = lambda request: Reply(status=status)
    with pytest.raises(InputError):
        opened(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (Reply(etag='"two"'), InputChangedError, "changed while it was read"),
        (
            Reply(content_range=f"bytes {SIZE - 9}-{SIZE - 1}/{SIZE + 1}"),
            InputChangedError,
            "changed",
        ),
        (Reply(content_range=f"bytes 0-8/{SIZE}"), InputError, "does not send the requested range"),
        (Reply(content_range="words 1-2/3"), InputError, "does not send the requested range"),
        (Reply(ranges=False), InputError, "the complete file instead of the requested range"),
        (Reply(ranges=False, etag='"two"'), InputChangedError, "changed"),
        (Reply(status=404), InputChangedError, "was removed"),
        (Reply(status=412), InputChangedError, "changed"),
        (Reply(status=416), InputChangedError, "changed"),
        (Reply(status=403), PathError, "access is denied"),
    ],
)
def test_another_file_is_refused(
    reply: Reply, kind: type[CkptkitError], said: str, server: Misbehaving
) -> None:
    source = opened(server)
    server.behave = after_the_first(reply)
    with pytest.raises(kind, match=said):
        source.read(SIZE - 9, 9)


def test_a_long_answer_is_cut(server: Misbehaving) -> None:
    server.behave = after_the_first(Reply(body=b"x" * 300_000))
    assert opened(server).read(SIZE - 9, 9) == b"x" * 9


def test_conversion_over_a_bad_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"layer.{i}": torch.randn(50_000) for i in range(10)}
    torch.save(state, tmp_path / "run.pth")
    with misbehaving((tmp_path / "run.pth").read_bytes()) as served:
        faults = (Reply(), Reply(cut=70_000), Reply(status=502))
        served.behave = lambda request: faults[request.number % 3]
        ckptkit.save(ckptkit.open(served.url), tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth")
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 18)}, tmp_path / "run.pth")
    folder = tmp_path / "out"
    folder.mkdir()
    with misbehaving((tmp_path / "run.pth").read_bytes()) as served:
        ck = ckptkit.open(served.url)
        served.behave = lambda request: Reply(cut=10)
        with pytest.raises(InputError, match="the connection broke"):
            ckptkit.save(ck, folder / "out.pth")
    assert not list(folder.iterdir())


def test_a_small_answer_without_ranges_and_length_is_read(server: Misbehaving) -> None:
    server.behave = lambda request: Reply(ranges=False, length=False)
    with pytest.raises(InputError, match="the size is unknown"):
        opened(server)
    page = Reply(ranges=False, length=False, body=b"<!DOCTYPE html><html></html>")
    server.behave = lambda request: page
    with pytest.raises(InputError, match="is an HTML page"):
        ckptkit.open(server.url)


class TestWindows:
    """The bytes that are read from the network, and those that are kept."""

    def test_what_was_read_is_kept(self, server: Misbehaving) -> None:
        source = opened(server)
        for at in (0, 9, 60_000):
            assert source.read(at, 100) == NOISE[at : at + 100]
        assert source.read(SIZE - 100_000, 100_000) == source.read(SIZE - 100_000, 100_000)
        assert len(server.requests) == 2

    def test_reads_that_follow_each_other_are_fewer_requests(self, server: Misbehaving) -> None:
        source = opened(server)
        assert b"".join(source.read(at, 4_096) for at in range(0, SIZE, 4_096)) == NOISE
        assert [request.stop - request.start for request in server.requests] == [
            65_536, 131_072, 262_144, 524_288, 65_536,
        ]  # fmt: skip

    def test_only_what_is_missing_is_fetched(self, server: Misbehaving) -> None:
        source = opened(server)
        source.read(SIZE - 65_536, 65_536)
        assert source.read(0, SIZE) == NOISE
        assert server.requests[2][1:3] == (65_536, SIZE - 65_536)

    def test_memory_is_bounded(self, server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "KEPT", 200_000)
        source = opened(server)
        for at in range(0, SIZE, 100_000):
            assert source.read(at, 10) == NOISE[at : at + 10]
        assert isinstance(source, files.RemoteFile)
        assert sum(len(window.data) for window in source._windows) <= 200_000

    def test_announced_ranges_are_fetched_together(self, server: Misbehaving) -> None:
        source = opened(server)
        ranges = [(100_000, 50), (100_100, 50), (400_000, 50), (800_000, 50)]
        source.will_read(ranges)
        assert sorted(request[1:3] for request in server.requests[1:]) == [
            (100_000, 100_150), (400_000, 400_050), (800_000, 800_050),
        ]  # fmt: skip
        assert [source.read(at, 50) for at, _ in ranges] == [
            NOISE[at : at + 50] for at, _ in ranges
        ]
        assert len(server.requests) == 4

    @pytest.mark.parametrize(
        ("offset", "length"), [(-1, 2), (0, -1), (SIZE, 1), (SIZE - 1, 2), (1 << 70, 1)]
    )
    def test_beyond_the_end(self, offset: int, length: int, server: Misbehaving) -> None:
        source = opened(server)
        with pytest.raises(InputError):
            source.read(offset, length)
        assert len(server.requests) == 1


def test_interrupted(server: Misbehaving, tmp_path: Path) -> None:
    """Ctrl-C while the network is silent ends the command, with its exit code, and leaves
    nothing."""
    server.behave = lambda request: Reply(stall=10)
    program = (
        "import _thread, threading; from ckptkit.cli import main;"
        "threading.Timer(1, _thread.interrupt_main).start(); main()"
    )
    command = [sys.executable, "-c", program, "convert", server.url, "out.pth"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 130, done.stderr
    assert not list(tmp_path.iterdir())


def test_memory_urls(tmp_path: Path) -> None:
    """A file system of fsspec's own, which needs no network and no other package."""
    fsspec = pytest.importorskip("fsspec")
    torch.save({"a": torch.arange(3.0), "b": torch.ones(2)}, tmp_path / "run.pth")
    store = fsspec.filesystem("memory")
    store.pipe("/models/run.pth", (tmp_path / "run.pth").read_bytes())
    ck = ckptkit.open("memory://models/run.pth")
    assert list(ck.weights) == ["a", "b"]
    ckptkit.save(ck, "memory://models/out.pth")
    ckptkit.save(ck, "memory://models/folder", format="dcp")
    assert {*ckptkit.open("memory://models/folder").weights} == {*ck.weights}
    (tmp_path / "out.pth").write_bytes(store.cat("/models/out.pth"))
    assert torch.load(tmp_path / "out.pth")["a"].tolist() == [0, 1, 2]
    store.pipe("/models/run.pth", (tmp_path / "run.pth").read_bytes())
    with pytest.raises(OutputError):
        ckptkit.save(ck, "memory://models/other.pth")
    assert not store.exists("/models/other.pth")


def test_file_urls_are_local_files(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "run.pth")
    ck = ckptkit.open(f"file://{tmp_path}/run.pth")
    assert ck.name == str(tmp_path / "run.pth")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://bucket/x.pth", "fsspec has no file system for nosuch://"),
        ("memory://nothing.pth", "does not exist"),
        ("http://127.0.0.1:1/run.pth", "its host refuses the connection"),
        ("http://nobody.invalid/run.pth", "its host is unknown"),
    ],
)
def test_unknown_places(url: str, said: str) -> None:
    with pytest.raises(PathError, match=said):
        ckptkit.open(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(PathError, match=r"gs:// needs a package") as caught:
        ckptkit.open("gs://bucket/x.pth")
    assert "install gcsfs" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("file:///etc/hostname", "NonHttpUrlRedirectClientError"),
        ("s3://bucket/key", "NonHttpUrlRedirectClientError"),
        ("/again", "TooManyRedirects"),
    ],
)
def test_redirects_that_are_not_followed(target: str, said: str, server: Misbehaving) -> None:
    server.behave = lambda request: Reply(status=302, location=target)
    with pytest.raises(InputError, match=said):
        ckptkit.open(server.url)
    assert len(server.requests) < 20  # and no second attempt


def test_a_request_ends_however_slowly_bytes_come(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SILENCE", 0.5)
    monkeypatch.setattr(transport, "SLOWEST", 1 << 30)
    monkeypatch.setattr(transport, "TRIES", 2)
    server.behave = lambda request: Reply(drip=True)
    with pytest.raises(InputError, match="connection broke"):
        opened(server)
