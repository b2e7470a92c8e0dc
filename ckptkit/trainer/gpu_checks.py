"""Define the checks of :mod:`ckptkit.trainer.gpu`.

A name such as ``S25`` is the number of a technique in the table of help/trainer.md. A check
``@check(name, gpus=2)`` passes on two GPUs, and is simulated on fewer devices. The models are small
and the data is noise, because the checks test devices, not learning.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector

import ckptkit
from ckptkit.core.text import plural
from ckptkit.trainer import loop, parallel
from ckptkit.trainer.checking import DeviceCheck, Facts, GpuMachine, Witness, require
from ckptkit.trainer.config import FORMS, MODELS, Config, RunFiles
from ckptkit.trainer.log import SavedBytes
from ckptkit.trainer.models import Cnn
from ckptkit.trainer.run import Run, prepare
from ckptkit.trainer.simulated import as_on_gpus, differences, simulated_cuda

SMALL = Config(data="random", width=0.25, epochs=2, batch_size=64)
FULL: Facts = {"save_form": "full", "save_every": 1}
NET = (3, 32, 32), 10, 0.25  # arguments of the class Cnn for the model of SMALL
# number of segments -> MB that nvidia-smi shows, from an article that help/trainer.md discusses
ARTICLE = {0: 1717, 2: 1283, 5: 1043, 10: 959}
# tolerances for weights after two epochs: devices differ in summation order and TF32
CLOSE, CLOSE_ON_CPU = 1e-3, 1e-5
CHECKS: list[DeviceCheck] = []
Check = Callable[[GpuMachine], Facts]


def check(name: str, gpus: int = 1, needs: int = 0) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to CHECKS."""

    def add(function: Check) -> Check:
        CHECKS.append(DeviceCheck(name, gpus, function, needs))
        return function

    return add


def small(on: GpuMachine, **options: Any) -> Config:
    """Return the config of a small run, by default on the first device."""
    return replace(SMALL, **{"devices": (str(on.device),), **options})


def train(on: GpuMachine, name: str = "run.pth", **options: Any) -> float:
    """Train a small run, whose files are among the options. Return the accuracy."""
    files = RunFiles.of(options)
    return loop.train(small(on, **options), on.folder / name, files, log=loop.silent)


def loaded(on: GpuMachine, name: str = "run.pth", **how: Any) -> Any:
    """Load a checkpoint on the CPU."""
    return ckptkit.load(on.folder / name, **{"map_location": "cpu", **how})


@contextmanager
def prepared(on: GpuMachine, **options: Any) -> Iterator[Run]:
    """Yield a small run before its first epoch."""
    config = small(on, **options)
    with parallel.group(config) as group:
        yield prepare(config, group)


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Raise Failed unless the ``with`` block raises an error that contains a message."""
    try:
        yield
    except (ckptkit.CkptkitError, RuntimeError) as error:
        said = f"{error} {getattr(error, 'hint', '')}"
        require(message in said, said)
    else:
        require(False, f"no error with {message!r}")


def measured(on: GpuMachine, name: str = "run.pth", **options: Any) -> Facts:
    """Train a small run. Return the memory use of the last step."""
    memory = on.folder / "memory.jsonl"
    train(on, name, memory_report=memory, **options)
    last: Facts = json.loads(memory.read_text().splitlines()[-1])
    require(last["activations"] > 0, "no activations")
    return last


def train_in_processes(processes: int, out: Path, **options: Any) -> list[Facts]:
    """Train a small run in several processes, started as torchrun does.

    Returns the report of each process: rank, device, backend.
    """
    files = RunFiles.of(options)
    config = replace(SMALL, **{"save_form": "full", **options})
    with socket.create_server(("127.0.0.1", 0)) as server:
        # after this block closes the port, the first process uses the port
        port = server.getsockname()[1]
    arguments = processes, port, config, out, files
    spawn(_process, arguments, nprocs=processes)  # type: ignore[no-untyped-call]
    reports = [_report_of(out, rank) for rank in range(processes)]
    found = [json.loads(each.read_text()) for each in reports]
    for each in reports:
        each.unlink()
    return found


def _process(
    rank: int, processes: int, port: int, config: Config, out: Path, files: RunFiles
) -> None:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)

    def note(steps: list[loop.Step], title: str) -> list[loop.Step]:
        """Record the backend. The trainer calls this function when an epoch starts."""
        seen["backend"] = dist.get_backend()
        return steps

    seen: Facts = {"rank": rank}
    with Witness() as witness:
        loop.train(config, out, files, log=loop.silent, bar=note)
    seen["device"] = ", ".join(witness.gpus or sorted(witness.devices))
    _report_of(out, rank).write_text(json.dumps(seen))


def _report_of(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.name}.rank{rank}.json")


def same_weights(
    on: GpuMachine, one: str = "one.pth", other: str = "other.pth", most: float = 0.0
) -> Facts:
    """Return the largest difference of the weights in two files. Raises Failed if the difference
    exceeds `most`."""
    ours, theirs = (
        {key.removeprefix("module."): value for key, value in loaded(on, name).items()}
        for name in (one, other)
    )
    require(list(ours) == list(theirs), "other keys")
    difference = max((ours[key] - theirs[key]).abs().max().item() for key in ours)
    require(difference <= most, f"weights differ by {difference}")
    return {"largest difference": difference}


def alike(on: GpuMachine, one: Facts, other: Facts) -> Facts:
    """Train two small runs, and compare their weights."""
    train(on, "one.pth", **one)
    train(on, "other.pth", **other)
    return same_weights(on, most=CLOSE if on.gpus else CLOSE_ON_CPU)


def alike_in_processes(
    on: GpuMachine, processes: int, both: Facts, most: float = CLOSE, **own: Any
) -> Facts:
    """Train in several processes with the options `both` and `own`, and in one with `both`. Compare
    the weights."""
    reports = train_in_processes(processes, on.folder / "run.pth", **both, **own)
    train(on, "one.pth", **both)
    return {**same_weights(on, "one.pth", "run.pth", most), "processes": reports}


# Checks of the techniques in the table of help/trainer.md


@check("S01 accumulated micro-batches train the same weights as one batch")
def accumulation(on: GpuMachine) -> Facts:
    # 512 images: two steps of 200 and one of 112, whose last micro-batch is smaller
    return alike(on, {"batch_size": 200}, {"batch_size": 50, "accumulate": 4})


@check("S02 S10 DataParallel on two devices trains the same weights as one device", gpus=2)
def data_parallel(on: GpuMachine) -> Facts:
    options: Facts = {"parallel": "dp", "devices": on.pair, "keep_module_prefix": True}
    found = alike(on, {"devices": on.pair[:1]}, options)
    keys = loaded(on, "other.pth")
    require(all(key.startswith("module.") for key in keys), "keys without module.")
    if on.gpus > 1:  # the model is not on the first device
        devices = tuple(map(torch.device, on.pair))
        with refused("device_ids[0]"):
            parallel.Replicated(Cnn(*NET).to(devices[1]), devices)(torch.zeros(4, 3, 32, 32))
    return found


@check("S02 seconds to train a small model on one device and on two devices", gpus=2)
def small_models(on: GpuMachine) -> Facts:
    """Measure the time on one device and on two devices. This check cannot fail."""
    seconds = {}
    for title, options in (
        ("one device", {"devices": on.pair[:1]}),
        ("two devices", {"devices": on.pair, "parallel": "dp"}),
    ):
        train(on, **options)  # warm up
        started = monotonic()
        train(on, **options)
        seconds[title] = round(monotonic() - started, 3)
    return seconds


@check("S03 a loss on each device trains the same weights as one loss on the first device", gpus=2)
def balanced(on: GpuMachine) -> Facts:
    kinds = ("dp", "dp-balanced")
    peaks = {kind: measured(on, kind, parallel=kind, devices=on.pair)["peak"] for kind in kinds}
    return same_weights(on, *kinds, CLOSE) | {"peaks": peaks}


@check("S04 the memory report contains the model size and the bytes that nvidia-smi shows")
def memory_report(on: GpuMachine) -> Facts:
    last = measured(on)
    size = sum(each.nbytes for each in Cnn(*NET).parameters())
    require(last["parameters"] == size, f"{last['parameters']} bytes of parameters, not {size}")
    used = last.get("used", {})  # bytes of all processes, as nvidia-smi shows them
    require(all(used[gpu] >= last["reserved"][gpu] for gpu in used), f"used: {used}")
    return last


@check("S05 recomputing in segments needs less memory for activations")
def segments(on: GpuMachine) -> Facts:
    # Disable foreach, because foreach would add the size of the model to the peak.
    options: Facts = {"model": "mlp", "width": 1.0 if on.gpus else 0.05, "epochs": 1}
    options |= {"optimizer": "adam", "batch_size": 16, "foreach": False, "deterministic": True}
    rows, table = [], ["segments  activations     peak  seconds  article"]
    for number, figure in ARTICLE.items():
        row = measured(on, str(number), segments=number, **options)
        rows.append(row)
        kept, peak = row["activations"] / 1e6, max(row["peak"].values()) / 1e6
        table.append(
            f"{number:8}  {kept:8.3f} MB  {peak:4.0f} MB  {row['seconds']:7.3f}  {figure:4} MB"
        )
        same_weights(on, "0", str(number), CLOSE)
    require(rows[0]["activations"] > rows[-1]["activations"], "segments saved nothing")
    return {"rows": rows, "table": table}


@check("S06 S24 with dropout, recomputing activations trains the same weights as keeping them")
def recomputing(on: GpuMachine) -> Facts:
    """Compare a training step that keeps activations with a training step that recomputes them."""
    how: Facts = {"model": "densenet", "dropout": 0.2, "epochs": 1, "batch_size": 512}
    how |= {"deterministic": True, "foreach": False}
    kept = measured(on, "one.pth", **how)
    again = measured(on, "other.pth", memory_efficient=True, **how)
    require(again["activations"] < kept["activations"], "recomputing saved nothing")
    return {**same_weights(on, most=1e-4), "kept": kept, "recomputed": again}


@check("S07 S15 every trained model has the same accuracy on the CPU as on the training device")
def models(on: GpuMachine) -> Facts:
    accuracies = {}
    for model in MODELS:
        options: Facts = {"model": model, "width": 0.1}
        here = train(on, **options)
        config = small(on, **options, devices=("cpu",))
        there = loop.evaluate(config, on.folder / "run.pth", log=loop.silent)
        require(
            abs(here - there) < 0.03, f"{model}: accuracy {here} after training, {there} on the CPU"
        )
        accuracies[model] = here, there
    return accuracies


@check("S08 memory does not grow over epochs")
def growth(on: GpuMachine) -> Facts:
    if not on.gpus:  # the CPU has no allocator statistics, so count the bytes that autograd keeps
        with SavedBytes() as saved:
            train(on)
        require(saved.peak > 0 == saved.now, f"{saved.now} bytes are kept")
        return {"kept": saved.now, "peak": saved.peak}
    allocated = []
    for epochs in (1, 4):
        train(on, epochs=epochs)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    first, later = allocated
    require(later <= first + (1 << 20), f"{first} bytes after 1 epoch, {later} after 4 epochs")
    return {"allocated": allocated}


def device_count(visible: str) -> int:
    """Return the number of GPUs that a process sees with this CUDA_VISIBLE_DEVICES."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        with get_context("spawn").Pool(1) as pool:
            return pool.apply(torch.cuda.device_count)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ |= {} if before is None else {"CUDA_VISIBLE_DEVICES": before}


@check("S09 options choose the first device and the output device; devices can be hidden", gpus=2)
def choosing(on: GpuMachine) -> Facts:
    with refused("no device cuda:77"):
        train(on, devices=("cuda:77",))
    second = on.pair[1]
    train(on, devices=(second,))
    train(on, parallel="dp", devices=on.pair[::-1], output_device=on.pair[0])
    visible = device_count("1" if on.gpus > 1 else "")
    require(visible == int(on.gpus > 1), f"{visible} devices are visible")
    return {"second": second}


@check("S11 S12 S14 load and load_into copy weights to the device")
def loading(on: GpuMachine) -> Facts:
    found, device = {}, str(on.device)
    for form in FORMS:
        train(on, form, save_form=form)
        ours, theirs = loaded(on, form, map_location=device), loaded(on, form)
        require(all(torch.equal(ours[key].cpu(), theirs[key]) for key in theirs), f"{form} differs")
        require({str(each.device) for each in ours.values()} == {device}, f"{form} elsewhere")
        report = ckptkit.load_into(Cnn(*NET).to(on.device), on.folder / form)
        require(report.complete, f"{form} does not fit")
        found[form] = len(ours)
    return found


@check("S13 S16 S21 S22 a file saved on a GPU has the right keys, parts, dtypes and sizes")
def contents(on: GpuMachine) -> Facts:
    train(on, parallel="dp", keep_module_prefix=True)
    wrapped, state = ckptkit.open(on.folder / "run.pth"), Cnn(*NET).state_dict()
    tags = {each.device for each in wrapped.weights.values()}
    require(tags == {str(on.device)}, f"tagged {tags}")
    bare = ckptkit.strip_prefix(wrapped, "module.").weights
    found = [(name, f"torch.{each.dtype}", each.shape) for name, each in bare.items()]
    expected = [(name, str(each.dtype), tuple(each.shape)) for name, each in state.items()]
    require(found == expected, "other keys, dtypes or shapes")
    part = ckptkit.select(ckptkit.extract(wrapped, "model"), ["module.fc1.*"])
    require(list(part.weights) == ["module.fc1.weight", "module.fc1.bias"], "another part")
    name = torch.zeros(1, device=on.device).type()
    require(name == f"torch.{'cuda.' * bool(on.gpus)}FloatTensor", f"a tensor is a {name}")
    return {"tags": sorted(tags), "parameters": sum(each.numel() for each in state.values())}


@check("S17 the outputs of a recurrent model have the batch in dim 0", gpus=2)
def recurrent(on: GpuMachine) -> Facts:
    options: Facts = {"model": "crnn", "parallel": "dp", "devices": on.pair, "width": 0.1}
    train(on, **options)
    with prepared(on, **options) as run:
        scores = run.wrapped.eval()(run.data.train[0][:6].to(run.group.device))
    require(len(scores) == 6, f"the outputs are {list(scores.shape)}")
    return {"outputs": list(scores.shape)}


@check("S18 a model on two devices loads weights saved on one device", gpus=2)
def pretrained(on: GpuMachine) -> Facts:
    train(on, devices=on.pair[:1])
    devices = tuple(map(torch.device, on.pair))
    wrapped = parallel.Replicated(Cnn(*NET).to(devices[0]), devices)
    require(ckptkit.load_into(wrapped, on.folder / "run.pth").complete, "does not fit")
    wrapped(torch.zeros(4, 3, 32, 32, device=devices[0]))
    return {"added": "module."}


@check("S19 runs with equal seeds write equal bytes")
def equal_bytes(on: GpuMachine) -> Facts:
    found = []
    for name, seed in (("one.pth", 0), ("two.pth", 0), ("three.pth", 1)):
        train(on, name, deterministic=True, save_form="full", seed=seed)
        found.append((on.folder / name).read_bytes())
    require(found[0] == found[1], "other bytes")
    require(found[0] != found[2], "the seed has no effect")
    # With `benchmark`, training is faster, but results are not reproducible.
    train(on, benchmark=True)
    return {"bytes": len(found[0])}


@check("S20 every GPU has its own UUID, and empty_cache returns memory", needs=1)
def about_gpus(on: GpuMachine) -> Facts:
    train(on, empty_cache=True)
    reserved = torch.cuda.memory_reserved()
    torch.zeros(1 << 20, device=on.device)
    torch.cuda.empty_cache()
    about = [torch.cuda.get_device_properties(number) for number in range(on.gpus)]
    uuids = [str(getattr(each, "uuid", "")) for each in about]  # since torch 2.4
    require(len(set(uuids)) == on.gpus or not any(uuids), f"UUIDs {uuids}")
    require(torch.cuda.memory_reserved() <= reserved, "empty_cache returned no memory")
    return {"names": [each.name for each in about], "uuids": uuids, "reserved": reserved}


@check("S23 clipping limits the norm, and the schedule changes the learning rate")
def clipping(on: GpuMachine) -> Facts:
    """With a learning rate of 1, one step moves the weights by exactly the clipped norm."""
    how: Facts = {"lr": 1.0, "momentum": 0.0, "batch_size": 512}
    moved = {}
    for kind, norm in ((2.0, 0.0), (2.0, 0.01), (float("inf"), 0.01)):
        with prepared(on, clip_norm=norm, clip_norm_type=kind, **how) as run:
            before = parameters_to_vector(run.model.parameters()).detach()
            loop.train_epoch(run)
            change = parameters_to_vector(run.model.parameters()).detach() - before
        moved[f"{norm} of norm {kind}"] = found = change.norm(kind).item()
        require(abs(found - norm) < 1e-4 if norm else found > 0.02, f"moved by {moved}")
    train(on, lr_step=1, lr_gamma=0.5, save_form="full")
    last = loaded(on, whole=True)["scheduler"]["_last_lr"][0]
    require(abs(last - SMALL.initial_lr / 4) < 1e-9, f"a learning rate of {last}")
    return moved


@check("S25 DDP with nccl trains the same weights as one device", gpus=2, needs=2)
def ddp_nccl(on: GpuMachine) -> Facts:
    return alike_in_processes(on, on.gpus, {"accumulate": 2}, parallel="ddp")


@check("S25 DDP with gloo trains the same weights in two processes as in one process")
def ddp_gloo(on: GpuMachine) -> Facts:
    found = alike_in_processes(on, 2, {}, parallel="ddp", devices=(str(on.device),))
    states = loaded(on, whole=True)["rng_of_ranks"]
    require(len(states) == 2, f"random states of {len(states)} processes")
    return found


@check("S25 FSDP trains the same weights as one device, and resumes from a folder", gpus=2)
def fsdp(on: GpuMachine) -> Facts:
    options: Facts = {"parallel": "fsdp", "save_every": 1}
    options["devices"] = () if on.gpus > 1 else ("cpu",)
    count, folder = max(2, on.gpus), on.folder
    processes = train_in_processes(count, folder / "run", **options)
    train_in_processes(count, folder / "more", resume=folder / "run.epoch1", **options)
    found = same_weights(on, "run", "more", 1e-5)
    train(on, "one.pth")
    same_weights(on, "one.pth", "run", CLOSE)
    accuracy = loop.evaluate(small(on), folder / "run", log=loop.silent)
    return {**found, "accuracy": accuracy, "processes": processes}


# Checks of other features


@check("resuming is exact: the weights equal those of a run without a stop")
def resuming(on: GpuMachine) -> Facts:
    options: Facts = {**FULL, "optimizer": "adam", "deterministic": True}
    train(on, "one.pth", **options)
    train(on, "other.pth", resume=on.folder / "one.epoch1.pth", **options)
    return same_weights(on)


@check("a run on the GPU resumes on the CPU, and a message names both devices")
def elsewhere(on: GpuMachine) -> Facts:
    train(on, "one.pth", **FULL)
    lines: list[str] = []
    files = RunFiles(resume=on.folder / "one.epoch1.pth")
    config = small(on, **FULL, devices=("cpu",))
    loop.train(config, on.folder / "other.pth", files, log=lines.append)
    require(not on.gpus or f"on cpu instead of {on.device}" in lines[0], lines[0])
    return {"message": lines[0], **same_weights(on, most=CLOSE)}


@check("amp computes in bfloat16, also in the threads of replicas", gpus=2)
def amp(on: GpuMachine) -> Facts:
    dtypes = {}
    for kind in ("none", "dp", "dp-balanced"):
        options: Facts = {"parallel": kind, "amp": True}
        options |= {} if kind == "none" else {"devices": on.pair}
        with prepared(on, **options) as run, parallel.autocast(run.config, run.group.device):
            made: Any = run.wrapped(run.data.train[0][:8].to(run.group.device))
        dtypes[kind] = str((made if isinstance(made, Tensor) else made[0]).dtype)
        train(on, **options)
    require(set(dtypes.values()) == {"torch.bfloat16"}, f"computes in {dtypes}")
    return dtypes


@check("amp in float16 scales the loss")
def float16(on: GpuMachine) -> Facts:
    train(on, amp=True, amp_dtype="float16", save_form="full")
    scaler = loaded(on, whole=True)["scaler"]
    require(scaler["scale"] > 1, f"the scale is {scaler['scale']}")
    return {"scaler": scaler}


@check("inputs on any device work with DataParallel", gpus=2, needs=2)
def inputs_elsewhere(on: GpuMachine) -> Facts:
    """Answer an open question of an article about DataParallel: must inputs be on the first
    device?"""
    gpus = list(range(on.gpus))
    wrapped = nn.DataParallel(nn.Linear(4, 2).to(on.device), gpus)
    found = {}
    for name in ("cpu", *(f"cuda:{number}" for number in gpus)):
        found[name] = str(wrapped(torch.ones(8, 4, device=name)).device)
        require(found[name] == "cuda:0", f"inputs on {name}: outputs on {found[name]}")
    return found


@check("SyncBatchNorm uses the statistics of all processes", gpus=2, needs=2)
def sync_batch_norm(on: GpuMachine) -> Facts:
    both: Facts = {"model": "densenet", "epochs": 1}
    return alike_in_processes(on, on.gpus, both, 1e-2, parallel="ddp", sync_batch_norm=True)


@check("workers load batches into pinned memory")
def pinned(on: GpuMachine) -> Facts:
    return alike(on, {"epochs": 1}, {"epochs": 1, "workers": 2})


@check("a snapshot of the allocator is written to a file", needs=1)
def snapshot(on: GpuMachine) -> Facts:
    path = on.folder / "snapshot.pickle"
    train(on, memory_snapshot=path, epochs=1)
    require(path.stat().st_size > 1000, "the snapshot is empty")
    return {"bytes": path.stat().st_size}


@check("an out-of-memory error has a hint", needs=1)
def out_of_memory(on: GpuMachine) -> Facts:
    total = torch.cuda.get_device_properties(on.device).total_memory
    torch.cuda.set_per_process_memory_fraction(64e6 / total, on.device)
    try:
        for message in ("Tried to allocate", "--batch-size"):
            with refused(message):
                train(on, model="mlp", width=1.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, on.device)
        torch.cuda.empty_cache()
    # The check must run layers on the GPU, so train once with enough memory.
    train(on, epochs=1)
    return {}


@check("--deterministic refuses models without deterministic kernels", needs=1)
def nondeterministic(on: GpuMachine) -> Facts:
    for model in parallel.NONDETERMINISTIC:
        with refused("no deterministic"):
            train(on, model=model, deterministic=True)
        train(on, model=model, width=0.1, epochs=1)
    return {}


def keep(on: GpuMachine, name: str) -> None:
    """Copy a checkpoint to the fixtures folder, if the machine has such a folder."""
    path = on.folder / name
    if on.fixtures:
        for source in path.iterdir() if path.is_dir() else [path]:
            copy = on.fixtures / source.relative_to(path.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def compare_with_twin(real: Path, plain: Path, devices: list[str], gpus: int) -> None:
    """Require that a checkpoint saved on a GPU equals its simulation.

    The simulation changes `plain`, the checkpoint of the same run on the CPU.

    The comparison includes tags, layouts, the order of storages, keys, strings and generator
    states. The comparison excludes element values and versions.
    """
    simulated = plain.with_name(f"simulated_{real.name}")
    loaded = ckptkit.load(plain, map_location="cpu", whole=True, mmap=False)
    moved = as_on_gpus(loaded, devices, gpus)
    with simulated_cuda(torch.device(devices[0]).index or 0, only=moved), simulated.open("wb") as f:
        torch.save(loaded, f)
    found = differences(real, simulated)
    require(not found, f"{real.name} differs from its simulation: {'; '.join(found[:4])}")


def twins(on: GpuMachine, name: str, devices: Sequence[str], **options: Any) -> list[Facts]:
    """Train on GPUs and on the CPU, and compare the checkpoint with its simulation.

    DDP trains in two processes. Returns the reports of the processes on GPUs.
    """
    reports: list[list[Facts]] = []
    for out, where in ((name, tuple(devices)), ("cpu.pth", ("cpu",))):
        if options.get("parallel") == "ddp":
            reports.append(train_in_processes(2, on.folder / out, devices=where, **options))
        else:
            train(on, out, devices=where, **options)
    compare_with_twin(on.folder / name, on.folder / "cpu.pth", list(devices), on.gpus)
    keep(on, name)
    return reports[0] if reports else []


def tagged(on: GpuMachine, index: int) -> Facts:
    """Save all forms of checkpoints on one GPU, and compare them with simulated checkpoints."""
    for form in FORMS:
        name = f"none_{form}_cuda{index}.pth"
        twins(on, name, [f"cuda:{index}"], save_form=form, optimizer="adam")
    return {"files": len(FORMS)}


for _index in (0, 1):
    # A run on cuda:1 uses only one GPU, but cuda:1 exists only on machines with two GPUs.
    check(f"checkpoints tagged cuda:{_index} equal their simulations", needs=_index + 1)(
        partial(tagged, index=_index)
    )


@check("cuDNN stores the weights of an LSTM in one storage", needs=1)
def lstm_storage(on: GpuMachine) -> Facts:
    name = "crnn_bare_cuda0.pth"
    train(on, name, model="crnn", width=0.05, epochs=1, save_form="bare")
    weights = ckptkit.open(on.folder / name).weights
    views = {name: each for name, each in weights.items() if name.startswith("recurrent.")}
    storages = {id(each.storage) for each in views.values()}
    require(len(storages) == 1, f"the LSTM has {plural(len(storages), 'storage')}")
    keep(on, name)
    return {"offsets": {name: each.offset for name, each in views.items()}}


@check("checkpoints of DataParallel and DDP equal their simulations", gpus=2, needs=2)
def tagged_in_parallel(on: GpuMachine) -> Facts:
    options: Facts = {"save_form": "full", "optimizer": "adam"}
    prefixed: Facts = {**options, "keep_module_prefix": True}
    twins(on, "dp_full_cuda0.pth", on.pair, parallel="dp", **prefixed)
    processes = twins(on, "ddp_full_cuda0.pth", on.pair, parallel="ddp", **prefixed)
    found = []
    for name, devices in (("fsdp_full", on.pair), ("fsdp_cpu", ("cpu",))):
        train_in_processes(2, on.folder / name, parallel="fsdp", devices=devices, **options)
        weights = ckptkit.open(on.folder / name).weights
        found.append({key: each.shape for key, each in weights.items()})
    require(found[0] == found[1], "FSDP: names or shapes differ")
    keep(on, "fsdp_full")
    return {"processes": processes}
