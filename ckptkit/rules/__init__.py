"""Tensor rules: a language in which each line maps source tensors to target tensors.

The input is a list of rules, and the names and shapes of the source tensors. The output is a list
of strided copies of elements for each target tensor. This package reads no checkpoints. It uses
core and compute.
"""
