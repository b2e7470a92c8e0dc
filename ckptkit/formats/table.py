"""The list of formats, a record each; their code is imported when it is called.

In sniff order. A data file of DCP, known by its name, begins as torch-zip does. TorchScript comes
before torch-zip, which it also matches. Zip, tar, legacy stream is the order in which torch tries
them. A plain pickle comes after the legacy stream, which begins with one; a folder of loose files
comes after all other folders.
"""

from __future__ import annotations

from ckptkit.core.text import owners
from ckptkit.formats.format import Format, Lazy, LazyByName, Probe

# Of the members in the top folder; either of the scripts makes torch.load pass the file on.
_DATA, _SCRIPTS = "data.pkl", frozenset(("constants.pkl", "bytecode.pkl"))
_OLD_SCRIPT = frozenset(("model.json", "version"))  # before torch 1.3; without data.pkl


def is_torchscript(probe: Probe) -> bool:
    """Return whether a file is an archive of torch.jit.save. Raises what is wrong with a zip."""
    there = _there(probe)
    return bool(there & _SCRIPTS) or there == _OLD_SCRIPT


def is_torch_zip(probe: Probe) -> bool:
    """Return whether a file is an archive of torch.save. Raises what is wrong with a zip."""
    there = _there(probe)
    return _DATA in there and not there & _SCRIPTS


def _there(probe: Probe) -> frozenset[str]:
    archive = probe.zip
    if archive is None:
        return frozenset()
    telling = (_DATA, *_SCRIPTS, *_OLD_SCRIPT)
    return frozenset(name for name in telling if f"{archive.top}/{name}" in archive)


ZIP_CHECK, ZIP_PICKLES = Lazy("whats_inside:check"), Lazy("whats_inside:pickles")

TORCHSCRIPT = Format(
    "torchscript",
    "TorchScript: torch.jit.save",
    matches=is_torchscript,
    read=Lazy("torchscript:read"),
    loaded_by_torch=True,
    program=True,
    rewrite_as="torch-zip",
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
TORCH_ZIP = Format(
    "torch-zip",
    "torch.save since 1.6: a zip archive",
    matches=is_torch_zip,
    read=Lazy("torch_zip:read"),
    suffixes=(".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"),
    loaded_by_torch=True,
    layout=Lazy("torch_zip:layout"),
    everything="always",
    recover=Lazy("torch_zip_recover:recover"),
    recoverable=Lazy("torch_zip_recover:recoverable"),
    check=ZIP_CHECK,
    patch=Lazy("torch_zip:patch"),
    pickles=ZIP_PICKLES,
)
TAR = Format(
    "tar",
    "a checkpoint alone in a tar file (.nemo)",
    matches=Lazy("torch_legacy:is_archive"),
    read=Lazy("compressed:read"),
    chooses=True,
    noun="a tar file of other files",
    torch_error='"Weights only load failed"',
    check=Lazy("compressed:check"),
)
TORCH_TAR = Format(
    "torch-tar",
    "torch.save of torch 0.1.1 and before: a tar file",
    matches=Lazy("torch_legacy:matches_tar"),
    read=Lazy("torch_legacy:read_tar"),
    loaded_by_torch=True,
    noun="a tar file, as torch.save made until 0.1.1",
    torch_error='"Cannot use weights_only=True with files saved in the legacy .tar format"',
    rewrite_as="torch-zip",
    pickles=Lazy("torch_legacy:pickles_of_tar"),
)
PT2 = Format(
    "pt2",
    "torch.export.save: the weights of an exported program (.pt2)",
    matches=Lazy("pt2:matches"),
    read=Lazy("pt2:read"),
    program=True,
    noun="an exported program (torch.export.load reads it)",
    torch_error='"PytorchStreamReader failed locating file data.pkl"',
    rewrite_as="torch-zip",
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
STABLE_BASELINES = Format(
    "stable-baselines3",
    "a model of Stable-Baselines3: policy.pth in a zip archive",
    matches=Lazy("pt2:matches_baselines"),
    read=Lazy("pt2:read_baselines"),
    noun="a model of Stable-Baselines3",
    torch_error='"file in archive is not in a subdirectory"',
    rewrite_as="torch-zip",
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
TORCH_LEGACY = Format(
    "torch-legacy",
    "torch.save before 1.6: a stream of pickles and storages",
    matches=Lazy("torch_legacy:matches"),
    read=Lazy("torch_legacy:read"),
    loaded_by_torch=True,
    rewrite_as="torch-zip",
    recover=Lazy("torch_legacy:recover"),
    recoverable=Lazy("torch_legacy:recoverable"),
    pickles=Lazy("torch_legacy:pickles"),
)
SAFETENSORS = Format(
    "safetensors",
    "safetensors",
    matches=Lazy("safetensors:matches"),
    read=Lazy("safetensors:read"),
    suffixes=(".safetensors",),
    layout=Lazy("safetensors:layout"),
    everything="asked",
    recover=Lazy("recovering:recover"),
    recoverable=Lazy("recovering:recoverable"),
    patch=Lazy("safetensors:patch"),
    folder_as="sharded",
)
DCP = Format(
    "dcp",
    "a folder of torch.distributed.checkpoint",
    matches=Lazy("dcp:matches"),
    read=Lazy("dcp:read"),
    is_folder=True,
    distributed=True,
    noun="a folder of torch.distributed.checkpoint (FSDP and others)",
    layout=Lazy("dcp:layout"),
    everything="nested",
    listed=True,
    check=Lazy("dcp:check"),
    pickles=LazyByName("dcp:pickles", (".metadata", ".distcp")),
)
DCP_SHARD = Format(
    "dcp-shard",
    "a data file of a folder of torch.distributed.checkpoint",
    matches=LazyByName("dcp:matches_shard", (".distcp",)),
    read=Lazy("dcp:read_shard"),
    readable=False,
)
PARALLEL = Format(
    "parallel",
    "the files of many processes: FSDP ranks, Megatron-LM, DeepSpeed, Llama and fairscale parts",
    matches=Lazy("distributed:matches"),
    read=Lazy("distributed:read"),
    noun="a folder of the parts that many processes wrote",
    distributed=True,
    is_folder=True,
    listed=True,
    rewrite_as="torch-zip",
    check=Lazy("distributed:check"),
)
DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed: ZeRO and universal checkpoints",
    matches=Lazy("distributed.deepspeed:matches"),
    read=Lazy("distributed.deepspeed:read"),
    is_folder=True,
    distributed=True,
    noun="a folder of DeepSpeed (ZeRO)",
    listed=True,
    rewrite_as="torch-zip",
    check=Lazy("distributed.deepspeed:check"),
)
SHARDED = Format(
    "sharded",
    "a folder of safetensors shards, as on the Hugging Face hub",
    matches=Lazy("shards:matches_safetensors"),
    read=Lazy("shards:read_safetensors"),
    is_folder=True,
    layout=Lazy("shards:layout_safetensors"),
    shards=True,
    check=Lazy("shards:findings"),
)
SHARDED_BIN = Format(
    "sharded-bin",
    "a folder of torch.save shards, as on the Hugging Face hub",
    matches=Lazy("shards:matches_torch"),
    read=Lazy("shards:read_torch"),
    is_folder=True,
    layout=Lazy("shards:layout_torch"),
    shards=True,
    check=Lazy("shards:findings"),
)
NPZ = Format(
    "npz",
    "an archive of numpy arrays",
    matches=Lazy("npy:matches_npz"),
    read=Lazy("npy:read_npz"),
    suffixes=(".npz",),
    noun="a file of numpy.savez",
    torch_error='"file in archive is not in a subdirectory"',
    layout=Lazy("npy:layout"),
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
NPY = Format(
    "npy",
    "one array of numpy",
    matches=Lazy("npy:matches"),
    read=Lazy("npy:read"),
    rewrite_as="npz",
    noun="a file of numpy.save",
    torch_error='"Weights only load failed"',
    pickles=Lazy("npy:pickles"),
)
TORCH_UNPACKED = Format(
    "torch-unpacked",
    "an unpacked archive of torch.save: a folder with data.pkl",
    matches=Lazy("torch_zip:matches_unpacked"),
    read=Lazy("torch_zip:read_unpacked"),
    noun="an unpacked archive (a folder with data.pkl)",
    torch_error='"Is a directory"; "unsupported persistent id" for its data.pkl alone',
    is_folder=True,
    listed=True,
    rewrite_as="torch-zip",
)
PICKLE = Format(
    "pickle",
    "a plain pickle, such as a dict of numpy arrays",
    matches=Lazy("torch_legacy:matches_pickle"),
    read=Lazy("torch_legacy:read_pickle"),
    noun="a pickle made without torch.save",
    torch_error='"Weights only load failed", or "Invalid magic number"',
    rewrite_as="torch-zip",
    pickles=Lazy("torch_legacy:plain_pickles"),
)
COMPRESSED = Format(
    "compressed",
    "a checkpoint compressed with gzip, bzip2, xz or zstd, or alone in such a .tar.gz",
    matches=Lazy("compressed:matches"),
    read=Lazy("compressed:read"),
    suffixes=(".gz", ".bz2", ".xz", ".zst"),
    chooses=True,
    noun="a compressed file",
    torch_error='"Weights only load failed", before torch 2.6 "invalid load key"',
    check=Lazy("compressed:check"),
)
FOLDER = Format(
    "folder",
    "a folder with one checkpoint in it; the Hugging Face cache of a model",
    matches=Lazy("folder:matches"),
    read=Lazy("folder:read"),
    is_folder=True,
    chooses=True,
    listed=True,
    check=Lazy("folder:check"),
)
# Written and never found: their folders are read as `parallel`.
LLAMA_PARTS = Format(
    "llama-parts",
    "the parts of a Llama release of Meta (consolidated.NN.pth), to write alone",
    matches=Lazy("distributed.llama:never"),
    read=Lazy("distributed:read"),
    is_folder=True,
    layout=Lazy("distributed.llama:layout"),
    readable=False,
)
MEGATRON_PARTS = Format(
    "megatron-parts",
    "Megatron-LM, cut for tensor parallelism (mp_rank_NN), to write alone",
    matches=Lazy("distributed.megatron:never"),
    read=Lazy("distributed:read"),
    is_folder=True,
    layout=Lazy("distributed.megatron:layout"),
    readable=False,
)

# What no file is in: of a Checkpoint that was made in memory.
NONE = Format("", "made here", matches=Lazy(""), read=Lazy(""))

FORMATS = (
    DCP_SHARD, TORCHSCRIPT, TORCH_ZIP, TAR, TORCH_TAR, PT2, STABLE_BASELINES, TORCH_LEGACY,
    SAFETENSORS, DCP, PARALLEL, DEEPSPEED, SHARDED, SHARDED_BIN, NPZ, NPY, TORCH_UNPACKED, PICKLE,
    COMPRESSED, FOLDER, LLAMA_PARTS, MEGATRON_PARTS,
)  # fmt: skip
BY_NAME = {format.name: format for format in FORMATS}
TORCH_SUFFIXES = TORCH_ZIP.suffixes
BY_SUFFIX = owners((format, format.suffixes) for format in FORMATS if format.layout is not None)
