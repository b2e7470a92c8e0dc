"""Folders of parts that are known and not put together: what they are, and what to do.

Sources: vLLM, ``ShardedStateLoader.DEFAULT_PATTERN``; Megatron-LM, ``--dist-ckpt-format zarr``;
OLMo, ``LocalShardedCheckpointer`` of olmo/checkpoint.py and scripts/unshard.py; ColossalAI,
``get_dist_files_name`` of checkpoint_io/distributed_checkpoint_utils.py and ``Booster.save_model``;
NeMo 1, ``inject_model_parallel_rank`` of nemo/utils/model_utils.py and
megatron_change_num_partitions.py. All were read there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.format import Probe

_VLLM = re.compile(r"model-rank-([0-9]{1,6})-part-([0-9]{1,6})\.safetensors")
_COLOSSAL = re.compile(r"(pytorch_)?model-(meta-)?dist-[0-9]{5}.*\.(bin|safetensors|json)")
_NEMO = re.compile(
    r"(mp_rank_[0-9]{2}_)?fsdp_shard_[0-9]{5}|mp_rank_[0-9]{2}|tp_rank_[0-9]{2}_pp_rank_[0-9]{3}"
)
_RANK = re.compile(r"rank[0-9]{1,6}\.pt")
_LOOKED_AT = 4  # folders


class Known(NamedTuple):
    """A kind of folder: whether a folder is of it, what it is, and what to do."""

    matches: Callable[[Probe], bool]
    what: str
    hint: str


def _below(probe: Probe, name: str) -> list[str]:
    """Names in a folder below, none if it cannot be looked into."""
    try:
        return list(probe.folder.sub(name).list()) if name in probe.folder.folders() else []
    except CkptkitError:
        return []


def _is_vllm(probe: Probe) -> bool:
    return any(map(_VLLM.fullmatch, probe.names))


def _is_zarr(probe: Probe) -> bool:
    if "metadata.json" not in probe.names:
        return False
    inner = [name for name in probe.folder.folders() if not name.startswith(".")]
    return any(".zarray" in _below(probe, name) for name in inner[:_LOOKED_AT])


def _is_olmo(probe: Probe) -> bool:
    return "optim" in probe.names and any(map(_RANK.fullmatch, _below(probe, "model")))


def _is_colossal(probe: Probe) -> bool:
    return any(map(_COLOSSAL.fullmatch, probe.names))


def _is_nemo(probe: Probe) -> bool:
    parts = [name for name in sorted(probe.names) if _NEMO.fullmatch(name)]
    return any(name.endswith(".ckpt") for part in parts[:1] for name in _below(probe, part))


KNOWN = {
    "vllm": Known(
        _is_vllm,
        "is a sharded state of vLLM: its tensors are fused, and cut for its ranks in ways that no "
        "file says",
        "convert the model that it was made of; vLLM alone loads this "
        "(load_format='sharded_state')",
    ),
    "zarr": Known(
        _is_zarr,
        "is a checkpoint of Megatron-LM in zarr, a folder for each tensor, which was removed from "
        "Megatron-LM",
        "load it with the Megatron-LM that wrote it, and save it with --ckpt-format torch_dist",
    ),
    "olmo": Known(
        _is_olmo,
        "is a local sharded checkpoint of OLMo: flat parameters of FSDP, described in a way of its "
        "own",
        "OLMo makes whole files of it: `python scripts/unshard.py {where} {new} --type local`",
    ),
    "colossalai": Known(
        _is_colossal,
        "is a distributed checkpoint of ColossalAI: each process wrote the parts that it held",
        "load it in ColossalAI, and save it with booster.save_model(model, folder, shard=True, "
        "gather_dtensor=True)",
    ),
    "nemo": Known(
        _is_nemo,
        "is a checkpoint of NeMo 1, of which each rank wrote a part",
        "NeMo 1 makes one part of tensor and pipeline ranks: megatron_change_num_partitions.py "
        "--target_tensor_model_parallel_size=1 --target_pipeline_model_parallel_size=1; FSDP "
        "shards are loaded in its training, and saved whole",
    ),
}


def _kind(probe: Probe) -> Known | None:
    return next((each for each in KNOWN.values() if each.matches(probe)), None)


def matches(probe: Probe) -> bool:
    return _kind(probe) is not None


def read(probe: Probe, format: str) -> Checkpoint:
    """Raises UnsupportedError, always."""
    kind = _kind(probe)
    assert kind is not None
    raise UnsupportedError(kind.what, hint=kind.hint)
