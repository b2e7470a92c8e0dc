"""Make, apply, combine and verify deltas. A delta is the difference between two checkpoints.

To apply a delta, ckptkit plans the byte ranges of the output, and writes a temporary file. While
writing, ckptkit computes changed tensors from their old bytes and the delta. If all checksums
match, the temporary file becomes the output. This package uses core, compute, formats, publish and
api.
"""

from ckptkit.deltas.apply import apply, apply_delta, verify_delta
from ckptkit.deltas.forms import Change, Delta, read_all
from ckptkit.deltas.make import delta, squash_delta

__all__ = [
    "Change", "Delta", "apply", "apply_delta", "delta", "read_all", "squash_delta", "verify_delta",
]  # fmt: skip
