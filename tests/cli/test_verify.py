"""ckptkit verify"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ckptkit


@pytest.fixture(autouse=True)
def files(here: None) -> None:
    """An intact file and a damaged one."""
    torch.save({"w": torch.arange(100), "\x1b[2J": torch.ones(2)}, "net.pth")
    numbers = torch.arange(100)
    damage("net.pth", numbers.numpy().tobytes(), numbers.flip(0).numpy().tobytes(), "damaged.pth")


def damage(path: str, old: bytes, new: bytes, to: str) -> None:
    data = Path(path).read_bytes()
    assert old in data
    Path(to).write_bytes(data.replace(old, new))


def test_one_line_if_all_is_well(ckptkit: Ckptkit) -> None:
    done = ckptkit("verify net.pth", code=0)
    assert done.stdout.startswith("net.pth: ok: ") and done.stdout.endswith(" checked\n")
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    assert ckptkit("verify --quiet net.pth").stdout == ""


def test_what_has_no_checksums(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(1)}, "old.pth", _use_new_zipfile_serialization=False)
    said = "ok: 1 tensor; torch-legacy has no checksums: only structure and lengths were checked\n"
    assert ckptkit("verify old.pth").stdout == f"old.pth: {said}"


def test_findings_with_their_tensors_and_what_to_type(ckptkit: Ckptkit) -> None:
    first, hint = ckptkit("verify -q damaged.pth", code=1).stdout.splitlines()
    assert first.startswith("damaged.pth: record 'net/data/0' is damaged: its CRC-32 is ")
    assert first.endswith(" (w)")
    words = "recover damaged.pth damaged-recovered.pth"
    said = "hint: download or copy the file again; to save the intact tensors: ckptkit "
    assert hint == said + words
    ckptkit(words, code=0)


@pytest.mark.parametrize("zip", [True, False])
def test_no_recovery_is_promised_of_a_file_without_an_intact_tensor(
    ckptkit: Ckptkit, zip: bool
) -> None:
    torch.save({"w": torch.full((9,), 7.0)}, "one.pth", _use_new_zipfile_serialization=zip)
    if zip:
        damage("one.pth", b"\0\0\xe0\x40" * 9, b"\0\0\xe1\x40" * 9, "one.pth")
    else:
        Path("one.pth").write_bytes(Path("one.pth").read_bytes()[:-1])
    for words in ("verify one.pth", "convert one.pth o.safetensors", "recover one.pth o.pth"):
        done = ckptkit(words)
        assert done.exit_code in (1, 3)
        assert "again" in done.output and "ckptkit recover" not in done.output


def test_several_files_and_the_worst_exit_code(ckptkit: Ckptkit) -> None:
    ckptkit("verify net.pth damaged.pth", code=1)
    done = ckptkit("verify net.pth damaged.pth nowhere.pth net.pth", code=3)
    said = [line for line in done.stdout.splitlines() if not line.startswith("hint")]
    assert [line.partition(": ")[0] for line in said] == ["net.pth", "damaged.pth", "net.pth"]
    assert "nowhere.pth: does not exist" in done.stderr
    assert ckptkit("verify nowhere.pth", code=3).stdout == ""


def test_json(ckptkit: Ckptkit) -> None:
    found = json.loads(ckptkit("verify --json net.pth damaged.pth nowhere.pth", code=3).stdout)
    assert found["schema"] == "ckptkit.verify/1"
    fine, bad, missing = found["files"]
    assert fine["records"] > 3 and fine["nbytes"] > 800
    expected = {"file": "net.pth", "format": "torch-zip", "ok": True, "tensor_count": 2}
    assert fine | expected | {"findings": [], "notes": []} == fine
    assert bad["ok"] is False
    assert [(each["part"], each["names"]) for each in bad["findings"]] == [(None, ["w"])]
    assert missing["error"] == {
        "code": "missing-file", "message": "does not exist", "hint": None, "command": None,
    }  # fmt: skip
    assert json.loads(ckptkit("verify --json damaged.pth").stdout)["files"] == [bad]


def test_many_findings_are_cut_in_text_alone(ckptkit: Ckptkit) -> None:
    torch.save({f"w{n}": torch.full((40,), 7.0) for n in range(30)}, "many.pth")
    damage("many.pth", b"\0\0\xe0\x40" * 40, b"\0\0\xe1\x40" * 40, "many.pth")
    lines = ckptkit("verify many.pth").stdout.splitlines()
    assert lines[0] == "many.pth: 30 findings" and len(lines) == 23
    assert lines[-2] == "  and 10 more (--json lists them)"
    (file,) = json.loads(ckptkit("verify --json many.pth").stdout)["files"]
    assert len(file["findings"]) == 30


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("net.pth --manifest net.manifest", 0, "net.pth: ok"),
        ("less.pth --manifest net.manifest", 1,
         "less.pth: missing: the tensor is only in the manifest (\\x1b[2J)\n"),
        ("less.pth --manifest net.manifest --keys w", 0, "less.pth: ok"),
        ("net.pth net.pth --manifest net.manifest", 2, ""),
        ("net.pth --keys w", 2, ""),
        ("net.pth --key nothing --manifest net.manifest", 2, ""),
        ("nan.pth", 0, "nan.pth: ok"),
        ("--values nan.pth", 1, "nan.pth: 1 NaN and 0 infinite of 2 elements (w)\n"),
    ],
)  # fmt: skip
def test_a_manifest_and_values(words: str, code: int, said: str, ckptkit: Ckptkit) -> None:
    ckptkit("digest net.pth --output net.manifest", code=0)
    torch.save({"w": torch.arange(100)}, "less.pth")
    torch.save({"w": torch.tensor([1.0, float("nan")])}, "nan.pth")
    assert ckptkit(f"verify {words}", code=code).stdout.startswith(said)
