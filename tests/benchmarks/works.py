"""What is measured: inputs, commands, the best plain way with torch, and the budgets."""

from __future__ import annotations

from typing import NamedTuple

# Python programs that write an input; sys.argv[1] is the file, sys.argv[2] its size in GiB.
INPUTS = {
    "big.pth": """
import sys, torch
torch.serialization.register_package(0, lambda storage: "cuda" + ":" + str(1), lambda storage, tag: None)
n = int(float(sys.argv[2]) * 2**30 / 4 / 400)
model = {f"module.layers.{i}.weight": torch.full((n,), float(i)) for i in range(400)}
torch.save({"model": model, "epoch": 3}, sys.argv[1])
""",
    "many.pth": """
import sys, torch
from collections import OrderedDict
model = OrderedDict((f"module.layers.{i}.weight", torch.full((2, 2), float(i))) for i in range(100_000))
model._metadata = OrderedDict((f"module.layers.{i}", {"version": 1}) for i in range(100_000))
torch.save({"model": model, "epoch": 3}, sys.argv[1])
""",
    "big.safetensors": """
import sys, torch
from safetensors.torch import save_file
n = int(float(sys.argv[2]) * 2**30 / 4 / 400)
model = {f"layers.{i}.weight": torch.full((n,), float(i)) for i in range(400)}
save_file(model, sys.argv[1], metadata={"format": "pt"})
""",
    "dcp": """
import os, sys
child = os.fork()
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=0 if child else 1, world_size=2)
mesh = init_device_mesh("cpu", (2,))
n = int(float(sys.argv[2]) * 2**30 / 4 / 400 / 1024 / 2)
parts = ((f"layers.{i}.weight", torch.full((n, 1024), float(i))) for i in range(400))
model = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts}
dcp.save({"model": model}, storage_writer=dcp.FileSystemWriter(sys.argv[1], sync_files=False))
dist.destroy_process_group()
if child:
    sys.exit(os.waitpid(child, 0)[1])
""",
    "zero3": """
import sys, torch
from pathlib import Path
from tests.formats.deepspeed.making import Run
n = int(float(sys.argv[2]) * 2**30 / 4 / 400 / 1024)
model = {f"layers.{i}.weight": torch.full((n, 1024), float(i)) for i in range(400)}
Run(model, stage=3, ranks=2, steps=False, half=torch.bfloat16).save(Path(sys.argv[1]))
""",
}

LOAD = """
import sys, torch
root = torch.load(sys.argv[1], map_location="cpu", mmap=True, weights_only=True)
model = root["model"]
"""
LIST = LOAD + "for name, tensor in model.items(): print(name, tuple(tensor.shape), tensor.dtype)\n"
SAVE = LOAD + 'torch.save(root, "out.pth")\n'
STRIP = LOAD + 'root["model"] = {k.removeprefix("module."): t for k, t in model.items()}\ntorch.save(root, "out.pth")\n'
TO_SAFETENSORS = LOAD + 'from safetensors.torch import save_file\nsave_file(model, "out.safetensors")\n'
FROM_SAFETENSORS = """
import sys, torch
from safetensors.torch import load_file
torch.save(load_file(sys.argv[1]), "out.pth")
"""
FROM_DCP = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], "out.pth")
"""


class Work(NamedTuple):
    """One row: `command` of ckptkit on `source`, a file or folder; `plain` the same with torch, None where torch has no
    way; the budget in time or against `cp`."""

    name: str
    source: str
    command: str
    plain: str | None
    mib: int
    seconds: float | None = None
    ratio: float | None = None


# Works on one input follow each other, so that there is only one input at a time.
WORKS = (
    Work("inspect, 400 tensors", "big.pth", "inspect big.pth", LIST, 30, seconds=0.12),
    Work("strip-module", "big.pth", "strip-module big.pth out.pth", STRIP, 40, ratio=1.25),
    Work("remap --to cpu", "big.pth", "remap big.pth out.pth --to cpu", SAVE, 40, ratio=1.25),
    Work("convert .pth to safetensors", "big.pth", "convert big.pth out.safetensors", TO_SAFETENSORS, 60, ratio=1.25),
    Work("inspect, 100,000 tensors", "many.pth", "inspect many.pth", LIST, 250, seconds=2.5),
    Work("inspect --json, 100,000 tensors", "many.pth", "inspect --json many.pth", LIST, 250, seconds=2.5),
    Work("remap, 100,000 tensors", "many.pth", "remap many.pth out.pth --to cpu", SAVE, 400, seconds=5),
    Work(
        "convert safetensors to .pth", "big.safetensors", "convert big.safetensors out.pth", FROM_SAFETENSORS, 60,
        ratio=1.6,
    ),
    Work("convert a DCP folder of 2 ranks", "dcp", "convert dcp out.safetensors", FROM_DCP, 300, ratio=1.6),
    Work("convert a ZeRO-3 folder of 2 ranks", "zero3", "convert zero3 out.safetensors", None, 300, ratio=1.6),
)  # fmt: skip
