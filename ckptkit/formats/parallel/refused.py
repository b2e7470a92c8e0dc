"""Folders of parts that are known and not put together: what they are, and what to do.

model-rank-<R>-part-<K>.safetensors     vLLM's sharded state: fused tensors, cut in ways that no
file says <name>/.zarray                          Megatron-LM's zarr backend: a folder for each
tensor
"""

from __future__ import annotations

import re

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.format import Probe

VLLM = re.compile(r"model-rank-([0-9]{1,6})-part-([0-9]{1,6})\.safetensors")
_ARRAY = ".zarray"
_LOOKED_AT = 4  # folders


def matches(probe: Probe) -> bool:
    return any(map(VLLM.fullmatch, probe.names)) or (
        "metadata.json" in probe.names and _is_zarr(probe)
    )


def _is_zarr(probe: Probe) -> bool:
    try:
        inner = [name for name in probe.folder.folders() if not name.startswith(".")]
        return any(_ARRAY in probe.folder.sub(name) for name in inner[:_LOOKED_AT])
    except CkptkitError:
        return False


def read(probe: Probe, format: str) -> Checkpoint:
    """Raises UnsupportedError, always."""
    if any(map(VLLM.fullmatch, probe.names)):
        raise UnsupportedError(
            "is a sharded state of vLLM: its tensors are fused, and cut for its ranks in ways "
            "that no file says",
            hint="convert the model that it was made of; vLLM alone loads this "
            "(load_format='sharded_state')",
        )
    raise UnsupportedError(
        "is a checkpoint of Megatron-LM in zarr, a folder for each tensor, which was removed "
        "from Megatron-LM",
        hint="load it with the Megatron-LM that wrote it, and save it with --ckpt-format "
        "torch_dist",
    )
