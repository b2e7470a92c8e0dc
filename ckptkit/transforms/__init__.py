"""Checkpoint -> Checkpoint, pure: names, devices, dtypes, structure, combinations.

In: one or more checkpoints. Out: a new one over the same byte ranges; no tensor is read, nothing is
written. Uses core, compute, pickles, quantized and rules.
"""
