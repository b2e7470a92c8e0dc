"""Files that torch takes in a way of its own, or not at all: what it makes of them, and what
ckptkit does instead.

The rows of the threat table that are about this difference, where no other test has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.api import convert
from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TensorError,
    UnsupportedError,
)
from ckptkit.core.tree import Pairs
from ckptkit.formats import read as read_any
from tests.formats.conformance import elements_of
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import (
    FLOATS,
    archive,
    by_torch,
    number,
    pickle_of,
    read,
    sizes,
    storage,
    tensor,
    text,
    untyped,
)

PICKLE = pickle_of(tensor(storage()))
VERSION = Member("a/version", b"3\n")
DATA = Member("a/data.pkl", PICKLE)


def zipped(*members: Member, **options: Any) -> bytes:
    return build(DATA, *members, VERSION, **options)


def refused(data: bytes, error: type[CkptkitError], match: str) -> None:
    with pytest.raises(error, match=match):
        read_any(Memory(data, "made.pth"))


def floats(data: bytes, tmp_path: Path, **options: Any) -> list[float]:
    found: list[float] = by_torch(data, tmp_path, **options)["a"].tolist()
    return found


def test_D_03_ZP_25_mapped_torch_reads_what_is_compressed(tmp_path: Path) -> None:
    numbers = struct.pack("<64f", *range(64))
    data = pickle_of(tensor(storage(numel=64), (64,)))
    made = build(Member("a/data.pkl", data), Member("a/data/0", numbers, deflated=True), VERSION)
    assert floats(made, tmp_path) == list(range(64)) != floats(made, tmp_path, mmap=True)
    assert elements_of(read(made).root["a"]) == numbers


def test_ZP_25_files_are_never_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(*args: object, **options: object) -> None:
        raise AssertionError("a file is mapped")

    monkeypatch.setattr("mmap.mmap", mapped)
    path, out = tmp_path / "made.pth", tmp_path / "out.safetensors"
    path.write_bytes(zipped(Member("a/data/0", FLOATS)))
    convert(path, out, keep_format=False)
    assert elements_of(read_any(LocalFile(out)).weights["a"]) == FLOATS


def test_D_11_a_repeated_key(tmp_path: Path) -> None:
    made = archive(b"\x80\x02}(" + text("a") + b"K\1" + text("a") + b"K\2u.", records={})
    assert by_torch(made, tmp_path) == {"a": 2}
    root = read(made).root
    assert isinstance(root, Pairs) and root.pairs == [("a", 1), ("a", 2)]
    with pytest.raises(AmbiguousError, match="repeated"):
        convert(tmp_path / "made.pth", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


NUMBERS = [0, 1, 2, 3]  # what torch makes of a storage
RAISES = None  # torch raises an error


def oddities() -> Iterator[tuple[str, bytes, list[int] | None, type[CkptkitError], str]]:
    """Yield the row of threats.md, a file, what torch reads, the error of ckptkit and its text."""
    for local in ({"name": b"a/data/1"}, *({"flags": flags} for flags in (0x1, 0x20, 0x40))):
        made = zipped(Member("a/data/0", FLOATS, local=local))
        yield "D_17_D_18", made, NUMBERS, AmbiguousError, "name, flags or method"
    plain = zipped(Member("a/data/0", FLOATS))
    yield "D_20", bytes(256) + plain, RAISES, FormatError, "."
    yield "D_21", plain + bytes(256), NUMBERS, AmbiguousError, "end record"
    twice = bytearray(zipped(Member("a/data/0", FLOATS), Member("a/data/1", FLOATS)))
    entries = [twice.index(b"a/data/%d" % n, twice.index(b"PK\1\2")) - 46 for n in (0, 1)]
    twice[entries[1] + 42 : entries[1] + 46] = twice[entries[0] + 42 : entries[0] + 46]
    yield "D_23", bytes(twice), NUMBERS, AmbiguousError, "begin at the same byte"
    facts: list[tuple[dict[str, Any], str]] = [({"flags": 1}, "encrypted")]
    facts += [({"method": each}, f"method {each}") for each in (9, 12, 14, 93, 99)]
    for both, said in facts:
        made = zipped(Member("a/data/0", FLOATS, local=both, central=both))
        yield "D_19_D_25", made, RAISES, UnsupportedError, said


def test_D_17_D_18_D_19_D_20_D_21_D_23_D_25_what_torch_makes_of_it(tmp_path: Path) -> None:
    for row, made, numbers, error, said in oddities():
        if numbers is RAISES:
            with pytest.raises(Exception, match=r"."):
                by_torch(made, tmp_path)
        else:
            assert floats(made, tmp_path) == numbers, row
        refused(made, error, said)
    twice = zipped(Member("a/data/0", FLOATS)) * 2
    refused(twice, AmbiguousError, "end record|is truncated")


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")
def test_D_29_a_program(tmp_path: Path) -> None:
    """With both pickles torch takes it for a program, as ckptkit does: it is read by the reader of
    programs."""
    made = zipped(Member("a/data/0", FLOATS), Member("a/constants.pkl", b"\x80\x02)."))
    with pytest.raises(RuntimeError, match="TorchScript"):
        by_torch(made, tmp_path)
    refused(made, FormatError, ".")


def test_D_35_PK_21_many_paths_to_one_value(tmp_path: Path) -> None:
    """A file of 725 bytes that would be ten thousand million values if each path to one were
    another."""
    levels = b"](" + b"N" * 10 + b"eq\0" + b"".join(
        b"](" + b"h%c" % level * 10 + b"eq%c" % (level + 1) for level in range(9)
    )  # fmt: skip
    made = archive(b"\x80\x02(" + levels + b"t.", records={})
    assert len(by_torch(made, tmp_path)) == 10
    convert(tmp_path / "made.pth", tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth", weights_only=True)
    assert again[1][0] is again[1][9] is again[0] and (tmp_path / "out.pth").stat().st_size < 4096


def test_D_44_PK_19_a_memo_of_four_thousand_million(tmp_path: Path) -> None:
    made = archive(b"\x80\x02K\7r\xff\xff\xff\xff.", records={})
    assert by_torch(made, tmp_path) == read(made).root == 7


# Tensors


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int64"])
def test_TM_06_a_type_of_its_own_over_an_untyped_storage(dtype: str, tmp_path: Path) -> None:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    made = archive(pickle_of(untyped((16 // size,), dtype)))
    assert by_torch(made, tmp_path)["a"].nbytes == 16
    assert elements_of(read(made).weights["a"]) == FLOATS
    with pytest.raises(RuntimeError):
        by_torch(archive(pickle_of(untyped((16 // size + 1,), dtype))), tmp_path)
    with pytest.raises(TensorError):
        read(archive(pickle_of(untyped((16 // size + 1,), dtype))))


def test_TM_06_a_storage_is_of_its_class(tmp_path: Path) -> None:
    """The second version of rebuilding has no type of its own: that of the storage counts, in
    elements."""
    made = archive(pickle_of(tensor(storage("torch\nLongStorage", numel=2), (2,))))
    assert by_torch(made, tmp_path)["a"].dtype == torch.int64
    assert read(made).root["a"].dtype.name == "int64"
    for numel in (1, 4):
        with pytest.raises(CorruptError):
            read(archive(pickle_of(tensor(storage("torch\nLongStorage", numel=numel), (1,)))))


def rebuilt(*rest: bytes) -> bytes:
    """A tensor of four numbers with these last arguments."""
    args = storage() + number(0) + sizes(4) + sizes(1) + b"".join(rest)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + args + b"tR"


HOOKS = b"ccollections\nOrderedDict\n)R"


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_TM_07_negated_and_conjugated(bit: str, tmp_path: Path) -> None:
    value = torch.tensor([1.0, -2.0]) if bit == "neg" else torch.tensor([1 + 2j, -1j])
    view = torch._neg_view(value) if bit == "neg" else value.conj()
    torch.save({"a": view}, tmp_path / "in.pth")
    for name in ("out.pth", "out.safetensors"):
        convert(tmp_path / "in.pth", tmp_path / name)
    assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True)["a"], view)
    data = (tmp_path / "out.safetensors").read_bytes()
    assert data.endswith(view.resolve_neg().resolve_conj().numpy().tobytes())


@pytest.mark.parametrize(
    "rest",
    [
        (b"N", HOOKS), (text("yes"), HOOKS), (b"\x89", b"}" + text("a") + b"K\1s"),
        (b"\x89", HOOKS + text("a") + b"K\1s"), (b"\x89", HOOKS, b"}" + text("odd") + b"\x88s"),
        (b"\x89", HOOKS, b"}" + text("conj") + b"K\1s"), (b"\x89", HOOKS, b"K\1"),
    ],
    ids=["none", "text", "hooks", "ordered-hooks", "other-bit", "number-as-bit", "no-bits"],
)  # fmt: skip
def test_TM_07_what_is_beside_the_geometry_is_never_dropped(rest: tuple[bytes, ...]) -> None:
    """It is refused, or the whole call is kept as it is: nothing says less than the file does."""
    try:
        found = read(archive(pickle_of(rebuilt(*rest)))).root["a"]
    except CkptkitError:
        return
    assert type(found).__name__ == "Object" and len(found.args) == 4 + len(rest)


@pytest.mark.parametrize("hooks", [b"N", b"]"], ids=["none", "list"])
def test_TM_07_other_words_for_no_hooks(hooks: bytes, tmp_path: Path) -> None:
    made = archive(pickle_of(rebuilt(b"\x88", hooks)))
    assert (
        by_torch(made, tmp_path)["a"].requires_grad and read(made).root["a"].requires_grad is True
    )


def sparse(columns: int) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), (1, columns)
    )


ODD = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: sparse(1 << 20),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_TM_08_tensors_that_are_more_than_numbers_in_a_row(kind: str, tmp_path: Path) -> None:
    """They are kept where there is room for what they are, and refused or named elsewhere."""
    torch.save({"a": ODD[kind](), "b": torch.ones(2)}, tmp_path / "in.pth")
    checkpoint = read_any(LocalFile(tmp_path / "in.pth"))
    assert checkpoint.root["b"].shape == (2,)
    convert(tmp_path / "in.pth", tmp_path / "out.pth")
    want, got = (
        torch.load(tmp_path / f"{name}.pth", weights_only=True)["a"] for name in ("in", "out")
    )
    assert repr(want) == repr(got)
    try:
        done = convert(tmp_path / "in.pth", tmp_path / "out.safetensors", keep_format=False)
    except CkptkitError as error:
        assert "'a'" in str(error) or " a" in str(error)
    else:
        assert kind == "quantized" or any("a" in note for note in done.plan.notes)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_TM_08_indices_are_not_believed(tmp_path: Path) -> None:
    """The indices of a compressed tensor are never used to read."""
    torch.save({"a": sparse(3)}, tmp_path / "in.pth")
    data = (tmp_path / "in.pth").read_bytes()
    lie = data.replace(struct.pack("<qq", 0, 1), struct.pack("<qq", 0, 1 << 40))
    assert lie != data
    checkpoint = read_any(Memory(lie, "lie.pth"))
    assert checkpoint.root
