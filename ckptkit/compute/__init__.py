"""Arithmetic on tensor elements in byte ranges.

Input: a `Derived` (an operation on byte ranges). Output: the computed bytes in small blocks,
statistics, or torch storages. `ckptkit.compute` imports `ckptkit.core`. The functions import numpy
and torch only when needed. A command that only copies bytes imports neither numpy nor torch.
"""
