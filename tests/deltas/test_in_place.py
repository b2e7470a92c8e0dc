"""Deltas applied in place: whatever kills it, the files are all old or all new."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError, InputError
from ckptkit.core.plan import Patch
from ckptkit.formats.format import open_place
from tests.deltas.reference import raw, write_slime
from tests.killing import killed


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"l.{n}": torch.randn(700, generator=generator).bfloat16() for n in range(4)}
    for tensor in found.values() if seed else ():
        tensor.view(torch.int16)[:: 7 + seed] ^= seed
    return found


@pytest.fixture(params=["file", "folder"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Path]]:
    """A checkpoint, a file or two shards, with the deltas of two versions."""
    torch.save(state(0), tmp_path / "0.pth")
    base = tmp_path / ("base.safetensors" if request.param == "file" else "base")
    ckptkit.convert(tmp_path / "0.pth", base, shard_size=3000 if base.suffix == "" else None)
    deltas = [
        write_slime(tmp_path / f"weight_v{n + 1:06d}", state(n), state(n + 1), version=n + 1)
        for n in range(2)
    ]
    return base, deltas


def held(path: Path) -> dict[str, bytes]:
    """The elements of all tensors, read by another library than ours."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: raw(tensor) for file in files for name, tensor in load_file(file).items()}


def bytes_of(seed: int) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in state(seed).items()}


def copied(path: Path, target: Path) -> Path:
    (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    return target


@pytest.mark.parametrize(
    ("given", "half"), [("file", True), ("folder", False), ("folder", True)], indirect=["given"]
)
def test_killed_at_every_call(half: bool, given: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Readers see the old, the new or an error; the next edit makes it one of these, and whole."""
    made, deltas = given
    seen: list[int] = []
    while True:
        path = copied(made, tmp_path / f"copy-{len(seen)}{made.suffix}")
        if not killed(
            lambda path=path: ckptkit.apply_delta(path, deltas, in_place=True),  # type: ignore[misc]
            len(seen) + 1,
            half,
        ):
            break
        try:
            with ckptkit.open(path) as found:
                read = {name: raw(tensor.torch()) for name, tensor in found.weights.items()}
            assert read in (bytes_of(0), bytes_of(2))
        except InputError as error:
            assert "recover --in-place" in str(error.hint) or "header" in str(error)
        open_place(path, undo=True).close()
        now = held(path)
        assert now in (bytes_of(0), bytes_of(2))
        seen.append(0 if now == bytes_of(0) else 2)
        if path.is_dir():
            recorded = path / ".weight_sync/state.json"
            version = json.loads(recorded.read_text())["version"] if recorded.exists() else "000000"
            assert int(version) == seen[-1]
        names = [each.name for each in (path.parent if path.is_file() else path).iterdir()]
        assert not [name for name in names if name.endswith("journal")]
        ckptkit.apply_delta(path, deltas, in_place=True, base_version=seen[-1])
        assert held(path) == bytes_of(2)
    assert held(path) == bytes_of(2)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 2 and len(seen) > 10


def test_refused_before_anything_changes(given: tuple[Path, list[Path]], tmp_path: Path) -> None:
    path, deltas = given
    ckptkit.apply_delta(path, deltas[:1], in_place=True)
    wrong = write_slime(tmp_path / "wrong", state(2), state(1), version=2)
    for each in (wrong, *([deltas[0]] if path.is_file() else [])):
        with pytest.raises(CorruptError, match="checksum"):
            ckptkit.apply_delta(path, each, in_place=True, base_version=int(each is wrong))
        assert held(path) == bytes_of(1)
    ckptkit.apply_delta(path, deltas, in_place=True, base_version=1, dry_run=True)
    assert held(path) == bytes_of(1)
    done = ckptkit.apply_delta(path, deltas, in_place=True, base_version=1, verify=True)
    assert held(path) == bytes_of(2) and isinstance(done.plan, Patch)
    assert 0 < done.plan.written < 2000
    again = ckptkit.apply_delta(path, deltas, in_place=True, base_version=2)
    assert isinstance(again.plan, Patch) and again.plan.written == 0
    assert held(path) == bytes_of(2)


def test_half_of_a_group_is_not_read(given: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """With one shard changed and one not, neither the folder nor a shard is a checkpoint."""
    path, deltas = given
    if path.is_file():
        return
    calls = 0
    while True:  # until a kill leaves one shard new
        calls += 1
        copy = copied(path, tmp_path / f"half-{calls}")
        assert killed(lambda c=copy: ckptkit.apply_delta(c, deltas, in_place=True), calls, False)  # type: ignore[misc]
        try:
            now = held(copy)
        except Exception:
            continue  # a shard is broken
        if now not in (bytes_of(0), bytes_of(2)):
            break
    for place in (copy, *copy.glob("*.safetensors"), copy / "model.safetensors.index.json"):
        with pytest.raises(CkptkitError, match="interrupted"):
            ckptkit.open(place)


def test_a_whole_version_in_place(given: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """It may be of another container, where views share memory."""
    path, deltas = given
    flat = torch.cat([each.view(-1) for each in state(2).values()])
    views = {name: flat[700 * n : 700 * n + 700] for n, name in enumerate(state(2))}
    torch.save(views, tmp_path / "weight_v000002.pth")
    ckptkit.apply_delta(path, [deltas[0], tmp_path / "weight_v000002.pth"], in_place=True)
    assert held(path) == bytes_of(2)
