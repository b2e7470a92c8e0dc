"""Load checkpoints as torch tensors or into a model, and compare checkpoints with models.

Loading never imports or calls a class that a file names. This package uses core, compute,
quantized, edits, formats, api, analysis and lora.
"""

from ckptkit.loading.model import LoadReport, load_into
from ckptkit.loading.tensors import MapLocation, load

__all__ = ["LoadReport", "MapLocation", "load", "load_into"]
