"""Compressed checkpoints: their bounds, what is refused, and what is said of them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import zstandard
from click.testing import CliRunner, Result

import ckptkit
from ckptkit import formats
from ckptkit.cli import main
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    InputChangedError,
    InputError,
    LimitError,
    MissingPackageError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.formats import compressed
from ckptkit.scanning.files import scan
from tests.conftest import ENVIRONMENT
from tests.formats.catalogue import Row, refuses_all
from tests.formats.containers import tars
from tests.pickles.making import saved

METHODS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),  # a time may give the checksum of a tar
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
each_method = pytest.mark.parametrize("suffix", METHODS)


def command(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


STATE = {"module.weight": torch.arange(4096.0), "module.bias": torch.ones(3)}
GOOD = saved(STATE)


def archive(**files: bytes) -> bytes:
    return tars.archive(*(tars.member(name, data) for name, data in files.items()))


def put(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


@each_method
def test_several_streams_in_a_row_are_one_file(suffix: str, tmp_path: Path) -> None:
    halves = (METHODS[suffix](half) for half in (GOOD[:777], GOOD[777:]))
    path = put(tmp_path, "run.pth", b"".join(halves))
    assert list(ckptkit.open(path).weights) == list(STATE)


@each_method
def test_a_bomb_hits_the_limit(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in constant memory: a piece of zstd's input may become 64 MiB, others' 256 KiB."""
    path = put(tmp_path, f"bomb{suffix}", METHODS[suffix](bytes(8 << 20)))
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", replace(LIMITS, unpacked_free=1 << 20))
    monkeypatch.setattr("ckptkit.formats.compressed.LIMITS", replace(LIMITS, unpacked_free=1 << 20))
    with pytest.raises(LimitError, match="unpacked_free") as raised:
        ckptkit.open(path)
    assert raised.value.hint is not None and "CKPTKIT_LIMIT_UNPACKED_FREE=" in raised.value.hint


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak")
@each_method
def test_memory_does_not_grow_with_what_is_inside(suffix: str, tmp_path: Path) -> None:
    data = METHODS[suffix](saved({"weight": torch.zeros(64 << 20, dtype=torch.uint8)}))
    path = put(tmp_path, f"zeros.pth{suffix}", data)
    code = (
        "import sys, ckptkit; print(ckptkit.open(sys.argv[1]));"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, encoding="utf-8", env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert "zeros.pth" in done.stdout
    most = 140 if suffix == ".zst" else 64  # MiB; a piece of zstd's input may become 64 of them
    assert int(done.stdout.split()[-1]) < most << 10


def refused() -> Iterator[Row]:
    """Yield what a file is, its bytes, the error when it is read, and what it says."""
    packed = gzip.compress(GOOD)
    for suffix, cut in product(METHODS, (1, 4, 40)):
        yield f"cut{suffix}", METHODS[suffix](GOOD)[:-cut], TruncatedError, ""
    yield "checksum", packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:], CorruptError, ""
    yield "more bytes", packed + b"more", CorruptError, ""
    yield "twice", gzip.compress(packed), UnsupportedError, "twice"
    yield "a text", gzip.compress(b"Dear all,\nplease find"), FormatError, "is a text file"


def test_files_that_are_refused() -> None:
    refuses_all(lambda data: formats.read(Memory(data, "run.pth")), refused())


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
@pytest.mark.parametrize(
    ("files", "error", "word"),
    [
        ({"a.pth": GOOD, "b.pth": GOOD}, AmbiguousError, "2 checkpoints"),
        ({"a-00001-of-00002.bin": GOOD, "a-00002-of-00002.bin": GOOD}, UnsupportedError, "several"),
        ({"readme.txt": b"none"}, UnsupportedError, "without a checkpoint"),
        ({"../a.pth": GOOD}, InputError, "leads out"),
    ],
)
def test_archives_that_are_refused(
    files: dict[str, bytes],
    error: type[Exception],
    word: str,
    pack: Callable[[bytes], bytes],
    tmp_path: Path,
) -> None:
    path = put(tmp_path, "a model", pack(archive(**files)))
    with pytest.raises(error, match=word) as raised:
        ckptkit.open(path)
    assert isinstance(raised.value, CkptkitError)
    if "readme.txt" in files:
        assert raised.value.hint == f"`tar -tf '{path}'` lists its files"
    elif error is not InputError:
        assert raised.value.hint == f"unpack it first: `tar -xf '{path}'`"


def test_the_member_of_an_archive_is_named(tmp_path: Path) -> None:
    data = gzip.compress(archive(**{"model/config.json": b"{}", "model/model.pth": GOOD}))
    checkpoint = ckptkit.open(put(tmp_path, "model.tar.gz", data))
    assert checkpoint.name == str(tmp_path / "model.tar.gz" / "model/model.pth")
    assert torch.equal(ckptkit.load(tmp_path / "model.tar.gz")["module.bias"], STATE["module.bias"])


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = put(tmp_path, "run.pth.zst", METHODS[".zst"](GOOD))
    with pytest.raises(MissingPackageError) as raised:
        ckptkit.open(path)
    assert raised.value.hint == "pip install zstandard"
    assert "zstandard" in scan(path).remarks[0].reason


@pytest.mark.parametrize("words", ["{0} {1}.gz", "{0} --in-place", "{2} --in-place"])
def test_compressed_files_are_not_written(words: str, tmp_path: Path) -> None:
    """Neither by their suffix nor in place of one, whatever its name."""
    path = put(tmp_path, "run.pth.gz", gzip.compress(GOOD))
    plain = put(tmp_path, "run.pth", gzip.compress(GOOD))
    typed = words.format(path, tmp_path / "out.pth", plain)
    done = command("strip-module", *typed.split())
    assert done.exit_code == 2 and "compressed" in done.stderr
    assert gzip.decompress(path.read_bytes()) == GOOD == gzip.decompress(plain.read_bytes())


def test_the_compressed_file_is_not_replaced_while_it_is_read_and_must_not_change(
    tmp_path: Path,
) -> None:
    path = put(tmp_path, "run.pth", gzip.compress(GOOD))
    checkpoint = ckptkit.open(path)
    with pytest.raises(UsageError, match="is the input file"):
        ckptkit.save(checkpoint, path, force=True)
    path.write_bytes(b"other")
    with pytest.raises(InputChangedError):
        ckptkit.save(checkpoint, tmp_path / "out.pth")


def test_worker_processes_read_the_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left of it."""
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(compressed, "IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    path = put(tmp_path, "run.pth.gz", gzip.compress(GOOD))
    done = command("convert", path, tmp_path / "out.pth", "--workers", 2)
    assert done.exit_code == 0, done.stderr
    assert torch.load(tmp_path / "out.pth")["module.bias"].tolist() == [1, 1, 1]
    assert os.listdir(spare) == []


def test_a_full_disk_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(InputError) as raised:
        ckptkit.open(put(tmp_path, "run.pth.gz", gzip.compress(GOOD)))
    assert raised.value.hint is not None and "TMPDIR" in raised.value.hint


def test_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stream ends with a block that is read, and zeros lie behind the second."""
    first, second = gzip.compress(b"one"), gzip.compress(b" and two")
    for size in (len(first), len(first) + 1, 4096):
        monkeypatch.setattr(compressed, "_PIECE", size)
        source = Memory(first + second + bytes(2 * size))
        assert b"".join(compressed.pieces(source, "gzip")) == b"one and two"
