"""The JSON schemas of the manual: every command's --json against them, and the page about them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from torch import nn

from ckptkit.cli import main
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


def test_the_manual_names_schemas_of_today() -> None:
    titles = {schema["title"] for schema in SCHEMAS.values()}
    for page in schemas.PAGE.parent.glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("# ckptkit.digest/1 ", "")  # of a manifest
        assert {*re.findall(r"ckptkit\.[a-z]+/[0-9]+", text)} <= titles, page.name


@pytest.mark.parametrize("command", LOOKS)
def test_of_every_fixture(ckptkit: Ckptkit, command: str) -> None:
    for name in NAMES if command == "inspect" else NAMES[LOOKS.index(command) :: 3]:
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


# Every command that has --json, as it is typed in the folder `made`.
COMMANDS = {
    "add-module": ["plain.pth out.pth", "plain.pth --in-place"],
    "average": ["run.pth run.pth out.pth", "run.pth run.pth run.pth out.pth --dry-run"],
    "batch add-module": ["--into into plain.pth"],
    "batch convert": [
        "--into into --format safetensors plain.pth cut.pth",
        "--into into --dry-run plain.pth",
        "--into into --rule '0.{x} -> w.{x}' --format safetensors plain.pth",
    ],
    "batch ema": ["--into into ema.pth run.pth"],
    "batch extract": ["--key model --into into run.pth"],
    "batch resize": ["plain.pth --into into --keys *weight --rows 3"],
    "batch recover": ["--into into cut.pth"],
    "batch remap": ["--to cpu --into into run.pth plain.pth"],
    "batch rename": ["--sub 0=a --into into plain.pth"],
    "batch run": ["recipe.yaml --into into run.pth"],
    "batch strip-module": ["--into into run.pth"],
    "batch wrap": ["--key model --into into plain.pth"],
    "check": [
        "run.pth --expect 'module.0.weight shape=[3,4]'", "model",
        "plain.pth --like run.pth", "run.pth --expect '* dtype=int8'",
    ],
    "convert": [
        "run.pth out.safetensors", "run.pth out.pth --cast bfloat16 --to cpu --dry-run",
        "plain.pth out.pth --rule '0.weight [a b] -> first.weight [b a]'",
        "plain.pth out.pth --rule '0.weight [a b] -> x.weight [a b]' --dry-run",
        "matrix.pth out.safetensors --quantize mxfp4", "quantized out.pth --dequantize",
        "plain.pth net --shard-size 1kB", "model model2", "run.pth --in-place --to cpu",
    ],
    "lora check": ["adapter.safetensors", "adapter.safetensors --base moved.pth --for vllm"],
    "lora convert": ["adapter.safetensors out --to peft"],
    "lora extract": ["moved.pth plain.pth out --rank 1"],
    "lora merge": ["plain.pth adapter.safetensors out.pth"],
    "lora resize": ["adapter.safetensors out.safetensors --rank 1"],
    "delta apply": ["plain.pth step out.pth", "plain.pth step --in-place"],
    "delta inspect": ["step", "step model"],
    "delta make": ["plain.pth moved.pth out"],
    "delta squash": ["step step2 out"],
    "delta verify": ["plain.pth step", "moved.pth step"],
    "diff": [
        "run.pth run.pth", "run.pth plain.pth", "run.pth plain.pth --values --all",
        "plain.pth moved.pth --values --all", "plain.pth half.pth --values",
        "plain.pth --model torch.nn:Linear --arg in_features=4 --arg out_features=3",
    ],
    "digest": [
        "run.pth", "run.pth absent.pth plain.pth", "--check net.manifest plain.pth",
        "--check net.manifest run.pth", "quantized --dequantize", "run.pth --all",
    ],
    "doctor": [
        "run.pth", "run.pth --fix out.pth", "cut.pth",
        "run.pth --model torch.nn:Linear --arg in_features=4 --arg out_features=3",
    ],
    "ema": ["ema.pth out.pth"],
    "env": [""],
    "extract": ["run.pth out.pth --key model"],
    "formats": [""],
    "inspect": [
        "run.pth", "run.pth absent.pth", "run.pth --digest --keys '*weight'", "quantized",
        "quantized --stored", "model",
    ],
    "join": ["plain.pth matrix.pth out.pth"],
    "resize": ["plain.pth out4.pth --keys *weight --rows 3"],
    "merge": ["run.pth run.pth out3.pth --method linear"],
    "recover": ["cut.pth out.pth"],
    "remap": ["run.pth out.pth --to cpu", "run.pth out.pth --device cpu=cuda:1"],
    "rename": ["plain.pth out.pth --sub 0=a"],
    "report": ["run.pth -o out.html", "run.pth plain.pth -o out.html"],
    "run": ["recipe.yaml run.pth out.pth", "rules.yaml plain.pth out.pth"],
    "scan": ["run.pth cut.pth absent.pth", "."],
    "show": [
        "plain.pth 0.weight", "plain.pth 0.weight '[0,:]'", "plain.pth 0.weight --with moved.pth",
        "plain.pth 1.num_batches_tracked",
    ],
    "stats": ["run.pth", "run.pth --fold", "run.pth --depth 1 --all", "quantized"],
    "strip-module": ["run.pth out.pth", "run.pth out.pth --dry-run"],
    "verify": ["run.pth", "run.pth cut.pth absent.pth plain.pth --values"],
    "wrap": ["plain.pth out.pth --key model"],
}  # fmt: skip
RULES = """
steps:
  - rules: ["0.weight [a b] -> x.weight [b a]"]
    keep: rest
"""
NEVER_FAIL = ("env", "formats")


def with_json(group: click.Group = main, *above: str) -> Iterator[str]:
    """Yield every command that has --json."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from with_json(command, *above, name)
        elif command and any(option.name == "as_json" for option in command.params):
            yield " ".join((*above, name))


@cache
def files() -> dict[str, bytes]:
    """Make the files of the folder in which the COMMANDS run."""
    with TemporaryDirectory() as folder:
        with chdir(folder):
            make()
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def make() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    plain = net.state_dict()
    torch.save(plain, "plain.pth")
    torch.save({name: value + 1 for name, value in plain.items()}, "moved.pth")
    torch.save({name: value.half() for name, value in plain.items()}, "half.pth")
    torch.save({"model": plain, "model_ema": plain}, "ema.pth")
    factors = {"lora_down.weight": torch.ones(1, 4), "lora_up.weight": torch.ones(3, 1)}
    save_file({f"lycoris_0.{name}": each for name, each in factors.items()}, "adapter.safetensors")
    matrix = {"model.layers.0.mlp.weight": torch.randn(64, 64)}
    torch.save(matrix, "matrix.pth")
    torch.save({f"w{n}": torch.ones(100) for n in range(40)}, "whole.pth")
    data = Path("whole.pth").read_bytes()
    Path("cut.pth").write_bytes(data[: len(data) // 2])
    Path("recipe.yaml").write_text("steps:\n  - strip: module.\n")
    Path("rules.yaml").write_text(RULES)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    save_file(matrix, "model/model.safetensors")
    for words in (
        "convert model quantized --quantize mxfp4",
        "digest --output net.manifest plain.pth",
        "delta make plain.pth moved.pth step",
        "delta make moved.pth plain.pth step2 --version 2 --base-version 1",
    ):
        assert CliRunner().invoke(main, words.split()).exit_code == 0


@pytest.fixture
def made(run_pth: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder in which the COMMANDS run."""
    folder = run_pth.parent
    for name, data in files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    monkeypatch.chdir(folder)
    return folder


def test_every_command_with_json_is_here() -> None:
    assert {*with_json()} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_of_every_command(ckptkit: Ckptkit, made: Path, command: str) -> None:
    for words in COMMANDS[command]:
        found = check(ckptkit, command, *shlex.split(words))
        assert found["schema"] != "ckptkit.error/1", (words, found["error"])
        for name in ("out", "out.pth", "out.safetensors", "out.html", "into"):
            remove(made / name)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in NEVER_FAIL])
def test_of_every_command_that_fails(ckptkit: Ckptkit, made: Path, command: str) -> None:
    words = [" ".join(shlex.split(COMMANDS[command][0])), "--nonsense", ""]
    names = "|".join(
        map(
            re.escape, ("run.pth", "plain.pth", "ema.pth", "cut.pth", "step", "adapter.safetensors")
        )
    )
    words[0] = re.sub(names, "absent.pth", words[0])
    for each in words:
        done = ckptkit(*command.split(), *each.split(), "--json")
        assert done.exit_code in (2, 3), (each, done.stdout)
        found = json.loads(done.stdout)
        wrong = list(VALIDATORS[found["schema"].split(".")[1].split("/")[0]].iter_errors(found))
        assert not wrong, (each, found)
        error = failure(found)
        assert error["code"] and error["message"] in done.stderr
        assert (error["hint"] or "") in done.stderr
        if each == "--nonsense":
            assert error["command"] == f"ckptkit {command} --help"


def failure(found: Any) -> Any:
    """Return the first error of an output: of a file, of a job, or of the command."""
    listed = found.get("files", found.get("jobs", [found]))
    return listed[0]["error"]


def test_inputs_are_named(ckptkit: Ckptkit, made: Path) -> None:
    found = check(ckptkit, "average", "run.pth", "run.pth", "out.pth")
    assert found["inputs"] == ["run.pth", "run.pth"]
    found = check(ckptkit, "join", "plain.pth", "matrix.pth", "out2.pth")
    assert found["inputs"] == ["plain.pth", "matrix.pth"]
    found = check(ckptkit, "report", "-o", "out.html", "run.pth", "plain.pth")
    assert found["inputs"] == ["run.pth", "plain.pth"]


def test_what_commands_write(ckptkit: Ckptkit, made: Path) -> None:
    assert check(ckptkit, "convert", "run.pth", "out.safetensors")["output"] == "out.safetensors"
    assert check(ckptkit, "strip-module --dry-run", "run.pth", "b.pth")["dry_run"]
    jobs = check(ckptkit, "batch remap --to cpu --into into", "run.pth", "cut.pth")["jobs"]
    assert [(job["state"], bool(job["error"])) for job in jobs] == [("done", 0), ("failed", 1)]
    assert check(ckptkit, "doctor --fix fixed.pth", "run.pth")["fixed"]["output"]
    assert check(ckptkit, "recover", "cut.pth", "out.pth")["lost"]


def test_comparisons_of_values(ckptkit: Ckptkit, made: Path) -> None:
    assert check(ckptkit, "digest --check net.manifest", "plain.pth")["equal"]
    assert check(ckptkit, "diff --values", "plain.pth", "moved.pth")["changed"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_says_the_type_of_every_field(name: str) -> None:
    """A value of a checkpoint alone may be anything."""
    for each in objects(SCHEMAS[name]):
        for field, said in each.get("properties", {}).items():
            typed = {"type", "$ref", "anyOf", "const"} & {*said}
            assert typed or (name, field) == ("inspect", "value"), (name, field)
            assert said.get("type") != "array" or "items" in said, (name, field)


@pytest.mark.parametrize(
    ("words", "code"),
    [("inspect absent.pth", "missing-file"), ("diff a.pth", "usage"), ("stats", "usage")],
)
def test_a_command_that_fails_says_so_as_json(ckptkit: Ckptkit, words: str, code: str) -> None:
    found = check(ckptkit, words)
    assert (found["schema"], found["error"]["code"]) == ("ckptkit.error/1", code)


def test_the_types_are_made_from_the_schemas() -> None:
    """`python -m tests.schemas` refreshes them."""
    assert schemas.TYPES.read_text(encoding="utf-8") == schemas.formatted(schemas.types())


MEANINGS = {
    "path": ("string", "place in the tree"), "tensors": ("array", ""), "tensor_count": ("integer", ""),
    "sha256": ("string", "SHA-256 of the contiguous little-endian elements"),
    "file": ("string", ""), "output": ("string", ""), "inputs": ("array", "files as given"),
}  # fmt: skip


def test_a_word_has_one_meaning() -> None:
    for name, schema in SCHEMAS.items():
        for each in objects(schema):
            for field, said in each.get("properties", {}).items():
                kind, meaning = MEANINGS.get(field, (None, ""))
                assert kind is None or kind in said["type"], (name, field)
                assert meaning in said.get("description", ""), (name, field)


def test_the_help_prints_a_schema(ckptkit: Ckptkit) -> None:
    assert json.loads(ckptkit("help --schema inspect").stdout) == SCHEMAS["inspect"]
    assert ckptkit("help --schema inspct").exit_code == 2
