"""Read and write pickles without importing or calling anything that a pickle names.

The input is the bytes of a pickle, or a tree. The output is a tree with lazy tensors, or a pickle
of protocol 2 or 4. ``judge`` decides which calls are harmless. ``policy`` decides which values of a
tree may be written. This package imports `ckptkit.core` and `ckptkit.compute`.
"""
