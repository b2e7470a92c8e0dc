"""Read, change and convert PyTorch checkpoints without executing them or loading unneeded tensors.

Each public name is imported on first use, so ``import ckptkit`` itself is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def _open_checkpoint(source: Any) -> Checkpoint:
    from ckptkit.api import open_checkpoint

    return open_checkpoint(source)


def _with_value(checkpoint: Checkpoint, path: str, value: object) -> Checkpoint:
    from ckptkit.edits.structure import with_value

    return with_value(checkpoint, path, value)


def _drop_entry(checkpoint: Checkpoint, path: str) -> Checkpoint:
    from ckptkit.edits.structure import drop_entry

    return drop_entry(checkpoint, path)


def _map_weights(
    checkpoint: Checkpoint, function: Callable[..., Any], keys: str | Iterable[str]
) -> Checkpoint:
    from ckptkit.edits.elements import map_weights

    return map_weights(checkpoint, function, keys)


def _numpy(tensor: Tensor) -> Any:
    from ckptkit.compute.torch_bridge import numpy

    return numpy(tensor)


def _elements(tensor: Tensor, index: object) -> Any:
    from ckptkit.compute.torch_bridge import elements

    return elements(tensor, index)


def _torch_tensor(tensor: Tensor, device: object) -> Any:
    from ckptkit.compute.torch_bridge import torch_tensor

    return torch_tensor(tensor, device)


def _html(value: object) -> str:
    from ckptkit.views.notebook import html

    return html(value)


def _pickles_inside(source: Any) -> Any:
    from ckptkit.scanning.find import pickles

    return pickles(source, inside=True)


def _lora_hint(adapter: Checkpoint, others: Sequence[Checkpoint]) -> str:
    from ckptkit.lora.merge import hint

    return hint(adapter, others)


# The functions import their rooms on first use. The rooms of these functions import `core`, so
# `core` cannot import these rooms.
hooks.open_checkpoint = _open_checkpoint
hooks.with_value = _with_value
hooks.drop_entry = _drop_entry
hooks.map_weights = _map_weights
hooks.numpy = _numpy
hooks.elements = _elements
hooks.torch_tensor = _torch_tensor
hooks.html = _html
hooks.pickles_inside = _pickles_inside
hooks.lora_hint = _lora_hint


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
