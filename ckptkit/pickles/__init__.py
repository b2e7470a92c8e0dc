"""Pickles, read symbolically and written back: nothing is imported, nothing is called.

In: bytes of a stream. Out: a tree with lazy tensors; and from a tree, the bytes of a pickle of
protocol 2. ``machine`` runs the opcodes for a builder: ``values`` builds the tree, and the room
scanning builds a trace. ``judge`` decides what is harmless, ``policy`` what may be written, and
``writer`` writes. Uses core and compute.
"""
