"""Damage is not laundered: new bytes are made of tensors that have their checksum, or not at all."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.core.errors import CorruptError, InputChangedError
from ckptkit.publish import preflight, publish
from tests.conftest import Run

STATE = {
    "module.first": torch.randn(300, 301),
    "module.large": torch.randn(1500, 1501),
    "module.small": torch.randn(10),
    "module.turned": torch.randn(2100, 2200).t(),
}


def damaged(data: bytes, number: int) -> bytes:
    """Flip a bit in the middle of a member, counted among the tensors."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    members = [
        each for each in archive.infolist() if "/data/" in each.filename
    ] or archive.infolist()
    member = members[number]
    n, x = data[member.header_offset + 26], data[member.header_offset + 28]
    x += data[member.header_offset + 29] << 8
    place = member.header_offset + 30 + n + x + member.compress_size // 2
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``0.pth`` to ``3.pth``, each with one damaged tensor, and ``good.pth``."""
    folder = tmp_path_factory.mktemp("saved")
    torch.save(STATE, folder / "good.pth")
    for number in range(len(STATE)):
        data = damaged((folder / "good.pth").read_bytes(), number)
        (folder / f"{number}.pth").write_bytes(data)
    return folder


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "another format": lambda src, out: ckptkit.convert(src, out / "o.safetensors"),
    "a cast": lambda src, out: ckptkit.convert(
        src, out / "o.pth", lambda ck: ckptkit.cast(ck, "bfloat16")
    ),
    "an average": lambda src, out: ckptkit.save(ckptkit.average([src, src]), out / "o.pth"),
    "shards": lambda src, out: ckptkit.convert(
        src, out / "o", options=ckptkit.Options(shard_size=10_000_000), format="sharded"
    ),
    "forks": lambda src, out: ckptkit.convert(
        src, out / "o.pth", lambda ck: ckptkit.cast(ck, "float16"), fork=True
    ),
    "an upload": lambda src, out: ckptkit.convert(
        src, f"memory://{os.urandom(8).hex()}.safetensors"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_new_bytes_of_a_damaged_tensor_are_not_written(
    way: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.compute.workers.FORKED", 1 << 20)
    monkeypatch.setattr("ckptkit.publish.copying.THREAD_TASK", 1 << 20)
    WAYS[way](saved / "good.pth", tmp_path)
    for number, name in enumerate(STATE):
        out = tmp_path / str(number)
        out.mkdir()
        with pytest.raises(CorruptError, match=rf"{number}\.pth: .* CRC-32 .*{name}\)"):
            WAYS[way](saved / f"{number}.pth", out)
        assert not list(out.iterdir())


def test_bytes_are_read_once_where_they_are_read_in_order(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    read = preflight.crc32_of
    monkeypatch.setattr(preflight, "crc32_of", lambda part: again.append(part.length) or read(part))
    in_order = ckptkit.select(ckptkit.open(saved / "good.pth"), drop=["*.turned"])
    for number, dtype in enumerate((None, "float16")):
        ck = in_order if dtype is None else ckptkit.cast(in_order, dtype)
        ckptkit.save(ck, tmp_path / f"{number}.safetensors")
    assert not again


def test_what_is_read_in_part_has_nothing_to_compare(saved: Path, tmp_path: Path) -> None:
    ckptkit.convert(
        saved / "1.pth", tmp_path / "o.safetensors", lambda ck: ckptkit.select(ck, drop=["*large"])
    )
    whole = {"whole": torch.randn(100, 100)}
    torch.save({"part": whole["whole"][:50]}, tmp_path / "part.pth")
    data = (tmp_path / "part.pth").read_bytes()
    storage = whole["whole"].numpy().tobytes()
    place = data.index(storage) + 30_000  # behind the half that is a tensor
    (tmp_path / "part.pth").write_bytes(data[:place] + b"?" + data[place + 1 :])
    ckptkit.convert(tmp_path / "part.pth", tmp_path / "part.safetensors")


def test_an_input_that_changes_is_not_called_damaged(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.pth").write_bytes((saved / "good.pth").read_bytes())
    execute = publish.execute

    def changed_before(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "in.pth").write_bytes(b"?" * (tmp_path / "in.pth").stat().st_size)
        return execute(*args, **kwargs)

    monkeypatch.setattr(publish, "execute", changed_before)
    with pytest.raises(InputChangedError):
        ckptkit.convert(tmp_path / "in.pth", tmp_path / "o.safetensors")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays(save: Callable[..., None], tmp_path: Path) -> None:
    save(tmp_path / "in.npz", a=np.arange(1000.0), b=np.arange(10) % 3)
    ckptkit.convert(tmp_path / "in.npz", tmp_path / "good.safetensors")
    data = bytearray((tmp_path / "in.npz").read_bytes())
    crc = zipfile.ZipFile(tmp_path / "in.npz").getinfo("a.npy").CRC.to_bytes(4, "little")
    (tmp_path / "in.npz").write_bytes(data.replace(crc, bytes(reversed(crc))))
    with pytest.raises(CorruptError, match="CRC-32"):
        ckptkit.convert(tmp_path / "in.npz", tmp_path / "o.safetensors")


def test_the_command_line(saved: Path, tmp_path: Path, run: Run) -> None:
    """The hint is a command that works; what keeps the old checksum is a warning of --verify."""
    out = str(tmp_path / "o.safetensors")
    done = run("convert", str(saved / "1.pth"), out)
    assert done.code == 3 and "module.large" in done.stderr and not os.path.exists(out)
    command = done.stderr.strip().rpartition("ckptkit ")[2].split()
    assert run(*command).code == 0
    assert {*torch.load(saved / "1-recovered.pth")} == {*STATE} - {"module.large"}
    assert run("convert", str(saved / "1.pth"), out, "--no-check").code == 0
    for options, expected in ((["--verify"], "large"), ([], ""), (["--verify", "--no-check"], "")):
        kept = run(
            "strip-module", str(saved / "1.pth"), str(tmp_path / "o.pth"), "--force", *options
        )
        assert kept.code == 0 and expected in kept.stderr
        assert bool(kept.stderr) is bool(expected)
    assert run("verify", str(tmp_path / "o.pth")).code == 1
