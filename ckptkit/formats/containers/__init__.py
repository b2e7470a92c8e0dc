"""Readers of zip, tar and strict JSON, which several formats use, and the layout of zip files.

In: a byte source. Out: directories of members, each a range of bytes; and the plan of a zip file.
The readers are strict: input that two readers could understand differently is refused.
"""
