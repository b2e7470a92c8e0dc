"""The list of formats, a record each; their code is imported when it is called.

In sniff order. TorchScript comes before torch-zip, which it also matches. Zip, tar, legacy stream
is the order in which torch tries them. A plain pickle comes after the legacy stream, which begins
with one; a folder of loose files comes after all other folders.
"""

from __future__ import annotations

from ckptkit.formats.format import Format, Lazy

ZIP_CHECK, ZIP_PICKLES = Lazy("common.zip_check:check"), Lazy("common.zip_pickles:pickles")

TORCHSCRIPT = Format(
    "torchscript",
    "TorchScript: torch.jit.save",
    matches=Lazy("torchscript.reader:matches"),
    read=Lazy("torchscript.reader:read"),
    loaded_by_torch=True,
    program=True,
    rewrite_as="torch-zip",
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
TORCH_ZIP = Format(
    "torch-zip",
    "torch.save since 1.6: a zip archive",
    matches=Lazy("torch_zip.reader:matches"),
    read=Lazy("torch_zip.reader:read"),
    suffixes=(".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"),
    loaded_by_torch=True,
    layout=Lazy("torch_zip.writer:layout"),
    everything="always",
    recover=Lazy("torch_zip.recovering:recover"),
    recoverable=Lazy("torch_zip.recovering:recoverable"),
    check=ZIP_CHECK,
    patch=Lazy("torch_zip.patching:patch"),
    pickles=ZIP_PICKLES,
)
TORCH_TAR = Format(
    "torch-tar",
    "torch.save of torch 0.1.1 and before: a tar file",
    matches=Lazy("torch_tar:matches"),
    read=Lazy("torch_tar:read"),
    loaded_by_torch=True,
    rewrite_as="torch-zip",
    pickles=Lazy("torch_tar:pickles"),
)
PT2 = Format(
    "pt2",
    "torch.export.save: the weights of an exported program (.pt2)",
    matches=Lazy("pt2:matches"),
    read=Lazy("pt2:read"),
    program=True,
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
    matches=Lazy("safetensors.header:matches"),
    read=Lazy("safetensors:read"),
    suffixes=(".safetensors",),
    layout=Lazy("safetensors.writing:layout"),
    everything="asked",
    recover=Lazy("safetensors.recovering:recover"),
    recoverable=Lazy("safetensors.recovering:recoverable"),
    patch=Lazy("safetensors.patching:patch"),
)
DCP = Format(
    "dcp",
    "a folder of torch.distributed.checkpoint",
    matches=Lazy("dcp:matches"),
    read=Lazy("dcp.reading:read"),
    is_folder=True,
    layout=Lazy("dcp.writing:layout"),
    everything="nested",
    listed=True,
    check=Lazy("dcp.checking:check"),
    pickles=Lazy("dcp:pickles"),
)
DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed: ZeRO and universal checkpoints",
    matches=Lazy("deepspeed.reader:matches"),
    read=Lazy("deepspeed.reader:read"),
    is_folder=True,
    listed=True,
    rewrite_as="torch-zip",
    check=Lazy("deepspeed.reader:check"),
)
SHARDED = Format(
    "sharded",
    "a folder of safetensors shards, as on the Hugging Face hub",
    matches=Lazy("sharded.safetensors_shards:matches"),
    read=Lazy("sharded.safetensors_shards:read"),
    is_folder=True,
    layout=Lazy("sharded.safetensors_shards:layout"),
    shards=True,
    check=Lazy("sharded.shards:findings"),
)
SHARDED_BIN = Format(
    "sharded-bin",
    "a folder of torch.save shards, as on the Hugging Face hub",
    matches=Lazy("sharded.torch_shards:matches"),
    read=Lazy("sharded.torch_shards:read"),
    is_folder=True,
    layout=Lazy("sharded.torch_shards:layout"),
    shards=True,
    check=Lazy("sharded.shards:findings"),
)
NPZ = Format(
    "npz",
    "an archive of numpy arrays",
    matches=Lazy("npz:matches"),
    read=Lazy("npz:read"),
    suffixes=(".npz",),
    layout=Lazy("npz:layout"),
    check=ZIP_CHECK,
    pickles=ZIP_PICKLES,
)
NPY = Format(
    "npy",
    "one array of numpy",
    matches=Lazy("npy:matches"),
    read=Lazy("npy:read"),
    rewrite_as="npz",
    pickles=Lazy("npy:pickles"),
)
TORCH_UNPACKED = Format(
    "torch-unpacked",
    "an unpacked archive of torch.save: a folder with data.pkl",
    matches=Lazy("unpacked:matches"),
    read=Lazy("unpacked:read"),
    is_folder=True,
    listed=True,
    rewrite_as="torch-zip",
)
PICKLE = Format(
    "pickle",
    "a plain pickle, such as a dict of numpy arrays",
    matches=Lazy("plain_pickle:matches"),
    read=Lazy("plain_pickle:read"),
    rewrite_as="torch-zip",
    pickles=Lazy("plain_pickle:pickles"),
)
FOLDER = Format(
    "folder",
    "a folder with one checkpoint in it; the Hugging Face cache of a model",
    matches=Lazy("folder:matches"),
    read=Lazy("folder:read"),
    is_folder=True,
    listed=True,
    check=Lazy("folder:check"),
)

FORMATS = (
    TORCHSCRIPT, TORCH_ZIP, TORCH_TAR, PT2, TORCH_LEGACY, SAFETENSORS, DCP, DEEPSPEED, SHARDED,
    SHARDED_BIN, NPZ, NPY, TORCH_UNPACKED, PICKLE, FOLDER,
)  # fmt: skip
BY_NAME = {format.name: format for format in FORMATS}
BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}
