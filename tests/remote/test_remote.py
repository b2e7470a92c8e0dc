"""Files on a web server: the requests and bytes that they cost, refusals, and secrets."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fsspec.registry import known_implementations
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import ckptkit
from ckptkit.core.errors import (
    CorruptError,
    FormatError,
    InputChangedError,
    InputError,
    PathError,
    UsageError,
)
from tests.conftest import ENVIRONMENT, Run
from tests.narrow import narrow
from tests.remote.servers import Misbehaving, Reply, Request, serving

pytest.importorskip("aiohttp")

TENSORS = 400
ROWS = 6553  # of 1,024 float32: 400 of them are 10 GiB
HEADERS = 1 << 20  # bytes that may be fetched to know what is in a file, pickles aside
REQUESTS = 6
PAGE = b"<!DOCTYPE html><html>sign in</html>"


def behave(request: Request) -> Reply:
    """Without ranges at /whole, to one user at /secret, to nobody at /forbidden."""
    kinds = {
        "whole": Reply(ranges=False),
        "page": Reply(ranges=False, body=PAGE),
        "forbidden": Reply(status=403),
        "secret": Reply() if request.user == "user:pa55" else Reply(status=401),
    }
    return kinds.get(request.path.split("/")[1], Reply())


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Misbehaving]:
    with serving(tmp_path_factory.mktemp("files")) as server:
        server.behave = behave
        yield server


@pytest.fixture
def served(web: Misbehaving) -> Misbehaving:
    """The server, with a small file."""
    torch.save(small(), web.folder / "small.pth")
    web.requests.clear()
    return web


def small() -> dict[str, torch.Tensor]:
    base = torch.arange(64.0 * 32).view(64, 32)
    return {
        "module.a.weight": base,
        "module.a.bias": torch.arange(5.0),
        "module.tied": base,
        "module.row": base[3],
    }


def equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return list(ours) == list(theirs) and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


def fetched(served: Misbehaving) -> int:
    return sum(request.stop - request.start for request in served.requests)


def sparse_pth(path: Path) -> None:
    """10 GiB by torch itself, which leaves out the bytes."""
    with FakeTensorMode():
        state = {f"layers.{i}.attn.weight": torch.empty(ROWS, 1024) for i in range(TENSORS)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state_dict": state, "epoch": 3}, path)


def sparse_safetensors(path: Path, tensors: int = TENSORS) -> None:
    size = ROWS * 1024 * 4
    header = {
        f"layers.{i}.attn.weight": {
            "dtype": "F32",
            "shape": [ROWS, 1024],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * size)


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_inspect_fetches_headers_only(kind: str, served: Misbehaving, run: Run) -> None:
    if kind == "pth" and not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch writes no sparse files")
    path = served.folder / f"huge.{kind}"
    (sparse_pth if kind == "pth" else sparse_safetensors)(path)
    assert path.stat().st_size > 10_000_000_000
    done = run("inspect", "--json", f"{served.root}/huge.{kind}")
    path.unlink()
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["files"][0]["totals"]["tensor_count"] == TENSORS
    assert 0 < len(served.requests) <= REQUESTS
    assert 0 < fetched(served) <= HEADERS


def test_a_legacy_stream_is_not_searched(served: Misbehaving) -> None:
    """The counts of elements, one before each storage, are read with the storage."""
    path = served.folder / "legacy.pth"
    state = {f"layer.{i}.weight": torch.randn(1 << 18) for i in range(10)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with closing(ckptkit.open(f"{served.root}/legacy.pth")) as ck:
        assert len(served.requests) <= REQUESTS
        assert fetched(served) <= HEADERS
        assert equal(ckptkit.load(ck), state)
    data = path.read_bytes()
    wrong = data.rindex((1 << 18).to_bytes(8, "little"))
    path.write_bytes(data[:wrong] + b"\1" + data[wrong + 1 :])
    with pytest.raises(CorruptError, match="has 262145 elements, but its tensors need 262144"):
        ckptkit.load(f"{served.root}/legacy.pth")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is that of Linux")
def test_memory_stays_bounded(served: Misbehaving, tmp_path: Path) -> None:
    path, out = served.folder / "some.safetensors", tmp_path / "out.safetensors"
    sparse_safetensors(path, 10)
    done = narrow("convert", f"{served.root}/some.safetensors", out)
    path.unlink()
    assert done.code == 0, done.stderr
    assert out.stat().st_size > 250 << 20
    assert done.memory < 160 << 20


class TestShards:
    @pytest.fixture
    def folder(self, served: Misbehaving) -> Path:
        folder = served.folder / "model"
        folder.mkdir(exist_ok=True)
        places = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate("ab", 1)}
        for name, file in places.items():
            save_file({name: torch.arange(4.0)}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    def test_an_index_opens_its_shards(self, folder: Path, served: Misbehaving) -> None:
        url = f"{served.root}/model/model.safetensors.index.json"
        loaded = ckptkit.load(f"{url}?download=true")
        assert {name: value.tolist() for name, value in loaded.items()} == {
            "a": [0, 1, 2, 3],
            "b": [0, 1, 2, 3],
        }
        assert len(served.requests) == 3  # one for each file
        assert {each.path.partition("?")[2] for each in served.requests} == {"download=true"}
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FormatError, match="1 of 2 shards are missing"):
            ckptkit.open(url)

    @pytest.mark.parametrize("name", ["../secret.safetensors", "a/b", "%2e%2e", "x?y=z"])
    def test_SH_01_no_other_address(self, name: str, folder: Path, served: Misbehaving) -> None:
        (folder / "evil.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(InputError):
            ckptkit.open(f"{served.root}/model/evil.safetensors.index.json")
        asked = [each.path for each in served.requests]
        assert asked[0] == "/model/evil.safetensors.index.json"
        assert asked[1:] in ([], ["/model/x%3Fy=z"])  # a file of that name, no query


@pytest.mark.parametrize("is_removed", [False, True])
def test_it_is_the_same_file_at_the_end(
    is_removed: bool, served: Misbehaving, tmp_path: Path
) -> None:
    path = served.folder / "changing.pth"
    torch.save(small(), path)
    ck = ckptkit.open(f"{served.root}/changing.pth")
    packed = pickle.dumps(ck.source)
    assert pickle.loads(packed).read(0, path.stat().st_size) == path.read_bytes()
    path.unlink()
    if not is_removed:
        torch.save({**small(), "more": torch.ones(3)}, path)
        with pytest.raises(InputChangedError):
            pickle.loads(packed)  # as worker processes do
    with pytest.raises(InputChangedError, match="was removed" if is_removed else "changed"):
        ckptkit.save(ck, tmp_path / "out.pth")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "kind", "said", "hint"),
    [
        ("nothing.pth", PathError, "does not exist", None),
        ("forbidden/small.pth", PathError, r"access is denied \(HTTP status 403\)", "credentials"),
        ("secret/small.pth", PathError, r"access is denied \(HTTP status 401\)", "credentials"),
        ("page/small.pth", FormatError, "is an HTML page", "the file itself"),
        ("pointer.pth", FormatError, "is a Git LFS pointer", None),
        ("empty.pth", FormatError, "is empty", None),
    ],
)
def test_refusals(
    path: str, kind: type[InputError], said: str, hint: str | None, served: Misbehaving
) -> None:
    (served.folder / "pointer.pth").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    )
    (served.folder / "empty.pth").touch()
    with pytest.raises(kind, match=said) as caught:
        ckptkit.open(f"{served.root}/{path}")
    assert caught.value.where == f"{served.root}/{path}"
    assert hint is None or hint in str(caught.value.hint)


def test_a_server_without_ranges(served: Misbehaving) -> None:
    """A small file is read whole, with one request; a large one is refused before it is read."""
    loaded = ckptkit.load(f"{served.root}/whole/small.pth")
    assert equal(loaded, torch.load(served.folder / "small.pth"))
    assert len(served.requests) == 1
    sparse_safetensors(served.folder / "large.safetensors", 3)
    url = f"{served.root}/whole/large.safetensors"
    said = r"does not support byte ranges, and the file is too large \(80,\d+,\d+ bytes\)"
    with pytest.raises(InputError, match=said) as caught:
        ckptkit.open(url)
    assert caught.value.hint == f"download the file first: curl -O '{url}'"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_credentials_are_not_shown(
    options: list[str], served: Misbehaving, alone: Run, tmp_path: Path
) -> None:
    place = f"http://user:pa55@{served.root.removeprefix('http://')}/secret"
    for source in ("small.pth?sig=s1gnature", "nothing.pth?sig=s1gnature"):
        url = f"{place}/{source}"
        for command in (["inspect", *options, url], ["strip-module", url, "out.pth"]):
            done = alone(*command, cwd=tmp_path)
            assert done.code == (0 if source.startswith("small") else 3), done.stderr
            assert "pa55" not in done.stdout + done.stderr
            assert "s1gnature" not in done.stdout + done.stderr
    assert list(torch.load(tmp_path / "out.pth")) == ["a.weight", "a.bias", "tied", "row"]
    assert not re.search(rb"pa55|s1gnature|127\.0\.0\.1", (tmp_path / "out.pth").read_bytes())


def test_a_traceback_shows_no_credentials(served: Misbehaving) -> None:
    url = served.root.replace("://", "://user:wr0ng@") + "/secret/small.pth?sig=s1gnature"
    program = f"import ckptkit; ckptkit.open({url!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT
    )
    raised = done.stderr[done.stderr.index("ckptkit.core.errors.") :]
    assert "access is denied" in raised
    assert "wr0ng" not in raised
    assert "s1gnature" not in raised
    assert "direct cause" not in done.stderr


def test_commands_name_a_local_output(served: Misbehaving, run: Run) -> None:
    done = run("inspect", f"{served.root}/small.pth?download=true")
    assert "small.pth?***' small-stripped.pth\n" in done.stdout
    done = run("strip-module", "--in-place", f"{served.root}/small.pth")
    assert done.code == 2 and "a remote file in place" in done.stderr
    with pytest.raises(UsageError, match="cannot write to a web server"):
        ckptkit.save(ckptkit.open(f"{served.root}/small.pth"), f"{served.root}/out.pth")


@pytest.mark.parametrize(
    ("url", "package"),
    [("https://host/a.pth", "pip install aiohttp"), ("hf://org/a.pth", "pip install huggingface_hub"),
     ("az://box/a.pth", "Install adlfs to access Azure")],
)  # fmt: skip
def test_a_missing_package_is_named(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(protocol: str) -> object:
        raise ImportError(known_implementations[protocol]["err"])

    monkeypatch.setattr("fsspec.core.get_filesystem_class", without)
    with pytest.raises(PathError) as caught:
        ckptkit.open(url)
    assert str(caught.value.hint).startswith(package)
