"""Read and write pickles without importing or calling anything that a pickle names.

``machine`` runs the opcodes of a pickle.
``values`` builds a tree with lazy tensors.
``writer`` writes a tree as a pickle of protocol 2.
``judge`` decides which calls are harmless.
``policy`` decides which values of a tree may be written.

This package imports only `ckptkit.core` and `ckptkit.compute`.
"""
