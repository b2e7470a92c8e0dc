"""Check the trainer and ckptkit on a machine with GPUs: ``python -m ckptkit.trainer.gpu OUT``.

It runs every row of the manual's table that needs no other command, AMP, DataParallel, DDP and
FSDP, memory with and without segments, ``load`` and ``load_into`` onto the GPU, and it saves
checkpoints tagged ``cuda:0`` (and ``cuda:1``). OUT becomes a folder with ``report.json``,
``report.md`` and these checkpoints. What the machine cannot do is listed as skipped; without a GPU
that is most of it. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import click
import torch

import ckptkit
from ckptkit.trainer.gpu_checks import CHECKS, Check, Machine, Skip


@dataclass
class Result:
    """The outcome of a check: passed, failed or skipped, its measurements, the reason."""

    name: str
    status: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def machine() -> Machine:
    """Return what is here."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return Machine(torch.device("cpu"), 0, f"no GPU, {platform.machine()}")
    return Machine(torch.device("cuda:0"), gpus, torch.cuda.get_device_name(0))


def run(function: Check, name: str, on: Machine, folder: Path) -> Result:
    """Run a check in a folder of its own; never raises."""
    started = monotonic()
    folder.mkdir()
    try:
        result = Result(name, "passed", 0, facts=function(on, folder))
    except Skip as reason:
        result = Result(name, "skipped", 0, why=str(reason))
    except Exception as error:
        result = Result(name, "failed", 0, why=f"{type(error).__name__}: {error}")
    result.seconds = round(monotonic() - started, 2)
    return result


def report(results: list[Result], on: Machine) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "device": on.name,
        "gpus": on.gpus,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "ckptkit": ckptkit.__version__,
        "results": [asdict(result) for result in results],
    }


def as_markdown(results: list[Result], on: Machine) -> str:
    """Return the report as a Markdown table, and the tables that the checks made."""
    lines = [
        f"{on.name}, {on.gpus} GPUs, torch {torch.__version__}, CUDA {torch.version.cuda}",
        "",
        "| check | result | seconds | |",
        "|---|---|---|---|",
    ]
    for result in results:
        why = result.why.replace("\n", " ").replace("|", "/")
        lines.append(f"| {result.name} | {result.status} | {result.seconds} | {why} |")
    for result in results:
        if "table" in result.facts:
            lines += ["", result.name, "", "```text", *result.facts["table"], "```"]
    return "\n".join(lines) + "\n"


@click.command("gpu")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def command(out: Path) -> None:
    """Check the trainer on the GPUs of this machine; write a report to the folder OUT."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
    on, results = machine(), []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, function) in enumerate(CHECKS.items()):
            result = run(function, name, on, Path(scratch) / str(number))
            results.append(result)
            click.echo(f"{result.status:8}{result.seconds:8.1f} s  {name}  {result.why}")
        if (Path(scratch) / "cuda").is_dir():
            shutil.copytree(Path(scratch) / "cuda", out / "cuda", dirs_exist_ok=True)
    (out / "report.json").write_text(json.dumps(report(results, on), indent=2) + "\n")
    (out / "report.md").write_text(as_markdown(results, on))
    raise SystemExit(int(any(result.status == "failed" for result in results)))


if __name__ == "__main__":
    command()
