"""Read, change and convert PyTorch checkpoints without executing them or loading unneeded tensors.

Each public name is imported on first use, so ``import ckptkit`` itself is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptkit.core import __version__, hooks

if TYPE_CHECKING:
    from ckptkit.analysis.reports import digest, inspect, scan, stats, verify
    from ckptkit.api import convert, open_checkpoint, recover, save
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.errors import CkptkitError
    from ckptkit.core.options import Options
    from ckptkit.core.tensor import Storage, Tensor
    from ckptkit.deltas import apply_delta, delta, squash_delta, verify_delta
    from ckptkit.diagnosis.diagnose import doctor
    from ckptkit.edits.combine import average, ema, join
    from ckptkit.edits.devices import remap
    from ckptkit.edits.elements import cast, compact
    from ckptkit.edits.keys import add_prefix, rename, select, strip_prefix
    from ckptkit.edits.merging import merge
    from ckptkit.edits.optimizers import key_optimizer
    from ckptkit.edits.quantized import dequantize
    from ckptkit.edits.resizing import resize
    from ckptkit.edits.rules import apply_rules
    from ckptkit.edits.structure import extract, wrap
    from ckptkit.loading import load, load_into
    from ckptkit.lora.check import check_lora
    from ckptkit.lora.merge import merge_lora
    from ckptkit.lora.writing import convert_lora, extract_lora, resize_lora
    from ckptkit.run.comparing import diff

    open = open_checkpoint

# The public names of each module. `edits.PUBLIC` contains the modules of edits.
_PLACES = {
    "analysis.reports": ("digest", "inspect", "scan", "stats", "verify"),
    "api": ("convert", "open", "recover", "save"),
    "core.checkpoint": ("Checkpoint",),
    "core.errors": ("CkptkitError",),
    "core.options": ("Options",),
    "core.tensor": ("Storage", "Tensor"),
    "deltas": ("apply_delta", "delta", "squash_delta", "verify_delta"),
    "diagnosis.diagnose": ("doctor",),
    "loading": ("load", "load_into"),
    "lora.check": ("check_lora",),
    "lora.merge": ("merge_lora",),
    "lora.writing": ("convert_lora", "extract_lora", "resize_lora"),
    "run.comparing": ("diff",),
}

# Each name is written out, because type checkers do not evaluate expressions in ``__all__``.
__all__ = [
    "Checkpoint", "CkptkitError", "Options", "Storage", "Tensor", "__version__", "add_prefix",
    "apply_delta", "apply_rules", "average", "cast", "check_lora", "compact", "convert",
    "convert_lora", "delta", "dequantize", "diff", "digest", "doctor", "ema", "extract",
    "extract_lora", "inspect", "join", "key_optimizer", "load", "load_into", "merge", "merge_lora",
    "open", "recover", "remap", "rename", "resize", "resize_lora", "save", "scan", "select",
    "squash_delta", "stats", "strip_prefix", "verify", "verify_delta", "wrap",
]  # fmt: skip


# The functions of `hooks`, and their modules. The modules import `core`, so `core` cannot import
# them.
_HOOKS = {
    "drop_entry": "edits.structure",
    "elements": "compute.torch_bridge",
    "html": "views.notebook",
    "lora_hint": "lora.merge",
    "map_weights": "edits.elements",
    "numpy": "compute.torch_bridge",
    "open_checkpoint": "api",
    "pickles": "scanning.find",
    "torch_tensor": "compute.torch_bridge",
    "with_value": "edits.structure",
}


def _hook(name: str) -> Callable[..., Any]:
    """Return a function that calls the hook `name`. The first call imports the module."""
    return lambda *args, **named: _imported(_HOOKS[name], name)(*args, **named)


def _imported(module: str, name: str) -> Any:
    from importlib import import_module

    return getattr(import_module(f"ckptkit.{module}"), name)


for _name in _HOOKS:
    setattr(hooks, _name, _hook(_name))


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    from ckptkit import edits

    found = (module for module, names in _PLACES.items() if name in names)
    module = next(found, None) or edits.PUBLIC[name]
    return _imported(module, "open_checkpoint" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
