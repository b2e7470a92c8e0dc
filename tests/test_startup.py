"""What each command imports, to the module: whoever adds an import sees here who pays for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit import formats
from ckptkit.cli import COMMANDS
from tests.conftest import ENVIRONMENT
from tests.matrix import Fixture

# Runs one command line, then says what of ckptkit and of other packages has been imported meanwhile.
SPY = """
import os, sys
there = {name.partition(".")[0] for name in sys.modules}
def leave(code):
    raise SystemExit(code)
os._exit = leave  # how the program ends: we have something to say first
from ckptkit.cli import main
try:
    main()
except SystemExit as exit:
    code = exit.code
own = [name.removeprefix("ckptkit").removeprefix(".") for name in sys.modules if name.split(".")[0] == "ckptkit"]
others = {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names - there - {"ckptkit"}
slow = {"asyncio", "concurrent", "difflib", "multiprocessing", "pickle", "traceback", "zipfile"} & sys.modules.keys()
import json
print(json.dumps([code or 0, own, sorted(others), sorted(slow)]), file=sys.stderr)
"""

PTH, SAFETENSORS = Fixture("torch-zip/dp_wrapped_cuda1.pth").path, Fixture("safetensors/net.safetensors").path


def modules(text: str) -> set[str]:
    return {*text.split()}


def spied(folder: Path, words: list[str]) -> tuple[int, set[str], list[str], list[str]]:
    """How a command ended in `folder`, modules of ckptkit, other packages, and slow ones that come with Python."""
    done = subprocess.run(
        [sys.executable, "-c", SPY, *words],
        capture_output=True, encoding="utf-8", cwd=folder, env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    code, own, others, slow = json.loads(done.stderr.splitlines()[-1])
    return code, {*own}, others, slow


BASE = modules("cli cli.render errors text") | {""}
ZIP_READING = modules("""
    bytesource checkpoint dtypes limits plan tensor tree trust weights
    formats formats.dict_keys formats.format formats.plain_json formats.strict_json
    formats.torch formats.torch.beside formats.torch.builders formats.torch.globals formats.torch.ndarray
    formats.torch.opcode_values formats.torch.opcodes formats.torch.plain_tensor formats.torch.storages
    formats.torch.torchscript formats.torch.unpickle formats.torch.zip_archive formats.torch.zip_extras
    formats.torch.zip_container formats.torch.zip_members
""")
READING = BASE | ZIP_READING | modules("cli.options convert journal remote remote.urls")
# The sniffers between torch-zip and safetensors, and safetensors.
TO_SAFETENSORS = modules("""
    pickles formats.torch.zip_pickles
    formats.torch.exported formats.torch.legacy_stream formats.torch.module_sources formats.torch.tar_archive
    formats.torch.tar_container formats.safetensors formats.safetensors.header formats.safetensors.record
""")
QUANTIZED = modules("quantized quantized.marks quantized.quantization")
REPORTING = QUANTIZED | modules("cli.inspect reports reports.summary reports.values")
PLANNING = modules("cli.progress transforms transforms.scan")
RENAMING = QUANTIZED | modules("transforms.groups transforms.keys transforms.metadata")
CONVERTING = RENAMING | modules("cli.convert transforms.devices transforms.elements")
PUBLISHING = modules("bridge copying preflight publish temporaries")
COMPUTING = modules("bridge bridge.floats bridge.gather bridge.mean bridge.operations bridge.tensors")
ZIP_WRITING = modules("""
    formats.pruning formats.torch.objects formats.torch.pickle_emitter formats.torch.pickle_writer
    formats.torch.zip_layout formats.torch.zip_writer
""")
SAFETENSORS_WRITING = modules("formats.leftovers formats.safetensors.writing")
EDITING = READING | PLANNING | ZIP_WRITING

FORMATS = (
    BASE
    | ZIP_READING
    | TO_SAFETENSORS
    | COMPUTING
    | modules("""
    cli.formats remote remote.urls formats.torch.zip_check
    formats.dcp formats.dcp.boxes formats.dcp.metadata
    formats.deepspeed formats.deepspeed.module formats.deepspeed.partitions formats.deepspeed.places
    formats.deepspeed.ranks formats.deepspeed.reader formats.deepspeed.states formats.deepspeed.universal
    formats.folder formats.leftovers formats.npy formats.npz formats.safetensors.writing
    formats.sharded formats.sharded.safetensors_shards formats.sharded.shards formats.sharded.split
    formats.sharded.torch_shards formats.torch.plain_pickle formats.torch.zip_writer
""")
)
HELP = BASE | {f"cli.{name.replace('-', '_')}" for name in COMMANDS} | modules("""
    cli.bars cli.options cli.progress remote remote.urls trainer trainer.config
""")  # fmt: skip
DIFF = (READING | REPORTING | COMPUTING) - {"cli.inspect"} | modules("""
    cli.diff cli.diff_text fold cli.fold_pairs
    reports.advice reports.diff reports.families reports.matching reports.rules reports.similarity
""")

# For each command line, in which PTH and SAFETENSORS are files, every module of ckptkit that it imports.
TABLE = {
    "--version": BASE,
    "--help": HELP,
    "formats --json": FORMATS,
    "inspect --json PTH": READING | REPORTING | modules("cli.summary_json"),
    "inspect PTH": READING | REPORTING | modules("fold cli.summary_text reports.advice"),
    "inspect --json SAFETENSORS": READING | REPORTING | TO_SAFETENSORS | modules("bridge cli.summary_json"),
    "strip-module --dry-run PTH out.pth": EDITING | RENAMING | modules("cli.strip_module"),
    "strip-module PTH out.pth": EDITING | RENAMING | PUBLISHING | modules("cli.strip_module"),
    "remap PTH out.pth --to cpu": EDITING | PUBLISHING | modules("cli.remap transforms.devices"),
    "extract PTH out.pth --key model": (EDITING | PUBLISHING | modules("cli.extract transforms.structure"))
    - {"transforms.scan"},
    "rename SAFETENSORS out.safetensors --sub conv=c": READING | TO_SAFETENSORS | SAFETENSORS_WRITING | PLANNING
    | RENAMING | PUBLISHING | COMPUTING | modules("cli.rename"),
    "convert PTH out.safetensors": READING | PLANNING | CONVERTING | PUBLISHING | COMPUTING | SAFETENSORS_WRITING
    | modules("formats.safetensors formats.safetensors.header formats.safetensors.record"),
    "convert SAFETENSORS out.pth": EDITING | TO_SAFETENSORS | CONVERTING | PUBLISHING | COMPUTING,
    "convert PTH out.npz": READING | PLANNING | CONVERTING | PUBLISHING | COMPUTING
    | modules("pickles formats.leftovers formats.npy formats.npz formats.torch.zip_writer"),
    "diff --json PTH PTH": DIFF - modules("cli.diff_text fold cli.fold_pairs"),
    "diff PTH PTH": DIFF,
}  # fmt: skip
# Those that print a small table: tabulate, and what that imports.
TABULATED = ("inspect PTH",)


@pytest.mark.parametrize("command", TABLE)
def test_a_command_imports_what_it_needs(command: str, tmp_path: Path) -> None:
    words = [str({"PTH": PTH, "SAFETENSORS": SAFETENSORS}.get(word, word)) for word in command.split()]
    code, own, others, slow = spied(tmp_path, words)
    expected = TABLE[command]
    assert (code, sorted(own - expected), sorted(expected - own)) == (0, [], [])  # more, fewer
    tables = command in TABULATED
    assert others == ["click", *["tabulate"] * tables]
    assert slow == ["zipfile"] * tables


def test_the_spy_sees_all(tmp_path: Path) -> None:
    """What is imported late, and by others."""
    _, own, others, _ = spied(tmp_path, ["convert", str(PTH), "out.pth", "--cast", "float16"])
    assert "bridge.operations" in own
    assert {"click", "numpy"} <= {*others}


@pytest.mark.parametrize("name", formats.MODULES)
def test_formats_are_what_the_table_says(name: str) -> None:
    """The names and suffixes by which a format is found without importing the others."""
    format = formats.by_name(name)
    assert format is not None
    assert format.name == name
    assert {*format.suffixes} == {suffix for suffix, each in formats.SUFFIXES.items() if each == name}
    assert format.layout is not None or not format.suffixes
