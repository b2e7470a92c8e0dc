"""Read files and folders at URLs through fsspec.

In: a URL. Out: a ByteSource or a Folder. ``files`` imports fsspec; to distinguish URLs from paths,
use `core.text.is_url`. Uses core.
"""
