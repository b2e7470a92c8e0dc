"""ckptkit verify"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ckptkit


@pytest.fixture
def net(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(100), "\x1b[2J": torch.ones(2)}, tmp_path / "net.pth")
    return tmp_path / "net.pth"


@pytest.fixture
def damaged(net: Path) -> Path:
    data = net.read_bytes()
    path = net.with_name("damaged.pth")
    path.write_bytes(
        data.replace(
            torch.arange(100).numpy().tobytes(), torch.arange(100).flip(0).numpy().tobytes()
        )
    )
    assert path.read_bytes() != data
    return path


def test_one_line_if_all_is_well(ckptkit: Ckptkit, net: Path) -> None:
    done = ckptkit("verify", net)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{net}: ok: ")
    assert done.stdout.rstrip().endswith(" checked")
    assert done.stdout.count("\n") == 1
    assert ckptkit("verify", "--quiet", net).stdout == ""


def test_what_has_no_checksums(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    said = "ok: 1 tensor; torch-legacy has no checksums: only structure and lengths were checked\n"
    assert ckptkit("verify", tmp_path / "old.pth").stdout == f"{tmp_path / 'old.pth'}: {said}"


def test_findings_with_their_tensors_and_what_to_type(ckptkit: Ckptkit, damaged: Path) -> None:
    done = ckptkit("verify", "-q", damaged)
    assert done.exit_code == 1
    first, hint = done.stdout.splitlines()
    assert first.startswith(f"{damaged}: record 'net/data/0' is damaged: its CRC-32 is ")
    assert first.endswith(" (w)")
    command = f"ckptkit recover {damaged} {damaged.with_name('damaged-recovered.pth')}"
    assert hint == f"hint: download or copy the file again; to save the intact tensors: {command}"
    assert ckptkit(*command.split()[1:]).exit_code == 0


@pytest.mark.parametrize("zip", [True, False])
def test_no_recovery_is_promised_of_a_file_without_an_intact_tensor(
    ckptkit: Ckptkit, tmp_path: Path, zip: bool
) -> None:
    path, out = tmp_path / "one.pth", tmp_path / "out.safetensors"
    torch.save({"w": torch.full((9,), 7.0)}, path, _use_new_zipfile_serialization=zip)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\0\0\xe0\x40" * 9, b"\0\0\xe1\x40" * 9) if zip else data[:-1])
    for words in (["verify", path], ["convert", path, out], ["recover", path, out]):
        done = ckptkit(*words)
        assert done.exit_code in (1, 3)
        assert "again" in done.output and "ckptkit recover" not in done.output


def test_names_are_escaped(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"\x1b[2J": torch.full((9,), 7.0)}, tmp_path / "a.pth")
    data = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(data.replace(b"\0\0\xe0\x40" * 9, b"\0\0\xe1\x40" * 9))
    done = ckptkit("verify", tmp_path / "a.pth")
    assert "(\\x1b[2J)" in done.stdout
    assert "\x1b" not in done.stdout


def test_several_files_and_the_worst_exit_code(
    ckptkit: Ckptkit, net: Path, damaged: Path, tmp_path: Path
) -> None:
    assert ckptkit("verify", net, damaged).exit_code == 1
    done = ckptkit("verify", net, damaged, tmp_path / "nowhere.pth", net)
    assert done.exit_code == 3
    assert [line.partition(": ")[0] for line in done.stdout.splitlines() if not line.startswith("hint")] == [
        str(net), str(damaged), str(net),
    ]  # fmt: skip
    assert "nowhere.pth: does not exist" in done.stderr


def test_one_file_that_cannot_be_read(ckptkit: Ckptkit, tmp_path: Path) -> None:
    done = ckptkit("verify", tmp_path / "nowhere.pth")
    assert (done.exit_code, done.stdout) == (3, "")


def test_json(ckptkit: Ckptkit, net: Path, damaged: Path, tmp_path: Path) -> None:
    done = ckptkit("verify", "--json", net, damaged, tmp_path / "nowhere.pth")
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert found["schema"] == "ckptkit.verify/1"
    fine, bad, missing = found["files"]
    assert (fine["file"], fine["format"], fine["ok"], fine["tensor_count"]) == (
        str(net),
        "torch-zip",
        True,
        2,
    )
    assert fine["records"] > 3
    assert fine["nbytes"] > 800
    assert (fine["findings"], fine["notes"]) == ([], [])
    assert bad["ok"] is False
    assert [(each["part"], each["names"]) for each in bad["findings"]] == [(None, ["w"])]
    assert missing["error"] == {
        "code": "missing-file", "message": "does not exist", "hint": None, "command": None,
    }  # fmt: skip
    assert json.loads(ckptkit("verify", "--json", damaged).stdout)["files"] == [bad]


def test_many_findings_are_cut_in_text_alone(ckptkit: Ckptkit, tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    torch.save({f"w{n}": torch.full((40,), 7.0) for n in range(30)}, path)
    path.write_bytes(path.read_bytes().replace(b"\0\0\xe0\x40" * 40, b"\0\0\xe1\x40" * 40))
    lines = ckptkit("verify", path).stdout.splitlines()
    assert lines[0] == f"{path}: 30 findings"
    assert lines[-2] == "  and 10 more (--json lists them)"
    assert len(lines) == 23
    assert len(json.loads(ckptkit("verify", "--json", path).stdout)["files"][0]["findings"]) == 30


def test_a_manifest(ckptkit: Ckptkit, net: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.manifest"
    assert ckptkit("digest", net, "--output", out).exit_code == 0
    assert ckptkit("verify", net, "--manifest", out).exit_code == 0
    torch.save({"w": torch.arange(100)}, tmp_path / "less.pth")
    done = ckptkit("verify", tmp_path / "less.pth", "--manifest", out)
    assert (done.exit_code, done.stdout) == (
        1,
        f"{tmp_path / 'less.pth'}: missing: the tensor is only in the manifest (\\x1b[2J)\n",
    )
    assert ckptkit("verify", tmp_path / "less.pth", "--manifest", out, "--keys", "w").exit_code == 0
    assert ckptkit("verify", net, net, "--manifest", out).exit_code == 2
    assert ckptkit("verify", net, "--keys", "w").exit_code == 2


def test_values(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "a.pth")
    assert ckptkit("verify", tmp_path / "a.pth").exit_code == 0
    done = ckptkit("verify", "--values", tmp_path / "a.pth")
    assert (done.exit_code, done.stdout) == (
        1,
        f"{tmp_path / 'a.pth'}: 1 NaN and 0 infinite of 2 elements (w)\n",
    )


def test_a_key_that_is_not_there_is_a_usage_error(
    ckptkit: Ckptkit, net: Path, tmp_path: Path
) -> None:
    assert ckptkit("digest", net, "--output", tmp_path / "m").exit_code == 0
    assert ckptkit("verify", net, "--key", "nothing", "--manifest", tmp_path / "m").exit_code == 2
