"""Make, apply, join and verify deltas: the differences between two checkpoints of a training run.

Applying a delta is a plan of byte ranges. Changed tensors are computed from their old bytes and the
delta while the output is written. Checksums are verified before the output appears. Uses core,
compute, formats, publish and api.
"""

from ckptkit.deltas.apply import apply, apply_delta, verify_delta
from ckptkit.deltas.forms import Change, Delta, read_all
from ckptkit.deltas.make import delta, squash_delta

__all__ = [
    "Change", "Delta", "apply", "apply_delta", "delta", "read_all", "squash_delta", "verify_delta",
]  # fmt: skip
