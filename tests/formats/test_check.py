"""Detection of damage by format: flipped bytes where there are checksums, contradictions of
files."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptkit.analysis.verify import Verdict, verify
from ckptkit.core.errors import CkptkitError, FormatError, InputChangedError, InputError, PathError
from tests.formats import test_conformance as made
from tests.formats.conformance import FormatConformance, State, files_of
from tests.formats.dcp.test_reading import TestDcp as Dcp
from tests.formats.torchscript import scripts
from tests.matrix import ENTRIES, NAMES, Fixture

pytestmark = scripts.QUIET

# The elements of the tensor that is damaged, which stand nowhere else.
TOLD = bytes(range(3, 3 + 2 * 61, 2))
WITH_SUMS: list[type[FormatConformance]] = [
    made.TestTorchZip, made.TestShardedBin, made.TestNpz, made.TestTorchScript, made.TestPt2, Dcp,
]  # fmt: skip
WITHOUT: list[type[FormatConformance]] = [
    made.TestTorchLegacy, made.TestTorchTar, made.TestSafetensors, made.TestSharded, made.TestPickle,
]  # fmt: skip


def state() -> State:
    told = torch.frombuffer(bytearray(TOLD), dtype=torch.uint8)
    return {"first": torch.arange(6.0), "told": told, "z": torch.ones(3)}


def make(kind: type[FormatConformance], folder: Path) -> Path:
    path = kind().make(folder, state())
    for index in path.glob("*.index.json") if path.is_dir() else ():
        said = json.loads(index.read_text())
        said["metadata"] = {"total_size": sum(tensor.nbytes for tensor in state().values())}
        index.write_text(json.dumps(said))
    return path


def whats(verdict: Verdict) -> str:
    return "\n".join(f"{each.file}: {each.what}" for each in verdict.findings)


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_is_whole(name: str) -> None:
    fixture = Fixture(name).needs_reader()
    verdict = verify(fixture.path, values=True)
    assert not verdict.findings
    assert verdict.format == ENTRIES[name]["facts"]["format"]
    assert verdict.tensors > 0


@pytest.mark.parametrize("kind", WITH_SUMS, ids=lambda kind: kind.__name__)
def test_a_flipped_bit_in_a_tensor_is_found(kind: type[FormatConformance], tmp_path: Path) -> None:
    path = make(kind, tmp_path)
    before = verify(path)
    assert (before.findings, before.ok) == ([], True)
    assert before.records > 2
    assert before.nbytes >= len(TOLD)
    (file,) = (each for each in files_of(path) if TOLD in each.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(TOLD) + 40] ^= 0x10
    file.write_bytes(data)
    verdict = verify(path)
    (finding,) = verdict.findings
    assert "CRC-32" in finding.what
    assert finding.file == (file.name if path.is_dir() else "")
    assert [name.rpartition(".")[2] for name in finding.tensors] == ["told"]


@pytest.mark.parametrize("kind", WITHOUT, ids=lambda kind: kind.__name__)
def test_what_has_no_checksums_says_so(kind: type[FormatConformance], tmp_path: Path) -> None:
    verdict = verify(make(kind, tmp_path))
    assert (verdict.ok, verdict.records) == (True, 0)
    assert verdict.notes[0].endswith("has no checksums: only structure and lengths were checked")


def test_deflated_members(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.arange(5_000), b=np.zeros(3))
    assert verify(path).ok
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("a.npy").header_offset
    data = bytearray(path.read_bytes())
    data[start + 400] ^= 1
    path.write_bytes(data)
    (finding,) = verify(path).findings
    assert "'a.npy'" in finding.what
    assert finding.tensors == ("a",)


def test_members_that_nothing_refers_to_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/note", b"unread")
    assert verify(path).ok
    path.write_bytes(path.read_bytes().replace(b"unread", b"unreax"))
    (finding,) = verify(path).findings
    assert "'a/note'" in finding.what


def test_a_damaged_pickle_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"some_key": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes().replace(b"some_key", b"some_kex"))
    (finding,) = verify(path).findings
    assert "data.pkl" in finding.what


# Shards


def sharded(
    folder: Path,
    change: Callable[[dict[str, str], dict[str, State]], None] = lambda places, shards: None,
) -> Path:
    """Two shards, after `change`, which gets weight_map and shards."""
    folder.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    shards = {names[0]: {"a": torch.ones(2), "b": torch.zeros(3)}, names[1]: {"c": torch.ones(4)}}
    places = {tensor: name for name, held in shards.items() for tensor in held}
    total = sum(tensor.nbytes for held in shards.values() for tensor in held.values())
    change(places, shards)
    for name, held in shards.items():
        save_file(held, folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_everything_that_is_wrong_with_shards_is_told(tmp_path: Path) -> None:
    def change(places: dict[str, str], shards: dict[str, State]) -> None:
        first, second = shards
        places["nowhere"] = first
        shards[first]["unlisted"] = torch.ones(1)
        shards[second]["a"] = torch.ones(2)

    found = whats(verify(sharded(tmp_path / "net", change)))
    assert "maps 'nowhere' to model-00001-of-00002.safetensors, which does not contain it" in found
    assert "contains 'unlisted', which the index does not list" in found
    one, two = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    assert f"'a' is in two shards: {two} and {one}" in found
    assert len(found.split("\n")) == 3


def test_a_missing_shard_does_not_hide_what_is_wrong_with_the_others(tmp_path: Path) -> None:
    place = "model-00001-of-00002.safetensors"
    path = sharded(tmp_path / "net", lambda places, shards: places.update(x=place))
    (path / "model-00002-of-00002.safetensors").unlink()
    found = whats(verify(path))
    assert "1 of 2 shards are missing: model-00002-of-00002.safetensors" in found
    assert "maps 'x' to model-00001" in found


def test_a_shard_that_is_cut_and_one_that_is_a_pointer(tmp_path: Path) -> None:
    """After a total that is wrong."""
    path = sharded(tmp_path / "net")
    index = path / "model.safetensors.index.json"
    assert verify(path).ok and verify(index).ok
    index.write_text(index.read_text().replace('"total_size": 36', '"total_size": 40'))
    assert "the index's total_size is 40 bytes, but the tensors have 36" in whats(verify(path))
    first, second = sorted(path.glob("model-*"))
    first.write_bytes(first.read_bytes()[:-2])
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    verdict = verify(path)
    assert [each.file for each in verdict.findings] == [first.name, second.name]
    assert "git lfs pull" in str(verdict.findings[1].hint)


def test_shards_without_an_index(tmp_path: Path) -> None:
    path = sharded(
        tmp_path / "net",
        lambda places, shards: shards["model-00002-of-00002.safetensors"].update(a=torch.ones(2)),
    )
    (path / "model.safetensors.index.json").unlink()
    assert "'a' is in two shards: model-00001-of-00002.safetensors and" in whats(verify(path))
    (path / "model-00001-of-00002.safetensors").unlink()
    assert "1 of 2 shards are missing: number 1" in whats(verify(path))


# torch.distributed.checkpoint


def test_a_missing_data_file(tmp_path: Path) -> None:
    path = make(Dcp, tmp_path)
    (path / "__0_0.distcp").unlink()
    assert "1 of 1 files are missing" in whats(verify(path))


def test_metadata_that_are_cut(tmp_path: Path) -> None:
    path = make(Dcp, tmp_path)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-9])
    (finding,) = verify(path).findings
    assert finding.file == ".metadata"


# A folder that stands for a file


def test_the_file_in_a_folder(tmp_path: Path) -> None:
    torch.save({"told": state()["told"]}, tmp_path / "net.pth")
    assert verify(tmp_path).records
    data = (tmp_path / "net.pth").read_bytes()
    (tmp_path / "net.pth").write_bytes(data.replace(TOLD, TOLD[::-1]))
    (finding,) = verify(tmp_path).findings
    assert (finding.file, finding.tensors) == ("net.pth", ("told",))
    torch.save({}, tmp_path / "b.pth")
    with pytest.raises(CkptkitError, match="contains 2 checkpoints"):
        verify(tmp_path)


# What is not a checkpoint


def test_what_is_no_checkpoint_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "a.pth").touch()
    assert "is empty" in whats(verify(tmp_path / "a.pth"))
    (tmp_path / "page.pth").write_bytes(b"<html><body>404</body></html>")
    with pytest.raises(FormatError, match="HTML page"):
        verify(tmp_path / "page.pth")
    with pytest.raises(PathError, match="does not exist"):
        verify(tmp_path / "nowhere.pth")


def test_an_archive_of_files_is_no_finding(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(__file__, "net.py")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.writestr("net.py", "")
    for name in ("a.tar", "a.zip"):
        with pytest.raises(CkptkitError, match="archive"):
            verify(tmp_path / name)


def test_a_file_that_shrinks_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.analysis import digests

    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(100_000)}, path)
    pieces = digests._pieces

    def cut(parts: object) -> object:
        path.write_bytes(path.read_bytes()[:5_000])
        return pieces(parts)  # type: ignore[arg-type]

    monkeypatch.setattr(digests, "_pieces", cut)
    with pytest.raises(InputError, match="changed") as caught:
        verify(path)
    assert (caught.value.code, caught.value.exit_code) == (InputChangedError.code, 3)
    assert caught.value.where == str(path) and "again" in str(caught.value.hint)


# Behind a URL


def test_a_remote_file(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    torch.save({"told": state()["told"], "big": torch.randn(30_000)}, tmp_path / "a.pth")
    data = (tmp_path / "a.pth").read_bytes()
    memory = fsspec.filesystem("memory")
    memory.pipe("/check/a.pth", data)
    assert verify("memory://check/a.pth").ok
    memory.pipe("/check/a.pth", data.replace(TOLD, TOLD[::-1]))
    (finding,) = verify("memory://check/a.pth").findings
    assert finding.tensors == ("told",)
    memory.rm("/check", recursive=True)
