"""The language of tensor rules. Each rule maps source tensors to target tensors.

Given a list of rules, and the names and shapes of source tensors, this package computes strided
copies of elements for each target tensor. This package reads no checkpoints. The
package uses core and compute.
"""
