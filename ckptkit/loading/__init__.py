"""Checkpoint -> torch: ``load``, ``load_into``, and models to compare with.

In: a checkpoint and a map_location or a model. Out: torch tensors; a filled model; a diff against a
model. Uses core, compute, quantized, edits, formats, api, analysis and lora. No class that a
file names is imported or called.
"""

from ckptkit.loading.model import LoadReport, diff, load_into
from ckptkit.loading.tensors import MapLocation, load

__all__ = ["LoadReport", "MapLocation", "diff", "load", "load_into"]
