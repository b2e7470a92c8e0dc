"""Check the trainer and ckptkit on a machine with GPUs: ``python -m ckptkit.trainer.gpu OUT``.

It runs the 25 rows of the manual's table, and what they do not name. OUT becomes a folder with
``report.json``, ``report.md`` and, in ``cuda/``, checkpoints that GPUs have tagged. Each check has
one of four outcomes:

- passed: it ran on as many GPUs as it needs. Layers of the model computed on each of them; the
  processes of DDP and FSDP reported their devices and exchanged through nccl.
- simulated: it passed, but on the CPU, or on fewer devices than it is about.
- not possible here: there is nothing that this machine could try.
- failed. The exit code is 1 then.

Each check has a process of its own and a limit of seconds, so that one that hangs or breaks CUDA
ends alone.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from shutil import which
from time import monotonic
from typing import Any

import click
import torch
from torch import Tensor, nn

import ckptkit
from ckptkit.core.text import plural
from ckptkit.trainer.run import switches_restored

LIMIT = 180  # seconds of a check
Facts = dict[str, Any]


class NotHere(Exception):
    """Nothing of a check can be tried on this machine."""


class Failed(Exception):
    """A check found something wrong."""


@dataclass(frozen=True)
class Machine:
    """The machine of the checks; `device` is its first GPU, or the CPU where there is none.

    Checkpoints that its GPUs tag are kept in `fixtures`.
    """

    gpus: int
    name: str
    fixtures: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.gpus else "cpu")

    @property
    def pair(self) -> tuple[str, ...]:
        """Two GPUs, or the CPU twice, which simulates two."""
        return ("cuda:0", "cuda:1") if self.gpus > 1 else ("cpu", "cpu")

    def needs(self, gpus: int) -> None:
        """Raise NotHere if there are fewer GPUs and nothing simulates them."""
        if self.gpus < gpus:
            raise NotHere(f"needs {plural(gpus, 'GPU')}, this machine has {self.gpus}")


@dataclass(frozen=True)
class Check:
    """A function of the machine and an empty folder that returns its measurements.

    It is about `gpus` GPUs. It raises NotHere, or Failed for what is wrong.
    """

    name: str
    gpus: int
    function: Callable[[Machine, Path], Facts]


@dataclass
class CheckResult:
    """The outcome of a check, its measurements, the reason, the devices that computed."""

    name: str
    status: str
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)
    why: str = ""
    devices: list[str] = field(default_factory=list)
    traceback: str = ""


def require(condition: bool, otherwise: str) -> None:
    """Raise Failed unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


class Witness:
    """The devices of the outputs of all layers that are called while it is open, in all threads."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def __enter__(self) -> Witness:
        self._hook = nn.modules.module.register_module_forward_hook(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _see(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        self.devices |= {str(each.device) for each in parts if isinstance(each, Tensor)}

    @property
    def gpus(self) -> list[str]:
        return sorted(each for each in self.devices if each.startswith("cuda"))


def run_check(check: Check, on: Machine, folder: Path) -> CheckResult:
    """Run a check in a folder of its own; never raises.

    Its facts may name ``processes``: what each process of a group reports of itself.
    """
    started, result = monotonic(), CheckResult(check.name, "failed")
    folder.mkdir()
    witness = Witness()
    try:
        with switches_restored(), witness:
            result.facts = check.function(on, folder)
        processes = result.facts.get("processes", [])
        witness.devices |= {each["device"] for each in processes}
        result.status = "simulated" if on.gpus < check.gpus else "passed"
        if result.status == "passed":
            require_evidence(check, witness, processes)
    except NotHere as reason:
        result.status, result.why = "not possible here", str(reason)
    except Exception as error:
        result.status, result.why = "failed", f"{type(error).__name__}: {error}"
        result.traceback = traceback.format_exc()
    result.devices = sorted(witness.devices)
    result.seconds = round(monotonic() - started, 2)
    return result


def require_evidence(check: Check, witness: Witness, processes: list[Facts]) -> None:
    """Raise Failed if a check did not compute on as many GPUs as it is about."""
    used = ", ".join(sorted(witness.devices)) or "no device"
    require(
        len(witness.gpus) >= check.gpus,
        f"is about {plural(check.gpus, 'GPU')}, and its layers ran on {used}",
    )
    if processes:
        backends = {each["backend"] for each in processes}
        require(len(processes) > 1, "one process exchanges nothing")
        require("nccl" in backends or check.gpus < 2, f"exchanged through {', '.join(backends)}")


def run_limited(check: Check, on: Machine, folder: Path, limit: float = LIMIT) -> CheckResult:
    """Run a check in a process of its own; end it, and those that it started, after `limit` s."""
    started, answer = monotonic(), folder.with_suffix(".json")
    child: Any = get_context("spawn").Process(target=_child, args=(check, on, folder, answer))
    child.start()
    child.join(limit)
    why = f"the process ended with exit code {child.exitcode}"
    if child.is_alive():
        why = f"took longer than {limit:g} s"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # its own group, with processes that it left
    child.join()
    if answer.is_file():
        return CheckResult(**json.loads(answer.read_text()))
    seconds = round(monotonic() - started, 2)
    return CheckResult(check.name, "failed", seconds, why=why)


def _child(check: Check, on: Machine, folder: Path, answer: Path) -> None:
    os.setsid()
    torch.set_num_threads(1)
    result = json.dumps(asdict(run_check(check, on, folder)), default=str)
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(result)
    unfinished.replace(answer)  # a killed process leaves no half of an answer


def machine(fixtures: Path | None = None) -> Machine:
    """Return the machine of this process."""
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if gpus else f"no GPU, {platform.machine()}"
    return Machine(gpus, name, fixtures)


def versions(on: Machine) -> Facts:
    """Return what decides about the results: libraries, the driver, the GPUs and their UUIDs."""
    found: Facts = {
        "ckptkit": ckptkit.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": None,
        "cudnn": None,
        "nccl": None,
        "gpus": [],
    }
    if on.gpus:
        backend: Any = torch.backends.cudnn  # without types
        found["cudnn"] = backend.version()
        with suppress(AttributeError, RuntimeError):  # built without nccl
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["driver"] = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    for number in range(on.gpus):
        about = torch.cuda.get_device_properties(number)
        found["gpus"].append(
            {
                "name": about.name,
                "uuid": str(getattr(about, "uuid", "")),  # from torch 2.4 on
                "capability": f"{about.major}.{about.minor}",
                "memory": about.total_memory,
            }
        )
    return found


def nvidia_smi(*options: str) -> list[str] | None:
    """Return the lines that nvidia-smi prints; None where there is none, or it fails."""
    program = which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, *options], capture_output=True, encoding="utf-8", timeout=30)
    return done.stdout.splitlines() if done.returncode == 0 else None


def report(results: list[CheckResult], on: Machine) -> dict[str, Any]:
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
    """Return a report as Markdown: its counts, a table, the tables of checks, the tracebacks."""
    about = {name: each for name, each in found["versions"].items() if each and name != "gpus"}
    lines = [
        f"{found['device']}, {plural(found['gpus'], 'GPU')}, "
        + ", ".join(f"{name} {each}" for name, each in about.items()),
        "",
        ", ".join(f"{count} {status}" for status, count in found["counts"].items()),
        "",
        "| check | outcome | devices | seconds | |",
        "|---|---|---|---|---|",
    ]
    for result in found["results"]:
        why = result["why"].replace("\n", " ").replace("|", "/")
        devices = ", ".join(result["devices"])
        lines.append(
            f"| {result['name']} | {result['status']} | {devices} | {result['seconds']} | {why} |"
        )
    for result in found["results"]:
        if "table" in result["facts"]:
            lines += ["", result["name"], "", "```text", *result["facts"]["table"], "```"]
        if result["traceback"]:
            lines += ["", result["name"], "", "```text", result["traceback"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


@click.command("gpu")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", metavar="WORD", default="", help="Run the checks whose names contain WORD.")
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    default=LIMIT,
    show_default=True,
    help="Seconds that a check may take.",
)
@click.option(
    "--fixtures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for checkpoints that GPUs tag, e.g. fixtures/cuda. Default: OUT/cuda.",
)
def command(out: Path, only: str, limit: float, fixtures: Path | None) -> None:
    """Check the trainer on the GPUs of this machine; write a report to the folder OUT."""
    from ckptkit.trainer.gpu_checks import CHECKS

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
    chosen = [check for check in CHECKS if only.lower() in check.name.lower()]
    if not chosen:
        raise click.UsageError(f"no check has {only!r} in its name")
    on, results = machine((fixtures or out / "cuda").absolute()), []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, check in enumerate(chosen):
            result = run_limited(check, on, Path(scratch) / str(number), limit)
            results.append(result)
            click.echo(f"{result.status:17}{result.seconds:8.1f} s  {check.name}  {result.why}")
            # After each check: what is known is kept if this process ends.
            found = report(results, on)
            (out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
            (out / "report.md").write_text(as_markdown(found))
    click.echo(", ".join(f"{count} {status}" for status, count in found["counts"].items()))
    raise SystemExit(int(found["counts"]["failed"] > 0))


if __name__ == "__main__":
    # By its name: the checks import the classes of that module, not of `__main__`.
    from ckptkit.trainer.gpu import command as run_command

    run_command()
