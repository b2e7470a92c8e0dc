"""The list of formats. The first call of a format's function imports the format's module.

The first format that matches reads the file. The order of the list has these reasons:

* A data file of DCP begins like a torch-zip file, so dcp-shard comes before torch-zip. dcp-shard
  matches only the file names of DCP.
* A TorchScript file is also a zip archive with a data.pkl, so torchscript comes before torch-zip.
* torch.load tries zip, then tar, then the legacy stream.
* A legacy stream begins with a plain pickle, so torch-legacy comes before pickle.
* A folder with loose checkpoint files may also have another folder format, so folder comes last.
"""

from __future__ import annotations

from typing import Any

from ckptkit.core.text import owners
from ckptkit.formats.format import Format, Lazy, Probe

# Names in the top folder of an archive. If a name of _SCRIPTS exists, torch.load calls
# torch.jit.load.
_DATA, _SCRIPTS = "data.pkl", frozenset(("constants.pkl", "bytecode.pkl"))
_OLD_SCRIPT = frozenset(("model.json", "version"))  # TorchScript of torch 1.2 and before


def is_torchscript(probe: Probe) -> bool:
    """Return whether torch.jit.save wrote a file. Raises CorruptError for a damaged zip file."""
    archive = probe.zip
    if archive is None:
        return False
    telling = (_DATA, *_SCRIPTS, *_OLD_SCRIPT)
    there = {name for name in telling if f"{archive.top}/{name}" in archive.entries}
    return bool(there & _SCRIPTS) or there == _OLD_SCRIPT


def is_torch_zip(probe: Probe) -> bool:
    """Return whether torch.save wrote a zip file. Raises CorruptError for a damaged zip file."""
    archive = probe.zip
    has_data = archive is not None and f"{archive.top}/{_DATA}" in archive.entries
    return has_data and not is_torchscript(probe)


def never(probe: Probe) -> bool:
    """Return False. ckptkit reads files of a write-only format as another format."""
    return False


def _format(name: str, title: str, code: str, **facts: Any) -> Format:
    """Return a format.

    `code` contains the name of a module, and ``FIELD=FUNCTION`` for fields of `Format` (``npy:
    matches=matches_npz read``). ``FIELD`` alone means that the function has the name of the field.
    """
    module, _, functions = code.partition(": ")
    for each in functions.split():
        field, _, function = each.partition("=")
        facts.setdefault(field, Lazy(f"{module}:{function or field}"))
    return Format(name, title, **facts)


_ZIP = {"check": Lazy("whats_inside:check"), "pickles": Lazy("whats_inside:pickles")}

TORCHSCRIPT = _format(
    "torchscript", "TorchScript: torch.jit.save", "torchscript: read",
    matches=is_torchscript, loaded_by_torch=True, program=True, rewrite_as="torch-zip", **_ZIP,
)  # fmt: skip
TORCH_ZIP = _format(
    "torch-zip", "torch.save since 1.6: a zip archive", "torch_zip: read layout patch",
    matches=is_torch_zip, suffixes=(".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"),
    loaded_by_torch=True, everything="always", recover=Lazy("torch_zip_recover:recover"),
    recoverable=Lazy("torch_zip_recover:recoverable"), **_ZIP,
)  # fmt: skip
TAR = _format(
    "tar", "a tar file that contains one checkpoint (.nemo)", "compressed: read check",
    matches=Lazy("torch_legacy:is_archive"), chooses=True, noun="a tar file of other files",
    torch_error='"Weights only load failed"',
)  # fmt: skip
TORCH_TAR = _format(
    "torch-tar", "torch.save of torch 0.1.1 and before: a tar file",
    "torch_legacy: matches=matches_tar read=read_tar pickles=pickles_of_tar",
    loaded_by_torch=True, noun="a tar file, as torch.save made until 0.1.1",
    torch_error='"Cannot use weights_only=True with files saved in the legacy .tar format"',
    rewrite_as="torch-zip",
)  # fmt: skip
PT2 = _format(
    "pt2", "torch.export.save: the weights of an exported program (.pt2)", "pt2: matches read",
    program=True, noun="an exported program (torch.export.load reads it)",
    torch_error='"PytorchStreamReader failed locating file data.pkl"', rewrite_as="torch-zip",
    **_ZIP,
)  # fmt: skip
STABLE_BASELINES = _format(
    "stable-baselines3", "a model of Stable-Baselines3: policy.pth in a zip archive",
    "pt2: matches=matches_baselines read=read_baselines", noun="a model of Stable-Baselines3",
    torch_error='"file in archive is not in a subdirectory"', rewrite_as="torch-zip", **_ZIP,
)  # fmt: skip
TORCH_LEGACY = _format(
    "torch-legacy", "torch.save before 1.6: a stream of pickles and storages",
    "torch_legacy: matches read recover pickles",
    loaded_by_torch=True, rewrite_as="torch-zip",
)  # fmt: skip
SAFETENSORS = _format(
    "safetensors", "safetensors", "safetensors: matches read layout patch",
    suffixes=(".safetensors",), everything="asked", recover=Lazy("recovering:recover"),
    folder_as="sharded",
)  # fmt: skip
GGUF = _format(
    "gguf", "GGUF: models for llama.cpp and ComfyUI, also split",
    "gguf: matches read pickles=templates",
    suffixes=(".gguf",), noun="a GGUF model (llama.cpp)", rewrite_as="safetensors",
    unwritten="`convert` with --like model.gguf fills a copy of an existing GGUF file; "
    "convert_hf_to_gguf.py of llama.cpp makes a new file",
    torch_error='"Weights only load failed", or "Invalid magic number"',
)  # fmt: skip
DCP = _format(
    "dcp", "a folder of torch.distributed.checkpoint", "dcp: matches read layout check",
    is_folder=True, distributed=True, everything="nested", listed=True,
    noun="a folder of torch.distributed.checkpoint (FSDP and others)",
    pickles=Lazy("dcp:pickles", (".metadata", ".distcp")),
)  # fmt: skip
DCP_SHARD = _format(
    "dcp-shard", "a data file of a folder of torch.distributed.checkpoint", "dcp: read=read_shard",
    matches=Lazy("dcp:matches_shard", (".distcp",)), readable=False,
)  # fmt: skip
PARALLEL = _format(
    "parallel",
    "the files of several ranks: FSDP, Megatron-LM, DeepSpeed, Llama and fairscale",
    "distributed: matches read check", noun="a folder of files that several ranks wrote",
    distributed=True, is_folder=True, listed=True, rewrite_as="torch-zip",
)  # fmt: skip
DEEPSPEED = _format(
    "deepspeed", "DeepSpeed: ZeRO and universal checkpoints",
    "distributed.deepspeed: matches read check", noun="a folder of DeepSpeed (ZeRO)",
    is_folder=True, distributed=True, listed=True, rewrite_as="torch-zip",
)  # fmt: skip
SHARDED = _format(
    "sharded", "a folder of safetensors shards, as on the Hugging Face hub",
    "shards: matches=matches_safetensors read=read_safetensors layout=layout_safetensors "
    "check=findings", is_folder=True, shards=True,
)  # fmt: skip
SHARDED_BIN = _format(
    "sharded-bin", "a folder of torch.save shards, as on the Hugging Face hub",
    "shards: matches=matches_torch read=read_torch layout=layout_torch check=findings",
    is_folder=True, shards=True,
)  # fmt: skip
NPZ = _format(
    "npz", "an archive of numpy arrays", "npy: matches=matches_npz read=read_npz layout",
    suffixes=(".npz",), noun="a file of numpy.savez",
    torch_error='"file in archive is not in a subdirectory"', **_ZIP,
)  # fmt: skip
NPY = _format(
    "npy", "one array of numpy", "npy: matches read pickles", rewrite_as="npz",
    noun="a file of numpy.save", torch_error='"Weights only load failed"',
)  # fmt: skip
TORCH_UNPACKED = _format(
    "torch-unpacked", "an unpacked archive of torch.save: a folder with data.pkl",
    "torch_zip: matches=matches_unpacked read=read_unpacked",
    noun="an unpacked archive (a folder with data.pkl)",
    torch_error='"Is a directory"; "unsupported persistent id" for its data.pkl alone',
    is_folder=True, listed=True, rewrite_as="torch-zip",
)  # fmt: skip
PICKLE = _format(
    "pickle", "a plain pickle, such as a dict of numpy arrays",
    "torch_legacy: matches=matches_pickle read=read_pickle pickles=plain_pickles",
    noun="a pickle made without torch.save", rewrite_as="torch-zip",
    torch_error='"Weights only load failed", or "Invalid magic number"',
)  # fmt: skip
COMPRESSED = _format(
    "compressed",
    "a checkpoint compressed with gzip, bzip2, xz or zstd; also a .tar.gz that contains one",
    "compressed: matches read check", suffixes=(".gz", ".bz2", ".xz", ".zst"), chooses=True,
    noun="a compressed file",
    torch_error='"Weights only load failed", before torch 2.6 "invalid load key"',
)  # fmt: skip
FOLDER = _format(
    "folder", "a folder that contains one checkpoint; the Hugging Face cache of a model",
    "folder: matches read check", is_folder=True, chooses=True, listed=True,
)  # fmt: skip
LLAMA_PARTS = _format(
    "llama-parts", "the shards of a Llama release of Meta (consolidated.NN.pth), as an output",
    "distributed: read", matches=never, layout=Lazy("distributed.llama:layout"), is_folder=True,
    readable=False,
)  # fmt: skip
MEGATRON_PARTS = _format(
    "megatron-parts", "Megatron-LM shards for tensor parallelism (mp_rank_NN), as an output",
    "distributed: read", matches=never, layout=Lazy("distributed.megatron:layout"), is_folder=True,
    readable=False,
)  # fmt: skip

# The format of a Checkpoint that was created in memory.
NONE = Format("", "made in memory", matches=Lazy(""), read=Lazy(""))

FORMATS = (
    DCP_SHARD, TORCHSCRIPT, TORCH_ZIP, TAR, TORCH_TAR, PT2, STABLE_BASELINES, TORCH_LEGACY,
    SAFETENSORS, GGUF, DCP, PARALLEL, DEEPSPEED, SHARDED, SHARDED_BIN, NPZ, NPY, TORCH_UNPACKED,
    PICKLE, COMPRESSED, FOLDER, LLAMA_PARTS, MEGATRON_PARTS,
)  # fmt: skip
BY_NAME = {format.name: format for format in FORMATS}
TORCH_SUFFIXES = TORCH_ZIP.suffixes
BY_SUFFIX = owners((format, format.suffixes) for format in FORMATS if format.layout is not None)
