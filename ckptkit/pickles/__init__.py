"""Pickles, read symbolically and written back: nothing is imported, nothing is called.

In: bytes of a stream. Out: a tree with lazy tensors; and from a tree, the bytes of a pickle of
protocol 2. ``allowlist`` judges names, ``machine`` reads, ``writer`` writes. Uses core and compute.
"""
