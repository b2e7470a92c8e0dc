"""Check the trainer and ckptkit on a machine with GPUs: ``python -m ckptkit.trainer.gpu OUT``.

The program runs a check for each of the 25 techniques in help/trainer.md, and more checks. The
program writes ``report.json`` and ``report.md`` to the folder OUT, and checkpoints saved on GPUs to
``OUT/cuda``. A check has one of four outcomes:

- passed: the check ran on all GPUs that it needs. Layers of the model ran on each GPU. The
  processes of DDP and FSDP reported their devices and used nccl.
- simulated: the check passed on the CPU, or on fewer devices than it needs.
- not possible here: this machine cannot run the check.
- failed: the check raised an error. If a check fails, the program exits with code 1.

Each check runs in its own process with a time limit. If a check hangs or breaks CUDA, the other
checks still run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from ckptkit.core.text import plural
from ckptkit.trainer import saving
from ckptkit.trainer.checking import LIMIT, CheckResult, Facts, GpuMachine, run_limited
from ckptkit.trainer.gpu_checks import CHECKS

DRIVER = Path("/proc/driver/nvidia/version")


def machine(fixtures: Path | None = None) -> GpuMachine:
    """Return the machine of this process."""
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if gpus else f"no GPU, {platform.machine()}"
    return GpuMachine(gpus, name, fixtures)


def driver_version(text: str) -> str | None:
    """Return the version of the NVIDIA driver. `text` is the content of the file DRIVER."""
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)  # "... x86_64  580.159.04  Release Build ..."
    return found and found[0]


def versions(on: GpuMachine) -> Facts:
    """Return the versions of libraries and driver, and the GPUs with their UUIDs."""
    about: Facts = {**saving.versions(), "driver": None, "nccl": None, "gpus": []}
    if on.gpus:
        with suppress(AttributeError, RuntimeError):  # torch is built without nccl
            nccl: Any = torch.cuda.nccl  # torch.cuda.nccl has no type annotations
            about["nccl"] = ".".join(map(str, nccl.version()))
        with suppress(OSError):  # not Linux
            about["driver"] = driver_version(DRIVER.read_text())
    for number in range(on.gpus):
        gpu = torch.cuda.get_device_properties(number)
        uuid, capability = getattr(gpu, "uuid", ""), f"{gpu.major}.{gpu.minor}"  # since torch 2.4
        about["gpus"].append(
            {
                "name": gpu.name,
                "uuid": str(uuid),
                "capability": capability,
                "memory": gpu.total_memory,
            }
        )
    return about


def report(results: list[CheckResult], on: GpuMachine) -> dict[str, Any]:
    """Return the report as plain values."""
    counts = dict.fromkeys(("passed", "simulated", "not possible here", "failed"), 0)
    for result in results:
        counts[result.status] += 1
    return {
        "device": on.name,
        "gpus": on.gpus,
        "versions": versions(on),
        "counts": counts,
        "results": [asdict(result) for result in results],
    }


def as_markdown(found: dict[str, Any]) -> str:
    """Return a report as Markdown.

    The report contains counts, a table with the outcomes of all checks, and the table or traceback
    that a check produced.
    """
    versions = (
        f"{name} {each}" for name, each in found["versions"].items() if each and name != "gpus"
    )
    lines = [
        ", ".join([found["device"], plural(found["gpus"], "GPU"), *versions]),
        "",
        summary(found),
        "",
        "| check | outcome | devices | seconds | |",
        "|---|---|---|---|---|",
    ]
    blocks: list[str] = []
    for result in found["results"]:
        why = result["why"].replace("\n", " ").replace("|", "/")
        cells = result["name"], result["status"], ", ".join(result["devices"]), result["seconds"]
        lines.append(f"| {' | '.join(map(str, cells))} | {why} |")
        for block in ("\n".join(result["facts"].get("table", ())), result["traceback"].rstrip()):
            blocks += ["", result["name"], "", "```text", block, "```"] if block else []
    return "\n".join([*lines, *blocks]) + "\n"


def summary(found: dict[str, Any]) -> str:
    """Return the number of checks with each outcome in a report."""
    return ", ".join(f"{count} {status}" for status, count in found["counts"].items())


@click.command("gpu")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", metavar="WORD", default="", help="Run the checks whose names contain WORD.")
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    default=LIMIT,
    show_default=True,
    help="Time limit of a check in seconds.",
)
@click.option(
    "--fixtures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for checkpoints saved on GPUs, e.g. fixtures/cuda. Default: OUT/cuda.",
)
def command(out: Path, only: str, limit: float, fixtures: Path | None) -> None:
    """Check the trainer on the GPUs of this machine. Write a report to the folder OUT."""
    # Set the variable now, because cuBLAS reads the variable when cuBLAS is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen = [check for check in CHECKS if only.lower() in check.name.lower()]
    if not chosen:
        raise click.UsageError(f"no check name contains {only!r}")
    on, results = machine((fixtures or out / "cuda").absolute()), []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, check in enumerate(chosen):
            result = run_limited(check, on, Path(scratch) / str(number), limit)
            results.append(result)
            click.echo(f"{result.status:17}{result.seconds:8.1f} s  {check.name}  {result.why}")
            # Write the report after each check, in case this process is killed.
            found = report(results, on)
            (out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
            (out / "report.md").write_text(as_markdown(found))
    click.echo(summary(found))
    raise SystemExit(int(found["counts"]["failed"] > 0))


if __name__ == "__main__":
    command()
