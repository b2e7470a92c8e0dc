"""Make, apply, combine and verify deltas. A delta is the difference between two checkpoints.

While writing the output, ckptkit computes each changed tensor from its old bytes and the delta. If
a checksum does not match, the destination remains unchanged. This package uses core, compute,
formats, publish and api.
"""

from ckptkit.deltas.apply import apply, apply_delta, verify_delta
from ckptkit.deltas.forms import Change, Delta, read_all
from ckptkit.deltas.make import delta, squash_delta

__all__ = [
    "Change", "Delta", "apply", "apply_delta", "delta", "read_all", "squash_delta", "verify_delta",
]  # fmt: skip
