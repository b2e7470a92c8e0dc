"""ckptkit scan: words, exit codes, JSON, SARIF."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from tests.cli.conftest import Ckptkit
from tests.conftest import Run
from tests.formats.containers.zips import Member
from tests.scanning.hostile_pickles import EVIL, PLAIN, archive, call, name, pickle2, pickle4, text

NAMED = "\x1b]0;x\x07\u202e\n[OK] safe"
NET = name("mine.nets.Net") + b")\x81"


def safe() -> bytes:
    torch.save({"a": torch.ones(2)}, made := io.BytesIO())
    return made.getvalue()


# Pickles in archives, and a file that torch made.
FILES = {
    "evil": archive(EVIL),
    "fine": safe(),
    "classes": archive(pickle2(NET)),
    "held": archive(pickle2(NET + b"}" + text("run") + name("theirs.run") + b"sb")),
    "harmless": archive(pickle2(call("pathlib.PosixPath", text("a")))),
    "kind": archive(pickle2(call("mine.kinds.Kind", text("a")))),
}


def write(*names: str, folder: str = ".") -> None:
    Path(folder).mkdir(exist_ok=True)
    for each in names:
        Path(folder, f"{each}.pth").write_bytes(FILES[each])


@pytest.mark.parametrize(
    ("names", "words", "code", "said"),
    [
        ("evil", "evil.pth", 1, "evil.pth: would run code\n  archive/data.pkl: "
         "calls os.system('touch canary'): REDUCE at byte 32\n"),
        ("fine", "fine.pth", 0, "fine.pth: safe for weights_only\n"),
        ("harmless", "harmless.pth", 0, "rejects pathlib.PosixPath"),
        ("harmless", "harmless.pth --strict", 1, "rejects pathlib.PosixPath"),
        ("classes", "classes.pth", 1, "needs mine.nets.Net; review the code of these classes"),
        ("classes", "classes.pth --trust other", 1, ""),
        ("classes", "classes.pth --trust mine.nets", 0, ""),
        ("held", "held.pth --trust mine.nets", 1,
         "contains theirs.run; code that receives these values may call them"),
        ("held", "held.pth --trust mine.nets --trust theirs.run", 0, ""),
        ("kind", "kind.pth", 1, ""),
        ("kind", "kind.pth --trust min", 1, ""),
        ("kind", "kind.pth --trust mine.*", 0, ""),
        ("kind", "kind.pth --trust mine", 0, ""),
        ("kind", "kind.pth --trust mine.kinds", 0, ""),
        ("evil fine", ".", 1, "\n2 files: 1 would run code, 1 safe for weights_only\n"),
        ("fine", "fine.pth missing.pth", 3, "1 could not be read"),
        ("fine evil", "missing.pth evil.pth", 1, ""),
        ("fine", "--json --sarif fine.pth", 2, ""),
        ("fine", ".", 0, "1 file: 1 safe for weights_only\n"),
    ],
)  # fmt: skip
def test_findings(names: str, words: str, code: int, said: str, ckptkit: Ckptkit) -> None:
    write(*names.split())
    done = ckptkit(f"scan {words}", code=code)
    assert said in done.stdout
    assert "missing.pth" not in words or "missing.pth: does not exist" in done.stderr
    if said.endswith("\n") and said[0] != "\n":
        assert done.stdout == said


def test_of_a_folder_findings_are_printed_and_quiet_prints_nothing_else(ckptkit: Ckptkit) -> None:
    write("evil", "fine")
    for words in ("", "-q"):
        found = ckptkit(f"scan . {words}", code=1).stdout
        assert "evil.pth" in found and "fine.pth" not in found
        assert ("2 files" in found) == (words == "")


def test_no_files_are_no_pass(ckptkit: Ckptkit) -> None:
    assert "no files to scan" in ckptkit("scan .", code=3).stderr


def test_json(ckptkit: Ckptkit) -> None:
    write("evil", "fine")
    found = json.loads(ckptkit("scan --json evil.pth fine.pth missing", code=1).stdout)
    evil, fine, missing = found["files"]
    assert found["schema"] == "ckptkit.scan/1"
    assert [each.get("verdict") for each in found["files"]] == ["code", "safe", None]
    assert missing["error"]["code"] == "missing-file"
    (pickle,) = evil["pickles"]
    assert pickle["runs"] == [{
        "name": "os.system", "opcode": "REDUCE", "kind": "harmful",
        "arguments": "('touch canary')", "offset": 32, "count": 1,
    }]  # fmt: skip
    assert pickle["file_offset"] == FILES["evil"].index(EVIL)
    assert pickle["weights_only"]["loads"] is False and pickle["globals"] == ["os.system"]
    assert fine["pickles"][0]["weights_only"] == {"loads": True, "refused": None}


def test_sarif(ckptkit: Ckptkit, tmp_path: Path) -> None:
    write("evil", "fine", "classes")
    words = ("scan --sarif --strict fine.pth classes.pth missing", tmp_path / "evil.pth")
    log = json.loads(ckptkit(*words, code=1).stdout)
    Draft202012Validator(SARIF).validate(log)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len({*rules}) == len(rules)
    assert all(rules[each["ruleIndex"]] == each["ruleId"] for each in run["results"])
    found = {each["ruleId"]: each for each in run["results"]}
    assert {id: each["level"] for id, each in found.items()} == {
        "would-run-code": "error", "needs-classes": "warning",
    }  # fmt: skip
    ours, theirs = (
        each["locations"][0]["physicalLocation"]
        for each in (found["needs-classes"], found["would-run-code"])
    )
    assert ours["artifactLocation"]["uri"] == "classes.pth"
    assert theirs["artifactLocation"]["uri"] == (tmp_path / "evil.pth").as_uri()
    assert theirs["region"]["byteOffset"] == FILES["evil"].index(EVIL) + 32
    assert run["invocations"][0]["executionSuccessful"] is False


def closed(*optional: str, **fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has these fields and no others."""
    needed = [each for each in fields if each not in optional]
    return {"properties": fields, "required": needed, "additionalProperties": False}


def listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


WORDS = {"type": "string", "minLength": 1}
MESSAGE = closed(text=WORDS)
LEVEL = {"enum": ["none", "note", "warning", "error"]}
AT = {"type": "integer", "minimum": 0}
RULE = closed(id=WORDS, shortDescription=MESSAGE, fullDescription=MESSAGE, defaultConfiguration=closed(level=LEVEL))  # fmt: skip
PLACE = closed(
    "logicalLocations", logicalLocations={"type": "array"},
    physicalLocation=closed(
        "region", artifactLocation=closed(uri={"pattern": r"^[!-~]+$"}),
        region=closed(byteOffset=AT, byteLength=AT),
    ),
)  # fmt: skip
RESULT = closed(ruleId=WORDS, ruleIndex=AT, level=LEVEL, message=MESSAGE, locations=listed(PLACE))
# The parts of SARIF 2.1.0 that are used here.
SARIF = closed(**{
    "$schema": WORDS, "version": {"const": "2.1.0"},
    "runs": listed(closed(
        tool=closed(driver=closed(name=WORDS, version=WORDS, rules=listed(RULE))),
        columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]}, results=listed(RESULT),
        invocations=listed(closed(
            executionSuccessful={"type": "boolean"},
            toolExecutionNotifications=listed(closed(level=LEVEL, message=MESSAGE)),
        )),
    )),
})  # fmt: skip


def test_CL_01_CL_02_nothing_of_a_file_reaches_the_terminal(ckptkit: Ckptkit) -> None:
    odd = pickle4(text(NAMED) + text(NAMED) + b"\x93" + text(NAMED) + b"\x85R")
    Path("odd.pth").write_bytes(archive(PLAIN, Member(f"archive/{NAMED}.pkl", odd)))
    said = ckptkit("scan odd.pth", code=1).stdout
    assert said.replace("\n", "").isprintable()
    assert not any(line.startswith("[OK]") for line in said.splitlines())
    for option in ("--json", "--sarif"):
        printed = ckptkit("scan odd.pth", option).stdout
        assert printed.isascii() and json.loads(printed)


def test_CL_05_names_like_options(ckptkit: Ckptkit) -> None:
    Path("--help.pth").write_bytes(FILES["evil"])
    ckptkit("scan -- --help.pth", code=1)


def test_CL_06_CL_07_torch_is_not_imported_and_modules_beside_the_file_are_not(
    ckptkit: Ckptkit,
) -> None:
    write("evil")
    for module in ("torch", "numpy"):
        Path(f"{module}.py").write_text("open('canary', 'w')\n")
    ckptkit("scan evil.pth", code=1)
    assert not Path("canary").exists()


def test_in_processes_of_its_own(alone: Run) -> None:
    write("evil", "fine")
    for number in range(20):
        Path(f"more{number:02}.pth").write_bytes(FILES["fine"])
    done = alone("scan", ".", "--workers", "2")
    assert done.code == 1
    assert done.stdout.splitlines()[-1] == "22 files: 1 would run code, 21 safe for weights_only"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"ctorch._utils\n_rebuild_nested_tensor\n)R", "2.15 and later rejects"),
        (b"ctorch\nbcomplex32\n", "before 2.15 rejects"),
        (b"ctorch\nfloat32\n", ""),
    ],
)
def test_versions_that_differ_are_named(ckptkit: Ckptkit, code: bytes, said: str) -> None:
    """By the lists of torch 2.13, 2.14 and 2.15."""
    Path("a.pth").write_bytes(archive(b"\x80\x02" + code + b"."))
    found = ckptkit("scan a.pth").stdout
    assert "safe for weights_only" in found and said in found
    assert said or "refuses" not in found
