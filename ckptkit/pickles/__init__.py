"""Pickles, read symbolically and written back: nothing is imported, nothing is called.

In: bytes of a stream. Out: a tree with lazy tensors; and from a tree, the bytes of a pickle of
protocol 2. ``machine`` runs the opcodes for builders: ``values`` makes the tree, the room scanning
traces. ``judge`` says what is harmless, ``writer`` writes. Uses core and compute.
"""
