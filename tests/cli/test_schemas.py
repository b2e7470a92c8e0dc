"""The JSON schemas of the manual: every command's --json against them, and the page about them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from tests import schemas
from tests.cli.conftest import Ckptkit
from tests.matrix import NAMES, Fixture

SCHEMAS = schemas.schemas()
VALIDATORS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
CORPUS = os.environ.get("CKPTKIT_CORPUS")
LOOKS = (
    "inspect", "inspect --stored", "verify", "digest", "scan", "stats --all", "stats --fold", "doctor",
)  # fmt: skip


def check(ckptkit: Ckptkit, words: str, *args: object) -> Any:
    """Run a command with --json, and check what it prints against the schema that it names."""
    done = ckptkit(*words.split(), *args, "--json")
    found = json.loads(done.stdout)
    name = found["schema"].split(".")[1].split("/")[0]
    assert SCHEMAS[name]["title"] == found["schema"]
    wrong = [f"{error.json_path}: {error.message}" for error in VALIDATORS[name].iter_errors(found)]
    assert not wrong, (words, args, wrong[:5])
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert list(objects(SCHEMAS[name]))
    for each in objects(SCHEMAS[name]):
        assert "additionalProperties" in each


def objects(schema: Any) -> Iterator[Any]:
    """Yield every part of a schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for each in schema.values():
            yield from objects(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from objects(each)


def test_the_page_is_made_from_the_schemas() -> None:
    """`python -m tests.schemas` refreshes it."""
    page = schemas.PAGE.read_text(encoding="utf-8")
    assert page.partition(schemas.START)[2] == "\n" + schemas.tables()


@pytest.mark.parametrize("command", LOOKS)
def test_of_every_fixture(ckptkit: Ckptkit, command: str) -> None:
    for name in NAMES:
        check(ckptkit, command, Fixture(name).path)


@pytest.mark.skipif(not CORPUS, reason="CKPTKIT_CORPUS names no folder")
@pytest.mark.parametrize("command", ["inspect", "scan", "doctor"])
def test_of_the_corpus(ckptkit: Ckptkit, command: str) -> None:
    assert CORPUS is not None
    small = [each for each in sorted(Path(CORPUS).iterdir()) if each.is_file()]
    for path in small:
        if path.stat().st_size < 2_000_000 and path.suffix not in (".md", ".tsv"):
            check(ckptkit, command, path)


def test_inspect_with_digests(ckptkit: Ckptkit, run_pth: Path) -> None:
    found = check(ckptkit, "inspect --digest", run_pth, "absent.pth")
    assert found["files"][0]["tensors"][0]["sha256"]
    assert found["files"][1]["error"]["code"] == "missing-file"


def test_what_commands_write(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert check(ckptkit, "convert", run_pth, out)["output"] == str(out)
    assert check(ckptkit, "strip-module --dry-run", run_pth, tmp_path / "b.pth")["dry_run"]
    report = check(ckptkit, "report -o", tmp_path / "page.html", run_pth)
    assert report["inputs"] == [str(run_pth)]
    jobs = check(ckptkit, "batch remap --to cpu --into", tmp_path / "into", run_pth)["jobs"]
    assert [job["state"] for job in jobs] == ["done"]
    assert check(ckptkit, "doctor --fix", tmp_path / "fixed.pth", run_pth)["fixed"]["output"]


def test_recover(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.ones(100) for n in range(40)}, tmp_path / "cut.pth")
    data = (tmp_path / "cut.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(data[: len(data) // 2])
    assert check(ckptkit, "recover", tmp_path / "cut.pth", tmp_path / "out.pth")["lost"]


def test_values_and_comparisons(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    check(ckptkit, "show", run_pth, "module.0.weight", "--with", run_pth)
    check(ckptkit, "stats --depth 1", run_pth)
    ckptkit("digest", "--manifest", tmp_path / "net.manifest", run_pth)
    assert check(ckptkit, "digest --check", tmp_path / "net.manifest", run_pth)["equal"]
    other = {"module.0.weight": torch.ones(4, 3), "0.bias": torch.ones(3)}
    torch.save(other, tmp_path / "b.pth")
    assert not check(ckptkit, "diff --values", run_pth, tmp_path / "b.pth")["equal"]
    check(ckptkit, "check --expect", "module.0.weight=[3,4]", run_pth)


@pytest.mark.parametrize("words", ["formats", "env"])
def test_what_there_is(ckptkit: Ckptkit, words: str) -> None:
    check(ckptkit, words)


@pytest.mark.parametrize(
    ("words", "code"),
    [("inspect absent.pth", "missing-file"), ("diff a.pth", "usage"), ("stats", "usage")],
)
def test_a_command_that_fails_says_so_as_json(ckptkit: Ckptkit, words: str, code: str) -> None:
    found = check(ckptkit, words)
    assert (found["schema"], found["error"]["code"]) == ("ckptkit.error/1", code)


def test_the_help_prints_a_schema(ckptkit: Ckptkit) -> None:
    assert json.loads(ckptkit("help", "--schema", "inspect").stdout) == SCHEMAS["inspect"]
    assert ckptkit("help", "--schema", "inspct").exit_code == 2
