"""Files and folders behind URLs, through fsspec.

In: a URL. Out: a ByteSource or a Folder. ``urls`` only tells a URL from a path; fsspec is imported
with ``files``. Uses core.
"""
