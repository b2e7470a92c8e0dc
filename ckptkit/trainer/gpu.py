"""Check the trainer and ckptkit on a machine with GPUs: ``python -m ckptkit.trainer.gpu OUT``.

It runs every row of the manual's table that needs no other command, AMP, DataParallel, DDP and
FSDP, memory with and without segments, ``load`` and ``load_into`` onto the GPU, and it saves
checkpoints tagged ``cuda:0`` (and ``cuda:1``). OUT becomes a folder with ``report.json``,
``report.md`` and these checkpoints. What the machine cannot do is listed as skipped; without a GPU
that is most of it. The exit code is 1 if a check failed.

A check is a function of the machine and an empty folder. It returns its measurements, raises Skip
for what the machine cannot do, and Failed for what is wrong.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import click
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

import ckptkit
from ckptkit.core.text import plural
from ckptkit.trainer import loop, parallel
from ckptkit.trainer.config import FORMS, MODELS, Config, RunFiles
from ckptkit.trainer.models import Cnn
from ckptkit.trainer.run import prepare

SMALL = Config(data="random", width=0.25, epochs=2, batch_size=64)
NET = (3, 32, 32), 10, 0.25  # the arguments of the Cnn of SMALL
ARTICLE = {0: 1717, 2: 1283, 5: 1043, 10: 959}  # segments -> MB that nvidia-smi showed


class Skip(Exception):
    """A need of a check that this machine does not meet."""


class Failed(Exception):
    """A check found something wrong."""


@dataclass(frozen=True)
class Hardware:
    """The machine of the checks; `device` is its first GPU, or the CPU where there is none."""

    device: torch.device
    gpus: int
    name: str

    def needs(self, gpus: int) -> None:
        """Raise Skip if there are fewer GPUs."""
        if self.gpus < gpus:
            raise Skip(f"needs {plural(gpus, 'GPU')}, this machine has {self.gpus}")

    @property
    def pair(self) -> tuple[str, ...]:
        """Two GPUs, or the CPU twice, which simulates two."""
        return ("cuda:0", "cuda:1") if self.gpus > 1 else ("cpu", "cpu")


Facts = dict[str, Any]
Check = Callable[[Hardware, Path], Facts]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Add a function to the checks."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def require(condition: bool, otherwise: str) -> None:
    """Raise Failed unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


def train(on: Hardware, out: Path, files: RunFiles | None = None, **options: Any) -> float:
    """Train a small run on the first device; return the accuracy."""
    options = {"devices": (str(on.device),), **options}
    return loop.train(replace(SMALL, **options), out, files, log=loop.silent)


def measured(on: Hardware, out: Path, **options: Any) -> Facts:
    """Train a small run; return the memory of its last step."""
    report = out.with_suffix(".jsonl")
    train(on, out, RunFiles(memory_report=report), **options)
    last: Facts = json.loads(report.read_text().splitlines()[-1])
    require(last["activations"] > 0, "no activations")
    return last


def train_in_processes(
    processes: int, out: Path, files: RunFiles | None = None, **options: Any
) -> None:
    """Train a small run in several processes, as torchrun would start them."""
    config = replace(SMALL, save_form="full", **options)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free a moment later, for the first process
    arguments = processes, port, config, out, files
    spawn(_process, arguments, nprocs=processes)  # type: ignore[no-untyped-call]


def _process(
    rank: int, processes: int, port: int, config: Config, out: Path, files: RunFiles | None
) -> None:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    loop.train(config, out, files, log=loop.silent)


def same_weights(one: Path, other: Path, most: float = 0.0) -> Facts:
    """Return the largest difference between the weights of two files; require at most `most`."""
    ours, theirs = (ckptkit.load(path, map_location="cpu") for path in (one, other))
    require(list(ours) == list(theirs), "other keys")
    difference = max((ours[key] - theirs[key]).abs().max().item() for key in ours)
    require(difference <= most, f"weights differ by {difference}")
    return {"largest difference": difference}


# The rows of the manual's table


@check("S01 accumulated micro-batches equal one batch")
def accumulation(on: Hardware, folder: Path) -> Facts:
    train(on, folder / "one.pth", batch_size=128)
    train(on, folder / "many.pth", batch_size=32, accumulate=4)
    return same_weights(folder / "one.pth", folder / "many.pth", 1e-3)


@check("S02 S10 S17 DataParallel over two devices")
def data_parallel(on: Hardware, folder: Path) -> Facts:
    how: Facts = {"parallel": "dp", "devices": on.pair, "keep_module_prefix": True}
    for model in ("cnn", "crnn"):
        train(on, folder / f"{model}.pth", model=model, **how)
    keys = ckptkit.load(folder / "cnn.pth", map_location="cpu")
    require(all(key.startswith("module.") for key in keys), "keys without module.")
    return {"devices": on.pair, "simulated": on.gpus < 2}


@check("S03 a loss on each device")
def balanced(on: Hardware, folder: Path) -> Facts:
    peaks = {
        kind: measured(on, folder / f"{kind}.pth", parallel=kind, devices=on.pair)["peak"]
        for kind in ("dp", "dp-balanced")
    }
    return same_weights(folder / "dp.pth", folder / "dp-balanced.pth", 1e-3) | {"peaks": peaks}


@check("S04 memory report")
def memory_report(on: Hardware, folder: Path) -> Facts:
    return measured(on, folder / "run.pth")


@check("S05 segments beside the article's figures")
def segments(on: Hardware, folder: Path) -> Facts:
    options: Facts = {"model": "mlp", "width": 1.0 if on.gpus else 0.05, "epochs": 1}
    rows, table = [], ["segments  activations     peak  seconds  article"]
    for number, figure in ARTICLE.items():
        path = folder / f"{number}.pth"
        row = measured(on, path, optimizer="adam", batch_size=16, segments=number, **options)
        rows.append(row)
        kept, peak = row["activations"] / 1e6, max(row["peak"].values()) / 1e6
        table.append(
            f"{number:8}  {kept:8.3f} MB  {peak:4.0f} MB  {row['seconds']:7.3f}  {figure:4} MB"
        )
        same_weights(folder / "0.pth", path, 1e-3)
    require(rows[0]["activations"] > rows[-1]["activations"], "segments saved nothing")
    return {"rows": rows, "table": table}


@check("S06 S24 recomputing with dropout")
def recomputing(on: Hardware, folder: Path) -> Facts:
    """Compare one step of a DenseNet that keeps its activations, and that recomputes them."""
    how: Facts = {"model": "densenet", "dropout": 0.2, "epochs": 1, "batch_size": 512}
    kept = measured(on, folder / "kept.pth", **how)
    again = measured(on, folder / "again.pth", memory_efficient=True, **how)
    require(again["activations"] < kept["activations"], "recomputing saved nothing")
    same = same_weights(folder / "kept.pth", folder / "again.pth", 1e-4)
    return {**same, "kept": kept, "recomputed": again}


@check("S07 S15 every model trains, and is evaluated on the CPU")
def models(on: Hardware, folder: Path) -> Facts:
    accuracies = {}
    for model in MODELS:
        options: Facts = {"model": model, "width": 0.1}
        here = train(on, folder / f"{model}.pth", **options)
        config = replace(SMALL, devices=("cpu",), **options)
        there = loop.evaluate(config, folder / f"{model}.pth", log=loop.silent)
        require(abs(here - there) < 0.03, f"{model}: {here} here, {there} there")
        accuracies[model] = here, there
    return accuracies


@check("S08 memory does not grow over epochs")
def growth(on: Hardware, folder: Path) -> Facts:
    on.needs(1)
    allocated = []
    for epochs in (1, 4):
        train(on, folder / f"{epochs}.pth", epochs=epochs)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    first, later = allocated
    require(later <= first + (1 << 20), f"{first} bytes after one run, {later} after more")
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return {"reserved": reserved, "after empty_cache": torch.cuda.memory_reserved()}


@check("S11 S12 S14 load and load_into onto the device")
def loading(on: Hardware, folder: Path) -> Facts:
    found, device = {}, str(on.device)
    for form in FORMS:
        path = folder / f"{form}.pth"
        train(on, path, save_form=form)
        ours, theirs = (ckptkit.load(path, map_location=where) for where in (device, "cpu"))
        require(all(torch.equal(ours[key].cpu(), theirs[key]) for key in theirs), f"{form} differs")
        require({str(each.device) for each in ours.values()} == {device}, f"{form} elsewhere")
        model = Cnn(*NET).to(on.device)
        require(ckptkit.load_into(model, path).complete, f"{form} does not fit")
        found[form] = len(ours)
    return found


@check("S19 equal seeds give equal bytes")
def equal_bytes(on: Hardware, folder: Path) -> Facts:
    for name in ("one.pth", "two.pth"):
        train(on, folder / name, deterministic=True, save_form="full")
    one, two = ((folder / name).read_bytes() for name in ("one.pth", "two.pth"))
    require(one == two, "other bytes")
    return {"bytes": len(one)}


@check("resuming is exact")
def resuming(on: Hardware, folder: Path) -> Facts:
    options: Facts = {"save_form": "full", "save_every": 1, "optimizer": "adam"}
    options["deterministic"] = True
    train(on, folder / "run.pth", **options)
    train(on, folder / "more.pth", RunFiles(resume=folder / "run.epoch1.pth"), **options)
    return same_weights(folder / "run.pth", folder / "more.pth")


# What the rows do not name


@check("amp computes in bfloat16, also in the threads of replicas")
def amp(on: Hardware, folder: Path) -> Facts:
    dtypes = {}
    for kind in ("none", "dp", "dp-balanced"):
        devices = (str(on.device),) if kind == "none" else on.pair
        config = replace(SMALL, parallel=kind, devices=devices, amp=True)
        with parallel.group(config) as group:
            run = prepare(config, group)
            with parallel.autocast(config, group.device):
                made: Any = run.wrapped(run.data.train[0][:8].to(group.device))
        dtypes[kind] = str((made if isinstance(made, torch.Tensor) else made[0]).dtype)
        train(on, folder / f"{kind}.pth", parallel=kind, devices=devices, amp=True)
    if on.gpus:
        # Two replicas on one GPU, each in its thread, as on two GPUs.
        model = nn.Linear(4, 2).to(on.device)
        wrapped = parallel.Replicated(model, (on.device,), amp=True)
        wrapped.device_ids = [on.device.index] * 2
        inputs = [(torch.ones(8, 4, device=on.device),)] * 2
        with torch.autocast(on.device.type, torch.bfloat16):
            outputs = wrapped.parallel_apply([model] * 2, inputs, [{}] * 2)
        dtypes["threads"] = str(outputs[1].dtype)
    require(set(dtypes.values()) == {"torch.bfloat16"}, f"computes in {dtypes}")
    return dtypes


@check("inputs on another device under DataParallel")
def inputs_elsewhere(on: Hardware, folder: Path) -> Facts:
    """The question that the second article leaves open: must inputs be on the first device?"""
    on.needs(1)
    gpus = list(range(on.gpus))
    wrapped = nn.DataParallel(nn.Linear(4, 2).to(on.device), gpus)
    found = {}
    for name in ("cpu", *(f"cuda:{number}" for number in gpus)):
        found[name] = str(wrapped(torch.ones(8, 4, device=name)).device)
        require(found[name] == "cuda:0", f"inputs on {name}: outputs on {found[name]}")
    return found


@check("DDP with nccl, a GPU for each process")
def ddp_nccl(on: Hardware, folder: Path) -> Facts:
    on.needs(1)
    train_in_processes(on.gpus, folder / "run.pth", parallel="ddp", accumulate=2)
    return {"processes": on.gpus}


@check("DDP with gloo, two processes on one device")
def ddp_gloo(on: Hardware, folder: Path) -> Facts:
    train_in_processes(2, folder / "run.pth", parallel="ddp", devices=(str(on.device),))
    states = ckptkit.load(folder / "run.pth", map_location="cpu", whole=True)["rng_of_ranks"]
    require(len(states) == 2, f"random states of {len(states)} processes")
    return {"device": str(on.device)}


@check("FSDP saves, resumes, and is evaluated from its folder")
def fsdp(on: Hardware, folder: Path) -> Facts:
    processes = max(1, on.gpus)
    options: Facts = {"parallel": "fsdp", "save_every": 1}
    options["devices"] = () if on.gpus else ("cpu",)
    train_in_processes(processes, folder / "run", **options)
    files = RunFiles(resume=folder / "run.epoch1")
    train_in_processes(processes, folder / "more", files, **options)
    found = same_weights(folder / "run", folder / "more", 1e-5)
    config = replace(SMALL, devices=(str(on.device),))
    return {**found, "accuracy": loop.evaluate(config, folder / "run", log=loop.silent)}


@check("out of memory says what helps")
def out_of_memory(on: Hardware, folder: Path) -> Facts:
    on.needs(1)
    total = torch.cuda.get_device_properties(on.device).total_memory
    torch.cuda.set_per_process_memory_fraction(64e6 / total, on.device)
    try:
        train(on, folder / "run.pth", model="mlp", width=1.0)
    except ckptkit.CkptkitError as error:
        require("--batch-size" in (error.hint or ""), f"the hint is {error.hint}")
        return {"message": str(error), "hint": error.hint}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, on.device)
        torch.cuda.empty_cache()
    raise Failed("64 MB were enough")


@check("what is not deterministic on GPUs is refused")
def nondeterministic(on: Hardware, folder: Path) -> Facts:
    on.needs(1)
    for model in ("generator", "crnn"):
        try:
            train(on, folder / "run.pth", model=model, deterministic=True)
        except ckptkit.CkptkitError as error:
            require("no deterministic" in str(error), str(error))
        else:
            raise Failed(f"{model} trained")
    return {}


@check("checkpoints tagged with GPUs")
def tagged(on: Hardware, folder: Path) -> Facts:
    """Save what the fixtures simulate, and compare: all but values must be equal."""
    on.needs(1)
    out = folder.parent / "cuda"
    out.mkdir(exist_ok=True)
    found: Facts = {}
    for number in range(min(on.gpus, 2)):
        for form in FORMS:
            path = out / f"none_{form}_cuda{number}.pth"
            simulated = folder / f"simulated_{form}_{number}.pth"
            train(on, path, devices=(f"cuda:{number}",), save_form=form, optimizer="adam")
            train(on, folder / "cpu.pth", devices=("cpu",), save_form=form, optimizer="adam")
            moved = ckptkit.remap(ckptkit.open(folder / "cpu.pth"), f"cuda:{number}")
            ckptkit.save(moved, simulated)
            found[path.name] = differences(path, simulated)
            require(not found[path.name], f"{path.name} differs in {found[path.name]}")
    return found


def differences(real: Path, simulated: Path) -> list[str]:
    """Return what differs beside values: names, dtypes and shapes, keys of the tree."""
    one, other = (ckptkit.load(path, map_location="cpu", whole=True) for path in (real, simulated))
    return _differences(one, other, "")


def _differences(one: Any, other: Any, place: str) -> list[str]:
    if place in ("rng", "args", "versions"):
        return []  # generator states, devices and the versions of CUDA differ as they should
    if type(one) is not type(other):
        return [f"{place}: {type(one).__name__} instead of {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same else [f"{place}: {one.dtype} {list(one.shape)}"]
    if not isinstance(one, dict):
        return []
    if list(one) != list(other):
        return [f"{place}: other keys"]
    found = []
    for key in one:
        found += _differences(one[key], other[key], f"{place}.{key}".lstrip("."))
    return found


# The command


@dataclass
class CheckResult:
    """The outcome of a check: passed, failed or skipped, its measurements, the reason."""

    name: str
    status: str
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)
    why: str = ""


def run_check(function: Check, name: str, on: Hardware, folder: Path) -> CheckResult:
    """Run a check in a folder of its own; never raises."""
    started = monotonic()
    folder.mkdir()
    try:
        result = CheckResult(name, "passed", facts=function(on, folder))
    except Skip as reason:
        result = CheckResult(name, "skipped", why=str(reason))
    except Exception as error:
        result = CheckResult(name, "failed", why=f"{type(error).__name__}: {error}")
    finally:
        torch.use_deterministic_algorithms(False)
    result.seconds = round(monotonic() - started, 2)
    return result


def report(results: list[CheckResult], on: Hardware) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "device": on.name,
        "gpus": on.gpus,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "ckptkit": ckptkit.__version__,
        "results": [asdict(result) for result in results],
    }


def as_markdown(results: list[CheckResult], on: Hardware) -> str:
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
    on = Hardware(torch.device("cpu"), 0, f"no GPU, {platform.machine()}")
    if gpus := torch.cuda.device_count():
        on = Hardware(torch.device("cuda:0"), gpus, torch.cuda.get_device_name(0))
    results = []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, function) in enumerate(CHECKS.items()):
            result = run_check(function, name, on, Path(scratch) / str(number))
            results.append(result)
            click.echo(f"{result.status:8}{result.seconds:8.1f} s  {name}  {result.why}")
        if (Path(scratch) / "cuda").is_dir():
            shutil.copytree(Path(scratch) / "cuda", out / "cuda", dirs_exist_ok=True)
    (out / "report.json").write_text(json.dumps(report(results, on), indent=2) + "\n")
    (out / "report.md").write_text(as_markdown(results, on))
    raise SystemExit(int(any(result.status == "failed" for result in results)))


if __name__ == "__main__":
    command()
