"""Deltas: what the reference encoder writes is applied, what `delta` writes is decoded by it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError, UsageError
from tests.conftest import Run
from tests.deltas.reference import (
    HASHES,
    StateDict,
    decoded,
    raw,
    write_skyrl,
    write_slime,
    write_trl,
)

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "deltas"
CASES = sorted(VECTORS.iterdir()) if VECTORS.is_dir() else []
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8,
    torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def model(seed: int = 0, *, steps: int = 0) -> dict[str, torch.Tensor]:
    """A state_dict of many dtypes, after some steps that change a few bytes of some tensors."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        f"a.{number}/x": torch.randint(0, 2, (37, 11), generator=generator).to(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    found |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    for _ in range(steps):
        for name, tensor in found.items():
            if tensor.numel() and torch.rand((), generator=generator) < 0.7:
                flat = tensor.reshape(-1).view(torch.uint8)
                places = torch.randint(0, len(flat), (5,), generator=generator)
                flat[places] ^= 0 if name == "a.6/x" else 1  # a bool is 0 or 1
    return found


def same(name: str | Path, expected: StateDict) -> bool:
    path = Path(name)
    got = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return got.keys() == expected.keys() and all(raw(got[n]) == raw(expected[n]) for n in got)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def chain() -> list[dict[str, torch.Tensor]]:
    """The states 0 to 3 of a model, saved as 0.pth to 3.pth."""
    found = [model(steps=number) for number in range(4)]
    for number, each in enumerate(found):
        torch.save(each, f"{number}.pth")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_vectors(case: Path, tmp_path: Path) -> None:
    said = json.loads((case / "case.json").read_text())
    base = case / said["base"]
    target = tmp_path / f"out{base.suffix}"
    deltas = [case / each for each in said["deltas"]]
    if "refused" in said:
        with pytest.raises(CkptkitError, match=said["refused"] or None):
            ckptkit.apply_delta(base, deltas, target)
        assert not list(tmp_path.iterdir())
        return
    ckptkit.apply_delta(base, deltas, target)
    got = {name: tensor.torch() for name, tensor in ckptkit.open(target).weights.items()}
    expected = load_file(case / said["expected"])
    assert {name: raw(got[name]) for name in expected} == {n: raw(t) for n, t in expected.items()}
    if base.is_dir():
        state = json.loads((target / ".weight_sync/state.json").read_text())
        assert state == {"version": f"{len(deltas):06d}"}


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "auto"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_made_deltas(encoding: str, checksum: str, chain: list[StateDict]) -> None:
    """They are decoded by the reference, applied, squashed, and tell the version."""
    deltas = [f"weight_v{number:06d}" for number in (1, 2, 3)]
    how = {"encoding": encoding, "checksum": checksum}
    for number, name in enumerate(deltas):
        made = ckptkit.delta(f"{number}.pth", f"{number + 1}.pth", name, base_version=number, **how)
        before, after = ({n: raw(t) for n, t in chain[k].items()} for k in (number, number + 1))
        assert decoded(Path(name), before) == after
        changed = {n: sum(a != b for a, b in zip(before[n], after[n], strict=True)) for n in before}
        assert made.changed == {n: count for n, count in changed.items() if count}
    ckptkit.apply_delta("0.pth", deltas, "out.pth")
    ckptkit.apply_delta("0.pth", ".", "two.safetensors", to=2)
    assert same("out.pth", chain[3]) and same("two.safetensors", chain[2])
    for number in range(4):
        assert ckptkit.verify_delta(f"{number}.pth", deltas).version == number
    base = None if encoding == "xor" else "0.pth"
    ckptkit.squash_delta(deltas, "squashed", base=base, checksum=checksum)
    ckptkit.apply_delta("0.pth", "squashed", "again.pth")
    assert same("again.pth", chain[3])


def test_deltas_with_different_checksums_are_squashed_over_their_base(
    chain: list[StateDict],
) -> None:
    deltas = ["weight_v000001", "weight_v000002"]
    for n, checksum in enumerate(("adler32", "blake3")):
        ckptkit.delta(f"{n}.pth", f"{n + 1}.pth", deltas[n], checksum=checksum, base_version=n)
    with pytest.raises(UsageError, match="different checksum algorithms: adler32, blake3"):
        ckptkit.squash_delta(deltas, "squashed")
    ckptkit.squash_delta(deltas, "squashed", base="0.pth")
    ckptkit.apply_delta("0.pth", "squashed", "out.pth")
    assert same("out.pth", chain[2])


@settings(max_examples=40)
@drawn(data=st.data())
def test_any_change_of_bytes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("delta")
    before = model(data.draw(st.integers(0, 99)))
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in data.draw(st.sets(st.sampled_from(sorted(set(after) - {"a.6/x", "empty"})))):
        flat = after[name].reshape(-1).view(torch.uint8)
        for place in data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=20)):
            flat[place] ^= data.draw(st.integers(0, 255))
    save_file(before, folder / "a.safetensors")
    torch.save(after, folder / "b.pth")
    encoding = data.draw(st.sampled_from(["xor", "overwrite"]))
    ckptkit.delta(folder / "a.safetensors", folder / "b.pth", folder / "d", encoding=encoding)
    ckptkit.apply_delta(folder / "a.safetensors", folder / "d", folder / "c.safetensors")
    assert same(folder / "c.safetensors", after)


def test_large_tensors() -> None:
    """Several pieces: zeros before the first change, positions beyond the first buffers."""
    before = {"w": torch.zeros(9 << 20, dtype=torch.uint8)}
    after = {"w": before["w"].clone()}
    after["w"][5 << 20 :: 3] = 7
    after["w"][-1] = 9
    save_file(before, "a.safetensors")
    save_file(after, "b.safetensors")
    for encoding in ("xor", "overwrite"):
        ckptkit.delta("a.safetensors", "b.safetensors", encoding, encoding=encoding)
        assert decoded(Path(encoding), {"w": raw(before["w"])}) == {"w": raw(after["w"])}
        ckptkit.apply_delta("a.safetensors", encoding, f"{encoding}.safetensors")
        assert same(f"{encoding}.safetensors", after)


@pytest.mark.parametrize("encoding", ["gap_delta", "raw", ""])
@pytest.mark.parametrize("size", [100, 70_000])
def test_trl(encoding: str, size: int) -> None:
    before = {"w.val": torch.zeros(size, dtype=torch.bfloat16), "b": torch.ones(3)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w.val"][::99] = 2
    after["w.val"][-1] = 3
    if size > 1000:
        after["w.val"][1:-1] = 0  # a gap that 16 bits do not hold
    torch.save(before, "base.pth")
    delta = write_trl(Path("step.safetensors"), before, after, encoding)
    with pytest.raises(UsageError, match="no checksums"):
        ckptkit.apply_delta("base.pth", delta, "out.pth")
    ckptkit.apply_delta("base.pth", delta, "out.pth", unchecked=True)
    assert same("out.pth", after)


def test_skyrl(chain: list[StateDict]) -> None:
    deltas = [
        write_skyrl(Path(f"delta-{n + 1:08d}"), chain[n], chain[n + 1], n + 1) for n in range(3)
    ]
    ckptkit.apply_delta("0.pth", ".", "out.pth")
    assert same("out.pth", chain[3])
    assert ckptkit.verify_delta("2.pth", deltas).version == 2


def test_whole_versions_begin_a_chain_anew(chain: list[StateDict]) -> None:
    folder = Path("chain")
    folder.mkdir()
    write_slime(folder / "weight_v000001", chain[0], chain[1])
    ckptkit.delta("1.pth", "2.pth", folder / "weight_v000002", whole=True)
    write_slime(folder / "weight_v000003", chain[2], chain[3], version=3)
    ckptkit.apply_delta("0.pth", folder, "out.safetensors")
    assert same("out.safetensors", chain[3])


def test_what_is_no_delta(chain: list[StateDict]) -> None:
    """A file of frames alone, or another model, does not become the checkpoint."""
    delta = write_slime(Path("d"), chain[0], chain[1])
    torch.save({"w": torch.ones(2)}, "other.pth")
    for given in (next(delta.glob("*.safetensors")), "other.pth"):
        with pytest.raises(UsageError, match="is a checkpoint whose tensors do not match"):
            ckptkit.apply_delta("0.pth", given, "out.pth")


def test_tied_weights_and_views() -> None:
    """A tied weight changes under both names, once; parts of a storage stay parts of it."""
    flat = torch.arange(100.0)
    before = {"embed": torch.ones(4, 4), "one": flat[:40].view(4, 10), "two": flat[40:]}
    before |= {"head": before["embed"], "turned": torch.arange(6.0).view(2, 3).t()}
    torch.save(before, "base.pth")
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("embed", "head", "two"):
        after[name].view(-1)[0] += 1
    after["turned"][1, 0] = 9
    delta = write_slime(Path("delta"), before, after)
    ckptkit.apply_delta("base.pth", delta, "out.pth")
    assert same("out.pth", after)
    got = torch.load("out.pth", weights_only=True)
    assert got["embed"].data_ptr() == got["head"].data_ptr()
    assert got["two"].data_ptr() - got["one"].data_ptr() == 160
    after["head"][1] = 5
    odd = write_slime(Path("odd"), before, after)
    with pytest.raises(CorruptError, match="share memory, in different ways"):
        ckptkit.apply_delta("base.pth", odd, "odd.pth")


def test_versions(chain: list[StateDict]) -> None:
    """A delta is applied to its base version alone, skipped where it has been applied."""
    deltas = [write_slime(Path(f"d{n}"), *chain[n : n + 2], version=n + 1) for n in range(3)]
    ckptkit.convert("0.pth", "model", format="sharded")
    ckptkit.apply_delta("model", deltas[:1], "at1")
    ckptkit.apply_delta("at1", deltas[:2], "at2")
    recorded = json.loads(Path("at2/.weight_sync/state.json").read_text())
    assert recorded["version"] == "000002"
    assert ckptkit.verify_delta("at2", deltas).recorded == 2
    for base, given, why in (
        ("at1", deltas[2:], "is at version 000001"),
        ("0.pth", deltas[1:], "records no version"),
        ("0.pth", [deltas[0], deltas[2]], "is at version 000001"),
        ("at2", deltas[:1], "is at version 000002"),
    ):
        with pytest.raises(UsageError, match=why):
            ckptkit.apply_delta(base, given, "no")
    ckptkit.apply_delta("1.pth", deltas[1:], "ok.pth", base_version=1)
    assert same("ok.pth", chain[3])


def test_a_strange_checkpoint_is_at_no_version(chain: list[StateDict]) -> None:
    delta = write_slime(Path("d"), chain[0], chain[1])
    torch.save(model(7), "other.pth")
    found = ckptkit.verify_delta("other.pth", delta)
    assert found.version is None and found.strangers


FILE = "model-00000-of-00001.safetensors"


def _replaced(folder: Path, data: bytes, *, kept: bool = False) -> None:
    """Replace the first frame of a delta, or append to it."""
    frames = load_file(folder / FILE)
    with ckptkit.open(folder / FILE) as found:
        sums = dict(found.extras)
    new, name = torch.frombuffer(bytearray(data), dtype=torch.uint8), min(frames)
    frames[name] = torch.cat([frames[name], new]) if kept else new
    save_file(frames, folder / FILE, sums)


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 30))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: shutil.copy(folder / FILE, folder / "model-00001.safetensors"),
         "lists no tensor of the file"),
        (lambda folder: _replaced(folder, b"\1\2\3", kept=True), "damaged|gives more"),
        (lambda folder: _replaced(folder, BOMB), "returns more than"),
        (lambda folder: (folder / FILE).unlink(), "is missing|does not exist"),
        ({"delta_encoding": "rle"}, "rle"),
        ({"compression_format": "lz4"}, "lz4"),
        ({"checksum_format": "md5"}, "md5"),
        ({"base_version": "one"}, "not a version number"),
    ],
)  # fmt: skip
def test_damaged_deltas(damage: Any, why: str, chain: list[StateDict]) -> None:
    """`damage` changes the files, or entries of the index."""
    said = damage if isinstance(damage, dict) else {}
    delta = write_slime(Path("d"), chain[0], chain[1], said=said)
    if not said:
        damage(delta)
    with pytest.raises(CkptkitError, match=why):
        ckptkit.apply_delta("0.pth", delta, "out.pth")
    assert not Path("out.pth").exists()


def test_a_frame_without_a_header_is_not_squashed(chain: list[StateDict]) -> None:
    pair = [write_slime(Path(f"d{n}"), *chain[n : n + 2], version=n + 1) for n in range(2)]
    _replaced(pair[0], b"no zstd frame")
    with pytest.raises(CorruptError, match="is damaged"):
        ckptkit.squash_delta(pair, "squashed")


def test_positions_that_do_not_rise() -> None:
    torch.save({"w": torch.zeros(100)}, "base.pth")
    for places in ([3, 3], [5, 2], [1, 100]):
        index = torch.tensor(places, dtype=torch.int32)
        save_file({"w.idx": index, "w.val": torch.ones(2)}, "d.safetensors")
        with pytest.raises(CorruptError, match=r"do not increase|changes element 100"):
            ckptkit.apply_delta("base.pth", "d.safetensors", "o", unchecked=True)


def test_what_a_delta_has_no_place_for() -> None:
    two = torch.ones(2)
    torch.save({"a": two, "b": two, "c": two}, "old.pth")
    torch.save({"a": torch.ones(3), "b": two.half(), "d": two}, "new.pth")
    torch.save({"a": torch.empty(2, device="meta")}, "meta.pth")
    with pytest.raises(UsageError, match="4 differences: d is new; c is gone; a was"):
        ckptkit.delta("old.pth", "new.pth", "d")
    with pytest.raises(UnsupportedError, match="meta"):
        ckptkit.delta("meta.pth", "meta.pth", "d")
    assert sorted(os.listdir()) == ["meta.pth", "new.pth", "old.pth"]


def test_nothing_changed() -> None:
    torch.save({"a": torch.ones(2)}, "a.pth")
    made = ckptkit.delta("a.pth", "a.pth", "d")
    assert made.changed == {} and os.listdir("d") == ["model.safetensors.index.json"]
    ckptkit.apply_delta("a.pth", "d", "b.pth")
    assert same("b.pth", {"a": torch.ones(2)})


def test_the_hashes_are_those_of_the_reference() -> None:
    from ckptkit.deltas.forms import hashing

    data = np.random.default_rng(0).bytes(5000)
    for name, digest in HASHES.items():
        found = hashing(name)
        found.update(data[:99])
        found.update(data[99:])
        assert found.hexdigest() == digest(data)


def test_other_commands_know_a_delta(chain: list[StateDict], in_process: Run) -> None:
    delta, run = write_slime(Path("d"), chain[0], chain[1]), in_process
    assert "contains a delta" in run("inspect", delta).stdout
    done = run("doctor", delta)
    assert done.code == 1 and f"ckptkit delta inspect {delta}" in done.stdout
    assert run("scan", delta).code == 0
    shown = run("delta", "inspect", delta)
    assert shown.code == 0 and "version 000001, a delta of 000000 (slime, xor)" in shown.stdout
    for name in decoded(delta, {n: raw(t) for n, t in chain[0].items()}):
        before, after = raw(chain[0][name]), raw(chain[1][name])
        if before != after:
            changed = sum(a != b for a, b in zip(before, after, strict=True))
            assert [name, str(changed)] in [line.split()[:2] for line in shown.stdout.split("\n")]


def test_the_commands(chain: list[StateDict], in_process: Run) -> None:
    run = in_process
    assert run("delta", "make", "0.pth", "1.pth", "weight_v000001").code == 0
    assert run("delta", "make", "1.pth", "2.pth", "weight_v000002", "--base-version", "1").code == 0
    assert run("delta", "apply", "0.pth", ".", "--to", "2", "out.pth").code == 0
    assert same("out.pth", chain[2])
    save_file(chain[0], "in.safetensors")
    done = run("delta", "apply", "--in-place", "in.safetensors", "weight_v000001", "weight_v000002")
    assert done.code == 0 and "rewritten" in done.stdout, done.stderr
    assert same("in.safetensors", chain[2])
    squashed = run("delta", "squash", "--json", "weight_v000001", "weight_v000002", "both")
    assert squashed.code == 0 and '"made": {"delta": ' in squashed.stdout
    assert run("delta", "verify", "2.pth", "both").stdout.startswith("2.pth: at version 000002")
    torch.save(model(7), "other.pth")
    assert run("delta", "verify", "other.pth", "both").code == 1
    assert run("delta", "apply", "1.pth", "weight_v000001", "no.pth").code == 3
    assert run("delta", "make", "0.pth", "1.pth", "weight_v000001").code == 2
