"""recover: whatever happens to a file, what is saved of it is what was in it, and what is not saved
is named."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.api import convert, recover
from ckptkit.cli import main
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError, CorruptError, TruncatedError, UnsupportedError
from ckptkit.core.options import Options
from ckptkit.formats.format import Probe
from ckptkit.formats.recovering import recover as safetensors_recover
from ckptkit.formats.torch_zip_recover import recover as torch_zip_recover
from tests.conftest import Run
from tests.formats.containers.zips import Member, build
from tests.formats.safetensors.files import entry as safetensors_entry
from tests.formats.safetensors.files import file_of
from tests.formats.safetensors.test_whole import Other
from tests.formats.torch_zip.archives import FLOATS, pickle_of, storage, tensor, text
from tests.matrix import Fixture
from tests.torch_equality import same

State = dict[str, torch.Tensor]


def state() -> State:
    torch.manual_seed(0)
    weights = {f"layer.{i}.weight": torch.randn(3, 4 + i) for i in range(6)}
    weights["tied"] = weights["layer.2.weight"]
    weights["count"] = torch.tensor(5)
    weights["empty"] = torch.zeros(0, 2)
    return weights


def save_zip(tree: Any, path: Path) -> None:
    torch.save(tree, path)


def save_ours(tree: Any, path: Path) -> None:
    """Sizes in the local headers, no descriptors."""
    torch.save(tree, path)
    convert(path, path.with_name("ours.pth"), format="torch-zip")
    path.with_name("ours.pth").replace(path)


def save_legacy(tree: Any, path: Path) -> None:
    torch.save(tree, path, _use_new_zipfile_serialization=False)


def save_without_sums(tree: Any, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, path)
    finally:
        torch.serialization.set_crc32_options(True)


SAVES = [save_zip, save_ours, save_legacy, save_without_sums]
Save = Callable[[Any, Path], None]


def check(path: Path, whole: State) -> set[str]:
    """The names that are saved; the others are named as lost, none is both or neither, and bytes
    are as they were."""
    found = recover(path)
    out = path.with_name("out.pth")
    convert(found.checkpoint, out, force=True)
    saved = torch.load(out, weights_only=True)["model"]
    for name, value in saved.items():
        assert torch.equal(value, whole[name])
    lost = {loss.path.removeprefix("model.") for loss in found.lost}
    assert lost.isdisjoint(saved)
    assert lost | set(saved) == set(whole)
    return set(saved)


@pytest.mark.parametrize("save", SAVES)
def test_a_file_cut_anywhere(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save({"model": state(), "epoch": 3}, path)
    data = path.read_bytes()
    before: set[str] = set()
    refused = True
    for size in [*range(64, len(data), 61), len(data) - 1, len(data)]:
        path.write_bytes(data[:size])
        try:
            saved = check(path, state())
        except CorruptError:
            assert refused, "a longer file gives no less"
            continue
        except UnsupportedError:
            assert size < 200
            continue
        refused = False
        assert before <= saved
        before = saved
    assert before == set(state())


@pytest.mark.parametrize("save", [save_zip, save_ours])
def test_damaged_bytes_of_a_zip(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save({"model": state(), "epoch": 3}, path)
    data = path.read_bytes()
    begin = data.index(b"\x80\x02")  # of the pickle
    end = begin + zipfile.ZipFile(path).infolist()[0].file_size
    counts = []
    for at in range(0, len(data), 37):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            if begin <= at < end:
                with pytest.raises(CorruptError, match=r"data\.pkl"):
                    recover(path)
                with suppress(CkptkitError):  # it may say anything now
                    said = recover(path, unverified=True).checkpoint.warnings
                    assert any("data.pkl is damaged" in warning for warning in said)
            else:
                counts.append(len(check(path, state())))
        except CorruptError as error:
            assert "data.pkl" in str(error)
        except UnsupportedError:  # in the first header: no zip file, or one without a data.pkl
            assert at < begin
    assert min(counts) >= len(state()) - 2  # a storage of two names
    assert max(counts) == len(state())


@pytest.mark.parametrize("save", [save_zip, save_ours])
def test_a_damaged_local_header_costs_nothing(save: Save, tmp_path: Path) -> None:
    """The directory's offset and checksum find the bytes, whatever byte of the header changed, and
    where all headers and descriptors are gone."""
    path = tmp_path / "in.pth"
    save({"model": state()}, path)
    data = path.read_bytes()
    infos = members(path)
    for info in (infos[0], next(each for each in infos if each.filename.endswith("/data/2"))):
        for at in range(info.header_offset, info.header_offset + 34 + len(info.filename)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x21]) + data[at + 1 :])
            assert check(path, state()) == set(state())
    wiped = bytearray(data)
    for info in infos[1:]:
        wiped[info.header_offset : info.header_offset + 28] = bytes(28)
    path.write_bytes(wiped.replace(b"PK\x07\x08", b"xxxx"))
    assert check(path, state()) == set(state())


@pytest.mark.parametrize("front", [b"\0", b"Content-Type: x\r\n\r\n", bytes(70_000)])
@pytest.mark.parametrize("save", [save_zip, save_without_sums])
def test_bytes_in_front_of_a_zip(save: Save, front: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save({"model": state()}, path)
    path.write_bytes(front + path.read_bytes())
    assert check(path, state()) == set(state())


def test_a_zip_inside_a_pickle_is_not_taken_for_the_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "inner.pth")
    (tmp_path / "in.pkl").write_bytes(pickle.dumps({"net": (tmp_path / "inner.pth").read_bytes()}))
    with pytest.raises(UnsupportedError, match="has a format that cannot"):
        recover(tmp_path / "in.pkl")


def members(path: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return archive.infolist()


def rezipped(path: Path, made: Path, method: int, edit: Callable[[str, bytes], bytes]) -> None:
    """Write an archive with other content of its records."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, edit(info.filename, old.read(info)))


def layers(seed: int, count: int = 60) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(16 + 7 * i, generator=generator) for i in range(count)}


@pytest.mark.parametrize("kind", ["deleted", "inserted"])
def test_without_checksums_no_tensor_gets_the_bytes_of_its_neighbor(
    kind: str, tmp_path: Path
) -> None:
    """The next header, read one byte off, must not be taken for a tensor's own."""
    path = tmp_path / "in.pth"
    save_without_sums({"model": layers(5)}, path)
    data = path.read_bytes()
    for at in range(9000, len(data) - 9000, 6000):
        path.write_bytes(changed(data, at, kind))
        saved = check(path, layers(5))
        assert len(saved) >= 59
        assert any("no checksums" in warning for warning in recover(path).checkpoint.warnings)


def test_without_checksums_a_record_that_is_gone_is_not_filled_by_the_next(tmp_path: Path) -> None:
    """A hole as long as one record leaves a header, an end, and as many bytes between them."""
    path = tmp_path / "in.pth"
    alike = {f"layer{i}": torch.full((16,), float(i)) for i in range(20)}
    save_without_sums({"model": alike}, path)
    data = path.read_bytes()
    at = [data.index(f"in/data/{i}".encode()) for i in (5, 6)]
    hole = at[0] + 90
    for whole in (data, data[: data.index(b"PK\1\2")]):
        path.write_bytes(whole[:hole] + whole[hole + at[1] - at[0] :])
        assert check(path, alike) == alike.keys() - {"layer5", "layer6"}


def test_without_checksums_a_changed_key_of_a_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save_without_sums({f"layer{i}": torch.ones(4) * i for i in range(5)}, path)
    data = path.read_bytes()
    assert data.count(b"X\1\0\0\0003") == 1
    path.write_bytes(data.replace(b"X\1\0\0\0003", b"X\1\0\0\0002"))
    with pytest.raises(CorruptError, match="does not refer to the record"):
        recover(path)


def two_saves(tmp_path: Path, old_count: int = 60) -> tuple[bytes, bytes]:
    """Return a file of `layers(1)`, and one of `layers(2)` that it was written over."""
    saves = []
    for seed, count in ((1, 60), (2, old_count)):
        torch.save({"model": layers(seed, count)}, tmp_path / "in.pth")
        saves.append((tmp_path / "in.pth").read_bytes())
    return saves[0], saves[1]


def test_a_save_that_stopped_within_an_older_one(tmp_path: Path) -> None:
    """Its directory is the older one's; without it, a warning names what may be older."""
    new, old = two_saves(tmp_path)
    path = tmp_path / "in.pth"
    half = len(new) // 2
    path.write_bytes(new[:half] + old[half:])
    assert 10 < len(check(path, layers(2))) < 50
    path.write_bytes(new[:half] + old[half : old.index(b"PK\1\2") - 200])
    (warning,) = recover(path).checkpoint.warnings
    assert "nothing proves that its tensors come from one save" in warning
    assert "tensors may come from that file: model.layer" in warning


def test_the_serialization_id_proves_one_save_without_a_directory(tmp_path: Path) -> None:
    new, old = two_saves(tmp_path)
    path = tmp_path / "in.pth"
    half = len(new) // 2
    directory = new.index(b"PK\1\2")
    for data, told in ((new, False), (new[:half] + old[half:], True)):
        path.write_bytes(data[:directory])
        assert bool(recover(path).checkpoint.warnings) == told


@pytest.mark.parametrize("older", ["in.pth", "older.pth"])  # which names the archive
@pytest.mark.parametrize("save", [save_zip, save_without_sums])
def test_a_shorter_save_over_a_longer_one(save: Save, older: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save({"model": layers(2, 90)}, tmp_path / older)
    old = (tmp_path / older).read_bytes()
    save({"model": layers(1)}, path)
    path.write_bytes(path.read_bytes() + old[path.stat().st_size :])
    assert check(path, layers(1)) == set(layers(1))


@pytest.mark.parametrize("save", [save_zip, save_without_sums])
def test_thousands_of_tensors_take_linear_time(
    save: Save, tmp_path: Path, lengths: list[int]
) -> None:
    """The headers of a cut file are read together."""
    path = tmp_path / "in.pth"
    save({f"{i}": torch.ones(1) for i in range(2000)}, path)
    path.write_bytes(path.read_bytes()[:-200])
    lengths.clear()
    assert not recover(path).lost
    assert len(lengths) < 10 * 2000
    assert save is save_without_sums or sum(lengths) < 4 * path.stat().st_size


def test_ZP_01_a_second_data_pkl(tmp_path: Path, lengths: list[int]) -> None:
    path = tmp_path / "in.pth"
    torch.save(state(), path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("in/data.pkl", archive.read("in/data.pkl"))
    assert recover(path).lost == ()


def test_ZP_01_a_record_full_of_headers_of_itself(tmp_path: Path, lengths: list[int]) -> None:
    path = tmp_path / "in.pth"
    torch.save({"w": torch.ones(1000), "other": torch.zeros(300_000, dtype=torch.uint8)}, path)
    data = path.read_bytes()
    start = next(each for each in members(path) if each.filename == "in/data/1").header_offset
    header = Member("in/data/1", b"x" * 300_000).head()
    inside = header * (270_000 // len(header))
    path.write_bytes(data[:start] + inside + data[start:-30])
    assert [loss.path for loss in recover(path).lost] == ["other"]


def test_records_that_are_deflated(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"model": state(), "epoch": 3}, tmp_path / "stored.pth")
    rezipped(tmp_path / "stored.pth", path, zipfile.ZIP_DEFLATED, lambda name, data: data)
    assert check(path, state()) == set(state())
    data = path.read_bytes()
    last = next(each for each in members(path) if each.filename.endswith("/0")).header_offset
    path.write_bytes(data[: last + 60] + b"\0\0\0\0" + data[last + 64 :])
    assert "layer.0.weight" not in check(path, state())


def test_big_endian_bytes_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    values = torch.tensor([1, 2, 3], dtype=torch.int32)
    torch.save({"model": {"w": values}}, tmp_path / "little.pth")

    def swapped(name: str, data: bytes) -> bytes:
        if "/data/" in name:
            return values.numpy().byteswap().tobytes()
        return b"big" if data == b"little" else data

    rezipped(tmp_path / "little.pth", path, zipfile.ZIP_STORED, swapped)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"PK\1\2")])
    assert check(path, {"w": values}) == {"w"}


def begin_of(tensor: Any) -> int:
    """The offset of the bytes of a tensor in its file."""
    offset: int = tensor.storage.record.locate().offset
    return offset


def cut_within(path: Path, tensor: Any) -> None:
    path.write_bytes(path.read_bytes()[: begin_of(tensor) + 8])


def test_more_than_the_weights(tmp_path: Path) -> None:
    """In a list None takes the place; an object goes as a whole."""
    path = tmp_path / "in.pth"
    lists = [torch.ones(2), torch.ones(300), "text"]
    torch.save({"model": state(), "lists": lists, "object": Other(torch.ones(100))}, path)
    cut_within(path, ckptkit.open(path).root["lists"][1])
    found = recover(path)
    assert found.checkpoint.root["lists"][1:] == [None, "text"]
    assert [loss.path for loss in found.lost] == ["lists.1", "object"]
    assert found.lost[0].what == "float32 [300]"
    assert found.lost[1].what.endswith("Other")


def test_a_module_becomes_what_is_left_of_its_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    model = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(3, 4), b=torch.nn.Linear(4, 500)))
    torch.save(model, path)
    cut_within(path, ckptkit.open(path).weights["b.weight"])
    convert(recover(path).checkpoint, tmp_path / "out.pth")
    saved = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(saved) == ["a.weight", "a.bias"]
    assert torch.equal(saved["a.weight"], model.state_dict()["a.weight"])


def zip_of(*names: str) -> bytes:
    return build(*(Member(name, b"c") for name in names))


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (zip_of("a/b"), UnsupportedError, ""),
        (zip_of("a/b")[:-30], UnsupportedError, ""),
        (b"text", UnsupportedError, "has a format that cannot"),
        (build(Member("a/data.pkl", b"\x80\x02}.")), CorruptError, "no tensors"),
        (
            build(Member("a/data.pkl", pickle_of(tensor(storage()))))[:-40],
            CorruptError, "no tensor in it is intact",
        ),
    ],
)  # fmt: skip
def test_nothing_to_recover(
    data: bytes, error: type[CkptkitError], said: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(data)
    with pytest.raises(error, match=said or None):
        recover(tmp_path / "in")


@pytest.mark.parametrize("part", [1, 0.999, 0.9, 0.5, 0.2])
@pytest.mark.parametrize("name", ["scripted.pt", "traced.pt"])
def test_a_program_is_known_as_that(name: str, part: float, tmp_path: Path) -> None:
    data = Fixture(f"torchscript/{name}").path.read_bytes()
    (tmp_path / "in.pt").write_bytes(data[: int(part * len(data))])
    with pytest.raises(UnsupportedError, match="TorchScript"):
        recover(tmp_path / "in.pt")


def zip_of_checkpoints(path: Path) -> bytes:
    """As reinforcement learners write them: files of torch.save, stored in a zip file."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "{}")
        for name in ("variables.pth", "policy.pth"):
            torch.save(state(), path.with_name(name))
            archive.write(path.with_name(name), name)
    return path.read_bytes()


@pytest.mark.parametrize("cut", [10, 200, 2000, 5000])
def test_a_zip_of_checkpoints_is_known_as_that(cut: int, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(zip_of_checkpoints(path)[:-cut])
    with pytest.raises(UnsupportedError, match="zip archive of other files"):
        recover(path)
    said = run("verify", path)
    assert "incomplete" in said.stdout  # not the end record of the archive inside
    assert "recover" not in said.stdout


def test_an_archive_inside_is_not_taken_for_the_file(tmp_path: Path) -> None:
    """The cut leaves the whole archive that is inside, with its directory and its end."""
    path = tmp_path / "agent.zip"
    data = zip_of_checkpoints(path)
    policy = (tmp_path / "policy.pth").read_bytes()
    inner = data.index(policy) + len(policy)
    for size in (inner, inner + 5):
        path.write_bytes(data[:size])
        with pytest.raises(TruncatedError, match="no zip end record"):
            ckptkit.open(path)
        with pytest.raises(UnsupportedError, match="zip archive of other files"):
            recover(path)


def changed(data: bytes, at: int, kind: str) -> bytes:
    if kind == "deleted":
        return data[:at] + data[at + 1 :]
    if kind == "inserted":
        return data[:at] + b"\x55" + data[at:]
    return data[:at] + bytes(len(data) - at)


@pytest.mark.parametrize("kind", ["deleted", "inserted", "zeros"])
@pytest.mark.parametrize("save", [save_zip, save_ours])
def test_what_is_shifted_is_lost(save: Save, kind: str, tmp_path: Path) -> None:
    """A member that promises a checksum and has none that fits is lost."""
    path = tmp_path / "in.pth"
    save({"model": state(), "epoch": 3}, path)
    at = begin_of(ckptkit.open(path).weights["layer.3.weight"]) + 5
    path.write_bytes(changed(path.read_bytes(), at, kind))
    saved = check(path, state())
    assert "layer.3.weight" not in saved
    assert "layer.0.weight" in saved
    assert ("layer.5.weight" in saved) == (kind != "zeros")


def test_the_beginning_of_another_file(tmp_path: Path) -> None:
    """The first bytes of an archive are not recovered where its directory lists another one."""
    for name in ("a.pth", "other.pth"):
        torch.save({name: torch.ones(500), "more": torch.ones(3000)}, tmp_path / name)
    data, other = ((tmp_path / name).read_bytes() for name in ("a.pth", "other.pth"))
    (tmp_path / "a.pth").write_bytes(other[:4000] + data[4000:])
    with pytest.raises(CorruptError, match="its directory lists"):
        recover(tmp_path / "a.pth")


@pytest.mark.parametrize("kind", ["deleted", "inserted"])
def test_a_legacy_storage_lies_between_two_counts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    save_legacy({"model": state(), "epoch": 3}, path)
    weights = ckptkit.open(path).weights
    at, name = sorted(
        (begin_of(each), name) for name, each in weights.items() if each.nbytes >= 20
    )[2]
    path.write_bytes(changed(path.read_bytes(), at + 5, kind))
    assert name not in check(path, state())
    assert name in recover(path, unverified=True).checkpoint.weights


@pytest.mark.parametrize("kind", ["deleted", "inserted", "zeros"])
def test_safetensors_that_may_be_shifted_are_not_kept(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000), "c": torch.ones(1000)}, path)
    path.write_bytes(changed(path.read_bytes(), path.stat().st_size - 6000, kind))
    if kind == "zeros":
        assert set(recover(path).checkpoint.weights) == {"a"}
        return
    with pytest.raises(CorruptError, match="shifted") as refused:
        recover(path)
    assert "--unverified" in str(refused.value.hint)
    kept = set(recover(path, unverified=True).checkpoint.weights)
    assert kept == ({"a", "b"} if kind == "deleted" else {"a", "b", "c"})


def test_safetensors_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    weights = {name: tensor.clone() for name, tensor in state().items()}
    save_file(weights, path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    ends = {
        name: header + entry["data_offsets"][1]
        for name, entry in json.loads(data[8:header]).items()
    }
    for size in range(0, len(data) + 1, 13):
        path.write_bytes(data[:size])
        there = {name for name, end in ends.items() if header < end <= size}
        if size < len(data):
            with pytest.raises(CkptkitError):
                recover(path)
        if not there - {"empty"}:
            continue
        found = recover(path, unverified=True)
        convert(found.checkpoint, tmp_path / "out.safetensors", force=True)
        saved = load_file(tmp_path / "out.safetensors")
        assert all(torch.equal(tensor, weights[name]) for name, tensor in saved.items())
        assert {loss.path for loss in found.lost} | set(saved) == set(weights)
        assert set(saved) - {"empty"} == there - {"empty"}


def test_a_whole_tree_of_safetensors_survives_a_lost_tensor(tmp_path: Path) -> None:
    """An entry goes with its key, and None takes the place in a list, as in other formats."""
    moments = [torch.ones(8), torch.ones(9)]
    tree: Any = {"model": state(), "epoch": 3, "opt": {"lr": 0.1, "m": moments, "z": torch.ones(9)}}
    torch.save(tree, tmp_path / "in.pth")
    path = tmp_path / "in.safetensors"
    convert(tmp_path / "in.pth", path, options=Options(all=True))
    path.write_bytes(path.read_bytes()[:-40])
    found = recover(path, unverified=True)
    assert [loss.path for loss in found.lost] == ["opt.m.1", "opt.z"]
    convert(found.checkpoint, tmp_path / "out.safetensors")
    convert(tmp_path / "out.safetensors", tmp_path / "out.pth")
    del tree["opt"]["z"]
    moments[1] = None  # type: ignore[call-overload]
    same(tree, torch.load(tmp_path / "out.pth", weights_only=True))


def test_command(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "in.pth"
    torch.save({"model": {f"w{i}": torch.ones(100) for i in range(40)}, "epoch": 3}, path)
    path.write_bytes(path.read_bytes()[:9000])
    refused = run("inspect", path)
    assert refused.code == 3
    assert "ckptkit recover" in refused.stderr
    done = run("recover", path, tmp_path / "out.pth")
    assert done.code == 0
    assert "--json lists them" in done.stderr
    assert 0 < len(torch.load(tmp_path / "out.pth", weights_only=True)["model"]) < 40
    said = CliRunner().invoke(
        main, ["recover", "--json", "--force", str(path), str(tmp_path / "out.pth")]
    )
    facts = json.loads(said.stdout)
    assert facts["tensor_count"] + len(facts["lost"]) == 40
    assert facts["lost"][-1]["path"] == "model.w39"
    assert set(facts["lost"][0]) == {"path", "what", "why"}


@pytest.mark.parametrize("entry", [5, None, ["U8"], "text"])
def test_an_entry_that_is_none_is_lost_alone(entry: object) -> None:
    data = file_of({"bad": entry, "good": safetensors_entry(0, 2)}, b"ab")
    found = safetensors_recover(Probe(Memory(data)))
    assert found is not None and list(found.checkpoint.root) == ["good"]
    assert [(loss.path, loss.what) for loss in found.lost] == [("bad", "an entry")]


def test_a_compressed_storage_without_the_directory() -> None:
    """Its own header has its size and its checksum."""
    both = pickle_of(tensor(storage()), tensor(storage(key=text("1"))))
    stored, deflated = Member("a/data/1", FLOATS), Member("a/data/0", FLOATS, deflated=True)
    data = build(Member("a/data.pkl", both), deflated, stored)
    found = torch_zip_recover(Probe(Memory(data[: data.index(b"PK\1\2")])), False)
    assert found is not None and not found.lost and list(found.checkpoint.root) == ["a", "b"]
