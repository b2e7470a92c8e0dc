"""Values that all other subpackages use: byte sources, tensors, trees, Checkpoint and Plan.

The values are frozen, and describe byte ranges in files. `ckptkit.core` parses no file format,
decodes no tensor elements, and imports no other subpackage of ckptkit. Its modules also define
errors with exit codes, limits, dtypes, and functions that format messages.
"""

__version__ = "0.1.0"
