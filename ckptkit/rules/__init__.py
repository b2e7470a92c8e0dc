"""Tensor rules: each line maps source tensors to target tensors and arranges their elements.

In: lines of the notation, and names and shapes of tensors. Out: for each target, strided copies of
elements. This room contains only the language. It does not use checkpoints. Uses core and compute.
"""
