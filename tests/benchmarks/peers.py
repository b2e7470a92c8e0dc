"""The same work by other programs: one for each, run as ``python -c PROGRAM INPUT``, or a command.

torch is used in the best two ways that it has, ``mmap`` and not; safetensors in its own words.
`mergekit` reads torch files lazily and writes shards, here one; `brainsurgery` carries out a plan
on flat state_dicts. `transformers` loads a model and saves it in its new layout; `torchtitan` has an
adapter for each model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache

from tests.benchmarks.inputs import ENCODE

# The plain ways. Budgets compare with the best.
TORCH = ("torch", "torch mmap", "safetensors", "dcp_to_torch_save")

_LOAD = "import sys, torch\nmodel = torch.load(sys.argv[1], map_location='cpu', mmap={mmap}, weights_only=True)\n"
_SAVE = "torch.save(model, 'out.pth')\n"
_SAVE_FILE = "from safetensors.torch import save_file\nsave_file(model, 'out.safetensors')\n"
_LOAD_FILE = (
    "import sys, torch\nfrom safetensors.torch import load_file\nmodel = load_file(sys.argv[1])\n"
)
_STRIP = "model = {name.removeprefix('module.'): tensor for name, tensor in model.items()}\n"
_CAST = "model = {name: tensor.bfloat16() for name, tensor in model.items()}\n"
_TRANSPOSE = "model = {name: tensor.T.contiguous() for name, tensor in model.items()}\n"
_LIST = "for name, tensor in model.items(): print(name, tuple(tensor.shape), tensor.dtype)\n"
_LIST_SHARDS = """
import glob, sys
from safetensors import safe_open
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safe_open(path, "pt") as file:
        for name in file.keys():
            part = file.get_slice(name)
            print(name, part.get_shape(), part.get_dtype())
"""
_DIGEST = "import hashlib\nfor tensor in model.values(): print(hashlib.sha256(tensor.numpy()).hexdigest())\n"
_EQUAL = """
other = torch.load(sys.argv[2], map_location='cpu', mmap={mmap}, weights_only=True)
assert list(model) == list(other) and all(torch.equal(model[name], other[name]) for name in model)
"""
_TOUCH = "print(sum(int(tensor.view(torch.uint8).flatten()[::4096].sum()) for tensor in model.values()))\n"
_MODEL = """
from torch import nn
with torch.device("meta"):
    layers = nn.ModuleList(nn.Linear(*tensor.shape[::-1], bias=False) for tensor in model.values())
net = nn.ModuleDict({"module": nn.ModuleDict({"layers": layers})}).to_empty(device="cpu")
for parameter in net.parameters():
    parameter.detach().zero_()
"""
_LOAD_MAPPED = _LOAD.replace("{mmap}", "True")  # for the shapes
# Loading is measured inside the process, the second time: importing torch takes longer than it.
_START = """
import resource, sys, time
def clock():
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), spent.ru_utime + spent.ru_stime
began = clock()
"""
_STOP = 'print("took", *(end - start for start, end in zip(began, clock())), file=sys.stderr)\n'
_OURS = "import ckptkit, ckptkit.loading\nckptkit.load(sys.argv[1], 'cpu')\n"


def _loading(*steps: str) -> str:
    """Return a program that measures its last step."""
    return "".join((*steps[:-1], _START, steps[-1], _STOP))


_TORCH_IS_THERE = "import sys, torch\n"
_LOAD_TOUCHED = _loading(_TORCH_IS_THERE, _LOAD_MAPPED, _LOAD + _TOUCH)
_LOAD_FILE_TOUCHED = _loading(_TORCH_IS_THERE, _LOAD_FILE, _LOAD_FILE + _TOUCH)
_FILL = _loading(_LOAD_MAPPED, _MODEL, _LOAD + "net.load_state_dict(model)\n")
_FILL_SAFE = _loading(
    _LOAD_FILE,
    _TORCH_IS_THERE,
    _MODEL,
    "from safetensors.torch import load_model\n",
    "load_model(net, sys.argv[1])\n",
)
_OUR_FILL = "ckptkit.load_into(net, sys.argv[1])\n"
# What the library does, by the job.
LIBRARY = {
    "load": _loading(_TORCH_IS_THERE, _OURS, "model = ckptkit.load(sys.argv[1], 'cpu')\n" + _TOUCH),
    "load safetensors": _loading(
        _TORCH_IS_THERE, _OURS, "model = ckptkit.load(sys.argv[1])\n" + _TOUCH
    ),
    "fill": _loading(_LOAD_MAPPED, _MODEL, _OURS, _OUR_FILL),
    "fill safetensors": _loading(_LOAD_FILE, _TORCH_IS_THERE, _MODEL, _OURS, _OUR_FILL),
}
_OTHER = "other = torch.load(sys.argv[2], map_location='cpu', mmap={mmap}, weights_only=True)\n"
_AVERAGE = "model = {name: (tensor + other[name]) / 2 for name, tensor in model.items()}\n"
_STATS = (
    "for name, t in model.items():\n"
    "    print(name, t.min(), t.max(), t.mean(), t.std(), (t == 0).sum(), t.isfinite().all(), torch.histc(t, 64))\n"
)
_CLOSE = "assert all(torch.allclose(model[name], other[name], 0, 1e-6) for name in model)\n"
_DCP = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], "out.pth")
"""
_MERGEKIT = """
import sys, warnings
warnings.simplefilter("ignore")
from mergekit.io import LazyTensorLoader, ShardedTensorIndex, TensorWriter
index = ShardedTensorIndex.from_file(sys.argv[1])
loader = LazyTensorLoader(index)
with TensorWriter("out", max_shard_size=-1, safe_serialization={safe}) as writer:
    for name in index.tensor_paths:
        writer.save_tensor(name{strip}, loader.get_tensor(name))
"""
_BRAINSURGERY = """
import sys, brainsurgery
plan = 'inputs: ["model::' + sys.argv[1] + '"]\\ntransforms: [{transforms}]\\noutput: {output}\\n'
open("out.yaml", "w").write(plan)
sys.argv[1:] = ["--no-summarize", "--log-level", "error", "out.yaml"]
brainsurgery.main()
"""
_MOVE = '{move: {from: "module\\\\\\\\.(.+)", to: "\\\\\\\\1"}}'

_COMPRESSED_TENSORS = """
import sys
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint
convert_checkpoint(sys.argv[1], "out", FP8BlockDequantizer.from_pretrained(sys.argv[1]), device="cpu")
"""
_NOTHING = '{cast_: {target: ".+", to: float32}}'  # a plan that changes nothing has no output


_TRANSFORMERS = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained("out", save_original_format=False)
"""
_TRANSFORMERS_SHARDS = _TRANSFORMERS.replace("save_original_format=False", 'max_shard_size="500MB"')
_TORCHTITAN = """
import sys, torch
from types import SimpleNamespace as Names
from safetensors.torch import save_file
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
layer = Names(attention=Names(n_heads=16, n_kv_heads=16, head_dim=64))
adapter = Llama3StateDictAdapter(Names(layers=[layer], dim=1024, enable_weight_tying=False), None)
model = torch.load(sys.argv[1], map_location="cpu", mmap=True, weights_only=True)
save_file({name: each.contiguous() for name, each in adapter.to_hf(model).items()}, "out.safetensors")
"""


def _both(program: str) -> dict[str, str]:
    """With torch, each tensor read when it is loaded or, mapped, when it is needed."""
    return {
        "torch": program.replace("{mmap}", "False"),
        "torch mmap": program.replace("{mmap}", "True"),
    }


def _mergekit(safe: bool, strip: str = "") -> str:
    return _MERGEKIT.replace("{safe}", str(safe)).replace("{strip}", strip)


def _brainsurgery(output: str, transforms: str) -> str:
    return _BRAINSURGERY.replace("{transforms}", transforms).replace("{output}", output)


# Tensor by tensor: the bytes of all, without the header of a file.
_GGUF = """
import sys
from gguf import GGUFReader, dequantize
with open("out.safetensors", "wb") as file:
    for tensor in GGUFReader(sys.argv[1]).tensors:
        file.write(dequantize(tensor.data, tensor.tensor_type).data)
"""

# save_pretrained raises for a model that was a GGUF file.
_TRANSFORMERS_GGUF = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(".", gguf_file=sys.argv[1], dtype=torch.bfloat16)
state = model.state_dict()
del state["lm_head.weight"]  # which is the embedding
save_file(state, "out.safetensors")
"""

# The formula, one matrix after another, and what peft does with a model of them.
_LORA = """
import sys, torch
from safetensors.torch import load_file, save_file
base, adapter = load_file(f"{sys.argv[1]}/base.safetensors"), load_file(f"{sys.argv[1]}/adapter/adapter_model.safetensors")
for name, weight in base.items():
    a, b = (adapter[f"base_model.model.{name.removesuffix('weight')}lora_{each}.weight"] for each in "AB")
    base[name] = (weight.float() + b @ a * 2).to(weight.dtype)
save_file(base, "out.safetensors")
"""
_PEFT = """
import sys, peft
from torch import nn
from safetensors.torch import load_file, save_file
base = load_file(f"{sys.argv[1]}/base.safetensors")
net = nn.Module()
with __import__("torch").device("meta"):
    net.l = nn.ModuleList(nn.Linear(*each.shape[::-1], bias=False) for each in base.values())
net.load_state_dict(base, assign=True)
merged = peft.PeftModel.from_pretrained(net, f"{sys.argv[1]}/adapter").merge_and_unload()
save_file({name: each.contiguous() for name, each in merged.state_dict().items()}, "out.safetensors")
"""

# As mergekit does it, in one process, with what its options for less memory give.
_MERGE = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
source, density = sys.argv[1], {"density": 0.5} if METHOD in ("ties", "dare_ties") else {}
models = [{"model": f"{source}/{name}", "parameters": {"weight": 1.0, **density}} for name in "ab"]
config = {"merge_method": METHOD, "models": models, "dtype": "bfloat16" if "bfloat16" in source else "float32"}
if METHOD == "slerp":
    config |= {"base_model": f"{source}/a", "parameters": {"t": 0.5}}
elif METHOD != "linear":
    config["base_model"] = f"{source}/base"
options = MergeOptions(copy_tokenizer=False, lazy_unpickle=True, write_model_card=False, quiet=True)
run_merge(MergeConfiguration.model_validate(config), "out", options)
"""
_DIFFER = """
import sys
from safetensors.torch import load_file
one, other = (load_file(f"{sys.argv[1]}/{name}/model.safetensors") for name in "ab")
for name, a in one.items():
    a, b = a.float(), other[name].float()
    change = a - b
    print(name, change.abs().max(), change.norm() / b.norm(), a.flatten() @ b.flatten() / a.norm() / b.norm())
"""
_CAST_FILE = (
    "import torch\nmodel = {name: tensor.to(torch.DTYPE) for name, tensor in model.items()}\n"
)

# By what is done, then by who does it.
PROGRAMS: dict[str, dict[str, str]] = {
    "list": _both(_LOAD + _LIST),
    "list safetensors": {"safetensors": _LOAD_FILE + _LIST},
    "list shards": {"safetensors": _LIST_SHARDS},
    "rewrite": _both(_LOAD + _SAVE),
    "strip": {
        **_both(_LOAD + _STRIP + _SAVE),
        "mergekit": _mergekit(False, ".removeprefix('module.')"),
        "brainsurgery": _brainsurgery("{path: out.pth, format: torch}", _MOVE),
    },
    "to safetensors": {
        **_both(_LOAD + _SAVE_FILE),
        "mergekit": _mergekit(True),
        "brainsurgery": _brainsurgery("{path: out.safetensors, format: safetensors}", _NOTHING),
    },
    "from legacy": {"torch": (_LOAD + _SAVE).replace("{mmap}", "False")},  # which cannot be mapped
    "from safetensors": {"safetensors": _LOAD_FILE + _SAVE},
    "strip safetensors": {"safetensors": _LOAD_FILE + _STRIP + _SAVE_FILE},
    "cast": _both(_LOAD + _CAST + _SAVE),
    "digest": _both(_LOAD + _DIGEST),
    "average": _both(_LOAD + _OTHER + _AVERAGE + _SAVE),
    "stats": _both(_LOAD + _STATS),
    "close": _both(_LOAD + _OTHER + _CLOSE),
    "equal": _both(_LOAD + _EQUAL),
    "load": _both(_LOAD_TOUCHED),
    "load safetensors": {"safetensors": _LOAD_FILE_TOUCHED},
    "fill": _both(_FILL),
    "fill safetensors": {"safetensors": _FILL_SAFE},
    "extract": _both(_LOAD + "model = model['model']\n" + _SAVE),
    "transpose": {"safetensors": _LOAD_FILE + _TRANSPOSE + _SAVE_FILE},
    "dcp": {"dcp_to_torch_save": _DCP},
    "dequantize": {"compressed-tensors": _COMPRESSED_TENSORS},
    "gguf": {"gguf-py": _GGUF},
    "gguf model": {"transformers": _TRANSFORMERS_GGUF},
    "stack experts": {"transformers": _TRANSFORMERS},
    "shards": {"transformers": _TRANSFORMERS_SHARDS},
    "from torchtitan": {"torchtitan": _TORCHTITAN},
    **{
        f"merge {name.partition('_a')[0].replace('_', '-')}": {
            "mergekit": _MERGE.replace("METHOD", repr(name))
        }
        for name in ("linear", "slerp", "task_arithmetic", "ties", "dare_ties")
    },
    "differ": {"safetensors": _DIFFER},
    **{
        f"cast to {dtype}": {
            "safetensors": _LOAD_FILE + _CAST_FILE.replace("DTYPE", dtype) + _SAVE_FILE
        }
        for dtype in ("float16", "bfloat16", "float32")
    },
    "lora": {"torch": _LORA, "peft": _PEFT},
    "delta": {"slime": ENCODE + "import sys\nencoded(Path(sys.argv[1]), Path('out'))\n"},
    "start": {"python": "pass", "import torch": "import torch"},
    "none": {},
}
COMMANDS = {"digest": {"sha256sum": ["sha256sum"]}, "equal": {"cmp": ["cmp"]}}
NEEDS = {
    "gguf-py": "gguf",
    "mergekit": "mergekit.io",
    "brainsurgery": "brainsurgery.transforms",
    "compressed-tensors": "compressed_tensors.entrypoints.convert",
    "transformers": "transformers",
    "peft": "peft",
    "torchtitan": "torchtitan.models.llama3.state_dict_adapter",
}


def commands(
    job: str, pythons: Sequence[str], files: list[str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The commands of those who do `job`, by name; and why others do not. An optional peer runs in
    the first of `pythons` that has it."""
    found = {name: [*command, *files] for name, command in COMMANDS.get(job, {}).items()}
    skipped = {}
    for name, program in PROGRAMS[job].items():
        whys = [missing(NEEDS[name], python) for python in pythons] if name in NEEDS else [""]
        if all(whys):
            skipped[name] = whys[0]
        else:
            python = pythons[whys.index("")] if name in NEEDS else sys.executable
            found[name] = [python, "-c", program, *files]
    return found, skipped


@cache
def missing(
    module: str, python: str, call: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> str:
    """Why `python` cannot import `module`, "" if it can."""
    done = call([python, "-W", "ignore", "-c", f"import {module}"], capture_output=True, text=True)
    return (
        done.stderr.strip().rpartition("\n")[2] or "cannot be imported" if done.returncode else ""
    )
