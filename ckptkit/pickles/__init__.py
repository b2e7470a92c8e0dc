"""Pickles, read symbolically and written back: nothing is imported, nothing is called.

In: bytes of a stream, or a tree. Out: a tree with lazy tensors, or a pickle of protocol 2.
``machine`` runs the opcodes for a builder: ``values`` builds the tree, the room scanning a trace.
``judge`` decides what is harmless, ``policy`` what is written. Uses core and compute.
"""
