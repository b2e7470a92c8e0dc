"""The values that all other rooms use: byte sources, tensors, the tree, Checkpoint, Plan.

In: bytes and ranges of bytes. Out: frozen values that describe them; this room reads no file format
and no tensor elements. Uses no other room. Also here: errors with their exit codes, limits, dtypes,
text for messages.
"""

__version__ = "0.1.0"
