"""Read, change and convert PyTorch checkpoints without executing them or loading unneeded tensors.

Each public name is imported on first use, so ``import ckptkit`` itself is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptkit.core import __version__, hooks

if TYPE_CHECKING:
    from ckptkit.analysis.reports import digest as digest
    from ckptkit.analysis.reports import inspect as inspect
    from ckptkit.analysis.reports import scan as scan
    from ckptkit.analysis.reports import stats as stats
    from ckptkit.analysis.reports import verify as verify
    from ckptkit.api import convert as convert
    from ckptkit.api import open_checkpoint
    from ckptkit.api import recover as recover
    from ckptkit.api import save as save
    from ckptkit.core.checkpoint import Checkpoint as Checkpoint
    from ckptkit.core.errors import CkptkitError as CkptkitError
    from ckptkit.core.options import Options as Options
    from ckptkit.core.tensor import Storage as Storage
    from ckptkit.core.tensor import Tensor as Tensor
    from ckptkit.deltas import apply_delta as apply_delta
    from ckptkit.deltas import delta as delta
    from ckptkit.deltas import squash_delta as squash_delta
    from ckptkit.deltas import verify_delta as verify_delta
    from ckptkit.diagnosis.diagnose import doctor as doctor
    from ckptkit.edits.combine import average as average
    from ckptkit.edits.combine import ema as ema
    from ckptkit.edits.combine import join as join
    from ckptkit.edits.devices import remap as remap
    from ckptkit.edits.elements import cast as cast
    from ckptkit.edits.elements import compact as compact
    from ckptkit.edits.keys import add_prefix as add_prefix
    from ckptkit.edits.keys import rename as rename
    from ckptkit.edits.keys import select as select
    from ckptkit.edits.keys import strip_prefix as strip_prefix
    from ckptkit.edits.merging import merge as merge
    from ckptkit.edits.optimizers import key_optimizer as key_optimizer
    from ckptkit.edits.quantized import dequantize as dequantize
    from ckptkit.edits.resizing import resize as resize
    from ckptkit.edits.rules import apply_rules
    from ckptkit.edits.structure import extract as extract
    from ckptkit.edits.structure import wrap as wrap
    from ckptkit.loading import load as load
    from ckptkit.loading import load_into as load_into
    from ckptkit.lora.check import check_lora as check_lora
    from ckptkit.lora.merge import merge_lora as merge_lora
    from ckptkit.lora.writing import convert_lora as convert_lora
    from ckptkit.lora.writing import extract_lora as extract_lora
    from ckptkit.lora.writing import resize_lora as resize_lora
    from ckptkit.run.comparing import diff as diff

    open = open_checkpoint

# Functions that lower-level modules, such as core, call by name. Each value is (module, function).
_HOOKS = {
    "html": ("views.notebook", "html"),
    "inside": ("scanning.find", "inside"),
    "open": ("api", "open_checkpoint"),
    "numpy": ("compute.torch_bridge", "numpy"),
    "elements": ("compute.torch_bridge", "elements"),
    "torch": ("compute.torch_bridge", "torch_tensor"),
    "map": ("edits.elements", "map_weights"),
    "set": ("edits.structure", "with_value"),
    "drop": ("edits.structure", "drop_entry"),
    "lora_hint": ("lora.merge", "hint"),
}

# The module of each public name. `edits.PUBLIC` contains the modules of edits.
_PLACES = {
    "Checkpoint": "core.checkpoint",
    "CkptkitError": "core.errors",
    "Options": "core.options",
    "Storage": "core.tensor",
    "Tensor": "core.tensor",
    "apply_delta": "deltas",
    "check_lora": "lora.check",
    "convert": "api",
    "convert_lora": "lora.writing",
    "delta": "deltas",
    "diff": "run.comparing",
    "digest": "analysis.reports",
    "doctor": "diagnosis.diagnose",
    "extract_lora": "lora.writing",
    "inspect": "analysis.reports",
    "load": "loading",
    "load_into": "loading",
    "merge_lora": "lora.merge",
    "open": "api",
    "recover": "api",
    "resize_lora": "lora.writing",
    "save": "api",
    "scan": "analysis.reports",
    "squash_delta": "deltas",
    "stats": "analysis.reports",
    "verify": "analysis.reports",
    "verify_delta": "deltas",
}

# Each name is written out, because type checkers do not evaluate expressions in ``__all__``.
__all__ = [
    "Checkpoint",
    "CkptkitError",
    "Options",
    "Storage",
    "Tensor",
    "__version__",
    "add_prefix",
    "apply_delta",
    "apply_rules",
    "average",
    "cast",
    "check_lora",
    "compact",
    "convert",
    "convert_lora",
    "delta",
    "dequantize",
    "diff",
    "digest",
    "doctor",
    "ema",
    "extract",
    "extract_lora",
    "inspect",
    "join",
    "key_optimizer",
    "load",
    "load_into",
    "merge",
    "merge_lora",
    "open",
    "recover",
    "remap",
    "rename",
    "resize",
    "resize_lora",
    "save",
    "scan",
    "select",
    "squash_delta",
    "stats",
    "strip_prefix",
    "verify",
    "verify_delta",
    "wrap",
]


def _hook(name: str) -> Callable[..., Any]:
    from importlib import import_module

    module, attribute = _HOOKS[name]
    found: Callable[..., Any] = getattr(import_module(f"ckptkit.{module}"), attribute)
    return found


hooks.find = _hook


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    from importlib import import_module

    from ckptkit import edits

    module = _PLACES.get(name) or edits.PUBLIC[name]
    attribute = "open_checkpoint" if name == "open" else name
    return getattr(import_module(f"ckptkit.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
