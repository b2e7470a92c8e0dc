"""Tensor rules: one line says which tensors become which, and how their elements are arranged.

In: lines of the notation, and names and shapes of tensors. Out: for each target, strided copies of
elements. The language alone, which knows no checkpoint. Uses core and compute.
"""
