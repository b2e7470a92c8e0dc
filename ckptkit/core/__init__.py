"""The values everything else is made of: byte sources, tensors, the tree, Checkpoint, Plan.

In: bytes and ranges of bytes. Out: frozen values that describe them; nothing here reads a format or
a tensor. Uses no other room. Also here: errors with their exit codes, limits, dtypes, text for
messages.
"""

__version__ = "0.1.0"
