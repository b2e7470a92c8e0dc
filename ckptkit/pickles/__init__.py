"""Pickles, read symbolically and written back: nothing is imported, nothing is called.

Reading: in, bytes of a stream; out, a tree with lazy tensors. Writing: in, a tree; out, a pickle of
protocol 2. ``machine`` runs the opcodes for a builder: ``values`` builds the tree, the room
scanning a trace. ``judge`` decides what is harmless, ``policy`` what is written. Uses core and
compute.
"""
