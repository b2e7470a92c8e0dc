"""Functions of later rooms that earlier rooms call. `ckptkit/__init__.py` sets each function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

open_checkpoint: Callable[..., Any]
with_value: Callable[..., Any]
drop_entry: Callable[..., Any]
map_weights: Callable[..., Any]
numpy: Callable[..., Any]
elements: Callable[..., Any]
torch_tensor: Callable[..., Any]
html: Callable[..., Any]
pickles: Callable[..., Any]
lora_hint: Callable[..., Any]
