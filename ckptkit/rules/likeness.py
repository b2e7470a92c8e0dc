"""The names and shapes that a checkpoint must have: those of another one."""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import plural, quoted
from ckptkit.core.text import shape as shape_text

Shapes = Mapping[str, Shape | None]  # None: the shape is not known


class UnlikeError(TensorError):
    """The names or shapes are not those that were asked for."""


def check_like(checkpoint: Checkpoint, expected: Shapes, name: str) -> Checkpoint:
    """The checkpoint, if its weights have exactly these names and shapes. Raises UnlikeError."""
    found = {key: tensor.shape for key, tensor in checkpoint.weights.items()}
    faults = []
    if missing := [key for key in expected if key not in found]:
        faults.append(f"{plural(len(missing), 'key')} missing: {quoted(missing)}")
    if more := [key for key in found if key not in expected]:
        faults.append(f"{plural(len(more), 'key')} too many: {quoted(more)}")
    shapes = [
        f"{key} {shape_text(found[key])} instead of {shape_text(shape)}"
        for key, shape in expected.items()
        if shape is not None and key in found and found[key] != shape
    ]
    if shapes:
        faults.append(f"of another shape: {', '.join(shapes[:4])}")
    if faults:
        raise UnlikeError(f"is not like {name}: {'; '.join(faults)}", hint="nothing was written")
    return checkpoint
