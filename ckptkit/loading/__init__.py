"""Load checkpoints into torch: ``load``, ``load_into``, and comparing with models.

Input: a checkpoint, and a map_location or a model. Output: torch tensors, a filled model, or a diff
against a model. Uses core, compute, quantized, edits, formats, api, analysis and lora. Classes
named in a file are never imported or called.
"""

from ckptkit.loading.model import LoadReport, diff, load_into
from ckptkit.loading.tensors import MapLocation, load

__all__ = ["LoadReport", "MapLocation", "diff", "load", "load_into"]
