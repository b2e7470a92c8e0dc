"""Values that all other subpackages use: byte sources, tensors, trees, Checkpoint and Plan.

Input: files and byte ranges. Output: frozen values that describe the bytes. This subpackage parses
no file format and decodes no tensor elements. It imports no other subpackage of ckptkit. It also
defines errors with exit codes, limits, dtypes, and functions that format messages.
"""

__version__ = "0.1.0"
