"""Write an adapter as a peft folder or as a safetensors file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit import formats
from ckptkit.api import Conversion
from ckptkit.compute.numbers import encode
from ckptkit.core import arguments
from ckptkit.core.bytesource import ByteSource, Folder, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import WRITTEN, shown_url
from ckptkit.core.tree import OrderedMapping
from ckptkit.formats.table import SAFETENSORS
from ckptkit.lora.changes import made_of
from ckptkit.lora.reading import CONFIG, WEIGHTS
from ckptkit.publish.publish import publish

PEFT = "base_model.model."  # prefix of tensor names in peft


def written(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    options: Options,
    *,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    source: ByteSource | Folder | None = None,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Conversion:
    """Write a safetensors file. If `config` is not None, write a peft folder instead.

    Raises UsageError if `path` is the path of `source`.
    """
    path = arguments.path("destination", path)
    if config is not None and path.endswith(WRITTEN):
        what = "is the name of a file, but a peft adapter is a folder"
        raise UsageError(what, where=path, hint=f"use the name {os.path.splitext(path)[0]}")
    if config is None:
        chosen = formats.for_writing(path, options.format, SAFETENSORS.name)
        if chosen is not SAFETENSORS:
            what = f"ckptkit writes adapters as safetensors, not as {chosen.name}"
            raise UsageError(what, where=path, hint="use a name that ends in .safetensors")
    held = Checkpoint(
        OrderedMapping(dict(tensors)), SAFETENSORS.name, source, metadata or {}, notes=notes,
        warnings=warnings,
    )  # fmt: skip
    # Programs that read adapters do not support shared tensors. If several modules share a matrix,
    # the file contains one copy per module.
    layout = replace(options, ties="duplicate", extras=False, allow_expand=True, format=None)
    plan = replace(formats.layout(held, SAFETENSORS, layout), notes=())
    if config is not None:
        text = json.dumps(dict(config), indent=2, sort_keys=True).encode()
        files = replace(plan.files[0], name=WEIGHTS[0]), OutputFile(CONFIG, (text,))
        plan = replace(plan, files=files)
    done = publish(plan, path, layout, origin=source)
    kind = "peft" if config is not None else SAFETENSORS.name
    return Conversion(held, plan, kind, shown_url(path), None if options.dry_run else done)


def config_of(
    ranks: Mapping[str, int], alphas: Mapping[str, float], **others: Any
) -> dict[str, Any]:
    """Return the peft configuration for modules with these ranks and alphas.

    The most frequent rank becomes `r`. The most frequent alpha becomes `lora_alpha`. The fields
    `rank_pattern` and `alpha_pattern` contain the other values.
    """
    alphas = {name: int(each) if each == int(each) else each for name, each in alphas.items()}
    rank, alpha = (_most(each.values(), default=1) for each in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(n): each for n, each in ranks.items() if each != rank},
        "alpha_pattern": {_exactly(n): each for n, each in alphas.items() if each != alpha},
        "target_modules": sorted(ranks),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
        **others,
    }


def _exactly(name: str) -> str:
    """Return a pattern that matches only this module."""
    return f"^{re.escape(name)}"


def _most(values: Any, default: float) -> Any:
    found = list(values)
    return max(dict.fromkeys(found), key=found.count, default=default)


def tensor_of(values: Any, dtype: DType) -> Tensor:
    """Convert a NumPy float array to a tensor of `dtype`, which rounds the elements."""
    data = bytes(encode(values.reshape(-1), dtype))
    return made_of(Range(Memory(data), 0, len(data)), dtype, tuple(map(int, values.shape)))
