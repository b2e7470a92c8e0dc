"""Files on a web server: a real nginx on this machine, which counts requests and bytes."""

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
from safetensors.torch import load_file, save_file
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
from ckptkit.formats.format import open_place
from tests.conftest import COMMAND, ENVIRONMENT, Run
from tests.remote.servers import NGINX, Answer, Nginx, nginx

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

TENSORS = 400
ROWS = 6553  # of 1,024 float32: 400 of them are 10 GiB
HEADERS = 1 << 20  # bytes that may be fetched to know what is in a file, pickles aside
REQUESTS = 6


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    files, state = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("nginx")
    with nginx(files, state) as server:
        yield server


@pytest.fixture
def served(web: Nginx) -> Nginx:
    """The server, with nothing counted yet."""
    web.answers()
    return web


def small() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(64, 32)
    return {
        "module.a.weight": base,
        "module.a.bias": torch.arange(5.0),
        "module.tied": base,
        "module.row": base[3],
    }


def large(tensors: int = 40, nbytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Some megabytes whose bytes differ everywhere."""
    torch.manual_seed(1)
    return {f"layer.{i}.weight": torch.randn(nbytes // 4) for i in range(tensors)}


def equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return list(ours) == list(theirs) and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


def fetched(answers: list[Answer]) -> int:
    return sum(answer.nbytes for answer in answers)


def sparse_pth(path: Path) -> None:
    """10 GiB by torch itself, which leaves out the bytes."""
    with FakeTensorMode():
        state = {f"layers.{i}.attn.weight": torch.empty(ROWS, 1024) for i in range(TENSORS)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state_dict": state, "epoch": 3}, path)


def sparse_safetensors(path: Path) -> None:
    size = ROWS * 1024 * 4
    header = {
        f"layers.{i}.attn.weight": {
            "dtype": "F32",
            "shape": [ROWS, 1024],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(TENSORS)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + TENSORS * size)


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_inspect_fetches_headers_only(kind: str, served: Nginx, alone: Run) -> None:
    if kind == "pth" and not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch writes no sparse files")
    path = served.files / f"huge.{kind}"
    (sparse_pth if kind == "pth" else sparse_safetensors)(path)
    assert path.stat().st_size > 10_000_000_000
    done = alone("inspect", "--json", f"{served.url}/huge.{kind}")
    answers = served.answers()
    path.unlink()
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["files"][0]["totals"]["tensor_count"] == TENSORS
    assert 0 < len(answers) <= REQUESTS
    assert 0 < fetched(answers) <= HEADERS


def test_a_large_pickle_is_fetched_once(served: Nginx) -> None:
    path = served.files / "many.pth"
    torch.save(
        {f"layers.{i}.attention.weight": torch.full((1,), float(i)) for i in range(20_000)}, path
    )
    with closing(ckptkit.open(f"{served.url}/many.pth")) as ck:
        assert len(ck.weights) == 20_000
    answers = served.answers()
    assert len(answers) <= REQUESTS
    pickled_and_directory = (
        path.stat().st_size - 20_000 * 64
    )  # each storage is padded to 64 bytes, at least
    assert fetched(answers) <= pickled_and_directory + HEADERS


def test_a_legacy_stream_is_not_searched(served: Nginx) -> None:
    """The counts of elements, one before each storage, are read with the storage."""
    path = served.files / "legacy.pth"
    torch.save(large(), path, _use_new_zipfile_serialization=False)
    served.answers()
    with closing(ckptkit.open(f"{served.url}/legacy.pth")) as ck:
        answers = served.answers()
        assert len(answers) <= REQUESTS
        assert fetched(answers) <= HEADERS
        assert equal(ckptkit.load(ck), torch.load(path))
    data = path.read_bytes()
    wrong = data.rindex((1 << 18).to_bytes(8, "little"))
    path.write_bytes(data[:wrong] + b"\1" + data[wrong + 1 :])
    with pytest.raises(CorruptError, match="has 262145 elements, its tensors expect 262144"):
        ckptkit.load(f"{served.url}/legacy.pth")


@pytest.mark.parametrize(
    "command", [["convert", "out.safetensors"], ["convert", "out.pth"], ["remap", "out.pth"]]
)
def test_commands_write_what_torch_reads(
    command: list[str], served: Nginx, alone: Run, tmp_path: Path
) -> None:
    state = large()
    torch.save(state, served.files / "large.pth")
    size = (served.files / "large.pth").stat().st_size
    served.answers()
    verb, out = command
    options = ["--to", "cpu"] if verb == "remap" else []
    done = alone(verb, f"{served.url}/large.pth", out, *options, cwd=tmp_path)
    assert done.code == 0, done.stderr
    written = tmp_path / out
    assert equal(
        load_file(written) if out.endswith("safetensors") else torch.load(written),
        dict(sorted(state.items())) if out.endswith("safetensors") else state,
    )
    answers = served.answers()
    pieces = [answer for answer in answers if answer.nbytes > HEADERS]
    assert fetched(pieces) > 0.75 * size, "most of it should come in pieces of some MiB"
    assert fetched(answers) < 1.25 * size
    assert max(answer.nbytes for answer in answers) <= 4 << 20


def test_short_ranges_are_fetched_together(served: Nginx, tmp_path: Path) -> None:
    """Thousands of tensors of 4 KiB: their headers and their bytes come in large pieces."""
    state = large(2_000, 4 << 10)
    torch.save(state, served.files / "short.pth")
    served.answers()
    ckptkit.save(ckptkit.open(f"{served.url}/short.pth"), tmp_path / "out.pth")
    assert equal(torch.load(tmp_path / "out.pth"), state)
    assert len(served.answers()) < 100


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the peak of memory is read from /proc"
)
def test_memory_stays_bounded(served: Nginx, tmp_path: Path) -> None:
    """A file of 1 GiB, of which no more than some pieces are in memory at a time."""
    path = served.files / "gig.safetensors"
    header = json.dumps(
        {"a": {"dtype": "U8", "shape": [1 << 30], "data_offsets": [0, 1 << 30]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))
    program = (
        "import re, sys, ckptkit; ckptkit.save(ckptkit.open(sys.argv[1]), sys.argv[2]);"
        "print(re.search('VmHWM: *([0-9]+)', open('/proc/self/status').read().replace(chr(9), ' '))[1])"
    )
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", program, f"{served.url}/gig.safetensors", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=True
    )
    path.unlink()
    assert out.stat().st_size > 1 << 30
    assert int(done.stdout) < 160 << 10  # KiB


class TestShards:
    @pytest.fixture
    def folder(self, served: Nginx) -> Path:
        folder = served.files / "model"
        folder.mkdir(exist_ok=True)
        save_file({"a": torch.arange(4.0)}, folder / "model-00001-of-00002.safetensors")
        save_file({"b": torch.arange(3.0)}, folder / "model-00002-of-00002.safetensors")
        places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    def test_an_index_opens_its_shards(self, folder: Path, served: Nginx) -> None:
        url = f"{served.url}/model/model.safetensors.index.json"
        loaded = ckptkit.load(f"{url}?download=true")
        assert {name: value.tolist() for name, value in loaded.items()} == {
            "a": [0, 1, 2, 3],
            "b": [0, 1, 2],
        }
        answers = served.answers()
        assert len(answers) == 3  # one for each file
        assert {answer.path.partition("?")[2] for answer in answers} == {"download=true"}

    def test_a_missing_shard(self, folder: Path, served: Nginx) -> None:
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FormatError, match="1 of 2 shards are missing"):
            ckptkit.open(f"{served.url}/model/model.safetensors.index.json")

    @pytest.mark.parametrize("name", ["../secret.safetensors", "a/b", "%2e%2e", "x?y=z"])
    def test_SH_01_no_other_address(self, name: str, folder: Path, served: Nginx) -> None:
        (folder / "evil.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        served.answers()
        with pytest.raises(InputError):
            ckptkit.open(f"{served.url}/model/evil.safetensors.index.json")
        asked = [answer.path for answer in served.answers()]
        assert asked[0] == "/model/evil.safetensors.index.json"
        assert asked[1:] in ([], ["/model/x%3Fy=z"])  # a file of that name, no query


def test_it_is_the_same_file_at_the_end(served: Nginx, tmp_path: Path) -> None:
    path, out = served.files / "changing.pth", tmp_path / "out.pth"
    torch.save(small(), path)
    ck = ckptkit.open(f"{served.url}/changing.pth")
    torch.save({**small(), "more": torch.ones(3)}, path)
    with pytest.raises(InputChangedError):
        ckptkit.save(ck, out)
    assert not list(tmp_path.iterdir())


def test_it_is_removed_meanwhile(served: Nginx, tmp_path: Path) -> None:
    path = served.files / "removed.pth"
    torch.save(small(), path)
    ck = ckptkit.open(f"{served.url}/removed.pth")
    path.unlink()
    with pytest.raises(InputChangedError, match="was removed"):
        ckptkit.save(ck, tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("path", "kind", "said", "hint"),
    [
        ("nothing.pth", PathError, "does not exist", None),
        ("forbidden/x.pth", PathError, r"access is denied \(HTTP status 403\)", "credentials"),
        ("secret/x.pth", PathError, r"access is denied \(HTTP status 401\)", "credentials"),
        ("page/x.pth", FormatError, "is an HTML page", "the file itself"),
        ("pointer.pth", FormatError, "is a Git LFS pointer", None),
        ("empty.pth", FormatError, "is empty", None),
    ],
)
def test_refusals(
    path: str, kind: type[InputError], said: str, hint: str | None, served: Nginx
) -> None:
    (served.files / "pointer.pth").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    )
    (served.files / "empty.pth").touch()
    with pytest.raises(kind, match=said) as caught:
        ckptkit.open(f"{served.url}/{path}")
    assert caught.value.where == f"{served.url}/{path}"
    assert hint is None or hint in str(caught.value.hint)


def test_a_server_without_ranges(served: Nginx) -> None:
    """A small file is read whole, with one request; a large one is refused before it is read."""
    torch.save(small(), served.files / "small.pth")
    loaded = ckptkit.load(f"{served.url}/whole/small.pth")
    assert equal(loaded, torch.load(served.files / "small.pth"))
    assert [answer.status for answer in served.answers()] == [200]
    sparse_safetensors(served.files / "huge.safetensors")
    with pytest.raises(
        InputError, match=r"not ranges, and 10,\d+,\d+,\d+ bytes are too many"
    ) as caught:
        ckptkit.open(f"{served.url}/whole/huge.safetensors")
    assert (
        caught.value.hint
        == f"download the file first: curl -O '{served.url}/whole/huge.safetensors'"
    )
    (served.files / "huge.safetensors").unlink()


def test_nobody_listens(alone: Run, tmp_path: Path) -> None:
    done = alone("inspect", "http://127.0.0.1:1/run.pth", cwd=tmp_path)
    assert done.code == 3
    assert "refuses the connection" in done.stderr


def test_an_unknown_host() -> None:
    with pytest.raises(PathError, match="its host is unknown"):
        ckptkit.open("http://nobody.invalid/run.pth")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_credentials_are_not_shown(
    options: list[str], served: Nginx, alone: Run, tmp_path: Path
) -> None:
    torch.save(small(), served.files / "small.pth")
    place = f"user:pa55@127.0.0.1:{served.port}/secret"
    for source in ("small.pth?sig=s1gnature", "nothing.pth?sig=s1gnature"):
        url = f"http://{place}/{source}"
        for command in (
            ["inspect", *options, url],
            ["strip-module", *options, url, "out.pth"],
            ["inspect", url, url],
        ):
            done = alone(*command, cwd=tmp_path)
            assert done.code == (0 if source.startswith("small") else 3), done.stderr
            assert "pa55" not in done.stdout + done.stderr
            assert "s1gnature" not in done.stdout + done.stderr
            (tmp_path / "out.pth").unlink(missing_ok=True)
    alone("strip-module", f"http://{place}/small.pth?sig=s1gnature", "out.pth", cwd=tmp_path)
    assert list(torch.load(tmp_path / "out.pth")) == ["a.weight", "a.bias", "tied", "row"]
    assert not re.search(rb"pa55|s1gnature|127\.0\.0\.1", (tmp_path / "out.pth").read_bytes())


def test_a_traceback_shows_no_credentials(served: Nginx) -> None:
    program = f"import ckptkit; ckptkit.open('http://user:wr0ng@127.0.0.1:{served.port}/secret/small.pth?sig=s1gnature')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert "access is denied" in done.stderr
    raised = done.stderr[done.stderr.index("ckptkit.errors.") :]
    assert "wr0ng" not in raised
    assert "s1gnature" not in raised
    assert "direct cause" not in done.stderr


def test_the_hint_writes_here(served: Nginx, alone: Run, tmp_path: Path) -> None:
    torch.save(small(), served.files / "small.pth")
    done = alone("inspect", f"{served.url}/small.pth?download=true", cwd=tmp_path)
    assert "small.pth?***' small-stripped.pth\n" in done.stdout


def test_in_place_is_refused(served: Nginx, alone: Run, tmp_path: Path) -> None:
    torch.save(small(), served.files / "small.pth")
    done = alone("strip-module", "--in-place", f"{served.url}/small.pth", cwd=tmp_path)
    assert done.code == 2
    assert "only a single file" in done.stderr


def test_no_upload_to_the_web(served: Nginx, tmp_path: Path) -> None:
    torch.save(small(), served.files / "small.pth")
    with pytest.raises(UsageError, match="cannot write to a web server"):
        ckptkit.save(ckptkit.open(f"{served.url}/small.pth"), f"{served.url}/out.pth")


def test_sources_travel_to_workers(served: Nginx) -> None:
    path = served.files / "worker.pth"
    torch.save(small(), path)
    source = open_place(f"{served.url}/worker.pth")
    again = pickle.loads(pickle.dumps(source))
    assert again.read(0, again.size) == path.read_bytes()
    packed = pickle.dumps(source)
    torch.save({**small(), "other": torch.ones(2)}, path)
    with pytest.raises(InputChangedError):
        pickle.loads(packed)


def test_local_files_do_not_pay(tmp_path: Path) -> None:
    torch.save(small(), tmp_path / "small.pth")
    program = "import sys, ckptkit; ckptkit.open('small.pth'); print({'fsspec', 'aiohttp', 'asyncio'} & set(sys.modules))"
    done = subprocess.run(
        [COMMAND[0], "-c", program], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path
    )
    assert done.stdout == "set()\n", done.stderr
