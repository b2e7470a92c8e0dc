"""Files and folders behind URLs, through fsspec.

In: a URL. Out: a ByteSource or a Folder. fsspec is imported with ``files``; what only tells a URL
from a path is `core.text.is_url`. Uses core.
"""
