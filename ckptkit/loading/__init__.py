"""The torch side, for users: weights as torch tensors, into a model, compared with a model.

``tensors`` makes torch's tensors, on the devices that ``map_location`` says; ``values`` makes Python's own of the rest
of a tree; ``model`` fits weights into modules. No class or function that a file names is imported or called.
"""

from ckptkit.loading.model import LoadReport, diff, load_into
from ckptkit.loading.tensors import MapLocation
from ckptkit.loading.values import load

__all__ = ["LoadReport", "MapLocation", "diff", "load", "load_into"]
