"""Deltas: what a training step changed, made of two checkpoints, applied, joined and checked.

To apply one is a plan of byte ranges: a changed tensor is computed from its old bytes and a frame
while the output is written, and its checksum compared before the output appears.
Uses core, compute, formats, publish and api.
"""

from ckptkit.deltas.apply import apply, apply_delta, verify_delta
from ckptkit.deltas.forms import Change, Delta, read_all
from ckptkit.deltas.make import delta, squash_delta

__all__ = [
    "Change", "Delta", "apply", "apply_delta", "delta", "read_all", "squash_delta", "verify_delta",
]  # fmt: skip
