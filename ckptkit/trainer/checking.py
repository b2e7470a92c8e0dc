"""Run the checks of :mod:`ckptkit.trainer.gpu`, and determine their outcomes."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.text import plural
from ckptkit.trainer.run import switches_restored

LIMIT = 180  # time limit of a check in seconds
Facts = dict[str, Any]


class Failed(Exception):
    """A check has failed."""


@dataclass(frozen=True)
class GpuMachine:
    """The machine that runs a check, and the folder of the check.

    `device` is the first GPU. If the machine has no GPU, `device` is the CPU. If `fixtures` is a
    folder, a check that saves a checkpoint on a GPU copies the checkpoint to this folder.
    """

    gpus: int
    name: str
    fixtures: Path | None = None
    folder: Path = Path()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.gpus else "cpu")

    @property
    def pair(self) -> tuple[str, ...]:
        """Two GPUs, or the CPU twice to simulate two devices."""
        return ("cuda:0", "cuda:1") if self.gpus > 1 else ("cpu", "cpu")


@dataclass(frozen=True)
class DeviceCheck:
    """A check. ``function(machine)`` gets a machine with an empty folder, and returns measurements.

    If the machine has fewer than `gpus` GPUs, the check is only simulated. With fewer than `needs`
    GPUs, the check is not possible. `function` raises Failed if the check fails.
    """

    name: str
    gpus: int
    function: Callable[[GpuMachine], Facts]
    needs: int = 0


@dataclass
class CheckResult:
    """The outcome of a check, with measurements, the reason (`why`) and the devices used."""

    name: str
    status: str
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)
    why: str = ""
    devices: list[str] = field(default_factory=list)
    traceback: str = ""


def require(condition: bool, otherwise: str) -> None:
    """Raise Failed with the message `otherwise` unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


class Witness:
    """If a layer runs in the ``with`` block, in any thread, record the devices of its outputs."""

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


def run_check(check: DeviceCheck, on: GpuMachine, folder: Path) -> CheckResult:
    """Run a check in a new folder. Report every exception in the result.

    If the check used several processes, the list ``processes`` contains the report of each process.
    """
    if on.gpus < check.needs:
        why = f"needs {plural(check.needs, 'GPU')}, but this machine has {on.gpus}"
        return CheckResult(check.name, "not possible here", why=why)
    started, result = monotonic(), CheckResult(check.name, "failed")
    folder.mkdir()
    witness = Witness()
    try:
        with switches_restored(), witness:
            result.facts = check.function(replace(on, folder=folder))
        processes = result.facts.get("processes", [])
        witness.devices |= {each["device"] for each in processes}
        if on.gpus >= check.gpus:
            require_evidence(check, witness, processes)
        result.status = "simulated" if on.gpus < check.gpus else "passed"
    except Exception as error:
        result.why = f"{type(error).__name__}: {error}"
        result.traceback = traceback.format_exc()
    result.devices = sorted(witness.devices)
    result.seconds = round(monotonic() - started, 2)
    return result


def require_evidence(check: DeviceCheck, witness: Witness, processes: list[Facts]) -> None:
    """Raise Failed if a check did not compute on the number of GPUs that it needs."""
    used = ", ".join(sorted(witness.devices)) or "no device"
    require(
        len(witness.gpus) >= check.gpus,
        f"needs {plural(check.gpus, 'GPU')}, but its layers ran on {used}",
    )
    if processes:
        backends = {each["backend"] for each in processes}
        require(len(processes) > 1, "a single process exchanges nothing")
        require(
            "nccl" in backends or check.gpus < 2,
            f"used the backend {', '.join(backends)} instead of nccl",
        )


def run_limited(
    check: DeviceCheck, on: GpuMachine, folder: Path, limit: float = LIMIT
) -> CheckResult:
    """Run a check in a new process. After `limit` seconds, kill the new process and its
    children."""
    started, answer = monotonic(), folder.with_suffix(".json")
    child: Any = get_context("spawn").Process(target=_child, args=(check, on, folder, answer))
    child.start()
    child.join(limit)
    why = f"the process ended with exit code {child.exitcode}"
    if child.is_alive():
        why = f"took longer than {limit:g} s"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # the child leads its own process group
    child.kill()  # a child that has just started does not lead a group yet
    child.join()
    if answer.is_file():
        return CheckResult(**json.loads(answer.read_text()))
    seconds = round(monotonic() - started, 2)
    return CheckResult(check.name, "failed", seconds, why=why)


def _child(check: DeviceCheck, on: GpuMachine, folder: Path, answer: Path) -> None:
    os.setsid()
    torch.set_num_threads(1)
    result = json.dumps(asdict(run_check(check, on, folder)), default=str)
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(result)
    unfinished.replace(answer)  # atomic: a killed process leaves no partial answer
