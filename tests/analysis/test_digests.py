"""Digests: equal wherever the tensors are, and what a manifest says of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from ckptkit.analysis.digests import (
    digest,
    manifest_lines,
    parse_manifest,
    read_manifest,
    whole_digest,
)
from ckptkit.core.errors import CkptkitError, CollisionError, FormatError, UsageError
from tests.formats import test_conformance as made
from tests.formats.conformance import FormatConformance, State
from tests.formats.dcp.test_reading import TestDcp as Dcp
from tests.formats.torchscript import scripts

pytestmark = scripts.QUIET

MAKERS: list[type[FormatConformance]] = [
    made.TestTorchZip, made.TestTorchLegacy, made.TestTorchTar, made.TestSafetensors, made.TestSharded,
    made.TestShardedBin, made.TestPickle, made.TestNpz, made.TestCompressedNpz, made.TestTorchScript, made.TestPt2, Dcp,
]  # fmt: skip


def state() -> State:
    torch.manual_seed(0)
    return {
        "w": torch.randn(6, 4),
        "b": torch.arange(5, dtype=torch.float64),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "odd": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def by_hand(state: State) -> dict[str, str]:
    found = {}
    for name, tensor in state.items():
        head = f"{str(tensor.dtype).removeprefix('torch.')} {','.join(map(str, tensor.shape))}\n".encode()
        found[name] = sha256(head + tensor.contiguous().numpy().tobytes())
    return found


@pytest.mark.parametrize("maker", MAKERS, ids=lambda each: each.__name__)
def test_they_are_equal_across_formats(maker: type[FormatConformance], tmp_path: Path) -> None:
    found = digest(maker().make(tmp_path, state()))
    assert found.ids == by_hand(state())
    assert found.whole == whole_digest(dict(sorted(by_hand(state()).items())))
    assert found.without == {}


def test_views_are_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"t": base.t(), "row": base[1], "wide": base[:1].expand(2, 4)}
    torch.save(views, tmp_path / "views.pth")
    plain = {name: each.contiguous() for name, each in torch.load(tmp_path / "views.pth").items()}
    assert digest(tmp_path / "views.pth").ids == by_hand(plain)


def test_what_is_beside_the_weights_counts_with_everything_alone(tmp_path: Path) -> None:
    net, state = {"w": torch.ones(2)}, {"state": {0: {"m": torch.zeros(2)}}}
    torch.save({"model": net, "optimizer": state, "epoch": 1}, tmp_path / "run.pth")
    torch.save(net, tmp_path / "net.pth")
    assert digest(tmp_path / "run.pth").whole == digest(tmp_path / "net.pth").whole
    every = digest(tmp_path / "run.pth", everything=True).ids
    assert list(every) == ["model.w", "optimizer.state.0.m"]
    torch.save({"param_groups": [], **state}, tmp_path / "optimizer.pth")
    with pytest.raises(UsageError, match="optimizer"):
        digest(tmp_path / "optimizer.pth")
    assert list(digest(tmp_path / "optimizer.pth", everything=True).ids) == ["state.0.m"]


def test_two_paths_that_are_spelled_alike(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "alike.pth")
    with pytest.raises(CollisionError, match=r"a\.b"):
        digest(tmp_path / "alike.pth", everything=True)


def test_what_has_no_bytes_is_left_out_and_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "ghost": torch.ones(2, device="meta")}, tmp_path / "a.pth")
    found = digest(tmp_path / "a.pth")
    assert list(found.ids) == ["w"]
    assert "meta" in found.without["ghost"]


@pytest.mark.parametrize("maker", [made.TestTorchZip, made.TestNpz, made.TestCompressedNpz])
def test_damage_says_which_tensor(maker: type[FormatConformance], tmp_path: Path) -> None:
    """A digest of damaged bytes would be one of another tensor."""
    path = maker().make(tmp_path, {"a": torch.ones(2), "b": torch.randn(50_000)})
    data = bytearray(path.read_bytes())
    data[100_000] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CkptkitError, match=r"\bb\b"):
        digest(path)
    assert list(digest(path, matches=lambda name: name == "a").ids) == ["a"]


# Manifests

NAMES = (
    "plain", "с ключом", "back\\slash", "line\nbreak", "cr\rtab\t", "\x1b[31mred", "\u202eevil",
    "\ud800", "",
)  # fmt: skip


def printable(text: str) -> str:
    from ckptkit.cli.render import escape

    return escape(text)


def test_every_name_comes_back() -> None:
    ids = {name: sha256(name.encode("utf-8", "surrogatepass")) for name in NAMES}
    lines = manifest_lines(ids, printable)
    assert all(line.isprintable() for line in lines)
    assert parse_manifest("\n".join(lines).encode()) == ids


def test_the_lines_are_those_of_sha256sum(tmp_path: Path) -> None:
    """Of which the digest of the whole is that of the sorted list."""
    import shutil
    import subprocess

    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum here")
    names = ["plain", "back\\slash", "line\nbreak", "ключ"]
    for name in names:
        (tmp_path / name).write_text(name)
    done = subprocess.run(["sha256sum", *names], cwd=tmp_path, capture_output=True, check=True)
    ids = {name: sha256(name.encode()) for name in names}
    assert sorted(done.stdout.decode().splitlines()) == sorted(manifest_lines(ids, printable)[1:])
    assert whole_digest(ids) == sha256(b"".join(sorted(done.stdout.splitlines(keepends=True))))


GOOD = "\n".join(manifest_lines({"a": "0" * 64, "b": "1" * 64}, str)) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a manifest"),
        ("0" * 64 + "  a\n", "is not a manifest"),
        (GOOD.replace("/1 ", "/2 "), "is not a manifest"),
        (GOOD.rpartition("1" * 64)[0], "was truncated or edited"),
        (GOOD.replace("  b", "  c"), "was truncated or edited"),
        (GOOD.replace("  b", "  a"), "line 3: duplicate name"),
        (GOOD.replace("  b", " b"), "line 3 is not a digest"),
        (GOOD.replace("1" * 64, "g" * 64), "line 3 is not a digest"),
        (GOOD.replace("1" * 64 + "  b", "\\" + "1" * 64 + "  \\q"), "line 3: unknown escape"),
        (GOOD.replace("1" * 64 + "  b", "\\" + "1" * 64 + "  \\Uffffffff"),
         "line 3: unknown escape"),
        (GOOD + GOOD, "line 4: another manifest starts here"),
        (GOOD.replace("  b", "  \udcff"), "UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_manifest(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError, match=says):
        read_manifest(tmp_path / "list")


def test_line_ends_of_windows(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert read_manifest(tmp_path / "list") == {"a": "0" * 64, "b": "1" * 64}


def test_a_folder_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a folder"):
        read_manifest(tmp_path)
