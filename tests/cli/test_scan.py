"""ckptkit scan: words, exit codes, JSON, SARIF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit
from tests.conftest import Run
from tests.formats.containers.zips import Member
from tests.scanning.hostile_pickles import EVIL, PLAIN, archive, call, name, pickle2, pickle4, text

NAMED = "\x1b]0;x\x07\u202e\n[OK] safe"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    path = tmp_path / "evil.pth"
    path.write_bytes(archive(EVIL))
    return path


@pytest.fixture
def fine(tmp_path: Path) -> Path:
    path = tmp_path / "fine.pth"
    torch.save({"a": torch.ones(2)}, path)
    return path


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    path = tmp_path / "classes.pth"
    path.write_bytes(archive(pickle2(name("mine.nets.Net") + b")\x81")))
    return path


@pytest.fixture
def harmless(tmp_path: Path) -> Path:
    path = tmp_path / "harmless.pth"
    path.write_bytes(archive(pickle2(call("pathlib.PosixPath", text("a")))))
    return path


def test_a_file_that_would_run_code(ckptkit: Ckptkit, evil: Path) -> None:
    result = ckptkit("scan", evil)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{evil}: would run code",
        "  archive/data.pkl: calls os.system('touch canary'): REDUCE at byte 32",
    ]


def test_a_file_that_is_safe(ckptkit: Ckptkit, fine: Path) -> None:
    result = ckptkit("scan", fine)
    assert (result.exit_code, result.stdout) == (0, f"{fine}: safe for weights_only\n")


def test_a_harmless_file_is_a_finding_if_asked_for(ckptkit: Ckptkit, harmless: Path) -> None:
    result = ckptkit("scan", harmless)
    assert result.exit_code == 0 and "rejects pathlib.PosixPath" in result.stdout
    assert ckptkit("scan", "--strict", harmless).exit_code == 1


def test_other_classes_are_a_finding_unless_all_are_trusted(
    ckptkit: Ckptkit, classes: Path, tmp_path: Path
) -> None:
    result = ckptkit("scan", classes)
    assert result.exit_code == 1
    assert "needs mine.nets.Net; review the code of these classes" in result.stdout
    assert ckptkit("scan", classes, "--trust", "other").exit_code == 1
    assert ckptkit("scan", classes, "--trust", "mine.nets").exit_code == 0
    held = tmp_path / "held.pth"
    state = b"}" + text("run") + name("theirs.run") + b"sb"
    held.write_bytes(archive(pickle2(name("mine.nets.Net") + b")\x81" + state)))
    result = ckptkit("scan", held, "--trust", "mine.nets")
    assert result.exit_code == 1
    assert "contains theirs.run; code that receives these values may call them" in result.stdout
    done = ckptkit("scan", held, "--trust", "mine.nets", "--trust", "theirs.run")
    assert done.exit_code == 0


def test_folders_are_summed_up_and_quiet_prints_findings_alone(
    ckptkit: Ckptkit, evil: Path, fine: Path
) -> None:
    result = ckptkit("scan", evil.parent)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "2 files: 1 would run code, 1 safe for weights_only"
    quiet = ckptkit("scan", "-q", evil.parent).stdout
    assert "evil.pth" in quiet and "fine.pth" not in quiet and "2 files" not in quiet


def test_files_that_cannot_be_read(ckptkit: Ckptkit, fine: Path, evil: Path) -> None:
    missing = fine.parent / "missing.pth"
    result = ckptkit("scan", fine, missing)
    assert (
        result.exit_code == 3
        and "does not exist" in result.stderr
        and "1 could not be read" in result.stdout
    )
    assert ckptkit("scan", missing, evil).exit_code == 1


def test_trust(ckptkit: Ckptkit, tmp_path: Path) -> None:
    path = tmp_path / "args.bin"
    path.write_bytes(archive(pickle2(call("mine.kinds.Kind", text("a")))))
    assert ckptkit("scan", path).exit_code == 1
    assert ckptkit("scan", "--trust", "min", path).exit_code == 1
    for trusted in ("mine.*", "mine", "mine.kinds"):
        assert ckptkit("scan", "--trust", trusted, path).exit_code == 0


def test_json(ckptkit: Ckptkit, evil: Path, fine: Path) -> None:
    result = ckptkit("scan", "--json", evil, fine, evil.parent / "missing")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["schema"] == "ckptkit.scan/1" and [
        each.get("verdict") for each in found["files"]
    ] == ["code", "safe", None]
    assert found["files"][2]["error"]["code"] == "missing-file"
    (pickle,) = found["files"][0]["pickles"]
    assert pickle["runs"] == [
        {
            "name": "os.system",
            "opcode": "REDUCE",
            "kind": "harmful",
            "arguments": "('touch canary')",
            "offset": 32,
            "count": 1,
        }
    ]
    assert pickle["file_offset"] == archive(EVIL).index(EVIL)
    assert pickle["weights_only"]["loads"] is False and pickle["globals"] == ["os.system"]
    assert found["files"][1]["pickles"][0]["weights_only"] == {"loads": True, "refused": None}


def test_sarif(ckptkit: Ckptkit, evil: Path, fine: Path, classes: Path) -> None:
    result = ckptkit("scan", "--sarif", "--strict", evil, fine, classes, evil.parent / "missing")
    assert result.exit_code == 1
    log = json.loads(result.stdout)
    check_sarif(log)
    (run,) = log["runs"]
    assert [(each["ruleId"], each["level"]) for each in run["results"]] == [
        ("would-run-code", "error"), ("needs-classes", "warning"),
    ]  # fmt: skip
    place = run["results"][0]["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == evil.as_uri()
    assert place["physicalLocation"]["region"]["byteOffset"] == archive(EVIL).index(EVIL) + 32
    assert run["invocations"][0]["executionSuccessful"] is False


def check_sarif(log: dict[str, Any]) -> None:
    """Check the parts of SARIF 2.1.0 that are used here against its schema."""
    assert set(log) == {"$schema", "version", "runs"} and log["version"] == "2.1.0"
    for run in log["runs"]:
        assert set(run) <= {"tool", "columnKind", "results", "invocations"}
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        driver = run["tool"]["driver"]
        assert set(driver) <= {"name", "version", "rules", "informationUri"} and driver["name"]
        assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
        for rule in driver["rules"]:
            assert set(rule) <= {
                "id",
                "shortDescription",
                "fullDescription",
                "defaultConfiguration",
            }
            assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"]
            assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
        for result in run["results"]:
            assert set(result) <= {"ruleId", "ruleIndex", "level", "message", "locations"}
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            assert (
                result["level"] in ("none", "note", "warning", "error")
                and result["message"]["text"]
            )
            for place in result["locations"]:
                assert set(place) <= {"physicalLocation", "logicalLocations"}
                physical = place["physicalLocation"]
                uri = physical["artifactLocation"]["uri"]
                assert uri.isascii() and " " not in uri
                region = physical.get("region", {"byteOffset": 0, "byteLength": 0})
                assert region["byteOffset"] >= 0 and region["byteLength"] >= 0
        for invocation in run["invocations"]:
            assert isinstance(invocation["executionSuccessful"], bool)
            for notification in invocation["toolExecutionNotifications"]:
                assert notification["message"]["text"] and notification["level"] in (
                    "none",
                    "note",
                    "warning",
                    "error",
                )


def test_CL_01_CL_02_nothing_of_a_file_reaches_the_terminal(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    odd = pickle4(text(NAMED) + text(NAMED) + b"\x93" + text(NAMED) + b"\x85R")
    path = tmp_path / "odd.pth"
    path.write_bytes(archive(PLAIN, Member(f"archive/{NAMED}.pkl", odd)))
    result = ckptkit("scan", path)
    assert result.exit_code == 1
    assert result.stdout.replace("\n", "").isprintable()
    assert not any(line.startswith("[OK]") for line in result.stdout.splitlines())
    for option in ("--json", "--sarif"):
        printed = ckptkit("scan", option, path).stdout
        assert printed.isascii() and json.loads(printed)


def test_CL_05_names_like_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "--help.pth").write_bytes(archive(EVIL))
    assert run("scan", "--", "--help.pth", cwd=tmp_path).code == 1


def test_CL_06_CL_07_torch_is_not_imported_and_modules_beside_the_file_are_not(
    run: Run, evil: Path, tmp_path: Path
) -> None:
    for module in ("torch", "numpy"):
        (tmp_path / f"{module}.py").write_text("open('canary', 'w')\n")
    assert run("scan", evil, cwd=tmp_path).code == 1
    assert not (tmp_path / "canary").exists()


def test_in_processes_of_its_own(alone: Run, evil: Path, fine: Path) -> None:
    for number in range(20):
        (evil.parent / f"more{number:02}.pth").write_bytes(fine.read_bytes())
    done = alone("scan", evil.parent, "--workers", "2")
    assert (
        done.code == 1
        and done.stdout.splitlines()[-1] == "22 files: 1 would run code, 21 safe for weights_only"
    )


def test_two_formats_at_once(ckptkit: Ckptkit, fine: Path) -> None:
    assert ckptkit("scan", "--json", "--sarif", fine).exit_code == 2


def test_no_files_are_no_pass(run: Run, tmp_path: Path) -> None:
    done = run("scan", tmp_path)
    assert (done.code, "no files to scan" in done.stderr) == (3, True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"ctorch._utils\n_rebuild_nested_tensor\n)R", "2.15 and later rejects"),
        (b"ctorch\nbcomplex32\n", "before 2.15 rejects"),
        (b"ctorch\nfloat32\n", ""),
    ],
)
def test_versions_that_differ_are_named(
    tmp_path: Path, ckptkit: Ckptkit, code: bytes, said: str
) -> None:
    """By the lists of torch 2.13, 2.14 and 2.15."""
    (tmp_path / "a.pth").write_bytes(archive(b"\x80\x02" + code + b"."))
    done = ckptkit("scan", tmp_path / "a.pth")
    assert "safe for weights_only" in done.stdout
    assert (said in done.stdout) if said else "refuses" not in done.stdout


def test_of_a_folder_findings_and_a_summary_are_printed(
    ckptkit: Ckptkit, evil: Path, fine: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for path in (evil, fine):
        (folder / path.name).write_bytes(path.read_bytes())
    found = ckptkit("scan", folder)
    assert found.exit_code == 1
    assert evil.name in found.stdout and fine.name not in found.stdout
    assert found.stdout.splitlines()[-1].startswith("2 files: ")
    (folder / evil.name).unlink()
    clean = ckptkit("scan", folder)
    assert (clean.exit_code, clean.stdout.splitlines()) == (0, ["1 file: 1 safe for weights_only"])
