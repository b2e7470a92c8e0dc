"""The language of tensor rules. Each rule maps source tensors to target tensors.

This package takes a list of rules, and the names and shapes of the source tensors. For each target
tensor, it returns a list of strided copies of elements. This package reads no checkpoints, and uses
core and compute.
"""
