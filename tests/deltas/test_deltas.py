"""Deltas: what the reference encoder writes is applied, what `delta` writes is decoded by it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

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


def same(path: Path, expected: StateDict) -> bool:
    got = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return got.keys() == expected.keys() and all(raw(got[n]) == raw(expected[n]) for n in got)


@pytest.fixture
def chain(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """The states 0 to 3 of a model, saved as 0.pth to 3.pth."""
    found = [model(steps=number) for number in range(4)]
    for number, each in enumerate(found):
        torch.save(each, tmp_path / f"{number}.pth")
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
def test_made_deltas(encoding: str, checksum: str, chain: list[StateDict], tmp_path: Path) -> None:
    """They are decoded by the reference, applied, squashed, and tell the version."""
    os.chdir(tmp_path)
    deltas = [f"weight_v{number:06d}" for number in (1, 2, 3)]
    for number, name in enumerate(deltas):
        made = ckptkit.delta(
            f"{number}.pth", f"{number + 1}.pth", name, encoding=encoding, checksum=checksum,
            base_version=number,
        )  # fmt: skip
        before, after = ({n: raw(t) for n, t in chain[k].items()} for k in (number, number + 1))
        assert decoded(tmp_path / name, before) == after
        changed = {n: sum(a != b for a, b in zip(before[n], after[n], strict=True)) for n in before}
        assert made.changed == {n: count for n, count in changed.items() if count}
    ckptkit.apply_delta("0.pth", deltas, "out.pth")
    ckptkit.apply_delta("0.pth", tmp_path, "two.safetensors", to=2)
    assert same(tmp_path / "out.pth", chain[3]) and same(tmp_path / "two.safetensors", chain[2])
    for number in range(4):
        assert ckptkit.verify_delta(f"{number}.pth", deltas).version == number
    base = None if encoding == "xor" else "0.pth"
    ckptkit.squash_delta(deltas, "squashed", base=base, checksum=checksum)
    ckptkit.apply_delta("0.pth", "squashed", "again.pth")
    assert same(tmp_path / "again.pth", chain[3])


def test_deltas_with_different_checksums_are_squashed_over_their_base(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    torch.save(state, "0.pth")
    for number, name in enumerate("ab"):
        state[name] = torch.ones(4)
        torch.save(state, f"{number + 1}.pth")
        ckptkit.delta(
            f"{number}.pth", f"{number + 1}.pth", f"weight_v{number + 1:06d}", encoding="xor",
            checksum=("adler32", "blake3")[number], base_version=number,
        )  # fmt: skip
    deltas = ["weight_v000001", "weight_v000002"]
    with pytest.raises(UsageError, match="different checksum algorithms: adler32, blake3"):
        ckptkit.squash_delta(deltas, "squashed")
    ckptkit.squash_delta(deltas, "squashed", base="0.pth")
    ckptkit.apply_delta("0.pth", "squashed", "out.pth")
    assert same(tmp_path / "out.pth", state)


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


def test_large_tensors(tmp_path: Path) -> None:
    """Several pieces: zeros before the first change, positions beyond the first buffers."""
    before = {"w": torch.zeros(9 << 20, dtype=torch.uint8)}
    after = {"w": before["w"].clone()}
    after["w"][5 << 20 :: 3] = 7
    after["w"][-1] = 9
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    for encoding in ("xor", "overwrite"):
        target = tmp_path / encoding
        ckptkit.delta(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", target, encoding=encoding
        )
        assert decoded(target, {"w": raw(before["w"])}) == {"w": raw(after["w"])}
        out = tmp_path / f"{encoding}.safetensors"
        ckptkit.apply_delta(tmp_path / "a.safetensors", target, out)
        assert same(out, after)


@pytest.mark.parametrize("encoding", ["gap_delta", "raw", ""])
@pytest.mark.parametrize("size", [100, 70_000])
def test_trl(encoding: str, size: int, tmp_path: Path) -> None:
    before = {"w.val": torch.zeros(size, dtype=torch.bfloat16), "b": torch.ones(3)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w.val"][::99] = 2
    after["w.val"][-1] = 3
    if size > 1000:
        after["w.val"][1:-1] = 0  # a gap that 16 bits do not hold
    torch.save(before, tmp_path / "base.pth")
    delta = write_trl(tmp_path / "step.safetensors", before, after, encoding)
    with pytest.raises(UsageError, match="no checksums"):
        ckptkit.apply_delta(tmp_path / "base.pth", delta, tmp_path / "out.pth")
    ckptkit.apply_delta(tmp_path / "base.pth", delta, tmp_path / "out.pth", unchecked=True)
    assert same(tmp_path / "out.pth", after)


def test_skyrl(chain: list[StateDict], tmp_path: Path) -> None:
    deltas = [
        write_skyrl(tmp_path / f"delta-{n + 1:08d}", chain[n], chain[n + 1], n + 1)
        for n in range(3)
    ]
    ckptkit.apply_delta(tmp_path / "0.pth", tmp_path, tmp_path / "out.pth")
    assert same(tmp_path / "out.pth", chain[3])
    assert ckptkit.verify_delta(tmp_path / "2.pth", deltas).version == 2


def test_whole_versions_begin_a_chain_anew(chain: list[StateDict], tmp_path: Path) -> None:
    folder = tmp_path / "chain"
    folder.mkdir()
    write_slime(folder / "weight_v000001", chain[0], chain[1])
    ckptkit.delta(tmp_path / "1.pth", tmp_path / "2.pth", folder / "weight_v000002", whole=True)
    write_slime(folder / "weight_v000003", chain[2], chain[3], version=3)
    ckptkit.apply_delta(tmp_path / "0.pth", folder, tmp_path / "out.safetensors")
    assert same(tmp_path / "out.safetensors", chain[3])


def test_what_is_no_delta(chain: list[StateDict], tmp_path: Path) -> None:
    """A file of frames alone, or another model, does not become the checkpoint."""
    delta = write_slime(tmp_path / "d", chain[0], chain[1])
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pth")
    for given in (next(delta.glob("*.safetensors")), tmp_path / "other.pth"):
        with pytest.raises(UsageError, match="is a checkpoint whose tensors do not match"):
            ckptkit.apply_delta(tmp_path / "0.pth", given, tmp_path / "out.pth")


def test_tied_weights_and_views(tmp_path: Path) -> None:
    """A tied weight changes under both names, once; parts of a storage stay parts of it."""
    flat = torch.arange(100.0)
    before = {"embed": torch.ones(4, 4), "one": flat[:40].view(4, 10), "two": flat[40:]}
    before |= {"head": before["embed"], "turned": torch.arange(6.0).view(2, 3).t()}
    torch.save(before, tmp_path / "base.pth")
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("embed", "head", "two"):
        after[name].view(-1)[0] += 1
    after["turned"][1, 0] = 9
    delta = write_slime(tmp_path / "delta", before, after)
    ckptkit.apply_delta(tmp_path / "base.pth", delta, tmp_path / "out.pth")
    assert same(tmp_path / "out.pth", after)
    got = torch.load(tmp_path / "out.pth", weights_only=True)
    assert got["embed"].data_ptr() == got["head"].data_ptr()
    assert got["two"].data_ptr() - got["one"].data_ptr() == 160
    after["head"][1] = 5
    odd = write_slime(tmp_path / "odd", before, after)
    with pytest.raises(CorruptError, match="share memory, in different ways"):
        ckptkit.apply_delta(tmp_path / "base.pth", odd, tmp_path / "odd.pth")


def test_versions(chain: list[StateDict], tmp_path: Path) -> None:
    """A delta is applied to its base version alone, skipped where it has been applied."""
    deltas = [
        write_slime(tmp_path / f"d{n}", chain[n], chain[n + 1], version=n + 1) for n in range(3)
    ]
    folder = tmp_path / "model"
    ckptkit.convert(tmp_path / "0.pth", folder, format="sharded")
    ckptkit.apply_delta(folder, deltas[:1], tmp_path / "at1")
    ckptkit.apply_delta(tmp_path / "at1", deltas[:2], tmp_path / "at2")
    assert json.loads((tmp_path / "at2/.weight_sync/state.json").read_text())["version"] == "000002"
    assert ckptkit.verify_delta(tmp_path / "at2", deltas).recorded == 2
    for base, given, why in (
        ("at1", deltas[2:], "is at version 000001"),
        ("0.pth", deltas[1:], "records no version"),
        ("0.pth", [deltas[0], deltas[2]], "is at version 000001"),
        ("at2", deltas[:1], "is at version 000002"),
    ):
        with pytest.raises(UsageError, match=why):
            ckptkit.apply_delta(tmp_path / base, given, tmp_path / "no")
    ckptkit.apply_delta(tmp_path / "1.pth", deltas[1:], tmp_path / "ok.pth", base_version=1)
    assert same(tmp_path / "ok.pth", chain[3])


def test_a_strange_checkpoint_is_at_no_version(chain: list[StateDict], tmp_path: Path) -> None:
    delta = write_slime(tmp_path / "d", chain[0], chain[1])
    torch.save(model(7), tmp_path / "other.pth")
    found = ckptkit.verify_delta(tmp_path / "other.pth", delta)
    assert found.version is None and found.strangers


def _second_file(folder: Path) -> None:
    shutil.copy(folder / "model-00000-of-00001.safetensors", folder / "model-00001.safetensors")


def _garbage(folder: Path) -> None:
    file = folder / "model-00000-of-00001.safetensors"
    frames = load_file(file)
    with ckptkit.open(file) as found:
        sums = dict(found.extras)
    name = min(frames)
    frames[name] = torch.cat([frames[name], torch.tensor([1, 2, 3], dtype=torch.uint8)])
    save_file(frames, file, sums)


def _replace(folder: Path, data: bytes) -> None:
    file = folder / "model-00000-of-00001.safetensors"
    frames = load_file(file)
    with ckptkit.open(file) as found:
        sums = dict(found.extras)
    frames[min(frames)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    save_file(frames, file, sums)


def _bomb(folder: Path) -> None:
    _replace(folder, zstandard.ZstdCompressor().compress(bytes(1 << 30)))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_second_file, "lists no tensor of the file"),
        (_garbage, "damaged|gives more"),
        (_bomb, "returns more than"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "is missing|does not exist"),
    ],
)
def test_damaged_deltas(damage: object, why: str, chain: list[StateDict], tmp_path: Path) -> None:
    delta = write_slime(tmp_path / "d", chain[0], chain[1])
    damage(delta)  # type: ignore[operator]
    with pytest.raises(CkptkitError, match=why):
        ckptkit.apply_delta(tmp_path / "0.pth", delta, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_frame_without_a_header_is_not_squashed(chain: list[StateDict], tmp_path: Path) -> None:
    pair = [write_slime(tmp_path / f"d{n}", *chain[n : n + 2], version=n + 1) for n in range(2)]
    _replace(pair[0], b"no zstd frame")
    with pytest.raises(CorruptError, match="is damaged"):
        ckptkit.squash_delta(pair, tmp_path / "squashed")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"delta_encoding": "rle"}, "rle"),
        ({"compression_format": "lz4"}, "lz4"),
        ({"checksum_format": "md5"}, "md5"),
        ({"base_version": "one"}, "not a version number"),
    ],
)
def test_what_an_index_may_say(
    said: dict[str, str], why: str, chain: list[StateDict], tmp_path: Path
) -> None:
    delta = write_slime(tmp_path / "d", chain[0], chain[1], said=said)
    with pytest.raises(CkptkitError, match=why):
        ckptkit.apply_delta(tmp_path / "0.pth", delta, tmp_path / "out.pth")


def test_positions_that_do_not_rise(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100)}, tmp_path / "base.pth")
    for places in ([3, 3], [5, 2], [1, 100]):
        index = torch.tensor(places, dtype=torch.int32)
        save_file({"w.idx": index, "w.val": torch.ones(2)}, tmp_path / "d.safetensors")
        with pytest.raises(CorruptError, match=r"do not increase|changes element 100"):
            ckptkit.apply_delta(
                tmp_path / "base.pth", tmp_path / "d.safetensors", tmp_path / "o", unchecked=True
            )


def test_what_a_delta_has_no_place_for(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "old.pth")
    torch.save(
        {"a": torch.ones(3), "b": torch.ones(2).half(), "d": torch.ones(2)}, tmp_path / "new.pth"
    )
    with pytest.raises(UsageError, match="4 differences: d is new; c is gone; a was"):
        ckptkit.delta(tmp_path / "old.pth", tmp_path / "new.pth", tmp_path / "d")
    torch.save({"a": torch.empty(2, device="meta")}, tmp_path / "meta.pth")
    with pytest.raises(UnsupportedError, match="meta"):
        ckptkit.delta(tmp_path / "meta.pth", tmp_path / "meta.pth", tmp_path / "d")
    assert not (tmp_path / "d").exists() and len(list(tmp_path.iterdir())) == 3


def test_nothing_changed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    made = ckptkit.delta(tmp_path / "a.pth", tmp_path / "a.pth", tmp_path / "d")
    assert made.changed == {} and os.listdir(tmp_path / "d") == ["model.safetensors.index.json"]
    ckptkit.apply_delta(tmp_path / "a.pth", tmp_path / "d", tmp_path / "b.pth")
    assert same(tmp_path / "b.pth", {"a": torch.ones(2)})


def test_the_hashes_are_those_of_the_reference() -> None:
    from ckptkit.deltas.forms import hashing

    data = np.random.default_rng(0).bytes(5000)
    for name, digest in HASHES.items():
        found = hashing(name)
        found.update(data[:99])
        found.update(data[99:])
        assert found.hexdigest() == digest(data)


def test_other_commands_know_a_delta(chain: list[StateDict], tmp_path: Path, run: Run) -> None:
    delta = write_slime(tmp_path / "d", chain[0], chain[1])
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
            assert any(
                line.split()[:2] == [name, str(changed)] for line in shown.stdout.split("\n")
            )


def test_the_commands(chain: list[StateDict], tmp_path: Path, run: Run) -> None:
    os.chdir(tmp_path)
    assert run("delta", "make", "0.pth", "1.pth", "weight_v000001").code == 0
    assert run("delta", "make", "1.pth", "2.pth", "weight_v000002", "--base-version", "1").code == 0
    assert run("delta", "apply", "0.pth", ".", "--to", "2", "out.pth").code == 0
    assert same(tmp_path / "out.pth", chain[2])
    save_file(chain[0], "in.safetensors")
    done = run("delta", "apply", "--in-place", "in.safetensors", "weight_v000001", "weight_v000002")
    assert done.code == 0 and "rewritten" in done.stdout, done.stderr
    assert same(tmp_path / "in.safetensors", chain[2])
    squashed = run("delta", "squash", "--json", "weight_v000001", "weight_v000002", "both")
    assert squashed.code == 0 and '"made": {"delta": ' in squashed.stdout
    assert run("delta", "verify", "2.pth", "both").stdout.startswith("2.pth: at version 000002")
    torch.save(model(7), "other.pth")
    assert run("delta", "verify", "other.pth", "both").code == 1
    assert run("delta", "apply", "1.pth", "weight_v000001", "no.pth").code == 3
    assert run("delta", "make", "0.pth", "1.pth", "weight_v000001").code == 2
