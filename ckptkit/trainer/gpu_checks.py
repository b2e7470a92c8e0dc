"""The checks of ``python -m ckptkit.trainer.gpu``, each a function of the machine and a folder.

A check returns its measurements. It raises Skip for what the machine cannot do, Failed for what is
wrong.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

import ckptkit
from ckptkit.core.text import plural
from ckptkit.trainer import loop, parallel
from ckptkit.trainer.config import FORMS, MODELS, Config, Files
from ckptkit.trainer.examples import losses, recompute, segments
from ckptkit.trainer.models import Cnn
from ckptkit.trainer.run import prepare

SMALL = Config(data="random", width=0.25, epochs=2, batch_size=64)
NET = (3, 32, 32), 10, 0.25  # the arguments of the Cnn of SMALL


class Skip(Exception):
    """A need of a check that this machine does not meet."""


class Failed(Exception):
    """A check found something wrong."""


@dataclass(frozen=True)
class Machine:
    """The machine of the checks; `device` is its first GPU, or the CPU where there is none."""

    device: torch.device
    gpus: int
    name: str

    def needs(self, gpus: int) -> None:
        """Raise Skip if there are fewer GPUs."""
        if self.gpus < gpus:
            raise Skip(f"needs {plural(gpus, 'GPU')}, this machine has {self.gpus}")


Facts = dict[str, Any]
Check = Callable[[Machine, Path], Facts]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Add a function to the checks; it returns what it measured."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def require(condition: bool, otherwise: str) -> None:
    """Raise Failed unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


def train(machine: Machine, out: Path, files: Files | None = None, **options: Any) -> float:
    """Train a small run on the first device; return the accuracy."""
    options = {"devices": (str(machine.device),), **options}
    return loop.train(replace(SMALL, **options), out, files, log=_silent)


def train_in_processes(
    processes: int, out: Path, files: Files | None = None, **options: Any
) -> None:
    """Train a small run in several processes, as torchrun would start them."""
    config = replace(SMALL, save_form="full", **options)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free a moment later, for the first process
    arguments = processes, port, config, out, files
    spawn(_process, arguments, nprocs=processes)  # type: ignore[no-untyped-call]


def _process(
    rank: int, processes: int, port: int, config: Config, out: Path, files: Files | None
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    loop.train(config, out, files, log=_silent)


def same_weights(one: Path, other: Path, most: float) -> Facts:
    """Return the largest difference between the weights of two files; require at most `most`."""
    ours, theirs = (ckptkit.load(path, map_location="cpu") for path in (one, other))
    require(list(ours) == list(theirs), "other keys")
    difference = max((ours[key] - theirs[key]).abs().max().item() for key in ours)
    require(difference <= most, f"weights differ by {difference}")
    return {"largest difference": difference}


# The rows of the manual's table


@check("S01 accumulated micro-batches equal one batch")
def accumulation(machine: Machine, folder: Path) -> Facts:
    train(machine, folder / "one.pth", batch_size=128)
    train(machine, folder / "many.pth", batch_size=32, accumulate=4)
    one, many = (
        ckptkit.load(folder / name, map_location="cpu") for name in ("one.pth", "many.pth")
    )
    difference = max((one[key] - many[key]).abs().max().item() for key in one)
    require(difference < 1e-3, f"weights differ by {difference}")
    return {"largest difference": difference}


@check("S02 S10 S17 DataParallel over two devices")
def data_parallel(machine: Machine, folder: Path) -> Facts:
    pair = _pair(machine)
    for model in ("cnn", "crnn"):
        out = folder / f"{model}.pth"
        train(machine, out, model=model, parallel="dp", devices=pair, keep_module_prefix=True)
    keys = ckptkit.load(folder / "cnn.pth", map_location="cpu")
    require(all(key.startswith("module.") for key in keys), "keys without module.")
    return {"devices": pair, "simulated": machine.gpus < 2}


@check("S03 a loss on each device")
def balanced(machine: Machine, folder: Path) -> Facts:
    pair = _pair(machine)
    for kind in ("dp", "dp-balanced"):
        train(machine, folder / f"{kind}.pth", parallel=kind, devices=pair)
    found = same_weights(folder / "dp.pth", folder / "dp-balanced.pth", 1e-3)
    table = losses.table(losses.measure([torch.device(name) for name in pair]))
    return {**found, "table": table}


@check("S04 memory report")
def memory_report(machine: Machine, folder: Path) -> Facts:
    files = Files(memory_report=folder / "memory.jsonl")
    train(machine, folder / "run.pth", files)
    rows = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    last: Facts = rows[-1]
    require(last["activations"] > 0, "no activations")
    return last


@check("S05 segments beside the article's figures")
def segment_table(machine: Machine, folder: Path) -> Facts:
    measured = segments.measure(machine.device, 1.0 if machine.gpus else 0.05)
    kept = [row.activations for row in measured.values()]
    require(kept[0] > kept[-1], f"segments saved nothing: {kept}")
    rows = {str(number): asdict(row) for number, row in measured.items()}
    return {"rows": rows, "article MB": segments.ARTICLE, "table": segments.table(measured)}


@check("S06 S24 recomputing with dropout")
def recomputing(machine: Machine, folder: Path) -> Facts:
    measured = recompute.measure(machine.device, 0.5)
    kept, recomputed, _ = measured.values()
    require(recomputed.equals(kept), "other gradients when recomputed")
    return {"table": recompute.table(measured)}


@check("S07 S15 every model trains, and is evaluated on the CPU")
def models(machine: Machine, folder: Path) -> Facts:
    accuracies = {}
    for model in MODELS:
        options: dict[str, Any] = {"model": model, "width": 0.1}
        accuracy = train(machine, folder / f"{model}.pth", **options)
        config = replace(SMALL, devices=("cpu",), **options)
        elsewhere = loop.evaluate(config, folder / f"{model}.pth", log=_silent)
        require(abs(accuracy - elsewhere) < 0.03, f"{model}: {accuracy} here, {elsewhere} there")
        accuracies[model] = accuracy, elsewhere
    return accuracies


@check("S08 memory does not grow over epochs")
def growth(machine: Machine, folder: Path) -> Facts:
    machine.needs(1)
    train(machine, folder / "one.pth", epochs=1)
    gc.collect()
    first = torch.cuda.memory_allocated()
    train(machine, folder / "more.pth", epochs=4)
    gc.collect()
    later = torch.cuda.memory_allocated()
    require(later <= first + (1 << 20), f"{first} bytes after one run, {later} after more")
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return {"reserved": reserved, "after empty_cache": torch.cuda.memory_reserved()}


@check("S11 S12 S14 load and load_into onto the device")
def loading(machine: Machine, folder: Path) -> Facts:
    found = {}
    for form in FORMS:
        path = folder / f"{form}.pth"
        train(machine, path, save_form=form)
        device = str(machine.device)
        ours = ckptkit.load(path, map_location=device)
        theirs = ckptkit.load(path, map_location="cpu")
        require(all(torch.equal(ours[key].cpu(), theirs[key]) for key in theirs), f"{form} differs")
        require({str(each.device) for each in ours.values()} == {device}, f"{form} elsewhere")
        model = Cnn(*NET).to(machine.device)
        require(ckptkit.load_into(model, path).complete, f"{form} does not fit")
        found[form] = len(ours)
    return found


@check("S19 equal seeds give equal bytes")
def equal_bytes(machine: Machine, folder: Path) -> Facts:
    options: Facts = {"deterministic": True, "save_form": "full"}
    for name in ("one.pth", "two.pth"):
        train(machine, folder / name, **options)
    one, two = ((folder / name).read_bytes() for name in ("one.pth", "two.pth"))
    torch.use_deterministic_algorithms(False)
    require(one == two, "other bytes")
    return {"bytes": len(one)}


@check("resuming is exact")
def resuming(machine: Machine, folder: Path) -> Facts:
    options: Facts = {"save_form": "full", "save_every": 1, "optimizer": "adam"}
    options["deterministic"] = True
    train(machine, folder / "run.pth", **options)
    train(machine, folder / "more.pth", Files(resume=folder / "run.epoch1.pth"), **options)
    torch.use_deterministic_algorithms(False)
    one, more = (
        ckptkit.load(folder / name, map_location="cpu") for name in ("run.pth", "more.pth")
    )
    require(all(torch.equal(one[key], more[key]) for key in one), "other weights")
    return {}


# What the rows do not name


@check("amp computes in bfloat16, also in the threads of replicas")
def amp(machine: Machine, folder: Path) -> Facts:
    dtypes = {}
    for kind in ("none", "dp", "dp-balanced"):
        devices = (str(machine.device),) if kind == "none" else _pair(machine)
        dtypes[kind] = str(_output_dtype(replace(SMALL, parallel=kind, devices=devices, amp=True)))
        require(dtypes[kind] == "torch.bfloat16", f"{kind} computes in {dtypes[kind]}")
        train(machine, folder / f"{kind}.pth", parallel=kind, devices=devices, amp=True)
    if machine.gpus:
        dtypes["threads"] = str(_dtype_in_threads(machine.device))
        require(dtypes["threads"] == "torch.bfloat16", f"threads compute in {dtypes['threads']}")
    return dtypes


def _dtype_in_threads(device: torch.device) -> torch.dtype:
    """Return what two replicas on one GPU compute in, each in its thread, as on two GPUs."""
    model = nn.Linear(4, 2).to(device)
    wrapped = parallel.Replicated(model, (device,), amp=True)
    wrapped.device_ids = [device.index] * 2
    inputs = [(torch.ones(8, 4, device=device),)] * 2
    with torch.autocast(device.type, torch.bfloat16):
        outputs = wrapped.parallel_apply([model] * 2, inputs, [{}] * 2)
    dtype: torch.dtype = outputs[1].dtype
    return dtype


def _output_dtype(config: Config) -> torch.dtype:
    with parallel.group(config) as group:
        run = prepare(config, group)
        with parallel.autocast(config, group.device):
            outputs = run.wrapped(run.data.train[0][:8].to(group.device))
        dtype: torch.dtype = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).dtype
        return dtype


@check("inputs on another device under DataParallel")
def inputs_elsewhere(machine: Machine, folder: Path) -> Facts:
    """The question that the second article leaves open: must inputs be on the first device?"""
    machine.needs(1)
    gpus = list(range(machine.gpus))
    wrapped = nn.DataParallel(nn.Linear(4, 2).to(machine.device), gpus)
    found = {}
    for name in ("cpu", *(f"cuda:{number}" for number in gpus)):
        found[name] = str(wrapped(torch.ones(8, 4, device=name)).device)
        require(found[name] == "cuda:0", f"inputs on {name}: outputs on {found[name]}")
    return found


@check("DDP with nccl, a GPU for each process")
def ddp_nccl(machine: Machine, folder: Path) -> Facts:
    machine.needs(1)
    train_in_processes(machine.gpus, folder / "run.pth", parallel="ddp", accumulate=2)
    return {"processes": machine.gpus}


@check("DDP with gloo, two processes on one device")
def ddp_gloo(machine: Machine, folder: Path) -> Facts:
    device = str(machine.device)
    train_in_processes(2, folder / "run.pth", parallel="ddp", devices=(device,))
    states = ckptkit.load(folder / "run.pth", map_location="cpu", whole=True)["rng_of_ranks"]
    require(len(states) == 2, f"random states of {len(states)} processes")
    return {"device": device}


@check("FSDP saves, resumes, and is evaluated from its folder")
def fsdp(machine: Machine, folder: Path) -> Facts:
    processes = max(1, machine.gpus)
    options: Facts = {"parallel": "fsdp", "save_every": 1}
    options["devices"] = () if machine.gpus else ("cpu",)
    train_in_processes(processes, folder / "run", **options)
    files = Files(resume=folder / "run.epoch1")
    train_in_processes(processes, folder / "more", files, **options)
    found = same_weights(folder / "run", folder / "more", 1e-5)
    config = replace(SMALL, devices=(str(machine.device),))
    return {**found, "accuracy": loop.evaluate(config, folder / "run", log=_silent)}


@check("out of memory says what helps")
def out_of_memory(machine: Machine, folder: Path) -> Facts:
    machine.needs(1)
    total = torch.cuda.get_device_properties(machine.device).total_memory
    torch.cuda.set_per_process_memory_fraction(64e6 / total, machine.device)
    try:
        train(machine, folder / "run.pth", model="mlp", width=1.0)
    except ckptkit.CkptkitError as error:
        require("--batch-size" in (error.hint or ""), f"the hint is {error.hint}")
        return {"message": str(error), "hint": error.hint}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)
        torch.cuda.empty_cache()
    raise Failed("64 MB were enough")


@check("what is not deterministic on GPUs is refused")
def nondeterministic(machine: Machine, folder: Path) -> Facts:
    machine.needs(1)
    for model in ("generator", "crnn"):
        try:
            train(machine, folder / "run.pth", model=model, deterministic=True)
        except ckptkit.CkptkitError as error:
            require("no deterministic" in str(error), str(error))
        else:
            raise Failed(f"{model} trained")
    return {}


@check("checkpoints tagged with GPUs")
def tagged(machine: Machine, folder: Path) -> Facts:
    """Save what the fixtures simulate, and compare: all but values must be equal."""
    machine.needs(1)
    out = folder.parent / "cuda"
    out.mkdir(exist_ok=True)
    found: Facts = {}
    for number in range(min(machine.gpus, 2)):
        for form in FORMS:
            path = out / f"none_{form}_cuda{number}.pth"
            simulated = folder / f"simulated_{form}_{number}.pth"
            train(machine, path, devices=(f"cuda:{number}",), save_form=form, optimizer="adam")
            train(machine, folder / "cpu.pth", devices=("cpu",), save_form=form, optimizer="adam")
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


def _pair(machine: Machine) -> tuple[str, ...]:
    """Return two GPUs, or the CPU twice, which simulates two."""
    return ("cuda:0", "cuda:1") if machine.gpus > 1 else ("cpu", "cpu")


def _silent(line: str) -> None:
    """Print nothing."""
