"""The inputs: Python programs that write them as torch, safetensors and DeepSpeed do.

``sys.argv`` is the path, the rows and columns of each float32 tensor, and the number of tensors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# The imports and arguments of programs that write folders.
_FOLDER = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
path, rows, columns, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
"""
_STATE = """
import sys, torch
from collections import OrderedDict
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
# numbers such as weights have: equal ones take some works longer, and others less
numbers = torch.empty(rows, columns).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
model = OrderedDict((f"module.layers.{i}.weight", numbers.roll(i)) for i in range(count))
model._metadata = OrderedDict((f"module.layers.{i}", {"version": 1}) for i in range(count))
"""
_ON_GPU = """
torch.serialization.register_package(0, lambda storage: "cuda" + ":" + str(1), lambda storage, tag: None)
"""
# The names of a model of 60 layers with as many experts as the number of tensors needs.
_EXPERTS = """
import json, os, sys, torch
from safetensors.torch import save_file
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
names = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
    for layer in range(60) for expert in range(-(-count // 180)) for name in ("gate", "up", "down")
][:count]
"""
PROGRAMS = {
    "pth": _STATE + _ON_GPU + "torch.save(model, path)\n",
    "wrapped": _STATE + _ON_GPU + 'torch.save({"model": model, "epoch": 3}, path)\n',
    "legacy": _STATE + _ON_GPU + "torch.save(model, path, _use_new_zipfile_serialization=False)\n",
    "safetensors": _STATE
    + """
from safetensors.torch import save_file
save_file(model, path, metadata={"format": "pt"})
""",
    "matrix": _STATE
    + """
from safetensors.torch import save_file
row = 32768 if numbers.numel() > 32768 else 4
block = numbers.flatten()[: numbers.numel() // row * row].view(torch.uint8).view(-1, row)
save_file({"w": block.repeat(count, 1)}, path)
""",
    "names": _EXPERTS
    + """
save_file({name: torch.zeros(rows, columns) for name in names}, path)
""",
    "shards": _EXPERTS
    + """
os.makedirs(path)
places, each = {}, -(-count // 96)
total = -(-count // each)
for number in range(total):
    file = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
    here = names[number * each : (number + 1) * each]
    save_file({name: torch.zeros(rows, columns) for name in here}, f"{path}/{file}")
    places.update(dict.fromkeys(here, file))
index = {"metadata": {"total_size": 4 * rows * columns * count}, "weight_map": places}
with open(f"{path}/model.safetensors.index.json", "w") as file:
    json.dump(index, file)
""",
    "dcp": """
import os, sys
child = os.fork()
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=0 if child else 1, world_size=2)
mesh = init_device_mesh("cpu", (2,))
parts = ((f"layers.{i}.weight", torch.full((rows // 2, columns), float(i))) for i in range(count))
model = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts}
dcp.save({"model": model}, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
dist.destroy_process_group()
if child:
    sys.exit(os.waitpid(child, 0)[1])
""",
    "ranks": """
import os, sys
rank = next((each for each in (1, 2, 3) if not os.fork()), 0)
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(path, exist_ok=True)
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store4"), rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (4,))
parts = ((f"layers.{i}.weight", torch.full((max(1, rows // 4), columns), i + rank / 4)) for i in range(count))
model = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts}
torch.save(model, f"{path}/model_world_size_4_rank_{rank}.pt")
dist.barrier()
dist.destroy_process_group()
if not rank:
    sys.exit(max(os.waitpid(-1, 0)[1] for _ in range(3)))
""",
    "columns": """
import os, sys, torch
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(path, exist_ok=True)
for rank in range(4):
    whole = {"norm.weight": torch.ones(4 * max(1, columns // 4))}
    for i in range(count):
        whole[f"layers.{i}.attention.wo.weight"] = torch.full((rows, max(1, columns // 4)), i + rank / 4)
    torch.save(whole, f"{path}/consolidated.{rank:02d}.pth")
""",
    "zero3": """
import sys, torch
from pathlib import Path
from tests.formats.deepspeed.making import Run
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
model = {f"layers.{i}.weight": torch.full((rows, columns), float(i)) for i in range(count)}
Run(model, stage=3, ranks=2, steps=False, half=torch.bfloat16).save(Path(path))
""",
}
_CODES = (
    _FOLDER
    + """
# codes of as many bytes of bfloat16 as the size says, in matrices such as real models have
columns, rows = 4096, max(128, rows // 2 // 128 * 128)
path.mkdir()
tensors, method = {}, None
draw = torch.Generator().manual_seed(0)
def bits(*shape, dtype=torch.uint8):
    return torch.randint(0, 120, shape, generator=draw, dtype=torch.uint8).to(dtype)
"""
)
_MXFP4 = """
for i in range(count):
    tensors[f"NAMEblocks"] = bits(1, rows, columns // 32, 16)
    tensors[f"NAMEscales"] = bits(1, rows, columns // 32) // 8 + 110  # 2**-17 to 2**-3
"""
_SAVED = """
save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
(path / "config.json").write_text(json.dumps({"quantization_config": method} if method else {}))
"""
PROGRAMS |= {
    "fp8": _CODES + """
for i in range(count):
    tensors[f"l.{i}.weight"] = bits(rows, columns).view(torch.float8_e4m3fn)
    tensors[f"l.{i}.weight_scale_inv"] = torch.rand(rows // 128, columns // 128, generator=draw) / 100
method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
""" + _SAVED,
    "mxfp4": _CODES + _MXFP4.replace("NAME", "l.{i}.w.") + _SAVED,
    "mxfp4-transposed": _CODES + _MXFP4.replace("NAME", "model.layers.{i}.mlp.experts.down_proj_")
    + "method = {'quant_method': 'mxfp4'}" + _SAVED,
    "gptq": _CODES + """
index = torch.arange(columns, dtype=torch.int32) // 128
for i in range(count):
    tensors[f"l.{i}.qweight"] = bits(columns // 2, rows).view(-1).view(torch.int32).view(columns // 8, rows)
    tensors[f"l.{i}.qzeros"] = torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32)
    tensors[f"l.{i}.scales"] = torch.rand(columns // 128, rows, generator=draw).half() / 100
    tensors[f"l.{i}.g_idx"] = index.clone()
method = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
""" + _SAVED,
}  # fmt: skip
PROGRAMS |= {
    "experts": _FOLDER + """
layers, experts, matrix = max(1, count // 24), 8, torch.full((rows, columns), 0.5)
square, norm, words = torch.full((columns, columns), 0.5), torch.ones(columns), torch.ones(64, columns)
model = {"model.embed_tokens.weight": words, "model.norm.weight": norm, "lm_head.weight": words}
for i in range(layers):
    layer = f"model.layers.{i}."
    model |= {f"{layer}self_attn.{p}_proj.weight": square for p in "qkvo"}
    model |= {f"{layer}{n}_layernorm.weight": norm for n in ("input", "post_attention")}
    moe = f"{layer}block_sparse_moe."
    model[f"{moe}gate.weight"] = torch.ones(experts, columns)
    for e in range(experts):
        model |= {f"{moe}experts.{e}.w{n}.weight": matrix.T if n == 2 else matrix for n in (1, 2, 3)}
path.mkdir()
model = {name: tensor.clone().contiguous() for name, tensor in model.items()}
save_file(model, path / "model.safetensors", metadata={"format": "pt"})
(path / "config.json").write_text(json.dumps({
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": "float32", "hidden_size": columns,
    "intermediate_size": rows, "num_hidden_layers": layers, "num_local_experts": experts, "vocab_size": 64,
    "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False,
}))
""",
    "titan": """
import sys, torch
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
columns = max(32, columns)  # of 16 heads
square, norm, words = torch.full((columns, columns), 0.5), torch.ones(columns), torch.ones(64, columns)
model = {"tok_embeddings.weight": words, "norm.weight": norm, "lm_head.weight": words}
for i in range(max(1, count // 7)):
    attention = f"layers.{i}.attention."
    model |= {f"{attention}qkv_linear.w{p}.weight": square for p in "qkv"} | {f"{attention}wo.weight": square}
    model |= {f"layers.{i}.{n}_norm.weight": norm for n in ("attention", "ffn")}
    model |= {f"layers.{i}.feed_forward.w{n}.weight": torch.full((rows, columns), 0.5) for n in (1, 2, 3)}
torch.save({name: tensor.clone() for name, tensor in model.items()}, path)
""",
}  # fmt: skip
# A delta as slime encodes it: all cores, a tensor at a time, each whole in memory.
ENCODE = """
import json, os, numpy, torch, xxhash, zstandard
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from safetensors.torch import load_file, save_file
def encoded(folder, target):
    old, new = (load_file(folder / f"{name}.safetensors") for name in ("old", "new"))
    def work(name):
        before, after = (each[name].view(-1).view(torch.uint8).numpy() for each in (old, new))
        frame = zstandard.ZstdCompressor(level=1).compress((before ^ after).data)
        return torch.frombuffer(bytearray(frame), dtype=torch.uint8), xxhash.xxh3_128(after.data).hexdigest()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(new, pool.map(work, new)))
    file = "model-00000-of-00001.safetensors"
    os.makedirs(target)
    frames = {name: frame for name, (frame, _) in found.items()}
    save_file(frames, target / file, {name: digest for name, (_, digest) in found.items()})
    said = {"version": "000001", "base_version": "000000", "delta_encoding": "xor", "compression_format": "zstd"}
    index = {"metadata": {**said, "checksum_format": "xxh3-128"}, "weight_map": dict.fromkeys(frames, file)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
"""
# Two states of a model of bfloat16, each of half the size, one element of a hundred changed.
PROGRAMS["step"] = (
    ENCODE
    + """
import sys
path, rows, columns, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
draw = torch.Generator().manual_seed(0)
numbers = torch.empty(rows, columns).normal_(std=0.02, generator=draw).bfloat16()
model = {f"l.{i}.weight": numbers.roll(i).contiguous() for i in range(count)}
path.mkdir()
save_file(model, path / "old.safetensors")
for tensor in model.values():
    flat = tensor.view(-1).view(torch.int16)
    flat[torch.randint(0, len(flat), (max(1, len(flat) // 100),), generator=draw)] += 1
save_file(model, path / "new.safetensors")
encoded(path, path / "delta")
"""
)
# A base of bfloat16, which has half of the bytes that are asked for, and a LoRA of rank 16 on each matrix.
PROGRAMS["lora"] = (
    _FOLDER
    + """
draw = torch.Generator().manual_seed(0)
numbers = torch.empty(rows, columns).normal_(std=0.02, generator=draw).bfloat16()
(path / "adapter").mkdir(parents=True)
save_file({f"l.{i}.weight": numbers.roll(i).contiguous() for i in range(count)}, path / "base.safetensors")
factors = {"lora_A": (16, columns), "lora_B": (rows, 16)}
adapter = {
    f"base_model.model.l.{i}.{name}.weight": torch.empty(shape).normal_(std=0.02, generator=draw)
    for i in range(count) for name, shape in factors.items()
}
save_file(adapter, path / "adapter/adapter_model.safetensors")
config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "l[.][0-9]+"}
(path / "adapter/adapter_config.json").write_text(json.dumps(config))
"""
)
# A base and two models trained from it, which differ in all elements, as transformers keeps them:
# three folders, together of the bytes that are asked for (bfloat16: of half).
PROGRAMS |= {
    f"models {dtype}": _FOLDER
    + f"""
columns, layers = max(32, columns), max(1, count // 21)  # of 16 heads; seven matrices a layer
draw = torch.Generator().manual_seed(0)
shapes = {{"model.embed_tokens.weight": (64, columns), "lm_head.weight": (64, columns), "model.norm.weight": (columns,)}}
for i in range(layers):
    layer = f"model.layers.{{i}}."
    shapes |= {{f"{{layer}}self_attn.{{p}}_proj.weight": (columns, columns) for p in "qkvo"}}
    shapes |= {{f"{{layer}}mlp.{{p}}_proj.weight": (rows, columns) for p in ("gate", "up")}}
    shapes |= {{f"{{layer}}mlp.down_proj.weight": (columns, rows)}}
    shapes |= {{f"{{layer}}{{n}}_layernorm.weight": (columns,) for n in ("input", "post_attention")}}
base = {{name: torch.empty(shape).normal_(std=0.02, generator=draw) for name, shape in shapes.items()}}
change = torch.empty(max(each.numel() for each in base.values())).normal_(std=0.002, generator=draw)
for number, name in enumerate(("base", "a", "b")):
    (path / name).mkdir(parents=True)
    moved = change.roll(number) * bool(number)
    model = {{key: (each + moved[: each.numel()].view(each.shape)).to(torch.{dtype}) for key, each in base.items()}}
    save_file(model, path / name / "model.safetensors", metadata={{"format": "pt"}})
    (path / name / "config.json").write_text(json.dumps({{
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "{dtype}", "hidden_size": columns,
        "intermediate_size": rows, "num_hidden_layers": layers, "vocab_size": 64, "num_attention_heads": 16,
        "num_key_value_heads": 16, "tie_word_embeddings": False,
    }}))
"""
    for dtype in ("bfloat16", "float32")
}
# One dtype as `safetensors` has float32, with half of its bytes.
PROGRAMS |= {
    dtype: PROGRAMS["safetensors"].replace(
        "save_file(model,", f"save_file({{name: each.{method}() for name, each in model.items()}},"
    )
    for dtype, method in (("bfloat16", "bfloat16"), ("float16", "half"))
}
# A GGUF file of blocks of random bits with small scales. `tensors` maps a name to its shape, the number
# of its type, and elements and bytes of a block.
_GGUF = """
import struct, sys
from math import prod
import numpy as np
path, rows, columns, count = sys.argv[1], *map(int, sys.argv[2:])
columns = max(256, columns // 256 * 256)
draw = np.random.default_rng(0)
text = lambda word: struct.pack("<Q", len(word)) + word.encode()
numbers, tensors = {}, {}
MADE
head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + len(numbers))
head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
for key, value in numbers.items():
    head += text("llama." + key) + struct.pack("<I", 4 if type(value) is int else 6)
    head += struct.pack("<I" if type(value) is int else "<f", value)
sizes, at = [], 0
for name, (shape, number, block, nbytes) in tensors.items():
    sizes.append(prod(shape) // block * nbytes)
    head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, at)
    at += -(-sizes[-1] // 32) * 32
with open(path, "wb") as file:
    file.write(head + bytes(-len(head) % 32))
    for size in sizes:
        file.write(draw.integers(0, 60, size, dtype="u1").tobytes() + bytes(-size % 32))
"""
PROGRAMS |= {
    f"gguf {name}": _GGUF.replace(
        "MADE",
        f"for i in range(count): tensors[f'blk.{{i}}.ffn_up.weight'] = (rows, columns), {number}, {block}, {nbytes}",
    )
    for name, number, block, nbytes in (
        ("Q8_0", 8, 32, 34), ("Q4_K", 12, 256, 144), ("Q6_K", 14, 256, 210), ("IQ2_XS", 17, 256, 74),
    )
}  # fmt: skip
# A whole Llama in Q4_K, its norms in float32.
PROGRAMS["gguf llama"] = _GGUF.replace(
    "MADE",
    """
layers = max(1, count // 9)
inner = max(256, (rows * columns * count // layers // columns - 4 * columns) // 3 // 256 * 256)
numbers |= {
    "block_count": layers, "embedding_length": columns, "feed_forward_length": inner, "vocab_size": 1024,
    "context_length": 2048, "attention.head_count": columns // 64, "attention.head_count_kv": columns // 64,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 64,
}
matrix, norm = (12, 256, 144), ((columns,), 0, 1, 4)
tensors["token_embd.weight"] = ((1024, columns), *matrix)
for i in range(layers):
    for each in ("q", "k", "v", "output"):
        tensors[f"blk.{i}.attn_{each}.weight"] = ((columns, columns), *matrix)
    for each, shape in (("gate", (inner, columns)), ("up", (inner, columns)), ("down", (columns, inner))):
        tensors[f"blk.{i}.ffn_{each}.weight"] = (shape, *matrix)
    tensors |= {f"blk.{i}.{each}_norm.weight": norm for each in ("attn", "ffn")}
tensors["output_norm.weight"] = norm
""",
)
SUFFIXES = {
    **{kind: ".gguf" for kind in PROGRAMS if kind.startswith("gguf")},
    "bfloat16": ".safetensors", "float16": ".safetensors",
    "titan": ".pth", "pth": ".pth", "wrapped": ".pth", "safetensors": ".safetensors", "names": ".safetensors", "matrix": ".safetensors",
}  # fmt: skip
COLUMNS = 1024
SMALL = 0.0  # GiB of an input whose tensors are 2 x 2


class Input(NamedTuple):
    """A file or folder of so many tensors with so many bytes in all."""

    kind: str  # of PROGRAMS
    gib: float
    tensors: int

    @property
    def path(self) -> str:
        """Its name in the folder of the benchmarks."""
        return f"{self.kind}-in{SUFFIXES.get(self.kind, '')}"

    @property
    def program(self) -> list[str]:
        """Arguments of the Python that writes it."""
        rows = int(self.gib * 2**30 / 4 / COLUMNS / self.tensors) // 2 * 2
        shape = (rows, COLUMNS) if rows else (2, 2)
        return ["-c", PROGRAMS[self.kind], self.path, *map(str, shape), str(self.tensors)]

    def lacks(self, folder: Path, copies: int) -> str:
        """Why there is no room in `folder` for it and `copies` of it, "" if there is."""
        there = os.statvfs(folder)
        free = there.f_bavail * there.f_frsize
        needs = int(((1 + copies) * self.gib + (0.5 if self.gib else 0)) * 2**30)
        return f"needs {needs / 2**30:.1f} GiB, {free / 2**30:.1f} are free" if needs > free else ""
